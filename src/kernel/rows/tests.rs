//! The tester of every row norm: type × width × kind of row × kind of weight × instruction set, against f64.

use super::*;
use crate::cpu::simd::{force, Level};
use half::{bf16, f16};
use std::fmt::Debug;

pub const WIDTHS: [usize; 10] = [1, 2, 7, 16, 31, 123, 128, 400, 512, 1000];

/// A storage type under test, with its rounding and its range.
pub trait Tested: Element + PartialEq + Debug {
    /// Half the spacing of numbers around one in this type; `UNIT_ACC` is the same for its computing type.
    const UNIT: f64;
    const UNIT_ACC: f64;
    /// The size at which squares overflow f32 (for f16: a size near its largest number).
    const HUGE: f64;
    const LARGEST: f64;
    /// The spacing of the smallest numbers.
    const SMALLEST: f64;
    /// Rounds a number to this type.
    fn of(v: f64) -> Self {
        Self::store(Self::Acc::from_f64(v))
    }
    /// Returns the number in f64.
    fn value(self) -> f64 {
        self.load().to_f64()
    }
}
/// Implements [`Tested`]; `$bits` and `$acc` are the significant bits of the type and of its computing type.
macro_rules! tested {
    ($t:ty, $bits:expr, $acc:expr, $huge:expr, $largest:expr, $smallest:expr) => {
        impl Tested for $t {
            const UNIT: f64 = 1.0 / (1u64 << $bits) as f64;
            const UNIT_ACC: f64 = 1.0 / (1u64 << $acc) as f64;
            const HUGE: f64 = $huge;
            const LARGEST: f64 = $largest;
            const SMALLEST: f64 = $smallest;
        }
    };
}
tested!(f32, 24, 24, 1e35, f32::MAX as f64, 1e-40);
tested!(f64, 53, 53, 1e140, f64::MAX, 1e-300);
tested!(bf16, 8, 24, 1e35, 3.38e38, 1e-40);
tested!(f16, 11, 24, 1e4, 65504.0, 6e-8);

/// Returns n numbers (u + mean)·scale with u in [−2, 2), which the seed determines.
pub fn numbers<E: Tested>(n: usize, seed: u64, scale: f64, mean: f64) -> Vec<E> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 53) as f64 * 4.0 - 2.0
    };
    (0..n).map(|_| E::of((next() + mean) * scale)).collect()
}

/// Converts numbers to the computing type.
pub fn acc<A: Accumulator>(values: &[f64]) -> Vec<A> {
    values.iter().map(|v| A::from_f64(*v)).collect()
}

/// The formula of a norm in f64. `normalised` returns x̂ and its divisor from (x, ε); `dx` returns dx from (x, g, ε).
pub struct Formula {
    pub normalised: fn(&[f64], f64) -> (Vec<f64>, f64),
    pub dx: fn(&[f64], &[f64], f64) -> Vec<f64>,
}

/// Checks a norm against its formula for every type, width, kind of row, kind of weight, and instruction set.
pub fn check<N: RowNorm>(formula: &Formula) {
    for level in Level::ALL {
        force(Some(level));
        for cols in WIDTHS {
            check_type::<N, f32>(formula, cols);
            check_type::<N, f64>(formula, cols);
            check_type::<N, bf16>(formula, cols);
            check_type::<N, f16>(formula, cols);
        }
    }
    force(None);
}

/// Checks rows of `cols` numbers of type E, with each kind of weight.
fn check_type<N: RowNorm, E: Tested>(formula: &Formula, cols: usize) {
    let seed = cols as u64;
    // Each row's numbers have a scale and a mean.
    let kinds = [(1.0, 0.0), (1.0, 0.5), (0.0, 0.0), (E::HUGE, 0.0), (1e-4, 0.0), (1.0, 100.0), (E::HUGE, 3.0)];
    let x: Vec<E> = (0..).zip(kinds).flat_map(|(k, (s, m))| numbers::<E>(cols, seed + k, s, m)).collect();
    let dy = numbers::<E>(x.len(), seed + 100, 1.0, 0.1);
    let (per_column, gain) = (numbers::<f64>(cols, seed + 200, 0.5, 2.0), vec![1.75]);
    for (weight, bias) in [(vec![], vec![]), (gain, vec![]), (per_column, numbers::<f64>(cols, 300, 1.0, 0.0))] {
        let weight: Vec<f64> = weight.iter().map(|v| E::Acc::from_f64(*v).to_f64()).collect();
        let bias: Vec<f64> = bias.iter().map(|v| E::Acc::from_f64(*v).to_f64()).collect();
        check_rows::<N, E>(formula, cols, &x, &dy, &weight, &bias);
    }
}

