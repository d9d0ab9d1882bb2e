//! Norms with column statistics on the CPU. Forward: measure the batch, choose the statistics of x̂ and update the
//! state, normalise. Backward: the gradient.

use super::call::{ColumnGradients, ColumnViews};
use super::passes::{self, GradientCoefficients};
use super::{BatchStatistics, ColumnNormKernel, ColumnOptions, State, Stats};
use crate::cpu::parallel::{self, Shared};
use crate::cpu::{memory, Accumulator, Element};
use crate::error::Result;
use crate::host::host;
use std::ops::Range;
use tch::Tensor;

impl ColumnViews {
    /// Returns the running state, in the call's copies of the buffers.
    ///
    /// # Safety
    /// The conditions of [`View::slice_mut`] hold: the copies of the buffers belong to the call.
    unsafe fn state<'a>(&self) -> State<'a> {
        State {
            first: self.first.slice_mut(),
            second: self.second.slice_mut(),
            iters: self.iters.slice_mut(),
            refused: self.refused.slice_mut(),
            largest: self.largest(),
        }
    }
}

/// Converts numbers to the computing type.
fn as_acc<A: Accumulator>(v: &[f64]) -> Vec<A> {
    memory::collected(v.iter().map(|v| A::from_f64(*v)))
}

/// Returns the weight, or ones if it is empty.
fn or_ones<A: Accumulator>(weight: &[A], cols: usize) -> Vec<A> {
    if weight.is_empty() {
        memory::filled(A::ONE, cols)
    } else {
        memory::collected(weight.iter().copied())
    }
}

/// Returns Σd and Σd² per column with d = x − guess, over all real rows; threads share the work. If `guess` is empty, d
/// is x, and Σd is left out.
fn sums<E: Element>(cols: usize, x: &[E], pad: &[u8], guess: &[E::Acc]) -> (Vec<f64>, Vec<f64>) {
    let (mut sum, mut squares) = (memory::filled(0.0, guess.len()), memory::filled(0.0, cols));
    parallel::sum_over_rows(x.len() / cols.max(1), cols, [&mut sum, &mut squares], |rows, all, [sum, squares]| {
        passes::sums::<E>(cols, &x[all], part(pad, &rows), guess, sum, squares);
    });
    (sum, squares)
}

/// Returns the mask's part for these rows.
fn part<'a>(pad: &'a [u8], rows: &Range<usize>) -> &'a [u8] {
    if pad.is_empty() {
        pad
    } else {
        &pad[rows.clone()]
    }
}

/// Measures this process's batch, without the rows that `pad` marks. With `release` and padding it also takes the mean
/// square of all rows.
fn measure<E: Element>(norm: &ColumnNormKernel, cols: usize, x: &[E], pad: &[u8], release: bool) -> BatchStatistics {
    let rows = x.len() / cols.max(1);
    let count = (rows - pad.iter().filter(|v| **v != 0).count()) as f64;
    // Divides the sums by the number of rows.
    let mean_of = |mut sums: Vec<f64>, n: f64| {
        sums.iter_mut().for_each(|s| *s /= n.max(1.0));
        sums
    };
    if !norm.centred {
        // With an empty guess d is x, and the second sum is Σx².
        let square = mean_of(sums(cols, x, pad, &[]).1, count);
        let needs_all = release && !pad.is_empty();
        let square_of_all = needs_all.then(|| mean_of(sums(cols, x, &[], &[]).1, rows as f64));
        return BatchStatistics { count, mean: memory::filled(0.0, cols), square, square_of_all, rows: rows as f64 };
    }
    // Take moments of d = x − guess, where the guess is the mean of the first real rows: (guess − μ)² is at most
    // rows/64·σ² and typically σ²/64. So mean d² − (mean d)² loses at most log₂(1 + rows/64) bits, and typically none.
    let first = pad.iter().position(|v| *v == 0).unwrap_or(0);
    let guess_rows = first..(first + passes::BLOCK_ROWS).min(rows);
    let zero = memory::filled(E::Acc::ZERO, cols);
    let [mut sum, mut squares] = [(); 2].map(|()| memory::filled(0.0, cols));
    let guess_pad = part(pad, &guess_rows);
    let guess_x = &x[guess_rows.start * cols..guess_rows.end * cols];
    passes::sums::<E>(cols, guess_x, guess_pad, &zero, &mut sum, &mut squares);
    let real_rows = guess_rows.len() - guess_pad.iter().filter(|v| **v != 0).count();
    let guess: Vec<E::Acc> = as_acc(&mean_of(sum, real_rows as f64));
    let (sum, squares) = sums(cols, x, pad, &guess);
    // The mean is guess + offset, and the variance is mean d² − offset².
    let (offset, square) = (mean_of(sum, count), mean_of(squares, count));
    let variance = square.iter().zip(&offset).map(|(s, m)| {
        let variance = s - m * m;
        // `max` would turn a NaN into 0.
        if variance < 0.0 {
            0.0
        } else {
            variance
        }
    });
    let square = memory::collected(variance);
    let mean = memory::collected(offset.iter().zip(&guess).map(|(m, g)| m + g.to_f64()));
    BatchStatistics { count, mean, square, square_of_all: None, rows: rows as f64 }
}

