//! Norms with column statistics on an operator's tensors: threads share the rows on the CPU ([`cpu`](super::cpu)),
//! and a GPU runs several kernels in turn ([`gpu`](super::gpu)).

use super::{cpu, gpu, ColumnNormKernel, ColumnOptions};
use crate::cuda::Device;
use crate::error::Result;
use crate::kernel::view::{by_dtype, View};

/// The views of a norm's call: x and y (or dy and dx), parameters, mask, buffers and statistics. Absent views have
/// null data.
pub struct ColumnViews {
    pub x: View,
    pub weight: View,
    pub bias: View,
    pub pad: View,
    /// The first buffer of running statistics. On the CPU this is a working copy (float64, for counters int64), on a
    /// GPU the buffer itself. The same holds for `second`, `iters` and `refused`.
    pub first: View,
    pub second: View,
    pub iters: View,
    pub refused: View,
    /// True if the buffers themselves are float64.
    pub wide_state: bool,
    /// True if `stats` already holds the statistics to use. This is so when a forward pass is repeated for the backward
    /// pass, because activations were not kept.
    pub given: bool,
    pub options: ColumnOptions,
    pub y: View,
    pub stats: View,
}

impl ColumnViews {
    /// Returns the largest number that the buffers can hold, in f64.
    pub(super) fn largest(&self) -> f64 {
        if self.wide_state {
            f64::MAX
        } else {
            f32::MAX.into()
        }
    }
}

/// The further inputs and the outputs of a backward pass.
pub struct ColumnGradients {
    pub dy: View,
    pub dx: View,
    pub dweight: View,
    pub dbias: View,
}

/// Computes y and its statistics on a GPU, or on the CPU if `device` is `None`. If the statistics are not given, they
/// come from the batch and the buffers, and the buffers are updated in training.
pub fn forward(device: Option<Device>, norm: &'static ColumnNormKernel, v: &ColumnViews) -> Result<()> {
    match device {
        None => by_dtype!(v.x, E => cpu::forward::<E>(norm, v)),
        Some(device) => gpu::forward(device, norm, v),
    }
}

/// Computes dx and the parameters' gradients on a GPU, or on the CPU if `device` is `None`. In training it also updates
/// PowerNorm's running ν, a statistic of the gradients.
pub fn backward(
    device: Option<Device>,
    norm: &'static ColumnNormKernel,
    v: &ColumnViews,
    d: &ColumnGradients,
) -> Result<()> {
    match device {
        None => by_dtype!(v.x, E => cpu::backward::<E>(norm, v, d)),
        Some(device) => gpu::backward(device, norm, v, d),
    }
}
