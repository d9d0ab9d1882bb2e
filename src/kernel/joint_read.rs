//! The read of hyper-connections whose gates are functions of all streams together, and its gradient.
//!
//! > m = r·W vec(H),  x = Σ_i p_i h_i,  r = 1/√(mean vec(H)² + ε) or 1/max(‖vec(H)‖, ε)
//!
//! H has the n streams h_i of a position, d numbers each. p depends on m (model/joint_read.rs). With dh′, the gradient
//! that the sublayer's write gives to the streams:
//!
//! > dp_i = ⟨dx, h_i⟩,  dh_i = dh′_i + (r·Wᵀdm)_i + p_i dx + c h_i,  c = −⟨dm, m⟩ r²·(1/nd or 1; 0 where the norm is below ε)
//!
//! dW = Σ r·dm vec(H)ᵀ over positions. So the streams' gradient is written once, where autograd would add up three
//! tensors, and all gradients are computed while the streams are in the first-level cache. Sums are in f32 (f64 for
//! f64).

use super::rows::magnitude;
use super::weighted_rows::{add_products, combine, combine_both, dot, dots};
use crate::cpu::memory::{collected, filled};
use crate::cpu::{Accumulator, Element};
use crate::multiversion;

pub mod call;

/// The size of vec(H), all streams of a position in one vector, by which W vec(H) is divided. The number is ε.
#[derive(Clone, Copy, Debug)]
pub enum Divisor {
    /// √(mean vec(H)² + ε)
    RootMeanSquare(f64),
    /// max(‖vec(H)‖, ε)
    Norm(f64),
}

/// The results of a read, for each of its positions.
pub struct JointResults<'a, E: Element> {
    /// The sums x, (positions, d).
    pub x: &'a mut [E],
    /// The products m = r·W vec(H), (positions, rows of W).
    pub mixes: &'a mut [E::Acc],
    /// σ(s m₀ + b), (positions, n); the gates p are larger by an ε. m₀ are the first n numbers of m.
    pub sigmoids: &'a mut [E::Acc],
    /// The factor r, the inverse size of all streams, (positions).
    pub scales: &'a mut [E::Acc],
    /// The ratio c/⟨dm, m⟩, which the backward pass needs, (positions). c is the streams' weight in their own gradient.
    pub slopes: &'a mut [E::Acc],
}

