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
//! Sums over rows are made in the computing type over [`BLOCK`](passes::BLOCK) rows and in f64 over blocks: plain f32 sums of some
//! thousands of rows would lose three digits.

use crate::cpu::{memory, Accumulator};
use crate::cuda::Program;
use crate::error::Result;
use tch::Tensor;

pub mod call;
mod cpu;
pub(crate) mod gpu;
mod passes;

/// A norm with statistics of columns, as its kernels take it.
pub struct ColumnNormKernel {
    /// x̂ has a mean taken away.
    pub centred: bool,
    /// The gradient in training is PowerNorm's, made with the second buffer, and no derivative of the formula.
    pub approximate: bool,
    /// Says what x̂ is made with, and then moves the state.
    pub settle: fn(&BatchStatistics, &mut State, &ColumnOptions) -> Stats,
    /// The same kernels for a GPU.
    pub program: Program,
}

/// The processes whose rows are one batch.
pub trait Ranks: std::fmt::Debug + Sync {
    /// What operators call them.
    fn name(&self) -> &str;

    /// (ranks, …): every rank's t.
    fn gather(&self, t: &Tensor) -> Result<Tensor>;

    /// Σ over ranks.
    fn sum(&self, t: &Tensor) -> Result<Tensor>;
}

/// How a norm with statistics is computed.
#[derive(Clone, Copy, Debug)]
pub struct ColumnOptions {
    /// Running statistics become α·old + (1−α)·batch.
    pub alpha: f64,
    /// PowerNorm's α of ν.
    pub alpha_bwd: f64,
    pub eps: f64,
    /// PowerNorm: training forwards that use the batch's own statistic.
    pub warmup: i64,
    /// Whose batches are one batch; none: this process's alone.
    pub ranks: Option<&'static dyn Ranks>,
    pub train: bool,
    /// PowerNorm as its authors released it.
    pub release: bool,
}

impl Default for ColumnOptions {
    fn default() -> Self {
        ColumnOptions { alpha: 0.9, alpha_bwd: 0.9, eps: 1e-5, warmup: 0, ranks: None, train: false, release: false }
    }
}

/// What was measured of a batch, per column.
#[derive(Clone, Debug, Default)]
pub struct BatchStatistics {
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
    pub fn of_batch(batch: &BatchStatistics, eps: f64) -> Self {
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

#[cfg(test)]
mod tests {
    use super::*;

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
