//! Exponentials and row reductions over sixteen lanes at a time.
//!
//! > exp x = 2ⁿ·p(r),  n = ⌊x·log₂e⌉,  r = x − n·ln 2 ∈ [−ln 2/2, ln 2/2]
//!
//! p = 1 + r + r²q(r), q of degree 4 fitted by Remez exchange to the relative error, 3.1e-9: a twentieth of an f32's half
//! ulp, so that what is left is the rounding of the last two steps. Everything is branch-free. f64 takes the standard
//! library's function, lane by lane.
//!
//! A kernel that gains from fused multiply-add takes its instruction set from `multiversion!` and hands it down: without
//! the instruction `mul_add` is a call into libm, forty times slower than two roundings.

use crate::cpu::pack::Isa;
use crate::cpu::{memory, Accumulator};
use std::ops::{Deref, DerefMut};

/// One AVX-512 register of f32.
pub const LANES: usize = 16;

/// Whether accumulators of this type are f32. The conversions through f64 below are folded away by the compiler.
#[inline(always)]
fn is_f32<A: Accumulator>() -> bool {
    size_of::<A>() == size_of::<f32>()
}

/// a·b + c, rounded once where the instruction set does.
#[inline(always)]
pub fn mul_add<A: Accumulator, S: Isa>(a: A, b: A, c: A) -> A {
    if !S::FUSED {
        a * b + c
    } else if is_f32::<A>() {
        A::from_f64((a.to_f64() as f32).mul_add(b.to_f64() as f32, c.to_f64() as f32) as f64)
    } else {
        A::from_f64(a.to_f64().mul_add(b.to_f64(), c.to_f64()))
    }
}

/// exp within 2 ulp for −87.3 ≤ x ≤ 88.3. 0 for −∞ and NaN for NaN; a finite x below gives exp(−87.3) = 1.2e-38, which
/// nothing in a softmax feels, and stays apart from −∞'s 0. x above is outside the domain.
#[inline(always)]
pub fn exp_f32<S: Isa>(x: f32) -> f32 {
    // Written so that a NaN fails the comparison and stays.
    let clamped = if x < -87.3 { -87.3 } else { x };
    // Adding 1.5·2²³ rounds to the nearest integer and leaves it in the low bits, here with the exponent's bias.
    const ROUND: f32 = 12_582_912.0 + 127.0;
    let shifted = mul_add::<f32, S>(clamped, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    // ln 2 in two parts: n·0.693359375 is exact, having 9 + 8 significant bits.
    let r = mul_add::<f32, S>(n, -0.693_359_4, clamped);
    let r = mul_add::<f32, S>(n, 2.121_944_4e-4, r);
    let p = mul_add::<f32, S>(r, 1.381_459_9e-3, 8.368_717e-3);
    let p = mul_add::<f32, S>(p, r, 4.166_839e-2);
    let p = mul_add::<f32, S>(p, r, 0.166_665_21);
    let p = mul_add::<f32, S>(p, r, 0.499_999_94);
    let p = mul_add::<f32, S>(p, r, 1.0);
    let p = mul_add::<f32, S>(p, r, 1.0);
    // For a NaN the bits are noise, but p is the NaN.
    let e = p * f32::from_bits(shifted.to_bits() << 23);
    if x == f32::NEG_INFINITY {
        0.0
    } else {
        e
    }
}

/// exp as in [`exp_f32`], saturating for f64 at exp(−708) = 3.3e-308.
#[inline(always)]
pub fn exp<A: Accumulator, S: Isa>(x: A) -> A {
    if is_f32::<A>() {
        return A::from_f64(exp_f32::<S>(x.to_f64() as f32) as f64);
    }
    let (x, lowest) = (x.to_f64(), -708.0);
    let e = if x < lowest { lowest } else { x }.exp();
    A::from_f64(if x == f64::NEG_INFINITY { 0.0 } else { e })
}

/// Zeros that begin on a cache line: a 64-byte store across two costs two.
pub struct Buffer<A> {
    data: Vec<A>,
    start: usize,
    len: usize,
}

impl<A: Accumulator> Buffer<A> {
    pub fn new(len: usize) -> Self {
        let data = memory::filled(A::ZERO, len.saturating_add(64 / size_of::<A>()));
        let start = data.as_ptr().align_offset(64);
        Buffer { data, start, len }
    }
}

impl<A> Deref for Buffer<A> {
    type Target = [A];
    #[inline(always)]
    fn deref(&self) -> &[A] {
        &self.data[self.start..][..self.len]
    }
}

impl<A> DerefMut for Buffer<A> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [A] {
        &mut self.data[self.start..][..self.len]
    }
}

