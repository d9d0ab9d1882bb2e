//! The fused residual step: x⁺ = α⊙x + β⊙drop(f) and y = N(x⁺), in one pass over memory each way.
//!
//! x is the residual stream, f what the sublayer made of it, α and β the scheme's scales (docs/spec.md §2.2), drop the
//! dropout on the sublayer's output, N the next norm: the scheme's own (post-norm) or the next sublayer's (pre-norm).
//! y is computed from x⁺ as rounded to x's type, the numbers that the backward pass reads. With G = dx⁺ + N′(dy),
//!
//! > dx = α⊙G,  df = β⊙drop(G),  dα = Σ G⊙x,  dβ = Σ G⊙drop(f)   (sums over rows)
//!
//! The mask is never stored: both directions draw it from Philox (`cpu/philox.rs`) by the element's place. In plain
//! PyTorch calls the same takes three passes to draw and apply the mask and eight for the addition, the norm and
//! their gradients; here it is four forward and five backward.

use crate::cpu::convert::Row;
use crate::cpu::pack::{Isa, Of, Pack, Store, BLOCK};
use crate::cpu::philox::Dropout;
use crate::cpu::{memory, Accumulator, Element};
use crate::kernel::rows::curve::{Bend, BendBack, NUMBERS};
use crate::kernel::rows::{
    columns, each_row, fetch, normalise, rows, split, split_ref, Blocks, BlocksMut, Group, Lines, Measured, NoNorm,
    RowNorm, Rule, Rules, Slope, Weight, GROUP, PARTS,
};
use crate::multiversion;
use crate::row_program;
use mask::{Bits, Mask};

pub mod call;
mod mask;

/// The step without a norm. With one, the norm's rules and its program take the step.
pub static NO_NORM: Rules = Rules::of::<NoNorm>(row_program!("no_norm.cu"));

/// What does not change from row to row. A scale is empty (one), one number, or one per column; `weight`, `bias`, `eps`
/// and, of a curve, `numbers` are the norm's.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a, A> {
    pub cols: usize,
    pub alpha: &'a [A],
    pub beta: &'a [A],
    pub dropout: Option<Dropout>,
    pub weight: &'a [A],
    pub bias: &'a [A],
    pub eps: A,
    pub numbers: [A; NUMBERS],
}

/// Sums over rows, added to: each as long as its parameter, or empty where not wanted.
#[derive(Debug)]
pub struct Gradients<'a, A> {
    pub dweight: &'a mut [A],
    pub dbias: &'a mut [A],
    pub dalpha: &'a mut [A],
    pub dbeta: &'a mut [A],
    pub dnumbers: &'a mut [A],
}

/// x⁺ and y for the rows of `x`, the first of which is row `first_row` of the whole. `y` is empty where there is no
/// norm; `stats` receives `N::STATS` numbers a row.
pub fn forward<N: RowNorm, X: Element, F: Element<Acc = X::Acc>, Y: Element<Acc = X::Acc>>(
    step: &Step<X::Acc>,
    first_row: usize,
    x: &[X],
    f: &[F],
    x_plus: &mut [X],
    y: &mut [Y],
    stats: &mut [X::Acc],
) {
    forward_by(&Rule::of::<N>(), step, first_row, x, f, x_plus, y, stats);
}

/// The gradient of [`forward`]: overwrites `dx` and `df` (either may be empty: not wanted), adds to `grads`.
///
/// `dx_plus` or `dy` is empty where nothing came back on that side; `x_plus` and `stats` are read only with `dy`, `x`
/// only with `grads.dalpha`, `f` only with `grads.dbeta`.
pub fn backward<N: RowNorm, X: Element, F: Element<Acc = X::Acc>, Y: Element<Acc = X::Acc>>(
    step: &Step<X::Acc>,
    first_row: usize,
    dx_plus: &[X],
    dy: &[Y],
    x_plus: &[X],
    x: &[X],
    f: &[F],
    stats: &[X::Acc],
    dx: &mut [X],
    df: &mut [F],
    grads: &mut Gradients<X::Acc>,
) {
    backward_by(&Rule::of::<N>(), step, first_row, dx_plus, dy, x_plus, x, f, stats, dx, df, grads);
}