/// Compares y and all gradients with the formula; `weight` and `bias` are as in [`forward`].
fn check_rows<N: RowNorm, E: Tested>(formula: &Formula, cols: usize, x: &[E], dy: &[E], weight: &[f64], bias: &[f64]) {
    let eps = 1e-5f32 as f64;
    let (w, b) = (acc::<E::Acc>(weight), acc::<E::Acc>(bias));
    let (mut y, mut dx) = (vec![E::default(); x.len()], vec![E::default(); x.len()]);
    let mut stats = vec![E::Acc::ZERO; x.len() / cols * N::STATS];
    // The sums start at one, to check that the pass adds to them.
    let (mut dw, mut db) = (vec![E::Acc::ONE; w.len()], vec![E::Acc::ONE; b.len()]);
    forward::<E>(&RowNormFns::of::<N>(), cols, x, &w, &b, E::Acc::from_f64(eps), &mut y, &mut stats);
    backward::<E>(&RowNormFns::of::<N>(), cols, dy, x, &w, E::Acc::from_f64(eps), &stats, &mut dx, &mut dw, &mut db);

    let (mut want_dw, mut want_db, mut sum_error) = (vec![1.0; w.len()], vec![1.0; b.len()], E::UNIT_ACC);
    for (r, (x, dy)) in x.chunks(cols).zip(dy.chunks(cols)).enumerate() {
        let x: Vec<f64> = x.iter().map(|v| v.value()).collect();
        let dy: Vec<f64> = dy.iter().map(|v| v.value()).collect();
        let weight_of = |i: usize| if weight.len() == 1 { weight[0] } else { *weight.get(i).unwrap_or(&1.0) };
        let (normalised, divisor) = (formula.normalised)(&x, eps);
        let g: Vec<f64> = dy.iter().enumerate().map(|(i, d)| weight_of(i) * d).collect();
        let want_dx = (formula.dx)(&x, &g, eps);
        // The unit covers the rounding of sums, which grows as √cols, and of x̂ for numbers as large as x was before
        // centring.
        let unit = 4.0 * E::UNIT_ACC * (cols as f64).sqrt();
        let spread = largest(&normalised).max(1.0);
        let error = unit * (largest(&normalised) + largest(&x) / divisor);
        for i in 0..cols {
            let want = normalised[i] * weight_of(i) + bias.get(i).unwrap_or(&0.0);
            near(
                y[r * cols + i],
                want,
                error * weight_of(i) + E::UNIT_ACC * want.abs(),
                format_args!("y {r} {i} of {cols}"),
            );
            let error_dx = 4.0 * spread * largest(&g) / divisor * (error * spread + unit);
            near(dx[r * cols + i], want_dx[i], error_dx, format_args!("dx {r} {i} of {cols}"));
            match want_dw.len() {
                0 => {}
                1 => want_dw[0] += dy[i] * normalised[i],
                _ => want_dw[i] += dy[i] * normalised[i],
            }
            if let Some(db) = want_db.get_mut(i) {
                *db += dy[i];
            }
        }
        let terms = if weight.len() == 1 { cols as f64 } else { 1.0 };
        sum_error += terms * largest(&dy) * (error + 8.0 * spread * E::UNIT_ACC);
    }
    for (got, want) in dw.iter().zip(&want_dw).chain(db.iter().zip(&want_db)) {
        assert!((got.to_f64() - want).abs() <= sum_error, "{cols}: {} for {want} ± {sum_error:e}", got.to_f64());
    }
}

