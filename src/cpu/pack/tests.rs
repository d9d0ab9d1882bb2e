//! Tests of every instruction set against scalar arithmetic.

use super::*;
use crate::cpu::simd::{force, Level};
use crate::multiversion;
use half::{bf16, f16};

multiversion! {
    /// Rounds `wide` to `narrow`, and widens `rows` to `back`. The lengths are multiples of [`PAIR_LANES`].
    fn convert[isa S][E: Element](wide: &[E::Acc], narrow: &mut [E], rows: &[E], back: &mut [E::Acc]) {
        let store = Store::of::<E>(&[], PAIR_LANES);
        for (wide, narrow) in wide.as_chunks::<PAIR_LANES>().0.iter().zip(narrow.as_chunks_mut::<PAIR_LANES>().0) {
            Of::<E::Acc, S>::store(Of::<E::Acc, S>::pair(wide), narrow, store);
        }
        for (rows, back) in rows.as_chunks::<PAIR_LANES>().0.iter().zip(back.as_chunks_mut::<PAIR_LANES>().0) {
            Of::<E::Acc, S>::store(Of::<E::Acc, S>::pair(rows), back, Store::PLAIN);
        }
    }
}

/// Checks on every level that blocks convert as [`Element`] converts single numbers. `bits` and `from` convert E to its
/// bits and back.
fn check_conversion<E: Element<Acc = f32>>(bits: fn(E) -> u16, from: fn(u16) -> E) {
    // The values have every possible high half word, with low half words around the ties of both formats.
    let low = [0u32, 1, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0xffff];
    let wide: Vec<f32> =
        (0..=u16::MAX).flat_map(|high| low.map(|low| f32::from_bits((high as u32) << 16 | low))).collect();
    let rows: Vec<E> = (0..=u16::MAX).map(from).collect();
    for level in Level::ALL {
        force(Some(level));
        let (mut narrow, mut back) = (vec![from(0); wide.len()], vec![0.0; rows.len()]);
        convert::<E>(&wide, &mut narrow, &rows, &mut back);
        for (got, v) in narrow.iter().zip(&wide) {
            let (got, want) = (bits(*got), bits(E::store(*v)));
            assert!(got == want || v.is_nan() && E::load(from(got)).is_nan(), "{level:?} {v:e} {got:#x} {want:#x}");
        }
        for (got, v) in back.iter().zip(&rows) {
            assert!(got.to_bits() == v.load().to_bits() || got.is_nan() && v.load().is_nan(), "{level:?} {got:e}");
        }
    }
    force(None);
}

#[test]
fn every_level_converts_as_element_does() {
    check_conversion::<bf16>(bf16::to_bits, bf16::from_bits);
    check_conversion::<f16>(f16::to_bits, f16::from_bits);
}

multiversion! {
    /// Writes a + b, a − b, a·b, a·b + a, and a with the dropout of `bits` to `out`, and the sum of the first sixteen
    /// numbers of a to `sum`.
    fn arithmetic[isa S][A: Accumulator](
        a: &[A; PAIR_LANES], b: &[A; PAIR_LANES], bits: &[u16; PAIR_LANES], out: &mut [[A; PAIR_LANES]; 5], sum: &mut A,
    ) {
        let bits = bits.as_chunks::<WIDTH>().0;
        let ([a, a2], [b, b2]) = (Of::<A, S>::pair(a), Of::<A, S>::pair(b));
        Of::<A, S>::store([a.add(b), a2.add(b2)], &mut out[0], Store::PLAIN);
        Of::<A, S>::store([a.sub(b), a2.sub(b2)], &mut out[1], Store::PLAIN);
        Of::<A, S>::store([a.mul(b), a2.mul(b2)], &mut out[2], Store::PLAIN);
        Of::<A, S>::store([a.mul_add(b, a), a2.mul_add(b2, a2)], &mut out[3], Store::PLAIN);
        Of::<A, S>::store([a.keep(&bits[0], 0x8000), a2.keep(&bits[1], 0x8000)], &mut out[4], Store::PLAIN);
        *sum = a.sum();
    }
}

multiversion! {
    /// Stores a block in the way `how`.
    fn put[isa S][E: Element](from: &[E::Acc; PAIR_LANES], to: &mut [E; PAIR_LANES], how: Store) {
        Of::<E::Acc, S>::store(Of::<E::Acc, S>::pair(from), to, how);
        how.finish();
    }
}

/// Checks streamed stores of a block that begins at any element, whether or not this starts a cache line.
fn check_streaming<E: Element<Acc = f32> + PartialEq + std::fmt::Debug>() {
    let from: [f32; PAIR_LANES] = from_fn(|l| l as f32);
    for level in Level::ALL {
        force(Some(level));
        for start in 0..PAIR_LANES {
            let mut room = [E::default(); 2 * PAIR_LANES];
            let to = room[start..].first_chunk_mut().expect("the room is two blocks");
            put(&from, to, Store { streamed: true, bf16: false });
            assert_eq!(*to, from.map(E::store), "{level:?} {start}");
        }
    }
    force(None);
}

#[test]
fn streamed_blocks_start_anywhere() {
    check_streaming::<f32>();
    check_streaming::<bf16>();
    check_streaming::<f16>();
}

/// Checks [`arithmetic`] on every level; `unit` is half the spacing of numbers around one in A.
fn check_arithmetic<A: Accumulator + std::fmt::Debug>(unit: f64) {
    let a: [A; PAIR_LANES] = from_fn(|l| A::from_f64(1.0 + l as f64 / 3.0));
    let b: [A; PAIR_LANES] = from_fn(|l| A::from_f64(2.0 - l as f64 / 7.0));
    let bits: [u16; PAIR_LANES] = from_fn(|l| [0, 0x7fff, 0x8000, 0xffff][l % 4]);
    let mut sums = Vec::new();
    for level in Level::ALL {
        force(Some(level));
        let (mut out, mut sum) = ([[A::ZERO; PAIR_LANES]; 5], A::ZERO);
        arithmetic(&a, &b, &bits, &mut out, &mut sum);
        for l in 0..PAIR_LANES {
            assert!(out[0][l] == a[l] + b[l] && out[1][l] == a[l] - b[l] && out[2][l] == a[l] * b[l], "{level:?} {l}");
            let exact = a[l].to_f64() * b[l].to_f64() + a[l].to_f64();
            let error = unit * ((a[l] * b[l]).abs().to_f64() + exact.abs());
            assert!((out[3][l].to_f64() - exact).abs() <= error, "{level:?} {l}");
            assert!(out[4][l] == if l % 4 < 2 { A::ZERO } else { a[l] }, "{level:?} {l}");
        }
        sums.push(sum);
    }
    force(None);
    assert!(sums.iter().all(|sum| *sum == sums[0]), "{sums:?}");
}

#[test]
fn every_level_computes_the_same() {
    check_arithmetic::<f32>(2f64.powi(-24));
    check_arithmetic::<f64>(2f64.powi(-53));
}
