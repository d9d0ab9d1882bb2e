//! PowerNorm: each feature of x is divided by its running root mean square, and the gradient uses a running ν (Shen
//! et al. 2020, Definition 3, Algorithm 2, eq 8–13; docs/spec.md §1.9).
//!
//! > x̂ = x/√(ψ² + ε),  y = γ⊙x̂ + β,  then ψ² ← αψ² + (1−α)ψ²_B
//! > G = γ⊙dy,  X′ = G − ν⊙x̂,  dx = X′/√(ψ² + ε),  then ν ← ν(1 − (1−α_b)Γ) + (1−α_b)Λ
//!
//! Here Γ = mean(x̂²), Λ = mean(G⊙x̂), and dx uses the ψ² of the forward pass. The buffer `ema_gz` is ν/(1−α_b). In the
//! first updates, while t ≤ warm-up, the forward pass divides by the batch's own ψ_B and has PN-V's exact gradient, and
//! the running ψ² is the mean of all batches' ψ²_B so far. The release mode computes what the authors'
//! mask_powernorm.py does, including the group scaling at its beginning.

use super::group_scaling::GROUPSCALING;
use super::operators::ColumnNormOpSpec;
use super::spec::{DeclaredShape, Form, NormContext, NormOption, Spec, StateBuffer, BIAS, EPS, WEIGHT};
use super::statistics::{AppliedStatistics, BatchTensors, StateTensors};
use crate::choice;
use crate::column_program;
use crate::cpu::memory;
use crate::error::Result;
use crate::kernel::columns::{BatchStatistics, ColumnNormKernel, ColumnOptions, State, Stats};
use crate::options::{below_one, not_negative, option_spec};
use tch::Tensor;

choice! {
    /// The version of PowerNorm (docs/spec.md §1.9).
    pub enum PowerNormMode ("powernorm_mode") { Paper = "paper", Release = "release" }
}

/// The warm-up of the norm after a stack in the authors' code, in training passes.
const RELEASED_END_WARMUP: i64 = 1000;

pub static SPEC: Spec = Spec {
    name: "powernorm",
    module: "PowerNorm",
    equation: "y = γ⊙x/√(ψ²+ε)+β with the running ψ² of the step before; running ν in the gradient",
    source: "Shen et al. 2020, Definition 3, Algorithm 2",
    parameters: &[WEIGHT, BIAS],
    buffers: &[
        StateBuffer::new("running_phi", DeclaredShape::Column, 1.0),
        StateBuffer::new("ema_gz", DeclaredShape::Column, 0.0),
        StateBuffer { is_counter: true, ..StateBuffer::new("iters", DeclaredShape::One, 0.0) },
    ],
    options: &[
        EPS,
        NormOption::of("alpha_fwd", &ALPHA_FWD),
        NormOption::of("alpha_bwd", &ALPHA_BWD),
        NormOption::at("warmup_iters", Some(&WARMUP), |context| match is_release(context) && context.ends_stack {
            true => RELEASED_END_WARMUP.into(),
            false => context.options.get(&WARMUP).into(),
        }),
        NormOption::of("mode", &MODE),
        // In the authors' models, group scaling has one group for each head.
        NormOption::at("groups", Some(&GROUPSCALING), |context| match is_release(context) {
            true => context.heads.into(),
            false => context.options.get(&GROUPSCALING).into(),
        }),
        NormOption::of("sync", &POWERNORM_SYNC),
    ],
    form: Form::Columns(&OPERATOR),
};

option_spec! {
    /// Decay α of the running ψ² of powernorm and powernorm-v.
    pub(super) ALPHA_FWD ("powernorm_alpha_fwd"): f64 = 0.9, below_one;
    /// Decay α of powernorm's ν.
    ALPHA_BWD ("powernorm_alpha_bwd"): f64 = 0.9, below_one;
    /// Number of training passes of powernorm's warm-up; set it to the learning rate's warm-up.
    WARMUP ("powernorm_warmup"): i64 = 4000, not_negative;
    /// Version of powernorm: as the paper defines it, or step for step as its authors released it.
    pub MODE ("powernorm_mode"): PowerNormMode = PowerNormMode::Paper;
    /// Take powernorm's statistics over all ranks together, as batchnorm's and powernorm-v's always are.
    POWERNORM_SYNC ("powernorm_sync"): bool = false;
}

/// True if the model's options choose the variant that the authors released.
fn is_release(context: &NormContext) -> bool {
    context.options.get(&MODE) == PowerNormMode::Release
}

pub static OPERATOR: ColumnNormOpSpec = ColumnNormOpSpec {
    operator: "power_norm",
    state: ["running_phi", "ema_gz"],
    kernel: ColumnNormKernel { centred: false, approximate: true, settle, program: column_program!("power_norm.cu") },
    composed: settle_composed,
};

