//! Kernels: safe functions on slices for a range of rows. In each folder, `call` runs them on an operator's tensors,
//! on the CPU with several threads, and launches the GPU's kernels. `composed`, if present, computes the same with
//! tch operations. The formulas of each norm are in [`crate::norm`].

pub mod adam;
pub mod attention;
pub mod best;
pub mod columns;
pub mod cross_entropy;
pub mod depth_attention;
pub mod dropout;
pub mod joint_read;
pub mod launch;
pub mod math;
pub mod mix_streams;
pub mod packed;
pub mod product;
pub mod relu_dropout;
pub mod residual_step;
pub mod row_sum;
pub mod rows;
pub mod sinkhorn;
pub mod view;
mod weighted_rows;
