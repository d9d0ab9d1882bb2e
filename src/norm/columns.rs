//! Norms with statistics of columns, over rows and steps: the passes over memory, and what such a norm must say.
//!
//! The norms of docs/spec.md §1.6 keep running statistics. With a shift and a scale for every column, their form is
//!
//! > x̂ = (x − shift)⊙scale,  y = γ⊙x̂ + β
//!
//! where a training batch, the running statistics, or both decide what shift and scale are; and a gradient
//!
//! > dx = p⊙dy − q⊙x̂ − r,  dγ = Σ dy⊙x̂,  dβ = Σ dy
//!
//! whose p, q and r follow from the two sums (and, in PowerNorm, from a running ν). Rows that `pad` marks enter no sum,
//! and y and dx are 0 there.
//!
//! Sums over rows are made in the computing type over [`BLOCK`] rows and in f64 over blocks: plain f32 sums of some
//! thousands of rows would lose three digits.

use crate::cpu::convert::{narrow, target, wide, widen, Row};
use crate::cpu::{memory, Accumulator, Element};
use crate::multiversion;
use crate::operator::Group;
use std::array::from_fn;

/// How a norm with statistics is computed.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Running statistics become α·old + (1−α)·batch.
    pub alpha: f64,
    /// PowerNorm's α of ν.
    pub alpha_bwd: f64,
    pub eps: f64,
    /// PowerNorm: training forwards that use the batch's own statistic.
    pub warmup: i64,
    /// Whose batches are one batch.
    pub group: Group,
    pub train: bool,
    /// PowerNorm as its authors released it.
    pub release: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options { alpha: 0.9, alpha_bwd: 0.9, eps: 1e-5, warmup: 0, group: Group::ALONE, train: false, release: false }
    }
}

/// What was measured of a batch, per column.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// Real rows.
    pub count: f64,
    /// Their mean, for a centred norm; zero for others.
    pub mean: Vec<f64>,
    /// mean (x − mean)² over real rows.
    pub square: Vec<f64>,
    /// mean x² over all rows, where PowerNorm's release mode has padding.
    pub square_of_all: Option<Vec<f64>>,
    pub rows: f64,
}

/// The running state, in f64 whatever the buffers are; absent parts are empty.
pub struct State<'a> {
    /// μ or ψ².
    pub first: &'a mut [f64],
    /// σ², or ν/(1 − α_b).
    pub second: &'a mut [f64],
    /// Training forwards that were taken in.
    pub iters: &'a mut [i64],
    /// Statistics that were not taken in because they are not finite.
    pub refused: &'a mut [i64],
    /// The largest number that the buffers can hold.
    pub largest: f64,
}

impl State<'_> {
    /// Whether these statistics may be taken in; counts those that may not. A batch with no real row never may.
    pub fn accepts(&mut self, count: f64, values: &[&[f64]]) -> bool {
        let finite = values.iter().all(|v| v.iter().all(|v| v.abs() <= self.largest));
        if let (true, [refused]) = (count > 0.0 && !finite, &mut *self.refused) {
            *refused += 1;
        }
        count > 0.0 && finite
    }
}

/// What a forward pass has used and leaves to its backward pass; a tensor (ROWS, columns) of the computing type.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    pub shift: Vec<f64>,
    pub scale: Vec<f64>,
    /// What dx is multiplied by instead of `scale`.
    pub slope: Vec<f64>,
    /// mean x̂².
    pub gamma: Vec<f64>,
    /// Shift and scale are the batch's own, so that they have a gradient.
    pub exact: bool,
    /// 1/rows over which the backward pass takes means; 0 where there is none.
    pub share: f64,
}

impl Stats {
    /// Rows of the tensor.
    pub const ROWS: usize = 6;

    /// Shift, and scale and slope of 1/√(square + ε); statistics that the batch has not made.
    pub fn new(shift: &[f64], square: &[f64], eps: f64) -> Self {
        let scale = memory::collected(square.iter().map(|v| 1.0 / (v + eps).sqrt()));
        let [shift, slope] = [shift, &scale].map(|v| memory::collected(v.iter().copied()));
        let gamma = memory::filled(0.0, scale.len());
        Stats { shift, slope, scale, gamma, exact: false, share: 0.0 }
    }

