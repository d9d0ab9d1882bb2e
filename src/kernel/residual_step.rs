//! The fused residual step: x⁺ = α⊙x + β⊙drop(f) and y = N(x⁺), with one pass over memory forward and one backward.
//!
//! x is the residual stream, f the sublayer's output, α and β the scheme's scales (docs/spec.md §2.2), drop the
//! dropout on the sublayer's output. N is the next norm: the scheme's own (post-norm) or the next sublayer's
//! (pre-norm). x⁺ is first rounded to x's type, and y is computed from the rounded x⁺, because the backward pass
//! reads the rounded one. With G = dx⁺ + N′(dy),
//!
//! > dx = α⊙G,  df = β⊙drop(G),  dα = Σ G⊙x,  dβ = Σ G⊙drop(f)   (sums over rows)
//!
//! The mask is never stored: both passes draw it again from Philox (`cpu/philox.rs`), by the element's place. The
//! forward pass reads x and f and writes x⁺ and y; the backward pass reads dx⁺, dy and x⁺ and writes dx and df.

use crate::cpu::pack::{Isa, Of, Pack, Store, PAIR_LANES};
use crate::cpu::philox::Dropout;
use crate::cpu::{memory, Accumulator, Element};
use crate::kernel::rows::curve::{Bend, BendBack, NUMBERS};
use crate::kernel::rows::{
    columns, each_row, fetch, normalise, rows, split, split_ref, Blocks, BlocksMut, Group, Measured, NoNorm,
    RowGradient, RowNormFns, RowNormKernel, Weight, GROUP, PARTS,
};
use crate::multiversion;
use crate::row_program;
use mask::{Bits, Mask};
use scales::{finish, scales, sum_of, Scales, StepRows};

pub mod call;
mod mask;
mod scales;

/// The step without a norm. A step with a norm uses the norm's own kernels and CUDA program.
pub static NO_NORM: RowNormKernel = RowNormKernel::of::<NoNorm>(row_program!("no_norm.cu"));

/// The parameters of x⁺ = α⊙x + β⊙drop(f) and y = N(x⁺) that all rows share. `alpha` and `beta` each are empty (meaning
/// 1), one number, or one number per column. `weight`, `bias` and `eps` belong to the norm N; `numbers`, a scale and a
/// shift, to a norm that is an elementwise curve.
#[derive(Clone, Copy, Debug)]
pub struct StepParameters<'a, A> {
    pub cols: usize,
    pub alpha: &'a [A],
    pub beta: &'a [A],
    pub dropout: Option<Dropout>,
    pub weight: &'a [A],
    pub bias: &'a [A],
    pub eps: A,
    pub numbers: [A; NUMBERS],
}

/// The gradients that are sums over rows; a pass adds to them. Each is as long as its parameter, or empty if not
/// wanted.
#[derive(Debug)]
pub struct Gradients<'a, A> {
    pub dweight: &'a mut [A],
    pub dbias: &'a mut [A],
    pub dalpha: &'a mut [A],
    pub dbeta: &'a mut [A],
    pub dnumbers: &'a mut [A],
}

