//! The four storage types that a kernel reads and writes, and the types in which it computes.
//!
//! Arithmetic is never done in a 16-bit type: values are widened when loaded, and rounded to nearest even when
//! stored. The conversions are branch-free integer code, so that a loop over them vectorises on every level of
//! [`simd`](super::simd). The `half` crate would test for hardware support in each call, which prevents that.

use super::pack::{Isa, Pack, Portable};
use half::{bf16, f16};
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

/// The type in which statistics and reductions accumulate: f32, or f64 for f64 inputs (docs/spec.md §1.1).
pub trait Accumulator:
    Element<Acc = Self>
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
{
    /// A pack of sixteen numbers in the registers of an instruction set.
    type Pack<S: Isa>: Pack<Self>;
    const ZERO: Self;
    const ONE: Self;
    fn from_f64(v: f64) -> Self;
    fn to_f64(self) -> f64;
    fn sqrt(self) -> Self;
    fn abs(self) -> Self;
    fn exp(self) -> Self;
    fn ln(self) -> Self;
    /// Returns the larger number, or `other` if either is NaN.
    fn max(self, other: Self) -> Self;
    /// Returns self·a + b, rounded once. If the processor lacks the instruction, this is a function of libm, forty
    /// times slower.
    fn mul_add(self, a: Self, b: Self) -> Self;
}

/// Implements [`Accumulator`] for the type `$t`, whose pack on the instruction set `$isa` has the type `$pack`.
macro_rules! accumulator {
    ($t:ty, $isa:ident => $pack:ty) => {
        impl Accumulator for $t {
            type Pack<$isa: Isa> = $pack;
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            #[inline(always)]
            fn from_f64(v: f64) -> Self {
                v as $t
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                self as f64
            }
            #[inline(always)]
            fn sqrt(self) -> Self {
                <$t>::sqrt(self)
            }
            #[inline(always)]
            fn abs(self) -> Self {
                <$t>::abs(self)
            }
            #[inline(always)]
            fn exp(self) -> Self {
                <$t>::exp(self)
            }
            #[inline(always)]
            fn ln(self) -> Self {
                <$t>::ln(self)
            }
            #[inline(always)]
            fn mul_add(self, a: Self, b: Self) -> Self {
                <$t>::mul_add(self, a, b)
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                if self > other {
                    self
                } else {
                    other
                }
            }
        }
    };
}
accumulator!(f32, S => S::F32);
accumulator!(f64, S => Portable<f64>);

/// A storage type of tensors.
pub trait Element: Copy + Send + Sync + Default + 'static {
    /// The type in which kernels compute with these numbers.
    type Acc: Accumulator;
    /// Widens a number to the computing type.
    fn load(self) -> Self::Acc;
    /// Rounds a number to the storage type, to nearest even.
    fn store(value: Self::Acc) -> Self;
}

impl Element for f32 {
    type Acc = f32;
    #[inline(always)]
    fn load(self) -> f32 {
        self
    }
    #[inline(always)]
    fn store(value: f32) -> Self {
        value
    }
}

impl Element for f64 {
    type Acc = f64;
    #[inline(always)]
    fn load(self) -> f64 {
        self
    }
    #[inline(always)]
    fn store(value: f64) -> Self {
        value
    }
}

impl Element for bf16 {
    type Acc = f32;
    /// Widens the number to f32.
    #[inline(always)]
    fn load(self) -> f32 {
        // A bf16 number is the upper half of an f32.
        f32::from_bits((self.to_bits() as u32) << 16)
    }
    /// Rounds a number to bf16, to nearest even.
    #[inline(always)]
    fn store(value: f32) -> Self {
        let bits = value.to_bits();
        // Round to nearest even: add just less than half a unit of the upper 16 bits, and 1 more if these are odd. A
        // NaN keeps its sign and becomes quiet, because rounding could turn it into infinity.
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let nan = (bits >> 16) | 0x0040;
        let is_nan = (bits & 0x7fff_ffff) > 0x7f80_0000;
        bf16::from_bits(if is_nan { nan } else { rounded } as u16)
    }
}

impl Element for f16 {
    type Acc = f32;
    /// Widens the number to f32 without a branch.
    #[inline(always)]
    fn load(self) -> f32 {
        let bits = self.to_bits() as u32;
        // f16 has 10 bits of mantissa and f32 has 23, so the number without its sign moves by 13 bits.
        let magnitude = (bits & 0x7fff) << 13;
        // Multiplying by 2^112 (0x7780_0000) changes f16's exponent bias (15) to f32's (127). It is also right for
        // subnormal numbers.
        let finite = (f32::from_bits(magnitude) * f32::from_bits(0x7780_0000)).to_bits();
        // In both types an exponent of ones means infinity or NaN.
        let special = magnitude | 0x7f80_0000;
        let value = if (bits & 0x7c00) == 0x7c00 { special } else { finite };
        f32::from_bits(value | ((bits & 0x8000) << 16))
    }
    /// Rounds a number to f16, to nearest even, without a branch: all three cases are computed, and one is chosen.
    #[inline(always)]
    fn store(value: f32) -> Self {
        let bits = value.to_bits();
        let sign = (bits >> 16) & 0x8000;
        let magnitude = bits & 0x7fff_ffff;
        // For a normal f16, adding 0xc800_0000 changes the exponent's bias from 127 to 15. Adding 0x0fff, and 1 if the
        // last bit that stays is odd, rounds to nearest even; a carry into infinity is correct.
        let normal = magnitude.wrapping_add(0xc800_0fff).wrapping_add((magnitude >> 13) & 1) >> 13;
        // Below 2^-14, adding 0.5 (0x3f00_0000) lets the f32 adder round at f16's subnormal spacing of 2^-24.
        let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
        // From 2^16 on (0x4780_0000) the result is infinity, or a quiet NaN for a NaN; 0x3880_0000 is 2^-14.
        let overflow = if magnitude > 0x7f80_0000 { 0x7e00 } else { 0x7c00 };
        let small = if magnitude < 0x3880_0000 { subnormal } else { normal };
        f16::from_bits((sign | if magnitude >= 0x4780_0000 { overflow } else { small }) as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_loads_as_half_says() {
        for bits in 0..=u16::MAX {
            let v = f16::from_bits(bits);
            assert!(v.load().to_bits() == v.to_f32().to_bits() || v.is_nan() && v.load().is_nan(), "{bits:#06x}");
        }
    }

    #[test]
    fn stores_round_as_half_says() {
        // The values have every possible 16-bit high half, with low halves below, at and above the ties of both
        // formats.
        for high in 0..=u16::MAX {
            for low in [0u32, 1, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let v = f32::from_bits(((high as u32) << 16) | low);
                let (as_bf16, as_f16) = (<bf16 as Element>::store(v), <f16 as Element>::store(v));
                if v.is_nan() {
                    assert!(as_bf16.is_nan() && as_f16.is_nan(), "{v}");
                } else {
                    assert_eq!(as_bf16.to_bits(), bf16::from_f32(v).to_bits(), "{v:e}");
                    assert_eq!(as_f16.to_bits(), f16::from_f32(v).to_bits(), "{v:e}");
                }
            }
        }
    }
}
