//! Weighted sums and inner products of rows of equal width, in the registers of an instruction set.

use crate::cpu::pack::{pack, Isa, Of, Pack, Store, PAIR_LANES};
use crate::cpu::{Accumulator, Element};

/// Computes y = Σ w·row over the pairs (row, w).
#[inline(always)]
pub fn combine<'a, E: Element, S: Isa>(pairs: impl Iterator<Item = (&'a [E], E::Acc)> + Clone, y: &mut [E]) {
    combine_both::<E, S>(pairs, std::iter::empty(), y);
}

/// Computes y = Σ w·row over the pairs (row, w) of two lists. Rows of `pairs` have y's type, and rows of `computed`
/// have the computing type, in which the sums are.
#[inline(always)]
pub fn combine_both<'a, E: Element, S: Isa>(
    pairs: impl Iterator<Item = (&'a [E], E::Acc)> + Clone,
    computed: impl Iterator<Item = (&'a [E::Acc], E::Acc)> + Clone,
    y: &mut [E],
) {
    let store = Store::cached();
    // A block is two packs of columns, whose sums stay in registers.
    let (blocks, rest) = y.as_chunks_mut::<PAIR_LANES>();
    let whole = blocks.len() * PAIR_LANES;
    for (b, to) in blocks.iter_mut().enumerate() {
        let mut sum = [Of::<E::Acc, S>::zero(); 2];
        for (row, w) in pairs.clone() {
            sum = add_block::<E, S>(sum, row, w, b);
        }
        for (row, w) in computed.clone() {
            sum = add_block::<E::Acc, S>(sum, row, w, b);
        }
        Of::<E::Acc, S>::store(sum, to, store);
    }
    // The last columns fill no block, so they are added one by one.
    for (c, to) in rest.iter_mut().enumerate() {
        let mut sum = E::Acc::ZERO;
        for (row, w) in pairs.clone() {
            sum += row[whole + c].load() * w;
        }
        for (row, w) in computed.clone() {
            sum += row[whole + c] * w;
        }
        *to = E::store(sum);
    }
}

/// Returns `sum`, the two packs of a block, plus w times block `b` of a row.
#[inline(always)]
fn add_block<E: Element, S: Isa>(sum: [Of<E::Acc, S>; 2], row: &[E], w: E::Acc, b: usize) -> [Of<E::Acc, S>; 2] {
    let w = Of::<E::Acc, S>::splat(w);
    let [low, high] = Of::<E::Acc, S>::pair(block(row, b));
    [low.mul_add(w, sum[0]), high.mul_add(w, sum[1])]
}

/// Computes y += w·row.
#[inline(always)]
pub fn add_scaled<E: Element, S: Isa>(y: &mut [E::Acc], row: &[E], w: E::Acc) {
    let (blocks, rest) = y.as_chunks_mut::<PAIR_LANES>();
    let whole = blocks.len() * PAIR_LANES;
    for (b, y) in blocks.iter_mut().enumerate() {
        let sum = [0, 1].map(|p| Of::<E::Acc, S>::load(pack(y, p)));
        Of::<E::Acc, S>::store(add_block::<E, S>(sum, row, w, b), y, Store::PLAIN);
    }
    for (y, x) in rest.iter_mut().zip(&row[whole..]) {
        *y += x.load() * w;
    }
}

/// Computes y_j += Σ_i w_ij·row_i for all rows y_j, four at a time. `rows` has any number of rows row_i of one width,
/// `weights` has the w_ij (rows, k), and y is (k, width).
#[inline(always)]
pub fn add_products<E: Element, S: Isa>(rows: &[E], weights: &[E::Acc], k: usize, y: &mut [E::Acc]) {
    let width = y.len() / k;
    // Returns, for each row_i, the slice of its weights that begins with w_ij.
    let weights_of = |j: usize| weights.chunks_exact(k).map(move |weights| &weights[j..]);
    let (fours, rest) = y.split_at_mut(k / 4 * 4 * width);
    // Four rows of y together load each block of `rows` once.
    for (four, y) in fours.chunks_exact_mut(4 * width).enumerate() {
        let pairs = rows.chunks_exact(width).zip(weights_of(4 * four));
        for b in 0..width / PAIR_LANES {
            let mut sums = [[Of::<E::Acc, S>::zero(); 2]; 4];
            for (row, w) in pairs.clone() {
                let [low, high] = Of::<E::Acc, S>::pair(block(row, b));
                for (sum, w) in sums.iter_mut().zip(w) {
                    let w = Of::<E::Acc, S>::splat(*w);
                    *sum = [low.mul_add(w, sum[0]), high.mul_add(w, sum[1])];
                }
            }
            for (y, sum) in y.chunks_exact_mut(width).zip(sums) {
                let y = y[b * PAIR_LANES..].first_chunk_mut().expect("a row has all its blocks");
                let before = [0, 1].map(|p| Of::<E::Acc, S>::load(pack(y, p)));
                Of::<E::Acc, S>::store([sum[0].add(before[0]), sum[1].add(before[1])], y, Store::PLAIN);
            }
        }
        // The last columns fill no block, so they are added one by one.
        for (row, w) in pairs {
            for (y, w) in y.chunks_exact_mut(width).zip(w) {
                for c in width / PAIR_LANES * PAIR_LANES..width {
                    y[c] += row[c].load() * *w;
                }
            }
        }
    }
    // The last rows of y are fewer than four, so they are added one by one.
    for (j, y) in rest.chunks_exact_mut(width).enumerate() {
        for (row, w) in rows.chunks_exact(width).zip(weights_of(k / 4 * 4 + j)) {
            add_scaled::<E, S>(y, row, w[0]);
        }
    }
}

/// Returns the inner product of a and b, which have one length.
#[inline(always)]
pub fn dot<E: Element, F: Element<Acc = E::Acc>, S: Isa>(a: &[E], b: &[F]) -> E::Acc {
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

/// Writes the inner product of `a` with each row of the matrix `rows` to `to`, four rows at a time.
#[inline(always)]
pub fn dots<E: Element, S: Isa>(a: &[E], rows: &[E::Acc], to: &mut [E::Acc]) {
    let d = a.len();
    let (fours, rest) = to.as_chunks_mut::<4>();
    let (rows_of_fours, last_rows) = rows.split_at(fours.len() * 4 * d);
    // Four rows together load each block of `a` once.
    for (rows, to) in rows_of_fours.chunks_exact(4 * d).zip(fours) {
        let mut sums = [[Of::<E::Acc, S>::zero(); 2]; 4];
        for b in 0..d / PAIR_LANES {
            let [low, high] = Of::<E::Acc, S>::pair(block(a, b));
            for (r, sum) in sums.iter_mut().enumerate() {
                let row = Of::<E::Acc, S>::pair(block(&rows[r * d..(r + 1) * d], b));
                *sum = [low.mul_add(row[0], sum[0]), high.mul_add(row[1], sum[1])];
            }
        }
        for (r, to) in to.iter_mut().enumerate() {
            let mut total = sums[r][0].add(sums[r][1]).sum();
            for c in d / PAIR_LANES * PAIR_LANES..d {
                total += a[c].load() * rows[r * d + c];
            }
            *to = total;
        }
    }
    for (row, to) in last_rows.chunks_exact(d).zip(rest) {
        *to = dot::<E, E::Acc, S>(a, row);
    }
}

/// Returns block `b` of a row, which must be whole.
#[inline(always)]
fn block<E>(row: &[E], b: usize) -> &[E; PAIR_LANES] {
    row[b * PAIR_LANES..].first_chunk().expect("a row has all its blocks")
}
