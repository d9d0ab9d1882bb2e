//! Attention of single queries during decoding, with keys and values at arbitrary rows.
//!
//! > o_i = Σ_j softmax_j(scale·q_i·k_j) v_j over the rows j that query i reads, per head
//!
//! Scores may be soft-capped, and a head may have a sink logit, which its softmax includes beside the keys' scores.
//!
//! A head's keys are read once for its scores, and its values once for the sum; nothing is copied or transposed. If
//! there are fewer heads of keys than of queries, neighbouring query heads share one head of keys. A query that reads
//! no key gets 0.

use super::matrix::{Matrix, MatrixMut};
use super::Extras;
use crate::cpu::memory::Aligned;
use crate::cpu::pack::{Isa, Of, Pack, Store, WIDTH};
use crate::cpu::{parallel, Accumulator, Element};
use crate::error::{Error, Result};
use crate::host::host;
use crate::kernel::math::{exp, max, sum, tanh, LANES};
use crate::kernel::view::{by_dtype, View};
use crate::multiversion;
use std::ops::Range;
use tch::Tensor;

/// The rows of keys and values that each query reads: query i reads `rows[offsets[i]..offsets[i + 1]]`.
#[derive(Clone, Copy, Debug)]
pub struct ReadRows<'a> {
    pub offsets: &'a [usize],
    pub rows: &'a [u32],
}

/// The sizes of the heads, and the options of the scores.
#[derive(Clone, Copy, Debug)]
struct Heads {
    count: usize,
    /// The number of query heads that share a head of keys.
    shared: usize,
    /// The number of columns of a head.
    d: usize,
    /// The factor of the scores.
    scale: f64,
    /// The softcap c: scores s become c·tanh(s/c).
    softcap: Option<f64>,
}

multiversion! {
    /// Writes the attention of a range of queries to their rows of `out`. `q` and `out` have `heads.count` heads of
    /// columns; `reads` says which rows of `k` and `v` a query reads. `sinks` has a logit per head.
    fn forward[isa S][E: Element](
        heads: Heads,
        queries: Range<usize>,
        q: Matrix<E>,
        k: Matrix<E>,
        v: Matrix<E>,
        reads: ReadRows,
        sinks: Option<&[f64]>,
        out: MatrixMut<E>,
    ) {
        let Heads { count, shared, d, scale, softcap } = heads;
        let mut out = out; // the macro takes no `mut` arguments
        let scale = E::Acc::from_f64(scale);
        let longest = queries.clone().map(|i| reads.offsets[i + 1] - reads.offsets[i]).max().unwrap_or(0);
        let sink_count = usize::from(sinks.is_some());
        let mut scores = Aligned::<E::Acc>::new((longest + sink_count).next_multiple_of(LANES));
        for i in queries {
            let rows = &reads.rows[reads.offsets[i]..reads.offsets[i + 1]];
            let lanes = (rows.len() + sink_count).next_multiple_of(LANES);
            for head in 0..count {
                // `column` is the first column of the head of keys that this query head shares.
                let column = head / shared * d;
                let query = q.row(i, head * d, d);
                for (score, row) in scores.iter_mut().zip(rows) {
                    *score = dot::<E, S>(query, k.row(*row as usize, column, d)) * scale;
                }
                if let Some(c) = softcap.map(E::Acc::from_f64) {
                    scores[..rows.len()].iter_mut().for_each(|s| *s = tanh::<E::Acc, S>(*s / c).0 * c);
                }
                // The lanes after the keys add nothing to the softmax; a sink takes the first of them.
                scores[rows.len()..lanes].fill(E::Acc::from_f64(f64::NEG_INFINITY));
                if let Some(sinks) = sinks {
                    scores[rows.len()] = E::Acc::from_f64(sinks[head]);
                }
                let total = softmax::<E::Acc, S>(&mut scores[..lanes]);
                // The total is 0 if the query reads no key; then its output is 0.
                let factor = if total == E::Acc::ZERO { E::Acc::ZERO } else { E::Acc::ONE / total };
                write_weighted_sum::<E, S>(&scores, rows, &v, column, factor, out.row(i, head * d, d));
            }
        }
    }
}

