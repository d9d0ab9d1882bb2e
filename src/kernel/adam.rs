//! Adam over flat buffers in one pass, and the two reductions that go before it.
//!
//! > g = grad_scale·gradient,  m ← β₁m + (1−β₁)g,  v ← β₂v + (1−β₂)g²
//! > p ← (1 − lr·weight_decay)·p − lr·√(1−β₂ᵗ)/(1−β₁ᵗ)·m/(√v + ε)
//!
//! t the number of this update, 1 for the first. Source: SPEC §4; Kingma & Ba 2015 in the form at the end of §2 (fairseq's),
//! whose ε is not bias-corrected; decoupled weight decay of Loshchilov & Hutter 2019. The gradients are zeroed on the
//! way: backward passes accumulate into them, and a separate pass would cost a sixth more traffic.

use crate::cpu::Accumulator;
use crate::multiversion;

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
    fn step_size(&self) -> f64 {
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

/// Whether any value is infinite or NaN.
pub fn any_non_finite<A: Accumulator>(x: &[A]) -> bool {
    let mut found = false;
    find_non_finite(x, &mut found);
    found
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

multiversion! {
    fn find_non_finite[A: Accumulator](x: &[A], found: &mut bool) {
        // x − x is 0 or NaN. A count of the zeros is an integer sum, which vectorises as it stands.
        *found = x.chunks(1024).any(|x| {
            let finite: u32 = x.iter().map(|x| (*x - *x == A::ZERO) as u32).sum();
            finite as usize != x.len()
        });
    }
}
