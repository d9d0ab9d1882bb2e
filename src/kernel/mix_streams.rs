//! Weighted sums of a few rows, by which hyper-connections read and write their residual streams.
//!
//! > y_i = Σ_j w_ij h_j,  dh_j = Σ_i w_ij dy_i,  dw_ij = ⟨dy_i, h_j⟩
//!
//! h has n rows of d numbers, the streams of one position, and optionally one added row after them; y has m rows. Sums
//! are in f32 (f64 for f64). Source: Xie et al. 2025, arXiv:2512.24880; Zhu et al. 2024, arXiv:2409.19606.

use crate::cpu::pack::{Isa, Of, Pack, Store, PAIR_LANES};
use crate::cpu::{Accumulator, Element};
use crate::multiversion;

pub mod call;

/// The rows of one position: the streams, and the optional added row.
struct Position<'a, E> {
    streams: &'a [E],
    added: Option<&'a [E]>,
    d: usize,
}

impl<'a, E> Position<'a, E> {
    #[inline(always)]
    fn iter(&self) -> impl Iterator<Item = &'a [E]> + Clone {
        self.streams.chunks_exact(self.d).chain(self.added)
    }
}

multiversion! {
    /// Computes y of all positions. `shape` is (m, n, d); `weights` has m rows of n numbers, or of n + 1 with `added`.
    pub fn forward[isa S][E: Element](
        shape: [usize; 3], streams: &[E], added: Option<&[E]>, weights: &[E::Acc], y: &mut [E],
    ) {
        let [m, n, d] = shape;
        // The number of rows to add up: the streams, and the added row if there is one.
        let k = n + usize::from(added.is_some());
        let all = streams.chunks_exact(n * d).zip(weights.chunks_exact(m * k)).zip(y.chunks_exact_mut(m * d));
        for (at, ((streams, weights), y)) in all.enumerate() {
            let position = Position { streams, added: added.map(|added| &added[at * d..(at + 1) * d]), d };
            for (weights, y) in weights.chunks_exact(k).zip(y.chunks_exact_mut(d)) {
                combine::<E, S>(position.iter().zip(weights.iter().copied()), y);
            }
        }
    }
}

multiversion! {
    /// Computes the gradients of the streams, of `added` and of the weights from `dy`, the gradient of y.
    pub fn backward[isa S][E: Element](
        shape: [usize; 3], dy: &[E], streams: &[E], added: Option<&[E]>, weights: &[E::Acc], dstreams: &mut [E],
        dadded: &mut [E], dweights: &mut [E::Acc],
    ) {
        let [m, n, d] = shape;
        // The number of rows to add up: the streams, and the added row if there is one.
        let k = n + usize::from(added.is_some());
        let all = dy.chunks_exact(m * d).zip(streams.chunks_exact(n * d)).zip(weights.chunks_exact(m * k));
        let to = dstreams.chunks_exact_mut(n * d).zip(dweights.chunks_exact_mut(m * k));
        for (at, (((dy, streams), weights), (dstreams, dweights))) in all.zip(to).enumerate() {
            let here = at * d..(at + 1) * d;
            let position = Position { streams, added: added.map(|added| &added[here.clone()]), d };
            for (dy, dweights) in dy.chunks_exact(d).zip(dweights.chunks_exact_mut(k)) {
                for (h, dw) in position.iter().zip(dweights) {
                    *dw = dot::<E, S>(dy, h);
                }
            }
            let dadded = added.map(|_| &mut dadded[here]);
            // The weights of row h_j are column j of the position's weights (m, k).
            for (j, dh) in dstreams.chunks_exact_mut(d).chain(dadded).enumerate() {
                combine::<E, S>(dy.chunks_exact(d).zip(weights[j..].iter().step_by(k).copied()), dh);
            }
        }
    }
}

/// Computes y = Σ w·row over the pairs (row, w).
#[inline(always)]
fn combine<'a, E: Element, S: Isa>(pairs: impl Iterator<Item = (&'a [E], E::Acc)> + Clone, y: &mut [E]) {
    let store = Store::cached();
    let (blocks, rest) = y.as_chunks_mut::<PAIR_LANES>();
    let whole = blocks.len() * PAIR_LANES;
    for (b, to) in blocks.iter_mut().enumerate() {
        let mut sum = [Of::<E::Acc, S>::zero(); 2];
        for (row, w) in pairs.clone() {
            let w = Of::<E::Acc, S>::splat(w);
            let [low, high] = Of::<E::Acc, S>::pair(block(row, b));
            sum = [low.mul_add(w, sum[0]), high.mul_add(w, sum[1])];
        }
        Of::<E::Acc, S>::store(sum, to, store);
    }
    for (c, to) in rest.iter_mut().enumerate() {
        let mut sum = E::Acc::ZERO;
        for (row, w) in pairs.clone() {
            sum += row[whole + c].load() * w;
        }
        *to = E::store(sum);
    }
}

/// Computes ⟨a, b⟩.
#[inline(always)]
fn dot<E: Element, S: Isa>(a: &[E], b: &[E]) -> E::Acc {
    let whole = a.len() / PAIR_LANES;
    let mut sum = [Of::<E::Acc, S>::zero(); 2];
    for i in 0..whole {
        let (a, b) = (Of::<E::Acc, S>::pair(block(a, i)), Of::<E::Acc, S>::pair(block(b, i)));
        sum = [a[0].mul_add(b[0], sum[0]), a[1].mul_add(b[1], sum[1])];
    }
    let mut total = sum[0].add(sum[1]).sum();
    for (a, b) in a.iter().zip(b).skip(whole * PAIR_LANES) {
        total += a.load() * b.load();
    }
    total
}

/// Returns block `b` of a row.
#[inline(always)]
fn block<E>(row: &[E], b: usize) -> &[E; PAIR_LANES] {
    row[b * PAIR_LANES..].first_chunk().expect("a row has all its blocks")
}
