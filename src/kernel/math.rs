//! Exponentials, tanh and erf with their slopes, and row reductions over sixteen lanes at a time.
//!
//! > exp x = 2ⁿ·p(r),  n = ⌊x·log₂e⌉,  r = x − n·ln 2 ∈ [−ln 2/2, ln 2/2]
//!
//! p = 1 + r + r²q(r), where q of degree 4 is fitted by Remez exchange so that p's relative error is at most 3.1e-9.
//! That is a twentieth of f32's half ulp, so only the rounding of the last two steps remains. Everything is
//! branch-free. f64 uses the library functions, lane by lane.
//!
//! A kernel that uses fused multiply-add receives its instruction set S as a type from `multiversion!`, and passes S to
//! these functions. They need it because, on a processor without the instruction, the library's `mul_add` is forty
//! times slower than a product and a sum.

use crate::cpu::pack::Isa;
use crate::cpu::Accumulator;

/// The number of lanes: one AVX-512 register of f32.
pub const LANES: usize = 16;

/// True if the accumulator A is f32, else it is f64. The compiler knows the result, so it removes branches on it and
/// the conversions of an f32 through f64.
#[inline(always)]
fn is_f32<A: Accumulator>() -> bool {
    size_of::<A>() == size_of::<f32>()
}

/// Returns a·b + c, rounded once if the instruction set has fused multiply-add.
#[inline(always)]
pub fn mul_add<A: Accumulator, S: Isa>(a: A, b: A, c: A) -> A {
    if S::FUSED {
        a.mul_add(b, c)
    } else {
        a * b + c
    }
}

