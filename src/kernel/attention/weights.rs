//! The steps from scores to weights and back, on matrices with a key per row: visibility, softmax, dropout.

use super::matrix::transpose;
use super::{Block, ScaledDotProduct, Sequence, Sizes, QUERIES};
use crate::cpu::memory::Aligned;
use crate::cpu::pack::Isa;
use crate::cpu::philox::{self, Stream};
use crate::cpu::Accumulator;
use crate::kernel::math::{exp, LANES};
use crate::multiversion;

/// Sets a score to −∞ if its query does not see its key. `scores` has a row of `lanes` queries for each key.
#[inline(always)]
pub(super) fn hide<A: Accumulator>(a: &ScaledDotProduct, s: &Sequence, block: Block, scores: &mut [A], lanes: usize) {
    if a.causal {
        for (j, scores) in scores.chunks_exact_mut(lanes).take(s.k_len).enumerate() {
            // Query i sees key j if i ≥ j + q_len − k_len, so the block's first `hidden` queries do not see it.
            let hidden = (j + s.q_len).saturating_sub(s.k_len + block.first).min(lanes);
            scores[..hidden].fill(A::from_f64(f64::NEG_INFINITY));
        }
    }
}

multiversion! {
    /// Replaces scores (a key per row) by exp(s − max), and writes each query's maximum (0 for a query without keys)
    /// and sum.
    pub(super) fn softmax[isa S][A: Accumulator](scores: &mut [A], maxima: &mut [A], sums: &mut [A]) {
        softmax_lanes::<A, S>(scores, maxima, sums);
    }
}

multiversion! {
    /// Replaces scores (a key per row) by the weights exp(s − lse), with an lse per query.
    pub(super) fn weights[isa S][A: Accumulator](scores: &mut [A], lse: &[A]) {
        weights_lanes::<A, S>(scores, lse);
    }
}

/// Computes [`softmax()`]. Each lane of a register is one query, so maxima and sums run over the rows.
#[inline(always)]
fn softmax_lanes<A: Accumulator, S: Isa>(scores: &mut [A], maxima: &mut [A], sums: &mut [A]) {
    let (lanes, lowest) = (maxima.len(), A::from_f64(f64::NEG_INFINITY));
    for first in (0..lanes).step_by(LANES) {
        let mut max = [lowest; LANES];
        for s in scores.chunks_exact(lanes) {
            let s: &[A; LANES] = s[first..].first_chunk().unwrap();
            for l in 0..LANES {
                max[l] = s[l].max(max[l]);
            }
        }
        for max in &mut max {
            *max = if *max == lowest { A::ZERO } else { *max };
        }
        let mut sum = [A::ZERO; LANES];
        for s in scores.chunks_exact_mut(lanes) {
            let s: &mut [A; LANES] = s[first..].first_chunk_mut().unwrap();
            for l in 0..LANES {
                s[l] = exp::<A, S>(s[l] - max[l]);
                sum[l] += s[l];
            }
        }
        maxima[first..][..LANES].copy_from_slice(&max);
        sums[first..][..LANES].copy_from_slice(&sum);
    }
}

/// Computes [`weights()`].
#[inline(always)]
fn weights_lanes<A: Accumulator, S: Isa>(scores: &mut [A], lse: &[A]) {
    for s in scores.chunks_exact_mut(lse.len()) {
        for (s, lse) in s.chunks_exact_mut(LANES).zip(lse.chunks_exact(LANES)) {
            for l in 0..LANES {
                s[l] = exp::<A, S>(s[l] - lse[l]);
            }
        }
    }
}

/// Weights are normalised again if |lse| is larger than this: in f32, exp(s − lse) has then lost four bits.
const LARGE: f64 = 16.0;

/// Replaces dP by dS = P∘(dP − D), where D = Σ P∘dP over a query's keys. If some |lse| is large, P is first scaled to
/// sum to `shares` (1 if `None`). Matrices have a row of `lanes` queries for each key.
#[inline(always)]
pub(super) fn score_gradients<A: Accumulator>(
    p: &mut [A],
    dp: &mut [A],
    lanes: usize,
    lse: &[A],
    shares: Option<&[A; QUERIES]>,
) {
    if lse.iter().any(|lse| lse.to_f64().abs() > LARGE) {
        normalise(p, lanes, shares);
    }
    let mut d = [A::ZERO; QUERIES];
    for (p, dp) in p.chunks_exact(lanes).zip(dp.chunks_exact(lanes)) {
        for ((d, p), dp) in d.iter_mut().zip(p).zip(dp) {
            *d += *p * *dp;
        }
    }
    for (p, dp) in p.chunks_exact(lanes).zip(dp.chunks_exact_mut(lanes)) {
        for ((d, p), dp) in d.iter().zip(p).zip(dp) {
            *dp = *p * (*dp - *d);
        }
    }
}

