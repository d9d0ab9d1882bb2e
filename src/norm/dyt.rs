//! DyT, dynamic tanh: y = γ⊙tanh(αx) + β with one learned number α (Zhu et al. 2025; docs/spec.md §1.12).
//!
//! DyT replaces a norm but computes no statistics: y does not depend on its row's mean, variance or length.

use crate::cpu::pack::Isa;
use crate::cpu::Accumulator;
use crate::error::Result;
use crate::kernel::math::tanh;
use crate::kernel::rows::{CurveNorm, RowNormKernel};
use crate::norm::operators::RowNormOpSpec;
use crate::norm::spec::{Form, NormArgs, Parameter, Spec, BIAS, WEIGHT};
use crate::row_program;
use tch::Tensor;

/// The curve of DyT: f = tanh, f′ = 1 − tanh².
pub struct DyT;

impl CurveNorm for DyT {
    /// Returns tanh(z) and its derivative.
    #[inline(always)]
    fn at<A: Accumulator, S: Isa>(z: A) -> (A, A) {
        tanh::<A, S>(z)
    }
}

pub static SPEC: Spec = Spec {
    name: "dyt",
    module: "DyT",
    equation: "y = γ⊙tanh(αx)+β, one learned α, 1/2 at the start; no statistics and no ε",
    source: "Zhu et al. 2025",
    parameters: &[Parameter::one("alpha", 0.5), WEIGHT, BIAS],
    buffers: &[],
    options: &[],
    form: Form::Rows(&OPERATOR),
};

pub static OPERATOR: RowNormOpSpec = RowNormOpSpec {
    operator: "dyt",
    residual: "dyt_residual",
    numbers: &["alpha"],
    kernel: RowNormKernel::of_curve::<DyT>(row_program!("dyt.cu")),
    x_hat,
};

/// Returns x̂ = tanh(αx); `inside` is [α].
fn x_hat(x: &Tensor, inside: &[Tensor], _given: &NormArgs) -> Result<Tensor> {
    Ok(x.f_mul(&inside[0])?.f_tanh()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::rows::curve::tests::check;
    use crate::norm::power_norm_v;
    use tch::Kind;

    #[test]
    fn equals_the_formula() {
        check::<DyT>(|z| (z.tanh(), 1.0 / z.cosh().powi(2)));
    }

    #[test]
    fn the_value_and_gradients_are_the_formulas() {
        let (v, alpha, dy) = ([1.0f64, -2.0, 3.0, -0.1], 0.5, [1.0, 0.5, -1.0, 2.0]);
        let x = Tensor::from_slice(&v).set_requires_grad(true);
        let parameters = [vec![alpha], vec![1.0, 2.0, 0.5, 1.0], vec![0.1; 4]]
            .map(|values: Vec<f64>| Tensor::from_slice(&values).set_requires_grad(true));
        let given = parameters.iter().map(|p| Some(p.shallow_clone())).collect();
        let y = SPEC.composed(&x, 4, given, &[]).unwrap();
        (&y * Tensor::from_slice(&dy)).sum(Kind::Double).backward();
        let mut dalpha = 0.0;
        for (i, (v, dy)) in v.into_iter().zip(dy).enumerate() {
            let (t, gamma) = ((alpha * v).tanh(), [1.0, 2.0, 0.5, 1.0][i]);
            let slope = gamma * dy * (1.0 - t * t);
            dalpha += slope * v;
            let found = |t: &Tensor| t.double_value(&[i as i64]);
            let pairs = [
                (found(&y), gamma * t + 0.1),
                (found(&x.grad()), slope * alpha),
                (found(&parameters[1].grad()), t * dy),
                (found(&parameters[2].grad()), dy),
            ];
            assert!(pairs.iter().all(|(found, wanted)| (found - wanted).abs() < 1e-12), "{i}: {pairs:?}");
        }
        assert!((parameters[0].grad().double_value(&[0]) - dalpha).abs() < 1e-12);
    }

    #[test]
    fn a_call_without_declared_parameters_is_an_error() {
        let x = Tensor::from_slice(&[1.0f64, 2.0]);
        let refused = |spec: &Spec, parameters, options: &[f64]| {
            spec.composed(&x, 2, parameters, options).unwrap_err().to_string()
        };
        assert!(refused(&SPEC, vec![None, None], &[]).contains("takes 3 parameters and 0 options, got 2 and 0"));
        assert!(refused(&SPEC, vec![None, None, None], &[]).contains("needs its parameter alpha"));
        assert!(refused(&power_norm_v::SPEC, vec![None, None], &[0.0; 4]).contains("an operator of its own"));
    }
}
