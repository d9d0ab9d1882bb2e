//! Weighted sums of a few rows, by which hyper-connections read and write their residual streams.
//!
//! > y_i = Σ_j w_ij h_j,  dh_j = Σ_i w_ij dy_i,  dw_ij = ⟨dy_i, h_j⟩
//!
//! h has n rows of d numbers, the streams of one position, and optionally one added row after them; y has m rows. Sums
//! are in f32 (f64 for f64). Source: Xie et al. 2025, arXiv:2512.24880; Zhu et al. 2024, arXiv:2409.19606.

use super::weighted_rows::{combine, dot};
use crate::cpu::Element;
use crate::multiversion;

pub mod call;

/// The rows of one position: the streams (n, d), and the optional added row of d numbers.
struct Position<'a, E> {
    streams: &'a [E],
    added: Option<&'a [E]>,
    d: usize,
}

impl<'a, E> Position<'a, E> {
    /// Returns the rows h_j: each stream, then the added row.
    #[inline(always)]
    fn iter(&self) -> impl Iterator<Item = &'a [E]> + Clone {
        self.streams.chunks_exact(self.d).chain(self.added)
    }
}

multiversion! {
    /// Computes the weighted sums y_i = Σ_j w_ij h_j of all positions. `shape` is (m, n, d). At each position, the h_j
    /// are n rows of d numbers in `streams` and one more in `added` if it is given, and `y` has m rows. `weights` has m
    /// rows of n numbers, or of n + 1 with `added`.
    pub fn forward[isa S][E: Element](
        shape: [usize; 3], streams: &[E], added: Option<&[E]>, weights: &[E::Acc], y: &mut [E],
    ) {
        let [m, n, d] = shape;
        // `k` is the number of rows to add up: the streams, and the added row if there is one.
        let k = n + usize::from(added.is_some());
        let all = streams.chunks_exact(n * d).zip(weights.chunks_exact(m * k)).zip(y.chunks_exact_mut(m * d));
        for (index, ((streams, weights), y)) in all.enumerate() {
            let position = Position { streams, added: added.map(|added| &added[index * d..(index + 1) * d]), d };
            for (weights, y) in weights.chunks_exact(k).zip(y.chunks_exact_mut(d)) {
                combine::<E, S>(position.iter().zip(weights.iter().copied()), y);
            }
        }
    }
}

multiversion! {
    /// Computes the gradients of the streams, of `added` (empty if absent) and of the weights from `dy`, the gradient
    /// of y. They are dh_j = Σ_i w_ij dy_i and dw_ij = ⟨dy_i, h_j⟩. The shapes are those of [`forward`].
    pub fn backward[isa S][E: Element](
        shape: [usize; 3], dy: &[E], streams: &[E], added: Option<&[E]>, weights: &[E::Acc], dstreams: &mut [E],
        dadded: &mut [E], dweights: &mut [E::Acc],
    ) {
        let [m, n, d] = shape;
        // `k` is the number of rows to add up: the streams, and the added row if there is one.
        let k = n + usize::from(added.is_some());
        let all = dy.chunks_exact(m * d).zip(streams.chunks_exact(n * d)).zip(weights.chunks_exact(m * k));
        let to = dstreams.chunks_exact_mut(n * d).zip(dweights.chunks_exact_mut(m * k));
        for (index, (((dy, streams), weights), (dstreams, dweights))) in all.zip(to).enumerate() {
            // `here` is the range of the position's numbers in `added`.
            let here = index * d..(index + 1) * d;
            let position = Position { streams, added: added.map(|added| &added[here.clone()]), d };
            for (dy, dweights) in dy.chunks_exact(d).zip(dweights.chunks_exact_mut(k)) {
                for (h, dw) in position.iter().zip(dweights) {
                    *dw = dot::<E, E, S>(dy, h);
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
