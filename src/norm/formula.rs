//! Norms that are given by their formula alone: the table's entry is then all there is to write, in the model, as an
//! operator, as a module and on every command line.

use super::{accumulate, Norm, Rows, Site};
use crate::error::Result;
use crate::init::Fill;
use crate::model::Builder;
use tch::Tensor;

/// y = γ⊙x̂ + β over the last dimension, with γ = 1 and, where the norm has one, β = 0 at the start.
pub struct Formula {
    /// x̂ of (x, ε), in tch calls that autograd follows; x is f32 or f64, and has at least one number in a row.
    pub hat: fn(&Tensor, f64) -> Result<Tensor>,
    pub has_bias: bool,
}

struct InModel {
    hat: fn(&Tensor, f64) -> Result<Tensor>,
    weight: Tensor,
    bias: Option<Tensor>,
    eps: f64,
}

impl Formula {
    pub(super) fn build(&self, b: &mut Builder, site: &Site) -> Result<Box<dyn Norm>> {
        let weight = b.parameter("weight", &[site.width], &Fill::Constant(1.0))?;
        let bias = match self.has_bias {
            true => Some(b.parameter("bias", &[site.width], &Fill::Constant(0.0))?),
            false => None,
        };
        Ok(Box::new(InModel { hat: self.hat, weight, bias, eps: site.config.norm_eps.unwrap_or(1e-5) }))
    }

    /// y in x's type, statistics in f32 or f64.
    pub fn apply(&self, x: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
        apply(self.hat, x, weight, bias, eps)
    }
}

fn apply(
    hat: fn(&Tensor, f64) -> Result<Tensor>,
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    let wide = accumulate(x)?;
    let mut y = hat(&wide, eps)?;
    if let Some(weight) = weight {
        y = y.f_mul(&weight.f_to_kind(wide.kind())?)?;
    }
    if let Some(bias) = bias {
        y = y.f_add(&bias.f_to_kind(wide.kind())?)?;
    }
    Ok(y.f_to_kind(x.kind())?)
}

impl Norm for InModel {
    fn forward(&self, x: &Tensor, _: &Rows) -> Result<Tensor> {
        apply(self.hat, x, Some(&self.weight), self.bias.as_ref(), self.eps)
    }
}
