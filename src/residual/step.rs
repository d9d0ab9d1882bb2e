//! The fused residual step: x⁺ = α⊙x + β⊙drop(f) and y = N(x⁺), in one pass over memory each way.
//!
//! x is the residual stream, f what the sublayer made of it, α and β the scheme's scales (SPEC §2), drop the dropout
//! on the sublayer's output, N the next norm: the scheme's own (post-norm) or the next sublayer's (pre-norm). y is
//! computed from x⁺ as rounded to x's type, the very numbers that the backward pass reads. With G = dx⁺ + N′(dy),
//!
//! > dx = α⊙G,  df = β⊙drop(G),  dα = Σ G⊙x,  dβ = Σ G⊙drop(f)   (sums over rows)
//!
//! The mask is never stored: both directions draw it from Philox (`cpu/philox.rs`) by the element's place. In plain
//! PyTorch calls the same takes three passes to draw and apply the mask and eight for the addition, the norm and
//! their gradients; here it is four forward and five backward.

use crate::cpu::philox::{self, Dropout};
use crate::cpu::{Accumulator, Element};
use crate::multiversion;
use crate::norm::convert::{narrow, target, wide, widen, Row};
use crate::norm::rows::{Measured, NoNorm, PerColumn, RowNorm, Weight};

/// What does not change from row to row. A scale is empty (one), one number, or one per column; `weight`, `bias` and
/// `eps` are the norm's.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a, A> {
    pub cols: usize,
    pub alpha: &'a [A],
    pub beta: &'a [A],
    pub dropout: Option<Dropout>,
    pub weight: &'a [A],
    pub bias: &'a [A],
    pub eps: A,
}

/// Sums over rows, added to: each as long as its parameter, or empty where not wanted.
#[derive(Debug)]
pub struct Gradients<'a, A> {
    pub dweight: &'a mut [A],
    pub dbias: &'a mut [A],
    pub dalpha: &'a mut [A],
    pub dbeta: &'a mut [A],
}

multiversion! {
    /// x⁺ and y for the rows of `x`, the first of which is row `first_row` of the whole. `y` is empty where there is
    /// no norm; `stats` receives `N::STATS` numbers a row.
    pub fn forward[N: RowNorm, X: Element, F: Element<Acc = X::Acc>, Y: Element<Acc = X::Acc>](
        step: &Step<X::Acc>, first_row: usize, x: &[X], f: &[F], x_plus: &mut [X], y: &mut [Y], stats: &mut [X::Acc],
    ) {
        let cols = step.cols;
        if cols == 0 {
            return;
        }
        let (alpha, beta) = (PerColumn::new(step.alpha, cols, X::Acc::ONE), branch_scale(step));
        let weight = PerColumn::new(step.weight, cols, X::Acc::ONE);
        let bias = PerColumn::new(step.bias, cols, X::Acc::ZERO);
        let mut mask = Mask::new(step.dropout, first_row, x.len() / cols, cols);
        let (mut wide_x, mut wide_f) = (Row::for_type::<X>(cols), Row::for_type::<F>(cols));
        let mut wide_y = Row::for_type::<Y>(cols);
        let mut held = [(); 2].map(|()| Row::for_type::<X>(cols));
        let mut measured = [Measured::restore::<NoNorm>(0, &[]); 2];
        // The norm runs one row behind, as in norm/rows.rs.
        let rows = x.len() / cols;
        for r in 0..=rows {
            if r < rows {
                let (x, f, x_plus) = (&x[r * cols..][..cols], &f[r * cols..][..cols], &mut x_plus[r * cols..][..cols]);
                let held = &mut held[r % 2];
                widen(x, &mut wide_x);
                widen(f, &mut wide_f);
                add(&alpha, wide(x, &wide_x), &beta, mask.row(r), wide(f, &wide_f), target(x_plus, held));
                narrow(held, x_plus);
                if !y.is_empty() {
                    widen(x_plus, held);
                    measured[r % 2] = N::measure(wide(x_plus, held), step.eps);
                    measured[r % 2].keep::<N>(r, stats);
                }
            }
            if let (Some(r), false) = (r.checked_sub(1), y.is_empty()) {
                let (x_plus, y) = (&x_plus[r * cols..][..cols], &mut y[r * cols..][..cols]);
                measured[r % 2].normalise(wide(x_plus, &held[r % 2]), &weight, &bias, target(y, &mut wide_y));
                narrow(&wide_y, y);
            }
        }
    }
}