multiversion! {
    /// Reads the streams `h` (positions, n, d) and writes the results `to`. At each position, m is `weight` (k, n·d)
    /// times all streams, divided by their size `by`. The gates p are σ(scale·m₀ + bias) + `eps`, where m₀ are the
    /// first n numbers of m. x is the sum of the streams weighted by p.
    pub fn forward[isa S][E: Element](
        h: &[E], weight: &[E::Acc], scale: E::Acc, bias: &[E::Acc], eps: E::Acc, by: Divisor, to: JointResults<E>,
    ) {
        let JointResults { x, mixes, sigmoids, scales, slopes } = to;
        // There are n streams of d numbers, and W has k rows of n·d numbers.
        let n = bias.len();
        let (d, k) = (x.len() / scales.len(), mixes.len() / scales.len());
        let rows = h.chunks_exact(n * d).zip(x.chunks_exact_mut(d)).zip(mixes.chunks_exact_mut(k));
        let sizes = scales.iter_mut().zip(slopes);
        for (((h, x), mixes), (sigmoids, (r, slope))) in rows.zip(sigmoids.chunks_exact_mut(n).zip(sizes)) {
            let squares = dot::<E, E, S>(h, h);
            (*r, *slope) = match squares == E::Acc::from_f64(f64::INFINITY) {
                // The squares overflow.
                true => read_large(h, weight, by, mixes),
                false => {
                    let (r, slope) = scale_and_slope(by, squares, n * d);
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

/// Writes m = r·W vec(H) to `mixes`, for streams `h` of one position whose squares overflow, by dividing them by their
/// largest number first. Returns r, the inverse of the size `by`, and the ratio c/⟨dm, m⟩ that the backward pass needs.
#[cold]
#[inline(never)]
fn read_large<E: Element>(h: &[E], weight: &[E::Acc], by: Divisor, mixes: &mut [E::Acc]) -> (E::Acc, E::Acc) {
    let mut h: Vec<E::Acc> = collected(h.iter().map(|h| h.load()));
    let (largest, width) = (magnitude(&h), E::Acc::from_f64(h.len() as f64));
    h.iter_mut().for_each(|h| *h = *h / largest);
    let squares = h.iter().fold(E::Acc::ZERO, |sum, h| sum + *h * *h);
    // The squared size, 1/r², is largest² times `divided_size`; the ε beside it is negligible. `share` is the factor in
    // c/⟨dm, m⟩ = −r²·share.
    let (divided_size, share) = match by {
        Divisor::RootMeanSquare(_) => (squares / width, E::Acc::ONE / width),
        Divisor::Norm(_) => (squares, E::Acc::ONE),
    };
    let divided_r = E::Acc::ONE / divided_size.sqrt(); // r of the divided streams
    for (m, w) in mixes.iter_mut().zip(weight.chunks_exact(h.len())) {
        *m = w.iter().zip(&h).fold(E::Acc::ZERO, |sum, (w, h)| sum + *w * *h) * divided_r;
    }
    let r = divided_r / largest;
    (r, -(r * r * share))
}

/// Returns (r, slope) for streams of `width` numbers, whose squares add up to `squares`. r is the inverse of the size
/// `by`. The streams' gradient through r is slope·⟨dm, m⟩ times the streams, where dm is the gradient of m.
#[inline(always)]
fn scale_and_slope<A: Accumulator>(by: Divisor, squares: A, width: usize) -> (A, A) {
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

/// The inputs of a read's backward pass, for each of its positions; the last four are results of the forward pass.
#[derive(Clone, Copy)]
pub struct JointGiven<'a, E: Element> {
    /// The gradient of x, (positions, d).
    pub dx: &'a [E],
    /// The streams, (positions, n, d).
    pub h: &'a [E],
    /// The gradient dh′ that a write gives to the streams, (positions, n, d); `None` without a write.
    pub written: Option<&'a [E]>,
    /// The gradient of m where it is used beside p, (positions, rows of W).
    pub dm: Option<&'a [E::Acc]>,
    /// The products m, (positions, rows of W).
    pub mixes: &'a [E::Acc],
    /// σ(s m₀ + b), (positions, n).
    pub sigmoids: &'a [E::Acc],
    /// The factor r, (positions).
    pub scales: &'a [E::Acc],
    /// The ratio c/⟨dm, m⟩, (positions).
    pub slopes: &'a [E::Acc],
}

/// The gradients that are sums over positions.
pub struct JointSums<'a, A> {
    /// The gradient of W, (rows of W, n·d).
    pub weight: &'a mut [A],
    /// The gradient of s, one number.
    pub scale: &'a mut [A],
    /// The gradient of b, (n).
    pub bias: &'a mut [A],
}

/// The number of positions that stay in the first-level cache between the passes over them.
const BLOCK: usize = 16;

multiversion! {
    /// Computes the streams' gradient `dh` (positions, n, d), and adds the gradients of W, s and b to `sums`. `weight`
    /// is W, (rows of W, n·d). `scale` is s and `eps` the ε in the gates p = σ(s m₀ + b) + ε.
    pub fn backward[isa S][E: Element](
        given: JointGiven<E>, weight: &[E::Acc], scale: E::Acc, eps: E::Acc, dh: &mut [E], sums: JointSums<E::Acc>,
    ) {
        let JointGiven { dx, h, written, dm, mixes, sigmoids, scales, slopes } = given;
        // There are n streams of d numbers, and W has k rows of `width` = n·d numbers.
        let (n, k) = (sums.bias.len(), mixes.len() / scales.len());
        let (width, d) = (weight.len() / k, weight.len() / k / n);
        // For each position of a block, this holds dm, the gradient of the products m = r·W vec(H), and then r·dm.
        let mut steps = filled(E::Acc::ZERO, BLOCK * k);
        for first in (0..scales.len()).step_by(BLOCK) {
            let block = first..scales.len().min(first + BLOCK);
            let steps = &mut steps[..block.len() * k];
            for (position, step) in block.clone().zip(steps.chunks_exact_mut(k)) {
                let (dx, h) = (&dx[position * d..][..d], &h[position * width..][..width]);
                let (m, sigmoids) = (&mixes[position * k..][..k], &sigmoids[position * n..][..n]);
                match dm {
                    Some(dm) => step.copy_from_slice(&dm[position * k..][..k]),
                    None => step.fill(E::Acc::ZERO),
                }
                for (i, h) in h.chunks_exact(d).enumerate() {
                    // `dp` is the gradient of the gate p_i, and `dlogit` that of the sigmoid's argument s m_i + b_i.
                    let dp = dot::<E, E, S>(dx, h);
                    let dlogit = dp * sigmoids[i] * (E::Acc::ONE - sigmoids[i]);
                    sums.scale[0] += dlogit * m[i];
                    sums.bias[i] += dlogit;
                    step[i] += dlogit * scale;
                }
                let c = step.iter().zip(m).fold(E::Acc::ZERO, |sum, (step, m)| sum + *step * *m) * slopes[position];
                // From here on `step` holds r·dm.
                step.iter_mut().for_each(|step| *step = *step * scales[position]);
                for (i, dh) in dh[position * width..][..width].chunks_exact_mut(d).enumerate() {
                    let columns = i * d..(i + 1) * d;
                    // dh_i = p_i dx + c h_i + dh′_i + (r·Wᵀdm)_i
                    let pairs = [(dx, sigmoids[i] + eps), (&h[columns.clone()], c)];
                    let written = written.map(|all| (&all[position * width + i * d..][..d], E::Acc::ONE));
                    // Only these columns of W belong to stream i.
                    let products = weight.chunks_exact(width).map(|w| &w[columns.clone()]).zip(step.iter().copied());
                    combine_both::<E, S>(pairs.into_iter().chain(written), products, dh);
                }
            }
            // W's gradient is the sum of r·dm vec(H)ᵀ over positions.
            add_products::<E, S>(&h[block.start * width..block.end * width], steps, k, sums.weight);
        }
    }
}
