//! LayerNorm: y = γ⊙(x − μ)/√(σ² + ε) + β over the last dimension, σ² biased (Ba et al. 2016; docs/spec.md §1.2).

use crate::cpu::Accumulator;
use crate::error::Result;
use crate::kernel::rows::{hypotenuse, magnitude, sum, trusted, Measured, RowGradient, RowNorm, RowNormKernel, Sums};
use crate::norm::composed::{in_units, mean, unit};
use crate::norm::operators::RowNormOpSpec;
use crate::norm::spec::{Form, NormArgs, Spec, BIAS, EPS, WEIGHT};
use crate::row_program;
use tch::Tensor;

/// The row kernel of LayerNorm: shift = μ, scale = 1/√(σ² + ε).
///
/// dx = scale·(g − mean g − x̂·mean(g⊙x̂)).
#[derive(Clone, Copy, Debug)]
pub struct LayerNorm;

impl RowNorm for LayerNorm {
    const STATS: usize = 2;

    /// Returns μ and 1/√(σ² + ε); `None` if the squares overflowed or lost bits.
    fn measure<A: Accumulator>(sums: &Sums<A>, eps: A) -> Option<Measured<A>> {
        let (mean, variance) = moments(sums);
        let square = variance + eps;
        trusted(square).then(|| Measured { shift: mean, scale: A::ONE / square.sqrt() })
    }

    /// Returns μ and 1/√(σ² + ε) for a row whose squares leave the range.
    fn measure_scaled<A: Accumulator>(x: &[A], eps: A) -> Measured<A> {
        // Numbers are divided by the largest one, so that their squares stay in range.
        let unit = magnitude(x);
        // A row of zeros has no unit by which to divide.
        if unit == A::ZERO {
            return Measured { shift: A::ZERO, scale: A::ONE / eps.sqrt() };
        }
        // The second sums are about the mean of the first, so that the sum of squares loses few digits.
        let cols = A::from_f64(x.len() as f64);
        let about = sum(x, |v| v / unit) / cols;
        let (sum, squares) = (sum(x, |v| v / unit - about), sum(x, |v| (v / unit - about) * (v / unit - about)));
        let (mean, variance) = moments(&Sums { cols, about, sum, squares });
        Measured { shift: mean * unit, scale: A::ONE / hypotenuse(variance.sqrt() * unit, eps.sqrt()) }
    }

    /// Returns the coefficients of dx = p·g + q·x̂ − r, from Σg and Σg⊙x̂ over the row.
    fn gradient<A: Accumulator>(row: Measured<A>, _eps: A, cols: A, sum_g: A, sum_gx: A) -> RowGradient<A> {
        let share = row.scale / cols;
        RowGradient { p: row.scale, q: -(share * sum_gx), r: share * sum_g }
    }
}

/// Returns the mean and the biased variance of a row. `about` is a guess of the mean, and the sums are of x − `about`.
fn moments<A: Accumulator>(sums: &Sums<A>) -> (A, A) {
    let share = A::ONE / sums.cols;
    // With d = x − about, the mean is about + mean d, and σ² = mean d² − (mean d)². Rounding may make σ² negative.
    let correction = sums.sum * share;
    (sums.about + correction, A::ZERO.max(sums.squares * share - correction * correction))
}

pub static SPEC: Spec = Spec {
    name: "layernorm",
    module: "LayerNorm",
    equation: "y = γ⊙(x−μ)/√(σ²+ε)+β over the last dimension, biased σ²",
    source: "Ba et al. 2016",
    parameters: &[WEIGHT, BIAS],
    buffers: &[],
    options: &[EPS],
    form: Form::Rows(&OPERATOR),
};

pub static OPERATOR: RowNormOpSpec = RowNormOpSpec {
    operator: "layer_norm",
    residual: "layer_norm_residual",
    numbers: &[],
    kernel: RowNormKernel::of::<LayerNorm>(row_program!("layer_norm.cu")),
    x_hat,
};

