//! The read of hyper-connections whose gates are functions of all streams together, and its gradient.
//!
//! > m = r·W vec(H),  x = Σ_i p_i h_i,  r = 1/√(mean vec(H)² + ε) or 1/max(‖vec(H)‖, ε)
//!
//! H has the n streams h_i of a position, d numbers each. p depends on m (model/joint_read.rs). With dh′, the gradient that
//! the sublayer's write gives to the streams, and M = r·Wᵀdm:
//!
//! > dp_i = ⟨dx, h_i⟩,  dh_i = dh′_i + M_i + p_i dx + c h_i,  c = −⟨dm, m⟩ r²·(1/nd or 1; 0 where the norm is below ε)
//!
//! So the streams' gradient is written once; autograd would add up three tensors. Sums are in f32 (f64 for f64).

use super::weighted_rows::{combine_both, dot};
use crate::cpu::{Accumulator, Element};
use crate::multiversion;

pub mod call;

/// By which size of vec(H) the products are divided, with its ε.
#[derive(Clone, Copy, Debug)]
pub enum Size {
    /// √(mean vec(H)² + ε)
    RootMeanSquare(f64),
    /// max(‖vec(H)‖, ε)
    Norm(f64),
}

multiversion! {
    /// Computes r of each position, and c/⟨dm, m⟩. Rows of `h` have `width` = n·d numbers.
    pub fn scales[isa S][E: Element](h: &[E], width: usize, size: Size, r: &mut [E::Acc], slopes: &mut [E::Acc]) {
        for ((h, r), slope) in h.chunks_exact(width).zip(r).zip(slopes) {
            let squares = dot::<E, E, S>(h, h);
            let count = E::Acc::from_f64(width as f64);
            (*r, *slope) = match size {
                Size::RootMeanSquare(eps) => {
                    let r = E::Acc::ONE / (squares / count + E::Acc::from_f64(eps)).sqrt();
                    (r, -(r * r / count))
                }
                Size::Norm(eps) => {
                    let (norm, eps) = (squares.sqrt(), E::Acc::from_f64(eps));
                    match norm < eps {
                        true => (E::Acc::ONE / eps, E::Acc::ZERO),
                        false => (E::Acc::ONE / norm, -(E::Acc::ONE / squares)),
                    }
                }
            };
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
    /// Computes dh from `products`, which is M, `shares`, which is p, and `of_h`, which is c. `written` is dh′, if there is
    /// a write.
    pub fn stream_gradients[isa S][E: Element](
        dx: &[E], h: &[E], written: Option<&[E]>, products: &[E::Acc], shares: &[E::Acc], of_h: &[E::Acc], d: usize,
        dh: &mut [E],
    ) {
        let n = shares.len() / of_h.len().max(1);
        for (i, dh) in dh.chunks_exact_mut(d).enumerate() {
            let (row, at) = (i * d..(i + 1) * d, i / n);
            let pairs = [(&dx[at * d..(at + 1) * d], shares[i]), (&h[row.clone()], of_h[at])];
            let written = written.map(|written| (&written[row.clone()], E::Acc::ONE));
            let product = std::iter::once((&products[row.clone()], E::Acc::ONE));
            combine_both::<E, S>(pairs.into_iter().chain(written), product, dh);
        }
    }
}
