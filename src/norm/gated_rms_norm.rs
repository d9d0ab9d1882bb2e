//! gated-rmsnorm: y = n⊙σ(W₂ silu(W₁ n)) with n = γ⊙x/√(mean x²+ε) over the last dimension (A.X-K2; docs/spec.md
//! §1.17).

use super::composed::product;
use super::rms_norm;
use super::spec::{Form, NormOption, Parameter, Size, Spec, EPS, WEIGHT};
use crate::options::{at_least_one, option_spec};

pub static SPEC: Spec = Spec {
    name: "gated-rmsnorm",
    module: "GatedRMSNorm",
    equation: "y = n⊙σ(W₂ silu(W₁ n)), n = γ⊙x/√(mean x²+ε) over the last dimension; W₁ (r, d), W₂ (d, r), r = 16",
    source: "A.X-K2; transformers' AXK2GatedRMSNorm",
    parameters: &[
        WEIGHT,
        Parameter::matrix("gate_down", [RANK_SIDE, Size::Width], STD),
        Parameter::matrix("gate_up", [Size::Width, RANK_SIDE], STD),
    ],
    buffers: &[],
    options: &[EPS, NormOption::of("rank", &RANK)],
    form: Form::Whole(|x, parameters, given| {
        let mut n = rms_norm::x_hat(x, &[], given)?;
        // γ, W₁ and W₂, in the order in which they are declared above. Only γ may be left out.
        let [weight, down, up] = [0, 1, 2].map(|i| parameters[i].as_ref());
        if let Some(weight) = weight {
            n = n.f_mul(weight)?;
        }
        let hidden = product(&n, down.expect("declared"), given.width)?.f_silu()?;
        Ok(n.f_mul(&hidden.f_linear::<&tch::Tensor>(up.expect("declared"), None)?.f_sigmoid()?)?)
    }),
};

/// The standard deviation of the initial W₁ and W₂, A.X-K2's initializer_range.
const STD: f64 = 0.02;
/// The side of W₁ and W₂ whose length is the option `rank`.
const RANK_SIDE: Size = Size::By("rank");

option_spec! {
    /// Rank r of gated-rmsnorm.
    RANK ("gated_rmsnorm_rank"): i64 = 16, at_least_one;
}
