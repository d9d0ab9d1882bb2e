//! Adam over flat buffers in one pass, and the sum of squares for gradient clipping.
//!
//! > g = grad_scale·gradient,  m ← β₁m + (1−β₁)g,  v ← β₂v + (1−β₂)g²
//! > p ← (1 − lr·weight_decay)·p − lr·√(1−β₂ᵗ)/(1−β₁ᵗ)·m/(√v + ε)
//!
//! t is the number of this update, 1 for the first. Source: docs/spec.md §4.9; Kingma & Ba 2015 in the form at the end
//! of §2 (fairseq's), whose ε is not bias-corrected; decoupled weight decay of Loshchilov & Hutter 2019. The same pass
//! zeroes the gradients, into which backward passes accumulate; a separate pass would cost a sixth more traffic.
//!
//! Moments in bf16 are rounded stochastically, so that their expectation is exact: with rounding to nearest, v could
//! never decrease if 1 − β₂ is below 2⁻⁹.

use crate::cpu::philox::{self, Stream};
use crate::cpu::{Accumulator, Element};
use crate::cuda::{Program, CHUNK, PHILOX, PRELUDE};
use crate::multiversion;
use half::bf16;

pub mod call;

/// The CUDA program of this kernel.
pub static PROGRAM: Program =
    Program { name: "adam.cu", files: &[PRELUDE, CHUNK, PHILOX, include_str!("adam.cu")], structs: call::STRUCTS };

/// The settings of one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    /// The number t of the update, from 1.
    pub step: u64,
}

impl Default for Adam {
    fn default() -> Self {
        Adam { lr: 1e-3, beta1: 0.9, beta2: 0.98, eps: 1e-8, weight_decay: 0.0, step: 1 }
    }
}

impl Adam {
    /// Returns the step size lr·√(1−β₂ᵗ)/(1−β₁ᵗ), where t is `step`. It is computed in f64, because in f32 a
    /// difference like 1 − 0.98 is off by 1e-6.
    pub fn step_size(&self) -> f64 {
        let t = self.step as f64;
        self.lr * (1.0 - self.beta2.powf(t)).sqrt() / (1.0 - self.beta1.powf(t))
    }
}

/// A type in which Adam's moments are stored.
pub trait Moment<A>: Element<Acc = A> {
    /// True if [`Moment::rounded`] uses its random bits.
    const IS_ROUNDED: bool;
    /// Rounds `value` stochastically with 16 random bits. A number between two neighbours of this type becomes the
    /// larger one (in magnitude) with a probability equal to its share of the distance between them.
    fn rounded(value: A, bits: u16) -> Self;
}

impl<A: Accumulator> Moment<A> for A {
    const IS_ROUNDED: bool = false;
    /// Returns the value itself: a moment of the computing type is not rounded.
    #[inline(always)]
    fn rounded(value: A, _: u16) -> Self {
        value
    }
}

impl Moment<f32> for bf16 {
    const IS_ROUNDED: bool = true;
    /// Rounds stochastically to bf16, which is the upper half of an f32.
    #[inline(always)]
    fn rounded(value: f32, bits: u16) -> Self {
        // The random bits are added to the lower half, which the shift then drops. The sum carries into the upper half
        // with the right probability.
        bf16::from_bits((value.to_bits().wrapping_add(u32::from(bits)) >> 16) as u16)
    }
}

/// The source of the random bits for an update's roundings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rounding {
    pub seed: u64,
    /// The number t of the update.
    pub update: u32,
    /// The index of the buffer's first element among all elements of the run.
    pub first: usize,
}

/// The number of elements whose random bits are in one row of the stream. A row has one half word per element for m,
/// then one per element for v.
pub const ROW: usize = 1024;
/// The number by which Adam's random stream differs from those of dropout. Each dropout layer of a model has a site
/// number, counted from 0, and these stay below this one.
pub const SITE: u16 = u16::MAX;

impl Rounding {
    /// Returns the random stream of this update. It is not split by micro-batch, so that number is 0.
    fn stream(&self) -> Stream {
        Stream { seed: self.seed, update: self.update, micro_batch: 0, site: SITE }
    }
}

