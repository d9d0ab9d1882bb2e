//! Derf, dynamic erf: y = γ⊙erf(αx + s) + β with two learned numbers (Chen et al. 2025; docs/spec.md §1.13).
//!
//! Like DyT, Derf replaces a norm but computes no statistics: y does not depend on its row's mean, variance or length.

use crate::cpu::pack::Isa;
use crate::cpu::Accumulator;
use crate::error::Result;
use crate::kernel::math::erf;
use crate::kernel::rows::{CurveNorm, RowNormKernel};
use crate::norm::operators::RowNormOpSpec;
use crate::norm::spec::{Form, NormArgs, Parameter, Spec, BIAS, WEIGHT};
use crate::row_program;
use tch::Tensor;

/// The curve of Derf: f = erf, f′(z) = 2/√π·exp(−z²).
pub struct Derf;

impl CurveNorm for Derf {
    /// Returns erf(z) and its derivative.
    #[inline(always)]
    fn at<A: Accumulator, S: Isa>(z: A) -> (A, A) {
        erf::<A, S>(z)
    }
}

pub static SPEC: Spec = Spec {
    name: "derf",
    module: "Derf",
    equation: "y = γ⊙erf(αx+s)+β, learned α = 1/2 and s = 0, one number each; no statistics and no ε",
    source: "Chen et al. 2025",
    parameters: &[Parameter::one("alpha", 0.5), Parameter::one("s", 0.0), WEIGHT, BIAS],
    buffers: &[],
    options: &[],
    form: Form::Rows(&OPERATOR),
};

pub static OPERATOR: RowNormOpSpec = RowNormOpSpec {
    operator: "derf",
    residual: "derf_residual",
    numbers: &["alpha", "s"],
    kernel: RowNormKernel::of_curve::<Derf>(row_program!("derf.cu")),
    x_hat,
};

/// Returns x̂ = erf(αx + s); `inside` is [α, s].
fn x_hat(x: &Tensor, inside: &[Tensor], _given: &NormArgs) -> Result<Tensor> {
    Ok(x.f_mul(&inside[0])?.f_add(&inside[1])?.f_erf()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::pack::Baseline;
    use crate::kernel::math;
    use crate::kernel::rows::curve::tests::check;

    #[test]
    fn equals_the_formula() {
        // The expected values use C's erf, in f64.
        check::<Derf>(|z| (math::erf::<f64, Baseline>(z).0, std::f64::consts::FRAC_2_SQRT_PI * (-z * z).exp()));
    }
}
