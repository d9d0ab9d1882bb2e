//! Attention over short rows: scores, mask, softmax, dropout and the weighted sum of one sentence and one head at a
//! time, while they are in the first cache.
//!
//! > S = scale·Q Kᵀ,  P = softmax(S) over the visible keys,  O = (M∘P) V
//! > dV = (M∘P)ᵀ dO,  dP = M∘(dO Vᵀ),  dS = P∘(dP − D),  D_i = Σ_j P_ij dP_ij,  dQ = scale·dS K,  dK = scale·dSᵀ Q
//!
//! Q, K, V the rows of one head (d_head columns), M dropout's factors (0 or 1/(1 − p), element (query row·heads + head,
//! key) of [`Dropout`]'s stream, the key counted within its sequence). Causal: key j is visible to query i where
//! j ≤ i + k_len − q_len. The forward leaves log Σ_j exp S_ij, from which the backward computes P anew (Dao et al. 2022,
//! FlashAttention, §3.1). D comes from P and dP, both at hand in a short row, so that the output need not be kept.
//! A query that sees no key gets 0, and gives no gradient.
//!
//! Scores lie transposed, a key to a row and sixteen queries to a register: maximum, exponential and sum then go down
//! the columns without a horizontal step. Every product has the form of [`product`].

use crate::cpu::philox::{self, Dropout};
use crate::cpu::simd::{level, Level};
use crate::cpu::{Accumulator, Element};
use crate::kernel::math::{exp, fused, mul_add, Buffer, LANES};
use crate::multiversion;
use std::any::TypeId;

/// Rows of a product computed together, and what row counts are padded to.
const TILE: usize = 8;
/// Queries taken together; fewer where the keys are many, so that the scores stay within [`SCORES`].
const QUERIES: usize = 64;
/// Scores that fit the first cache beside the rest: 32 KiB of f32.
const SCORES: usize = 8192;

/// What is computed.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    pub heads: usize,
    pub d_head: usize,
    /// On the scores; 1/√d_head by custom.
    pub scale: f64,
    pub causal: bool,
    /// On the weights; None in evaluation.
    pub dropout: Option<Dropout>,
}

/// One sequence: which packed rows are its queries and which its keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequence {
    pub q_start: usize,
    pub q_len: usize,
    pub k_start: usize,
    pub k_len: usize,
}

/// Rows of a tensor, `stride` elements apart: a slice of a fused projection, say.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, E> {
    pub data: &'a [E],
    pub stride: usize,
}

impl<'a, E> Matrix<'a, E> {
    #[inline(always)]
    fn row(&self, row: usize, from: usize, cols: usize) -> &'a [E] {
        &self.data[row * self.stride + from..][..cols]
    }
}

/// [`Matrix`] to write to. A pointer, because dQ, dK and dV interleave in one tensor and threads share it by rows.
#[derive(Clone, Copy, Debug)]
pub struct MatrixMut<E> {
    data: *mut E,
    len: usize,
    stride: usize,
}

// SAFETY: `new` has its caller keep threads to different rows.
unsafe impl<E: Send> Send for MatrixMut<E> {}
unsafe impl<E: Send> Sync for MatrixMut<E> {}

impl<E> MatrixMut<E> {
    /// `len` elements from `data` on, `stride` to a row.
    ///
    /// # Safety
    /// While the matrix or a copy of it is used, the elements are allocated, and those in the used columns (heads·d_head
    /// of them, or heads for log sums) of the rows of the sequences it is used with are accessed through nothing else.
    pub unsafe fn new(data: *mut E, len: usize, stride: usize) -> Self {
        MatrixMut { data, len, stride }
    }

    #[inline(always)]
    fn row(&mut self, row: usize, from: usize, cols: usize) -> &mut [E] {
        let start = row * self.stride + from;
        assert!(start.checked_add(cols).is_some_and(|end| end <= self.len), "row {row} of the output");
        // SAFETY: within `len` by the assertion, and this call's alone by `new`'s contract.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start), cols) }
    }
}

multiversion! {
    /// `out` and the log sums `lse` (a matrix of `heads` columns) in the rows of the sequences' queries.
    pub fn forward[E: Element](
        attention: &Attention,
        sequences: &[Sequence],
        q: Matrix<E>,
        k: Matrix<E>,
        v: Matrix<E>,
        out: MatrixMut<E>,
        lse: MatrixMut<E::Acc>,
    ) {
        if fused() {
            forward_sequences::<E, true>(attention, sequences, q, k, v, out, lse);
        } else {
            forward_sequences::<E, false>(attention, sequences, q, k, v, out, lse);
        }
    }
}