/// Sum over the lanes, in the order of a tree.
#[inline(always)]
pub fn sum<A: Accumulator, const N: usize>(mut lanes: [A; N]) -> A {
    let mut width = N / 2;
    while width > 0 {
        for l in 0..width {
            lanes[l] += lanes[l + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Largest lane; with a NaN among them, any of them.
#[inline(always)]
pub fn max<A: Accumulator, const N: usize>(mut lanes: [A; N]) -> A {
    let mut width = N / 2;
    while width > 0 {
        for l in 0..width {
            lanes[l] = lanes[l + width].max(lanes[l]);
        }
        width /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::pack::{Baseline, Portable};

    struct Fused;
    impl Isa for Fused {
        const FUSED: bool = true;
        type F32 = Portable<f32>;
    }

    fn ulps(x: f32, got: f32) -> f64 {
        let want = (x as f64).exp();
        let unit = (want as f32).to_bits() & 0x7f80_0000;
        (got as f64 - want).abs() / (f32::from_bits(unit) as f64 * f32::EPSILON as f64)
    }

    #[test]
    fn exp_is_within_two_ulp() {
        for i in 0..=1_000_000 {
            let x = -87.3 + i as f32 * (175.6 / 1e6);
            assert!(ulps(x, exp_f32::<Fused>(x)) <= 2.0, "{x}");
            assert!(ulps(x, exp_f32::<Baseline>(x)) <= 2.0, "{x}");
        }
        for x in [0.0f32, -0.0, f32::MIN_POSITIVE, -1e-40, 1e-8] {
            assert_eq!(exp_f32::<Fused>(x), 1.0);
        }
    }

    #[test]
    fn exp_of_what_is_no_ordinary_number() {
        for x in [f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001), f32::from_bits(0xffff_ffff)] {
            assert!(exp_f32::<Fused>(x).is_nan() && exp_f32::<Baseline>(x).is_nan());
        }
        assert_eq!(exp_f32::<Fused>(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp::<f64, Fused>(f64::NEG_INFINITY), 0.0);
        for x in [-88.0, -1e4, f32::MIN] {
            assert!((1.1e-38..1.3e-38).contains(&exp_f32::<Fused>(x)));
            assert!(exp::<f64, Fused>(10.0 * x as f64) > 0.0);
        }
        assert!(exp::<f64, Fused>(f64::NAN).is_nan());
        assert_eq!(exp::<f64, Fused>(1.5), 1.5f64.exp());
    }

    #[test]
    fn reductions_count_every_lane() {
        for l in 0..LANES {
            let mut x = [0.0f32; LANES];
            x[l] = 2.5;
            assert_eq!((sum(x), max(x)), (2.5, 2.5));
        }
        assert_eq!(max([f64::NEG_INFINITY; LANES]), f64::NEG_INFINITY);
    }

    #[test]
    fn buffers_are_aligned_zeros() {
        for len in [0, 1, 100] {
            let buffer = Buffer::<f32>::new(len);
            assert_eq!((buffer.as_ptr().align_offset(64), &buffer[..]), (0, &vec![0.0; len][..]));
        }
    }
}
