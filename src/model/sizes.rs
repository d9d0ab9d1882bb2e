//! Sizes of rows by which mixings of several tensors divide.

use crate::error::Result;
use crate::norm::{rms_norm, scale_norm};
use crate::operator::RowNormOp;
use tch::Tensor;

/// The ε that is added to mean squares, to gates, and to the divisors in Sinkhorn's algorithm.
pub const EPS: f64 = 1e-6;
/// The least norm by which rows are divided. A row with a smaller norm is divided by this number.
pub const LEAST_NORM: f64 = 1e-12;

/// Returns x/√(mean x² + ε) over the last dimension.
pub fn unit_rms(x: &Tensor, eps: f64) -> Result<Tensor> {
    RowNormOp::of(&rms_norm::OPERATOR).call(x, None, None, eps)
}

/// Returns x/max(‖x‖, ε) over the last dimension.
pub fn unit(x: &Tensor, eps: f64) -> Result<Tensor> {
    RowNormOp::of(&scale_norm::OPERATOR).call(x, None, None, eps)
}
