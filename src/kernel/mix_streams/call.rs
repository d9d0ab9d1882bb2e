//! Weighted sums of streams on an operator's tensors: threads share the positions on the CPU, elsewhere the formula
//! runs in tch.

use super::{backward as backward_positions, forward as forward_positions};
use crate::cpu::parallel::{self, Shared};
use crate::cpu::{Accumulator, Element};
use crate::error::Result;
use crate::kernel::view::{accumulation, by_dtype, View};
use std::ops::Range;
use tch::Tensor;

/// The input tensors of a call, as matrices with the rows of all positions. `n` is the number of streams, which is the
/// number of rows that a position has in `streams`.
pub struct Inputs<'a> {
    pub n: usize,
    pub streams: &'a View,
    pub added: Option<&'a View>,
    pub weights: &'a View,
}

/// Computes the weighted sums y (…, m, d) of streams (…, n, d) and one more row (…, d) or none. The weights are (…, m,
/// n), or (…, m, n + 1) with the added row.
pub fn forward(given: &Inputs, y: &View) -> Result<()> {
    by_dtype!(given.streams, E => {
        // SAFETY: the C++ operator passed contiguous tensors of E, the weights in E's computing type, and holds them; y
        // is new.
        let (h, added, w, to) = unsafe {
            (given.streams.slice::<E>(), given.added.map(|row| row.slice::<E>()), given.weights.slice(),
             Shared::new(y.slice_mut::<E>()))
        };
        over_positions(given, |shape, [of_h, of_added, of_w, of_y]| {
            // SAFETY: the ranges are disjoint and inside y.
            let y = unsafe { to.slice(of_y) };
            forward_positions::<E>(shape, &h[of_h], added.map(|row| &row[of_added]), &w[of_w], y);
        });
        Ok(())
    })
}

/// Computes the gradients of the streams, of the added row and of the weights from `dy`, and writes them to `to` in
/// this order.
pub fn backward(dy: &View, given: &Inputs, to: [&View; 3]) -> Result<()> {
    by_dtype!(given.streams, E => backward_typed::<E>(dy, given, to))
}

/// Computes [`backward`] for the storage type E. The outputs are the gradients of the streams (`ds`), of the added row
/// (`da`) and of the weights (`dw`).
fn backward_typed<E: Element>(dy: &View, given: &Inputs, [ds, da, dw]: [&View; 3]) -> Result<()> {
    // SAFETY: the C++ operator passed contiguous tensors of E and holds them; the weights and their gradient are in the
    // computing type, and the gradients are new.
    let (dy, h, added, w, dw_all) = unsafe {
        let added = given.added.map(|row| row.slice::<E>());
        (dy.slice::<E>(), given.streams.slice::<E>(), added, given.weights.slice::<E::Acc>(), dw.slice_mut::<E::Acc>())
    };
    // Without columns `over_positions` does nothing, and the weights' gradient ⟨dy_i, h_j⟩ is 0.
    if given.streams.cols == 0 {
        dw_all.fill(E::Acc::ZERO);
    }
    // SAFETY: these gradients are new tensors of E.
    let (ds, da) = unsafe { (Shared::new(ds.slice_mut::<E>()), Shared::new(da.slice_mut::<E>())) };
    let dw = Shared::new(dw_all);
    over_positions(given, |shape, [of_h, of_added, of_w, of_y]| {
        // SAFETY: the ranges are disjoint and inside the gradients. If there is no added row, its gradient has no
        // numbers, so its range is empty.
        let (ds, dw, da) = unsafe {
            let da_range = if added.is_some() { of_added.clone() } else { 0..0 };
            (ds.slice(of_h.clone()), dw.slice(of_w.clone()), da.slice(da_range))
        };
        backward_positions::<E>(shape, &dy[of_y], &h[of_h], added.map(|row| &row[of_added]), &w[of_w], ds, da, dw);
    });
    Ok(())
}

/// Calls `work` on ranges of positions, with the shape (m, n, d), and with the index ranges of their numbers in the
/// streams, the added rows, the weights and y.
fn over_positions(given: &Inputs, work: impl Fn([usize; 3], [Range<usize>; 4]) + Sync) {
    let (n, d, k) = (given.n, given.streams.cols(), given.weights.cols());
    let positions = given.streams.rows() / n;
    if positions == 0 || d == 0 {
        return;
    }
    let m = given.weights.rows() / positions;
    parallel::for_each(positions, parallel::grain((n + m) * d), |range| {
        let numbers = |per_position: usize| parallel::numbers(&range, per_position);
        work([m, n, d], [numbers(n * d), numbers(d), numbers(m * k), numbers(m * d)]);
    });
}

/// Computes y in tch, in the streams' computing type. Rows are added one by one, because under autocast a matrix
/// product would round them to 16 bits.
pub fn composed(streams: &Tensor, weights: &Tensor, added: Option<&Tensor>) -> Result<Tensor> {
    let computing = accumulation(streams.kind());
    let mut rows = streams.f_unbind(-2)?;
    rows.extend(added.map(Tensor::shallow_clone));
    let terms = rows.iter().zip(weights.f_split(1, -1)?).map(|(row, w)| {
        Ok(row.f_to_kind(computing)?.f_unsqueeze(-2)?.f_mul(&w)?) // (…, m, d)
    });
    let sum = terms.reduce(|sum: Result<Tensor>, term| Ok(sum?.f_add(&term?)?)).expect("there is a stream")?;
    Ok(sum.f_to_kind(streams.kind())?)
}
