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
fn as_acc<A: Accumulator>(numbers: &[f64]) -> Vec<A> {
    memory::collected(numbers.iter().map(|number| A::from_f64(*number)))
}

/// Returns the weight, or `cols` ones if it is empty.
fn or_ones<A: Accumulator>(weight: &[A], cols: usize) -> Vec<A> {
    if weight.is_empty() {
        memory::filled(A::ONE, cols)
    } else {
        memory::collected(weight.iter().copied())
    }
}

/// Returns Σd and Σd² per column with d = x − guess, over the rows that `pad` does not mark; threads share the work. If
/// `guess` is empty, d is x, and Σd is left out (empty).
fn sums<E: Element>(cols: usize, x: &[E], pad: &[u8], guess: &[E::Acc]) -> (Vec<f64>, Vec<f64>) {
    let (mut sum, mut squares) = (memory::filled(0.0, guess.len()), memory::filled(0.0, cols));
    parallel::sum_over_rows(x.len() / cols.max(1), cols, [&mut sum, &mut squares], |rows, numbers, [sum, squares]| {
        passes::sums::<E>(cols, &x[numbers], part(pad, &rows), guess, sum, squares);
    });
    (sum, squares)
}

/// Returns the mask's part for these rows; an empty mask stays empty.
fn part<'a>(pad: &'a [u8], rows: &Range<usize>) -> &'a [u8] {
    if pad.is_empty() {
        pad
    } else {
        &pad[rows.clone()]
    }
}

/// Returns the statistics of this process's batch, without the rows that `pad` marks. If there are such rows, `release`
/// adds the mean square of all rows, as PowerNorm's released variant needs it.
fn measure<E: Element>(norm: &ColumnNormKernel, cols: usize, x: &[E], pad: &[u8], release: bool) -> BatchStatistics {
    let rows = x.len() / cols.max(1);
    let count = (rows - pad.iter().filter(|v| **v != 0).count()) as f64;
    // Divides sums over n rows by n.
    let mean_of = |mut sums: Vec<f64>, n: f64| {
        sums.iter_mut().for_each(|sum| *sum /= n.max(1.0));
        sums
    };
    if !norm.centred {
        // With an empty guess d is x, and the second sum is Σx².
        let square = mean_of(sums(cols, x, pad, &[]).1, count);
        let needs_all = release && !pad.is_empty();
        let square_of_all = needs_all.then(|| mean_of(sums(cols, x, &[], &[]).1, rows as f64));
        return BatchStatistics { count, mean: memory::filled(0.0, cols), square, square_of_all, rows: rows as f64 };
    }
    // The variance is mean d² − (mean d)² with d = x − guess, where the guess is the mean of the first 64 rows. As
    // (guess − μ)² is at most rows/64·σ² and typically σ²/64, the difference loses at most log₂(1 + rows/64) bits to
    // cancellation, and typically none.
    let first_real = pad.iter().position(|v| *v == 0).unwrap_or(0);
    let guess_rows = first_real..(first_real + passes::BLOCK_ROWS).min(rows);
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
    let variance = square.iter().zip(&offset).map(|(square, offset)| {
        let variance = square - offset * offset;
        // Rounding may make the variance negative. `max(0.0)` would turn a NaN into 0.
        if variance < 0.0 {
            0.0
        } else {
            variance
        }
    });
    let square = memory::collected(variance);
    let mean = memory::collected(offset.iter().zip(&guess).map(|(offset, guess)| offset + guess.to_f64()));
    BatchStatistics { count, mean, square, square_of_all: None, rows: rows as f64 }
}

