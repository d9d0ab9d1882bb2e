//! Attention over depth, by which a sublayer of attention residuals reads the outputs of the sublayers before it.
//!
//! > r_i = 1/√(mean v_i² + ε),  z_ci = r_i ⟨u_c, v_i⟩,  a_c = softmax_i z_ci,  x_c = Σ_i w_ci v_i
//!
//! v_0, v_1, … are the outputs at one position, u_c the queries, d numbers each. The weights are w_ci = a_ci; in the
//! normed form they are a_ci r_i. With g_c, the gradient of x_c, and b_ci, the gradient of a_ci (⟨g_c, v_i⟩, in the
//! normed form r_i ⟨g_c, v_i⟩):
//!
//! > dz_ci = a_ci (b_ci − Σ_j a_cj b_cj)
//! > du_c = Σ_i dz_ci r_i v_i, summed over positions
//! > dv_i = Σ_c (w_ci g_c + dz_ci r_i u_c) − (t_i r_i²/d) v_i,  t_i = Σ_c dz_ci z_ci, normed Σ_c (dz_ci z_ci + a_ci b_ci)
//!
//! Each output is read from memory once in either direction. Sums are in f32 (f64 for f64). Source: Kimi Team 2026.

use super::weighted_rows::{add_scaled, combine, combine_both, dot};
use crate::cpu::memory::filled;
use crate::cpu::pack::Isa;
use crate::cpu::{Accumulator, Element};
use crate::multiversion;

pub mod call;

/// The ε that is added to the mean squares (docs/spec.md §2.22).
pub const EPS: f64 = 1e-6;

multiversion! {
    /// Computes x and the scores z of some positions. `v` has for each output its rows of d numbers at these positions,
    /// and `u` has the queries (queries, d). `x` has the rows of each query's result, and `scores` has a matrix z
    /// (queries, outputs) for each position. `is_normed` selects the form whose weights are a_ci r_i.
    pub fn forward[isa S][E: Element](
        v: &[&[E]], u: &[E::Acc], is_normed: bool, x: &mut [&mut [E]], scores: &mut [E::Acc],
    ) {
        let d = u.len() / x.len();
        let mut shares = Shares::new(v.len(), x.len(), is_normed);
        for (position, scores) in scores.chunks_exact_mut(v.len() * x.len()).enumerate() {
            // `here` is the range of the position's numbers in each output and result.
            let here = position * d..(position + 1) * d;
            let outputs = v.iter().map(|v| &v[here.clone()]);
            shares.compute::<E, S>(outputs.clone(), u);
            scores.copy_from_slice(&shares.scores);
            for (x, weights) in x.iter_mut().zip(shares.weights.chunks_exact(v.len())) {
                combine::<E, S>(outputs.clone().zip(weights.iter().copied()), &mut x[here.clone()]);
            }
        }
    }
}