/// Returns max |v|.
fn largest(v: &[f64]) -> f64 {
    v.iter().fold(0.0, |m, v| m.max(v.abs()))
}

/// Asserts that `got` is `want` within `error` plus twice the rounding to E, or that both overflow with the same
/// sign.
pub fn near<E: Tested>(got: E, want: f64, error: f64, what: std::fmt::Arguments) {
    let (got, error) = (got.value(), error + 2.0 * E::UNIT * want.abs() + E::SMALLEST);
    let overflow = got.is_infinite() && got * want > 0.0 && want.abs() + error > E::LARGEST;
    assert!(overflow || (got - want).abs() <= error, "{what}: {got:e}, not {want:e} ± {error:e}");
}

/// Checks y(2^k·x) = y(x) at ε = 0, for k at which squares overflow and k at which they underflow.
pub fn check_scale_invariance<N: RowNorm>() {
    for cols in WIDTHS.into_iter().filter(|c| *c > 1) {
        for mean in [0.0, 1.0] {
            let x = numbers::<f64>(cols, 5, 1.0, mean);
            let run = |power: i32| {
                let x: Vec<f64> = x.iter().map(|v| v * 2f64.powi(power)).collect();
                let (mut y, mut stats) = (vec![0.0; cols], vec![0.0; N::STATS]);
                forward::<f64>(&RowNormFns::of::<N>(), cols, &x, &[], &[], 0.0, &mut y, &mut stats);
                let mut dx = vec![0.0; cols];
                backward::<f64>(&RowNormFns::of::<N>(), cols, &x, &x, &[], 0.0, &stats, &mut dx, &mut [], &mut []);
                assert!(dx.iter().all(|v| v.is_finite()));
                y
            };
            let run32 = |power: i32| {
                let x: Vec<f32> = x.iter().map(|v| (*v as f32) * 2f32.powi(power)).collect();
                let (mut y, mut stats) = (vec![0.0; cols], vec![0.0; N::STATS]);
                forward::<f32>(&RowNormFns::of::<N>(), cols, &x, &[], &[], 0.0, &mut y, &mut stats);
                y
            };
            for power in [600, -600] {
                for (a, b) in run(0).iter().zip(run(power)) {
                    assert!((a - b).abs() <= 1e-14 * (cols as f64).sqrt(), "{cols} 2^{power}: {a} {b}");
                }
            }
            for power in [116, 70, -70, -100] {
                for (a, b) in run32(0).iter().zip(run32(power)) {
                    assert!((a - b).abs() <= 1e-6 * (cols as f32).sqrt(), "{cols} 2^{power}: {a} {b}");
                }
            }
        }
    }
}

/// Checks that the bits depend neither on the splitting of rows nor on the level (among those with fused
/// multiply-add), and that passes without rows or columns do nothing.
pub fn check_splitting<N: RowNorm>() {
    for cols in WIDTHS {
        let (x, dy) = (numbers::<bf16>(5 * cols, 1, 1.0, 0.3), numbers::<bf16>(5 * cols, 2, 1.0, 0.0));
        let w = vec![1.5f32; cols];
        let mut runs = Vec::new();
        for level in Level::ALL {
            force(Some(level));
            for rows in [5, 1] {
                let (mut y, mut dx) = (vec![bf16::ZERO; 5 * cols], vec![bf16::ZERO; 5 * cols]);
                let (mut dw, n) = (vec![0.0; cols], rows * cols);
                for at in (0..5 * cols).step_by(n) {
                    let mut stats = vec![0.0; rows * N::STATS];
                    let (x, dy) = (&x[at..at + n], &dy[at..at + n]);
                    forward::<bf16>(&RowNormFns::of::<N>(), cols, x, &w, &[], 1e-5, &mut y[at..at + n], &mut stats);
                    let dx = &mut dx[at..at + n];
                    backward::<bf16>(&RowNormFns::of::<N>(), cols, dy, x, &w, 1e-5, &stats, dx, &mut dw, &mut []);
                }
                runs.push((level == Level::Baseline, (y, dx, dw)));
            }
        }
        force(None);
        for (baseline, run) in &runs {
            assert!(runs.iter().all(|other| other.0 != *baseline || other.1 == *run), "{cols}");
        }
    }
    forward::<f32>(&RowNormFns::of::<N>(), 0, &[], &[], &[], 1e-5, &mut [], &mut []);
    forward::<f32>(&RowNormFns::of::<N>(), 8, &[], &[], &[], 1e-5, &mut [], &mut []);
    backward::<f32>(&RowNormFns::of::<N>(), 0, &[], &[], &[], 1e-5, &[], &mut [], &mut [], &mut []);
    backward::<f32>(&RowNormFns::of::<N>(), 8, &[], &[], &[2.0], 1e-5, &[], &mut [], &mut [0.0], &mut [0.0; 8]);
}