multiversion! {
    /// [`forward`] with the norm of this rule.
    pub fn forward_by[isa S][X: Element, F: Element<Acc = X::Acc>, Y: Element<Acc = X::Acc>](
        rule: &Rule<X::Acc>, step: &Step<X::Acc>, first_row: usize, x: &[X], f: &[F], x_plus: &mut [X], y: &mut [Y],
        stats: &mut [X::Acc],
    ) {
        let cols = step.cols;
        if cols == 0 {
            return;
        }
        let (alpha, beta) = (columns(step.alpha, cols, X::Acc::ONE), branch_scale(step));
        let weight = columns(step.weight, cols, X::Acc::ONE);
        let bias = columns(step.bias, cols, X::Acc::ZERO);
        let (store, store_y) = (Store::of(x_plus, cols), Store::of(y, cols));
        let group = Group::new(x.len() / cols, cols);
        let mut mask = Mask::new(step.dropout, first_row, group);
        let (spare_x, spare_f) = (group.spare::<X>(1), group.spare::<F>(1));
        let (mut spare_x_plus, mut spare_y) = (group.spare::<X>(GROUP), group.spare::<Y>(GROUP));
        let mut bend = rule.curve.as_ref().map(|curve| Bend::new(curve, step.numbers, cols));
        // What is streamed is out of reach: the norm reads x⁺ from here.
        let held_apart = !y.is_empty() && store.is_streamed();
        let mut held = memory::filled(X::default(), if held_apart { GROUP * cols } else { 0 });
        for g in 0..group.count() {
            let (x, f) = (group.rows(g, x, &spare_x), group.rows(g, f, &spare_f));
            if held_apart {
                add::<S, X, F>(&alpha, x, &beta, mask.group(g), f, split(&mut held, cols), Store::PLAIN);
                copy::<S, X>(split_ref(&held, cols), group.rows_mut(g, x_plus, &mut spare_x_plus), store);
            } else {
                let x_plus = group.rows_mut(g, x_plus, &mut spare_x_plus);
                add::<S, X, F>(&alpha, x, &beta, mask.group(g), f, x_plus, store);
            }
            if y.is_empty() {
                continue;
            }
            let x_plus = if held_apart { split_ref(&held, cols) } else { group.rows(g, x_plus, &spare_x_plus) };
            if let Some(bend) = &mut bend {
                let y = group.rows_mut(g, y, &mut spare_y);
                bend.forward::<S, X, Y>(x_plus, group.range(g).len(), &weight, &bias, y, store_y);
                continue;
            }
            let found = rule.measure::<S, X>(x_plus, step.eps);
            for (r, found) in group.range(g).zip(found) {
                found.keep(rule.stats, r, stats);
            }
            normalise::<S, X, Y, true>(x_plus, found, &weight, &bias, group.rows_mut(g, y, &mut spare_y), store_y);
        }
        store.finish();
        store_y.finish();
    }
}

