//! A norm's composed form: its equation in tch calls, which autograd follows on any device.
//!
//! A norm without kernels is its composed form alone; one with kernels runs it under torch.func, for second derivatives,
//! and where the kernels cannot run.

use crate::error::Result;
use tch::{Kind, Tensor};

/// x̂ of x, of the parameters that are neither weight nor bias, and of the options that are numbers, each in the order in
/// which the norm declares them. All tensors are f32 or f64; x has at least one number in a row.
pub type Hat = fn(&Tensor, &[Tensor], &[f64]) -> Result<Tensor>;

/// y = weight⊙x̂ + bias in x's type, computed in f32 or f64.
pub fn apply(
    hat: Hat,
    x: &Tensor,
    inside: &[Tensor],
    (weight, bias): (Option<&Tensor>, Option<&Tensor>),
    options: &[f64],
) -> Result<Tensor> {
    let wide = accumulate(x)?;
    let inside = inside.iter().map(|p| Ok(p.f_to_kind(wide.kind())?)).collect::<Result<Vec<_>>>()?;
    Ok(affine(hat(&wide, &inside, options)?, weight, bias)?.f_to_kind(x.kind())?)
}

/// weight⊙x̂ + bias in x̂'s type.
pub fn affine(hat: Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>) -> Result<Tensor> {
    let mut y = hat;
    if let Some(weight) = weight {
        y = y.f_mul(&weight.f_to_kind(y.kind())?)?;
    }
    if let Some(bias) = bias {
        y = y.f_add(&bias.f_to_kind(y.kind())?)?;
    }
    Ok(y)
}

/// x in the type that statistics accumulate in: f32, or f64 for f64.
pub fn accumulate(x: &Tensor) -> Result<Tensor> {
    Ok(x.f_to_kind(if x.kind() == Kind::Double { Kind::Double } else { Kind::Float })?)
}
