//! The read of hyper-connections whose gates are functions of all streams together, and its gradient.
//!
//! > m = r·W vec(H),  x = Σ_i p_i h_i,  r = 1/√(mean vec(H)² + ε) or 1/max(‖vec(H)‖, ε)
//!
//! H has the n streams h_i of a position, d numbers each. p depends on m (model/joint_read.rs). With dh′, the gradient that
//! the sublayer's write gives to the streams:
//!
//! > dp_i = ⟨dx, h_i⟩,  dh_i = dh′_i + (r·Wᵀdm)_i + p_i dx + c h_i,  c = −⟨dm, m⟩ r²·(1/nd or 1; 0 where the norm is below ε)
//!
//! So the streams' gradient is written once; autograd would add up three tensors. Sums are in f32 (f64 for f64).

use super::rows::magnitude;
use super::weighted_rows::{combine, combine_both, dot, dots};
use crate::cpu::memory::collected;
use crate::cpu::{Accumulator, Element};
use crate::multiversion;

pub mod call;

/// The size of vec(H) by which W vec(H) is divided, with its ε.
#[derive(Clone, Copy, Debug)]
pub enum Divisor {
    /// √(mean vec(H)² + ε)
    RootMeanSquare(f64),
    /// max(‖vec(H)‖, ε)
    Norm(f64),
}

/// The results of a read, for each of its positions.
pub struct JointResults<'a, E: Element> {
    /// x, (positions, d).
    pub x: &'a mut [E],
    /// m, (positions, rows of W).
    pub mixes: &'a mut [E::Acc],
    /// σ(s m₀ + b), (positions, n). p is larger by its ε.
    pub sigmoids: &'a mut [E::Acc],
    /// r.
    pub scales: &'a mut [E::Acc],
    /// c/⟨dm, m⟩.
    pub slopes: &'a mut [E::Acc],
}

multiversion! {
    /// Reads the streams `h` (positions, n, d). `weight` has rows of n·d numbers, `bias` n numbers.
    pub fn forward[isa S][E: Element](
        h: &[E], weight: &[E::Acc], scale: E::Acc, bias: &[E::Acc], eps: E::Acc, by: Divisor, to: JointResults<E>,
    ) {
        let JointResults { x, mixes, sigmoids, scales, slopes } = to;
        let n = bias.len();
        let (d, k) = (x.len() / scales.len(), mixes.len() / scales.len());
        let rows = h.chunks_exact(n * d).zip(x.chunks_exact_mut(d)).zip(mixes.chunks_exact_mut(k));
        let sizes = scales.iter_mut().zip(slopes);
        for (((h, x), mixes), (sigmoids, (r, slope))) in rows.zip(sigmoids.chunks_exact_mut(n).zip(sizes)) {
            let squares = dot::<E, E, S>(h, h);
            (*r, *slope) = match squares == E::Acc::from_f64(f64::INFINITY) {
                true => read_large(h, weight, by, mixes),
                false => {
                    let (r, slope) = of_size(by, squares, n * d);
                    dots::<E, S>(h, weight, mixes);
                    mixes.iter_mut().for_each(|m| *m = *m * r);
                    (r, slope)
                }
            };
            for ((sigmoid, m), b) in sigmoids.iter_mut().zip(&*mixes).zip(bias) {
                *sigmoid = E::Acc::ONE / (E::Acc::ONE + (-(*m * scale + *b)).exp());
            }
            combine::<E, S>(h.chunks_exact(d).zip(sigmoids.iter().map(|sigmoid| *sigmoid + eps)), x);
        }
    }
}

/// Computes m, r and c/⟨dm, m⟩ of streams whose squares overflow, from the streams divided by their largest number.
#[cold]
#[inline(never)]
fn read_large<E: Element>(h: &[E], weight: &[E::Acc], by: Divisor, mixes: &mut [E::Acc]) -> (E::Acc, E::Acc) {
    let mut h: Vec<E::Acc> = collected(h.iter().map(|h| h.load()));
    let (largest, width) = (magnitude(&h), E::Acc::from_f64(h.len() as f64));
    h.iter_mut().for_each(|h| *h = *h / largest);
    let squares = h.iter().fold(E::Acc::ZERO, |sum, h| sum + *h * *h);
    // 1/r² is largest² times this; next to it ε is nothing.
    let (mean, share) = match by {
        Divisor::RootMeanSquare(_) => (squares / width, E::Acc::ONE / width),
        Divisor::Norm(_) => (squares, E::Acc::ONE),
    };
    let of_divided = E::Acc::ONE / mean.sqrt();
    for (m, w) in mixes.iter_mut().zip(weight.chunks_exact(h.len())) {
        *m = w.iter().zip(&h).fold(E::Acc::ZERO, |sum, (w, h)| sum + *w * *h) * of_divided;
    }
    let r = of_divided / largest;
    (r, -(r * r * share))
}

/// Returns r and c/⟨dm, m⟩ for a sum of `width` squares.
#[inline(always)]
fn of_size<A: Accumulator>(by: Divisor, squares: A, width: usize) -> (A, A) {
    let width = A::from_f64(width as f64);
    match by {
        Divisor::RootMeanSquare(eps) => {
            let r = A::ONE / (squares / width + A::from_f64(eps)).sqrt();
            (r, -(r * r / width))
        }
        Divisor::Norm(eps) => {
            let (norm, eps) = (squares.sqrt(), A::from_f64(eps));
            match norm < eps {
                true => (A::ONE / eps, A::ZERO),
                false => (A::ONE / norm, -(A::ONE / squares)),
            }
        }
    }
}

multiversion! {
    /// Computes dp (positions, n).
    pub fn share_gradients[isa S][E: Element](dx: &[E], h: &[E], n: usize, d: usize, dp: &mut [E::Acc]) {
        for ((dx, h), dp) in dx.chunks_exact(d).zip(h.chunks_exact(n * d)).zip(dp.chunks_exact_mut(n)) {
            for (h, dp) in h.chunks_exact(d).zip(dp) {
                *dp = dot::<E, E, S>(dx, h);
            }
        }
    }
}

multiversion! {
    /// Computes dh. `steps` is r·dm; `written` is dh′, if there is a write.
    pub fn stream_gradients[isa S][E: Element](
        dx: &[E], h: &[E], written: Option<&[E]>, weight: &[E::Acc], steps: &[E::Acc], p: &[E::Acc],
        c: &[E::Acc], d: usize, dh: &mut [E],
    ) {
        let positions = c.len();
        let (n, k) = (p.len() / positions, steps.len() / positions);
        for (i, dh) in dh.chunks_exact_mut(d).enumerate() {
            let (row, at) = (i * d..(i + 1) * d, i / n);
            let pairs = [(&dx[at * d..(at + 1) * d], p[i]), (&h[row.clone()], c[at])];
            let written = written.map(|written| (&written[row.clone()], E::Acc::ONE));
            // The columns of W that belong to this stream.
            let columns = i % n * d..(i % n + 1) * d;
            let products = weight.chunks_exact(n * d).map(|w| &w[columns.clone()]).zip(steps[at * k..].iter().copied());
            combine_both::<E, S>(pairs.into_iter().chain(written), products, dh);
        }
    }
}
