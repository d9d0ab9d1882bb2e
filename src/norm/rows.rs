//! Norms over the last dimension, row by row: the passes that every such norm shares.
//!
//! The row norms of SPEC §1 have one form. With a shift and a scale that are numbers of the row,
//!
//! > x̂ = (x − shift)·scale,  y = w⊙x̂ + b
//!
//! and, with g = w⊙dy, a gradient that combines g, x̂ and a constant:
//!
//! > dx = p·g + q·x̂ − r,  dw += dy⊙x̂,  db += dy
//!
//! where p, q and r depend on the row only through Σg and Σg⊙x̂. A norm is the rule for (shift, scale) and the rule
//! for (p, q, r): [`RowNorm`]. The passes over memory are written here once, and the fused residual step
//! (`residual/step.rs`) runs the same ones.
//!
//! A row is in the first-level cache from its first pass on, so only that one waits for memory. Sums run over
//! explicit lanes in a fixed order: every instruction set gives the same bits.

use super::convert::{narrow, target, wide, widen, Row};
use crate::cpu::{Accumulator, Element};
use crate::multiversion;

mod sums;
use sums::Lanes;
pub use sums::{hypotenuse, magnitude, sum, sum_and_squares, trusted, LANES};

/// One norm over the last dimension.
pub trait RowNorm: Copy + Send + Sync + 'static {
    /// Numbers kept per row for the backward pass: 0, 1 (the scale) or 2 (the shift, then the scale).
    const STATS: usize;

    /// The shift and the scale of a row; the shift is zero where STATS < 2.
    fn measure<A: Accumulator>(x: &[A], eps: A) -> Measured<A>;

    /// dx as a function of g and x̂, given Σg and Σg⊙x̂ over the row's `cols` columns.
    fn slope<A: Accumulator>(row: Measured<A>, eps: A, cols: usize, sum_g: A, sum_gx: A) -> Slope<A>;
}

/// x̂ = (x − shift)·scale.
#[derive(Clone, Copy, Debug)]
pub struct Measured<A> {
    pub shift: A,
    pub scale: A,
}

/// dx = p·g + q·x̂ − r. The minus lets a constant r = 0 vanish at compile time (+ 0 would have to turn −0 into +0).
#[derive(Clone, Copy, Debug)]
pub struct Slope<A> {
    pub p: A,
    pub q: A,
    pub r: A,
}

/// No norm: y = x. What a residual scheme without a norm passes to the fused step.
#[derive(Clone, Copy, Debug)]
pub struct NoNorm;

impl RowNorm for NoNorm {
    const STATS: usize = 0;

    #[inline(always)]
    fn measure<A: Accumulator>(_: &[A], _: A) -> Measured<A> {
        Measured { shift: A::ZERO, scale: A::ONE }
    }

    #[inline(always)]
    fn slope<A: Accumulator>(_: Measured<A>, _: A, _: usize, _: A, _: A) -> Slope<A> {
        Slope { p: A::ONE, q: A::ZERO, r: A::ZERO }
    }
}

multiversion! {
    /// y = w⊙x̂ + b for every row of `cols` numbers in `x`; `stats` receives `N::STATS` numbers a row.
    ///
    /// `weight` is empty (ones), one number (a gain) or one per column; `bias` is empty (zeros) or one per column.
    pub fn forward[N: RowNorm, E: Element](
        cols: usize, x: &[E], weight: &[E::Acc], bias: &[E::Acc], eps: E::Acc, y: &mut [E], stats: &mut [E::Acc],
    ) {
        if cols == 0 {
            return;
        }
        let (weight, bias) = (PerColumn::new(weight, cols, E::Acc::ONE), PerColumn::new(bias, cols, E::Acc::ZERO));
        let mut held = [(); 2].map(|()| Row::for_type::<E>(cols));
        let mut out = Row::for_type::<E>(cols);
        let mut measured = [Measured::restore::<NoNorm>(0, &[]); 2];
        // One row behind: while a row's sum travels through its last additions, the row before it is written.
        let rows = x.len() / cols;
        for r in 0..=rows {
            if r < rows {
                let (x, held) = (&x[r * cols..][..cols], &mut held[r % 2]);
                widen(x, held);
                measured[r % 2] = N::measure(wide(x, held), eps);
                measured[r % 2].keep::<N>(r, stats);
            }
            if let Some(r) = r.checked_sub(1) {
                let (x, y) = (&x[r * cols..][..cols], &mut y[r * cols..][..cols]);
                measured[r % 2].normalise(wide(x, &held[r % 2]), &weight, &bias, target(y, &mut out));
                narrow(&out, y);
            }
        }
    }
}

