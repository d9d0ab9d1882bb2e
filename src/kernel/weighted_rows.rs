//! Weighted sums and inner products of rows of equal width, in the registers of an instruction set.

use crate::cpu::pack::{pack, Isa, Of, Pack, Store, PAIR_LANES};
use crate::cpu::{Accumulator, Element};

/// Computes y = Σ w·row over the pairs (row, w).
#[inline(always)]
pub fn combine<'a, E: Element, S: Isa>(pairs: impl Iterator<Item = (&'a [E], E::Acc)> + Clone, y: &mut [E]) {
    combine_both::<E, S>(pairs, std::iter::empty(), y);
}

/// Computes y = Σ w·row over two lists of pairs (row, w). Rows of the second list are in the computing type.
#[inline(always)]
pub fn combine_both<'a, E: Element, S: Isa>(
    pairs: impl Iterator<Item = (&'a [E], E::Acc)> + Clone,
    computed: impl Iterator<Item = (&'a [E::Acc], E::Acc)> + Clone,
    y: &mut [E],
) {
    let store = Store::cached();
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

/// Adds w times block `b` of a row to `sum`.
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

/// Computes ⟨a, b⟩.
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

/// Returns block `b` of a row.
#[inline(always)]
fn block<E>(row: &[E], b: usize) -> &[E; PAIR_LANES] {
    row[b * PAIR_LANES..].first_chunk().expect("a row has all its blocks")
}
