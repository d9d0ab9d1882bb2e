//! The loss in tch operations, for devices without a kernel and for higher derivatives.

use super::Smoothing;
use crate::error::Result;
use crate::kernel::view::accumulation;
use tch::{Device, Tensor};

/// Returns (loss, −log p_t) of each row of logits (…, classes), where t is the row's `target`; both are 0 where it is
/// `ignore_index`. `mask` is true for classes in the target vocabulary V_t; `None` means all classes.
pub fn composed(
    logits: &Tensor,
    target: &Tensor,
    mask: Option<&Tensor>,
    smoothing: Smoothing,
    ignore_index: i64,
) -> Result<(Tensor, Tensor)> {
    let kind = accumulation(logits.kind());
    let mut z = logits.f_to_kind(kind)?;
    let outside = mask.map(|m| m.f_logical_not()).transpose()?;
    if let Some(outside) = &outside {
        z = z.f_masked_fill(outside, f64::NEG_INFINITY)?;
    }
    let log_p = z.f_log_softmax(-1, kind)?;
    let ignored = target.f_eq(ignore_index)?;
    // Ignored rows gather column 0; their losses are replaced by 0 at the end.
    let mut target = target.f_masked_fill(&ignored, 0)?;
    let mut unknown = None;
    if target.device() != Device::Cpu {
        // A GPU becomes unusable if it gathers out of bounds. So on a GPU a target outside the classes is replaced by
        // 0, and its row's loss becomes NaN.
        let outside = target.f_lt(0)?.f_logical_or(&target.f_ge(*z.size().last().unwrap_or(&0))?)?;
        target = target.f_masked_fill(&outside, 0)?;
        unknown = Some(outside);
    }
    let mut nll = log_p.f_gather(-1, &target.f_unsqueeze(-1)?, false)?.f_squeeze_dim(-1)?.f_neg()?;
    if let Some(unknown) = &unknown {
        nll = nll.f_masked_fill(unknown, f64::NAN)?;
    }
    // Outside the target vocabulary log p is −∞, which must not enter the sum.
    let log_p = match &outside {
        Some(outside) => log_p.f_masked_fill(outside, 0.0)?,
        None => log_p,
    };
    let mut loss = nll.f_mul_scalar(smoothing.nll)?;
    // Without smoothing, a logit of −∞ would give 0·∞.
    if smoothing.uniform != 0.0 {
        let sum = log_p.f_sum_dim_intlist([-1i64].as_slice(), false, kind)?;
        loss = loss.f_sub(&sum.f_mul_scalar(smoothing.uniform)?)?;
    }
    Ok((loss.f_masked_fill(&ignored, 0.0)?, nll.f_masked_fill(&ignored, 0.0)?))
}