/// Returns the statistics of the batches of all ranks together; `batch` is this rank's. They are merged from the
/// counts, means and mean squares about the means (Chan, Golub and LeVeque 1979). Computing mean x² − mean² instead
/// would cancel digits.
fn over_ranks(batch: BatchStatistics, options: &ColumnOptions) -> Result<BatchStatistics> {
    let Some(ranks) = options.ranks else { return Ok(batch) };
    let cols = batch.square.len();
    let own_square_of_all = batch.square_of_all.as_ref().unwrap_or(&batch.square);
    // Each rank sends its counts of real rows and of all rows, then mean, square and square of all rows per column.
    let counts = [batch.count, batch.rows];
    let sent =
        memory::collected(counts.iter().chain(&batch.mean).chain(&batch.square).chain(own_square_of_all).copied());
    let gathered: Vec<f64> = host("statistics", &ranks.gather(&Tensor::f_from_slice(&sent)?)?)?;
    // `batches` holds each rank's two counts, and an iterator over its three statistics.
    let batches: Vec<_> = gathered.chunks(sent.len()).map(|r| (r[0], r[1], r[2..].chunks(cols.max(1)))).collect();
    let (count, rows) = batches.iter().fold((0.0, 0.0), |(real, all), batch| (real + batch.0, all + batch.1));
    let zeros = || memory::filled(0.0, cols);
    let mut merged = BatchStatistics { count, rows, mean: zeros(), square: zeros(), square_of_all: None };
    let mut square_of_all = zeros();
    // The statistics of all rows are the ranks' statistics, weighted by the ranks' shares of the rows.
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
    merged.square_of_all = options.release.then_some(square_of_all);
    Ok(merged)
}

/// Computes y and its statistics, and updates the running state in training; E is the storage type of x and y.
pub fn forward<E: Element>(norm: &ColumnNormKernel, v: &ColumnViews) -> Result<()> {
    let cols = v.stats.cols();
    // SAFETY: the C++ operator passed contiguous tensors of E (parameters and statistics in its accumulation type) and
    // a mask of bytes.
    let (x, weight, bias, pad) =
        unsafe { (v.x.slice::<E>(), v.weight.slice::<E::Acc>(), v.bias.slice(), v.pad.slice::<u8>()) };
    // SAFETY: only this call uses y, stats and the copies of the buffers.
    let (y, stats, mut state) = unsafe { (v.y.slice_mut::<E>(), v.stats.slice_mut::<E::Acc>(), v.state()) };
    if !v.given {
        let options = &v.options;
        // Evaluation with running statistics does not need the batch's own.
        let batch = match options.train || state.first.is_empty() {
            true => over_ranks(measure(norm, cols, x, pad, options.release), options)?,
            false => BatchStatistics { mean: memory::filled(0.0, cols), ..BatchStatistics::default() },
        };
        (norm.settle)(&batch, &mut state, options).write(stats);
    }
    // The first two rows of the statistics are the shift and the scale.
    let (shift, scale) = (&stats[..cols], &stats[cols..2 * cols]);
    let (weight, zero) = (or_ones(weight, cols), memory::filled(E::Acc::ZERO, cols));
    let bias: &[E::Acc] = if bias.is_empty() { &zero } else { bias };
    // PowerNorm's release mode normalises padding too.
    let pad = if v.options.release { &[] } else { pad };
    let shared = Shared::new(y);
    parallel::over_rows(x.len() / cols.max(1), cols, |rows, numbers| {
        // SAFETY: the ranges are disjoint and inside y.
        let y = unsafe { shared.slice(numbers.clone()) };
        passes::normalise::<E>(cols, &x[numbers], part(pad, &rows), shift, scale, &weight, bias, y);
    });
    Ok(())
}

