//! The operators, each declared in one file. The C++ side has no code for a particular operator; it registers them all
//! with PyTorch's dispatcher. This crate's kernels compute them on the CPU and on GPUs, formulas on other devices.
//! Rust calls them through the dispatcher, with gradients and without Python.
//!
//! Only this module deals with autograd's mechanics.

mod adam;
mod allocations;
mod argument;
mod attention;
mod call;
mod collective;
mod column_norm;
mod composite;
mod cross_entropy;
mod declare;
mod dropout;
mod engine;
mod ffi;
mod function;
mod generator;
mod mix_streams;
mod proof;
mod recompute;
mod register;
mod relu_dropout;
mod residual;
mod row_norm;
mod run;
mod sinkhorn;
mod stream;
mod transfer;

pub use adam::{adam_in_place, AdamBuffers};
pub use allocations::peak_of;
pub use attention::{attention, composed_attention, padded_attention};
pub use collective::ProcessGroup;
pub use column_norm::{Column, ColumnNormOp};
pub use composite::{group_scaling, norm_of_ones_own, own_norm};
pub use cross_entropy::{cross_entropy, cross_entropy_in_place};
pub use engine::{backward_from, set_grad, width, Recording};
pub use ffi::caught;
pub use function::{apply, evaluate, Differentiable};
pub use generator::Generator;
pub use mix_streams::mix_streams;
pub use recompute::recomputed;
pub use relu_dropout::relu_dropout;
pub use residual::{dropout, Step};
pub use row_norm::{BoundRowNorm, RowNormOp};
pub use sinkhorn::sinkhorn;
pub use stream::SideStream;
pub use transfer::{upload, Pending};

use crate::cuda::{self, Program};
use declare::Operator;
use std::sync::{LazyLock, Once};

/// All forward operators; each holds its backward operator.
static OPERATORS: LazyLock<Vec<Operator>> = LazyLock::new(|| {
    let norms = RowNormOp::all().iter().map(row_norm::operator);
    // A residual step exists with each row norm, and without a norm (`None`).
    let steps = RowNormOp::all().iter().map(Some).chain([None]).map(residual::operator);
    let columns = ColumnNormOp::all().iter().map(column_norm::operator);
    let others = [
        dropout::operator(),
        relu_dropout::operator(),
        attention::operator(),
        sinkhorn::operator(),
        mix_streams::operator(),
        cross_entropy::operator(),
        cross_entropy::in_place_operator(),
        adam::operator(),
        composite::lp_norm_operator(),
        composite::lp_norm_on_device(),
        composite::conventional_rms_norm(),
        composite::group_scaling_operator(),
        composite::composed_norm(),
    ];
    norms.chain(steps).chain(columns).chain(others).collect()
});

/// Registers the operators with PyTorch; later calls do nothing. It must run before any operator is called: the Python
/// module does so at import, and Rust tests at their first call.
pub fn register() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for operator in OPERATORS.iter() {
            if let Err(e) = register::register(operator) {
                panic!("the operators could not be registered with PyTorch: {e}");
            }
        }
    });
}

/// Returns (name, kernel calls, formula calls) of every operator, counted since the process started. An operator with
/// several forms has several entries.
pub fn counts() -> Vec<(&'static str, u64, u64)> {
    let handles = OPERATORS.iter().filter_map(|operator| operator.handle);
    handles
        .map(|handle| {
            let (kernel, composed) = handle.counts();
            (handle.name, kernel, composed)
        })
        .collect()
}

/// Returns every CUDA program.
pub fn programs() -> Vec<&'static Program> {
    OPERATORS.iter().filter_map(|o| o.program).chain([&cuda::SUMS]).collect()
}

#[cfg(test)]
mod tests {
    use super::declare::Kernels;
    use super::*;
    use crate::norm::ROW_NORMS;

    /// An operator that is declared for GPUs but has no GPU kernel would pass GPU memory to its CPU kernel. The kernels
    /// of the operators in `with_shared_program` are in another operator's program, such as their residual step's.
    #[test]
    fn what_has_kernels_for_gpus_has_a_program() {
        let with_shared_program: Vec<_> =
            ROW_NORMS.iter().map(|k| k.operator).chain(["label_smoothed_cross_entropy_", "lp_norm_forward"]).collect();
        let is_for_gpus = |operator: &Operator| matches!(operator.kernels, Kernels::Everywhere | Kernels::Gpu);
        let without_program = OPERATORS.iter().filter(|operator| operator.program.is_none());
        let names: Vec<_> = without_program
            .filter(|operator| is_for_gpus(operator) || operator.backward.as_deref().is_some_and(is_for_gpus))
            .map(|operator| operator.name())
            .collect();
        assert_eq!(names, with_shared_program);
    }
}
