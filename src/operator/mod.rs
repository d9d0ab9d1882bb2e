//! The operators: each declared in one file, registered with PyTorch's dispatcher by the C++ side, which knows none of
//! them. This crate's kernels compute them on the CPU and GPUs, formulas elsewhere; Rust calls them through the
//! dispatcher, differentiable, with no Python.
//!
//! Nobody outside this module knows autograd's mechanics.

mod adam;
mod attention;
mod collective;
mod column_norm;
mod composite;
mod count;
mod cross_entropy;
mod declare;
mod device;
mod device_columns;
mod device_rows;
mod engine;
mod ffi;
mod recompute;
mod relu_dropout;
mod residual;
mod row_norm;
mod stream;
mod transfer;

pub use adam::{adam_in_place, AdamBuffers};
pub use attention::{attention, gather, padded_attention};
pub use collective::Group;
pub use column_norm::{column_norm, Column, ColumnKernels};
pub use composite::{group_scaling, norm_by_name};
pub use cross_entropy::{cross_entropy, cross_entropy_in_place};
pub use engine::{backward_from, register, set_grad};
pub use recompute::recomputed;
pub use relu_dropout::relu_dropout;
pub use residual::{dropout, Step};
pub use row_norm::{row_norm, RowKernels, Rowwise};
pub use stream::SideStream;
pub use transfer::{Cargo, Hold, Late};

use crate::cuda::{self, Program};
use crate::kernel;
use crate::norm::{COLUMN_NORMS, ROW_NORMS};
use declare::Operator;
use std::sync::OnceLock;

/// Every operator, but for the backward ones.
fn operators() -> &'static [Operator] {
    static ALL: OnceLock<Vec<Operator>> = OnceLock::new();
    ALL.get_or_init(|| {
        let steps = ROW_NORMS.iter().copied().map(Some).chain([None]);
        let norms = ROW_NORMS.iter().map(|k| row_norm::operator(k)).chain(steps.map(residual::operator));
        let columns = COLUMN_NORMS.iter().map(|k| column_norm::operator(k));
        let others = [
            relu_dropout::operator(),
            attention::operator(),
            cross_entropy::operator(),
            cross_entropy::in_place_operator(),
            adam::operator(),
            composite::lp_norm_operator(),
            composite::lp_norm_on_device(),
            composite::group_scaling_operator(),
            composite::composed_norm(),
        ];
        norms.chain(columns).chain(others).collect()
    })
}

/// (operator, kernel calls, composed calls) of every operator since the process started.
pub fn counts() -> Vec<(&'static str, u64, u64)> {
    let fixed = [
        &residual::COUNT,
        &relu_dropout::COUNT,
        &attention::COUNT,
        &cross_entropy::COUNT,
        &composite::COUNT,
        &adam::COUNT,
    ];
    ROW_NORMS
        .iter()
        .flat_map(|k| [&k.count, &k.residual_count])
        .chain(COLUMN_NORMS.iter().map(|k| &k.count))
        .chain(fixed)
        .map(|c| {
            let (kernel, composed) = c.read();
            (c.operator, kernel, composed)
        })
        .collect()
}

/// Every program of CUDA kernels.
pub fn programs() -> Vec<&'static Program> {
    let rows = ROW_NORMS.iter().map(|k| &k.program);
    let columns = COLUMN_NORMS.iter().map(|k| &k.program);
    let others = [&kernel::relu_dropout::PROGRAM, &kernel::cross_entropy::PROGRAM, &kernel::adam::PROGRAM, &cuda::SUMS];
    rows.chain([&kernel::residual_step::NO_NORM]).chain(columns).chain(others).collect()
}