multiversion! {
    /// [`backward`] with the norm of this rule.
    pub fn backward_by[isa S][X: Element, F: Element<Acc = X::Acc>, Y: Element<Acc = X::Acc>](
        rule: &Rule<X::Acc>, step: &Step<X::Acc>, first_row: usize, dx_plus: &[X], dy: &[Y], x_plus: &[X], x: &[X],
        f: &[F], stats: &[X::Acc], dx: &mut [X], df: &mut [F], grads: &mut Gradients<X::Acc>,
    ) {
        let cols = step.cols;
        if cols == 0 {
            return;
        }
        let mut weight = Weight::new(rule, step.weight, cols, step.eps, grads.dweight, grads.dbias);
        let mut bend = match &rule.curve {
            Some(curve) if !dy.is_empty() => {
                Some(BendBack::new(curve, step.numbers, step.weight, cols, grads.dweight, grads.dbias, grads.dnumbers))
            }
            _ => None,
        };
        // A curve's G, in the type that it is computed in.
        let mut total = memory::filled(X::Acc::ZERO, if bend.is_some() { GROUP * cols } else { 0 });
        let mut scales = Scales {
            alpha: columns(step.alpha, cols, X::Acc::ONE),
            beta: branch_scale(step),
            dalpha: sum_of(grads.dalpha, cols),
            dbeta: sum_of(grads.dbeta, cols),
        };
        let (store, store_f) = (Store::of(dx, cols), Store::of(df, cols));
        let group = Group::new(dx_plus.len().max(dy.len()) / cols, cols);
        let mut mask = Mask::new(step.dropout, first_row, group);
        let (spare_x, spare_f, spare_y) = (group.spare::<X>(1), group.spare::<F>(1), group.spare::<Y>(1));
        let (mut spare_dx, mut spare_df) = (group.spare::<X>(GROUP), group.spare::<F>(GROUP));
        for g in 0..group.count() {
            // Absent rows are empty.
            let dy = group.rows(g, dy, &spare_y);
            let x_plus = if dy[0].is_empty() { [&[][..]; GROUP] } else { group.rows(g, x_plus, &spare_x) };
            let mut slopes = [(Measured::NONE, Slope::NONE); GROUP];
            if !dy[0].is_empty() && bend.is_none() {
                slopes = weight.slopes::<S, X, Y>(dy, x_plus, Measured::restore(rule.stats, group.range(g), stats));
            }
            let x = if scales.dalpha.is_empty() { [&[][..]; GROUP] } else { group.rows(g, x, &spare_x) };
            let f = if scales.dbeta.is_empty() { [&[][..]; GROUP] } else { group.rows(g, f, &spare_f) };
            let dx_plus = group.rows(g, dx_plus, &spare_x);
            let dx = group.rows_mut(g, dx, &mut spare_dx);
            let df = group.rows_mut(g, df, &mut spare_df);
            let bits = mask.group(g);
            if let Some(bend) = &mut bend {
                let (rows, to) = (group.range(g).len(), split(&mut total, cols));
                bend.backward::<S, X, Y, X::Acc>(dy, x_plus, dx_plus, rows, to, Store::PLAIN);
                let none = [&[][..]; GROUP];
                let sides = Sides { dx_plus: split_ref(&total, cols), dy: [&[]; GROUP], x_plus: none, x, f };
                scales.apply::<S, X, F, Y, X::Acc>(&[], slopes, sides, bits, dx, store, df, store_f);
            } else {
                let sides = Sides { dx_plus, dy, x_plus, x, f };
                scales.apply::<S, X, F, Y, X>(weight.columns(), slopes, sides, bits, dx, store, df, store_f);
            }
        }
        store.finish();
        store_f.finish();
        match bend {
            Some(bend) => bend.finish(grads.dweight, grads.dbias, grads.dnumbers),
            None => weight.finish(grads.dweight, grads.dbias),
        }
        finish(&scales.dalpha[..cols.min(scales.dalpha.len())], None, grads.dalpha);
        finish(&scales.dbeta[..cols.min(scales.dbeta.len())], step.dropout, grads.dbeta);
    }
}

