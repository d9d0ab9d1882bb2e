//! Conversion of whole rows between a storage type and the type in which kernels compute.
//!
//! Kernels that loop over lanes of whole rows use these functions. A 16-bit row is widened once, into a buffer in the
//! first-level cache, and narrowed once at the end, with packs (`cpu/pack.rs`). Converting in every pass with
//! [`Element`]'s integer code would take more time. Kernels that compute on packs convert in registers instead.
//! All these conversions give the same bits.

use crate::cpu::memory::Aligned;
use crate::cpu::pack::{Of, Pack, Store, PAIR_LANES};
use crate::cpu::Element;
use crate::multiversion;
use std::any::TypeId;

/// Returns a zeroed buffer for a widened row of `len` numbers; it is empty if E needs no widening.
pub fn scratch<E: Element>(len: usize) -> Aligned<E::Acc> {
    Aligned::new(if same::<E, E::Acc>() { 0 } else { len })
}

/// Widens a row into `scratch`, which may be longer; does nothing if E needs no widening.
#[inline(always)]
pub fn widen<E: Element>(row: &[E], scratch: &mut [E::Acc]) {
    if same::<E, E::Acc>() {
        return;
    }
    widen_row(row, &mut scratch[..row.len()]);
}

/// Returns the widened row: `scratch` after [`widen`], or the row itself.
#[inline(always)]
pub fn wide<'a, E: Element>(row: &'a [E], scratch: &'a [E::Acc]) -> &'a [E::Acc] {
    cast(row).unwrap_or_else(|| &scratch[..row.len()])
}

/// Returns the slice in which to compute a row of E: the row itself, or `scratch`. The caller must then call
/// [`narrow`].
#[inline(always)]
pub fn target<'a, E: Element>(row: &'a mut [E], scratch: &'a mut [E::Acc]) -> &'a mut [E::Acc] {
    let cols = row.len();
    match cast_mut(row) {
        Some(row) => row,
        None => &mut scratch[..cols],
    }
}

/// Rounds `scratch` to E; does nothing if [`target`] was the row itself.
#[inline(always)]
pub fn narrow<E: Element>(scratch: &[E::Acc], row: &mut [E]) {
    if same::<E, E::Acc>() {
        return;
    }
    narrow_row(&scratch[..row.len()], row);
}

/// True if S and T are one type. The compiler decides this, so that only one branch remains.
#[inline(always)]
fn same<S: 'static, T: 'static>() -> bool {
    TypeId::of::<S>() == TypeId::of::<T>()
}

/// Returns the slice as a slice of T, if S and T are the same type.
#[inline(always)]
fn cast<S: 'static, T: 'static>(slice: &[S]) -> Option<&[T]> {
    // SAFETY: S and T are one type.
    same::<S, T>().then(|| unsafe { std::slice::from_raw_parts(slice.as_ptr().cast(), slice.len()) })
}

/// Returns the writable slice as a slice of T, if S and T are the same type.
#[inline(always)]
fn cast_mut<S: 'static, T: 'static>(slice: &mut [S]) -> Option<&mut [T]> {
    // SAFETY: S and T are one type.
    same::<S, T>().then(|| unsafe { std::slice::from_raw_parts_mut(slice.as_mut_ptr().cast(), slice.len()) })
}

multiversion! {
    /// Widens each number of `row` into `wide`, which has the same length.
    fn widen_row[isa S][E: Element](row: &[E], wide: &mut [E::Acc]) {
        // A block is two packs, which are registers of the instruction set S. The rest is shorter than a block.
        let (blocks, rest) = row.as_chunks::<PAIR_LANES>();
        let (wide_blocks, wide_rest) = wide.as_chunks_mut::<PAIR_LANES>();
        for (block, wide) in blocks.iter().zip(wide_blocks) {
            Of::<E::Acc, S>::store(Of::<E::Acc, S>::pair(block), wide, Store::PLAIN);
        }
        for (wide, v) in wide_rest.iter_mut().zip(rest) {
            *wide = v.load();
        }
    }
}

multiversion! {
    /// Rounds each number of `wide` into `row`, which has the same length.
    fn narrow_row[isa S][E: Element](wide: &[E::Acc], row: &mut [E]) {
        let store = Store::cached();
        // A block is two packs, which are registers of the instruction set S. The rest is shorter than a block.
        let (blocks, rest) = row.as_chunks_mut::<PAIR_LANES>();
        let (wide_blocks, wide_rest) = wide.as_chunks::<PAIR_LANES>();
        for (block, wide) in blocks.iter_mut().zip(wide_blocks) {
            Of::<E::Acc, S>::store(Of::<E::Acc, S>::pair(wide), block, store);
        }
        for (v, wide) in rest.iter_mut().zip(wide_rest) {
            *v = E::store(*wide);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::{force, Level};
    use half::{bf16, f16};

    /// Checks on every level that rows convert as [`Element`] converts single numbers. `bits` returns the bits of a
    /// number, and `from` the number with these bits.
    fn check<E: Element<Acc = f32>>(bits: fn(E) -> u16, from: fn(u16) -> E) {
        // The values have every possible high half word, with low half words around the ties of both formats. The
        // rows have odd lengths.
        let low = [0u32, 1, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xffff];
        let wide: Vec<f32> =
            (0..=u16::MAX).flat_map(|high| low.map(|low| f32::from_bits((high as u32) << 16 | low))).collect();
        let rows: Vec<E> = (0..=u16::MAX).map(from).collect();
        for level in Level::ALL {
            force(Some(level));
            for (wide, rows) in wide.chunks(1000).zip(rows.chunks(111).cycle()) {
                let (mut out, mut back) = (vec![from(0); wide.len()], vec![0.0; rows.len()]);
                narrow(wide, &mut out);
                for (got, v) in out.iter().zip(wide) {
                    let (got, want) = (bits(*got), bits(E::store(*v)));
                    assert!(got == want || v.is_nan() && E::load(from(got)).is_nan(), "{v:e} {got:#x} {want:#x}");
                }
                widen(rows, &mut back);
                for (got, v) in super::wide(rows, &back).iter().zip(rows) {
                    assert!(got.to_bits() == v.load().to_bits() || got.is_nan() && v.load().is_nan());
                }
            }
        }
        force(None);
    }

    #[test]
    fn every_level_converts_as_element_does() {
        check::<bf16>(bf16::to_bits, bf16::from_bits);
        check::<f16>(f16::to_bits, f16::from_bits);
    }
}
