//! Packs in AVX2 and AVX-512 registers.
//!
//! SAFETY, for every intrinsic below: the processor has it, because only `multiversion!` names [`Avx2`] and
//! [`Avx512`], and it first checks for their features. Loads and stores stay inside the array that is passed.

use super::{Isa, Pack, Store, PAIR_LANES, WIDTH};
use crate::cpu::Element;
use half::{bf16, f16};
use std::any::TypeId;
use std::arch::asm;
use std::arch::x86_64::*;

/// AVX-512, on which a pack of f32 is one register.
#[derive(Clone, Copy, Debug)]
pub struct Avx512;
/// AVX2, on which a pack of f32 is two registers.
#[derive(Clone, Copy, Debug)]
pub struct Avx2;

impl Isa for Avx512 {
    const FUSED: bool = true;
    const ROWS: usize = 4;
    type F32 = F32x16;
}
impl Isa for Avx2 {
    const FUSED: bool = true;
    const ROWS: usize = 1;
    type F32 = F32x8x2;
}

/// The message of `unreachable!` in branches for other storage types.
const OTHERS: &str = "four types are stored, and f64 does not compute in f32";

/// True if E and T are one type; the compiler removes the branches for other types.
#[inline(always)]
fn is<E: 'static, T: 'static>() -> bool {
    TypeId::of::<E>() == TypeId::of::<T>()
}

/// Sixteen numbers in one AVX-512 register.
#[derive(Clone, Copy)]
pub struct F32x16(__m512);

impl Pack<f32> for F32x16 {
    /// Returns a pack with `value` in every lane.
    #[inline(always)]
    fn splat(value: f32) -> Self {
        // SAFETY: the processor has AVX-512; see the head of this file.
        F32x16(unsafe { _mm512_set1_ps(value) })
    }
    /// Loads sixteen numbers of the storage type E, and widens them to f32.
    #[inline(always)]
    fn load<E: Element<Acc = f32>>(from: &[E; WIDTH]) -> Self {
        let from = from.as_ptr();
        // SAFETY: the processor has AVX-512 (see the head of this file), and `is` checks E before the pointer is cast.
        F32x16(unsafe {
            if is::<E, f32>() {
                _mm512_loadu_ps(from.cast())
            } else if is::<E, bf16>() {
                // A bf16 number is the upper half of an f32.
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()))))
            } else if is::<E, f16>() {
                _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))
            } else {
                unreachable!("{OTHERS}")
            }
        })
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: the processor has AVX-512; see the head of this file.
        F32x16(unsafe { _mm512_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        // SAFETY: the processor has AVX-512; see the head of this file.
        F32x16(unsafe { _mm512_sub_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: the processor has AVX-512; see the head of this file.
        F32x16(unsafe { _mm512_mul_ps(self.0, other.0) })
    }
    /// Returns self·a + b, rounded once.
    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        // SAFETY: the processor has AVX-512; see the head of this file.
        F32x16(unsafe { _mm512_fmadd_ps(self.0, a.0, b.0) })
    }
    /// Returns the sum of the lanes: first i + (i + 8), then these sums as in [`sum8`].
    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: the processor has AVX-512; see the head of this file.
        unsafe {
            let high = _mm512_extractf32x8_ps::<1>(self.0);
            sum8(_mm256_add_ps(_mm512_castps512_ps256(self.0), high))
        }
    }
    /// Stores the pack in f32.
    #[inline(always)]
    fn put(self, to: &mut [f32; WIDTH]) {
        // SAFETY: the processor has AVX-512; see the head of this file.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), self.0) }
    }
    /// Rounds two packs to the storage type E, and stores them; `how` decides whether they bypass the caches.
    #[inline(always)]
    fn store<E: Element<Acc = f32>>(block: [Self; 2], to: &mut [E; PAIR_LANES], how: Store) {
        let [F32x16(low), F32x16(high)] = block;
        let to = to.as_mut_ptr();
        let streams = how.streams(to);
        // SAFETY: the processor has AVX-512 (see the head of this file), and `is` checks E before the pointer is cast.
        // If `streams` is true, the block starts on a cache line.
        unsafe {
            if is::<E, f32>() {
                let to: *mut f32 = to.cast();
                if streams {
                    _mm512_stream_ps(to, low);
                    _mm512_stream_ps(to.add(WIDTH), high);
                } else {
                    _mm512_storeu_ps(to, low);
                    _mm512_storeu_ps(to.add(WIDTH), high);
                }
                return;
            }
            let both = if is::<E, bf16>() {
                narrow_bf16(low, high, how.bf16)
            } else if is::<E, f16>() {
                let low = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(low);
                let high = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(high);
                _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
            } else {
                unreachable!("{OTHERS}")
            };
            if streams {
                _mm512_stream_si512(to.cast(), both);
            } else {
                _mm512_storeu_si512(to.cast(), both);
            }
        }
    }
    /// Keeps the lanes whose random `bits` are at least `threshold`, and zeroes the others.
    #[inline(always)]
    fn keep(self, bits: &[u16; WIDTH], threshold: u16) -> Self {
        // SAFETY: the processor has AVX-512; see the head of this file.
        unsafe {
            let bits = _mm256_loadu_si256(bits.as_ptr().cast());
            // The comparison is unsigned; `as i16` only changes the type of the threshold's bits.
            let kept = _mm256_cmpge_epu16_mask(bits, _mm256_set1_epi16(threshold as i16));
            F32x16(_mm512_maskz_mov_ps(kept, self.0))
        }
    }
}

