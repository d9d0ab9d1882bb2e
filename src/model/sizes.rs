//! Sizes of rows by which mixings of several tensors divide, and the type in which they are computed.

use crate::error::Result;
use crate::norm::{rms_norm, scale_norm};
use crate::operator::RowNormOp;
use tch::{Kind, Tensor};

/// The ε that is added to mean squares, to gates, and to the divisors in Sinkhorn's algorithm.
pub const EPS: f64 = 1e-6;
/// The least norm by which rows are divided.
pub const LEAST_NORM: f64 = 1e-12;

/// Returns 1/√(mean x² + ε) over the last dimension, which stays with width 1.
pub fn inverse_rms(x: &Tensor) -> Result<Tensor> {
    Ok(x.f_square()?.f_mean_dim([-1i64].as_slice(), true, None::<Kind>)?.f_add_scalar(EPS)?.f_rsqrt()?)
}

/// Returns x/√(mean x² + ε) over the last dimension.
pub fn unit_rms(x: &Tensor, eps: f64) -> Result<Tensor> {
    RowNormOp::of(&rms_norm::OPERATOR).call(x, None, None, eps)
}

/// Returns x/max(‖x‖, ε) over the last dimension.
pub fn unit(x: &Tensor, eps: f64) -> Result<Tensor> {
    RowNormOp::of(&scale_norm::OPERATOR).call(x, None, None, eps)
}

/// Casts x to the type of its computation.
pub fn wide(x: &Tensor) -> Result<Tensor> {
    Ok(x.f_to_kind(computing(x))?)
}

/// Returns the type in which sums over x are computed: f32, or f64 for f64.
pub fn computing(x: &Tensor) -> Kind {
    match x.kind() {
        Kind::Double => Kind::Double,
        _ => Kind::Float,
    }
}