multiversion! {
    /// Updates parameters `p` and moments `m`, `v` from gradients `g`, and zeroes `g`. All have one length, and
    /// `rounding` says from which place of the random stream their roundings come.
    ///
    /// `grad_scale` combines clipping and the loss's normaliser. If it is not finite, because a gradient is not finite,
    /// p, m and v do not change, so that the run can stop with its weights intact.
    pub fn update[A: Accumulator, M: Moment<A>](
        adam: &Adam, grad_scale: &A, rounding: &Rounding, p: &mut [A], m: &mut [M], v: &mut [M], g: &mut [A],
    ) {
        assert!(p.len() == m.len() && p.len() == v.len() && p.len() == g.len());
        if !grad_scale.to_f64().is_finite() {
            g.fill(A::ZERO);
            return;
        }
        let scale = *grad_scale;
        let [beta1, rest1] = [adam.beta1, 1.0 - adam.beta1].map(A::from_f64);
        let [beta2, rest2] = [adam.beta2, 1.0 - adam.beta2].map(A::from_f64);
        let [eps, step] = [adam.eps, adam.step_size()].map(A::from_f64);
        // Decoupled weight decay multiplies the parameters by this factor.
        let keep = A::from_f64(1.0 - adam.lr * adam.weight_decay);
        let (stream, mut bits, mut start) = (rounding.stream(), [0; 2 * ROW], 0);
        // Element i of the buffer is element `rounding.first` + i of the run. Row r of the stream has the random bits
        // of the run's elements from r·ROW on. Each pass updates the elements of one row, beginning with element
        // `start`.
        while start < p.len() {
            let (row, column) = ((rounding.first + start) / ROW, (rounding.first + start) % ROW);
            let part = start..p.len().min(start + ROW - column);
            if M::IS_ROUNDED {
                philox::fill(&stream, row, 1, 2 * ROW, &mut bits);
            }
            let (m_bits, v_bits) = bits.split_at(ROW);
            let bits = m_bits[column..].iter().zip(&v_bits[column..]);
            let moments = m[part.clone()].iter_mut().zip(&mut v[part.clone()]);
            let parameters_and_gradients = p[part.clone()].iter_mut().zip(&mut g[part.clone()]);
            for (((p, g), (m, v)), (m_bits, v_bits)) in parameters_and_gradients.zip(moments).zip(bits) {
                let scaled = *g * scale;
                let new_m = beta1 * m.load() + rest1 * scaled;
                let new_v = beta2 * v.load() + rest2 * (scaled * scaled);
                *p = keep * *p - step * new_m / (new_v.sqrt() + eps);
                (*m, *v, *g) = (M::rounded(new_m, *m_bits), M::rounded(new_v, *v_bits), A::ZERO);
            }
            start = part.end;
        }
    }
}

/// Returns Σ x². The sum is in f64, because the square of a gradient of 2e19 would overflow an f32.
pub fn sum_of_squares<A: Accumulator>(x: &[A]) -> f64 {
    let mut total = 0.0;
    add_squares(x, &mut total);
    total
}

/// The number of partial sums. They are independent, so that no addition has to wait for the one before.
const LANES: usize = 32;

