//! Kernels: safe functions that compute a range of rows from slices. In each folder, the module `call` runs them on an
//! operator's tensors: on the CPU with several threads, on a GPU by a launch. `composed`, if present, computes the same
//! results with tch operations. The formulas of each norm are in [`crate::norm`].

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
