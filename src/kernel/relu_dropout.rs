//! ReLU and dropout in one pass.
//!
//! > y = M∘max(x, 0),  dx = dy/(1 − p) where y ≠ 0, else 0
//!
//! M holds dropout's factors, 0 or 1/(1 − p), from [`Dropout`]'s stream at element (row, column). The backward pass
//! needs only y to know which elements were kept: as 1/(1 − p) ≥ 1, no positive x becomes zero, in any storage type.
//! Source: docs/spec.md §4.3, §4.5. A NaN in x is a NaN in y, dropped or not, and a NaN in y is a NaN in dx.

use crate::cpu::philox::{self, Dropout};
use crate::cpu::{Accumulator, Element};
use crate::cuda::{Program, CHUNK, PHILOX, PRELUDE};
use crate::multiversion;

pub mod call;

/// The CUDA program of this kernel.
pub static PROGRAM: Program = Program {
    name: "relu_dropout.cu",
    files: &[PRELUDE, CHUNK, PHILOX, include_str!("relu_dropout.cu")],
    structs: call::STRUCTS,
};

/// The number of random half words drawn at a time: 8 KiB, a sixth of the first-level cache.
const DRAWN: usize = 4096;

multiversion! {
    /// Computes y = dropout(max(x, 0)). Both consist of whole rows of `cols` columns; `first_row` is the index of their
    /// first row in dropout's random stream. Without `dropout` nothing is dropped or scaled.
    pub fn forward[E: Element](cols: usize, dropout: Option<&Dropout>, first_row: usize, x: &[E], y: &mut [E]) {
        assert_eq!(x.len(), y.len());
        let Some(dropout) = dropout else {
            for (y, x) in y.iter_mut().zip(x) {
                *y = E::store(relu(x.load()));
            }
            return;
        };
        if x.is_empty() {
            return;
        }
        assert!(cols > 0 && x.len().is_multiple_of(cols), "{} elements in rows of {cols}", x.len());
        // `kept` is the factor of elements that are not dropped; a row of the stream has `per_row` half words.
        let (kept, per_row) = (E::Acc::from_f64(dropout.scale), philox::padded(cols));
        // The random numbers of this many rows are drawn together.
        let rows = (DRAWN / per_row).max(1);
        let mut random = philox::scratch(rows, cols);
        for (i, (x, y)) in x.chunks(rows * cols).zip(y.chunks_mut(rows * cols)).enumerate() {
            philox::fill(&dropout.stream, first_row + i * rows, x.len() / cols, cols, &mut random);
            for ((x, y), random) in x.chunks(cols).zip(y.chunks_mut(cols)).zip(random.chunks(per_row)) {
                for ((x, y), random) in x.iter().zip(y).zip(random) {
                    let factor = if *random >= dropout.threshold { kept } else { E::Acc::ZERO };
                    *y = E::store(relu(x.load()) * factor);
                }
            }
        }
    }
}

multiversion! {
    /// Computes dx = scale·dy where y ≠ 0, else 0, from the forward pass's y. It uses only the scale of `dropout`. A
    /// NaN in y is a NaN in dx.
    pub fn backward[E: Element](dropout: Option<&Dropout>, y: &[E], dy: &[E], dx: &mut [E]) {
        assert!(y.len() == dy.len() && y.len() == dx.len());
        let scale = dropout.map_or(E::Acc::ONE, |d| E::Acc::from_f64(d.scale));
        for ((y, dy), dx) in y.iter().zip(dy).zip(dx) {
            let (y, scaled) = (y.load(), dy.load() * scale);
            let gradient = if y == E::Acc::ZERO { E::Acc::ZERO } else { scaled };
            #[allow(clippy::eq_op)]
            let is_nan = y != y; // only a NaN differs from itself
            *dx = E::store(if is_nan { y } else { gradient });
        }
    }
}