/// Merges the batches of all ranks (Chan, Golub and LeVeque 1979) from their counts, means and mean squares about the
/// means. Computing mean x² − mean² instead would cancel digits.
fn over_ranks(batch: BatchStatistics, o: &ColumnOptions) -> Result<BatchStatistics> {
    let Some(ranks) = o.ranks else { return Ok(batch) };
    let cols = batch.square.len();
    let of_all = batch.square_of_all.as_ref().unwrap_or(&batch.square);
    // Each rank sends its counts of real rows and of all rows, then mean, square and square of all rows per column.
    let counts = [batch.count, batch.rows];
    let sent = memory::collected(counts.iter().chain(&batch.mean).chain(&batch.square).chain(of_all).copied());
    let gathered: Vec<f64> = host("statistics", &ranks.gather(&Tensor::f_from_slice(&sent)?)?)?;
    // `batches` holds each rank's two counts, and an iterator over its three statistics.
    let batches: Vec<_> = gathered.chunks(sent.len()).map(|r| (r[0], r[1], r[2..].chunks(cols.max(1)))).collect();
    let (count, rows) = batches.iter().fold((0.0, 0.0), |(n, all), (count, rows, _)| (n + count, all + rows));
    let zeros = || memory::filled(0.0, cols);
    let mut merged = BatchStatistics { count, rows, mean: zeros(), square: zeros(), square_of_all: None };
    let mut square_of_all = zeros();
    // The means of all ranks are the ranks' means, weighted by their shares of the rows.
    for (own_count, own_rows, parts) in &batches {
        let (share, share_of_all) = (own_count / count.max(1.0), own_rows / rows.max(1.0));
        for (to, (from, share)) in [&mut merged.mean, &mut merged.square, &mut square_of_all]
            .into_iter()
            .zip(parts.clone().zip([share, share, share_of_all]))
        {
            to.iter_mut().zip(from).for_each(|(to, from)| *to += share * from);
        }
    }
    // A rank's square is about its own mean; about the common mean it is larger by the square of their distance.
    for (own_count, _, parts) in &batches {
        let own_means = parts.clone().next().unwrap_or(&[]);
        for ((square, mean), own_mean) in merged.square.iter_mut().zip(&merged.mean).zip(own_means) {
            *square += own_count / count.max(1.0) * (own_mean - mean).powi(2);
        }
    }
    merged.square_of_all = o.release.then_some(square_of_all);
    Ok(merged)
}

/// Computes y and its statistics, and updates the state in training.
pub fn forward<E: Element>(norm: &ColumnNormKernel, v: &ColumnViews) -> Result<()> {
    let cols = v.stats.cols();
    // SAFETY: C++ gave contiguous tensors of E (parameters and statistics in its accumulation type) and a mask of
    // bytes; only this call uses y, stats and the copies of the buffers.
    let (x, weight, bias, pad) =
        unsafe { (v.x.slice::<E>(), v.weight.slice::<E::Acc>(), v.bias.slice(), v.pad.slice::<u8>()) };
    // SAFETY: only this call uses y, stats and the copies of the buffers.
    let (y, out, mut state) = unsafe { (v.y.slice_mut::<E>(), v.stats.slice_mut::<E::Acc>(), v.state()) };
    if !v.given {
        let o = &v.options;
        // Evaluation with running statistics does not need the batch's own.
        let batch = match o.train || state.first.is_empty() {
            true => over_ranks(measure(norm, cols, x, pad, o.release), o)?,
            false => BatchStatistics { mean: memory::filled(0.0, cols), ..BatchStatistics::default() },
        };
        (norm.settle)(&batch, &mut state, o).write(out);
    }
    // These are the first two rows of the statistics.
    let (shift, scale) = (&out[..cols], &out[cols..2 * cols]);
    let (weight, zero) = (or_ones(weight, cols), memory::filled(E::Acc::ZERO, cols));
    let bias: &[E::Acc] = if bias.is_empty() { &zero } else { bias };
    // PowerNorm's release mode normalises padding too.
    let pad = if v.options.release { &[] } else { pad };
    let shared = Shared::new(y);
    parallel::over_rows(x.len() / cols.max(1), cols, |rows, all| {
        // SAFETY: the ranges are disjoint and inside y.
        let y = unsafe { shared.slice(all.clone()) };
        passes::normalise::<E>(cols, &x[all], part(pad, &rows), shift, scale, &weight, bias, y);
    });
    Ok(())
}

