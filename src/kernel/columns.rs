//! Norms whose statistics are per column, such as batch norm: their interface, and the passes over memory.
//!
//! The norms of docs/spec.md §1.6 measure each column over the rows of a batch, and keep running statistics over
//! updates. With a shift and a scale for every column, they have the form
//!
//! > x̂ = (x − shift)⊙scale,  y = γ⊙x̂ + β
//!
//! where the shift and the scale come from a training batch, the running statistics, or both, and the gradient
//!
//! > dx = p⊙dy − q⊙x̂ − r,  dγ = Σ dy⊙x̂,  dβ = Σ dy
//!
//! where p, q and r follow from the two sums Σ dy and Σ dy⊙x̂ (and, in PowerNorm, from a running ν). Rows that `pad`
//! marks enter no sum, and y and dx are 0 there.
//!
//! Sums over [`BLOCK_ROWS`](passes::BLOCK_ROWS) rows are in the computing type, and their totals in f64: plain f32 sums
//! of some thousands of rows would lose three digits.

use crate::cpu::{memory, Accumulator};
use crate::cuda::Program;
use crate::error::Result;
use tch::Tensor;

pub mod call;
mod cpu;
pub(crate) mod gpu;
mod passes;

/// The kernels of a norm with column statistics.
pub struct ColumnNormKernel {
    /// True if the norm subtracts a mean.
    pub centred: bool,
    /// True if the gradient in training is PowerNorm's approximation, which uses the second buffer. Otherwise it is
    /// the formula's derivative.
    pub approximate: bool,
    /// Returns the statistics with which to compute x̂, from the batch or from the running state, and then updates the
    /// running state.
    pub settle: fn(&BatchStatistics, &mut State, &ColumnOptions) -> Stats,
    /// The CUDA program of the same kernels.
    pub program: Program,
}

/// The processes whose rows form one batch.
pub trait Ranks: std::fmt::Debug + Sync {
    /// Returns the name by which operators look up the group.
    fn name(&self) -> &str;

    /// Returns the tensors t of all ranks, stacked as (ranks, …).
    fn gather(&self, t: &Tensor) -> Result<Tensor>;

    /// Returns the sum of the tensors t of all ranks.
    fn sum(&self, t: &Tensor) -> Result<Tensor>;
}

/// The options of a norm with column statistics.
#[derive(Clone, Copy, Debug)]
pub struct ColumnOptions {
    /// The decay α: running statistics become α·old + (1−α)·batch.
    pub alpha: f64,
    /// PowerNorm's decay α of ν.
    pub alpha_bwd: f64,
    pub eps: f64,
    /// The number of initial training passes in which PowerNorm uses the batch's own statistic.
    pub warmup: i64,
    /// The processes whose batches form one batch; `None` means this process alone.
    pub ranks: Option<&'static dyn Ranks>,
    /// True in training, when the running statistics are updated.
    pub train: bool,
    /// True for the variant of PowerNorm that its authors released.
    pub release: bool,
}

impl Default for ColumnOptions {
    fn default() -> Self {
        ColumnOptions { alpha: 0.9, alpha_bwd: 0.9, eps: 1e-5, warmup: 0, ranks: None, train: false, release: false }
    }
}

/// A batch's measured statistics, per column.
#[derive(Clone, Debug, Default)]
pub struct BatchStatistics {
    /// The number of real rows.
    pub count: f64,
    /// The mean of the real rows, for a centred norm; zero for a norm that is not centred.
    pub mean: Vec<f64>,
    /// The mean of (x − mean)² over real rows.
    pub square: Vec<f64>,
    /// The mean of x² over all rows, padding included; set if PowerNorm's release mode has padding.
    pub square_of_all: Option<Vec<f64>>,
    /// The number of all rows.
    pub rows: f64,
}

/// The running state, in f64 whatever the buffers' type. Buffers that the norm lacks are empty.
pub struct State<'a> {
    /// The running μ or ψ².
    pub first: &'a mut [f64],
    /// The running σ², or ν/(1 − α_b).
    pub second: &'a mut [f64],
    /// The number of training passes whose statistics entered the state.
    pub iters: &'a mut [i64],
    /// The number of training passes whose statistics were refused because they were not finite.
    pub refused: &'a mut [i64],
    /// The largest number that the buffers can hold.
    pub largest: f64,
}

impl State<'_> {
    /// True if the statistics `values` of `count` real rows may enter the state: there is a real row, and all values
    /// are finite in the buffers' type. If there is a real row but a value is not finite, adds 1 to `refused`.
    pub fn accepts(&mut self, count: f64, values: &[&[f64]]) -> bool {
        // The comparison is false for a NaN.
        let finite = values.iter().flat_map(|values| values.iter()).all(|value| value.abs() <= self.largest);
        // `refused` is empty if the norm has no such counter.
        if let (true, [refused]) = (count > 0.0 && !finite, &mut *self.refused) {
            *refused += 1;
        }
        count > 0.0 && finite
    }
}

/// The statistics that a forward pass used, for its backward pass: x̂ = (x − shift)⊙scale. They are stored as a tensor
/// (ROWS, columns) of the computing type.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    pub shift: Vec<f64>,
    pub scale: Vec<f64>,
    /// The factor that dx uses in place of `scale`.
    pub slope: Vec<f64>,
    /// The mean of x̂².
    pub gamma: Vec<f64>,
    /// True if shift and scale are the batch's own, so that they have a gradient.
    pub exact: bool,
    /// The factor 1/rows of the means in the backward pass; 0 if the pass needs no means.
    pub share: f64,
}

impl Stats {
    /// The number of rows in the tensor that stores the statistics, one for each field.
    pub const ROWS: usize = 6;

    /// Returns statistics that do not come from the batch: this shift, with scale and slope 1/√(square + ε), where
    /// `square` is each column's mean of (x − shift)².
    pub fn new(shift: &[f64], square: &[f64], eps: f64) -> Self {
        let scale = memory::collected(square.iter().map(|v| 1.0 / (v + eps).sqrt()));
        let [shift, slope] = [shift, &scale].map(|v| memory::collected(v.iter().copied()));
        let gamma = memory::filled(0.0, scale.len());
        Stats { shift, slope, scale, gamma, exact: false, share: 0.0 }
    }

    /// Returns statistics from the batch's own mean and mean square, which have a gradient.
    pub fn of_batch(batch: &BatchStatistics, eps: f64) -> Self {
        let share = if batch.count > 0.0 { 1.0 / batch.count } else { 0.0 };
        Stats { exact: true, share, ..Stats::new(&batch.mean, &batch.square, eps) }
    }

    /// Writes the statistics as the rows of the tensor: shift, scale, slope, gamma, exact, share.
    pub fn write<A: Accumulator>(&self, out: &mut [A]) {
        let cols = self.scale.len();
        // The two single numbers are repeated in all columns.
        let [exact, share] = [f64::from(self.exact), self.share].map(|v| std::iter::repeat_n(v, cols));
        let rows = [&self.shift, &self.scale, &self.slope, &self.gamma].into_iter().flatten().copied();
        for (out, v) in out.iter_mut().zip(rows.chain(exact).chain(share)) {
            *out = A::from_f64(v);
        }
    }

    /// Reads the statistics from the rows of the tensor that [`write`](Self::write) filled.
    pub fn read<A: Accumulator>(rows: &[A], cols: usize) -> Self {
        let row = |i: usize| memory::collected(rows[i * cols..][..cols].iter().map(|v| v.to_f64()));
        // `exact` and `share` have the same value in all columns; without columns they count as 0.
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