/// Rounds thirty-two numbers to bf16, with the results of [`Element::store`]. `native` is true if the processor has an
/// instruction that rounds to bf16.
///
/// # Safety
/// The processor has AVX-512 F, BW, DQ and VL; with `native`, also BF16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn narrow_bf16(low: __m512, high: __m512, native: bool) -> __m512i {
    // The category of subnormal numbers in the instruction that classifies numbers.
    const SUBNORMAL: i32 = 0x20;
    if native {
        // The instruction would flush subnormal numbers to zero, so a block with such numbers takes the other path.
        let subnormal = _mm512_fpclass_ps_mask::<SUBNORMAL>(low) | _mm512_fpclass_ps_mask::<SUBNORMAL>(high);
        if subnormal == 0 {
            let both: __m512i;
            // The intrinsic is a function compiled for AVX512_BF16, which cannot be inlined into one that is not. So
            // the instruction is written in assembly. It puts its last operand into the lower half.
            // SAFETY: the caller guarantees that the processor has the instruction, which changes only registers.
            unsafe {
                asm!("vcvtne2ps2bf16 {}, {}, {}", out(zmm_reg) both, in(zmm_reg) high, in(zmm_reg) low,
                     options(pure, nomem, nostack, preserves_flags));
            }
            return both;
        }
    }
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(round_bf16(low)), round_bf16(high))
}

/// Rounds sixteen numbers to bf16, with the results of [`Element::store`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn round_bf16(v: __m512) -> __m256i {
    // Adding 0x7fff, and 1 more if the upper half is odd, rounds to nearest even. A NaN, which is unordered with
    // itself, instead gets the bit that makes it quiet.
    let bits = _mm512_castps_si512(v);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
    let rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x0040_0000));
    _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded))
}

/// Returns the sum of the eight lanes: first i + (i + 4), then these sums with distance 2 and 1.
///
/// # Safety
/// The processor has AVX.
#[inline]
#[target_feature(enable = "avx")]
unsafe fn sum8(v: __m256) -> f32 {
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps::<1>(v, v)))
}

/// Sixteen numbers in two AVX2 registers, the lower eight first.
#[derive(Clone, Copy)]
pub struct F32x8x2([__m256; 2]);

