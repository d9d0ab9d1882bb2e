//! The steps from scores to weights and back, on matrices with a key per row: visibility, softmax, dropout.

use super::matrix::transpose;
use super::{Block, ScaledDotProduct, Sequence, Sizes, QUERIES};
use crate::cpu::memory::Aligned;
use crate::cpu::pack::Isa;
use crate::cpu::philox::{self, Stream};
use crate::cpu::Accumulator;
use crate::kernel::math::{exp, LANES};
use crate::multiversion;

/// Sets a score to −∞ if its query does not see its key. `scores` has a row for each key, with the scores of the
/// block's queries, padded to `lanes`.
#[inline(always)]
pub(super) fn hide<A: Accumulator>(
    attention: &ScaledDotProduct,
    sequence: &Sequence,
    block: Block,
    scores: &mut [A],
    lanes: usize,
) {
    if attention.causal {
        for (j, scores) in scores.chunks_exact_mut(lanes).take(sequence.k_len).enumerate() {
            // Query i of the sequence sees key j if i ≥ j + q_len − k_len. Query i of the block is number
            // block.first + i of the sequence, so the block's first `hidden` queries do not see the key.
            let hidden = (j + sequence.q_len).saturating_sub(sequence.k_len + block.first).min(lanes);
            scores[..hidden].fill(A::from_f64(f64::NEG_INFINITY));
        }
    }
}

multiversion! {
    /// Replaces scores (a key per row, a query per column) by exp(score − max). Writes each query's maximum, 0 for a
    /// query without keys, and its sum of exponentials.
    pub(super) fn softmax[isa S][A: Accumulator](scores: &mut [A], maxima: &mut [A], sums: &mut [A]) {
        softmax_lanes::<A, S>(scores, maxima, sums);
    }
}

multiversion! {
    /// Replaces scores (a key per row, a query per column) by the weights exp(score − lse), with a log sum of
    /// exponentials `lse` per query.
    pub(super) fn weights[isa S][A: Accumulator](scores: &mut [A], lse: &[A]) {
        weights_lanes::<A, S>(scores, lse);
    }
}

/// Computes [`softmax()`]. Each lane of a register is one query, so maxima and sums run over the rows, which are keys.
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
        // For a query that sees no key the maximum is −∞, and −∞ − (−∞) would be NaN.
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

/// Computes [`weights()`]: a row of `scores` is a key, with as many queries as `lse`.
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

/// Weights are normalised again if |lse| is larger than this, because then exp(score − lse) has lost four bits in f32.
const LARGE: f64 = 16.0;

/// Replaces the weights' gradient dP by the scores' gradient dS = P∘(dP − D), where D = Σ P∘dP over a query's keys. If
/// some |lse| is large, the weights P are first scaled to sum to `shares` (1 if `None`). P and dP have a row of `lanes`
/// queries for each key.
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
/// A large lse has lost digits, so P = exp(score − lse) is off by one factor for all keys of a query. At lse = 1,600 in
/// f32 the factor is 1 ± 1e-4. In dS = P∘(dP − D), D = Σ P∘dP would have this error but dP would not.
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

/// Dropout's factors, 0 or 1/(1 − p). Random half words are drawn for a block of queries and all heads at once. Their
/// rows, one per query and head, are consecutive in the random stream, so one register covers several short rows.
pub(super) struct DropoutFactors<A> {
    /// The random half words of a block: a row for each head of the first query, then of the second, and so on.
    random: Vec<u16>,
    /// One head's factors with a query per row, as they are drawn.
    rows: Aligned<A>,
    /// The same with a key per row, as the scores are stored.
    factors: Aligned<A>,
}

impl<A: Accumulator> DropoutFactors<A> {
    /// Allocates the buffers; they are empty without dropout.
    pub(super) fn new(attention: &ScaledDotProduct, sizes: &Sizes) -> Self {
        let len = |n| if attention.dropout.is_some() { n } else { 0 };
        DropoutFactors {
            random: philox::scratch(1, len(sizes.random)),
            rows: Aligned::new(len(sizes.scores)),
            factors: Aligned::new(len(sizes.scores)),
        }
    }

    /// Draws the random half words for a block of queries, in all heads.
    #[inline(always)]
    pub(super) fn draw(&mut self, attention: &ScaledDotProduct, sequence: &Sequence, block: Block) {
        if let Some(dropout) = &attention.dropout {
            // The stream has a row for each query and head, with a number for each key.
            let (first, rows) = ((sequence.q_start + block.first) * attention.heads, block.count * attention.heads);
            fill(&dropout.stream, first, rows, sequence.k_len, &mut self.random);
        }
    }

    /// Prepares one head's factors for a block of `queries` queries, with a key per row of `lanes` numbers; does
    /// nothing without dropout.
    #[inline(always)]
    pub(super) fn prepare(
        &mut self,
        attention: &ScaledDotProduct,
        head: usize,
        keys: usize,
        queries: usize,
        lanes: usize,
    ) {
        // Without keys there are no factors either, and rows of width 0 cannot be iterated.
        let Some(dropout) = attention.dropout.as_ref().filter(|_| keys > 0) else { return };
        let (per_row, width) = (philox::padded(keys), keys.next_multiple_of(LANES));
        let kept = A::from_f64(dropout.scale);
        for (i, row) in self.rows.chunks_exact_mut(width).take(queries).enumerate() {
            let random = &self.random[(i * attention.heads + head) * per_row..][..per_row];
            // Both rows are padded to whole blocks, so that the inner loop has a constant length.
            for (row, random) in row.chunks_exact_mut(philox::BLOCK).zip(random.chunks_exact(philox::BLOCK)) {
                for (factor, random) in row.iter_mut().zip(random) {
                    *factor = if *random >= dropout.threshold { kept } else { A::ZERO };
                }
            }
        }
        transpose(&self.rows, queries, keys, width, &mut self.factors, lanes);
    }

    /// Multiplies the elements of x by the factors of the last [`prepare`](Self::prepare); does nothing without
    /// dropout.
    #[inline(always)]
    pub(super) fn apply(&self, attention: &ScaledDotProduct, x: &mut [A]) {
        if attention.dropout.is_some() {
            for (x, factor) in x.iter_mut().zip(self.factors.iter()) {
                *x = *x * *factor;
            }
        }
    }
}

multiversion! {
    /// Runs [`philox::fill`], which writes random half words, compiled for each instruction set.
    fn fill(stream: &Stream, first_row: usize, rows: usize, cols: usize, out: &mut [u16]) {
        philox::fill(stream, first_row, rows, cols, out);
    }
}