multiversion! {
    /// Writes `x_plus`, x⁺ = α⊙x + β⊙drop(f), and y = N(x⁺) of some rows. The first row of `x` is row `first_row` of
    /// the whole matrix, which determines dropout's mask. `y` is empty if there is no norm; `stats` receives the
    /// `norm.stats` numbers per row that the backward pass needs.
    pub fn forward[isa S][X: Element, F: Element<Acc = X::Acc>, Y: Element<Acc = X::Acc>](
        norm: &RowNormFns<X::Acc>, step: &StepParameters<X::Acc>, first_row: usize, x: &[X], f: &[F], x_plus: &mut [X],
        y: &mut [Y], stats: &mut [X::Acc],
    ) {
        let cols = step.cols;
        if cols == 0 {
            return;
        }
        let (alpha, beta) = scales(step);
        let weight = columns(step.weight, cols, X::Acc::ONE);
        let bias = columns(step.bias, cols, X::Acc::ZERO);
        // These decide whether stores bypass the caches.
        let (store, store_y) = (Store::of(x_plus, cols), Store::of(y, cols));
        let group = Group::new::<S>(x.len() / cols, cols);
        let mut mask = Mask::new(step.dropout, first_row, group);
        // Spare rows, to read and to write, fill up the last group.
        let (spare_x, spare_f) = (group.spare::<X>(), group.spare::<F>());
        let (mut spare_x_plus, mut spare_y) = (group.spare_out::<X>(), group.spare_out::<Y>());
        let mut bend = norm.curve.as_ref().map(|curve| Bend::new(curve, step.numbers, cols));
        // If stores of x⁺ bypass the caches, it cannot be read back from them, so the norm reads this copy of a group.
        let needs_copy = !y.is_empty() && store.is_streamed();
        let mut x_plus_copy = memory::filled(X::default(), if needs_copy { GROUP * cols } else { 0 });
        for g in 0..group.count() {
            let (x, f) = (group.rows(g, x, &spare_x), group.rows(g, f, &spare_f));
            if needs_copy {
                add::<S, X, F>(&alpha, x, &beta, mask.group(g), f, split(&mut x_plus_copy, cols), Store::PLAIN);
                copy::<S, X>(split_ref(&x_plus_copy, cols), group.rows_mut(g, x_plus, &mut spare_x_plus), store);
            } else {
                let x_plus = group.rows_mut(g, x_plus, &mut spare_x_plus);
                add::<S, X, F>(&alpha, x, &beta, mask.group(g), f, x_plus, store);
            }
            if y.is_empty() {
                continue;
            }
            let x_plus = if needs_copy { split_ref(&x_plus_copy, cols) } else { group.rows(g, x_plus, &spare_x_plus) };
            if let Some(bend) = &mut bend {
                let y = group.rows_mut(g, y, &mut spare_y);
                bend.forward::<S, X, Y>(x_plus, group.range(g).len(), &weight, &bias, y, store_y);
                continue;
            }
            let measured = norm.measure::<S, X>(x_plus, step.eps);
            for (r, statistics) in group.range(g).zip(measured) {
                statistics.keep(norm.stats, r, stats);
            }
            // With the last parameter `true`, shifts are subtracted, even if they are zero.
            normalise::<S, X, Y, true>(x_plus, measured, &weight, &bias, group.rows_mut(g, y, &mut spare_y), store_y);
        }
        store.finish();
        store_y.finish();
    }
}