impl Pack<f32> for F32x8x2 {
    /// Returns a pack with `value` in every lane.
    #[inline(always)]
    fn splat(value: f32) -> Self {
        // SAFETY: the processor has AVX2; see the head of this file.
        F32x8x2([unsafe { _mm256_set1_ps(value) }; 2])
    }
    /// Loads sixteen numbers of the storage type E, and widens them to f32.
    #[inline(always)]
    fn load<E: Element<Acc = f32>>(from: &[E; WIDTH]) -> Self {
        let from = from.as_ptr();
        // SAFETY: the processor has AVX2 (see the head of this file), and `is` checks E before the pointer is cast.
        F32x8x2(unsafe {
            if is::<E, f32>() {
                [_mm256_loadu_ps(from.cast()), _mm256_loadu_ps(from.cast::<f32>().add(8))]
            } else if is::<E, bf16>() {
                [widen_bf16(from.cast()), widen_bf16(from.add(8).cast())]
            } else if is::<E, f16>() {
                [_mm256_cvtph_ps(_mm_loadu_si128(from.cast())), _mm256_cvtph_ps(_mm_loadu_si128(from.add(8).cast()))]
            } else {
                unreachable!("{OTHERS}")
            }
        })
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: the processor has AVX2; see the head of this file.
        F32x8x2(unsafe { [_mm256_add_ps(self.0[0], other.0[0]), _mm256_add_ps(self.0[1], other.0[1])] })
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        // SAFETY: the processor has AVX2; see the head of this file.
        F32x8x2(unsafe { [_mm256_sub_ps(self.0[0], other.0[0]), _mm256_sub_ps(self.0[1], other.0[1])] })
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: the processor has AVX2; see the head of this file.
        F32x8x2(unsafe { [_mm256_mul_ps(self.0[0], other.0[0]), _mm256_mul_ps(self.0[1], other.0[1])] })
    }
    /// Returns self·a + b, rounded once.
    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        let (x, y, z) = (self.0, a.0, b.0);
        // SAFETY: the processor has AVX2; see the head of this file.
        F32x8x2(unsafe { [_mm256_fmadd_ps(x[0], y[0], z[0]), _mm256_fmadd_ps(x[1], y[1], z[1])] })
    }
    /// Returns the sum of the lanes: first i + (i + 8), then these sums as in [`sum8`].
    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: the processor has AVX2; see the head of this file.
        unsafe { sum8(_mm256_add_ps(self.0[0], self.0[1])) }
    }
    /// Stores the pack in f32.
    #[inline(always)]
    fn put(self, to: &mut [f32; WIDTH]) {
        // SAFETY: the processor has AVX2; see the head of this file.
        unsafe {
            _mm256_storeu_ps(to.as_mut_ptr(), self.0[0]);
            _mm256_storeu_ps(to.as_mut_ptr().add(8), self.0[1]);
        }
    }
    /// Rounds two packs to the storage type E, and stores them; `how` decides whether they bypass the caches.
    #[inline(always)]
    fn store<E: Element<Acc = f32>>(block: [Self; 2], to: &mut [E; PAIR_LANES], how: Store) {
        // Each of a, b, c and d is a register of eight numbers, in the block's order.
        let [F32x8x2([a, b]), F32x8x2([c, d])] = block;
        let to = to.as_mut_ptr();
        let streams = how.streams(to);
        // SAFETY: the processor has AVX2 (see the head of this file), and `is` checks E before the pointer is cast. If
        // `streams` is true, the block starts on a cache line.
        unsafe {
            if is::<E, f32>() {
                let to: *mut f32 = to.cast();
                for (i, v) in [a, b, c, d].into_iter().enumerate() {
                    if streams {
                        _mm256_stream_ps(to.add(8 * i), v);
                    } else {
                        _mm256_storeu_ps(to.add(8 * i), v);
                    }
                }
                return;
            }
            let halves = if is::<E, bf16>() {
                narrow_bf16x32(a, b, c, d)
            } else if is::<E, f16>() {
                [narrow8x2_f16(a, b), narrow8x2_f16(c, d)]
            } else {
                unreachable!("{OTHERS}")
            };
            let to: *mut __m256i = to.cast();
            for (i, v) in halves.into_iter().enumerate() {
                if streams {
                    _mm256_stream_si256(to.add(i), v);
                } else {
                    _mm256_storeu_si256(to.add(i), v);
                }
            }
        }
    }
    /// Keeps the lanes whose random `bits` are at least `threshold`, and zeroes the others.
    #[inline(always)]
    fn keep(self, bits: &[u16; WIDTH], threshold: u16) -> Self {
        let (low, high) = bits.split_at(8);
        // SAFETY: the processor has AVX2; see the head of this file.
        F32x8x2(unsafe { [keep8(self.0[0], low.as_ptr(), threshold), keep8(self.0[1], high.as_ptr(), threshold)] })
    }
}