multiversion! {
    /// `dq` in the rows of the sequences' queries, `dk` and `dv` in those of their keys, all overwritten. Sequences must
    /// not share keys.
    pub fn backward[E: Element](
        attention: &Attention,
        sequences: &[Sequence],
        q: Matrix<E>,
        k: Matrix<E>,
        v: Matrix<E>,
        dout: Matrix<E>,
        lse: Matrix<E::Acc>,
        dq: MatrixMut<E>,
        dk: MatrixMut<E>,
        dv: MatrixMut<E>,
    ) {
        if fused() {
            backward_sequences::<E, true>(attention, sequences, q, k, v, dout, lse, dq, dk, dv);
        } else {
            backward_sequences::<E, false>(attention, sequences, q, k, v, dout, lse, dq, dk, dv);
        }
    }
}

#[inline(always)]
fn forward_sequences<E: Element, const FMA: bool>(
    a: &Attention,
    sequences: &[Sequence],
    q: Matrix<E>,
    k: Matrix<E>,
    v: Matrix<E>,
    mut out: MatrixMut<E>,
    mut lse: MatrixMut<E::Acc>,
) {
    let (d, width) = (a.d_head, a.d_head.next_multiple_of(LANES));
    let scale = E::Acc::from_f64(a.scale);
    assert!(d > 0, "heads of no columns");
    let sizes = Sizes::of(a, sequences);
    let mut q_t = Buffer::<E::Acc>::new(width * sizes.queries);
    let mut keys = Buffer::new(sizes.keys * width);
    let mut values = Buffer::new(sizes.keys * width);
    let mut scores = Buffer::new(sizes.scores);
    let mut result = Buffer::new(sizes.queries * width);
    let mut mask = Mask::new(a, &sizes);
    let mut sums = [E::Acc::ZERO; QUERIES];
    let mut maxima = [E::Acc::ZERO; QUERIES];
    for s in sequences {
        for block in blocks(s) {
            let lanes = block.count.next_multiple_of(LANES);
            mask.draw(a, s, block);
            for head in 0..a.heads {
                let from = head * d;
                load(&q, s.q_start + block.first, block.count, from, d, scale, &mut result, width);
                transpose(&result, block.count, d, width, &mut q_t, lanes);
                load(&k, s.k_start, s.k_len, from, d, E::Acc::ONE, &mut keys, width);
                load(&v, s.k_start, s.k_len, from, d, E::Acc::ONE, &mut values, width);
                let tiles = s.k_len.next_multiple_of(TILE);
                product::<_, FMA, false>([tiles, lanes, d], &keys, [width, 1], &q_t, lanes, &mut scores, lanes);
                hide(a, s, block, &mut scores, lanes);
                softmax::<_, FMA>(&mut scores[..s.k_len * lanes], &mut maxima[..lanes], &mut sums[..lanes]);
                mask.prepare(a, head, s.k_len, block.count, lanes);
                mask.apply(a, &mut scores[..s.k_len * lanes]);
                let rows = block.count.next_multiple_of(TILE);
                product::<_, FMA, false>(
                    [rows, width, s.k_len],
                    &scores,
                    [1, lanes],
                    &values,
                    width,
                    &mut result,
                    width,
                );
                for i in 0..block.count {
                    let row = s.q_start + block.first + i;
                    lse.row(row, head, 1)[0] = maxima[i] + sums[i].ln();
                    let factor = if sums[i] == E::Acc::ZERO { E::Acc::ZERO } else { E::Acc::ONE / sums[i] };
                    for (o, r) in out.row(row, from, d).iter_mut().zip(&result[i * width..]) {
                        *o = E::store(*r * factor);
                    }
                }
            }
        }
    }
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn backward_sequences<E: Element, const FMA: bool>(
    a: &Attention,
    sequences: &[Sequence],
    q: Matrix<E>,
    k: Matrix<E>,
    v: Matrix<E>,
    dout: Matrix<E>,
    lse: Matrix<E::Acc>,
    mut dq: MatrixMut<E>,
    mut dk: MatrixMut<E>,
    mut dv: MatrixMut<E>,
) {
    let (d, width) = (a.d_head, a.d_head.next_multiple_of(LANES));
    let (one, scale, lowest) = (E::Acc::ONE, E::Acc::from_f64(a.scale), E::Acc::from_f64(f64::NEG_INFINITY));
    assert!(d > 0, "heads of no columns");
    let sizes = Sizes::of(a, sequences);
    let [mut q_t, mut dout_t] = [(); 2].map(|_| Buffer::<E::Acc>::new(width * sizes.queries));
    let [mut queries, mut douts, mut result] = [(); 3].map(|_| Buffer::new(sizes.queries * width));
    let [mut keys, mut values] = [(); 2].map(|_| Buffer::new(sizes.keys * width));
    let [mut dkeys, mut dvalues] = [(); 2].map(|_| Buffer::new(a.heads * sizes.keys * width));
    let [mut p, mut ds] = [(); 2].map(|_| Buffer::new(sizes.scores));
    let mut mask = Mask::new(a, &sizes);
    for s in sequences {
        let tiles = s.k_len.next_multiple_of(TILE);
        let per_head = tiles * width;
        dkeys[..a.heads * per_head].fill(E::Acc::ZERO);
        dvalues[..a.heads * per_head].fill(E::Acc::ZERO);
        for block in blocks(s) {
            let lanes = block.count.next_multiple_of(LANES);
            let first = s.q_start + block.first;
            mask.draw(a, s, block);
            for head in 0..a.heads {
                let from = head * d;
                load(&q, first, block.count, from, d, scale, &mut queries, width);
                load(&dout, first, block.count, from, d, one, &mut douts, width);
                load(&k, s.k_start, s.k_len, from, d, one, &mut keys, width);
                load(&v, s.k_start, s.k_len, from, d, one, &mut values, width);
                transpose(&queries, block.count, d, width, &mut q_t, lanes);
                transpose(&douts, block.count, d, width, &mut dout_t, lanes);
                product::<_, FMA, false>([tiles, lanes, d], &keys, [width, 1], &q_t, lanes, &mut p, lanes);
                product::<_, FMA, false>([tiles, lanes, d], &values, [width, 1], &dout_t, lanes, &mut ds, lanes);
                hide(a, s, block, &mut p, lanes);
                // A query without keys has only hidden scores: any finite sum makes its weights 0.
                let mut sums = [E::Acc::ZERO; QUERIES];
                for i in 0..block.count {
                    let sum = lse.row(first + i, head, 1)[0];
                    sums[i] = if sum == lowest { E::Acc::ZERO } else { sum };
                }
                weights::<_, FMA>(&mut p[..s.k_len * lanes], &sums[..lanes]);
                mask.prepare(a, head, s.k_len, block.count, lanes);
                mask.apply(a, &mut ds[..s.k_len * lanes]);
                score_gradients(&p[..s.k_len * lanes], &mut ds[..s.k_len * lanes], lanes);
                let dkeys = &mut dkeys[head * per_head..][..per_head];
                product::<_, FMA, true>([tiles, width, block.count], &ds, [lanes, 1], &queries, width, dkeys, width);
                let rows = block.count.next_multiple_of(TILE);
                product::<_, FMA, false>([rows, width, s.k_len], &ds, [1, lanes], &keys, width, &mut result, width);
                for i in 0..block.count {
                    for (o, r) in dq.row(first + i, from, d).iter_mut().zip(&result[i * width..]) {
                        *o = E::store(*r * scale);
                    }
                }
                mask.apply(a, &mut p[..s.k_len * lanes]);
                let dvalues = &mut dvalues[head * per_head..][..per_head];
                product::<_, FMA, true>([tiles, width, block.count], &p, [lanes, 1], &douts, width, dvalues, width);
            }
        }
        for j in 0..s.k_len {
            for head in 0..a.heads {
                let at = head * per_head + j * width;
                store(&dkeys[at..][..d], dk.row(s.k_start + j, head * d, d));
                store(&dvalues[at..][..d], dv.row(s.k_start + j, head * d, d));
            }
        }
    }
}

/// Some consecutive queries of a sequence.
#[derive(Clone, Copy)]
struct Block {
    first: usize,
    count: usize,
}

/// Queries per block for so many keys: a multiple of a register, so that only a last block is padded.
#[inline(always)]
fn block_size(k_len: usize) -> usize {
    (SCORES / k_len.max(1) / LANES * LANES).clamp(LANES, QUERIES)
}

#[inline(always)]
fn blocks(s: &Sequence) -> impl Iterator<Item = Block> + use<> {
    let (size, len) = (block_size(s.k_len), s.q_len);
    (0..len).step_by(size).map(move |first| Block { first, count: size.min(len - first) })
}

/// What the work space must hold for any of the sequences.
struct Sizes {
    queries: usize,
    keys: usize,
    scores: usize,
    random: usize,
}

impl Sizes {
    fn of(a: &Attention, sequences: &[Sequence]) -> Self {
        let mut sizes = Sizes { queries: 0, keys: 0, scores: 0, random: 0 };
        for s in sequences {
            let count = block_size(s.k_len).min(s.q_len);
            let (queries, keys) = (count.next_multiple_of(LANES), s.k_len.next_multiple_of(LANES));
            sizes.queries = sizes.queries.max(queries);
            sizes.keys = sizes.keys.max(keys);
            sizes.scores = sizes.scores.max(queries * keys);
            sizes.random = sizes.random.max(count * a.heads * philox::padded(s.k_len));
        }
        sizes
    }
}

/// Dropout's factors. The random half words are drawn for a block and all heads at once: rows (query, head) are
/// consecutive in the stream, and a register of it serves several.
struct Mask<A> {
    random: Vec<u16>,
    rows: Buffer<A>,
    factors: Buffer<A>,
}

impl<A: Accumulator> Mask<A> {
    fn new(a: &Attention, sizes: &Sizes) -> Self {
        let len = |n| if a.dropout.is_some() { n } else { 0 };
        Mask {
            random: philox::scratch(1, len(sizes.random)),
            rows: Buffer::new(len(sizes.scores)),
            factors: Buffer::new(len(sizes.scores)),
        }
    }

    #[inline(always)]
    fn draw(&mut self, a: &Attention, s: &Sequence, block: Block) {
        if let Some(dropout) = &a.dropout {
            let first = (s.q_start + block.first) * a.heads;
            philox::fill(&dropout.stream, first, block.count * a.heads, s.k_len, &mut self.random);
        }
    }

    /// Prepares one head's factors, a key to a row; without dropout nothing.
    #[inline(always)]
    fn prepare(&mut self, a: &Attention, head: usize, keys: usize, queries: usize, lanes: usize) {
        let Some(dropout) = a.dropout.as_ref().filter(|_| keys > 0) else { return };
        let (per_row, width) = (philox::padded(keys), keys.next_multiple_of(LANES));
        let kept = A::from_f64(dropout.scale);
        for (i, row) in self.rows.chunks_exact_mut(width).take(queries).enumerate() {
            let random = &self.random[(i * a.heads + head) * per_row..][..per_row];
            for (row, random) in row.chunks_exact_mut(philox::BLOCK).zip(random.chunks_exact(philox::BLOCK)) {
                for (x, r) in row.iter_mut().zip(random) {
                    *x = if *r >= dropout.threshold { kept } else { A::ZERO };
                }
            }
        }
        transpose(&self.rows, queries, keys, width, &mut self.factors, lanes);
    }

    /// x ← M∘x.
    #[inline(always)]
    fn apply(&self, a: &Attention, x: &mut [A]) {
        if a.dropout.is_some() {
            for (x, m) in x.iter_mut().zip(self.factors.iter()) {
                *x = *x * *m;
            }
        }
    }
}

/// `f` of sixteen values. All are read before any is written, which spares the compiler the question of overlap.
#[inline(always)]
fn each<T: Copy, A: Accumulator>(x: [T; LANES], f: impl Fn(T) -> A) -> [A; LANES] {
    let mut y = [A::ZERO; LANES];
    for l in 0..LANES {
        y[l] = f(x[l]);
    }
    y
}

/// Rows of one head, widened and scaled, `width` apart; what pads them stays as it was.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn load<E: Element>(
    from: &Matrix<E>,
    first: usize,
    rows: usize,
    column: usize,
    d: usize,
    scale: E::Acc,
    to: &mut [E::Acc],
    width: usize,
) {
    for (i, to) in to.chunks_exact_mut(width).take(rows).enumerate() {
        let (xs, rest) = from.row(first + i, column, d).as_chunks::<LANES>();
        let (whole, part) = to.split_at_mut(xs.len() * LANES);
        for (to, x) in whole.as_chunks_mut().0.iter_mut().zip(xs) {
            *to = each(*x, |x| x.load() * scale);
        }
        for (to, x) in part.iter_mut().zip(rest) {
            *to = x.load() * scale;
        }
    }
}