    /// The same, made by the batch.
    pub fn of_batch(batch: &Batch, eps: f64) -> Self {
        let share = if batch.count > 0.0 { 1.0 / batch.count } else { 0.0 };
        Stats { exact: true, share, ..Stats::new(&batch.mean, &batch.square, eps) }
    }

    pub fn write<A: Accumulator>(&self, out: &mut [A]) {
        let cols = self.scale.len();
        let [exact, share] = [f64::from(self.exact), self.share].map(|v| std::iter::repeat_n(v, cols));
        let rows = [&self.shift, &self.scale, &self.slope, &self.gamma].into_iter().flatten().copied();
        for (out, v) in out.iter_mut().zip(rows.chain(exact).chain(share)) {
            *out = A::from_f64(v);
        }
    }

    pub fn read<A: Accumulator>(rows: &[A], cols: usize) -> Self {
        let row = |i: usize| memory::collected(rows[i * cols..][..cols].iter().map(|v| v.to_f64()));
        let first = |i: usize| rows.get(i * cols).map_or(0.0, |v| v.to_f64());
        Stats { shift: row(0), scale: row(1), slope: row(2), gamma: row(3), exact: first(4) == 1.0, share: first(5) }
    }
}

/// Rows summed in the computing type before their sum is added in f64.
pub const BLOCK: usize = 64;
/// Rows added at a time: a partial sum in memory is then touched once for four rows.
const GROUP: usize = 4;

/// Whether a row is padding; an empty mask marks none.
#[inline(always)]
fn is_pad(pad: &[u8], r: usize) -> bool {
    pad.get(r).is_some_and(|v| *v != 0)
}

/// Calls `add` on the real rows, four indices and how many of them count, and `flush` after every block.
#[inline(always)]
fn in_blocks(rows: usize, pad: &[u8], mut step: impl FnMut([usize; GROUP], usize, bool)) {
    let (mut group, mut n, mut groups) = ([0; GROUP], 0, 0);
    for r in 0..rows {
        if is_pad(pad, r) {
            continue;
        }
        group[n] = r;
        n += 1;
        if n == GROUP {
            groups += 1;
            let flush = groups == BLOCK / GROUP;
            step(group, n, flush);
            n = 0;
            if flush {
                groups = 0;
            }
        }
    }
    step(group, n, true);
}

#[inline(always)]
fn flush<A: Accumulator>(part: &mut [A], total: &mut [f64]) {
    for (part, total) in part.iter_mut().zip(total) {
        *total += part.to_f64();
        *part = A::ZERO;
    }
}

multiversion! {
    /// sum += Σd and squares += Σd² over real rows, d = x − guess. Without a guess (empty) d = x, and `sum` stays as it is.
    pub fn sums[E: Element](
        cols: usize, x: &[E], pad: &[u8], guess: &[E::Acc], sum: &mut [f64], squares: &mut [f64],
    ) {
        if cols == 0 {
            return;
        }
        let centred = !guess.is_empty();
        let zero = Row::new(cols);
        // A row that adds nothing, for groups that are not full.
        let absent: &[E::Acc] = if centred { guess } else { &zero };
        let mut held = [(); GROUP].map(|()| Row::for_type::<E>(cols));
        let (mut part, mut part_squares) = (Row::new(if centred { cols } else { 0 }), Row::new(cols));
        in_blocks(x.len() / cols, pad, |group, n, end| {
            if n > 0 {
                for i in 0..n {
                    widen(&x[group[i] * cols..][..cols], &mut held[i]);
                }
                let rows: [&[E::Acc]; GROUP] =
                    from_fn(|i| if i < n { wide(&x[group[i] * cols..][..cols], &held[i]) } else { absent });
                match centred {
                    true => add_centred(rows, guess, &mut part, &mut part_squares),
                    false => add_squares(rows, &mut part_squares),
                }
            }
            if end {
                flush(&mut part, sum);
                flush(&mut part_squares, squares);
            }
        });
    }
}

#[inline(always)]
fn add_centred<A: Accumulator>(rows: [&[A]; GROUP], guess: &[A], sum: &mut [A], squares: &mut [A]) {
    let n = squares.len();
    let (rows, guess, sum) = (rows.map(|r| &r[..n]), &guess[..n], &mut sum[..n]);
    for c in 0..n {
        let d: [A; GROUP] = from_fn(|i| rows[i][c] - guess[c]);
        sum[c] += (d[0] + d[1]) + (d[2] + d[3]);
        squares[c] += (d[0] * d[0] + d[1] * d[1]) + (d[2] * d[2] + d[3] * d[3]);
    }
}

