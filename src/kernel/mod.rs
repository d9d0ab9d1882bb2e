//! Kernels: safe functions on slices for a range of rows, and in the folder of each what takes an operator's tensors there:
//! `call` hands views to threads on the CPU or to a launch on a GPU; `composed`, where it is there, is the same in tch. A
//! norm's own rules are in [`crate::norm`].

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
