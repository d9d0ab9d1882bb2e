//! Adam over flat buffers in one pass, and the reduction that goes before it.
//!
//! > g = grad_scale·gradient,  m ← β₁m + (1−β₁)g,  v ← β₂v + (1−β₂)g²
//! > p ← (1 − lr·weight_decay)·p − lr·√(1−β₂ᵗ)/(1−β₁ᵗ)·m/(√v + ε)
//!
//! t the number of this update, 1 for the first. Source: docs/spec.md §4.9; Kingma & Ba 2015 in the form at the end
//! of §2 (fairseq's), whose ε is not bias-corrected; decoupled weight decay of Loshchilov & Hutter 2019. The gradients
//! are zeroed on the way: backward passes accumulate into them, and a separate pass would cost a sixth more traffic.

use crate::cpu::Accumulator;
use crate::cuda::{Program, CHUNK, PRELUDE};
use crate::multiversion;

pub mod call;

/// The same for a GPU.
pub static PROGRAM: Program = Program { name: "adam.cu", files: &[PRELUDE, CHUNK, include_str!("adam.cu")] };

/// One update's settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    /// t, from 1.
    pub step: u64,
}

impl Default for Adam {
    fn default() -> Self {
        Adam { lr: 1e-3, beta1: 0.9, beta2: 0.98, eps: 1e-8, weight_decay: 0.0, step: 1 }
    }
}

impl Adam {
    /// lr·√(1−β₂ᵗ)/(1−β₁ᵗ), in f64: 1 − 0.98 in f32 is off by 1e-6.
    pub fn step_size(&self) -> f64 {
        let t = self.step as f64;
        self.lr * (1.0 - self.beta2.powf(t)).sqrt() / (1.0 - self.beta1.powf(t))
    }
}

multiversion! {
    /// Updates parameters `p` and moments `m`, `v` from gradients `g`, and zeroes `g`.
    ///
    /// `grad_scale` carries clipping and the loss's normaliser. Where it is not finite (a gradient was not), p, m and v
    /// stay as they are, so that the run can stop with its weights whole.
    pub fn update[A: Accumulator](adam: &Adam, grad_scale: &A, p: &mut [A], m: &mut [A], v: &mut [A], g: &mut [A]) {
        assert!(p.len() == m.len() && p.len() == v.len() && p.len() == g.len());
        if !grad_scale.to_f64().is_finite() {
            g.fill(A::ZERO);
            return;
        }
        let scale = *grad_scale;
        let [beta1, rest1] = [adam.beta1, 1.0 - adam.beta1].map(A::from_f64);
        let [beta2, rest2] = [adam.beta2, 1.0 - adam.beta2].map(A::from_f64);
        let [eps, step] = [adam.eps, adam.step_size()].map(A::from_f64);
        let keep = A::from_f64(1.0 - adam.lr * adam.weight_decay);
        for (((p, m), v), g) in p.iter_mut().zip(m).zip(v).zip(g) {
            let d = *g * scale;
            let (m1, v1) = (beta1 * *m + rest1 * d, beta2 * *v + rest2 * (d * d));
            *p = keep * *p - step * m1 / (v1.sqrt() + eps);
            (*m, *v, *g) = (m1, v1, A::ZERO);
        }
    }
}

/// Σ x², in f64: in f32 a gradient of 2e19 would overflow.
pub fn sum_of_squares<A: Accumulator>(x: &[A]) -> f64 {
    let mut total = 0.0;
    add_squares(x, &mut total);
    total
}

/// Partial sums, so that no addition waits for the one before.
const LANES: usize = 32;

multiversion! {
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

    fn noise(i: usize) -> f64 {
        ((i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as f64 / (1 << 23) as f64 - 1.0
    }

    /// Ten updates against Kingma & Ba's algorithm 1 with m̂ and v̂, whose ε is ours over √(1−β₂ᵗ).
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
                    update(&adam, &scale, &mut got_p, &mut got_m, &mut got_v, &mut g);
                    assert!(g.iter().all(|g| *g == A::ZERO));
                }
                for i in 0..n {
                    // m can cancel: its roundings are relative to √v, the size of what went in.
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
            update(&Adam::default(), &scale, &mut p, &mut m, &mut v, &mut g);
            assert_eq!((p, m, v, g), ([1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [0.0, 0.0]));
        }
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