multiversion! {
    /// Computes the outputs' gradients `dv` of some positions from `g`, the gradients of each query's x, and adds the
    /// queries' gradients to `du`. The other arguments are those of [`forward`].
    pub fn backward[isa S][E: Element](
        g: &[&[E]], v: &[&[E]], u: &[E::Acc], is_normed: bool, dv: &mut [&mut [E]], du: &mut [E::Acc],
    ) {
        let (d, count) = (u.len() / g.len(), v.len());
        let mut shares = Shares::new(count, g.len(), is_normed);
        let zeros = |len: usize| filled(E::Acc::ZERO, len);
        // `share_gradients` holds b_ci, the gradients of one query's softmax; `steps` dz_ci r_i for all queries
        // (queries, outputs); and `totals` holds t_i, the factor by which v_i's norm enters its gradient.
        let (mut share_gradients, mut steps, mut totals) = (zeros(count), zeros(count * g.len()), zeros(count));
        for position in 0..g[0].len() / d {
            // `here` is the range of the position's numbers in each output and result.
            let here = position * d..(position + 1) * d;
            let outputs = v.iter().map(|v| &v[here.clone()]);
            let gradients = g.iter().map(|g| &g[here.clone()]);
            shares.compute::<E, S>(outputs.clone(), u);
            totals.fill(E::Acc::ZERO);
            for (c, g) in gradients.clone().enumerate() {
                let row = c * count..(c + 1) * count;
                let (scores, a) = (&shares.scores[row.clone()], &shares.shares[row.clone()]);
                let mut mean = E::Acc::ZERO; // Σ_j a_cj b_cj, which the gradient of a softmax subtracts
                for (i, v) in outputs.clone().enumerate() {
                    let r = if is_normed { shares.inverse_rms[i] } else { E::Acc::ONE };
                    share_gradients[i] = dot::<E, E, S>(g, v) * r;
                    mean += a[i] * share_gradients[i];
                }
                for (i, v) in outputs.clone().enumerate() {
                    let dz = a[i] * (share_gradients[i] - mean);
                    totals[i] += dz * scores[i];
                    if is_normed {
                        totals[i] += a[i] * share_gradients[i];
                    }
                    let step = dz * shares.inverse_rms[i];
                    add_scaled::<E, S>(&mut du[c * d..(c + 1) * d], v, step);
                    steps[row.start + i] = step;
                }
            }
            for (i, (v, dv)) in outputs.zip(dv.iter_mut()).enumerate() {
                let r = shares.inverse_rms[i];
                let v_weight = -(totals[i] * r * r / E::Acc::from_f64(d as f64));
                // dv_i is a weighted sum of all g_c, of v_i, and of all u_c. The weights of g_c and u_c are in column i
                // of matrices (queries, outputs).
                let x_pairs = gradients.clone().zip(shares.weights[i..].iter().step_by(count).copied());
                let u_pairs = u.chunks_exact(d).zip(steps[i..].iter().step_by(count).copied());
                combine_both::<E, S>(x_pairs.chain([(v, v_weight)]), u_pairs, &mut dv[here.clone()]);
            }
        }
    }
}

/// The softmax over the outputs at one position. Matrices have a row for each query, and a column for each output.
struct Shares<A> {
    is_normed: bool,
    /// The factor r = 1/√(mean v² + ε) of each output v.
    inverse_rms: Vec<A>,
    /// The scores z = r·⟨u, v⟩.
    scores: Vec<A>,
    /// The softmax a of z over the outputs.
    shares: Vec<A>,
    /// The outputs' weights in the sum: the shares, or in the normed form the shares times r.
    weights: Vec<A>,
}

impl<A: Accumulator> Shares<A> {
    /// Allocates zeros for this many outputs and queries.
    fn new(outputs: usize, queries: usize, is_normed: bool) -> Self {
        let matrix = || filled(A::ZERO, outputs * queries);
        let (scores, shares, weights) = (matrix(), matrix(), matrix());
        Shares { is_normed, inverse_rms: filled(A::ZERO, outputs), scores, shares, weights }
    }

    /// Computes all fields from the outputs' rows at a position and the queries `u` (queries, d).
    #[inline(always)]
    fn compute<'a, E: Element<Acc = A>, S: Isa>(&mut self, outputs: impl Iterator<Item = &'a [E]>, u: &[A]) {
        let (count, queries) = (self.inverse_rms.len(), self.scores.len() / self.inverse_rms.len());
        let d = u.len() / queries;
        for (i, v) in outputs.enumerate() {
            let mean = dot::<E, E, S>(v, v) / A::from_f64(d as f64);
            let r = A::ONE / (mean + A::from_f64(EPS)).sqrt();
            self.inverse_rms[i] = r;
            for (c, u) in u.chunks_exact(d).enumerate() {
                self.scores[c * count + i] = dot::<E, A, S>(v, u) * r;
            }
        }
        let rows = self.scores.chunks_exact(count).zip(self.shares.chunks_exact_mut(count));
        for ((scores, shares), weights) in rows.zip(self.weights.chunks_exact_mut(count)) {
            softmax(scores, shares);
            for ((w, a), r) in weights.iter_mut().zip(shares).zip(&self.inverse_rms) {
                *w = if self.is_normed { *a * *r } else { *a };
            }
        }
    }
}

/// Writes the softmax of `scores` to `shares`. If a score is NaN, or the largest is infinite, all shares are NaN.
#[inline(always)]
fn softmax<A: Accumulator>(scores: &[A], shares: &mut [A]) {
    let largest = scores.iter().copied().reduce(A::max).expect("there is an output");
    let mut total = A::ZERO;
    for (share, score) in shares.iter_mut().zip(scores) {
        *share = (*score - largest).exp();
        total += *share;
    }
    for share in shares {
        *share = *share / total;
    }
}
