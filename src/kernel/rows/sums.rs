//! Sums for rows whose squares overflow or underflow, and the check that finds such rows.

use crate::cpu::Accumulator;

/// Returns Σ f(x) over the numbers of a row. It adds up partial sums of 32 numbers, which keeps the rounding error
/// small.
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

/// True if `square`, a sum of squares or their mean plus ε, kept its precision: it did not overflow, and is at least
/// 2^-100. In a smaller sum, single squares may have lost bits to f32's underflow at 2^-149.
pub fn trusted<A: Accumulator>(square: A) -> bool {
    // The first number is 2^-100. Both comparisons are false for a NaN.
    square >= A::from_f64(7.888609052210118e-31) && square < A::from_f64(f64::INFINITY)
}

/// Returns max |x| over a row, or 0 if it is empty. A row whose squares overflow or underflow is divided by it.
pub fn magnitude<A: Accumulator>(x: &[A]) -> A {
    x.iter().fold(A::ZERO, |largest, v| largest.max(v.abs()))
}

/// Returns √(a² + b²) for a, b ≥ 0, without squaring either.
pub fn hypotenuse<A: Accumulator>(a: A, b: A) -> A {
    let (large, small) = if a > b { (a, b) } else { (b, a) };
    if large == A::ZERO {
        return large;
    }
    let ratio = small / large;
    large * (A::ONE + ratio * ratio).sqrt()
}
