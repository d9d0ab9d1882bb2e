//! Attention over depth on tensors of the CPU; threads share the positions.

use super::{backward as backward_positions, forward as forward_positions};
use crate::cpu::parallel::{self, numbers, Shared};
use crate::cpu::Element;
use crate::error::Result;
use crate::kernel::view::{accumulation, by_dtype, View};
use std::ops::Range;
use tch::Tensor;

/// The operands: outputs v_0, v_1, … (…, d) of one type, and the queries u (queries, d) in the type in which sums over
/// the outputs accumulate.
pub struct Operands<'a> {
    pub outputs: &'a [Tensor],
    pub queries: &'a Tensor,
    /// True for the normed form, in which an output's weight is its softmax share divided by its root mean square.
    pub is_normed: bool,
}

impl Operands<'_> {
    /// Returns the number of positions, the number of queries, and d, the length of an output at a position.
    fn sizes(&self) -> Result<[i64; 3]> {
        let (queries, d) = self.queries.size2()?;
        Ok([self.outputs[0].numel() as i64 / d.max(1), queries, d])
    }

    /// Returns views of tensors as matrices (positions, d). Errors unless they have the outputs' shape and type.
    fn like_outputs(&self, tensors: &[Tensor]) -> Result<Vec<View>> {
        let [positions, _, d] = self.sizes()?;
        tensors.iter().map(|t| View::of_rows(t, self.outputs[0].kind(), [positions, d])).collect()
    }

    /// Returns a view of the queries or of their gradient. Errors unless the tensor has the queries' shape and type.
    fn like_queries(&self, t: &Tensor) -> Result<View> {
        let [_, queries, d] = self.sizes()?;
        View::of_rows(t, accumulation(self.outputs[0].kind()), [queries, d])
    }
}

/// Writes the weighted sums of the outputs to `x`, a tensor for each query, and the scores to `scores` (…, queries,
/// outputs), which has the queries' type.
pub fn forward(given: &Operands, x: &[Tensor], scores: &Tensor) -> Result<()> {
    let [positions, queries, d] = given.sizes()?;
    let scores_each = queries * given.outputs.len() as i64; // the scores of a position
    let (v, x, u) = (given.like_outputs(given.outputs)?, given.like_outputs(x)?, given.like_queries(given.queries)?);
    let z = View::of_rows(scores, given.queries.kind(), [positions, scores_each])?;
    by_dtype!(v[0], E => {
        // SAFETY: `of_rows` has checked types, sizes and layout; the tensors outlive this function, and x and
        // the scores are the caller's own.
        let (v, u, x, z) = unsafe {
            (readable::<E>(&v), u.slice::<<E as Element>::Acc>(), writable::<E>(&x),
             Shared::new(z.slice_mut::<<E as Element>::Acc>()))
        };
        let (is_normed, d, scores_each) = (given.is_normed, d as usize, scores_each as usize);
        parallel::for_each(positions as usize, parallel::grain(v.len() * d), |range| {
            let here = numbers(&range, d);
            // SAFETY: each range of positions writes its own rows.
            let (mut x, z) = unsafe { (parts_mut(&x, &here), z.slice(numbers(&range, scores_each))) };
            forward_positions::<E>(&parts(&v, &here), u, is_normed, &mut x, z);
        });
        Ok(())
    })
}

/// Writes the outputs' gradients to `dv`, and the queries' gradients, which are sums over positions, to `du`. `g` has
/// the gradient of each query's x.
pub fn backward(given: &Operands, g: &[Tensor], du: &Tensor, dv: &[Tensor]) -> Result<()> {
    let [positions, _, d] = given.sizes()?;
    let (g, v, dv) = (given.like_outputs(g)?, given.like_outputs(given.outputs)?, given.like_outputs(dv)?);
    let (u, du) = (given.like_queries(given.queries)?, given.like_queries(du)?);
    by_dtype!(v[0], E => {
        // SAFETY: `of_rows` has checked types, sizes and layout; the tensors outlive this function, and dv and du are
        // the caller's own.
        let (g, v, u, dv, du) = unsafe {
            (readable::<E>(&g), readable::<E>(&v), u.slice::<<E as Element>::Acc>(), writable::<E>(&dv),
             du.slice_mut::<<E as Element>::Acc>())
        };
        let (is_normed, d) = (given.is_normed, d as usize);
        parallel::sum_over_rows(positions as usize, v.len() * d, [du], |range, _, [du]| {
            let here = numbers(&range, d);
            // SAFETY: each range of positions writes its own rows.
            let mut dv = unsafe { parts_mut(&dv, &here) };
            backward_positions::<E>(&parts(&g, &here), &parts(&v, &here), u, is_normed, &mut dv, du);
        });
        Ok(())
    })
}

/// Returns the numbers of each matrix.
///
/// # Safety
/// The conditions of [`View::slice`] hold for each matrix.
unsafe fn readable<'a, E>(matrices: &[View]) -> Vec<&'a [E]> {
    matrices.iter().map(|matrix| matrix.slice()).collect()
}

/// Returns the numbers of each matrix in a form that several threads may write.
///
/// # Safety
/// The conditions of [`View::slice_mut`] hold for each matrix.
unsafe fn writable<E>(matrices: &[View]) -> Vec<Shared<E>> {
    matrices.iter().map(|matrix| Shared::new(matrix.slice_mut())).collect()
}

/// Returns the range `part` of each matrix.
fn parts<'a, E>(matrices: &[&'a [E]], part: &Range<usize>) -> Vec<&'a [E]> {
    matrices.iter().map(|matrix| &matrix[part.clone()]).collect()
}

/// Returns the range `part` of each matrix for writing.
///
/// # Safety
/// The conditions of [`Shared::slice`] hold for each matrix.
#[allow(clippy::mut_from_ref)]
unsafe fn parts_mut<'a, E>(matrices: &'a [Shared<E>], part: &Range<usize>) -> Vec<&'a mut [E]> {
    matrices.iter().map(|matrix| matrix.slice(part.clone())).collect()
}