/// Returns x̂ = (x − μ)/√(σ² + ε).
fn x_hat(x: &Tensor, _inside: &[Tensor], given: &NormArgs) -> Result<Tensor> {
    let eps = given.float("eps");
    // Dividing both x and √ε by `unit` leaves x̂ unchanged, and keeps the squares in range.
    let unit = unit(x, eps)?;
    let x = x.f_div(&unit)?;
    let centred = x.f_sub(&mean(&x, given.width)?)?;
    let variance = mean(&centred.f_square()?, given.width)?;
    Ok(centred.f_mul(&variance.f_add(&in_units(eps, &unit)?)?.f_rsqrt()?)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::rows::tests::{check, check_nan, check_scale_invariance, check_splitting, Formula};
    use crate::kernel::rows::{forward, RowNormFns};

    /// Returns x̂ and √(σ² + ε) by the formula.
    fn normalised(x: &[f64], eps: f64) -> (Vec<f64>, f64) {
        let n = x.len() as f64;
        let mean = x.iter().sum::<f64>() / n;
        let divisor = (x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n + eps).sqrt();
        (x.iter().map(|v| (v - mean) / divisor).collect(), divisor)
    }

    /// Returns dx for the gradient g of x̂, by the formula.
    fn dx(x: &[f64], g: &[f64], eps: f64) -> Vec<f64> {
        let (x_hat, divisor) = normalised(x, eps);
        let n = x.len() as f64;
        let mean_g = g.iter().sum::<f64>() / n;
        let mean_gx = g.iter().zip(&x_hat).map(|(g, h)| g * h).sum::<f64>() / n;
        g.iter().zip(&x_hat).map(|(g, h)| (g - mean_g - h * mean_gx) / divisor).collect()
    }

    #[test]
    fn equals_the_formula() {
        check::<LayerNorm>(&Formula { normalised, dx });
    }

    #[test]
    fn scaling_x_changes_nothing() {
        check_scale_invariance::<LayerNorm>();
    }

    #[test]
    fn rows_are_independent() {
        check_splitting::<LayerNorm>();
    }

    #[test]
    fn nan_stays_in_its_row() {
        check_nan::<LayerNorm>();
    }

    #[test]
    fn a_large_mean_does_not_cancel() {
        // The numbers 2^18 + {0, 1, 2, 3} are exact in f32. The formula E[x²] − μ² would be wrong by more than σ²
        // itself.
        let x: Vec<f32> = (0..512).map(|i| 262144.0 + (i * 7 % 4) as f32).collect();
        let (mut y, mut stats) = (vec![0.0; 512], [0.0; 2]);
        forward::<f32>(&RowNormFns::of::<LayerNorm>(), 512, &x, &[], &[], 0.0, &mut y, &mut stats);
        let want = |v: f32| (v - 262145.5) / 1.25f32.sqrt();
        assert!((stats[1] - 1.0 / 1.25f32.sqrt()).abs() < 1e-6, "{stats:?}");
        assert!(x.iter().zip(&y).all(|(x, y)| (want(*x) - y).abs() < 0.03), "{stats:?}");
    }

    #[test]
    fn an_outlier_in_the_first_columns_does_not_cancel() {
        // The outlier is among the first 128 columns, from which the mean is guessed. The guess is about 1e6/128 =
        // 7812, the mean about 1000.
        let mut x: Vec<f32> = (0..1000).map(|i| (i % 5) as f32 - 2.0).collect();
        x[3] = 1e6;
        let wide: Vec<f64> = x.iter().map(|v| *v as f64).collect();
        let (mut y, mut stats) = (vec![0.0; 1000], [0.0; 2]);
        forward::<f32>(&RowNormFns::of::<LayerNorm>(), 1000, &x, &[], &[], 0.0, &mut y, &mut stats);
        let (_, divisor) = normalised(&wide, 0.0);
        assert!((stats[1] as f64 * divisor - 1.0).abs() < 1e-6, "{stats:?} {divisor}");
    }
}