multiversion! {
    /// The gradient of [`forward`]: overwrites `dx` and `df` (either may be empty: not wanted), adds to `grads`.
    ///
    /// `dx_plus` or `dy` is empty where nothing came back on that side; `x_plus` and `stats` are read only with `dy`,
    /// `x` only with `grads.dalpha`, `f` only with `grads.dbeta`.
    pub fn backward[N: RowNorm, X: Element, F: Element<Acc = X::Acc>, Y: Element<Acc = X::Acc>](
        step: &Step<X::Acc>, first_row: usize, dx_plus: &[X], dy: &[Y], x_plus: &[X], x: &[X], f: &[F],
        stats: &[X::Acc], dx: &mut [X], df: &mut [F], grads: &mut Gradients<X::Acc>,
    ) {
        let cols = step.cols;
        if cols == 0 {
            return;
        }
        let (alpha, beta) = (PerColumn::new(step.alpha, cols, X::Acc::ONE), branch_scale(step));
        let weight = Weight::new(step.weight, cols);
        let rows = dx_plus.len().max(dy.len()) / cols;
        let mut mask = Mask::new(step.dropout, first_row, rows, cols);
        let [mut wide_x, mut wide_dx] = [(); 2].map(|()| Row::for_type::<X>(cols));
        let [mut wide_f, mut wide_df] = [(); 2].map(|()| Row::for_type::<F>(cols));
        let (mut wide_dy, mut total) = (Row::for_type::<Y>(cols), Row::new(cols));
        let (mut dalpha, mut dbeta) = (sum_of(grads.dalpha, cols), sum_of(grads.dbeta, cols));
        let (dweight, dbias) = (&mut *grads.dweight, &mut *grads.dbias);
        for r in 0..rows {
            let at = r * cols..(r + 1) * cols;
            if dy.is_empty() {
                total.fill(X::Acc::ZERO);
            } else {
                let (dy, x_plus) = (&dy[at.clone()], &x_plus[at.clone()]);
                widen(dy, &mut wide_dy);
                widen(x_plus, &mut wide_x);
                let (dy, x_plus) = (wide(dy, &wide_dy), wide(x_plus, &wide_x));
                let row = Measured::restore::<N>(r, stats);
                let slope = weight.slope::<N>(dy, x_plus, row, step.eps, dweight, dbias);
                weight.apply(slope, dy, x_plus, row, &mut total);
            }
            if !dx_plus.is_empty() {
                let dx_plus = &dx_plus[at.clone()];
                widen(dx_plus, &mut wide_x);
                for (total, d) in total.iter_mut().zip(wide(dx_plus, &wide_x)) {
                    *total += *d;
                }
            }
            if !dx.is_empty() {
                let dx = &mut dx[at.clone()];
                scale(&alpha, None, &total, target(dx, &mut wide_dx));
                narrow(&wide_dx, dx);
            }
            if !grads.dalpha.is_empty() {
                widen(&x[at.clone()], &mut wide_x);
                add_product(None, wide(&x[at.clone()], &wide_x), &total, &mut dalpha);
            }
            if df.is_empty() && grads.dbeta.is_empty() {
                continue;
            }
            let bits = mask.row(r);
            if !df.is_empty() {
                let df = &mut df[at.clone()];
                scale(&beta, bits, &total, target(df, &mut wide_df));
                narrow(&wide_df, df);
            }
            if !grads.dbeta.is_empty() {
                widen(&f[at.clone()], &mut wide_f);
                add_product(bits, wide(&f[at.clone()], &wide_f), &total, &mut dbeta);
            }
        }
        finish(&dalpha, None, grads.dalpha);
        finish(&dbeta, step.dropout, grads.dbeta);
    }
}

/// Random bits of one row, and the threshold from which an element is kept.
type Bits<'a> = Option<(u16, &'a [u16])>;

