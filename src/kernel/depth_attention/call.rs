//! Attention over depth on tensors of the CPU; threads share the positions.

use super::{backward as backward_positions, forward as forward_positions};
use crate::cpu::parallel::{self, numbers, Shared};
use crate::cpu::Element;
use crate::error::{Error, Result};
use crate::kernel::view::{by_dtype, View};
use std::ops::Range;
use tch::{Kind, Tensor};

/// The operands: outputs v_0, v_1, … of one shape (…, d) and one type on the CPU, and the queries u (queries, d) in the
/// type of the computation.
pub struct Operands<'a> {
    pub outputs: &'a [Tensor],
    pub queries: &'a Tensor,
    pub is_normed: bool,
}

/// Returns x (queries, …, d) and the scores (…, queries, outputs), in the type of the computation.
pub fn forward(given: &Operands) -> Result<[Tensor; 2]> {
    let (first, count) = (&given.outputs[0], given.queries.size()[0]);
    let x = Tensor::f_empty([&[count], &first.size()[..]].concat(), (first.kind(), first.device()))?;
    let mut size = first.size();
    size.pop();
    size.extend([count, given.outputs.len() as i64]);
    let scores = Tensor::f_empty(size.as_slice(), (given.queries.kind(), first.device()))?;
    let [rows, results] = [given.outputs, &x.f_unbind(0)?].map(matrices);
    let (rows, results) = (rows?, results?);
    let (u, z) = (matrix(given.queries)?, matrix(&scores.f_view([-1, given.outputs.len() as i64])?)?);
    let (d, each) = (u.cols(), scores.numel() / rows[0].rows().max(1));
    by_dtype!(rows[0], E => {
        // SAFETY: `matrices` has checked that the tensors are contiguous matrices on the CPU; they outlive this function,
        // have the types E and E's computing type, and x and the scores are new.
        let (v, u, x, z) = unsafe {
            (readable::<E>(&rows), u.slice::<<E as Element>::Acc>(), writable::<E>(&results),
             Shared::new(z.slice_mut::<<E as Element>::Acc>()))
        };
        let is_normed = given.is_normed;
        parallel::for_each(rows[0].rows(), parallel::grain(v.len() * d), |r| {
            let here = numbers(&r, d);
            // SAFETY: each range of positions writes its own rows.
            let (mut x, z) = unsafe { (parts_mut(&x, &here), z.slice(numbers(&r, each))) };
            forward_positions::<E>(&parts(&v, &here), u, is_normed, &mut x, z);
        });
        Ok::<(), Error>(())
    })?;
    Ok([x, scores])
}

/// Returns the gradients of the queries and of the outputs, given that of x.
pub fn backward(gradient: &Tensor, given: &Operands) -> Result<Vec<Tensor>> {
    let du = given.queries.f_zeros_like()?;
    let dv = given.outputs.iter().map(|v| Ok(Tensor::f_empty(v.size().as_slice(), (v.kind(), v.device()))?));
    let dv = dv.collect::<Result<Vec<_>>>()?;
    let g = gradient.f_contiguous()?.f_unbind(0)?;
    let (g, rows, results) = (matrices(&g)?, matrices(given.outputs)?, matrices(&dv)?);
    let (u, sum) = (matrix(given.queries)?, matrix(&du)?);
    by_dtype!(rows[0], E => {
        // SAFETY: as in `forward`; the gradients are new.
        let (g, v, u, dv, du) = unsafe {
            (readable::<E>(&g), readable::<E>(&rows), u.slice::<<E as Element>::Acc>(), writable::<E>(&results),
             sum.slice_mut::<<E as Element>::Acc>())
        };
        let (count, d, is_normed) = (rows[0].rows(), rows[0].cols(), given.is_normed);
        parallel::sum_over_rows(count, v.len() * d, [du], |r, _, [du]| {
            let here = numbers(&r, d);
            // SAFETY: each range of positions writes its own rows.
            let mut dv = unsafe { parts_mut(&dv, &here) };
            backward_positions::<E>(&parts(&g, &here), &parts(&v, &here), u, is_normed, &mut dv, du);
        });
        Ok::<(), Error>(())
    })?;
    Ok([du].into_iter().chain(dv).collect())
}

/// Returns the tensors as matrices of rows. They must be contiguous tensors of one shape and type on the CPU.
fn matrices(tensors: &[Tensor]) -> Result<Vec<View>> {
    let all = tensors.iter().map(matrix).collect::<Result<Vec<_>>>()?;
    match all.iter().all(|t| (t.rows, t.cols, t.dtype) == (all[0].rows, all[0].cols, all[0].dtype)) {
        true => Ok(all),
        false => Err(Error::Torch("attention over depth needs outputs of one shape and type".to_string())),
    }
}

fn matrix(t: &Tensor) -> Result<View> {
    let of = match t.is_contiguous() {
        true => View::of(&t.f_view([-1, t.size().last().copied().unwrap_or(1)])?),
        false => None,
    };
    of.ok_or_else(|| Error::Torch("attention over depth needs contiguous tensors on the CPU".to_string()))
}

/// Returns the matrices' numbers.
///
/// # Safety
/// As for [`View::slice`].
unsafe fn readable<'a, E>(matrices: &[View]) -> Vec<&'a [E]> {
    matrices.iter().map(|t| t.slice()).collect()
}

/// Returns the matrices' numbers for threads that write them.
///
/// # Safety
/// As for [`View::slice_mut`].
unsafe fn writable<E>(matrices: &[View]) -> Vec<Shared<E>> {
    matrices.iter().map(|t| Shared::new(t.slice_mut())).collect()
}

/// Returns a part of each matrix.
fn parts<'a, E>(matrices: &[&'a [E]], part: &Range<usize>) -> Vec<&'a [E]> {
    matrices.iter().map(|t| &t[part.clone()]).collect()
}

/// Returns a part of each matrix to write.
///
/// # Safety
/// As for [`Shared::slice`].
#[allow(clippy::mut_from_ref)]
unsafe fn parts_mut<'a, E>(matrices: &'a [Shared<E>], part: &Range<usize>) -> Vec<&'a mut [E]> {
    matrices.iter().map(|t| t.slice(part.clone())).collect()
}

/// True if kernels of the CPU compute attention over these outputs.
pub fn computes(outputs: &[&Tensor]) -> bool {
    let kinds = [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half];
    let first = outputs[0];
    let is_alike = |v: &&Tensor| (v.device(), v.kind()) == (tch::Device::Cpu, first.kind()) && v.size() == first.size();
    kinds.contains(&first.kind()) && first.numel() > 0 && outputs.iter().all(is_alike)
}