/// Computes dx and the parameters' gradients, and updates PowerNorm's ν in training.
pub fn backward<E: Element>(norm: &ColumnNormKernel, v: &ColumnViews, d: &ColumnGradients) -> Result<()> {
    let cols = v.stats.cols();
    // SAFETY: the conditions of `forward` hold for these tensors.
    let (dy, x, weight, pad, stats_rows) = unsafe {
        (d.dy.slice::<E>(), v.x.slice::<E>(), v.weight.slice::<E::Acc>(), v.pad.slice::<u8>(), v.stats.slice())
    };
    // SAFETY: the gradients are fresh, and only this call uses the copies of the buffers.
    let (dx, dweight, dbias, mut state) =
        unsafe { (d.dx.slice_mut::<E>(), d.dweight.slice_mut::<E::Acc>(), d.dbias.slice_mut::<E::Acc>(), v.state()) };
    let o = &v.options;
    // PowerNorm's release mode treats padding as real rows.
    let pad = if o.release { &[] } else { pad };
    let stats = Stats::read::<E::Acc>(stats_rows, cols);
    let (shift, scale) = (as_acc::<E::Acc>(&stats.shift), as_acc::<E::Acc>(&stats.scale));
    let [mut sum, mut sum_x] = [(); 2].map(|()| memory::filled(0.0, cols));
    parallel::sum_over_rows(x.len() / cols.max(1), cols, [&mut sum, &mut sum_x], |rows, all, [sum, sum_x]| {
        passes::gradient_sums::<E>(cols, &dy[all.clone()], &x[all], part(pad, &rows), &shift, &scale, sum, sum_x);
    });
    for (out, sums) in [(dweight, &sum_x), (dbias, &sum)] {
        out.iter_mut().zip(sums).for_each(|(d, s)| *d = E::Acc::from_f64(*s));
    }
    // dx or ν depends on the sums over all ranks only if x̂ uses the batch's own statistics, or ν is updated.
    if let (Some(ranks), true) = (o.ranks, stats.exact || (norm.approximate && o.train)) {
        let own = memory::collected(sum.iter().chain(&sum_x).copied());
        let totals: Vec<f64> = host("statistics", &ranks.sum(&Tensor::f_from_slice(&own)?)?)?;
        sum.copy_from_slice(&totals[..cols]);
        sum_x.copy_from_slice(&totals[cols..]);
    }
    let (p, q, r) = slopes(norm, &stats, &or_ones(weight, cols), (&sum, &sum_x), &mut state, o);
    let (p, q, r) = (as_acc::<E::Acc>(&p), as_acc::<E::Acc>(&q), as_acc::<E::Acc>(&r));
    let shared = Shared::new(dx);
    parallel::over_rows(x.len() / cols.max(1), cols, |rows, all| {
        // SAFETY: the ranges are disjoint and inside dx.
        let dx = unsafe { shared.slice(all.clone()) };
        let slopes = GradientCoefficients { p: &p, q: &q, r: &r };
        passes::gradient::<E>(cols, &dy[all.clone()], &x[all], part(pad, &rows), &shift, &scale, slopes, dx);
    });
    Ok(())
}

/// Returns p, q and r of dx = p⊙dy − q⊙x̂ − r, and updates PowerNorm's ν in training. `sum` is Σ dy, and `sum_x` is
/// Σ dy⊙x̂. With λ = w⊙Σ dy⊙x̂/rows and γ = mean x̂², the buffer e = ν/(1 − α_b) becomes e + λ − ν·γ.
fn slopes<A: Accumulator>(
    norm: &ColumnNormKernel,
    stats: &Stats,
    weight: &[A],
    (sum, sum_x): (&[f64], &[f64]),
    state: &mut State,
    o: &ColumnOptions,
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let by_weight = |v: &[f64]| memory::collected(v.iter().zip(weight).map(|(v, w)| v * w.to_f64()));
    let p = by_weight(&stats.slope);
    let mut lambda = by_weight(sum_x);
    lambda.iter_mut().for_each(|v| *v *= stats.share);
    let [mut q, mut r] = [(); 2].map(|()| memory::filled(0.0, p.len()));
    if stats.exact {
        q = memory::collected(stats.slope.iter().zip(&lambda).map(|(slope, lambda)| slope * lambda));
        if norm.centred {
            r = memory::collected(p.iter().zip(sum).map(|(p, sum)| p * sum * stats.share));
        }
    }
    if norm.approximate && o.train && !state.second.is_empty() {
        let nu = memory::collected(state.second.iter().map(|ema| (1.0 - o.alpha_bwd) * ema));
        if !stats.exact {
            q = memory::collected(stats.slope.iter().zip(&nu).map(|(slope, nu)| slope * nu));
        }
        let terms = state.second.iter().zip(&lambda).zip(nu.iter().zip(&stats.gamma));
        let updated = memory::collected(terms.map(|((ema, lambda), (nu, gamma))| ema + lambda - nu * gamma));
        if state.accepts(stats.share, &[&updated]) {
            state.second.copy_from_slice(&updated);
        }
    }
    (p, q, r)
}