/// x⁺ = α⊙x + β⊙drop(f).
#[inline(always)]
fn add<A: Accumulator>(alpha: &[A], x: &[A], beta: &[A], bits: Bits, f: &[A], out: &mut [A]) {
    let n = out.len();
    let (alpha, x, beta, f) = (&alpha[..n], &x[..n], &beta[..n], &f[..n]);
    match bits {
        None => {
            for i in 0..n {
                out[i] = alpha[i] * x[i] + beta[i] * f[i];
            }
        }
        Some((threshold, bits)) => {
            let bits = &bits[..n];
            for i in 0..n {
                out[i] = alpha[i] * x[i] + if bits[i] >= threshold { beta[i] * f[i] } else { A::ZERO };
            }
        }
    }
}

/// coefficient⊙drop(g).
#[inline(always)]
fn scale<A: Accumulator>(coefficient: &[A], bits: Bits, g: &[A], out: &mut [A]) {
    let n = out.len();
    let (coefficient, g) = (&coefficient[..n], &g[..n]);
    match bits {
        None => {
            for i in 0..n {
                out[i] = coefficient[i] * g[i];
            }
        }
        Some((threshold, bits)) => {
            let bits = &bits[..n];
            for i in 0..n {
                out[i] = if bits[i] >= threshold { coefficient[i] * g[i] } else { A::ZERO };
            }
        }
    }
}

/// sum += g⊙drop(v), but for dropout's scale.
#[inline(always)]
fn add_product<A: Accumulator>(bits: Bits, v: &[A], g: &[A], sum: &mut [A]) {
    let n = sum.len();
    let (v, g) = (&v[..n], &g[..n]);
    for i in 0..n {
        let kept = bits.is_none_or(|(threshold, bits)| bits[i] >= threshold);
        sum[i] += if kept { g[i] * v[i] } else { A::ZERO };
    }
}

/// Columns to sum in: none where the gradient is not wanted.
fn sum_of<A: Accumulator>(gradient: &[A], cols: usize) -> Row<A> {
    Row::new(if gradient.is_empty() { 0 } else { cols })
}

/// Adds the column sums, or their sum, times dropout's scale.
fn finish<A: Accumulator>(sums: &[A], dropout: Option<Dropout>, gradient: &mut [A]) {
    let scale = A::from_f64(dropout.map_or(1.0, |d| d.scale));
    for (i, sum) in sums.iter().enumerate() {
        gradient[if gradient.len() == 1 { 0 } else { i }] += scale * *sum;
    }
}

/// β times what dropout multiplies the kept elements by.
fn branch_scale<A: Accumulator>(step: &Step<A>) -> Row<A> {
    let scale = A::from_f64(step.dropout.map_or(1.0, |d| d.scale));
    let mut beta = Row::filled(step.cols, scale);
    for (scaled, beta) in beta.iter_mut().zip(PerColumn::new(step.beta, step.cols, A::ONE).iter()) {
        *scaled = *beta * scale;
    }
    beta
}

/// The dropout mask, drawn for a few rows at a time: narrow rows share Philox's groups of sixteen blocks.
struct Mask {
    dropout: Option<Dropout>,
    first_row: usize,
    rows: usize,
    cols: usize,
    batch: usize,
    bits: Vec<u16>,
}

impl Mask {
    fn new(dropout: Option<Dropout>, first_row: usize, rows: usize, cols: usize) -> Self {
        let batch = (2048 / philox::padded(cols)).clamp(1, rows.max(1));
        let bits = if dropout.is_some() { philox::scratch(batch, cols) } else { Vec::new() };
        Mask { dropout, first_row, rows, cols, batch, bits }
    }

    /// Rows are asked for in order.
    #[inline(always)]
    fn row(&mut self, r: usize) -> Bits<'_> {
        let dropout = self.dropout?;
        let place = r % self.batch;
        if place == 0 {
            fill(&dropout.stream, self.first_row + r, self.batch.min(self.rows - r), self.cols, &mut self.bits);
        }
        Some((dropout.threshold, &self.bits[place * philox::padded(self.cols)..][..self.cols]))
    }
}

multiversion! {
    fn fill(stream: &philox::Stream, first_row: usize, rows: usize, cols: usize, out: &mut [u16]) {
        philox::fill(stream, first_row, rows, cols, out);
    }
}

#[cfg(test)]
mod tests;
