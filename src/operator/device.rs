//! What the operators' callers of CUDA kernels share: what sources are told of tensors, and dropout.

use super::ffi::{Draw, View};
use crate::cpu::philox;
use crate::error::{Error, Result};

/// philox.cuh's `Dropout`.
#[repr(C)]
pub struct Dropout {
    seed: *const i64,
    site: u32,
    threshold: u32,
    scale: f32,
}

impl Dropout {
    pub fn of(draw: &Draw) -> Self {
        let d = philox::Dropout::new(draw.p, philox::Stream::default());
        let (threshold, scale) = d.map_or((0, 1.0), |d| (d.threshold, d.scale));
        Dropout { seed: draw.device_seed, site: draw.site as u32, threshold: threshold.into(), scale: scale as f32 }
    }
}

/// What the sources call a storage type.
pub fn type_name(dtype: i32) -> Result<&'static str> {
    match dtype {
        0 => Ok("f32"),
        2 => Ok("bf16"),
        3 => Ok("f16"),
        other => Err(Error::Torch(format!("dtype code {other} has no CUDA kernel"))),
    }
}

/// Whether every pointer lets 16 bytes be read at a time.
pub fn aligned(views: &[&View]) -> bool {
    views.iter().all(|v| v.data.addr().is_multiple_of(16))
}

/// Columns that are read at a time of a matrix whose rows these views have.
pub fn columns_at_a_time(matrix: &View, views: &[&View]) -> u32 {
    let widest = if matrix.dtype == 0 { 4 } else { 8 };
    if aligned(views) && matrix.cols % widest == 0 {
        widest as u32
    } else {
        1
    }
}

/// A width as kernels count.
pub fn columns(matrix: &View) -> Result<u32> {
    let cols = i32::try_from(matrix.cols).map(|c| c as u32);
    cols.map_err(|_| Error::Torch(format!("rows of {} numbers have no CUDA kernel", matrix.cols)))
}