/// Returns the inner product of q and k, summed in packs of WIDTH numbers.
#[inline(always)]
fn dot<E: Element, S: Isa>(q: &[E], k: &[E]) -> E::Acc {
    let (q_chunks, q) = q.as_chunks::<WIDTH>();
    let (k_chunks, k) = k.as_chunks::<WIDTH>();
    // `Of` is the instruction set's type of a pack.
    let mut total = Of::<E::Acc, S>::zero();
    for (q, k) in q_chunks.iter().zip(k_chunks) {
        total = Of::<E::Acc, S>::load(q).mul_add(Of::<E::Acc, S>::load(k), total);
    }
    // A head of fewer than WIDTH columns has no pack to add up.
    let mut total = if q_chunks.is_empty() { E::Acc::ZERO } else { total.sum() };
    for (q, k) in q.iter().zip(k) {
        total += q.load() * k.load();
    }
    total
}

/// Replaces scores by exp(score − max) and returns their sum. The number of scores is a multiple of LANES.
#[inline(always)]
fn softmax<A: Accumulator, S: Isa>(scores: &mut [A]) -> A {
    let lowest = A::from_f64(f64::NEG_INFINITY);
    let scores = scores.as_chunks_mut::<LANES>().0;
    let mut maxima = [lowest; LANES];
    for s in scores.iter() {
        for l in 0..LANES {
            maxima[l] = s[l].max(maxima[l]);
        }
    }
    let largest = max(maxima);
    // If all scores are −∞, any finite shift gives the sum 0.
    let shift = if largest == lowest { A::ZERO } else { largest };
    let mut totals = [A::ZERO; LANES];
    for s in scores {
        for l in 0..LANES {
            s[l] = exp::<A, S>(s[l] - shift);
            totals[l] += s[l];
        }
    }
    sum(totals)
}

/// Computes out ← factor·Σ_j w_j v_j for one head, where w_j are the `weights`. `rows` are the indices of the rows v_j,
/// and the head's columns in `v` begin at `column`.
#[inline(always)]
fn write_weighted_sum<E: Element, S: Isa>(
    weights: &[E::Acc],
    rows: &[u32],
    v: &Matrix<E>,
    column: usize,
    factor: E::Acc,
    out: &mut [E],
) {
    // A block is two packs of WIDTH columns. The columns after the last block, `rest`, are computed one by one.
    let (blocks, rest) = out.as_chunks_mut::<{ 2 * WIDTH }>();
    let done = blocks.len() * 2 * WIDTH;
    for (b, out) in blocks.iter_mut().enumerate() {
        let mut total = [Of::<E::Acc, S>::zero(); 2];
        for (w, row) in weights.iter().zip(rows) {
            let v = v.row(*row as usize, column + b * 2 * WIDTH, 2 * WIDTH);
            let v = Of::<E::Acc, S>::pair(v.first_chunk().expect("a row of this length"));
            let w = Of::<E::Acc, S>::splat(*w);
            total = [w.mul_add(v[0], total[0]), w.mul_add(v[1], total[1])];
        }
        let factor = Of::<E::Acc, S>::splat(factor);
        Pack::store(total.map(|total| total.mul(factor)), out, Store::PLAIN);
    }
    for (c, out) in rest.iter_mut().enumerate() {
        let mut total = E::Acc::ZERO;
        for (w, row) in weights.iter().zip(rows) {
            total += *w * v.row(*row as usize, column + done + c, 1)[0].load();
        }
        *out = E::store(total * factor);
    }
}

/// The least number of queries that are worth a thread of their own.
const GRAIN: usize = 16;