/// x⁺ = α⊙x + β⊙drop(f).
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
    let ahead = GROUP * x[0].len();
    let dropped = bits.is_some();
    let (threshold, bits) = bits.unwrap_or((0, [&[]; GROUP]));
    let (x, f, bits, mut to) = (Blocks::of(x), Blocks::of(f), Blocks::of(bits), BlocksMut::of(to));
    let (mut alpha, mut beta) = (alpha.as_chunks::<BLOCK>().0, beta.as_chunks::<BLOCK>().0);
    for part in 0..PARTS {
        let n = x.len(part);
        let (a, b);
        ((a, alpha), (b, beta)) = (alpha.split_at(n), beta.split_at(n));
        let (x, f, to) = (x.part(part, n), f.part(part, n), to.part(part, n));
        let bits = bits.part(part, if dropped { n } else { 0 });
        for i in 0..n {
            let (a, b) = (Of::<X::Acc, S>::pair(&a[i]), Of::<X::Acc, S>::pair(&b[i]));
            each_row!(r => {
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

#[inline(always)]
fn keep<A: Accumulator, S: Isa>(v: [Of<A, S>; 2], bits: &[u16; BLOCK], threshold: u16) -> [Of<A, S>; 2] {
    let bits = bits.as_chunks().0;
    [v[0].keep(&bits[0], threshold), v[1].keep(&bits[1], threshold)]
}

#[inline(always)]
fn copy<S: Isa, X: Element>(from: [&[X]; GROUP], to: [&mut [X]; GROUP], store: Store) {
    let (from, mut to) = (Blocks::of(from), BlocksMut::of(to));
    for part in 0..PARTS {
        let n = from.len(part);
        let (from, to) = (from.part(part, n), to.part(part, n));
        for i in 0..n {
            each_row!(r => { Of::<X::Acc, S>::store(Of::<X::Acc, S>::pair(&from[r][i]), &mut to[r][i], store) });
        }
    }
    to.finish();
}

/// What the gradient reads of a group of rows; absent rows are empty. With a curve `dx_plus` is G itself.
struct Sides<'a, X, F, Y, D> {
    dx_plus: [&'a [D]; GROUP],
    dy: [&'a [Y]; GROUP],
    x_plus: [&'a [X]; GROUP],
    x: [&'a [X]; GROUP],
    f: [&'a [F]; GROUP],
}

/// The scales α and β per column, and the sums of their gradients (but for dropout's scale); these are empty where not
/// wanted.
struct Scales<A> {
    alpha: Row<A>,
    beta: Row<A>,
    dalpha: Row<A>,
    dbeta: Row<A>,
}

impl<A: Accumulator> Scales<A> {
    /// dx = α⊙G and df = β⊙drop(G) of G = dx⁺ + N′(dy), and what a group adds to dα and dβ.
    #[inline(always)]
    fn apply<S: Isa, X: Element<Acc = A>, F: Element<Acc = A>, Y: Element<Acc = A>, D: Element<Acc = A>>(
        &mut self,
        weight: &[A],
        slopes: [(Measured<A>, Slope<A>); GROUP],
        sides: Sides<X, F, Y, D>,
        bits: Bits,
        dx: [&mut [X]; GROUP],
        store: Store,
        df: [&mut [F]; GROUP],
        store_f: Store,
    ) {
        let weighted = !weight.is_empty();
        let (has_dy, has_dx_plus) = (!sides.dy[0].is_empty(), !sides.dx_plus[0].is_empty());
        let (wants_dx, wants_df) = (!dx[0].is_empty(), !df[0].is_empty());
        let (wants_dalpha, wants_dbeta) = (!self.dalpha.is_empty(), !self.dbeta.is_empty());
        let dropped = bits.is_some();
        let (threshold, bits) = bits.unwrap_or((0, [&[]; GROUP]));
        let lines = rows!(r => Lines::<A, S, true>::of(slopes[r]));
        let ahead = GROUP * sides.dx_plus[0].len();
        let (dy, x_plus, dx_plus) = (Blocks::of(sides.dy), Blocks::of(sides.x_plus), Blocks::of(sides.dx_plus));
        let (x, f, bits) = (Blocks::of(sides.x), Blocks::of(sides.f), Blocks::of(bits));
        let (mut dx, mut df) = (BlocksMut::of(dx), BlocksMut::of(df));
        let mut done = 0;
        for part in 0..PARTS {
            let n = if has_dy { dy.len(part) } else { dx_plus.len(part) };
            let of = |there: bool| if there { n } else { 0 };
            let (dy, x_plus) = (dy.part(part, of(has_dy)), x_plus.part(part, of(has_dy)));
            let dx_plus = dx_plus.part(part, of(has_dx_plus));
            let (x, f) = (x.part(part, of(wants_dalpha)), f.part(part, of(wants_dbeta)));
            let bits = bits.part(part, of(dropped));
            let (dx, df) = (dx.part(part, of(wants_dx)), df.part(part, of(wants_df)));
            let here = |there: bool| if there { done..done + n } else { 0..0 };
            let weight = &weight.as_chunks::<BLOCK>().0[here(weighted)];
            let alpha = &self.alpha.as_chunks::<BLOCK>().0[here(true)];
            let beta = &self.beta.as_chunks::<BLOCK>().0[here(true)];
            let dalpha = &mut self.dalpha.as_chunks_mut::<BLOCK>().0[here(wants_dalpha)];
            let dbeta = &mut self.dbeta.as_chunks_mut::<BLOCK>().0[here(wants_dbeta)];
            done += n;
            for i in 0..n {
                let mut total = [[Of::<A, S>::zero(); 2]; GROUP];
                if has_dy {
                    let w = if weighted { Of::<A, S>::pair(&weight[i]) } else { [Of::<A, S>::splat(A::ONE); 2] };
                    each_row!(r => {
                        let (dy, x) = (Of::<A, S>::pair(&dy[r][i]), Of::<A, S>::pair(&x_plus[r][i]));
                        total[r] = [lines[r].at(w[0].mul(dy[0]), x[0]), lines[r].at(w[1].mul(dy[1]), x[1])];
                    });
                }
                if has_dx_plus {
                    each_row!(r => {
                        fetch(&dx_plus[r][i], ahead);
                        let d = Of::<A, S>::pair(&dx_plus[r][i]);
                        total[r] = [total[r][0].add(d[0]), total[r][1].add(d[1])];
                    });
                }
                if wants_dx {
                    let a = Of::<A, S>::pair(&alpha[i]);
                    each_row!(r => {
                        Of::<A, S>::store([a[0].mul(total[r][0]), a[1].mul(total[r][1])], &mut dx[r][i], store);
                    });
                }
                if wants_dalpha {
                    let mut sum = Of::<A, S>::pair(&dalpha[i]);
                    each_row!(r => {
                        let x = Of::<A, S>::pair(&x[r][i]);
                        sum = [x[0].mul_add(total[r][0], sum[0]), x[1].mul_add(total[r][1], sum[1])];
                    });
                    Of::<A, S>::store(sum, &mut dalpha[i], Store::PLAIN);
                }
                if wants_df {
                    let b = Of::<A, S>::pair(&beta[i]);
                    each_row!(r => {
                        let mut d = [b[0].mul(total[r][0]), b[1].mul(total[r][1])];
                        if dropped {
                            d = keep::<A, S>(d, &bits[r][i], threshold);
                        }
                        Of::<A, S>::store(d, &mut df[r][i], store_f);
                    });
                }
                if wants_dbeta {
                    let mut sum = Of::<A, S>::pair(&dbeta[i]);
                    each_row!(r => {
                        let f = Of::<A, S>::pair(&f[r][i]);
                        // The product is dropped, not the factor: what was dropped may have been infinite.
                        let mut d = [f[0].mul(total[r][0]), f[1].mul(total[r][1])];
                        if dropped {
                            d = keep::<A, S>(d, &bits[r][i], threshold);
                        }
                        sum = [sum[0].add(d[0]), sum[1].add(d[1])];
                    });
                    Of::<A, S>::store(sum, &mut dbeta[i], Store::PLAIN);
                }
            }
        }
        dx.finish();
        df.finish();
    }
}

/// Columns to sum in: none where the gradient is not wanted.
fn sum_of<A: Accumulator>(gradient: &[A], cols: usize) -> Row<A> {
    Row::new(if gradient.is_empty() { 0 } else { cols.next_multiple_of(BLOCK) })
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
    let mut beta = columns(step.beta, step.cols, A::ONE);
    for beta in beta.iter_mut() {
        *beta = *beta * scale;
    }
    beta
}

#[cfg(test)]
mod tests;
