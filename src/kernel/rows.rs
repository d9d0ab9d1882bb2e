//! Norms over the last dimension, row by row: the passes that all of them share.
//!
//! The row norms of docs/spec.md §1 have one form, with a shift and a scale that are numbers of the row:
//!
//! > x̂ = (x − shift)·scale,  y = w⊙x̂ + b
//!
//! With g = w⊙dy, the gradient combines g, x̂ and a constant:
//!
//! > dx = p·g + q·x̂ − r,  dw += dy⊙x̂,  db += dy
//!
//! where p, q and r depend on the row only through Σg and Σg⊙x̂. So a norm is two formulas, one for (shift, scale)
//! and one for (p, q, r): [`RowNorm`]. The passes over memory are written here once, and the fused residual step
//! ([`residual_step`](super::residual_step)) uses them too. They are compiled per type and instruction set but not
//! per norm: a norm's formulas give only a few numbers per row, so they are called through [`RowNormFns`].
//!
//! Some norms have no statistics: they are elementwise curves with a learned scale and shift, x̂ = f(scale·x + shift),
//! [`CurveNorm`]. Their passes are in [`curve`].
//!
//! Rows are processed in groups; the number of registers of an instruction set limits their size ([`Isa::ROWS`]). The
//! coefficients of a column are read, and the sums of its gradients read and written, once for all rows of a group.
//! After its first pass a group is in the second-level cache or nearer, so only that pass waits for memory, and it
//! prefetches later rows meanwhile. Sums run over explicit lanes in an order that does not depend on the grouping;
//! see [`pack`](crate::cpu::pack) for differences between instruction sets.

use crate::cpu::pack::{Isa, Store};
use crate::cpu::{Accumulator, Element};
use crate::cuda::Program;
use crate::multiversion;
use curve::Curve;
use std::any::Any;

mod blocks;
pub mod call;
pub mod curve;
pub(crate) mod gpu;
mod passes;
mod sums;
pub use blocks::{columns, split, split_ref, Blocks, BlocksMut, Group, PARTS};
pub(crate) use passes::{each_row, rows};
pub use passes::{fetch, normalise, Lines, Weight};
pub use sums::{hypotenuse, magnitude, sum, trusted};

/// The maximum number of rows in a group.
pub const GROUP: usize = 4;

/// A norm over the last dimension.
pub trait RowNorm: Copy + Send + Sync + 'static {
    /// The number of values kept per row for the backward pass: none, the scale, or the shift and the scale. It also
    /// determines the sums over a row that [`measure`](Self::measure) gets: none if it is 0, Σx² if 1, both moments if
    /// 2.
    const STATS: usize;

    /// Returns the shift and the scale of a row; the shift is zero if STATS < 2. Returns `None` if the sums have lost
    /// precision; then [`measure_scaled`](Self::measure_scaled) is used.
    fn measure<A: Accumulator>(sums: &Sums<A>, eps: A) -> Option<Measured<A>>;

    /// Returns the shift and the scale of a row whose squares (or sum) overflow or underflow.
    fn measure_scaled<A: Accumulator>(x: &[A], eps: A) -> Measured<A>;

    /// Returns the coefficients of dx = p·g + q·x̂ − r, where g is the gradient of x̂. They follow from the row's shift
    /// and scale and from the sums over its `cols` columns: `sum_g`, Σg (only if STATS is 2), and `sum_gx`, Σg⊙x̂.
    fn gradient<A: Accumulator>(row: Measured<A>, eps: A, cols: A, sum_g: A, sum_gx: A) -> RowGradient<A>;
}

/// A curve in place of a norm: x̂ = f(scale·x + shift), where scale and shift are one learned number each.
pub trait CurveNorm: 'static {
    /// Returns (f(z), f′(z)), computed with the instruction set S.
    fn at<A: Accumulator, S: Isa>(z: A) -> (A, A);
}

/// The sums over a row.
#[derive(Clone, Copy, Debug)]
pub struct Sums<A> {
    /// The number of columns.
    pub cols: A,
    /// A guess of the mean. It is subtracted so that the squares lose no digits to cancellation; zero if STATS < 2.
    pub about: A,
    /// Σd with d = x − about; not computed unless STATS is 2.
    pub sum: A,
    /// Σd² with d = x − about.
    pub squares: A,
}