/// Checks that a NaN makes its whole row NaN, forward and backward, and no other row.
pub fn check_nan<N: RowNorm>() {
    let x = [1.0f32, f32::NAN, 2.0, 3.0];
    let (mut y, mut stats, mut dx) = ([0.0; 4], vec![0.0; 2 * N::STATS], [0.0; 4]);
    forward::<f32>(&RowNormFns::of::<N>(), 2, &x, &[], &[], 1e-5, &mut y, &mut stats);
    backward::<f32>(&RowNormFns::of::<N>(), 2, &[1.0; 4], &x, &[], 1e-5, &stats, &mut dx, &mut [], &mut []);
    assert!(y[..2].iter().chain(&dx[..2]).all(|v| v.is_nan()), "{y:?} {dx:?}");
    assert!(y[2..].iter().chain(&dx[2..]).all(|v| v.is_finite()), "{y:?} {dx:?}");
}

#[test]
fn no_norm_is_the_identity() {
    check::<NoNorm>(&Formula { normalised: |x, _| (x.to_vec(), 1.0), dx: |_, g, _| g.to_vec() });
    check_splitting::<NoNorm>();
}

/// Returns `n` numbers that start on a cache line, as torch's tensors do.
fn aligned<E: Element>(room: &mut Vec<E>, n: usize) -> &mut [E] {
    room.resize(n + 64, E::default());
    let start = room.as_ptr().align_offset(64);
    &mut room[start..start + n]
}

/// Checks results so large that they bypass the caches: with whole groups and blocks, with spare rows, and with rows
/// that end inside a block.
fn check_streamed<E: Tested>() {
    for level in Level::ALL {
        force(Some(level));
        for (extra, cols) in [(0, 128), (1, 128), (0, 48), (3, 48)] {
            // A result of 4 MiB bypasses the caches; one more group makes it larger.
            let rows = (4 << 20) / size_of::<E>() / cols / GROUP * GROUP + GROUP + extra;
            let (x, mut y, mut dx) = (numbers::<E>(rows * cols, 1, 1.0, 0.0), Vec::new(), Vec::new());
            let (y, dx) = (aligned(&mut y, x.len()), aligned(&mut dx, x.len()));
            forward::<E>(&RowNormFns::of::<NoNorm>(), cols, &x, &[], &[], E::Acc::ZERO, y, &mut []);
            backward::<E>(&RowNormFns::of::<NoNorm>(), cols, &x, &x, &[], E::Acc::ZERO, &[], dx, &mut [], &mut []);
            assert!(*y == *x && *dx == *x, "{level:?} {rows}×{cols}");
        }
    }
    force(None);
}

#[test]
fn large_results_may_have_any_shape() {
    check_streamed::<f32>();
    check_streamed::<bf16>();
    check_streamed::<f16>();
}

#[test]
#[should_panic(expected = "takes 0, 1 or 4 coefficients, not 3")]
fn a_weight_of_another_length_is_refused() {
    forward::<f32>(&RowNormFns::of::<NoNorm>(), 4, &[0.0; 4], &[1.0; 3], &[], 1e-5, &mut [0.0; 4], &mut []);
}
