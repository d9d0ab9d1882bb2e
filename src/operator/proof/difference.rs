//! The comparison of a kernel's result with its formula's, and the tolerances.

use crate::error::Result;
use tch::{Kind, Tensor};

/// Compares the kernel's result `found` with the formula's, `expected`. Returns a description if they differ by more
/// than rounding explains, otherwise `None`.
pub fn difference(found: &Tensor, expected: &Tensor) -> Result<Option<String>> {
    // There are four tolerances. The first two are relative to the number itself and to the largest number in its row.
    // The third limits a row's mean error, relative to the row's mean size. The last one is absolute.
    let (per_number, per_row, per_mean, absolute) = match found.kind() {
        // GPU kernels compute in f32, even if a parameter and so its gradient is f64.
        Kind::Float | Kind::Double => (1e-4, 2e-5, 1e-5, 1e-30),
        Kind::BFloat16 => (2f64.powi(-7), 2f64.powi(-8), 2f64.powi(-10), 1e-30),
        Kind::Half => (2f64.powi(-10), 2f64.powi(-11), 2f64.powi(-13), 2f64.powi(-24)),
        // Integers and bools must be equal: the tolerance is less than 1.
        _ => (0.0, 0.0, 0.0, 0.5),
    };
    let has_16_bits = matches!(found.kind(), Kind::BFloat16 | Kind::Half);
    // In rows of a few columns nearly everything may cancel, so the absolute tolerance is larger.
    let is_narrow = found.size().last().is_some_and(|columns| *columns < 16) && per_mean > 0.0;
    let absolute = if is_narrow { 4.0 * per_mean } else { absolute };
    let found = found.f_to_kind(Kind::Double)?;
    let expected = expected.f_to_kind(Kind::Double)?.f_view(found.size().as_slice())?;
    // A scalar becomes a row of one number.
    let row = |t: Tensor| if t.dim() == 0 { t.f_view([1].as_slice()) } else { Ok(t) };
    let (found, expected) = (row(found)?, row(expected)?);
    let is_nan = expected.f_isnan()?;
    if found.f_isnan()?.f_ne_tensor(&is_nan)?.f_any()?.f_int64_value(&[])? != 0 {
        return Ok(Some("has NaN in other places".into()));
    }
    let are_equal = found.f_eq_tensor(&expected)?.f_logical_or(&is_nan)?;
    // In 16 bits, at most 5 % of the numbers may be rounded differently from the formula's.
    if has_16_bits && !is_narrow && are_equal.numel() > 1000 {
        let share = 1.0 - are_equal.f_to_kind(Kind::Double)?.f_mean(Kind::Double)?.f_double_value(&[])?;
        if share > 0.05 {
            return Ok(Some(format!("differs in {:.0} % of its numbers", 100.0 * share)));
        }
    }
    // Infinities and NaN that agree have no error.
    let errors = found.f_sub(&expected)?.f_abs()?.f_masked_fill(&are_equal, 0.0)?;
    let size = expected.f_abs()?.f_nan_to_num(0.0, 0.0, 0.0)?;
    let largest = size.f_amax([-1].as_slice(), true)?;
    let allowed = size.f_mul_scalar(per_number)?.f_add(&largest.f_mul_scalar(per_row)?)?.f_add_scalar(absolute)?;
    let relative_errors = errors.f_div(&allowed)?.f_view([-1].as_slice())?; // above 1: beyond the tolerance
    let worst = relative_errors.f_argmax(0, false)?.f_int64_value(&[])?;
    let largest_error = relative_errors.f_double_value(&[worst])?;
    if largest_error.is_nan() || largest_error > 1.0 {
        let worst_of = |t: &Tensor| t.f_contiguous()?.f_view([-1].as_slice())?.f_double_value(&[worst]);
        let (got, wanted) = (worst_of(&found)?, worst_of(&expected)?);
        return Ok(Some(format!("{:?} is {got:e} at {worst}, expected {wanted:e}", found.size())));
    }
    // In 16 bits the mean error needs more columns: one number that is rounded differently changes a short row's mean.
    let are_enough = found.size().last().is_some_and(|columns| *columns >= if has_16_bits { 64 } else { 16 });
    if are_enough && per_mean > 0.0 {
        let mean = |t: &Tensor| t.f_mean_dim(-1, false, Kind::Double);
        let allowed = mean(&size)?.f_mul_scalar(per_mean)?.f_add_scalar(absolute)?;
        let beyond = mean(&errors)?.f_div(&allowed)?.f_max()?.f_double_value(&[])?;
        if beyond > 1.0 {
            return Ok(Some(format!("has a row {beyond:.1} times farther away than rounding explains")));
        }
    }
    Ok(None)
}