multiversion! {
    /// The gradient of [`forward`]: overwrites `dx`, adds to `dweight` (empty, or as long as `weight`) and `dbias`
    /// (empty, or one per column).
    pub fn backward[N: RowNorm, E: Element](
        cols: usize, dy: &[E], x: &[E], weight: &[E::Acc], eps: E::Acc, stats: &[E::Acc], dx: &mut [E],
        dweight: &mut [E::Acc], dbias: &mut [E::Acc],
    ) {
        if cols == 0 {
            return;
        }
        let weight = Weight::new(weight, cols);
        let mut held = [(); 2].map(|()| (Row::for_type::<E>(cols), Row::for_type::<E>(cols)));
        let mut out = Row::for_type::<E>(cols);
        let mut slopes = [Slope { p: E::Acc::ZERO, q: E::Acc::ZERO, r: E::Acc::ZERO }; 2];
        // One row behind, as in the forward pass.
        let rows = x.len() / cols;
        for r in 0..=rows {
            if r < rows {
                let (dy, x, (wide_dy, wide_x)) = (&dy[r * cols..][..cols], &x[r * cols..][..cols], &mut held[r % 2]);
                widen(dy, wide_dy);
                widen(x, wide_x);
                let row = Measured::restore::<N>(r, stats);
                slopes[r % 2] = weight.slope::<N>(wide(dy, wide_dy), wide(x, wide_x), row, eps, dweight, dbias);
            }
            if let Some(r) = r.checked_sub(1) {
                let (dy, x, (wide_dy, wide_x)) = (&dy[r * cols..][..cols], &x[r * cols..][..cols], &held[r % 2]);
                let (row, dx) = (Measured::restore::<N>(r, stats), &mut dx[r * cols..][..cols]);
                let (slope, to) = (slopes[r % 2], target(dx, &mut out));
                weight.apply(slope, wide(dy, wide_dy), wide(x, wide_x), row, to);
                narrow(&out, dx);
            }
        }
    }
}

impl<A: Accumulator> Measured<A> {
    #[inline(always)]
    pub fn at(self, x: A) -> A {
        (x - self.shift) * self.scale
    }

    /// y = w⊙x̂ + b.
    #[inline(always)]
    pub fn normalise(self, x: &[A], weight: &[A], bias: &[A], y: &mut [A]) {
        let n = y.len();
        let (x, weight, bias) = (&x[..n], &weight[..n], &bias[..n]);
        for i in 0..n {
            y[i] = self.at(x[i]) * weight[i] + bias[i];
        }
    }

    /// Writes the numbers of row `r`.
    #[inline(always)]
    pub fn keep<N: RowNorm>(self, r: usize, stats: &mut [A]) {
        match N::STATS {
            0 => {}
            1 => stats[r] = self.scale,
            _ => (stats[2 * r], stats[2 * r + 1]) = (self.shift, self.scale),
        }
    }

    /// Reads what [`keep`](Self::keep) wrote.
    #[inline(always)]
    pub fn restore<N: RowNorm>(r: usize, stats: &[A]) -> Self {
        match N::STATS {
            0 => Measured { shift: A::ZERO, scale: A::ONE },
            1 => Measured { shift: A::ZERO, scale: stats[r] },
            _ => Measured { shift: stats[2 * r], scale: stats[2 * r + 1] },
        }
    }
}

/// A coefficient for every column: the caller's, or one number (the given one, or a default) repeated.
pub enum PerColumn<'a, A> {
    Given(&'a [A]),
    Repeated(Row<A>),
}

impl<'a, A: Accumulator> PerColumn<'a, A> {
    pub fn new(values: &'a [A], cols: usize, default: A) -> Self {
        match values.len() {
            n if n == cols => PerColumn::Given(values),
            0 => PerColumn::Repeated(Row::filled(cols, default)),
            1 => PerColumn::Repeated(Row::filled(cols, values[0])),
            n => panic!("a row of {cols} columns takes 0, 1 or {cols} coefficients, not {n}"),
        }
    }
}

impl<A> std::ops::Deref for PerColumn<'_, A> {
    type Target = [A];
    #[inline(always)]
    fn deref(&self) -> &[A] {
        match self {
            PerColumn::Given(values) => values,
            PerColumn::Repeated(row) => row,
        }
    }
}

/// A weight for the backward pass: gain·columns, one of which is one.
pub struct Weight<'a, A: Accumulator> {
    pub gain: A,
    pub columns: PerColumn<'a, A>,
}