/// Splits exp x into 2ⁿ·exp r, where n is the integer nearest to x·log₂e, and r = x − n·ln 2. Then exp r ≈ 1 + r·(1 +
/// r·q(r)) for a polynomial q. Returns (1 + r·q(r), r, 2ⁿ). x must be at least −88; 2ⁿ is 0 for an x below −87.68.
#[inline(always)]
fn reduced<S: Isa>(x: f32) -> (f32, f32, f32) {
    // Adding 1.5·2²³ rounds to the nearest integer and leaves it in the low bits of the f32. Adding 127 as well gives
    // these bits the bias of an f32's exponent.
    const ROUND: f32 = 12_582_912.0 + 127.0;
    let shifted = mul_add::<f32, S>(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    // ln 2 is split in two parts, so that x − n·ln 2 loses no digits. The first product, n·0.693359375, is exact,
    // because it has only 9 + 8 significant bits.
    let r = mul_add::<f32, S>(n, -0.693_359_4, x);
    let r = mul_add::<f32, S>(n, 2.121_944_4e-4, r);
    // Horner's scheme evaluates q(r), then 1 + r·q(r).
    let p = mul_add::<f32, S>(r, 1.381_459_9e-3, 8.368_717e-3);
    let p = mul_add::<f32, S>(p, r, 4.166_839e-2);
    let p = mul_add::<f32, S>(p, r, 0.166_665_21);
    let p = mul_add::<f32, S>(p, r, 0.499_999_94);
    // The biased exponent moves from the low bits to its place, which gives 2ⁿ.
    let power = f32::from_bits(shifted.to_bits() << 23);
    (mul_add::<f32, S>(p, r, 1.0), r, power)
}

/// Returns exp x within 2 ulp for −87.3 ≤ x ≤ 88.3, 0 for −∞ and NaN for NaN. A finite x below −87.3 gives exp(−87.3)
/// = 1.2e-38, which is negligible in a softmax but not 0. An x above 88.3 is not allowed.
#[inline(always)]
pub fn exp_f32<S: Isa>(x: f32) -> f32 {
    // The comparison is written so that a NaN fails it and stays a NaN.
    let clamped = if x < -87.3 { -87.3 } else { x };
    let (p, r, scale) = reduced::<S>(clamped);
    // exp x = scale·(1 + r·p), with the p that `reduced` returns.
    let p = mul_add::<f32, S>(p, r, 1.0);
    // If p is NaN the scale's bits are garbage, but the product is NaN anyway.
    let e = p * scale;
    if x == f32::NEG_INFINITY {
        0.0
    } else {
        e
    }
}

/// Returns exp x, in f32 by [`exp_f32`]. In f64 any finite x below −708 gives exp(−708) = 3.3e-308, and −∞ gives 0.
#[inline(always)]
pub fn exp<A: Accumulator, S: Isa>(x: A) -> A {
    if is_f32::<A>() {
        return A::from_f64(exp_f32::<S>(x.to_f64() as f32) as f64);
    }
    let (x, lowest) = (x.to_f64(), -708.0);
    let e = if x < lowest { lowest } else { x }.exp();
    A::from_f64(if x == f64::NEG_INFINITY { 0.0 } else { e })
}

/// Returns (tanh z, tanh′ z). In f32, tanh is within 3 ulp; tanh′ is within 1.5e-7, and within 6 ulp unless it is
/// subnormal.
#[inline(always)]
pub fn tanh<A: Accumulator, S: Isa>(z: A) -> (A, A) {
    if is_f32::<A>() {
        let (t, slope) = tanh_f32::<S>(z.to_f64() as f32);
        return (A::from_f64(t as f64), A::from_f64(slope as f64));
    }
    let z = z.to_f64();
    // tanh′ = 4e/(1 + e)² with e = exp(−2|z|), which loses no digits where tanh is near ±1.
    let e = (-2.0 * z.abs()).exp();
    (A::from_f64(z.tanh()), A::from_f64(4.0 * e / ((1.0 + e) * (1.0 + e))))
}

/// Returns (tanh z, tanh′ z), computed from m = exp(−2|z|) − 1. Near 0, tanh|z| = −m/(2 + m). Far from 0 this would
/// lose digits of the distance to 1, so there tanh|z| = 1 − q with q = 2(1 + m)/(2 + m).
#[inline(always)]
fn tanh_f32<S: Isa>(z: f32) -> (f32, f32) {
    let size = z.abs();
    // `reduced` needs at least −88. The comparison is written so that a NaN fails it and stays a NaN.
    let x = if size > 44.0 { -88.0 } else { -2.0 * size };
    let (p, r, scale) = reduced::<S>(x);
    // `reduced` gives exp x = scale·(1 + r·p). From it follow m = exp x − 1, without cancellation near 0, and e = exp
    // x.
    let (m, e) = (mul_add::<f32, S>(scale, p * r, scale - 1.0), mul_add::<f32, S>(scale, p * r, scale));
    let is_far = size > 0.55;
    let q = if is_far { 2.0 * e } else { -m } / (2.0 + m);
    // tanh′ = 1 − t², which is q·(2 − q) for t = 1 − q.
    let (t, slope) = if is_far { (1.0 - q, q * (2.0 - q)) } else { (q, mul_add::<f32, S>(-q, q, 1.0)) };
    (t.copysign(z), slope)
}

/// Returns (erf z, erf′ z). In f32 erf is within 2 ulp, and erf′ within 2.5e-7.
#[inline(always)]
pub fn erf<A: Accumulator, S: Isa>(z: A) -> (A, A) {
    if is_f32::<A>() {
        let (e, slope) = erf_f32::<S>(z.to_f64() as f32);
        return (A::from_f64(e as f64), A::from_f64(slope as f64));
    }
    extern "C" {
        #[link_name = "erf"]
        fn erf_of_c(z: f64) -> f64;
    }
    let z = z.to_f64();
    // SAFETY: erf takes one number, and is in the C library with which the standard library is linked.
    let e = unsafe { erf_of_c(z) };
    (A::from_f64(e), A::from_f64(std::f64::consts::FRAC_2_SQRT_PI * (-z * z).exp()))
}

/// Returns (erf z, erf′ z). It computes erf as z + z·P(z²) near 0, and as 1 − exp(|z|·Q(|z|)) far from it. The
/// polynomials P and Q are fitted for a small relative error, which is 9e-9 near 0 and 3e-9 far from it.
#[inline(always)]
fn erf_f32<S: Isa>(z: f32) -> (f32, f32) {
    let (size, square) = (z.abs(), z * z);
    // Horner's scheme evaluates P(z²) here, and Q(|z|) below.
    let p = mul_add::<f32, S>(square, -6.203_255e-4, 5.032_181e-3);
    let p = mul_add::<f32, S>(p, square, -2.679_146_3e-2);
    let p = mul_add::<f32, S>(p, square, 0.112_824_55);
    let p = mul_add::<f32, S>(p, square, -0.376_125_5);
    let p = mul_add::<f32, S>(p, square, 0.128_379_15);
    // Beyond 4 erf rounds to 1, so z may be clamped. The comparison is false for a NaN, which stays a NaN.
    let far = if size > 4.0 { 4.0 } else { size };
    let q = mul_add::<f32, S>(far, 2.152_250_7e-4, -3.225_124_4e-3);
    let q = mul_add::<f32, S>(q, far, 2.292_238_5e-2);
    let q = mul_add::<f32, S>(q, far, -0.105_312_1);
    let q = mul_add::<f32, S>(q, far, -0.635_680_4);
    let q = mul_add::<f32, S>(q, far, -1.128_525_5);
    let far_erf = 1.0 - exp_f32::<S>(q * far);
    let e = if size < 0.875 { mul_add::<f32, S>(p, size, size) } else { far_erf };
    // Beyond 9.3 exp_f32 would return 1.2e-38 instead of less, and a product with a large z would make that visible.
    let slope = if size > 9.3 { 0.0 } else { std::f32::consts::FRAC_2_SQRT_PI * exp_f32::<S>(-square) };
    (e.copysign(z), slope)
}

/// Returns the sum of the lanes, whose number is a power of two. Pairs are added first, then pairs of sums, as in a
/// tree.
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

/// Returns the largest lane; the number of lanes is a power of two. If a lane is NaN, the result may be any lane.
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

    /// An instruction set with fused multiply-add, whatever the processor has: `mul_add` then calls the library.
    struct Fused;
    impl Isa for Fused {
        const FUSED: bool = true;
        const ROWS: usize = 1;
        type F32 = Portable<f32>;
    }

    /// Returns the error of `got` = exp x in units in the last place.
    fn ulps(x: f32, got: f32) -> f64 {
        let want = (x as f64).exp();
        // The exponent's bits alone are the power of two below the number.
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

    /// Checks two f32 versions of a function, each returning (value, slope), against the exact one in f64. The
    /// arguments are two million numbers in [−12, 12], and small ones. A value may be off by `ulp` units in the last
    /// place, a slope by `error`.
    fn check_curve(curve: [fn(f32) -> (f32, f32); 2], exact: fn(f64) -> (f64, f64), ulp: f64, error: f64) {
        let ulps = |got: f32, want: f64| {
            // The exponent's bits alone are the power of two below the number.
            let unit = f32::from_bits((want as f32).to_bits() & 0x7f80_0000) as f64 * f32::EPSILON as f64;
            (got as f64 - want).abs() / unit
        };
        let far = (-1_000_000..=1_000_000).map(|i| i as f32 * 1.2e-5);
        for z in far.chain((0..400).map(|i| 10f32.powf(-0.09 * i as f32))) {
            for curve in curve {
                let ((got, slope), (want, want_slope)) = (curve(z), exact(z as f64));
                assert!(want.abs() < 1.2e-38 || ulps(got, want) <= ulp, "{z}: {got} for {want}");
                assert!((slope as f64 - want_slope).abs() <= error, "{z}: {slope} for {want_slope}");
            }
        }
        for (z, wanted) in
            [(0.0f32, 0.0f32), (-0.0, -0.0), (1e30, 1.0), (f32::INFINITY, 1.0), (f32::NEG_INFINITY, -1.0)]
        {
            assert!(curve.iter().all(|curve| curve(z).0.to_bits() == wanted.to_bits()), "{z}");
            assert!(curve.iter().all(|curve| wanted == 0.0 || curve(z).1 == 0.0), "{z}");
        }
        for z in [f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001), f32::from_bits(0xffff_ffff)] {
            assert!(curve.iter().all(|curve| curve(z).0.is_nan() && curve(z).1.is_nan()));
        }
    }

    #[test]
    fn tanh_and_its_slope_are_exact_enough() {
        check_curve([tanh::<f32, Fused>, tanh::<f32, Baseline>], tanh::<f64, Fused>, 3.0, 1.5e-7);
        for i in 0..20_000 {
            // Check tanh′ by its own relative error, as long as it is a normal number in f32.
            let z = i as f32 * 2e-3;
            let want = tanh::<f64, Fused>(z as f64).1;
            let got = [tanh::<f32, Fused>(z).1, tanh::<f32, Baseline>(z).1];
            assert!(got.iter().all(|got| (*got as f64 / want - 1.0).abs() < 6.0 * f32::EPSILON as f64), "{z}");
        }
        assert!((tanh::<f64, Fused>(0.5).0 - 0.462_117_157_260_009_76).abs() < 1e-15);
        assert!((tanh::<f64, Fused>(0.5).1 - 0.786_447_732_965_927_4).abs() < 1e-15);
    }

    #[test]
    fn erf_and_its_slope_are_exact_enough() {
        check_curve([erf::<f32, Fused>, erf::<f32, Baseline>], erf::<f64, Fused>, 2.0, 2.5e-7);
        assert!((erf::<f64, Fused>(0.5).0 - 0.520_499_877_813_046_5).abs() < 1e-15);
        assert!((erf::<f64, Fused>(0.5).1 - 0.878_782_578_935_444_8).abs() < 1e-15);
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
}