/// A column of `from` to a row of `to`, rows `width` and `lanes` apart. Goes by blocks of four: up to three rows and
/// columns more are read and written.
#[inline(always)]
fn transpose<A: Accumulator>(from: &[A], rows: usize, columns: usize, width: usize, to: &mut [A], lanes: usize) {
    let (rows, columns) = (rows.next_multiple_of(4), columns.next_multiple_of(4));
    if rows == 0 || columns == 0 {
        return;
    }
    assert!((rows - 1) * width + columns <= from.len() && (columns - 1) * lanes + rows <= to.len());
    #[cfg(target_arch = "x86_64")]
    if TypeId::of::<A>() == TypeId::of::<f32>() {
        use std::arch::x86_64::*;
        for i in (0..rows).step_by(4) {
            for c in (0..columns).step_by(4) {
                // SAFETY: A is f32; the 4×4 elements read and written lie inside by the assertion.
                unsafe {
                    let from = from.as_ptr().cast::<f32>().add(i * width + c);
                    let to = to.as_mut_ptr().cast::<f32>().add(c * lanes + i);
                    let mut x = [0, 1, 2, 3].map(|r| _mm_loadu_ps(from.add(r * width)));
                    let [a, b, c, d] = &mut x;
                    _MM_TRANSPOSE4_PS(a, b, c, d);
                    _mm_storeu_ps(to, *a);
                    _mm_storeu_ps(to.add(lanes), *b);
                    _mm_storeu_ps(to.add(2 * lanes), *c);
                    _mm_storeu_ps(to.add(3 * lanes), *d);
                }
            }
        }
        return;
    }
    for i in 0..rows {
        for c in 0..columns {
            to[c * lanes + i] = from[i * width + c];
        }
    }
}

