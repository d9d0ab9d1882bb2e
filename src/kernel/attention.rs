//! Attention over short rows: scores, mask, softmax, dropout and the weighted sum of one sentence and one head at a
//! time, while they are in the first-level cache.
//!
//! > S = scale·Q Kᵀ,  P = softmax(S) over the visible keys,  O = (M∘P) V
//! > dV = (M∘P)ᵀ dO,  dP = M∘(dO Vᵀ),  dS = P∘(dP − D),  D_i = Σ_j P_ij dP_ij,  dQ = scale·dS K,  dK = scale·dSᵀ Q
//!
//! Q, K, V are the rows of one head (d_head columns). M holds dropout's factors, 0 or 1/(1 − p), from [`Dropout`]'s
//! stream at element (query row·heads + head, key), with the key counted within its sequence. Causal: key j is
//! visible to query i if j ≤ i + k_len − q_len. The forward pass stores log Σ_j exp S_ij, from which the backward
//! pass recomputes P (Dao et al. 2022, FlashAttention, §3.1). If the rounding error of this logarithm would matter, P
//! is normalised again. D is computed from P and dP, which are both available in a short row, so the output need not be
//! kept. A query that sees no key has the output 0 and no gradient.
//!
//! Scores are stored transposed, with a key per row and sixteen queries per register. So maximum, exponential and sum
//! run down the columns, and no step combines the lanes of a register. Every matrix product is a call of [`product()`].

pub mod call;
mod composed;
mod matrix;
mod product;
pub mod single;
#[cfg(test)]
mod tests;
mod weights;

pub use composed::{composed, Extras};
pub use matrix::{Matrix, MatrixMut};

use crate::cpu::memory::Aligned;
use crate::cpu::philox::{self, Dropout};
use crate::cpu::{Accumulator, Element};
use crate::kernel::math::LANES;
use crate::multiversion;
use matrix::{load, store, transpose};
use product::{product, ADD, REPLACE, TILE};
use weights::{hide, score_gradients, softmax, weights, DropoutFactors};

/// The number of queries processed together. With many keys there are fewer, so that the scores stay within
/// [`SCORES`].
const QUERIES: usize = 64;
/// The number of scores kept at a time: 32 KiB of f32, which fit the first-level cache beside the other operands.
const SCORES: usize = 8192;

/// The settings of the attention function.
#[derive(Clone, Copy, Debug)]
pub struct ScaledDotProduct {
    pub heads: usize,
    pub d_head: usize,
    /// The factor of the scores, usually 1/√d_head.
    pub scale: f64,
    pub causal: bool,
    /// Dropout on the weights; `None` in evaluation.
    pub dropout: Option<Dropout>,
}

/// The rows of one sequence in matrices that hold all sequences one after the other. Its queries are `q_len` rows from
/// row `q_start` on; its keys and values are `k_len` rows from row `k_start` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequence {
    pub q_start: usize,
    pub q_len: usize,
    pub k_start: usize,
    pub k_len: usize,
}