multiversion! {
    /// Adds Σ x² to `total`.
    fn add_squares[A: Accumulator](x: &[A], total: &mut f64) {
        let mut sums = [0.0; LANES];
        let (chunks, rest) = x.as_chunks::<LANES>();
        for x in chunks {
            for l in 0..LANES {
                let v = x[l].to_f64();
                sums[l] += v * v;
            }
        }
        for (sum, x) in sums.iter_mut().zip(rest) {
            *sum += x.to_f64() * x.to_f64();
        }
        *total += sums.iter().sum::<f64>();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::{force, Level};

    /// Returns a number in [−1, 1) that looks random and depends only on i.
    fn noise(i: usize) -> f64 {
        // The product scrambles the bits of i; its upper 24 bits are the number.
        ((i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as f64 / (1 << 23) as f64 - 1.0
    }

    /// The random bits of a run's first update, for a buffer that begins with the run's first element.
    const FIRST: Rounding = Rounding { seed: 5, update: 1, first: 0 };

    /// Compares ten updates with Kingma & Ba's algorithm 1, whose formula uses m̂ and v̂; its ε is ours divided by
    /// √(1−β₂ᵗ). `unit` is the rounding of A.
    fn agree<A: Accumulator>(unit: f64) {
        for level in Level::ALL {
            force(Some(level));
            for n in [0, 1, 2, 7, 16, 31, 123, 1000] {
                let start: Vec<f64> = (0..n).map(|i| A::from_f64(noise(i)).to_f64()).collect();
                let (mut p, mut m, mut v) = (start, vec![0.0; n], vec![0.0; n]);
                let mut got_p: Vec<A> = p.iter().map(|p| A::from_f64(*p)).collect();
                let (mut got_m, mut got_v) = (vec![A::ZERO; n], vec![A::ZERO; n]);
                for step in 1..=10 {
                    let lr = 0.01 / step as f64;
                    let adam = Adam { lr, beta1: 0.9, beta2: 0.98, eps: 1e-8, weight_decay: 0.1, step };
                    let scale = A::from_f64(0.3);
                    // The gradients' sizes run from 1e-3 to 1e3.
                    let mut g: Vec<A> = (0..n)
                        .map(|i| A::from_f64(noise(i + 1000 * step as usize) * 10f64.powi(i as i32 % 7 - 3)))
                        .collect();
                    for i in 0..n {
                        let d = g[i].to_f64() * scale.to_f64();
                        m[i] = 0.9 * m[i] + 0.1 * d;
                        v[i] = 0.98 * v[i] + 0.02 * d * d;
                        let t = step as i32;
                        let (m_hat, v_hat) = (m[i] / (1.0 - 0.9f64.powi(t)), v[i] / (1.0 - 0.98f64.powi(t)));
                        p[i] -= lr * 0.1 * p[i];
                        p[i] -= lr * m_hat / (v_hat.sqrt() + 1e-8 / (1.0 - 0.98f64.powi(t)).sqrt());
                    }
                    update(&adam, &scale, &FIRST, &mut got_p, &mut got_m, &mut got_v, &mut g);
                    assert!(g.iter().all(|g| *g == A::ZERO));
                }
                for i in 0..n {
                    // m can cancel, so its rounding errors are relative to √v, the size of its terms.
                    let size = v[i].sqrt() + 1e-30;
                    assert!((got_v[i].to_f64() - v[i]).abs() <= 40.0 * unit * v[i], "v[{i}] of {n}");
                    assert!((got_m[i].to_f64() - m[i]).abs() <= 400.0 * unit * size, "m[{i}] of {n}");
                    assert!((got_p[i].to_f64() - p[i]).abs() <= 40.0 * unit, "p[{i}] of {n}");
                }
            }
        }
        force(None);
    }

    #[test]
    fn agrees_with_the_algorithm() {
        agree::<f32>(f32::EPSILON as f64);
        agree::<f64>(f64::EPSILON);
    }

    #[test]
    fn a_non_finite_scale_leaves_the_weights_whole() {
        for scale in [f32::NAN, f32::INFINITY] {
            let (mut p, mut m, mut v, mut g) = ([1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, f32::NAN]);
            update(&Adam::default(), &scale, &FIRST, &mut p, &mut m, &mut v, &mut g);
            assert_eq!((p, m, v, g), ([1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [0.0, 0.0]));
        }
    }

    /// Returns m, v and p after one update of `n` elements that are all equal, with bf16 moments; `first` is as in
    /// [`Rounding`].
    fn rounded(n: usize, first: usize, update: u32) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
        let (mut m, mut v) = (vec![bf16::from_f32(0.7); n], vec![bf16::from_f32(0.3); n]);
        let (mut p, mut g) = (vec![1.0f32; n], vec![0.1f32; n]);
        let rounding = Rounding { seed: 5, update, first };
        super::update(&Adam { beta2: 0.999, ..Adam::default() }, &1.0, &rounding, &mut p, &mut m, &mut v, &mut g);
        assert!(g.iter().all(|g| *g == 0.0));
        (m.iter().map(|m| m.to_f32()).collect(), v.iter().map(|v| v.to_f32()).collect(), p)
    }

    #[test]
    fn bf16_moments_are_right_in_the_mean() {
        let n = 1 << 16;
        for level in Level::ALL {
            force(Some(level));
            let (m, v, p) = rounded(n, 0, 1);
            let [old_m, old_v] = [0.7, 0.3].map(|v| f64::from(bf16::from_f32(v).to_f32()));
            for (moments, exact) in [(m, 0.9 * old_m + 0.1 * 0.1), (v, 0.999 * old_v + 0.001 * 0.01)] {
                let mean = moments.iter().map(|v| f64::from(*v)).sum::<f64>() / n as f64;
                // Rounding gives one of two neighbours in bf16, each within 1/128; the mean's bound is five standard
                // deviations.
                let unit = exact / 128.0;
                assert!(moments.iter().all(|v| (f64::from(*v) - exact).abs() < unit));
                assert!((mean - exact).abs() < 5.0 * 0.5 * unit / (n as f64).sqrt(), "{mean} for {exact}");
            }
            // The step uses the moments before they are rounded.
            assert!(p.iter().all(|parameter| *parameter == p[0]));
        }
        force(None);
    }

    #[test]
    fn roundings_are_a_number_s_place_and_update() {
        // These are 5000 elements from place 100 on, in update 7. Random bits of a row end at place 1024, which is
        // element 924 here.
        let whole = rounded(5000, 100, 7);
        assert_ne!(whole.0, whole.1);
        for (start, end) in [(0, 1), (900, 1000), (923, 925), (924, 3000), (4999, 5000)] {
            let part = rounded(end - start, 100 + start, 7);
            assert_eq!((&part.0[..], &part.1[..]), (&whole.0[start..end], &whole.1[start..end]), "{start}");
        }
        assert_ne!(rounded(5000, 100, 8).0, whole.0);
        // Other places give other roundings, whether one element or one row of random bits apart.
        let differing = |x: &[f32], y: &[f32]| x.iter().zip(y).filter(|(x, y)| x != y).count();
        assert!(differing(&rounded(5000, 101, 7).0, &whole.0) > 1000);
        assert!(differing(&whole.0[1024..], &whole.0[..3976]) > 1000);
    }

    #[test]
    fn squares_are_summed_without_overflow() {
        for level in Level::ALL {
            force(Some(level));
            for n in [0, 1, 31, 32, 33, 1000] {
                let x: Vec<f32> = (0..n).map(|i| noise(i) as f32).collect();
                let want: f64 = x.iter().map(|x| *x as f64 * *x as f64).sum();
                assert!((sum_of_squares(&x) - want).abs() <= 1e-12 * want);
            }
            assert_eq!(sum_of_squares(&[1e30f32; 3]), 3.0 * (1e30f32 as f64).powi(2));
            assert_eq!(sum_of_squares(&[3.0f64, 4.0]), 25.0);
            assert!(sum_of_squares(&[0.0f32, f32::NAN]).is_nan());
        }
        force(None);
    }
}