#[inline(always)]
fn add_squares<A: Accumulator>(rows: [&[A]; GROUP], squares: &mut [A]) {
    let n = squares.len();
    let rows = rows.map(|r| &r[..n]);
    for c in 0..n {
        let d: [A; GROUP] = from_fn(|i| rows[i][c]);
        squares[c] += (d[0] * d[0] + d[1] * d[1]) + (d[2] * d[2] + d[3] * d[3]);
    }
}

multiversion! {
    /// y = γ⊙x̂ + β, and 0 at padding.
    pub fn normalise[E: Element](
        cols: usize, x: &[E], pad: &[u8], shift: &[E::Acc], scale: &[E::Acc], weight: &[E::Acc], bias: &[E::Acc],
        y: &mut [E],
    ) {
        if cols == 0 {
            return;
        }
        let (mut held, mut out) = (Row::for_type::<E>(cols), Row::for_type::<E>(cols));
        for r in 0..x.len() / cols {
            let (x, y) = (&x[r * cols..][..cols], &mut y[r * cols..][..cols]);
            if is_pad(pad, r) {
                y.fill(E::default());
                continue;
            }
            widen(x, &mut held);
            write(wide(x, &held), shift, scale, weight, bias, target(y, &mut out));
            narrow(&out, y);
        }
    }
}

#[inline(always)]
fn write<A: Accumulator>(x: &[A], shift: &[A], scale: &[A], weight: &[A], bias: &[A], y: &mut [A]) {
    let n = y.len();
    let (x, shift, scale, weight, bias) = (&x[..n], &shift[..n], &scale[..n], &weight[..n], &bias[..n]);
    for c in 0..n {
        y[c] = (x[c] - shift[c]) * scale[c] * weight[c] + bias[c];
    }
}

multiversion! {
    /// sum += Σdy and sum_x += Σdy⊙x̂ over real rows.
    pub fn gradient_sums[E: Element](
        cols: usize, dy: &[E], x: &[E], pad: &[u8], shift: &[E::Acc], scale: &[E::Acc], sum: &mut [f64],
        sum_x: &mut [f64],
    ) {
        if cols == 0 {
            return;
        }
        let zero = Row::new(cols);
        let mut held = [(); GROUP].map(|()| (Row::for_type::<E>(cols), Row::for_type::<E>(cols)));
        let (mut part, mut part_x) = (Row::new(cols), Row::new(cols));
        in_blocks(x.len() / cols, pad, |group, n, end| {
            if n > 0 {
                for i in 0..n {
                    widen(&dy[group[i] * cols..][..cols], &mut held[i].0);
                    widen(&x[group[i] * cols..][..cols], &mut held[i].1);
                }
                let dys: [&[E::Acc]; GROUP] =
                    from_fn(|i| if i < n { wide(&dy[group[i] * cols..][..cols], &held[i].0) } else { &*zero });
                // Any row will do where dy is zero, if it is finite: the shift, whose x̂ is zero.
                let xs: [&[E::Acc]; GROUP] =
                    from_fn(|i| if i < n { wide(&x[group[i] * cols..][..cols], &held[i].1) } else { shift });
                add_gradients(dys, xs, shift, scale, &mut part, &mut part_x);
            }
            if end {
                flush(&mut part, sum);
                flush(&mut part_x, sum_x);
            }
        });
    }
}

#[inline(always)]
fn add_gradients<A: Accumulator>(
    dy: [&[A]; GROUP],
    x: [&[A]; GROUP],
    shift: &[A],
    scale: &[A],
    sum: &mut [A],
    sum_x: &mut [A],
) {
    let n = sum.len();
    let (dy, x) = (dy.map(|r| &r[..n]), x.map(|r| &r[..n]));
    let (shift, scale, sum_x) = (&shift[..n], &scale[..n], &mut sum_x[..n]);
    for c in 0..n {
        let g: [A; GROUP] = from_fn(|i| dy[i][c]);
        let gx: [A; GROUP] = from_fn(|i| g[i] * ((x[i][c] - shift[c]) * scale[c]));
        sum[c] += (g[0] + g[1]) + (g[2] + g[3]);
        sum_x[c] += (gx[0] + gx[1]) + (gx[2] + gx[3]);
    }
}

