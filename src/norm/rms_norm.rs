//! RMSNorm: y = γ⊙x/√(mean x² + ε) over the last dimension (Zhang and Sennrich 2019; docs/spec.md §1.3).

use crate::cpu::Accumulator;
use crate::error::Result;
use crate::init::Fill;
use crate::kernel::rows::{hypotenuse, magnitude, sum, trusted, Measured, RowNorm, Slope, Sums};
use crate::model::Builder;
use crate::norm::{accumulate, Build, Norm, Rowwise, Site, Spec};
use crate::operator::RowKernels;
use crate::row_program;
use tch::Tensor;

/// Row kernel: scale = 1/√(mean x² + ε).
///
/// dx = scale·(g − x̂·mean(g⊙x̂)).
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm;

impl RowNorm for RmsNorm {
    const STATS: usize = 1;

    fn measure<A: Accumulator>(sums: &Sums<A>, eps: A) -> Option<Measured<A>> {
        let square = sums.squares / sums.cols + eps;
        trusted(square).then(|| Measured { shift: A::ZERO, scale: A::ONE / square.sqrt() })
    }

    fn measure_scaled<A: Accumulator>(x: &[A], eps: A) -> Measured<A> {
        let unit = magnitude(x);
        let total = if unit > A::ZERO { sum(x, |v| v / unit * (v / unit)) } else { unit };
        let root = (total / A::from_f64(x.len() as f64)).sqrt() * unit;
        Measured { shift: A::ZERO, scale: A::ONE / hypotenuse(root, eps.sqrt()) }
    }

    fn slope<A: Accumulator>(row: Measured<A>, _: A, cols: A, _: A, sum_gx: A) -> Slope<A> {
        Slope { p: row.scale, q: -(row.scale / cols * sum_gx), r: A::ZERO }
    }
}

pub static SPEC: Spec = Spec {
    name: "rmsnorm",
    equation: "y = γ⊙x/√(mean x²+ε) over the last dimension",
    source: "Zhang & Sennrich 2019; Nguyen & Salazar 2019, §4.2",
    build: Build::Own(build),
};

pub static KERNELS: RowKernels =
    RowKernels::of::<RmsNorm>(["rms_norm", "rms_norm_residual"], composed, row_program!("rms_norm.cu"));

/// γ = 1, ε = 1e-5.
fn build(b: &mut Builder, site: &Site) -> Result<Box<dyn Norm>> {
    let weight = Some(b.parameter("weight", &[site.width], &Fill::Constant(1.0))?);
    Ok(Box::new(Rowwise { kernels: &KERNELS, weight, bias: None, eps: site.config.norm_eps.unwrap_or(1e-5) }))
}

fn composed(x: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    let wide = accumulate(x)?;
    let square = wide.f_square()?.f_mean_dim([-1i64].as_slice(), true, None)?;
    let mut y = wide.f_mul(&square.f_add_scalar(eps)?.f_rsqrt()?)?;
    if let Some(weight) = weight {
        y = y.f_mul(&weight.f_to_kind(wide.kind())?)?;
    }
    if let Some(bias) = bias {
        y = y.f_add(&bias.f_to_kind(wide.kind())?)?;
    }
    Ok(y.f_to_kind(x.kind())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::rows::tests::{check, check_nan, check_scale_invariance, check_splitting, Formula};

    fn normalised(x: &[f64], eps: f64) -> (Vec<f64>, f64) {
        let divisor = (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64 + eps).sqrt();
        (x.iter().map(|v| v / divisor).collect(), divisor)
    }

    fn dx(x: &[f64], g: &[f64], eps: f64) -> Vec<f64> {
        let (h, divisor) = normalised(x, eps);
        let mean = g.iter().zip(&h).map(|(g, h)| g * h).sum::<f64>() / x.len() as f64;
        g.iter().zip(&h).map(|(g, h)| (g - h * mean) / divisor).collect()
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