/// Computes dx and the parameters' gradients for the storage type E. In training it also updates PowerNorm's running ν,
/// a statistic of the gradients.
pub fn backward<E: Element>(norm: &ColumnNormKernel, v: &ColumnViews, d: &ColumnGradients) -> Result<()> {
    let cols = v.stats.cols();
    // SAFETY: the C++ operator passed contiguous tensors of E (parameters and statistics in its accumulation type) and
    // a mask of bytes.
    let (dy, x, weight, pad, stats_rows) = unsafe {
        (d.dy.slice::<E>(), v.x.slice::<E>(), v.weight.slice::<E::Acc>(), v.pad.slice::<u8>(), v.stats.slice())
    };
    // SAFETY: the gradients are new tensors, and only this call uses the copies of the buffers.
    let (dx, dweight, dbias, mut state) =
        unsafe { (d.dx.slice_mut::<E>(), d.dweight.slice_mut::<E::Acc>(), d.dbias.slice_mut::<E::Acc>(), v.state()) };
    let options = &v.options;
    // PowerNorm's release mode treats padding as real rows.
    let pad = if options.release { &[] } else { pad };
    let stats = Stats::read::<E::Acc>(stats_rows, cols);
    let (shift, scale) = (as_acc::<E::Acc>(&stats.shift), as_acc::<E::Acc>(&stats.scale));
    // `sum` is Σ dy per column, and `sum_x` is Σ dy⊙x̂.
    let [mut sum, mut sum_x] = [(); 2].map(|()| memory::filled(0.0, cols));
    parallel::sum_over_rows(x.len() / cols.max(1), cols, [&mut sum, &mut sum_x], |rows, numbers, [sum, sum_x]| {
        let (dy, x) = (&dy[numbers.clone()], &x[numbers]);
        passes::gradient_sums::<E>(cols, dy, x, part(pad, &rows), &shift, &scale, sum, sum_x);
    });
    // dγ is Σ dy⊙x̂, and dβ is Σ dy.
    for (gradient, sums) in [(dweight, &sum_x), (dbias, &sum)] {
        gradient.iter_mut().zip(sums).for_each(|(to, sum)| *to = E::Acc::from_f64(*sum));
    }
    // dx or ν depends on the sums over all ranks only if x̂ uses the batch's own statistics, or ν is updated.
    if let (Some(ranks), true) = (options.ranks, stats.exact || (norm.approximate && options.train)) {
        let own = memory::collected(sum.iter().chain(&sum_x).copied());
        let totals: Vec<f64> = host("statistics", &ranks.sum(&Tensor::f_from_slice(&own)?)?)?;
        sum.copy_from_slice(&totals[..cols]);
        sum_x.copy_from_slice(&totals[cols..]);
    }
    // These are the coefficients of dx = p⊙dy − q⊙x̂ − r.
    let (p, q, r) = slopes(norm, &stats, &or_ones(weight, cols), (&sum, &sum_x), &mut state, options);
    let (p, q, r) = (as_acc::<E::Acc>(&p), as_acc::<E::Acc>(&q), as_acc::<E::Acc>(&r));
    let shared = Shared::new(dx);
    parallel::over_rows(x.len() / cols.max(1), cols, |rows, numbers| {
        // SAFETY: the ranges are disjoint and inside dx.
        let dx = unsafe { shared.slice(numbers.clone()) };
        let slopes = GradientCoefficients { p: &p, q: &q, r: &r };
        passes::gradient::<E>(cols, &dy[numbers.clone()], &x[numbers], part(pad, &rows), &shift, &scale, slopes, dx);
    });
    Ok(())
}

/// Returns p, q and r of dx = p⊙dy − q⊙x̂ − r, and updates PowerNorm's ν in training. `sum` is Σ dy, and `sum_x` is
/// Σ dy⊙x̂. The state's second buffer holds e = ν/(1 − α_b), where α_b is `alpha_bwd`. With λ = w⊙Σ dy⊙x̂/rows and
/// γ = mean x̂², the buffer becomes e + λ − ν·γ.
fn slopes<A: Accumulator>(
    norm: &ColumnNormKernel,
    stats: &Stats,
    weight: &[A],
    (sum, sum_x): (&[f64], &[f64]),
    state: &mut State,
    options: &ColumnOptions,
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let by_weight = |numbers: &[f64]| memory::collected(numbers.iter().zip(weight).map(|(n, w)| n * w.to_f64()));
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
    if norm.approximate && options.train && !state.second.is_empty() {
        let nu = memory::collected(state.second.iter().map(|e| (1.0 - options.alpha_bwd) * e));
        if !stats.exact {
            q = memory::collected(stats.slope.iter().zip(&nu).map(|(slope, nu)| slope * nu));
        }
        let terms = state.second.iter().zip(&lambda).zip(nu.iter().zip(&stats.gamma));
        let updated = memory::collected(terms.map(|((e, lambda), (nu, gamma))| e + lambda - nu * gamma));
        // `share` is 1/rows, so it is positive if there is a real row.
        if state.accepts(stats.share, &[&updated]) {
            state.second.copy_from_slice(&updated);
        }
    }
    (p, q, r)
}