/// Returns max(x, 0), and NaN for NaN, for which the comparison is false.
#[inline(always)]
fn relu<A: Accumulator>(x: A) -> A {
    if x <= A::ZERO {
        A::ZERO
    } else {
        x
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::philox::Stream;
    use crate::cpu::simd::{force, Level};
    use half::{bf16, f16};

    const WIDTHS: [usize; 10] = [1, 2, 7, 16, 31, 123, 128, 512, 1000, 5000];

    /// Returns dropout with the rate 0.3.
    fn dropout() -> Dropout {
        Dropout::new(0.3, Stream { seed: 77, update: 2, micro_batch: 0, site: 4 }).unwrap()
    }

    /// Returns n numbers in [−1, 1) that look random.
    fn values<E: Element>(n: usize) -> Vec<E> {
        // The product scrambles the bits of i; its upper 24 bits are the number.
        let noise =
            |i: usize| ((i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as f64 / (1 << 23) as f64 - 1.0;
        (0..n).map(|i| E::store(E::Acc::from_f64(noise(i)))).collect()
    }

    /// Checks every element of y and dx, bit for bit, for each instruction set and width. The expected value multiplies
    /// by the factor that the element's own random number gives.
    fn agree<E: Element>() {
        for level in Level::ALL {
            force(Some(level));
            for cols in WIDTHS {
                let (rows, first) = (11, 1_000_003);
                let x = values::<E>(rows * cols);
                let dy = values::<E>(2 * rows * cols).split_off(rows * cols);
                for dropout in [None, Some(&dropout())] {
                    let mut y = x.clone();
                    forward(cols, dropout, first, &x, &mut y);
                    let mut dx = x.clone();
                    backward(dropout, &y, &dy, &mut dx);
                    for r in 0..rows {
                        let mut random = philox::scratch(1, cols);
                        philox::fill(&dropout.map_or(Stream::default(), |d| d.stream), first + r, 1, cols, &mut random);
                        for (c, random) in random[..cols].iter().enumerate() {
                            let i = r * cols + c;
                            let kept = dropout.is_none_or(|d| *random >= d.threshold);
                            let passes = kept && x[i].load() > E::Acc::ZERO;
                            let scale = E::Acc::from_f64(dropout.map_or(1.0, |d| d.scale));
                            let want = |v: E| E::store(if passes { v.load() * scale } else { E::Acc::ZERO }).load();
                            let at = format!("{level:?} {cols} columns, row {r} column {c}");
                            assert!(y[i].load() == want(x[i]), "{at}: forward");
                            assert!(dx[i].load() == want(dy[i]), "{at}: backward");
                        }
                    }
                }
            }
        }
        force(None);
    }

    #[test]
    fn agrees_with_the_definition() {
        agree::<f32>();
        agree::<f64>();
        agree::<bf16>();
        agree::<f16>();
    }

    #[test]
    fn the_expectation_is_kept() {
        let (x, mut y) = (vec![1.0f32; 1 << 18], vec![0.0; 1 << 18]);
        forward(512, Some(&dropout()), 0, &x, &mut y);
        let mean = y.iter().map(|y| *y as f64).sum::<f64>() / y.len() as f64;
        // The mean's standard deviation is √(p/(1−p))/2⁹ = 0.0013; the bound is five of them.
        assert!((mean - 1.0).abs() < 0.0065, "{mean}");
    }

    #[test]
    fn any_split_into_rows_gives_the_same() {
        let (cols, d) = (123, dropout());
        let x = values::<f32>(40 * cols);
        let (mut whole, mut parts) = (x.clone(), x.clone());
        forward(cols, Some(&d), 5, &x, &mut whole);
        for (i, (x, y)) in x.chunks(7 * cols).zip(parts.chunks_mut(7 * cols)).enumerate() {
            forward(cols, Some(&d), 5 + 7 * i, x, y);
        }
        assert_eq!(whole, parts);
    }

    #[test]
    fn not_a_number_passes_through() {
        for d in [None, Some(&dropout())] {
            let (mut y, mut dx) = ([0.0f32; 24], [0.0f32; 24]);
            forward(24, d, 0, &[f32::NAN; 24], &mut y);
            backward(d, &y, &[1.0; 24], &mut dx);
            assert!(y.iter().chain(&dx).all(|v| v.is_nan()));
        }
    }

    #[test]
    fn zeros_infinities_and_nothing() {
        let x = [0.0f32, -0.0, f32::NEG_INFINITY, f32::INFINITY, f32::MIN_POSITIVE / 2.0];
        let mut y = x;
        forward(5, None, 0, &x, &mut y);
        assert_eq!(y.map(f32::to_bits), [0.0, 0.0, 0.0, f32::INFINITY, x[4]].map(f32::to_bits));
        forward::<f32>(7, Some(&dropout()), 0, &[], &mut []);
        forward::<f32>(0, Some(&dropout()), 0, &[], &mut []);
        backward::<f32>(None, &[], &[], &mut []);
    }

    #[test]
    #[should_panic(expected = "rows of 4")]
    fn half_a_row_is_refused() {
        forward(4, Some(&dropout()), 0, &[1.0f32; 6], &mut [0.0; 6]);
    }
}
