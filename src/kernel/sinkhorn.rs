//! Sinkhorn's algorithm on many small matrices.
//!
//! > M₀ = softmax(logits) + ε over rows;  columns: M_ij/(Σ_i M_ij + ε);  then, `iterations` − 1 times, rows:
//! > M_ij/(Σ_j M_ij + ε), and columns again
//!
//! Source: deepseek-ai/TileKernels, `sinkhorn_normalize_ref`; Xie et al. 2025, arXiv:2512.24880.
//!
//! A division y = x/s, s = Σx + ε, has the gradient dx = (dy − Σ dy·y)/s. The backward pass processes one small group
//! of matrices at a time. For the group it recomputes M after each division, which then stays in the caches; autograd
//! would store these intermediate results for all matrices.

use crate::cpu::memory::filled;
use crate::cpu::pack::Isa;
use crate::cpu::{Accumulator, Element};
use crate::kernel::math::{exp, LANES};
use crate::multiversion;

pub mod call;

/// The elements at one row and column of the [`LANES`] matrices that are computed together, one in each lane.
type Elements<A> = [A; LANES];

/// A division of the columns, or of the rows, of n×n matrices by their sums.
#[derive(Clone, Copy)]
struct Division {
    n: usize,
    /// True if columns are divided, false if rows are.
    columns: bool,
}

impl Division {
    /// Returns the indices of the elements in column or row number `line` of a row-major matrix.
    #[inline(always)]
    fn line(self, line: usize) -> impl Iterator<Item = usize> + Clone {
        let (first, step) = if self.columns { (line, self.n) } else { (line * self.n, 1) };
        (0..self.n).map(move |i| first + i * step)
    }
}

/// Returns the 2·`iterations` − 1 divisions after the softmax: columns, then rows and columns in turn.
fn divisions(n: usize, iterations: usize) -> impl DoubleEndedIterator<Item = Division> + ExactSizeIterator {
    (0..2 * iterations - 1).map(move |i| Division { n, columns: i % 2 == 0 })
}

multiversion! {
    /// Computes Sinkhorn's algorithm: `m` from `logits`, which both consist of n×n matrices. [`LANES`] matrices are
    /// computed together. ε is added to the softmax, and to each sum by which a column or row is divided.
    pub fn forward[isa S][E: Element](n: usize, iterations: usize, eps: f64, logits: &[E], m: &mut [E]) {
        let (size, eps) = (n * n, E::Acc::from_f64(eps));
        let mut state = filled([E::Acc::ZERO; LANES], size);
        for (logits, m) in logits.chunks(size * LANES).zip(m.chunks_mut(size * LANES)) {
            gather(logits, &mut state);
            softmax::<E::Acc, S>(n, &mut state);
            add(&mut state, eps);
            for division in divisions(n, iterations) {
                for line in 0..n {
                    divide(division.line(line), eps, &mut state);
                }
            }
            scatter(&state, m);
        }
    }
}

multiversion! {
    /// Computes the gradient of `logits` from `dm`, the gradient of the result of [`forward`].
    pub fn backward[isa S][E: Element](
        n: usize, iterations: usize, eps: f64, dm: &[E], logits: &[E], dlogits: &mut [E],
    ) {
        let (size, eps, count) = (n * n, E::Acc::from_f64(eps), divisions(n, iterations).len());
        let zero = [E::Acc::ZERO; LANES];
        // `states` holds the softmax, then the matrix after each division. `sums` holds the n divisors of each
        // division, and `g` the gradient of the state that the backward pass has reached.
        let (mut states, mut sums, mut g) =
            (filled(zero, size * (count + 1)), filled(zero, n * count), filled(zero, size));
        let all = dm.chunks(size * LANES).zip(logits.chunks(size * LANES)).zip(dlogits.chunks_mut(size * LANES));
        for ((dm, logits), dlogits) in all {
            // Repeat the forward pass, but keep every state and every divisor.
            gather(logits, &mut states[..size]);
            softmax::<E::Acc, S>(n, &mut states[..size]);
            for (i, division) in divisions(n, iterations).enumerate() {
                states.copy_within(i * size..(i + 1) * size, (i + 1) * size);
                let state = &mut states[(i + 1) * size..(i + 2) * size];
                // ε is added to the softmax before the first division.
                if i == 0 {
                    add(state, eps);
                }
                for line in 0..n {
                    sums[i * n + line] = divide(division.line(line), eps, state);
                }
            }
            // Go back through the divisions, the last one first.
            gather(dm, &mut g);
            for (i, division) in divisions(n, iterations).enumerate().rev() {
                let state = &states[(i + 1) * size..(i + 2) * size];
                for line in 0..n {
                    divide_backward(division.line(line), state, &sums[i * n + line], &mut g);
                }
            }
            // The gradient of the logits is p·(g − Σ g·p), where p is the softmax and g its gradient. `divide_backward`
            // with the divisor 1 gives the bracket for each row; the factor p follows.
            let rows = Division { n, columns: false };
            for line in 0..n {
                divide_backward(rows.line(line), &states[..size], &[E::Acc::ONE; LANES], &mut g);
            }
            for (g, p) in g.iter_mut().zip(&states[..size]) {
                for l in 0..LANES {
                    g[l] = g[l] * p[l];
                }
            }
            scatter(&g, dlogits);
        }
    }
}