multiversion! {
    /// Computes the gradient of [`forward`] with G = dx⁺ + N′(dy). Overwrites `dx` with α⊙G and `df` with β⊙drop(G);
    /// `df` may be empty if not wanted. Adds to `grads`, for α Σ G⊙x over rows, and for β Σ G⊙drop(f).
    ///
    /// `dx_plus` or `dy` is empty if that output got no gradient. `x_plus` and `stats` are read only if there is
    /// `dy`, `x` only if there is `grads.dalpha`, `f` only if there is `grads.dbeta`.
    pub fn backward[isa S][X: Element, F: Element<Acc = X::Acc>, Y: Element<Acc = X::Acc>](
        norm: &RowNormFns<X::Acc>, step: &StepParameters<X::Acc>, first_row: usize, dx_plus: &[X], dy: &[Y],
        x_plus: &[X], x: &[X], f: &[F], stats: &[X::Acc], dx: &mut [X], df: &mut [F], grads: &mut Gradients<X::Acc>,
    ) {
        let cols = step.cols;
        if cols == 0 {
            return;
        }
        let mut weight = Weight::new(norm, step.weight, cols, step.eps, grads.dweight, grads.dbias);
        let mut bend = match &norm.curve {
            Some(curve) if !dy.is_empty() => {
                Some(BendBack::new(curve, step.numbers, step.weight, cols, grads.dweight, grads.dbias, grads.dnumbers))
            }
            _ => None,
        };
        // This holds G of a group of rows in the computing type, which only curves need.
        let mut total = memory::filled(X::Acc::ZERO, if bend.is_some() { GROUP * cols } else { 0 });
        let (alpha, beta) = scales(step);
        let (dalpha, dbeta) = (sum_of(grads.dalpha, cols), sum_of(grads.dbeta, cols));
        let mut scales = Scales { alpha, beta, dalpha, dbeta };
        let (store, store_f) = (Store::of(dx, cols), Store::of(df, cols));
        let group = Group::new::<S>(dx_plus.len().max(dy.len()) / cols, cols);
        let mut mask = Mask::new(step.dropout, first_row, group);
        // Spare rows, to read and to write, fill up the last group.
        let (spare_x, spare_f, spare_y) = (group.spare::<X>(), group.spare::<F>(), group.spare::<Y>());
        let (mut spare_dx, mut spare_df) = (group.spare_out::<X>(), group.spare_out::<F>());
        for g in 0..group.count() {
            // If a matrix is absent, its four rows are empty slices.
            let dy = group.rows(g, dy, &spare_y);
            let x_plus = if dy[0].is_empty() { [&[][..]; GROUP] } else { group.rows(g, x_plus, &spare_x) };
            let mut row_gradients = [(Measured::NONE, RowGradient::NONE); GROUP];
            if !dy[0].is_empty() && bend.is_none() {
                let measured = Measured::restore(norm.stats, group.range(g), stats);
                row_gradients = weight.row_gradients::<S, X, Y>(dy, x_plus, measured);
            }
            let x = if scales.dalpha.is_empty() { [&[][..]; GROUP] } else { group.rows(g, x, &spare_x) };
            let f = if scales.dbeta.is_empty() { [&[][..]; GROUP] } else { group.rows(g, f, &spare_f) };
            let dx_plus = group.rows(g, dx_plus, &spare_x);
            let dx = group.rows_mut(g, dx, &mut spare_dx);
            let df = group.rows_mut(g, df, &mut spare_df);
            let bits = mask.group(g);
            if let Some(bend) = &mut bend {
                // A curve's pass computes all of G = dx⁺ + N′(dy), so the scales get it as dx⁺, without dy and without
                // a weight.
                let (rows, to) = (group.range(g).len(), split(&mut total, cols));
                bend.backward::<S, X, Y, X::Acc>(dy, x_plus, dx_plus, rows, to, Store::PLAIN);
                let none = [&[][..]; GROUP];
                let inputs = StepRows { dx_plus: split_ref(&total, cols), dy: [&[]; GROUP], x_plus: none, x, f };
                scales.apply::<S, X, F, Y, X::Acc>(&[], row_gradients, inputs, bits, dx, store, df, store_f);
            } else {
                let inputs = StepRows { dx_plus, dy, x_plus, x, f };
                scales.apply::<S, X, F, Y, X>(weight.columns(), row_gradients, inputs, bits, dx, store, df, store_f);
            }
        }
        store.finish();
        store_f.finish();
        match bend {
            Some(bend) => bend.finish(grads.dweight, grads.dbias, grads.dnumbers),
            None => weight.finish(grads.dweight, grads.dbias),
        }
        // The sums are padded to whole blocks of columns, or empty if not wanted. dα has no factor from dropout, so its
        // dropout is `None`.
        finish(&scales.dalpha[..cols.min(scales.dalpha.len())], None, grads.dalpha);
        finish(&scales.dbeta[..cols.min(scales.dbeta.len())], step.dropout, grads.dbeta);
    }
}

