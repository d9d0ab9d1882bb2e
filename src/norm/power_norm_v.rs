//! PN-V, PowerNorm with the batch's own statistic: x̂ = x/√(ψ²_B + ε), ψ²_B = mean x² per feature over real rows (no
//! padding), y = γ⊙x̂ + β (Shen et al. 2020, Definition 1, eq 4–6; docs/spec.md §1.8).
//!
//! In training ψ² ← αψ² + (1−α)ψ²_B; evaluation uses this running ψ². The gradient is exact: dx = (γ/ψ_B)[dy −
//! x̂⊙mean(dy⊙x̂)].

use super::group_scaling::GROUPS;
use super::operators::ColumnNormOpSpec;
use super::power_norm::ALPHA_FWD;
use super::spec::{DeclaredShape, Form, NormOption, Spec, StateBuffer, BIAS, EPS, SYNC, WEIGHT};
use super::statistics::{AppliedStatistics, BatchTensors, StateTensors};
use crate::column_program;
use crate::error::Result;
use crate::kernel::columns::{BatchStatistics, ColumnNormKernel, ColumnOptions, State, Stats};

pub static SPEC: Spec = Spec {
    name: "powernorm-v",
    module: "PowerNormV",
    equation: "y = γ⊙x/√(ψ²_B+ε)+β, ψ²_B = mean x² per feature over real positions; running ψ² in evaluation",
    source: "Shen et al. 2020, Definition 1",
    parameters: &[WEIGHT, BIAS],
    buffers: &[StateBuffer::new("running_phi", DeclaredShape::Width, 1.0)],
    options: &[EPS, NormOption::of("alpha", &ALPHA_FWD), GROUPS, SYNC],
    form: Form::Columns(&OPERATOR),
};

pub static OPERATOR: ColumnNormOpSpec = ColumnNormOpSpec {
    operator: "power_norm_v",
    state: ["running_phi", "unused"],
    kernel: ColumnNormKernel {
        centred: false,
        approximate: false,
        settle,
        program: column_program!("power_norm_v.cu"),
    },
    composed: settle_composed,
};

/// Updates the running ψ² in training, and returns the statistics to apply: in evaluation the running ones, otherwise
/// the batch's.
fn settle(batch: &BatchStatistics, state: &mut State, o: &ColumnOptions) -> Stats {
    if !o.train && !state.first.is_empty() {
        return Stats::new(&batch.mean, state.first, o.eps); // the mean of a norm that does not centre is 0
    }
    if o.train && !state.first.is_empty() && state.accepts(batch.count, &[&batch.square]) {
        let moved = state.first.iter_mut().zip(&batch.square);
        moved.for_each(|(phi, b)| *phi = o.alpha * *phi + (1.0 - o.alpha) * b);
    }
    Stats::of_batch(batch, o.eps)
}

/// Computes the same as `settle` with PyTorch's operations.
fn settle_composed(batch: &BatchTensors, state: &StateTensors, o: &ColumnOptions) -> Result<AppliedStatistics> {
    let Some(phi) = &state.first else { return batch.used(o) };
    if !o.train {
        return AppliedStatistics::running(None, phi, batch, o);
    }
    state.move_to(phi, &batch.square, o.alpha, &state.accepts(batch, &[&batch.square])?)?;
    batch.used(o)
}