multiversion! {
    /// Computes `out` and `lse` in the rows of the sequences' queries. q, k, v and `out` have d_head columns for each
    /// head, one head after the other. `lse` has a column per head: a query's log Σ exp(score).
    pub fn forward[E: Element](
        attention: &ScaledDotProduct,
        sequences: &[Sequence],
        q: Matrix<E>,
        k: Matrix<E>,
        v: Matrix<E>,
        out: MatrixMut<E>,
        lse: MatrixMut<E::Acc>,
    ) {
        let (mut out, mut lse) = (out, lse);
        // A head has d columns; in the workspace its rows are padded to whole registers.
        let (d, width) = (attention.d_head, attention.d_head.next_multiple_of(LANES));
        let scale = E::Acc::from_f64(attention.scale);
        assert!(d > 0, "heads of no columns");
        let sizes = Sizes::of(attention, sequences);
        // The workspace holds (scale·Q)ᵀ, K, V and the scores Sᵀ of one block of queries in one head. `result` first
        // holds scale·Q, and later the output O.
        let mut q_t = Aligned::<E::Acc>::new(width * sizes.queries);
        let mut keys = Aligned::new(sizes.keys.saturating_mul(width));
        let mut values = Aligned::new(sizes.keys.saturating_mul(width));
        let mut scores = Aligned::new(sizes.scores);
        let mut result = Aligned::new(sizes.queries * width);
        let mut mask = DropoutFactors::new(attention, &sizes);
        let mut sums = [E::Acc::ZERO; QUERIES];
        let mut maxima = [E::Acc::ZERO; QUERIES];
        for sequence in sequences {
            for block in blocks(sequence) {
                // `lanes` is the number of queries, padded to whole registers.
                let lanes = block.count.next_multiple_of(LANES);
                mask.draw(attention, sequence, block);
                for head in 0..attention.heads {
                    let column = head * d;
                    load(&q, sequence.q_start + block.first, block.count, column, d, scale, &mut result, width);
                    transpose(&result, block.count, d, width, &mut q_t, lanes);
                    load(&k, sequence.k_start, sequence.k_len, column, d, E::Acc::ONE, &mut keys, width);
                    load(&v, sequence.k_start, sequence.k_len, column, d, E::Acc::ONE, &mut values, width);
                    // A product's rows, here the keys, are rounded up to whole tiles.
                    let padded_keys = sequence.k_len.next_multiple_of(TILE);
                    // `product` computes C = AB from A's distances between rows and between columns, and from those
                    // between the rows of B and of C. Here it computes Sᵀ = K·(scale·Q)ᵀ.
                    product([padded_keys, lanes, d], &keys, [width, 1], &q_t, lanes, &mut scores, lanes, REPLACE);
                    hide(attention, sequence, block, &mut scores, lanes);
                    softmax(&mut scores[..sequence.k_len * lanes], &mut maxima[..lanes], &mut sums[..lanes]);
                    mask.prepare(attention, head, sequence.k_len, block.count, lanes);
                    mask.apply(attention, &mut scores[..sequence.k_len * lanes]);
                    // The result is the output before the division by the sums: (M∘exp(S − max))·V, where M holds
                    // dropout's factors. Rows and columns of the scores Sᵀ are exchanged by their distances [1, lanes].
                    let rows = block.count.next_multiple_of(TILE);
                    let shape = [rows, width, sequence.k_len];
                    product(shape, &scores, [1, lanes], &values, width, &mut result, width, REPLACE);
                    for i in 0..block.count {
                        let row = sequence.q_start + block.first + i;
                        // A query that sees no key has the maximum 0 and the sum 0: its lse is −∞, and its output is 0.
                        lse.row(row, head, 1)[0] = maxima[i] + sums[i].ln();
                        let factor = if sums[i] == E::Acc::ZERO { E::Acc::ZERO } else { E::Acc::ONE / sums[i] };
                        for (o, r) in out.row(row, column, d).iter_mut().zip(&result[i * width..]) {
                            *o = E::store(*r * factor);
                        }
                    }
                }
            }
        }
    }
}