/// Returns, on the CPU, the attention (n, heads·d) of q (n, heads·d) to the rows of k and v (m, kv_heads·d) that
/// `reads` lists. `scale` is the factor of the scores. No gradient is recorded.
pub fn attention([q, k, v]: [&Tensor; 3], reads: ReadRows, heads: i64, scale: f64, extras: &Extras) -> Result<Tensor> {
    let sinks = extras.sinks.map(|sinks| host::<f64>("sinks", &sinks.detach())).transpose()?;
    let sinks = sinks.as_deref();
    let out = Tensor::f_empty(q.size().as_slice(), (q.kind(), q.device()))?;
    let views = [q, k, v, &out].map(View::of);
    let [Some(q), Some(k), Some(v), Some(out_view)] = views else {
        return Err(Error::Torch("attention of single queries takes matrices on the CPU, by rows".to_string()));
    };
    let (count, kv_columns) = (heads as usize, k.cols());
    let d = q.cols() / count.max(1);
    // q has `count` heads of d columns. k and v have whole heads too, and each of these serves equally many heads of q.
    let q_fits = d > 0 && d * count == q.cols();
    let kv_fits = q_fits && kv_columns == v.cols() && kv_columns % d == 0 && kv_columns > 0;
    let fits = kv_fits && count % (kv_columns / d) == 0 && sinks.is_none_or(|sinks| sinks.len() == count);
    let is_one_type = [&k, &v, &out_view].iter().all(|view| view.dtype == q.dtype);
    // A query may read the rows that both k and v have.
    let rows = k.rows().min(v.rows());
    let offsets_fit = reads.offsets.is_sorted() && reads.offsets.len() == q.rows() + 1;
    let rows_exist = reads.offsets.last().is_some_and(|end| *end <= reads.rows.len());
    if !fits || !is_one_type || !offsets_fit || !rows_exist || reads.rows.iter().any(|row| *row as usize >= rows) {
        return Err(Error::Torch(format!(
            "attention of single queries: {count} heads of ({}, {}) queries do not fit ({rows}, {kv_columns}) keys, or read others",
            q.rows(),
            q.cols()
        )));
    }
    let heads = Heads { count, shared: count / (kv_columns / d), d, scale, softcap: extras.softcap };
    by_dtype!(q, E => {
        // SAFETY: the tensors outlive this call and are of type E. `out` is new, and each range of queries writes only
        // its own rows of it.
        unsafe {
            let matrix = |view: &View| Matrix { data: view.slice::<E>(), stride: view.stride as usize };
            let (q, k, v, numbers) = (matrix(&q), matrix(&k), matrix(&v), out_view.slice_mut::<E>());
            let to = MatrixMut::new(numbers.as_mut_ptr(), numbers.len(), out_view.stride as usize);
            let query_count = out_view.rows();
            parallel::for_each(query_count, GRAIN, |queries| forward::<E>(heads, queries, q, k, v, reads, sinks, to));
        }
        Ok(())
    })?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::{force, Level};
    use crate::kernel::attention::call::Settings;
    use crate::kernel::attention::composed;
    use crate::kernel::dropout::Draw;
    use tch::{Device, Kind};

    /// Query i reads the keys from place OFFSETS[i] to OFFSETS[i + 1] in [`rows`]. There are five queries; the second
    /// reads none.
    const OFFSETS: [usize; 6] = [0, 3, 3, 20, 21, 24];
    const KEYS: i64 = 13;

    /// Returns the indices of the keys that all queries read, one query after the other.
    fn rows() -> Vec<u32> {
        (0..OFFSETS[5]).map(|i| (i * 7 % KEYS as usize) as u32).collect()
    }

    /// Returns the attention in tch operations, after gathering the keys and values that each query reads and repeating
    /// heads that are shared.
    fn gathered([q, k, v]: [&Tensor; 3], heads: i64, scale: f64, extras: &Extras) -> Tensor {
        let index = Tensor::from_slice(&rows().iter().map(|row| i64::from(*row)).collect::<Vec<_>>());
        let d = q.size()[1] / heads;
        let gather = |t: &Tensor| {
            let (by_head, shared) = (t.index_select(0, &index).unflatten(1, [-1, d]), heads / (t.size()[1] / d));
            by_head.repeat_interleave_self_int(shared, 1, None).flatten(1, 2)
        };
        // Each query is a sentence of its own.
        let ranges: Vec<i64> = OFFSETS
            .windows(2)
            .enumerate()
            .flat_map(|(i, ends)| [i, 1, ends[0], ends[1] - ends[0]].map(|n| n as i64))
            .collect();
        let ranges = Tensor::from_slice(&ranges).reshape([-1, 4]);
        let settings = Settings { heads, causal: false, scale, draw: Draw::NONE };
        composed(q, &gather(k), &gather(v), &ranges, &settings, extras, |_, _| Ok(None)).unwrap()
    }

    #[test]
    fn single_queries_attend_as_the_composed_form_does() {
        let rows = rows();
        let reads = ReadRows { offsets: &OFFSETS, rows: &rows };
        for level in Level::ALL {
            force(Some(level));
            let kinds = [(Kind::Double, 1e-12), (Kind::Float, 2e-6), (Kind::BFloat16, 2e-2), (Kind::Half, 2e-3)];
            // Each type, with its error bound, is combined with each of the sizes (heads, kv_heads, d).
            for ((kind, bound), (heads, kv_heads, d)) in kinds
                .into_iter()
                .flat_map(|k| [(4, 4, 32), (2, 2, 5), (4, 2, 16), (3, 1, 40), (1, 1, 70)].map(|s| (k, s)))
            {
                tch::manual_seed(heads + d);
                let random =
                    |rows: i64, cols: i64| Tensor::randn([rows, cols], (Kind::Double, Device::Cpu)).to_kind(kind);
                // The tensors are columns of a wider matrix, as q, k and v are.
                let q = random(5, heads * d + 3).narrow(1, 2, heads * d);
                let (k, v) = (random(KEYS, kv_heads * d), random(KEYS, kv_heads * d + 1).narrow(1, 0, kv_heads * d));
                let wide = |t: &Tensor| t.to_kind(Kind::Double);
                let sinks = random(1, heads).view(-1i64);
                for (softcap, sinks) in
                    [(None, None), (None, Some(&sinks)), (Some(0.7), Some(&sinks)), (Some(0.7), None)]
                {
                    let extras = Extras { softcap, sinks };
                    let out = attention([&q, &k, &v], reads, heads, 0.3, &extras).unwrap();
                    let wanted = gathered([&wide(&q), &wide(&k), &wide(&v)], heads, 0.3, &extras);
                    assert_eq!((out.kind(), out.size()), (kind, q.size()));
                    let error = (wide(&out) - wanted).abs().max().double_value(&[]);
                    assert!(error < bound, "{level:?} {kind:?} {heads} {kv_heads} {d} {extras:?}: {error}");
                }
            }
        }
        force(None);
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let zeros = |rows, cols| Tensor::zeros([rows, cols], (Kind::Float, Device::Cpu));
        let rows = rows();
        let reads = ReadRows { offsets: &OFFSETS, rows: &rows };
        let beyond = ReadRows { offsets: &OFFSETS, rows: &[KEYS as u32; 24] };
        let short = ReadRows { offsets: &OFFSETS[..5], rows: &rows };
        // Rows beyond the keys, too few offsets, values narrower than keys, heads that do not divide the columns, keys
        // whose rows are not contiguous, and keys of another type are all refused.
        for (q, k, v, reads, heads) in [
            (zeros(5, 8), zeros(KEYS, 8), zeros(KEYS, 8), beyond, 2),
            (zeros(5, 8), zeros(KEYS, 8), zeros(KEYS, 8), short, 2),
            (zeros(5, 8), zeros(KEYS, 8), zeros(KEYS, 6), reads, 2),
            (zeros(5, 8), zeros(KEYS, 8), zeros(KEYS, 8), reads, 3),
            (zeros(5, 8), zeros(KEYS, 8).transpose(0, 1).contiguous().transpose(0, 1), zeros(KEYS, 8), reads, 2),
            (zeros(5, 8), zeros(KEYS, 8).to_kind(Kind::Double), zeros(KEYS, 8), reads, 2),
        ] {
            assert!(attention([&q, &k, &v], reads, heads, 1.0, &Extras::NONE).is_err());
        }
        let (x, sinks) = (zeros(5, 8), zeros(1, 3).view(-1i64));
        let extras = Extras { sinks: Some(&sinks), ..Extras::NONE };
        assert!(attention([&x, &zeros(KEYS, 8), &zeros(KEYS, 8)], reads, 2, 1.0, &extras).is_err());
    }
}
