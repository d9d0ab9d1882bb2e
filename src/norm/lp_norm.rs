//! LpNorm: y = g·x/max(n, ε), n = ‖x‖_p over the last dimension, p from 1 to ∞ (Nguyen & Salazar 2019, §5;
//! docs/spec.md §1.5).
//!
//! With u = x/n and w = sign(x)(|x|/n)^{p−1} (for p = ∞, sign(x)/k at the k numbers with |x| = n), dx = (g/n)(dy − w⟨u,
//! dy⟩) if n > ε, else (g/ε)dy. p = 2 is ScaleNorm, with its kernels.

use super::composed;
use super::operators::CompositeNormOpSpec;
use super::scale_norm;
use super::spec::{Form, NormOption, Parameter, Quantity, Spec, EPS, GAIN};
use crate::error::{Error, Result};
use crate::options::{option_spec, FieldType};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tch::Tensor;

/// The order p of the norm. JSON has no infinity, so p = ∞ is written as "inf".
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exponent(pub f64);

impl FieldType for Exponent {
    const KIND: &'static str = "float";
}

impl Serialize for Exponent {
    fn serialize<S: Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        match self.0.is_infinite() {
            true => s.serialize_str("inf"),
            false => s.serialize_f64(self.0),
        }
    }
}

impl<'de> Deserialize<'de> for Exponent {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "lpnorm_p must be a number or \"inf\"")]
        enum NumberOrWord {
            Number(f64),
            Word(String),
        }
        match NumberOrWord::deserialize(d)? {
            NumberOrWord::Number(p) => Ok(Exponent(p)),
            NumberOrWord::Word(word) if word == "inf" => Ok(Exponent(f64::INFINITY)),
            NumberOrWord::Word(word) => {
                Err(serde::de::Error::custom(format!("lpnorm_p must be a number or inf, got {word:?}")))
            }
        }
    }
}

pub static SPEC: Spec = Spec {
    name: "lpnorm",
    module: "LpNorm",
    equation: "y = g·x/max(‖x‖_p, ε) over the last dimension, one learned g = d^{1/p}",
    source: "Nguyen & Salazar 2019, §5",
    parameters: &[Parameter {
        start: Quantity::By("d^(1/p)", |given| (given.width as f64).powf(1.0 / given.float("p"))),
        ..GAIN
    }],
    buffers: &[],
    options: &[EPS, NormOption::of("p", &ORDER)],
    form: Form::Chosen(&Form::Operator(&OPERATOR), |given| match given.float("p") == 2.0 {
        true => Ok(Form::Rows(&scale_norm::OPERATOR)),
        false => Ok(Form::Operator(&OPERATOR)),
    }),
};

static OPERATOR: CompositeNormOpSpec = CompositeNormOpSpec {
    operator: "lp_norm",
    keywords: &["p", "eps"],
    rows: None,
    composed: |x, weight, given| composed(x, weight, given.float("p"), given.float("eps")),
};

option_spec! {
    /// Order p of lpnorm, from 1 to inf.
    ORDER ("lpnorm_p"): Exponent = Exponent(2.0), |name, p| check(name, p.0);
}

/// Errors if p is NaN or below 1, for which ‖x‖_p is not a norm.
pub fn check(name: &str, p: f64) -> Result<()> {
    match p >= 1.0 {
        true => Ok(()),
        false => Err(Error::invalid(format!("{name} must be at least 1, or inf, got {p}"))),
    }
}

/// Computes y by its formula, which autograd can differentiate any number of times. Rows have at least one number.
pub fn composed(x: &Tensor, weight: Option<&Tensor>, p: f64, eps: f64) -> Result<Tensor> {
    check(ORDER.name, p)?;
    let wide = composed::accumulate(x)?;
    let x_hat = wide.f_div(&clamped_length(&wide, p, eps)?)?;
    Ok(composed::affine(x_hat, weight, None)?.f_to_kind(x.kind())?)
}