/// Divides each query's weights by their sum and multiplies them by the query's share.
///
/// A large lse has lost digits, so P = exp(s − lse) is off by one factor for all keys of a query: 1e-4 at 1,600 in
/// f32. D would contain this error but dP would not, so their difference would be wrong by 1e-4·D.
#[inline(never)]
fn normalise<A: Accumulator>(p: &mut [A], lanes: usize, shares: Option<&[A; QUERIES]>) {
    let mut sums = [A::ZERO; QUERIES];
    for p in p.chunks_exact(lanes) {
        sums.iter_mut().zip(p).for_each(|(sum, p)| *sum += *p);
    }
    // A query that sees no key has the sum 0, so its factor stays 0.
    let mut factors = sums.map(|sum| if sum == A::ZERO { A::ZERO } else { A::ONE / sum });
    if let Some(shares) = shares {
        factors.iter_mut().zip(shares).for_each(|(factor, share)| *factor = *factor * *share);
    }
    for p in p.chunks_exact_mut(lanes) {
        p.iter_mut().zip(&factors).for_each(|(p, factor)| *p = *p * *factor);
    }
}

/// Dropout's factors. Random half words are drawn for a block of queries and all heads at once: their rows (query,
/// head) are consecutive in the random stream, and one register of random numbers covers several short rows.
pub(super) struct DropoutFactors<A> {
    random: Vec<u16>,
    /// One head's factors with a query per row, as they are drawn.
    rows: Aligned<A>,
    /// The same with a key per row, as the scores are stored.
    factors: Aligned<A>,
}

impl<A: Accumulator> DropoutFactors<A> {
    /// Allocates the buffers; they are empty without dropout.
    pub(super) fn new(a: &ScaledDotProduct, sizes: &Sizes) -> Self {
        let len = |n| if a.dropout.is_some() { n } else { 0 };
        DropoutFactors {
            random: philox::scratch(1, len(sizes.random)),
            rows: Aligned::new(len(sizes.scores)),
            factors: Aligned::new(len(sizes.scores)),
        }
    }

    /// Draws the random half words for a block of queries, in all heads.
    #[inline(always)]
    pub(super) fn draw(&mut self, a: &ScaledDotProduct, s: &Sequence, block: Block) {
        if let Some(dropout) = &a.dropout {
            let first = (s.q_start + block.first) * a.heads;
            fill(&dropout.stream, first, block.count * a.heads, s.k_len, &mut self.random);
        }
    }

    /// Prepares one head's factors, with a key per row; does nothing without dropout.
    #[inline(always)]
    pub(super) fn prepare(&mut self, a: &ScaledDotProduct, head: usize, keys: usize, queries: usize, lanes: usize) {
        // Without keys there are no factors either, and rows of width 0 cannot be iterated.
        let Some(dropout) = a.dropout.as_ref().filter(|_| keys > 0) else { return };
        let (per_row, width) = (philox::padded(keys), keys.next_multiple_of(LANES));
        let kept = A::from_f64(dropout.scale);
        for (i, row) in self.rows.chunks_exact_mut(width).take(queries).enumerate() {
            let random = &self.random[(i * a.heads + head) * per_row..][..per_row];
            for (row, random) in row.chunks_exact_mut(philox::BLOCK).zip(random.chunks_exact(philox::BLOCK)) {
                for (factor, random) in row.iter_mut().zip(random) {
                    *factor = if *random >= dropout.threshold { kept } else { A::ZERO };
                }
            }
        }
        transpose(&self.rows, queries, keys, width, &mut self.factors, lanes);
    }

    /// Computes x ← M∘x, where M holds the factors of the last [`prepare`](Self::prepare).
    #[inline(always)]
    pub(super) fn apply(&self, a: &ScaledDotProduct, x: &mut [A]) {
        if a.dropout.is_some() {
            for (x, m) in x.iter_mut().zip(self.factors.iter()) {
                *x = *x * *m;
            }
        }
    }
}

multiversion! {
    /// Runs [`philox::fill`], compiled for each instruction set.
    fn fill(stream: &Stream, first_row: usize, rows: usize, cols: usize, out: &mut [u16]) {
        philox::fill(stream, first_row, rows, cols, out);
    }
}