/// Writes x⁺ = α⊙x + β⊙drop(f) of a group of rows to `to`. `alpha` and `beta` have one number per column, and `beta`
/// includes dropout's scale; if both are empty, nothing is dropped, and x⁺ is x + f. `bits` are dropout's random bits.
#[inline(always)]
fn add<S: Isa, X: Element, F: Element<Acc = X::Acc>>(
    alpha: &[X::Acc],
    x: [&[X]; GROUP],
    beta: &[X::Acc],
    bits: Bits,
    f: [&[F]; GROUP],
    to: [&mut [X]; GROUP],
    store: Store,
) {
    // Rows are prefetched one group, that is `ahead` numbers, before they are needed.
    let ahead = GROUP * x[0].len();
    let (scaled, dropped) = (!alpha.is_empty(), bits.is_some());
    let (threshold, bits) = bits.unwrap_or((0, [&[]; GROUP]));
    let mut x = Blocks::of(x);
    let mut f = Blocks::of(f);
    let mut bits = Blocks::of(bits);
    let mut to = BlocksMut::of(to);
    // These are the blocks of coefficients in the parts that follow.
    let (mut alpha, mut beta) = (alpha.as_chunks::<PAIR_LANES>().0, beta.as_chunks::<PAIR_LANES>().0);
    // Part 0 has the whole blocks of a row, and part 1 its padded last block, if there is one.
    for part in 0..PARTS {
        let n = x.len(part);
        let (a, b);
        // `a` and `b` take this part's n blocks of α and β; without scales there are none.
        let coefficients = if scaled { n } else { 0 };
        ((a, alpha), (b, beta)) = (alpha.split_at(coefficients), beta.split_at(coefficients));
        let (x, f, to) = (x.part::<S>(part, n), f.part::<S>(part, n), to.part::<S>(part, n));
        let bits = bits.part::<S>(part, if dropped { n } else { 0 });
        for i in 0..n {
            if !scaled {
                each_row!(S, r => {
                    fetch(&x[r][i], ahead);
                    fetch(&f[r][i], ahead);
                    let (x, f) = (Of::<X::Acc, S>::pair(&x[r][i]), Of::<X::Acc, S>::pair(&f[r][i]));
                    Of::<X::Acc, S>::store([x[0].add(f[0]), x[1].add(f[1])], &mut to[r][i], store);
                });
                continue;
            }
            let (a, b) = (Of::<X::Acc, S>::pair(&a[i]), Of::<X::Acc, S>::pair(&b[i]));
            each_row!(S, r => {
                fetch(&x[r][i], ahead);
                fetch(&f[r][i], ahead);
                let (x, f) = (Of::<X::Acc, S>::pair(&x[r][i]), Of::<X::Acc, S>::pair(&f[r][i]));
                let mut f = [b[0].mul(f[0]), b[1].mul(f[1])];
                if dropped {
                    f = keep::<X::Acc, S>(f, &bits[r][i], threshold);
                }
                let block = [a[0].mul_add(x[0], f[0]), a[1].mul_add(x[1], f[1])];
                Of::<X::Acc, S>::store(block, &mut to[r][i], store);
            });
        }
    }
    to.finish();
}

/// Returns a block, given as two packs, after dropout without its scale: numbers whose random bits are below the
/// threshold are zeroed.
#[inline(always)]
fn keep<A: Accumulator, S: Isa>(block: [Of<A, S>; 2], bits: &[u16; PAIR_LANES], threshold: u16) -> [Of<A, S>; 2] {
    let bits = bits.as_chunks().0;
    [block[0].keep(&bits[0], threshold), block[1].keep(&bits[1], threshold)]
}

/// Copies a group of rows; `store` decides whether the copy bypasses the caches.
#[inline(always)]
fn copy<S: Isa, X: Element>(from: [&[X]; GROUP], to: [&mut [X]; GROUP], store: Store) {
    let mut from = Blocks::of(from);
    let mut to = BlocksMut::of(to);
    // Part 0 has the whole blocks of a row, and part 1 its padded last block, if there is one.
    for part in 0..PARTS {
        let n = from.len(part);
        let (from, to) = (from.part::<S>(part, n), to.part::<S>(part, n));
        for i in 0..n {
            each_row!(S, r => { Of::<X::Acc, S>::store(Of::<X::Acc, S>::pair(&from[r][i]), &mut to[r][i], store) });
        }
    }
    to.finish();
}

#[cfg(test)]
mod tests;