/// Returns the statistics to apply: the running ones from before this pass, or during warm-up the batch's own. In
/// training, also updates ψ² (`state.first`, the authors' φ) and the number of updates t.
fn settle(batch: &BatchStatistics, state: &mut State, options: &ColumnOptions) -> Stats {
    let running = Stats::new(&batch.mean, state.first, options.eps); // the mean of a norm that does not centre is 0
    if !options.train {
        return running;
    }
    let own = Stats::of_batch(batch, options.eps);
    let t = state.iters[0] + 1; // the number of this update, from 1
    let warming = t <= options.warmup && batch.count > 0.0;
    let used = if warming { Stats::of_batch(batch, options.eps) } else { running };
    // The authors' code divides by the number of all rows, padding included.
    let divisor = if options.release { batch.rows } else { batch.count };
    let squares = batch.square_of_all.as_ref().unwrap_or(&batch.square);
    // `gamma` is Γ = mean x̂². The backward pass multiplies sums by `share`, and uses `slope` in place of 1/√(ψ² + ε).
    // In the authors' code the gradient is never exact, and its slope is always the batch's own.
    let stats = Stats {
        gamma: memory::collected(squares.iter().zip(&used.scale).map(|(square, scale)| square * scale * scale)),
        share: if batch.count > 0.0 { 1.0 / divisor } else { 0.0 },
        exact: warming && !options.release,
        slope: if options.release && batch.count > 0.0 { own.slope } else { used.slope },
        ..used
    };
    if state.accepts(batch.count, &[&batch.square]) {
        state.iters[0] = t;
        for (phi, now) in state.first.iter_mut().zip(&batch.square) {
            let decayed = |phi: f64| options.alpha * phi + (1.0 - options.alpha) * now;
            let mean_so_far = |phi: f64| phi + (now - phi) / t as f64;
            // During warm-up, the authors' code averages and then also decays; the warm-up's last update only decays.
            *phi = match (options.release, warming) {
                (false, true) => mean_so_far(*phi),
                (true, true) if t < options.warmup => decayed(mean_so_far(*phi)),
                _ => decayed(*phi),
            };
        }
    }
    stats
}

/// Computes the same as `settle` with PyTorch's operations; masks replace its branches on tensors' values.
fn settle_composed(batch: &BatchTensors, state: &StateTensors, options: &ColumnOptions) -> Result<AppliedStatistics> {
    // `phi` is the running ψ², `iters` the number of updates so far.
    let (Some(phi), Some(iters)) = (&state.first, &state.iters) else {
        unreachable!("the operator has asked for both")
    };
    let running = AppliedStatistics::running(None, phi, batch, options)?;
    if !options.train {
        return Ok(running);
    }
    let own = batch.used(options)?;
    let t = iters.f_add_scalar(1)?;
    let has_rows = batch.count.f_gt(0.0)?;
    let warming = t.f_le(options.warmup)?.f_logical_and(&has_rows)?;
    // `a.f_where_self(mask, b)` is a where the mask is true, and b elsewhere.
    let scale = own.scale.f_where_self(&warming, &running.scale)?;
    let slope = if options.release { own.scale.f_where_self(&has_rows, &scale)? } else { scale.shallow_clone() };
    let exact = if options.release { warming.f_zeros_like()? } else { warming.shallow_clone() };
    let divisor = if options.release { &batch.rows } else { &batch.count }.shallow_clone();
    let share = divisor.f_reciprocal()?.f_where_self(&has_rows, &divisor.f_zeros_like()?)?;
    let gamma = batch.square_of_all.as_ref().unwrap_or(&batch.square).f_mul(&scale.f_square()?)?;
    let accepted = state.accepts(batch, &[&batch.square])?;
    let old = running.square;
    let kind = old.kind();
    // ψ² + (ψ²_B − ψ²)/t is the mean so far; ψ² + (ψ²_B − ψ²)(1 − α) is the decayed ψ².
    let gap = |from: &Tensor| batch.square.f_sub(from); // ψ²_B − `from`
    let mean_so_far = old.f_add(&gap(&old)?.f_div(&t.f_to_kind(kind)?)?)?;
    let decayed = |from: &Tensor| from.f_add(&gap(from)?.f_mul_scalar(1.0 - options.alpha)?);
    let moved = match options.release {
        false => mean_so_far.f_where_self(&warming, &decayed(&old)?)?,
        // During warm-up, the authors' code averages and then also decays; the warm-up's last update only decays.
        true => {
            let is_averaged = warming.f_logical_and(&t.f_lt(options.warmup)?)?;
            decayed(&mean_so_far.f_where_self(&is_averaged, &old)?)?
        }
    };
    state.replace(phi, &moved, &accepted)?;
    state.replace(iters, &t, &accepted)?;
    Ok(AppliedStatistics { scale, slope, exact, share, gamma, ..own })
}