/// Returns max(‖x‖_p, ε) of each row. If it is ε, autograd treats it as a constant.
pub(super) fn clamped_length(x: &Tensor, p: f64, eps: f64) -> Result<Tensor> {
    // Below, `a.f_where_self(mask, b)` is a where the mask is true, and b elsewhere.
    let magnitude = x.f_abs()?;
    let largest = magnitude.f_amax([-1i64].as_slice(), true)?.f_detach()?;
    let length = if p.is_infinite() {
        // If several numbers are the largest, they share the gradient. Then ⟨x, dx⟩ is 0, as for every other p.
        let is_largest = x.f_detach()?.f_abs()?.f_eq_tensor(&largest)?.f_to_kind(x.kind())?;
        let ties = is_largest.f_sum_dim_intlist([-1i64].as_slice(), true, None)?.f_clamp_min(1.0)?;
        let w = x.f_detach()?.f_sign()?.f_mul(&is_largest)?.f_div(&ties)?;
        // `zero` is 0, but has the gradient of x. So the sum adds nothing to the length, but gives it the gradient w.
        let zero = x.f_sub(&x.f_detach()?)?;
        largest.f_add(&w.f_mul(&zero)?.f_sum_dim_intlist([-1i64].as_slice(), true, None)?)?
    } else {
        // Numbers are divided by the largest one before they are raised to the power p, so that no power leaves the
        // range. The result does not depend on this unit.
        let unit = largest.f_where_self(&largest.f_gt(0.0)?, &largest.f_ones_like()?)?;
        let powers =
            magnitude.f_div(&unit)?.f_pow_tensor_scalar(p)?.f_sum_dim_intlist([-1i64].as_slice(), true, None)?;
        // At 0 the gradient of the root is infinite. So the sum of a row of zeros is replaced by 1 here, and its length
        // is set to 0 again below.
        let safe = powers.f_where_self(&powers.f_detach()?.f_ne(0.0)?, &powers.f_ones_like()?)?;
        let length = safe.f_pow_tensor_scalar(1.0 / p)?.f_mul(&unit)?;
        length.f_where_self(&largest.f_ne(0.0)?, &largest)?
    };
    // `clamp_min` would have gradient 1 where the length equals ε, and would turn NaN into ε.
    let floor = length.f_full_like(eps)?;
    Ok(floor.f_where_self(&length.f_detach()?.f_le(eps)?, &length)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    #[test]
    fn the_gradient_equals_the_formula() {
        let (g, eps) = (1.7, 1e-5);
        for p in [1.0, 1.5, 3.0, f64::INFINITY] {
            let x = Tensor::from_slice(&[0.5f64, -2.0, 2.0, 0.25]).set_requires_grad(true); // two are the largest
            let dy = Tensor::from_slice(&[1.0f64, 0.5, -1.0, 2.0]);
            let weight = Tensor::from_slice(&[g]);
            let y = composed(&x, Some(&weight), p, eps).unwrap();
            (&y * &dy).sum(Kind::Double).backward();
            let v = Vec::<f64>::try_from(x.detach()).unwrap();
            let n = match p.is_infinite() {
                true => 2.0,
                false => v.iter().map(|v| v.abs().powf(p)).sum::<f64>().powf(1.0 / p),
            };
            // dx = (g/n)(dy − w⟨u, dy⟩) with u = x/n; `along` is ⟨u, dy⟩.
            let along: f64 = v.iter().zip([1.0, 0.5, -1.0, 2.0]).map(|(v, d)| v / n * d).sum();
            for (i, d) in [1.0, 0.5, -1.0, 2.0].into_iter().enumerate() {
                let w = match p.is_infinite() {
                    true => v[i].signum() * f64::from(v[i].abs() == n) / 2.0,
                    false => v[i].signum() * (v[i].abs() / n).powf(p - 1.0),
                };
                let want = g / n * (d - w * along);
                let dx = x.grad().double_value(&[i as i64]);
                assert!((dx - want).abs() < 1e-12, "p = {p}: {dx} {want}");
            }
        }
    }

    #[test]
    fn zeros_and_huge_rows_are_finite() {
        let x = Tensor::f_full([3i64, 4].as_slice(), 1e30, (Kind::Float, Device::Cpu)).unwrap();
        let _ = x.get(1).zero_();
        let x = x.set_requires_grad(true);
        for p in [1.0, 3.0, f64::INFINITY] {
            let y = composed(&x, None, p, 1e-5).unwrap();
            let dx = Tensor::run_backward(&[y.sum(Kind::Float)], &[&x], false, false).remove(0);
            assert!(y.isfinite().all().int64_value(&[]) == 1 && dx.isfinite().all().int64_value(&[]) == 1, "p = {p}");
        }
    }
}
