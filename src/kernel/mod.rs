//! CPU kernels that are neither a norm's nor a residual step's: safe functions on slices for a range of rows.

pub mod adam;
pub mod attention;
pub mod cross_entropy;
pub mod math;
pub mod relu_dropout;