/// dx = p⊙dy − q⊙x̂ − r.
#[derive(Clone, Copy)]
pub struct Slopes<'a, A> {
    pub p: &'a [A],
    pub q: &'a [A],
    pub r: &'a [A],
}

multiversion! {
    /// dx, 0 at padding.
    pub fn gradient[E: Element](
        cols: usize, dy: &[E], x: &[E], pad: &[u8], shift: &[E::Acc], scale: &[E::Acc], slopes: Slopes<E::Acc>,
        dx: &mut [E],
    ) {
        if cols == 0 {
            return;
        }
        let [mut held_dy, mut held_x, mut out] = [(); 3].map(|()| Row::for_type::<E>(cols));
        for r in 0..x.len() / cols {
            let (dy, x, dx) = (&dy[r * cols..][..cols], &x[r * cols..][..cols], &mut dx[r * cols..][..cols]);
            if is_pad(pad, r) {
                dx.fill(E::default());
                continue;
            }
            widen(dy, &mut held_dy);
            widen(x, &mut held_x);
            slope(wide(dy, &held_dy), wide(x, &held_x), shift, scale, slopes, target(dx, &mut out));
            narrow(&out, dx);
        }
    }
}

#[inline(always)]
fn slope<A: Accumulator>(dy: &[A], x: &[A], shift: &[A], scale: &[A], slopes: Slopes<A>, dx: &mut [A]) {
    let n = dx.len();
    let (dy, x, shift, scale) = (&dy[..n], &x[..n], &shift[..n], &scale[..n]);
    let (p, q, r) = (&slopes.p[..n], &slopes.q[..n], &slopes.r[..n]);
    for c in 0..n {
        dx[c] = p[c] * dy[c] - q[c] * ((x[c] - shift[c]) * scale[c]) - r[c];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::{force, Level};

    /// Numbers in [−1, 1), some of them exactly representable in bf16.
    fn numbers(n: usize, step: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * step + i * i * 7) % 509) as f32 / 254.5 - 1.0).collect()
    }

    #[test]
    fn sums_skip_padding_at_every_level_with_the_same_bits() {
        let (rows, cols) = (203, 37);
        let x = numbers(rows * cols, 31);
        let pad: Vec<u8> = (0..rows).map(|r| u8::from(r % 5 == 2)).collect();
        let guess: Vec<f32> = x[..cols].to_vec();
        let mut seen: Vec<(Vec<f64>, Vec<f64>)> = vec![];
        for level in Level::ALL {
            force(Some(level));
            let (mut sum, mut squares) = (vec![0.0; cols], vec![0.0; cols]);
            sums::<f32>(cols, &x, &pad, &guess, &mut sum, &mut squares);
            seen.push((sum, squares));
        }
        force(None);
        for c in 0..cols {
            let d = |r: usize| x[r * cols + c] as f64 - guess[c] as f64;
            let real = || (0..rows).filter(|r| r % 5 != 2);
            let (sum, squares): (f64, f64) = (real().map(d).sum(), real().map(|r| d(r) * d(r)).sum());
            assert!((seen[0].0[c] - sum).abs() < 1e-4 && (seen[0].1[c] - squares).abs() < 1e-4);
        }
        assert!(seen.iter().all(|s| *s == seen[0]));
    }

    #[test]
    fn thousands_of_rows_lose_nothing() {
        let x = vec![0.1f32; 100_000];
        let mut squares = vec![0.0];
        sums::<f32>(1, &x, &[], &[], &mut [], &mut squares);
        let exact = 100_000.0 * 0.1f32 as f64 * 0.1f32 as f64;
        assert!((squares[0] / exact - 1.0).abs() < 3e-7, "{squares:?}");
    }

    #[test]
    fn stats_travel() {
        let stats = Stats {
            shift: vec![1.0, 2.0],
            scale: vec![3.0, 4.0],
            slope: vec![5.0, 6.0],
            gamma: vec![7.0, 8.0],
            exact: true,
            share: 0.25,
        };
        let mut rows = vec![0.0f32; Stats::ROWS * 2];
        stats.write(&mut rows);
        assert_eq!(format!("{:?}", Stats::read(&rows, 2)), format!("{stats:?}"));
    }
}
