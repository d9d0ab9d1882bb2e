//! ScaleNorm: y = g·x/max(n, ε) with n = ‖x‖₂ over the last dimension (Nguyen & Salazar 2019, eq 5; docs/spec.md
//! §1.4).

use super::lp_norm;
use crate::cpu::Accumulator;
use crate::error::Result;
use crate::kernel::rows::{magnitude, sum, trusted, Measured, RowGradient, RowNorm, RowNormKernel, Sums};
use crate::norm::operators::RowNormOpSpec;
use crate::norm::spec::{Form, NormArgs, NormOption, Spec, EPS, GAIN};
use crate::row_program;
use tch::Tensor;

/// The row kernel of ScaleNorm: scale = 1/max(n, ε). So x̂ = u = x/n, except where ε is larger than n.
///
/// dx = (g/n)(dy − u⟨u, dy⟩) if n > ε, else (g/ε)dy: this is App C of Nguyen & Salazar 2019, plus the gradient of the
/// maximum.
#[derive(Clone, Copy, Debug)]
pub struct ScaleNorm;

impl RowNorm for ScaleNorm {
    const STATS: usize = 1;

    /// Returns the scale 1/max(n, ε); `None` if the squares overflowed or lost bits.
    fn measure<A: Accumulator>(sums: &Sums<A>, eps: A) -> Option<Measured<A>> {
        // If n is below ε, the sum of squares may be imprecise, because 1/ε replaces 1/n.
        trusted(sums.squares.max(eps * eps)).then(|| clamped(A::ONE / sums.squares.sqrt(), eps))
    }

    /// Returns the scale 1/max(n, ε) for a row whose squares leave the range.
    fn measure_scaled<A: Accumulator>(x: &[A], eps: A) -> Measured<A> {
        // Numbers are divided by the largest one, so that their squares stay in range.
        let unit = magnitude(x);
        // In a row of zeros 1/unit is infinite whatever the square, and `clamped` makes it 1/ε.
        let square = if unit > A::ZERO { sum(x, |v| v / unit * (v / unit)) } else { A::ONE };
        // The length n may leave the range although 1/n does not, so 1/n is computed in two steps.
        clamped(A::ONE / unit / square.sqrt(), eps)
    }

    /// Returns the coefficients of dx = p·g + q·x̂ − r, from Σg⊙x̂ over the row.
    fn gradient<A: Accumulator>(row: Measured<A>, eps: A, _cols: A, _sum_g: A, sum_gx: A) -> RowGradient<A> {
        // Where ε limits the length, the divisor is a constant, so q is 0.
        let q = if row.scale >= A::ONE / eps { A::ZERO } else { -(row.scale * sum_gx) };
        RowGradient { p: row.scale, q, r: A::ZERO }
    }
}

/// Returns the measured row with `scale` = 1/n limited to 1/ε. The comparison keeps NaN; a minimum would not.
fn clamped<A: Accumulator>(scale: A, eps: A) -> Measured<A> {
    let most = A::ONE / eps;
    Measured { shift: A::ZERO, scale: if scale >= most { most } else { scale } }
}

pub static SPEC: Spec = Spec {
    name: "scalenorm",
    module: "ScaleNorm",
    equation: "y = g·x/max(‖x‖₂, ε) over the last dimension, one learned g = √d",
    source: "Nguyen & Salazar 2019, eq 5",
    parameters: &[GAIN],
    buffers: &[],
    options: &[EPS],
    form: Form::Rows(&OPERATOR),
};

pub static FIXED: Spec = Spec {
    name: "scalenorm-fixed",
    module: "FixedScaleNorm",
    equation: "scalenorm with g = √d not learned, but for the decoder's last norm",
    source: "Nguyen & Salazar 2019, Table 7",
    parameters: &[GAIN],
    buffers: &[],
    options: &[EPS, NormOption::at("elementwise_affine", None, |context| context.last_of_decoder.into())],
    form: Form::Rows(&OPERATOR),
};

pub static OPERATOR: RowNormOpSpec = RowNormOpSpec {
    operator: "scale_norm",
    residual: "scale_norm_residual",
    numbers: &[],
    kernel: RowNormKernel::of::<ScaleNorm>(row_program!("scale_norm.cu")),
    x_hat,
};

/// Returns x̂ = x/max(‖x‖₂, ε).
fn x_hat(x: &Tensor, _inside: &[Tensor], given: &NormArgs) -> Result<Tensor> {
    let euclidean = 2.0;
    Ok(x.f_div(&lp_norm::clamped_length(x, euclidean, given.float("eps"))?)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::rows::tests::{check, check_nan, check_scale_invariance, check_splitting, Formula};
    use crate::kernel::rows::{backward, forward, RowNormFns};

    /// Returns x̂ and max(‖x‖₂, ε) by the formula.
    fn normalised(x: &[f64], eps: f64) -> (Vec<f64>, f64) {
        let divisor = x.iter().map(|v| v * v).sum::<f64>().sqrt().max(eps);
        (x.iter().map(|v| v / divisor).collect(), divisor)
    }

    /// Returns dx for the gradient g of x̂, by the formula.
    fn dx(x: &[f64], g: &[f64], eps: f64) -> Vec<f64> {
        let (u, divisor) = normalised(x, eps);
        // ⟨u, g⟩; where ε limits the length, the length has no gradient.
        let along: f64 = if divisor > eps { g.iter().zip(&u).map(|(g, u)| g * u).sum() } else { 0.0 };
        g.iter().zip(&u).map(|(g, u)| (g - u * along) / divisor).collect()
    }

    #[test]
    fn equals_the_formula() {
        check::<ScaleNorm>(&Formula { normalised, dx });
    }

    #[test]
    fn scaling_x_changes_nothing() {
        check_scale_invariance::<ScaleNorm>();
    }

    #[test]
    fn rows_are_independent() {
        check_splitting::<ScaleNorm>();
    }

    #[test]
    fn nan_stays_in_its_row() {
        check_nan::<ScaleNorm>();
    }

    #[test]
    fn the_clamp_has_its_own_gradient() {
        // The length ‖x‖ = 0.05 lies below ε = 0.1 and above ε = 0.01.
        let (x, dy) = ([0.03f32, 0.04], [1.0f32, 2.0]);
        for (eps, want_y, want_dx, want_dg) in
            [(0.1, [0.9f32, 1.2], [30.0f32, 60.0], 1.1f32), (0.01, [1.8, 2.4], [-19.2, 14.4], 2.2)]
        {
            let (mut y, mut dx, mut stats, mut dg) = ([0.0; 2], [0.0; 2], [0.0; 1], [0.0; 1]);
            forward::<f32>(&RowNormFns::of::<ScaleNorm>(), 2, &x, &[3.0], &[], eps, &mut y, &mut stats);
            backward::<f32>(&RowNormFns::of::<ScaleNorm>(), 2, &dy, &x, &[3.0], eps, &stats, &mut dx, &mut dg, &mut []);
            let near = |a: f32, b: f32| (a - b).abs() < 1e-5 * b.abs().max(1.0);
            assert!(near(y[0], want_y[0]) && near(y[1], want_y[1]), "{y:?}");
            assert!(near(dx[0], want_dx[0]) && near(dx[1], want_dx[1]), "{dx:?}");
            assert!(near(dg[0], want_dg), "{dg:?}");
        }
    }
}