#[inline(always)]
fn store<E: Element>(from: &[E::Acc], to: &mut [E]) {
    for (to, x) in to.iter_mut().zip(from) {
        *to = E::store(*x);
    }
}

/// −∞ where a key lies after its query.
#[inline(always)]
fn hide<A: Accumulator>(a: &Attention, s: &Sequence, block: Block, scores: &mut [A], lanes: usize) {
    if a.causal {
        for (j, scores) in scores.chunks_exact_mut(lanes).take(s.k_len).enumerate() {
            let hidden = (j + s.q_len).saturating_sub(s.k_len + block.first).min(lanes);
            scores[..hidden].fill(A::from_f64(f64::NEG_INFINITY));
        }
    }
}

/// Scores (a key to a row) become exp(s − max); the maxima (0 for a query without keys) and the sums go beside them.
#[inline(always)]
fn softmax<A: Accumulator, const FMA: bool>(scores: &mut [A], maxima: &mut [A], sums: &mut [A]) {
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
                s[l] = exp::<A, FMA>(s[l] - max[l]);
                sum[l] += s[l];
            }
        }
        maxima[first..][..LANES].copy_from_slice(&max);
        sums[first..][..LANES].copy_from_slice(&sum);
    }
}

/// Scores become exp(s − lse).
#[inline(always)]
fn weights<A: Accumulator, const FMA: bool>(scores: &mut [A], lse: &[A]) {
    for s in scores.chunks_exact_mut(lse.len()) {
        for (s, lse) in s.chunks_exact_mut(LANES).zip(lse.chunks_exact(LANES)) {
            for l in 0..LANES {
                s[l] = exp::<A, FMA>(s[l] - lse[l]);
            }
        }
    }
}