/// The shift and the scale in x̂ = (x − shift)·scale.
#[derive(Clone, Copy, Debug)]
pub struct Measured<A> {
    pub shift: A,
    pub scale: A,
}

/// The coefficients of dx = p·g + q·x̂ − r for one row, where g is the gradient of x̂.
#[derive(Clone, Copy, Debug)]
pub struct RowGradient<A> {
    pub p: A,
    pub q: A,
    pub r: A,
}

/// A [`RowNorm`] or a [`CurveNorm`] as function pointers, so that kernels are not compiled for each norm.
#[derive(Clone, Copy)]
pub struct RowNormFns<A> {
    /// The number of values kept per row, [`RowNorm::STATS`].
    pub stats: usize,
    /// The curve of a [`CurveNorm`], whose functions below are not called.
    pub curve: Option<Curve<A>>,
    // These are the functions of the trait `RowNorm`.
    measure: fn(&Sums<A>, A) -> Option<Measured<A>>,
    measure_scaled: fn(&[A], A) -> Measured<A>,
    gradient: fn(Measured<A>, A, A, A, A) -> RowGradient<A>,
}

impl<A: Accumulator> RowNormFns<A> {
    /// Returns the functions of a norm.
    pub const fn of<N: RowNorm>() -> Self {
        RowNormFns {
            stats: N::STATS,
            curve: None,
            measure: N::measure,
            measure_scaled: N::measure_scaled,
            gradient: N::gradient,
        }
    }

    /// Returns the functions of a curve. The others, of [`NoNorm`], are never called.
    pub const fn of_curve<N: CurveNorm>() -> Self {
        RowNormFns { curve: Some(Curve::of::<N>()), ..RowNormFns::of::<NoNorm>() }
    }
}

/// A norm's kernels: its [`RowNormFns`] for both computing types, and its CUDA program.
pub struct RowNormKernel {
    single: RowNormFns<f32>,
    double: RowNormFns<f64>,
    pub program: Program,
}

impl RowNormKernel {
    /// Returns the kernels of a norm with this CUDA program.
    pub const fn of<N: RowNorm>(program: Program) -> Self {
        RowNormKernel { single: RowNormFns::of::<N>(), double: RowNormFns::of::<N>(), program }
    }

    /// Returns the kernels of a curve with this CUDA program.
    pub const fn of_curve<N: CurveNorm>(program: Program) -> Self {
        RowNormKernel { single: RowNormFns::of_curve::<N>(), double: RowNormFns::of_curve::<N>(), program }
    }

    /// Returns the number of values kept per row for the backward pass.
    pub fn stats(&self) -> usize {
        self.single.stats
    }

    /// Returns the norm's functions for the computing type A.
    pub fn get<A: Accumulator>(&self) -> &RowNormFns<A> {
        // A is f32 or f64, so one of the two casts succeeds.
        let single = (&self.single as &dyn Any).downcast_ref();
        single.or_else(|| (&self.double as &dyn Any).downcast_ref()).expect("A is f32 or f64")
    }
}

/// The norm y = x, for residual steps without a norm.
#[derive(Clone, Copy, Debug)]
pub struct NoNorm;

impl RowNorm for NoNorm {
    const STATS: usize = 0;

    /// Returns the shift 0 and the scale 1 for every row.
    fn measure<A: Accumulator>(_: &Sums<A>, _: A) -> Option<Measured<A>> {
        Some(Measured::NONE)
    }

    /// Returns the shift 0 and the scale 1 for every row.
    fn measure_scaled<A: Accumulator>(_: &[A], _: A) -> Measured<A> {
        Measured::NONE
    }

    /// Returns the coefficients of dx = g for every row.
    fn gradient<A: Accumulator>(_: Measured<A>, _: A, _: A, _: A, _: A) -> RowGradient<A> {
        RowGradient::NONE
    }
}

