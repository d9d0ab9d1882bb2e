//! Kernels: safe functions on slices for a range of rows. In each folder, `call` passes an operator's tensors to them
//! over threads on the CPU, or to a launch on a GPU; `composed`, if present, computes the same with tch operations. The
//! rules of each norm are in [`crate::norm`].

pub mod adam;
pub mod attention;
pub mod best;
pub mod columns;
pub mod cross_entropy;
pub mod dropout;
pub mod launch;
pub mod math;
pub mod packed;
pub mod product;
pub mod relu_dropout;
pub mod residual_step;
pub mod row_sum;
pub mod rows;
pub mod view;
