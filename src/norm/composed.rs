//! The composed form of norms: their equations in PyTorch's operations, which autograd differentiates on any device.
//!
//! A norm without kernels has only this form. A norm with kernels uses the composed form under torch.func, for second
//! derivatives, and wherever its kernels cannot run.

use super::spec::NormArgs;
use crate::error::Result;
use crate::kernel::view::accumulation;
use tch::Tensor;

/// Computes x̂ from x, the options, and all parameters except weight and bias, in the order in which the norm
/// declares them. All tensors are f32 or f64. Each row of x has at least one number; the sizes of x may be symbolic.
pub type ComposedNorm = fn(&Tensor, &[Tensor], &NormArgs) -> Result<Tensor>;

/// Computes y from x, the options, and all parameters in the order in which the norm declares them. A parameter that
/// this norm has been built without is `None`. The rest is as for [`ComposedNorm`].
pub type WholeNorm = fn(&Tensor, &[Option<Tensor>], &NormArgs) -> Result<Tensor>;

/// The row length above which rows are summed in parts. torch's own sum of 2²⁰ numbers loses a decimal digit.
const LONGEST: i64 = 1 << 16;
/// The length of a part of such a row.
const PART: i64 = 1 << 10;

/// Returns `reduce`, a sum or a Euclidean length, over rows of `width` numbers. It must keep the last dimension, with
/// size 1. In a long row, `reduce` is applied to parts and then to the parts' results.
pub fn over_row(x: &Tensor, width: i64, reduce: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    if width <= LONGEST {
        return reduce(x);
    }
    let in_whole_parts = width / PART * PART;
    let parts =
        reduce(&x.f_narrow(-1, 0, in_whole_parts)?.f_unflatten(-1, [-1, PART].as_slice())?)?.f_squeeze_dim(-1)?;
    match width - in_whole_parts {
        0 => reduce(&parts),
        rest => reduce(&Tensor::f_cat(&[parts, reduce(&x.f_narrow(-1, in_whole_parts, rest)?)?], -1)?),
    }
}

/// Returns the mean of each row of `width` numbers, with the shape (…, 1).
pub fn mean(x: &Tensor, width: i64) -> Result<Tensor> {
    if width <= LONGEST {
        return Ok(x.f_mean_dim([-1i64].as_slice(), true, None)?);
    }
    let sum = over_row(x, width, |x| Ok(x.f_sum_dim_intlist([-1i64].as_slice(), true, None)?))?;
    Ok(sum.f_div_scalar(width as f64)?)
}

/// Returns W x for each row x of `width` numbers; w is (out, width). For long rows, adds the products of parts.
pub fn product(x: &Tensor, w: &Tensor, width: i64) -> Result<Tensor> {
    if width <= LONGEST {
        return Ok(x.f_linear::<&Tensor>(w, None)?);
    }
    let part = 8 * PART;
    let (x_parts, w_parts) = (x.f_split(part, -1)?, w.f_split(part, -1)?);
    let products = x_parts.iter().zip(w_parts).map(|(x, w)| Ok(x.f_linear::<&Tensor>(&w, None)?));
    let products = products.collect::<Result<Vec<_>>>()?;
    Ok(Tensor::f_stack(&products, 0)?.f_sum_dim_intlist([0i64].as_slice(), false, None)?)
}

/// Computes y by the formula `y` in f32 or f64, and returns it in x's type. `given` has the norm's width and options.
pub fn whole(y: WholeNorm, x: &Tensor, parameters: &[Option<Tensor>], given: &NormArgs) -> Result<Tensor> {
    let wide = accumulate(x)?;
    let widened = |p: &Option<Tensor>| p.as_ref().map(|p| Ok(p.f_to_kind(wide.kind())?)).transpose();
    let parameters = parameters.iter().map(widened).collect::<Result<Vec<_>>>()?;
    Ok(y(&wide, &parameters, given)?.f_to_kind(x.kind())?)
}

/// Computes y = weight⊙x̂ + bias in f32 or f64, and returns it in x's type. `x_hat` is the formula of x̂, `inside` its
/// parameters, and `given` the norm's width and options.
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

/// Returns weight⊙x̂ + bias in x̂'s type.
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

/// Rows whose largest magnitude is between 2^-40 and 2^40 can be squared as they are. In other rows, squares may leave
/// f32's range or lose bits.
const ORDINARY: f64 = 1099511627776.0; // 2^40

/// Returns the number, (…, 1), by which a norm divides each row before it squares numbers. It is 1, except in rows
/// whose squares would leave f32's range: for these, it is the row's largest magnitude, but at least √ε. Dividing both
/// x and √ε by it leaves x̂ unchanged, so autograd may treat it as a constant.
pub fn unit(x: &Tensor, eps: f64) -> Result<Tensor> {
    // The maximum norm, that is max |x|.
    let largest = x.f_detach()?.f_linalg_norm(f64::INFINITY, [-1i64].as_slice(), true, None)?;
    let is_huge = largest.f_gt(ORDINARY)?.f_logical_and(&largest.f_lt(f64::INFINITY)?)?;
    let is_extreme = largest.f_lt(1.0 / ORDINARY)?.f_logical_or(&is_huge)?;
    // `a.f_where_self(mask, b)` is a where the mask is true, and b elsewhere.
    Ok(largest.f_clamp_min(eps.sqrt())?.f_where_self(&is_extreme, &largest.f_ones_like()?)?)
}

/// Returns ε/unit², where `unit` comes from [`unit`]. It divides twice, because unit² may leave the range.
pub fn in_units(eps: f64, unit: &Tensor) -> Result<Tensor> {
    Ok(unit.f_reciprocal()?.f_mul_scalar(eps)?.f_div(unit)?)
}

/// Casts x to the type in which statistics accumulate: f64 for f64, otherwise f32.
pub fn accumulate(x: &Tensor) -> Result<Tensor> {
    Ok(x.f_to_kind(accumulation(x.kind()))?)
}
