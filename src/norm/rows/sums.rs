//! Sums over a row, and what to do when squares leave the range of the type.
//!
//! A sum runs over [`LANES`] partial sums that are added up in a fixed order, so that every instruction set gives the
//! same bits, and rounding grows with cols/128 rather than with cols.

use crate::cpu::Accumulator;
use std::array::from_fn;

/// Partial sums of one sum.
pub const LANES: usize = 128;

/// Partial sums that stay in memory, which LLVM vectorises at every level and with every tail; eight AVX-512
/// registers of f32 between two visits to the same one hide the ten cycles of load, addition and store.
#[repr(align(64))]
pub struct Lanes<A>(pub [A; LANES]);

impl<A: Accumulator> Lanes<A> {
    #[inline(always)]
    pub fn zero() -> Self {
        Lanes([A::ZERO; LANES])
    }

    /// The sum of all.
    #[inline(always)]
    pub fn fold(self) -> A {
        const WIDTH: usize = 16;
        let mut few = [A::ZERO; WIDTH];
        for group in self.0.as_chunks::<WIDTH>().0 {
            for l in 0..WIDTH {
                few[l] += group[l];
            }
        }
        // Through memory: from registers LLVM makes some three hundred shuffles of the sixteen additions below.
        let few = std::hint::black_box(few);
        let mut half: [A; WIDTH / 2] = from_fn(|l| few[l] + few[l + WIDTH / 2]);
        for width in [4, 2, 1] {
            for l in 0..width {
                half[l] += half[l + width];
            }
        }
        half[0]
    }
}

/// Σ of `f` over a row.
#[inline(always)]
pub fn sum<A: Accumulator>(x: &[A], f: impl Fn(A) -> A) -> A {
    let mut total = Lanes::zero();
    let (blocks, rest) = x.as_chunks::<LANES>();
    for block in blocks {
        for (total, v) in total.0.iter_mut().zip(block) {
            *total += f(*v);
        }
    }
    for (total, v) in total.0.iter_mut().zip(rest) {
        *total += f(*v);
    }
    total.fold()
}

/// Σd and Σd² of d = `f`(x) over a row.
#[inline(always)]
pub fn sum_and_squares<A: Accumulator>(x: &[A], f: impl Fn(A) -> A) -> (A, A) {
    let (mut total, mut squares) = (Lanes::zero(), Lanes::zero());
    let (blocks, rest) = x.as_chunks::<LANES>();
    for block in blocks {
        for ((total, square), v) in total.0.iter_mut().zip(&mut squares.0).zip(block) {
            let d = f(*v);
            *total += d;
            *square += d * d;
        }
    }
    for ((total, square), v) in total.0.iter_mut().zip(&mut squares.0).zip(rest) {
        let d = f(*v);
        *total += d;
        *square += d * d;
    }
    (total.fold(), squares.fold())
}

/// Whether a sum of squares, or a mean of them plus ε, kept its precision: it neither overflowed nor is so small
/// (2^-100) that single squares may have lost bits to f32's underflow at 2^-149.
#[inline(always)]
pub fn trusted<A: Accumulator>(square: A) -> bool {
    square >= A::from_f64(7.888609052210118e-31) && square < A::from_f64(f64::INFINITY)
}

/// max |x|, by which a row is scaled whose squares leave the range.
#[inline(always)]
pub fn magnitude<A: Accumulator>(x: &[A]) -> A {
    x.iter().fold(A::ZERO, |m, v| m.max(v.abs()))
}

/// √(a² + b²) for a, b ≥ 0, squaring neither.
#[inline(always)]
pub fn hypotenuse<A: Accumulator>(a: A, b: A) -> A {
    let (large, small) = if a > b { (a, b) } else { (b, a) };
    if large == A::ZERO {
        return large;
    }
    let ratio = small / large;
    large * (A::ONE + ratio * ratio).sqrt()
}