multiversion! {
    /// Computes `dq` in the rows of the sequences' queries, and `dk` and `dv` in the rows of their keys, overwriting
    /// all. `dout` is the gradient of `out`, and `lse` is from [`forward`]. Sequences must not share keys. If `lse` was
    /// computed from more than these keys, `shares` (a matrix like `lse`) holds the sum of each query's weights over
    /// these keys; `None` means 1.
    pub fn backward[E: Element](
        attention: &ScaledDotProduct,
        sequences: &[Sequence],
        q: Matrix<E>,
        k: Matrix<E>,
        v: Matrix<E>,
        dout: Matrix<E>,
        lse: Matrix<E::Acc>,
        shares: Option<Matrix<E::Acc>>,
        dq: MatrixMut<E>,
        dk: MatrixMut<E>,
        dv: MatrixMut<E>,
    ) {
        let (mut dq, mut dk, mut dv) = (dq, dk, dv);
        // A head has d columns; in the workspace its rows are padded to whole registers.
        let (d, width) = (attention.d_head, attention.d_head.next_multiple_of(LANES));
        let (one, scale) = (E::Acc::ONE, E::Acc::from_f64(attention.scale));
        assert!(d > 0, "heads of no columns");
        let sizes = Sizes::of(attention, sequences);
        // The workspace is for one block of queries in one head. Only `dkeys` and `dvalues` are for all heads, because
        // they are sums over a sequence's blocks.
        let [mut q_t, mut dout_t] = [(); 2].map(|_| Aligned::<E::Acc>::new(width * sizes.queries));
        let [mut queries, mut douts, mut result] = [(); 3].map(|_| Aligned::new(sizes.queries * width));
        let [mut keys, mut values] = [(); 2].map(|_| Aligned::new(sizes.keys.saturating_mul(width)));
        let in_all_heads = sizes.keys.saturating_mul(attention.heads * width);
        let [mut dkeys, mut dvalues] = [(); 2].map(|_| Aligned::new(in_all_heads));
        let [mut p, mut ds] = [(); 2].map(|_| Aligned::new(sizes.scores));
        let mut mask = DropoutFactors::new(attention, &sizes);
        for sequence in sequences {
            // A product's rows, here the keys, are rounded up to whole tiles.
            let padded_keys = sequence.k_len.next_multiple_of(TILE);
            let per_head = padded_keys * width;
            dkeys[..attention.heads * per_head].fill(E::Acc::ZERO);
            dvalues[..attention.heads * per_head].fill(E::Acc::ZERO);
            for block in blocks(sequence) {
                // `lanes` is the number of queries, padded to whole registers.
                let lanes = block.count.next_multiple_of(LANES);
                let first = sequence.q_start + block.first;
                mask.draw(attention, sequence, block);
                for head in 0..attention.heads {
                    let column = head * d;
                    load(&q, first, block.count, column, d, scale, &mut queries, width);
                    load(&dout, first, block.count, column, d, one, &mut douts, width);
                    load(&k, sequence.k_start, sequence.k_len, column, d, one, &mut keys, width);
                    load(&v, sequence.k_start, sequence.k_len, column, d, one, &mut values, width);
                    transpose(&queries, block.count, d, width, &mut q_t, lanes);
                    transpose(&douts, block.count, d, width, &mut dout_t, lanes);
                    // `product` computes C = AB from A's distances between rows and between columns, and from those
                    // between the rows of B and of C. `p` holds the scores Sᵀ = K·(scale·Q)ᵀ, then the weights Pᵀ.
                    // `ds` holds V·dOᵀ, then the weights' gradient dPᵀ and the scores' gradient dSᵀ.
                    product([padded_keys, lanes, d], &keys, [width, 1], &q_t, lanes, &mut p, lanes, REPLACE);
                    product([padded_keys, lanes, d], &values, [width, 1], &dout_t, lanes, &mut ds, lanes, REPLACE);
                    hide(attention, sequence, block, &mut p, lanes);
                    // A query that sees no key has an lse of −∞. All its scores are −∞, so with any finite number in
                    // place of lse its weights are 0.
                    let mut log_sums = [E::Acc::ZERO; QUERIES];
                    for (i, to) in log_sums[..block.count].iter_mut().enumerate() {
                        let log_sum = lse.row(first + i, head, 1)[0];
                        *to = if log_sum == E::Acc::from_f64(f64::NEG_INFINITY) { E::Acc::ZERO } else { log_sum };
                    }
                    weights(&mut p[..sequence.k_len * lanes], &log_sums[..lanes]);
                    mask.prepare(attention, head, sequence.k_len, block.count, lanes);
                    // The weights' gradient is dP = M∘(dO·Vᵀ), where M holds dropout's factors.
                    mask.apply(attention, &mut ds[..sequence.k_len * lanes]);
                    let shares = shares.map(|shares| {
                        let mut block_shares = [one; QUERIES];
                        (0..block.count).for_each(|i| block_shares[i] = shares.row(first + i, head, 1)[0]);
                        block_shares
                    });
                    let (weights, dweights) = (&mut p[..sequence.k_len * lanes], &mut ds[..sequence.k_len * lanes]);
                    score_gradients(weights, dweights, lanes, &log_sums[..block.count], shares.as_ref());
                    // The keys' gradient: dK += dSᵀ·(scale·Q).
                    let dkeys = &mut dkeys[head * per_head..][..per_head];
                    product([padded_keys, width, block.count], &ds, [lanes, 1], &queries, width, dkeys, width, ADD);
                    // The queries' gradient: dQ = scale·dS·K, where the factor is applied when it is stored.
                    let rows = block.count.next_multiple_of(TILE);
                    product([rows, width, sequence.k_len], &ds, [1, lanes], &keys, width, &mut result, width, REPLACE);
                    for i in 0..block.count {
                        for (o, r) in dq.row(first + i, column, d).iter_mut().zip(&result[i * width..]) {
                            *o = E::store(*r * scale);
                        }
                    }
                    // The values' gradient: dV += (M∘P)ᵀ·dO.
                    mask.apply(attention, &mut p[..sequence.k_len * lanes]);
                    let dvalues = &mut dvalues[head * per_head..][..per_head];
                    product([padded_keys, width, block.count], &p, [lanes, 1], &douts, width, dvalues, width, ADD);
                }
            }
            for j in 0..sequence.k_len {
                for head in 0..attention.heads {
                    let start = head * per_head + j * width;
                    store(&dkeys[start..][..d], dk.row(sequence.k_start + j, head * d, d));
                    store(&dvalues[start..][..d], dv.row(sequence.k_start + j, head * d, d));
                }
            }
        }
    }
}