multiversion! {
    /// Computes y = weight⊙x̂ + bias for every row of `cols` numbers in `x`, where x̂ is the normalised row. `stats`
    /// receives the `norm.stats` numbers per row that the backward pass needs.
    ///
    /// `weight` is empty (meaning ones), one number (a gain) or one per column; `bias` is empty (zeros) or one per
    /// column.
    pub fn forward[isa S][E: Element](
        norm: &RowNormFns<E::Acc>, cols: usize, x: &[E], weight: &[E::Acc], bias: &[E::Acc], eps: E::Acc, y: &mut [E],
        stats: &mut [E::Acc],
    ) {
        if cols == 0 {
            return;
        }
        let (weight, bias) = (columns(weight, cols, E::Acc::ONE), columns(bias, cols, E::Acc::ZERO));
        let store = Store::of(y, cols);
        let group = Group::new::<S>(x.len() / cols, cols);
        // Spare rows, to read and to write, fill up the last group.
        let (spare, mut spare_out) = (group.spare::<E>(), group.spare_out::<E>());
        for g in 0..group.count() {
            let x = group.rows(g, x, &spare);
            let measured = norm.measure::<S, E>(x, eps);
            for (r, statistics) in group.range(g).zip(measured) {
                statistics.keep(norm.stats, r, stats);
            }
            let y = group.rows_mut(g, y, &mut spare_out);
            // Without a second statistic all shifts are zero. The last parameter is true if shifts are subtracted.
            if norm.stats < 2 {
                normalise::<S, E, E, false>(x, measured, &weight, &bias, y, store);
            } else {
                normalise::<S, E, E, true>(x, measured, &weight, &bias, y, store);
            }
        }
        store.finish();
    }
}

multiversion! {
    /// Computes the gradient of [`forward`] from `dy` and the `stats` that it wrote: overwrites `dx`, adds to `dweight`
    /// (empty, or as long as `weight`) and `dbias` (empty, or one per column).
    pub fn backward[isa S][E: Element](
        norm: &RowNormFns<E::Acc>, cols: usize, dy: &[E], x: &[E], weight: &[E::Acc], eps: E::Acc, stats: &[E::Acc],
        dx: &mut [E], dweight: &mut [E::Acc], dbias: &mut [E::Acc],
    ) {
        if cols == 0 {
            return;
        }
        let mut weight = Weight::new(norm, weight, cols, eps, dweight, dbias);
        let store = Store::of(dx, cols);
        let group = Group::new::<S>(x.len() / cols, cols);
        // Spare rows, to read and to write, fill up the last group.
        let (spare, mut spare_out) = (group.spare::<E>(), group.spare_out::<E>());
        for g in 0..group.count() {
            let (dy, x) = (group.rows(g, dy, &spare), group.rows(g, x, &spare));
            let measured = Measured::restore(norm.stats, group.range(g), stats);
            let row_gradients = weight.row_gradients::<S, E, E>(dy, x, measured);
            weight.apply::<S, E>(dy, x, row_gradients, group.rows_mut(g, dx, &mut spare_out), store);
        }
        store.finish();
        weight.finish(dweight, dbias);
    }
}

impl<A: Accumulator> Measured<A> {
    /// The shift and the scale of x̂ = x.
    pub const NONE: Self = Measured { shift: A::ZERO, scale: A::ONE };

    /// Writes the `count` values of row `r` that the backward pass needs to their place in `stats`: none, the scale, or
    /// the shift and the scale.
    #[inline(always)]
    pub fn keep(self, count: usize, r: usize, stats: &mut [A]) {
        match count {
            0 => {}
            1 => stats[r] = self.scale,
            _ => (stats[2 * r], stats[2 * r + 1]) = (self.shift, self.scale),
        }
    }

    /// Returns the statistics of a group of rows from the values that [`keep`](Self::keep) wrote, `count` per row. A
    /// value that was not kept is that of x̂ = x.
    #[inline(always)]
    pub fn restore(count: usize, rows: std::ops::Range<usize>, stats: &[A]) -> [Self; GROUP] {
        let mut group = [Self::NONE; GROUP];
        for (row, r) in group.iter_mut().zip(rows) {
            match count {
                0 => {}
                1 => row.scale = stats[r],
                _ => *row = Measured { shift: stats[2 * r], scale: stats[2 * r + 1] },
            }
        }
        group
    }
}

impl<A: Accumulator> RowGradient<A> {
    /// The coefficients of dx = g.
    pub const NONE: Self = RowGradient { p: A::ONE, q: A::ZERO, r: A::ZERO };
}

#[cfg(test)]
pub(crate) mod tests;
