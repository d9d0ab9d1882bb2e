//! RepBN is BatchNorm plus a learned share of x: y = BN(x) + η·x. PRepBN fades to RepBN from a norm of rows:
//! y = λ·LN(x) + (1−λ)·RepBN(x) in training, RepBN(x) in evaluation (Guo et al. 2024; docs/spec.md §1.18,
//! §1.19).
//!
//! In update t, λ = min(1, max(0, 1 − (t − 1 − w)/T)). While t ≤ w, RepBN and its statistics are not computed.

use super::batch_norm::{self, ALPHA, MEAN, VARIANCE};
use super::operators::BlendedNormOpSpec;
use super::spec::{
    DeclaredShape, Form, NormArgs, NormOption, Parameter, Quantity, Spec, BIAS, CLOCK, EPS, SYNC, WEIGHT,
};
use super::{layer_norm, rms_norm};
use crate::choice;
use crate::options::{at_least_one, not_negative, option_spec};

choice! {
    /// The initial γ and η of RepBN: both 1, as in the authors' image models, or both 0, as in their Llama.
    pub enum Start ("repbn_start") { Ones = "ones", Zeros = "zeros" }
}

choice! {
    /// The norm of rows from which prepbn fades: LayerNorm, or RMSNorm as in the authors' Llama.
    pub enum FadesFrom ("prepbn_row") { LayerNorm = "layernorm", RmsNorm = "rmsnorm" }
}

pub static SPEC: Spec = Spec {
    name: "repbn",
    module: "RepBN",
    equation: "y = γ⊙(x−μ_B)/√(σ²_B+ε)+β+η·x per feature over real positions; running μ, σ² in evaluation",
    source: "Guo et al. 2024 (SLAB), and its code",
    parameters: &[GAMMA, BIAS, SHARE],
    buffers: &[MEAN, VARIANCE],
    options: &[EPS, NormOption::of("alpha", &ALPHA), NormOption::of("start", &START), SYNC],
    form: Form::Blended(&BlendedNormOpSpec { columns: &batch_norm::OPERATOR, from: None }),
};

pub static PROGRESSIVE: Spec = Spec {
    name: "prepbn",
    module: "PRepBN",
    equation: "y = λ·LN(x)+(1−λ)·repbn(x), λ = 1−(t−1−w)/T between 1 and 0 in update t; repbn(x) in evaluation",
    source: "Guo et al. 2024 (SLAB), and its code",
    parameters: &[
        GAMMA,
        BIAS,
        SHARE,
        Parameter::new("row_weight", DeclaredShape::Width, 1.0).gain(),
        Parameter {
            is_present: |given| !fades_from_rms(given),
            ..Parameter::new("row_bias", DeclaredShape::Width, 0.0)
        },
    ],
    buffers: &[MEAN, VARIANCE, CLOCK],
    options: &[
        EPS,
        NormOption::of("alpha", &ALPHA),
        NormOption::of("steps", &STEPS),
        NormOption::of("warm", &WARM),
        NormOption::of("row", &ROW),
        NormOption::of("start", &START),
        SYNC,
    ],
    form: Form::Blended(&BlendedNormOpSpec {
        columns: &batch_norm::OPERATOR,
        from: Some(|given| if fades_from_rms(given) { &rms_norm::OPERATOR } else { &layer_norm::OPERATOR }),
    }),
};

/// γ, with the initial value that the option `start` chooses.
const GAMMA: Parameter = Parameter { start: INITIAL, ..WEIGHT };
/// η, the learned factor of x, with the same initial value.
const SHARE: Parameter = Parameter { start: INITIAL, ..Parameter::one("share", 1.0).gain() };
const INITIAL: Quantity =
    Quantity::By("1, or 0 if start is zeros", |given| (!given.is("start", Start::Zeros.name())).into());

option_spec! {
    /// Initial γ and η of repbn and of prepbn's part of it: 1, or 0.
    START ("repbn_start"): Start = Start::Ones;
    /// Number T of updates in which prepbn's λ falls from 1 to 0; with the warm-up at most the run's updates.
    STEPS ("prepbn_steps"): i64 = 4000, at_least_one;
    /// Number w of updates before that in which prepbn is the norm of rows alone.
    WARM ("prepbn_warm"): i64 = 0, not_negative;
    /// Norm of rows from which prepbn fades.
    ROW ("prepbn_row"): FadesFrom = FadesFrom::LayerNorm;
}

/// True if the norm of rows is RMSNorm, which has no bias.
fn fades_from_rms(given: &NormArgs) -> bool {
    given.is("row", FadesFrom::RmsNorm.name())
}