/// Loads eight bf16 numbers and widens them to f32.
///
/// # Safety
/// The processor has AVX2, and eight numbers lie at `from`.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn widen_bf16(from: *const __m128i) -> __m256 {
    // The shuffle puts each number into the upper half of its lane; an index of −1 gives a zero. It works within each
    // half of the register, so both halves hold the same eight numbers.
    #[rustfmt::skip]
    let places = _mm256_setr_epi8(
        -1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7,
        -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15,
    );
    // SAFETY: guaranteed by the caller.
    let twice = unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(from)) };
    _mm256_castsi256_ps(_mm256_shuffle_epi8(twice, places))
}

/// Rounds thirty-two numbers to bf16, with the results of [`Element::store`]. Each argument holds eight numbers, each
/// result sixteen, in order.
#[inline]
#[target_feature(enable = "avx2")]
fn narrow_bf16x32(a: __m256, b: __m256, c: __m256, d: __m256) -> [__m256i; 2] {
    // The comparison is true where either number is NaN. Blocks without a NaN take the shorter path.
    let nan = _mm256_or_ps(_mm256_cmp_ps::<_CMP_UNORD_Q>(a, b), _mm256_cmp_ps::<_CMP_UNORD_Q>(c, d));
    let [a, b, c, d] = match _mm256_movemask_ps(nan) {
        0 => [round8_bf16(a), round8_bf16(b), round8_bf16(c), round8_bf16(d)],
        _ => [round8_bf16_or_nan(a), round8_bf16_or_nan(b), round8_bf16_or_nan(c), round8_bf16_or_nan(d)],
    };
    [upper_halves(a, b), upper_halves(c, d)]
}

/// Returns the upper 16 bits of each lane: eight from `low`, then eight from `high`.
#[inline]
#[target_feature(enable = "avx2")]
fn upper_halves(low: __m256i, high: __m256i) -> __m256i {
    let both = _mm256_packus_epi32(_mm256_srli_epi32::<16>(low), _mm256_srli_epi32::<16>(high));
    // The packing instruction works within each half of a register, so the quarters must be put in order again.
    _mm256_permute4x64_epi64::<0b11_01_10_00>(both)
}

/// Rounds to bf16 in the upper half of each lane, to nearest even. The lower half is garbage, and a NaN may become an
/// infinity.
#[inline]
#[target_feature(enable = "avx2")]
fn round8_bf16(v: __m256) -> __m256i {
    // Adding 0x7fff, and 1 more if the upper half is odd, rounds that half to nearest even.
    let bits = _mm256_castps_si256(v);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)))
}

/// Rounds to bf16 as [`round8_bf16`] does, but a NaN stays a NaN.
#[inline]
#[target_feature(enable = "avx2")]
fn round8_bf16_or_nan(v: __m256) -> __m256i {
    // A NaN, which is unordered with itself, gets the bit that makes it quiet.
    let quiet = _mm256_or_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x0040_0000));
    let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
    _mm256_blendv_epi8(round8_bf16(v), quiet, nan)
}

/// Rounds sixteen numbers to f16.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn narrow8x2_f16(low: __m256, high: __m256) -> __m256i {
    const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;
    _mm256_setr_m128i(_mm256_cvtps_ph::<NEAREST>(low), _mm256_cvtps_ph::<NEAREST>(high))
}

/// Keeps the lanes of `v` whose random bits are at least the threshold, and zeroes the others.
///
/// # Safety
/// The processor has AVX2, and eight numbers lie at `bits`.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn keep8(v: __m256, bits: *const u16, threshold: u16) -> __m256 {
    // AVX2 compares only signed numbers. Widened to 32 bits, unsigned 16-bit numbers are signed numbers that are not
    // negative.
    // SAFETY: guaranteed by the caller.
    let bits = unsafe { _mm256_cvtepu16_epi32(_mm_loadu_si128(bits.cast())) };
    let dropped = _mm256_cmpgt_epi32(_mm256_set1_epi32(threshold as i32), bits);
    _mm256_andnot_ps(_mm256_castsi256_ps(dropped), v)
}
