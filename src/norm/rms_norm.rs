//! RMSNorm: y = γ⊙x/√(mean x² + ε) over the last dimension (Zhang and Sennrich 2019; docs/spec.md §1.3).

use crate::cpu::Accumulator;
use crate::error::Result;
use crate::kernel::rows::{hypotenuse, magnitude, sum, trusted, Measured, RowGradient, RowNorm, RowNormKernel, Sums};
use crate::norm::composed::{in_units, mean, unit};
use crate::norm::conventions::{self, KEYWORDS};
use crate::norm::operators::RowNormOpSpec;
use crate::norm::spec::{Form, NormArgs, Parameter, Quantity, Spec, WEIGHT};
use crate::row_program;
use tch::Tensor;

/// The row kernel of RMSNorm: scale = 1/√(mean x² + ε).
///
/// dx = scale·(g − x̂·mean(g⊙x̂)).
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm;

impl RowNorm for RmsNorm {
    const STATS: usize = 1;

    /// Returns the scale 1/√(mean x² + ε); `None` if the squares overflowed or lost bits.
    fn measure<A: Accumulator>(sums: &Sums<A>, eps: A) -> Option<Measured<A>> {
        let square = sums.squares / sums.cols + eps;
        trusted(square).then(|| Measured { shift: A::ZERO, scale: A::ONE / square.sqrt() })
    }

    /// Returns the scale 1/√(mean x² + ε) for a row whose squares leave the range.
    fn measure_scaled<A: Accumulator>(x: &[A], eps: A) -> Measured<A> {
        // Numbers are divided by the largest one, so that their squares stay in range.
        let unit = magnitude(x);
        // A row of zeros has the sum of squares 0, and no unit by which to divide.
        let total = if unit > A::ZERO { sum(x, |v| v / unit * (v / unit)) } else { unit };
        let root = (total / A::from_f64(x.len() as f64)).sqrt() * unit;
        Measured { shift: A::ZERO, scale: A::ONE / hypotenuse(root, eps.sqrt()) }
    }

    /// Returns the coefficients of dx = p·g + q·x̂ − r, from Σg⊙x̂ over the row.
    fn gradient<A: Accumulator>(row: Measured<A>, _eps: A, cols: A, _sum_g: A, sum_gx: A) -> RowGradient<A> {
        RowGradient { p: row.scale, q: -(row.scale / cols * sum_gx), r: A::ZERO }
    }
}

pub static SPEC: Spec = Spec {
    name: "rmsnorm",
    module: "RMSNorm",
    equation: "y = γ⊙x/√(mean x²+ε) over the last dimension",
    source: "Zhang & Sennrich 2019; Nguyen & Salazar 2019, §4.2",
    parameters: &[Parameter {
        start: Quantity::By("1, or 0 if zero_centred", |given| (!given.flag("zero_centred")).into()),
        offset: Quantity::By("0, or 1 if zero_centred", |given| given.flag("zero_centred").into()),
        ..WEIGHT
    }],
    buffers: &[],
    options: KEYWORDS,
    form: Form::Chosen(&Form::Rows(&OPERATOR), conventions::form),
};

pub static OPERATOR: RowNormOpSpec = RowNormOpSpec {
    operator: "rms_norm",
    residual: "rms_norm_residual",
    numbers: &[],
    kernel: RowNormKernel::of::<RmsNorm>(row_program!("rms_norm.cu")),
    x_hat,
};

/// Returns x̂ = x/√(mean x² + ε).
pub(super) fn x_hat(x: &Tensor, _inside: &[Tensor], given: &NormArgs) -> Result<Tensor> {
    let eps = given.float("eps");
    // Dividing both x and √ε by `unit` leaves x̂ unchanged, and keeps the squares in range.
    let unit = unit(x, eps)?;
    let x = x.f_div(&unit)?;
    let square = mean(&x.f_square()?, given.width)?;
    Ok(x.f_mul(&square.f_add(&in_units(eps, &unit)?)?.f_rsqrt()?)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::rows::tests::{check, check_nan, check_scale_invariance, check_splitting, Formula};

    /// Returns x̂ and √(mean x² + ε) by the formula.
    fn normalised(x: &[f64], eps: f64) -> (Vec<f64>, f64) {
        let divisor = (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64 + eps).sqrt();
        (x.iter().map(|v| v / divisor).collect(), divisor)
    }

    /// Returns dx for the gradient g of x̂, by the formula.
    fn dx(x: &[f64], g: &[f64], eps: f64) -> Vec<f64> {
        let (x_hat, divisor) = normalised(x, eps);
        let mean_gx = g.iter().zip(&x_hat).map(|(g, h)| g * h).sum::<f64>() / x.len() as f64;
        g.iter().zip(&x_hat).map(|(g, h)| (g - h * mean_gx) / divisor).collect()
    }

    #[test]
    fn equals_the_formula() {
        check::<RmsNorm>(&Formula { normalised, dx });
    }

    #[test]
    fn scaling_x_changes_nothing() {
        check_scale_invariance::<RmsNorm>();
    }

    #[test]
    fn rows_are_independent() {
        check_splitting::<RmsNorm>();
    }

    #[test]
    fn nan_stays_in_its_row() {
        check_nan::<RmsNorm>();
    }
}
