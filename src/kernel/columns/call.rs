//! A call's tensors: over threads on the CPU ([`cpu`](super::cpu)), or launches on a GPU ([`gpu`](super::gpu)).

use super::{cpu, gpu, ColumnNormKernel, ColumnOptions};
use crate::cuda::Device;
use crate::error::Result;
use crate::kernel::view::{by_dtype, View};

/// x and y (or dy and dx) with everything between them; absent views have null data.
pub struct ColumnViews {
    pub x: View,
    pub weight: View,
    pub bias: View,
    pub pad: View,
    /// On the CPU float64 copies of the buffers; on a GPU the buffers.
    pub first: View,
    pub second: View,
    pub iters: View,
    pub refused: View,
    /// Whether the buffers themselves are float64.
    pub wide_state: bool,
    /// `stats` holds the statistics of an earlier run.
    pub given: bool,
    pub options: ColumnOptions,
    pub y: View,
    pub stats: View,
}

impl ColumnViews {
    /// The largest number that the buffers can hold.
    pub(super) fn largest(&self) -> f64 {
        if self.wide_state {
            f64::MAX
        } else {
            f32::MAX.into()
        }
    }
}

/// What a backward pass reads beside that, and writes.
pub struct ColumnGradients {
    pub dy: View,
    pub dx: View,
    pub dweight: View,
    pub dbias: View,
}

/// y and the statistics that made it, settled from the batch and the buffers, which then move, or given.
pub fn forward(device: Option<Device>, norm: &'static ColumnNormKernel, v: &ColumnViews) -> Result<()> {
    match device {
        None => by_dtype!(v.x, E => cpu::forward::<E>(norm, v)),
        Some(device) => gpu::forward(device, norm, v),
    }
}

/// dx and the parameters' gradients; moves PowerNorm's ν.
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
