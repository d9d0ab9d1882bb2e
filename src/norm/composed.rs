//! A norm's composed form: its equation in tch calls, which autograd follows on any device.
//!
//! A norm without kernels is its composed form alone; one with kernels runs it under torch.func, for second derivatives,
//! and where the kernels cannot run.

use super::spec::NormArgs;
use crate::error::Result;
use tch::{Kind, Tensor};

/// x̂ of x, of the parameters that are neither weight nor bias, in the order in which the norm declares them, and of its
/// options. All tensors are f32 or f64; x has at least one number in a row, and its sizes may be symbolic.
pub type ComposedNorm = fn(&Tensor, &[Tensor], &NormArgs) -> Result<Tensor>;

/// y of x and of all parameters, as [`ComposedNorm`] has them, in the order in which the norm declares them; one that a norm
/// goes without is none.
pub type WholeNorm = fn(&Tensor, &[Option<Tensor>], &NormArgs) -> Result<Tensor>;

/// Rows longer than this are summed in parts: torch's own sums of 2²⁰ numbers lose a decimal digit.
const LONGEST: i64 = 1 << 16;
const PART: i64 = 1 << 10;

/// A sum or a length of rows of so many numbers: that of their parts', where rows are long.
pub fn over_row(x: &Tensor, width: i64, total: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    if width <= LONGEST {
        return total(x);
    }
    let whole = width / PART * PART;
    let parts = total(&x.f_narrow(-1, 0, whole)?.f_unflatten(-1, [-1, PART].as_slice())?)?.f_squeeze_dim(-1)?;
    match width - whole {
        0 => total(&parts),
        rest => total(&Tensor::f_cat(&[parts, total(&x.f_narrow(-1, whole, rest)?)?], -1)?),
    }
}

/// The mean of each row of so many numbers, (…, 1).
pub fn mean(x: &Tensor, width: i64) -> Result<Tensor> {
    if width <= LONGEST {
        return Ok(x.f_mean_dim([-1i64].as_slice(), true, None)?);
    }
    let sum = over_row(x, width, |x| Ok(x.f_sum_dim_intlist([-1i64].as_slice(), true, None)?))?;
    Ok(sum.f_div_scalar(width as f64)?)
}

/// W x of rows of so many numbers.
pub fn product(x: &Tensor, w: &Tensor, width: i64) -> Result<Tensor> {
    if width <= LONGEST {
        return Ok(x.f_linear::<&Tensor>(w, None)?);
    }
    let [x, w] = [x, w].map(|t| t.f_split(8 * PART, -1));
    let products = x?.iter().zip(w?).map(|(x, w)| Ok(x.f_linear::<&Tensor>(&w, None)?)).collect::<Result<Vec<_>>>()?;
    Ok(Tensor::f_stack(&products, 0)?.f_sum_dim_intlist([0i64].as_slice(), false, None)?)
}

/// y in x's type, computed in f32 or f64.
pub fn whole(y: WholeNorm, x: &Tensor, parameters: &[Option<Tensor>], given: &NormArgs) -> Result<Tensor> {
    let wide = accumulate(x)?;
    let widened = |p: &Option<Tensor>| p.as_ref().map(|p| Ok(p.f_to_kind(wide.kind())?)).transpose();
    let parameters = parameters.iter().map(widened).collect::<Result<Vec<_>>>()?;
    Ok(y(&wide, &parameters, given)?.f_to_kind(x.kind())?)
}

/// y = weight⊙x̂ + bias in x's type, computed in f32 or f64.
pub fn apply(
    x_hat: ComposedNorm,
    x: &Tensor,
    inside: &[Tensor],
    (weight, bias): (Option<&Tensor>, Option<&Tensor>),
    given: &NormArgs,
) -> Result<Tensor> {
    let wide = accumulate(x)?;
    let inside = inside.iter().map(|p| Ok(p.f_to_kind(wide.kind())?)).collect::<Result<Vec<_>>>()?;
    Ok(affine(x_hat(&wide, &inside, given)?, weight, bias)?.f_to_kind(x.kind())?)
}

/// weight⊙x̂ + bias in x̂'s type.
pub fn affine(x_hat: Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>) -> Result<Tensor> {
    let mut y = x_hat;
    if let Some(weight) = weight {
        y = y.f_mul(&weight.f_to_kind(y.kind())?)?;
    }
    if let Some(bias) = bias {
        y = y.f_add(&bias.f_to_kind(y.kind())?)?;
    }
    Ok(y)
}

/// Beyond it, and below its inverse, squares of a row's numbers leave f32's range or lose bits to it.
const ORDINARY: f64 = 1099511627776.0; // 2^40

/// What a norm with squares measures rows in, (…, 1): 1, but for rows whose squares would leave the range their largest
/// number, or √ε above it. x over it, and √ε over it, give the same x̂. A constant, as no x̂ depends on it.
pub fn unit(x: &Tensor, eps: f64) -> Result<Tensor> {
    let largest = x.f_detach()?.f_linalg_norm(f64::INFINITY, [-1i64].as_slice(), true, None)?;
    let is_huge = largest.f_gt(ORDINARY)?.f_logical_and(&largest.f_lt(f64::INFINITY)?)?;
    let is_extreme = largest.f_lt(1.0 / ORDINARY)?.f_logical_or(&is_huge)?;
    Ok(largest.f_clamp_min(eps.sqrt())?.f_where_self(&is_extreme, &largest.f_ones_like()?)?)
}

/// ε/unit², for what [`unit`] gave.
pub fn in_units(eps: f64, unit: &Tensor) -> Result<Tensor> {
    Ok(unit.f_reciprocal()?.f_mul_scalar(eps)?.f_div(unit)?)
}

/// x in the type that statistics accumulate in: f32, or f64 for f64.
pub fn accumulate(x: &Tensor) -> Result<Tensor> {
    Ok(x.f_to_kind(if x.kind() == Kind::Double { Kind::Double } else { Kind::Float })?)
}