/// dP becomes dS = P∘(dP − D).
#[inline(always)]
fn score_gradients<A: Accumulator>(p: &[A], dp: &mut [A], lanes: usize) {
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

/// C = A·B (or += where ADD) for shape [m, n, k]: m a multiple of [`TILE`], n of [`LANES`]. A's element (i, p) lies at
/// i·strides[0] + p·strides[1]; the rows of B and C are `ldb` and `ldc` apart.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn product<A: Accumulator, const FMA: bool, const ADD: bool>(
    [m, n, k]: [usize; 3],
    a: &[A],
    strides: [usize; 2],
    b: &[A],
    ldb: usize,
    c: &mut [A],
    ldc: usize,
) {
    if m == 0 || n == 0 {
        return;
    }
    let last = (m - 1) * strides[0] + k.saturating_sub(1) * strides[1];
    assert!(m % TILE == 0 && n % LANES == 0 && (k == 0 || last < a.len() && (k - 1) * ldb + n <= b.len()));
    assert!((m - 1) * ldc + n <= c.len());
    #[cfg(target_arch = "x86_64")]
    if TypeId::of::<A>() == TypeId::of::<f32>() && level() == Level::Avx512 {
        let (a, b, c) = (a.as_ptr().cast(), b.as_ptr().cast(), c.as_mut_ptr().cast());
        // SAFETY: A is f32, the processor has AVX-512, and all that is touched lies inside by the assertions.
        return unsafe { product_avx512::<ADD>([m, n, k], a, strides, b, ldb, c, ldc) };
    }
    for i in (0..m).step_by(TILE) {
        for j in (0..n).step_by(LANES) {
            let mut tile = [[A::ZERO; LANES]; TILE];
            for p in 0..k {
                let b: &[A; LANES] = b[p * ldb + j..].first_chunk().unwrap();
                for (r, tile) in tile.iter_mut().enumerate() {
                    let x = a[(i + r) * strides[0] + p * strides[1]];
                    for l in 0..LANES {
                        tile[l] = mul_add::<A, FMA>(x, b[l], tile[l]);
                    }
                }
            }
            for (r, tile) in tile.iter().enumerate() {
                let c: &mut [A; LANES] = c[(i + r) * ldc + j..].first_chunk_mut().unwrap();
                for l in 0..LANES {
                    c[l] = if ADD { c[l] + tile[l] } else { tile[l] };
                }
            }
        }
    }
}

