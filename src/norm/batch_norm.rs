//! BatchNorm over the real rows of a batch (not the padding): y = γ⊙(x − μ_B)/√(σ²_B + ε) + β per feature, σ² biased
//! (Ioffe and Szegedy 2015; Shen et al. 2020, Algorithm 1; docs/spec.md §1.7).
//!
//! In training μ ← αμ + (1−α)μ_B, and the same for σ²; evaluation uses these running statistics. The gradient is
//! exact: dx = (γ/σ_B)[dy − mean dy − x̂⊙mean(dy⊙x̂)] (eq 1–3).

use super::group_scaling::GROUPS;
use super::operators::ColumnNormOpSpec;
use super::spec::{DeclaredShape, Form, NormOption, Spec, StateBuffer, BIAS, EPS, SYNC, WEIGHT};
use super::statistics::{AppliedStatistics, BatchTensors, StateTensors};
use crate::column_program;
use crate::error::Result;
use crate::kernel::columns::{BatchStatistics, ColumnNormKernel, ColumnOptions, State, Stats};
use crate::options::{below_one, option_spec};

pub static SPEC: Spec = Spec {
    name: "batchnorm",
    module: "BatchNorm",
    equation: "y = γ⊙(x−μ_B)/√(σ²_B+ε)+β per feature over real positions; running μ, σ² in evaluation",
    source: "Ioffe & Szegedy 2015; Shen et al. 2020, Algorithm 1",
    parameters: &[WEIGHT, BIAS],
    buffers: &[MEAN, VARIANCE],
    options: &[EPS, NormOption::of("alpha", &ALPHA), GROUPS, SYNC],
    form: Form::Columns(&OPERATOR),
};

/// The running mean μ, initially 0.
pub(super) const MEAN: StateBuffer = StateBuffer::new("running_mean", DeclaredShape::Width, 0.0);
/// The running variance σ², initially 1.
pub(super) const VARIANCE: StateBuffer = StateBuffer::new("running_var", DeclaredShape::Width, 1.0);

option_spec! {
    /// Decay α of the running statistics of batchnorm, repbn and prepbn: old·α + new·(1 − α).
    pub(super) ALPHA ("batchnorm_alpha"): f64 = 0.9, below_one;
}

pub static OPERATOR: ColumnNormOpSpec = ColumnNormOpSpec {
    operator: "batch_norm",
    state: ["running_mean", "running_var"],
    kernel: ColumnNormKernel { centred: true, approximate: false, settle, program: column_program!("batch_norm.cu") },
    composed: settle_composed,
};

/// Updates the running mean (`state.first`) and variance (`state.second`) in training. Returns the statistics to apply:
/// in evaluation the running ones if there are any, otherwise the batch's. The state's buffers are empty if the norm
/// keeps no running statistics.
fn settle(batch: &BatchStatistics, state: &mut State, options: &ColumnOptions) -> Stats {
    if !options.train && !state.first.is_empty() {
        return Stats::new(state.first, state.second, options.eps);
    }
    // `accepts` is false for a batch without rows or with statistics that are not finite.
    if options.train && !state.first.is_empty() && state.accepts(batch.count, &[&batch.mean, &batch.square]) {
        let alpha = options.alpha;
        for (running, now) in [(&mut *state.first, &batch.mean), (&mut *state.second, &batch.square)] {
            running.iter_mut().zip(now).for_each(|(running, now)| *running = alpha * *running + (1.0 - alpha) * now);
        }
    }
    Stats::of_batch(batch, options.eps)
}

/// Computes the same as `settle` with PyTorch's operations. The state's buffers are `None` if the norm keeps no running
/// statistics.
fn settle_composed(batch: &BatchTensors, state: &StateTensors, options: &ColumnOptions) -> Result<AppliedStatistics> {
    let (Some(mean), Some(variance)) = (&state.first, &state.second) else { return batch.used(options) };
    if !options.train {
        return AppliedStatistics::running(Some(mean), variance, batch, options);
    }
    let accepted = state.accepts(batch, &[&batch.mean()?, &batch.square])?;
    state.move_to(mean, &batch.mean()?, options.alpha, &accepted)?;
    state.move_to(variance, &batch.square, options.alpha, &accepted)?;
    batch.used(options)
}