/// A block of consecutive queries in a sequence.
#[derive(Clone, Copy)]
struct Block {
    /// The first query's index in its sequence.
    first: usize,
    count: usize,
}

/// Returns the number of queries per block for `k_len` keys: as many as have [`SCORES`] scores, from [`LANES`] to
/// [`QUERIES`]. It is a multiple of [`LANES`], so that only a sequence's last block is padded.
#[inline(always)]
fn block_size(k_len: usize) -> usize {
    (SCORES / k_len.max(1) / LANES * LANES).clamp(LANES, QUERIES)
}

/// Splits a sequence's queries into blocks.
#[inline(always)]
fn blocks(sequence: &Sequence) -> impl Iterator<Item = Block> + use<> {
    let (size, len) = (block_size(sequence.k_len), sequence.q_len);
    (0..len).step_by(size).map(move |first| Block { first, count: size.min(len - first) })
}

/// The sizes of a workspace that is large enough for each of the sequences.
struct Sizes {
    /// The number of queries in a block, rounded up to [`LANES`].
    queries: usize,
    /// The number of keys, rounded up to [`LANES`].
    keys: usize,
    /// The number of scores of a block, queries·keys.
    scores: usize,
    /// The number of dropout's random half words for a block in all heads.
    random: usize,
}

impl Sizes {
    /// Returns the largest of each size that the sequences need.
    fn of(attention: &ScaledDotProduct, sequences: &[Sequence]) -> Self {
        let mut sizes = Sizes { queries: 0, keys: 0, scores: 0, random: 0 };
        for sequence in sequences {
            let count = block_size(sequence.k_len).min(sequence.q_len);
            let (queries, keys) = (count.next_multiple_of(LANES), sequence.k_len.next_multiple_of(LANES));
            sizes.queries = sizes.queries.max(queries);
            sizes.keys = sizes.keys.max(keys);
            sizes.scores = sizes.scores.max(queries.saturating_mul(keys));
            sizes.random = sizes.random.max((count * attention.heads).saturating_mul(philox::padded(sequence.k_len)));
        }
        sizes
    }
}