/// [`product`] in f32. The compiler's own loop pays for the bounds checks and makes the forward pass a quarter slower;
/// without them it vectorises along the wrong index, five times slower.
///
/// # Safety
/// The arguments are as `product` has asserted.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn product_avx512<const ADD: bool>(
    [m, n, k]: [usize; 3],
    a: *const f32,
    strides: [usize; 2],
    b: *const f32,
    ldb: usize,
    c: *mut f32,
    ldc: usize,
) {
    use std::arch::x86_64::*;
    for i in (0..m).step_by(TILE) {
        for j in (0..n).step_by(LANES) {
            let mut tile = [_mm512_setzero_ps(); TILE];
            for p in 0..k {
                let row = _mm512_loadu_ps(b.add(p * ldb + j));
                let column = a.add(i * strides[0] + p * strides[1]);
                for (r, tile) in tile.iter_mut().enumerate() {
                    *tile = _mm512_fmadd_ps(_mm512_set1_ps(*column.add(r * strides[0])), row, *tile);
                }
            }
            for (r, tile) in tile.into_iter().enumerate() {
                let at = c.add((i + r) * ldc + j);
                _mm512_storeu_ps(at, if ADD { _mm512_add_ps(_mm512_loadu_ps(at), tile) } else { tile });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::philox::Stream;
    use crate::cpu::simd::force;
    use half::{bf16, f16};

    fn noise(i: usize) -> f64 {
        ((i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as f64 / (1 << 23) as f64 - 1.0
    }

    /// Queries, keys and values as slices of one projection of `stride` columns, as a trainer has them.
    struct Case<E: Element> {
        attention: Attention,
        sequences: Vec<Sequence>,
        rows: usize,
        qkv: Vec<E>,
        dout: Vec<E>,
    }

    struct Outputs<E: Element> {
        out: Vec<E>,
        lse: Vec<E::Acc>,
        dqkv: Vec<E>,
    }

    const UNTOUCHED: f64 = 42.0;

    impl<E: Element> Case<E> {
        /// Sequences of (q_len, k_len), with an unused row between them.
        fn new(heads: usize, d_head: usize, lengths: &[(usize, usize)], causal: bool, p: f64, size: f64) -> Self {
            let mut rows = 1;
            let mut sequences = vec![];
            for &(q_len, k_len) in lengths {
                sequences.push(Sequence { q_start: rows, q_len, k_start: rows, k_len });
                rows += q_len.max(k_len) + 1;
            }
            let stream = Stream { seed: 11, update: 3, micro_batch: 1, site: 9 };
            let scale = 1.0 / (d_head as f64).sqrt();
            let attention = Attention { heads, d_head, scale, causal, dropout: Dropout::new(p, stream) };
            let width = heads * d_head;
            let random = |n, from| (0..n).map(|i| E::store(E::Acc::from_f64(size * noise(i + from)))).collect();
            Case { attention, sequences, rows, qkv: random(rows * 3 * width, 0), dout: random(rows * width, 7_000_000) }
        }

        fn width(&self) -> usize {
            self.attention.heads * self.attention.d_head
        }

        fn run(&self) -> Outputs<E> {
            let (a, s, width) = (&self.attention, &self.sequences[..], self.width());
            let [q, k, v] = [0, 1, 2].map(|i| Matrix { data: &self.qkv[i * width..], stride: 3 * width });
            let mark = E::Acc::from_f64(UNTOUCHED);
            let mut out = vec![E::store(mark); self.rows * width];
            let mut lse = vec![mark; self.rows * a.heads];
            let mut dqkv = vec![E::store(mark); self.rows * 3 * width];
            let lengths = (out.len(), lse.len(), dqkv.len());
            // SAFETY: the three vectors live to the end of this function and nothing else uses them meanwhile.
            unsafe {
                let o = MatrixMut::new(out.as_mut_ptr(), lengths.0, width);
                forward(a, s, q, k, v, o, MatrixMut::new(lse.as_mut_ptr(), lengths.1, a.heads));
                let [dq, dk, dv] = [0, 1, 2]
                    .map(|i| MatrixMut::new(dqkv.as_mut_ptr().add(i * width), lengths.2 - i * width, 3 * width));
                let (dout, lse) = (Matrix { data: &self.dout, stride: width }, Matrix { data: &lse, stride: a.heads });
                backward(a, s, q, k, v, dout, lse, dq, dk, dv);
            }
            Outputs { out, lse, dqkv }
        }

        /// All of it from the definition, in f64, one weight at a time.
        fn naive(&self) -> Outputs<f64> {
            let a = &self.attention;
            let (d, width) = (a.d_head, self.width());
            let x = |row: usize, part: usize, c: usize| self.qkv[(row * 3 + part) * width + c].load().to_f64();
            let mut out = vec![UNTOUCHED; self.rows * width];
            let mut lse = vec![UNTOUCHED; self.rows * a.heads];
            let mut dqkv = vec![UNTOUCHED; self.rows * 3 * width];
            for s in &self.sequences {
                let clear = |from: &mut Vec<f64>, row: usize, part: usize, parts: usize| {
                    from[(row * parts + part) * width..][..width].fill(0.0)
                };
                (s.q_start..s.q_start + s.q_len).for_each(|row| clear(&mut out, row, 0, 1));
                (s.q_start..s.q_start + s.q_len).for_each(|row| clear(&mut dqkv, row, 0, 3));
                for row in s.k_start..s.k_start + s.k_len {
                    clear(&mut dqkv, row, 1, 3);
                    clear(&mut dqkv, row, 2, 3);
                }
                for (i, h) in (0..s.q_len).flat_map(|i| (0..a.heads).map(move |h| (i, h))) {
                    let (row, from) = (s.q_start + i, h * d);
                    let visible = |j: &usize| !a.causal || *j as i64 <= i as i64 + s.k_len as i64 - s.q_len as i64;
                    let keys: Vec<usize> = (0..s.k_len).filter(visible).collect();
                    let dot = |j: usize| (from..from + d).map(|c| x(row, 0, c) * x(s.k_start + j, 1, c)).sum::<f64>();
                    let scores: Vec<f64> = keys.iter().map(|j| a.scale * dot(*j)).collect();
                    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                    lse[row * a.heads + h] = if keys.is_empty() { f64::NEG_INFINITY } else { max + sum.ln() };
                    let mut random = philox::scratch(1, s.k_len);
                    if let Some(dropout) = &a.dropout {
                        philox::fill(&dropout.stream, row * a.heads + h, 1, s.k_len, &mut random);
                    }
                    let factor = |j: usize| match &a.dropout {
                        Some(dropout) => (random[j] >= dropout.threshold) as u8 as f64 * dropout.scale,
                        None => 1.0,
                    };
                    let p: Vec<f64> = scores.iter().map(|s| (s - max).exp() / sum).collect();
                    let dout = |c: usize| self.dout[row * width + c].load().to_f64();
                    let dp: Vec<f64> = keys
                        .iter()
                        .map(|j| factor(*j) * (from..from + d).map(|c| dout(c) * x(s.k_start + j, 2, c)).sum::<f64>())
                        .collect();
                    let mean: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
                    for (n, &j) in keys.iter().enumerate() {
                        let (key, ds) = (s.k_start + j, p[n] * (dp[n] - mean));
                        for c in from..from + d {
                            out[row * width + c] += factor(j) * p[n] * x(key, 2, c);
                            dqkv[row * 3 * width + c] += a.scale * ds * x(key, 1, c);
                            dqkv[(key * 3 + 1) * width + c] += a.scale * ds * x(row, 0, c);
                            dqkv[(key * 3 + 2) * width + c] += factor(j) * p[n] * dout(c);
                        }
                    }
                }
            }
            Outputs { out, lse, dqkv }
        }

        /// Kernel against definition; `unit` is the storage type's rounding.
        fn compare(&self, unit: f64, what: &str) {
            let acc = if size_of::<E::Acc>() == 8 { f64::EPSILON } else { f32::EPSILON as f64 };
            let (got, want) = (self.run(), self.naive());
            let largest = |x: &[f64]| x.iter().fold(1.0f64, |m, x| if *x == UNTOUCHED { m } else { m.max(x.abs()) });
            // Scores carry √d_head roundings of their size, which the exponential hands on; sums over keys and queries add
            // the root of their number. Everything is relative to the largest value of its kind.
            let longest = self.sequences.iter().map(|s| s.q_len.max(s.k_len)).max().unwrap_or(0);
            let score = self.qkv.iter().map(|x| x.load().to_f64().abs()).fold(0.0, f64::max).powi(2)
                * (self.attention.d_head as f64).sqrt();
            let steps = 4.0 * acc * (score + 8.0) * ((longest + self.attention.d_head) as f64).sqrt();
            let check = |got: &[E], want: &[f64], name: &str| {
                let size = largest(want);
                for (i, (got, want)) in got.iter().zip(want).enumerate() {
                    let got = got.load().to_f64();
                    let tolerance = unit * want.abs() + steps * size + if size_of::<E>() == 2 { 1e-7 } else { 0.0 };
                    assert!((got - want).abs() <= tolerance, "{what}: {name}[{i}] {got} for {want}, {tolerance:e}");
                }
            };
            check(&got.out, &want.out, "out");
            check(&got.dqkv, &want.dqkv, "dqkv");
            for (got, want) in got.lse.iter().zip(&want.lse) {
                assert!(got.to_f64() == *want || (got.to_f64() - want).abs() <= steps, "{what}: log sum");
            }
        }
    }

    const LENGTHS: [(usize, usize); 9] =
        [(1, 1), (7, 7), (14, 9), (0, 3), (3, 0), (17, 33), (5, 31), (16, 16), (70, 40)];

    fn agree<E: Element>(unit: f64) {
        for level in Level::ALL {
            force(Some(level));
            for (heads, d_head) in [(1, 1), (2, 2), (2, 7), (4, 32), (3, 16), (1, 31), (1, 123)] {
                for (causal, p) in [(false, 0.0), (true, 0.0), (false, 0.3), (true, 0.3)] {
                    let what = format!("{level:?} heads {heads} d_head {d_head} causal {causal} p {p}");
                    Case::<E>::new(heads, d_head, &LENGTHS, causal, p, 1.0).compare(unit, &what);
                }
            }
        }
        force(None);
    }

    #[test]
    fn agrees_with_the_definition_in_f32() {
        agree::<f32>(f32::EPSILON as f64);
    }

    #[test]
    fn agrees_with_the_definition_in_f64() {
        agree::<f64>(f64::EPSILON);
    }

    #[test]
    fn agrees_with_the_definition_in_bf16() {
        agree::<bf16>(2f64.powi(-8));
    }

    #[test]
    fn agrees_with_the_definition_in_f16() {
        agree::<f16>(2f64.powi(-11));
    }

    #[test]
    fn long_rows_go_through_in_blocks() {
        Case::<f32>::new(2, 8, &[(130, 700)], true, 0.1, 1.0).compare(f32::EPSILON as f64, "long");
    }

    #[test]
    fn scores_of_any_size() {
        for size in [0.0, 1e-30, 30.0] {
            Case::<f64>::new(2, 16, &[(9, 9), (20, 20)], false, 0.0, size).compare(f64::EPSILON, "size");
        }
        let big = Case::<f32>::new(2, 16, &[(9, 9)], false, 0.0, 1e9).run();
        assert!(big.out.iter().chain(&big.dqkv).all(|x| x.is_finite()));
    }

    #[test]
    fn gradients_are_those_of_the_forward() {
        // Central difference along the gradient itself, error h²: f(x ± h·g) gives |g|².
        let mut c = Case::<f64>::new(2, 5, &[(6, 6), (4, 11), (8, 5)], true, 0.25, 1.0);
        let loss = |c: &Case<f64>| -> f64 {
            let rows = c.sequences.iter().flat_map(|s| s.q_start..s.q_start + s.q_len);
            let out = c.run().out;
            rows.map(|r| (0..c.width()).map(|i| out[r * c.width() + i] * c.dout[r * c.width() + i]).sum::<f64>()).sum()
        };
        let gradient: Vec<f64> = c.run().dqkv.iter().map(|g| if *g == UNTOUCHED { 0.0 } else { *g }).collect();
        let (x, h) = (c.qkv.clone(), 1e-5);
        let mut at = |t: f64| {
            c.qkv = x.iter().zip(&gradient).map(|(x, g)| x + t * g).collect();
            loss(&c)
        };
        let slope = (at(h) - at(-h)) / (2.0 * h);
        let want: f64 = gradient.iter().map(|g| g * g).sum();
        assert!((slope / want - 1.0).abs() < 1e-6, "{slope} for {want}");
    }

    #[test]
    fn any_split_of_the_sequences_gives_the_same() {
        let mut c = Case::<f32>::new(3, 24, &LENGTHS, true, 0.2, 1.0);
        let whole = c.run();
        let sequences = std::mem::take(&mut c.sequences);
        for s in sequences {
            c.sequences = vec![s];
            let (one, width) = (c.run(), c.width());
            for row in s.q_start..s.q_start + s.q_len {
                assert_eq!(one.out[row * width..][..width], whole.out[row * width..][..width]);
                assert_eq!(one.dqkv[row * 3 * width..][..width], whole.dqkv[row * 3 * width..][..width]);
            }
        }
    }

    #[test]
    #[should_panic(expected = "of the output")]
    fn rows_beyond_the_output_are_refused() {
        let x = [0.0f32; 8];
        let (mut out, mut lse) = ([0.0f32; 3], [0.0f32; 4]);
        let m = Matrix { data: &x, stride: 2 };
        let a = Attention { heads: 1, d_head: 2, scale: 1.0, causal: false, dropout: None };
        // SAFETY: as long as said, and used by nothing else.
        let (o, l) = unsafe { (MatrixMut::new(out.as_mut_ptr(), 3, 2), MatrixMut::new(lse.as_mut_ptr(), 4, 1)) };
        forward(&a, &[Sequence { q_start: 0, q_len: 2, k_start: 0, k_len: 2 }], m, m, m, o, l);
    }
}