/// Copies up to LANES matrices, which follow each other in `from`, one into each lane of `to`; other lanes get zeros.
#[inline(always)]
fn gather<E: Element>(from: &[E], to: &mut [Elements<E::Acc>]) {
    let size = to.len();
    for (e, to) in to.iter_mut().enumerate() {
        *to = [E::Acc::ZERO; LANES];
        for (to, matrix) in to.iter_mut().zip(from.chunks_exact(size)) {
            *to = matrix[e].load();
        }
    }
}

/// Copies the matrices back, one from each lane of `from`, as many as `to` has.
#[inline(always)]
fn scatter<E: Element>(from: &[Elements<E::Acc>], to: &mut [E]) {
    for (l, matrix) in to.chunks_exact_mut(from.len()).enumerate() {
        for (to, from) in matrix.iter_mut().zip(from) {
            *to = E::store(from[l]);
        }
    }
}

/// Replaces each row of the n×n matrices by its softmax.
#[inline(always)]
fn softmax<A: Accumulator, S: Isa>(n: usize, state: &mut [Elements<A>]) {
    for row in state.chunks_exact_mut(n) {
        let mut largest = row[0];
        for element in &row[1..] {
            for l in 0..LANES {
                largest[l] = element[l].max(largest[l]);
            }
        }
        let mut sum = [A::ZERO; LANES];
        for element in row.iter_mut() {
            for l in 0..LANES {
                element[l] = exp::<A, S>(element[l] - largest[l]);
                sum[l] += element[l];
            }
        }
        for element in row {
            for l in 0..LANES {
                element[l] = element[l] / sum[l];
            }
        }
    }
}

/// Adds ε to every element.
#[inline(always)]
fn add<A: Accumulator>(state: &mut [Elements<A>], eps: A) {
    for element in state {
        for l in 0..LANES {
            element[l] += eps;
        }
    }
}

/// Divides the elements at the indices `line`, a column or a row, by their sum plus ε, and returns this divisor.
#[inline(always)]
fn divide<A: Accumulator>(line: impl Iterator<Item = usize> + Clone, eps: A, state: &mut [Elements<A>]) -> Elements<A> {
    let mut sum = [A::ZERO; LANES];
    for e in line.clone() {
        for l in 0..LANES {
            sum[l] += state[e][l];
        }
    }
    for l in 0..LANES {
        sum[l] += eps;
    }
    for e in line {
        for l in 0..LANES {
            state[e][l] = state[e][l] / sum[l];
        }
    }
    sum
}

/// Computes the gradient of [`divide`], y = x/s with s = Σ x + ε, at the indices `line`. Replaces g, the gradient of y,
/// by the gradient of x, (g − Σ g·y)/s.
#[inline(always)]
fn divide_backward<A: Accumulator>(
    line: impl Iterator<Item = usize> + Clone,
    y: &[Elements<A>],
    s: &Elements<A>,
    g: &mut [Elements<A>],
) {
    let mut sum = [A::ZERO; LANES];
    for e in line.clone() {
        for l in 0..LANES {
            sum[l] += g[e][l] * y[e][l];
        }
    }
    for e in line {
        for l in 0..LANES {
            g[e][l] = (g[e][l] - sum[l]) / s[l];
        }
    }
}
