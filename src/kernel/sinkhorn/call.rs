//! Sinkhorn's algorithm on an operator's tensors: threads share the matrices on the CPU, elsewhere the formula runs in
//! tch.

use super::{backward as backward_matrices, forward as forward_matrices};
use crate::cpu::parallel::{self, Shared};
use crate::cpu::{memory, Element};
use crate::error::Result;
use crate::kernel::math::LANES;
use crate::kernel::view::{accumulation, by_dtype, View};
use tch::{Kind, Tensor};

/// Computes Sinkhorn's algorithm on the CPU: m (…, n, n) from logits (…, n, n). `eps` is added to the softmax and to
/// each divisor.
pub fn forward(logits: &View, iterations: usize, eps: f64, m: &View) -> Result<()> {
    by_dtype!(logits, E => over_matrices::<E>(None, logits, m, iterations, eps))
}

/// Computes the gradient of the logits from `dm`, the gradient of [`forward`]'s result.
pub fn backward(dm: &View, logits: &View, iterations: usize, eps: f64, dlogits: &View) -> Result<()> {
    by_dtype!(logits, E => over_matrices::<E>(Some(dm), logits, dlogits, iterations, eps))
}

/// Computes `to` from the logits: m or, if `dm` is given, the gradient of the logits.
fn over_matrices<E: Element>(dm: Option<&View>, logits: &View, to: &View, iterations: usize, eps: f64) -> Result<()> {
    let n = logits.cols();
    let count = logits.rows() / n.max(1);
    // SAFETY: the C++ operator passed contiguous tensors of E and of one shape, and holds them; `to` is new.
    let (dm, logits, to) =
        unsafe { (dm.map(|dm| dm.slice::<E>()), logits.slice::<E>(), Shared::new(to.slice_mut::<E>())) };
    // These are the numbers of one matrix in its states after the softmax and after each of the 2·iterations − 1
    // divisions.
    let cost = n * n * 2 * iterations;
    if count == 0 {
        return Ok(());
    }
    // A thread's backward pass keeps these states of LANES matrices at a time, so large matrices may not fit.
    if dm.is_some() {
        let threads = parallel::threads().min(count.div_ceil(parallel::grain(cost)));
        let bytes = size_of::<E::Acc>() as u128 * (cost * LANES) as u128 * threads as u128;
        memory::room(bytes, || format!("{n}×{n} matrices after each of {iterations} iterations"))?;
    }
    parallel::for_each(count, parallel::grain(cost), |matrices| {
        let range = parallel::numbers(&matrices, n * n);
        // SAFETY: the ranges are disjoint and inside `to`.
        let to = unsafe { to.slice(range.clone()) };
        match dm {
            None => forward_matrices::<E>(n, iterations, eps, &logits[range], to),
            Some(dm) => backward_matrices::<E>(n, iterations, eps, &dm[range.clone()], &logits[range], to),
        }
    });
    Ok(())
}

/// Returns Sinkhorn's algorithm of logits (…, n, n), computed with tch operations in f32 (f64 for f64).
pub fn composed(logits: &Tensor, iterations: i64, eps: f64) -> Result<Tensor> {
    let computing = accumulation(logits.kind());
    // Divides m by its sums over dimension `dim`, plus ε. With −1 each row is divided by its sum, with −2 each column.
    let divided = |m: &Tensor, dim: i64| -> Result<Tensor> {
        Ok(m.f_div(&m.f_sum_dim_intlist([dim].as_slice(), true, None::<Kind>)?.f_add_scalar(eps)?)?)
    };
    let first = divided(&logits.f_softmax(-1, computing)?.f_add_scalar(eps)?, -2)?;
    let m = (1..iterations).try_fold(first, |m, _| divided(&divided(&m, -1)?, -2))?;
    Ok(m.f_to_kind(logits.kind())?)
}
