//! Plain sums, for rows whose squares leave the range of the type, and what tells such rows.

use crate::cpu::Accumulator;

/// Σ of `f` over a row, in parts, so that rounding grows with the root of its length.
pub fn sum<A: Accumulator>(x: &[A], f: impl Fn(A) -> A) -> A {
    let mut total = A::ZERO;
    for part in x.chunks(32) {
        let mut sum = A::ZERO;
        for v in part {
            sum += f(*v);
        }
        total += sum;
    }
    total
}

/// Whether a sum of squares, or a mean of them plus ε, kept its precision: it neither overflowed nor is so small
/// (2^-100) that single squares may have lost bits to f32's underflow at 2^-149.
pub fn trusted<A: Accumulator>(square: A) -> bool {
    square >= A::from_f64(7.888609052210118e-31) && square < A::from_f64(f64::INFINITY)
}

/// max |x|, by which a row is scaled whose squares leave the range.
pub fn magnitude<A: Accumulator>(x: &[A]) -> A {
    x.iter().fold(A::ZERO, |m, v| m.max(v.abs()))
}

/// √(a² + b²) for a, b ≥ 0, squaring neither.
pub fn hypotenuse<A: Accumulator>(a: A, b: A) -> A {
    let (large, small) = if a > b { (a, b) } else { (b, a) };
    if large == A::ZERO {
        return large;
    }
    let ratio = small / large;
    large * (A::ONE + ratio * ratio).sqrt()
}