impl<'a, A: Accumulator> Weight<'a, A> {
    pub fn new(weight: &'a [A], cols: usize) -> Self {
        // One number is kept apart, so that its gradient is the sum Σdy⊙x̂ itself and no array of columns.
        match weight.len() {
            1 if cols > 1 => Weight { gain: weight[0], columns: PerColumn::new(&[], cols, A::ONE) },
            _ => Weight { gain: A::ONE, columns: PerColumn::new(weight, cols, A::ONE) },
        }
    }

    /// First half of a row's gradient: dweight, dbias, and the slope that gives dx.
    #[inline(always)]
    pub fn slope<N: RowNorm>(
        &self,
        dy: &[A],
        x: &[A],
        row: Measured<A>,
        eps: A,
        dweight: &mut [A],
        dbias: &mut [A],
    ) -> Slope<A> {
        let (w, cols) = (&*self.columns, x.len());
        let (sum_g, sum_gx) = match (dweight.len() == cols, dbias.is_empty()) {
            (false, true) => sums::<N, false, false, A>(dy, x, row, w, &mut [], &mut []),
            (false, false) => sums::<N, false, true, A>(dy, x, row, w, &mut [], dbias),
            (true, true) => sums::<N, true, false, A>(dy, x, row, w, dweight, &mut []),
            (true, false) => sums::<N, true, true, A>(dy, x, row, w, dweight, dbias),
        };
        if let ([dweight], true) = (dweight, cols > 1) {
            *dweight += sum_gx;
        }
        let slope = N::slope(row, eps, cols, self.gain * sum_g, self.gain * sum_gx);
        Slope { p: slope.p * self.gain, ..slope }
    }

    /// Second half: dx.
    #[inline(always)]
    pub fn apply(&self, slope: Slope<A>, dy: &[A], x: &[A], row: Measured<A>, dx: &mut [A]) {
        let n = dx.len();
        let (dy, x, weight) = (&dy[..n], &x[..n], &self.columns[..n]);
        for i in 0..n {
            dx[i] = slope.p * (weight[i] * dy[i]) + slope.q * row.at(x[i]) - slope.r;
        }
    }
}

/// Σw⊙dy (where the norm has a shift: nobody else asks) and Σw⊙dy⊙x̂; dweight += dy⊙x̂ where W, dbias += dy where B.
///
/// Block by block, while its columns are at hand: a pass of its own for dweight and dbias took a quarter longer in bf16,
/// and one with dx, whose stores wait for memory, as much in f32.
#[inline(always)]
fn sums<N: RowNorm, const W: bool, const B: bool, A: Accumulator>(
    dy: &[A],
    x: &[A],
    row: Measured<A>,
    weight: &[A],
    dweight: &mut [A],
    dbias: &mut [A],
) -> (A, A) {
    let (mut sum_g, mut sum_gx) = (Lanes::zero(), Lanes::zero());
    let (dy_blocks, dy_rest) = dy.as_chunks::<LANES>();
    let (x_blocks, x_rest) = x.as_chunks::<LANES>();
    let (weight_blocks, weight_rest) = weight.as_chunks::<LANES>();
    let (dweight_blocks, dweight_rest) = dweight.as_chunks_mut::<LANES>();
    let (dbias_blocks, dbias_rest) = dbias.as_chunks_mut::<LANES>();
    let (mut dweight_blocks, mut dbias_blocks) = (dweight_blocks.iter_mut(), dbias_blocks.iter_mut());
    for ((dy, x), weight) in dy_blocks.iter().zip(x_blocks).zip(weight_blocks) {
        for l in 0..LANES {
            let g = weight[l] * dy[l];
            if N::STATS == 2 {
                sum_g.0[l] += g;
            }
            sum_gx.0[l] += g * row.at(x[l]);
        }
        if let (true, Some(dweight)) = (W, dweight_blocks.next()) {
            for l in 0..LANES {
                dweight[l] += dy[l] * row.at(x[l]);
            }
        }
        if let (true, Some(dbias)) = (B, dbias_blocks.next()) {
            for l in 0..LANES {
                dbias[l] += dy[l];
            }
        }
    }
    for (l, ((dy, x), weight)) in dy_rest.iter().zip(x_rest).zip(weight_rest).enumerate() {
        let g = *weight * *dy;
        sum_g.0[l] += g;
        sum_gx.0[l] += g * row.at(*x);
        if W {
            dweight_rest[l] += *dy * row.at(*x);
        }
        if B {
            dbias_rest[l] += *dy;
        }
    }
    (sum_g.fold(), sum_gx.fold())
}

#[cfg(test)]
pub(crate) mod tests;
