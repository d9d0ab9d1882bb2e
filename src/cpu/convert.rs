//! Whole rows from a storage type to the type it computes in, and back.
//!
//! For kernels that are loops over lanes of whole rows: a 16-bit row is widened once into a buffer in the first-level cache
//! and narrowed once on the way out. Converting it in every pass, by the integer code of [`Element`], takes more time:
//! narrowing 512 numbers to bf16 costs 47 ns that way and 15 by the processor's own instruction. Kernels on packs
//! (`cpu/pack.rs`) convert in registers instead.
//! All paths give the same bits.

use crate::cpu::memory::Aligned;
use crate::cpu::Element;
use std::any::TypeId;

/// Zeros to widen a row into: none where that would only be a copy, because E is the type it computes in.
pub fn scratch<E: Element>(len: usize) -> Aligned<E::Acc> {
    Aligned::new(if same::<E, E::Acc>() { 0 } else { len })
}

/// Widens a row into `scratch`, unless E is already the type it computes in.
#[inline(always)]
pub fn widen<E: Element>(row: &[E], scratch: &mut [E::Acc]) {
    if same::<E, E::Acc>() {
        return;
    }
    let scratch = &mut scratch[..row.len()];
    #[cfg(target_arch = "x86_64")]
    if let (Some(row), true) = (cast::<E, half::f16>(row), x86::has_avx512()) {
        // SAFETY: the processor has what the function asks for.
        return unsafe { x86::widen_f16(row, cast_mut(scratch).expect("f16 computes in f32")) };
    }
    for (wide, v) in scratch.iter_mut().zip(row) {
        *wide = v.load();
    }
}

/// The row that [`widen`] widened: `scratch`, or the row itself.
#[inline(always)]
pub fn wide<'a, E: Element>(row: &'a [E], scratch: &'a [E::Acc]) -> &'a [E::Acc] {
    cast(row).unwrap_or_else(|| &scratch[..row.len()])
}

/// Where to compute a row that is stored as E: in place, or in `scratch`. [`narrow`] comes after.
#[inline(always)]
pub fn target<'a, E: Element>(row: &'a mut [E], scratch: &'a mut [E::Acc]) -> &'a mut [E::Acc] {
    let cols = row.len();
    match cast_mut(row) {
        Some(row) => row,
        None => &mut scratch[..cols],
    }
}

/// Rounds `scratch` to E, unless [`target`] was the row itself.
#[inline(always)]
pub fn narrow<E: Element>(scratch: &[E::Acc], row: &mut [E]) {
    if same::<E, E::Acc>() {
        return;
    }
    let wide = &scratch[..row.len()];
    #[cfg(target_arch = "x86_64")]
    if let Some(wide) = cast::<E::Acc, f32>(wide) {
        if same::<E, half::bf16>() && x86::has_avx512_bf16() {
            // SAFETY: the processor has what the function asks for.
            return unsafe { x86::narrow_bf16(wide, cast_mut(row).expect("E is bf16")) };
        }
        if same::<E, half::f16>() && x86::has_avx512() {
            // SAFETY: as above.
            return unsafe { x86::narrow_f16(wide, cast_mut(row).expect("E is f16")) };
        }
    }
    for (v, wide) in row.iter_mut().zip(wide) {
        *v = E::store(*wide);
    }
}

#[inline(always)]
fn same<S: 'static, T: 'static>() -> bool {
    TypeId::of::<S>() == TypeId::of::<T>()
}

/// The same slice, where S is T.
#[inline(always)]
fn cast<S: 'static, T: 'static>(slice: &[S]) -> Option<&[T]> {
    // SAFETY: S and T are one type.
    same::<S, T>().then(|| unsafe { std::slice::from_raw_parts(slice.as_ptr().cast(), slice.len()) })
}

#[inline(always)]
fn cast_mut<S: 'static, T: 'static>(slice: &mut [S]) -> Option<&mut [T]> {
    // SAFETY: S and T are one type.
    same::<S, T>().then(|| unsafe { std::slice::from_raw_parts_mut(slice.as_mut_ptr().cast(), slice.len()) })
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use crate::cpu::simd::{level, Level};
    use crate::cpu::Element;
    use half::{bf16, f16};
    use std::arch::x86_64::*;

    #[inline(always)]
    pub fn has_avx512() -> bool {
        level() == Level::Avx512
    }

    #[inline(always)]
    pub fn has_avx512_bf16() -> bool {
        has_avx512() && is_x86_feature_detected!("avx512bf16")
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub unsafe fn widen_f16(row: &[f16], wide: &mut [f32]) {
        let (blocks, rest) = row.as_chunks::<16>();
        let (wide_blocks, wide_rest) = wide.as_chunks_mut::<16>();
        for (block, wide) in blocks.iter().zip(wide_blocks) {
            // SAFETY: both are sixteen numbers, and neither instruction asks for alignment.
            unsafe { _mm512_storeu_ps(wide.as_mut_ptr(), _mm512_cvtph_ps(_mm256_loadu_si256(block.as_ptr().cast()))) };
        }
        for (wide, v) in wide_rest.iter_mut().zip(rest) {
            *wide = v.load();
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub unsafe fn narrow_f16(wide: &[f32], row: &mut [f16]) {
        let (blocks, rest) = row.as_chunks_mut::<16>();
        let (wide_blocks, wide_rest) = wide.as_chunks::<16>();
        for (block, wide) in blocks.iter_mut().zip(wide_blocks) {
            // SAFETY: as in `widen_f16`.
            unsafe {
                let half = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm512_loadu_ps(wide.as_ptr()));
                _mm256_storeu_si256(block.as_mut_ptr().cast(), half);
            }
        }
        for (v, wide) in rest.iter_mut().zip(wide_rest) {
            *v = f16::store(*wide);
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    pub unsafe fn narrow_bf16(wide: &[f32], row: &mut [bf16]) {
        const SUBNORMAL: i32 = 0x20;
        let (blocks, rest) = row.as_chunks_mut::<32>();
        let (wide_blocks, wide_rest) = wide.as_chunks::<32>();
        for (block, wide) in blocks.iter_mut().zip(wide_blocks) {
            // SAFETY: thirty-two numbers on both sides, and no instruction asks for alignment.
            unsafe {
                let low = _mm512_loadu_ps(wide.as_ptr());
                let high = _mm512_loadu_ps(wide.as_ptr().add(16));
                let subnormal = _mm512_fpclass_ps_mask::<SUBNORMAL>(low) | _mm512_fpclass_ps_mask::<SUBNORMAL>(high);
                if subnormal == 0 {
                    let both: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
                    _mm512_storeu_si512(block.as_mut_ptr().cast(), both);
                    continue;
                }
            }
            // The instruction would flush these to zero.
            for (v, wide) in block.iter_mut().zip(wide) {
                *v = bf16::store(*wide);
            }
        }
        for (v, wide) in rest.iter_mut().zip(wide_rest) {
            *v = bf16::store(*wide);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::{force, Level};
    use half::{bf16, f16};

    fn check<E: Element<Acc = f32>>(bits: fn(E) -> u16, from: fn(u16) -> E) {
        // Every high half word with low ones around the ties of both formats; a row of odd length.
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
