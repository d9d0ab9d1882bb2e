//! CPU kernels: safe functions on slices for a range of rows. A norm's own rules are in [`crate::norm`].

pub mod adam;
pub mod attention;
pub mod cross_entropy;
pub mod math;
pub mod relu_dropout;
pub mod residual_step;
pub mod rows;
