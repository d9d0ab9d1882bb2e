//! The second half of the backward pass of a residual step x⁺ = α⊙x + β⊙drop(f): computes dx, df and the gradients of α
//! and β from G, the total gradient of x⁺.

use super::mask::Bits;
use super::{keep, StepParameters};
use crate::cpu::memory::Aligned;
use crate::cpu::pack::{Isa, Of, Pack, Store, PAIR_LANES};
use crate::cpu::philox::Dropout;
use crate::cpu::{Accumulator, Element};
use crate::kernel::rows::{
    columns, each_row, fetch, rows, Blocks, BlocksMut, Lines, Measured, RowGradient, GROUP, PARTS,
};

/// The inputs of the gradient for a group of rows; absent rows are empty. If the norm is a curve, `dx_plus` is the
/// total gradient G of x⁺, and `dy` is absent.
pub struct StepRows<'a, X, F, Y, D> {
    pub dx_plus: [&'a [D]; GROUP],
    pub dy: [&'a [Y]; GROUP],
    pub x_plus: [&'a [X]; GROUP],
    pub x: [&'a [X]; GROUP],
    pub f: [&'a [F]; GROUP],
}

/// The scales α and β per column, and the sums per column for their gradients. The scales are empty if both are one and
/// nothing is dropped, the sums if they are not wanted. `beta` includes dropout's scale, `dbeta` does not.
pub struct Scales<A> {
    pub alpha: Aligned<A>,
    pub beta: Aligned<A>,
    pub dalpha: Aligned<A>,
    pub dbeta: Aligned<A>,
}

impl<A: Accumulator> Scales<A> {
    /// Computes dx = α⊙G and df = β⊙drop(G) of a group of rows, and adds Σ G⊙x to dα and Σ G⊙drop(f) to dβ. G is dx⁺ +
    /// N′(dy), where N′(dy) = p·(w⊙dy) + q·x̂ − r with the `row_gradients` p, q and r, and the statistics of x̂.
    /// `weight` is the norm's w per column, or empty for ones; `bits` are dropout's. Empty `dx` or `df` are not wanted.
    #[inline(always)]
    pub fn apply<S: Isa, X: Element<Acc = A>, F: Element<Acc = A>, Y: Element<Acc = A>, D: Element<Acc = A>>(
        &mut self,
        weight: &[A],
        row_gradients: [(Measured<A>, RowGradient<A>); GROUP],
        inputs: StepRows<X, F, Y, D>,
        bits: Bits,
        dx: [&mut [X]; GROUP],
        store: Store,
        df: [&mut [F]; GROUP],
        store_f: Store,
    ) {
        let weighted = !weight.is_empty();
        let (has_dy, has_dx_plus) = (!inputs.dy[0].is_empty(), !inputs.dx_plus[0].is_empty());
        let (wants_dx, wants_df) = (!dx[0].is_empty(), !df[0].is_empty());
        let (wants_dalpha, wants_dbeta) = (!self.dalpha.is_empty(), !self.dbeta.is_empty());
        let (scaled, dropped) = (!self.alpha.is_empty(), bits.is_some());
        let (threshold, bits) = bits.unwrap_or((0, [&[]; GROUP]));
        let lines = rows!(r => Lines::<A, S, true>::of(row_gradients[r]));
        // Rows of dx⁺ are prefetched one group, that is `ahead` numbers, before they are needed.
        let ahead = GROUP * inputs.dx_plus[0].len();
        let mut dy = Blocks::of(inputs.dy);
        let mut x_plus = Blocks::of(inputs.x_plus);
        let mut dx_plus = Blocks::of(inputs.dx_plus);
        let mut x = Blocks::of(inputs.x);
        let mut f = Blocks::of(inputs.f);
        let mut bits = Blocks::of(bits);
        let mut dx = BlocksMut::of(dx);
        let mut df = BlocksMut::of(df);
        // `done` counts the blocks of earlier parts. Part 0 has the whole blocks of a row, and part 1 its padded last
        // block, if there is one.
        let mut done = 0;
        for part in 0..PARTS {
            let n = if has_dy { dy.len(part) } else { dx_plus.len(part) };
            // Tensors and parameters that are absent or not wanted have no blocks.
            let count_if = |used: bool| if used { n } else { 0 };
            let (dy, x_plus) = (dy.part::<S>(part, count_if(has_dy)), x_plus.part::<S>(part, count_if(has_dy)));
            let dx_plus = dx_plus.part::<S>(part, count_if(has_dx_plus));
            let (x, f) = (x.part::<S>(part, count_if(wants_dalpha)), f.part::<S>(part, count_if(wants_dbeta)));
            let bits = bits.part::<S>(part, count_if(dropped));
            let (dx, df) = (dx.part::<S>(part, count_if(wants_dx)), df.part::<S>(part, count_if(wants_df)));
            let range_if = |used: bool| if used { done..done + n } else { 0..0 };
            let weight = &weight.as_chunks::<PAIR_LANES>().0[range_if(weighted)];
            let alpha = &self.alpha.as_chunks::<PAIR_LANES>().0[range_if(scaled)];
            let beta = &self.beta.as_chunks::<PAIR_LANES>().0[range_if(scaled)];
            let dalpha = &mut self.dalpha.as_chunks_mut::<PAIR_LANES>().0[range_if(wants_dalpha)];
            let dbeta = &mut self.dbeta.as_chunks_mut::<PAIR_LANES>().0[range_if(wants_dbeta)];
            done += n;
            for i in 0..n {
                // `total` is G in this block of each row, as two packs: first N′(dy), then dx⁺ is added.
                let mut total = [[Of::<A, S>::zero(); 2]; GROUP];
                if has_dy {
                    let w = if weighted { Of::<A, S>::pair(&weight[i]) } else { [Of::<A, S>::splat(A::ONE); 2] };
                    each_row!(S, r => {
                        let (dy, x) = (Of::<A, S>::pair(&dy[r][i]), Of::<A, S>::pair(&x_plus[r][i]));
                        total[r] = [lines[r].at(w[0].mul(dy[0]), x[0]), lines[r].at(w[1].mul(dy[1]), x[1])];
                    });
                }
                if has_dx_plus {
                    each_row!(S, r => {
                        fetch(&dx_plus[r][i], ahead);
                        let dx_plus = Of::<A, S>::pair(&dx_plus[r][i]);
                        total[r] = [total[r][0].add(dx_plus[0]), total[r][1].add(dx_plus[1])];
                    });
                }
                if wants_dx && scaled {
                    let a = Of::<A, S>::pair(&alpha[i]);
                    each_row!(S, r => {
                        Of::<A, S>::store([a[0].mul(total[r][0]), a[1].mul(total[r][1])], &mut dx[r][i], store);
                    });
                } else if wants_dx {
                    each_row!(S, r => { Of::<A, S>::store(total[r], &mut dx[r][i], store) });
                }
                if wants_dalpha {
                    let mut sum = Of::<A, S>::pair(&dalpha[i]);
                    each_row!(S, r => {
                        let x = Of::<A, S>::pair(&x[r][i]);
                        sum = [x[0].mul_add(total[r][0], sum[0]), x[1].mul_add(total[r][1], sum[1])];
                    });
                    Of::<A, S>::store(sum, &mut dalpha[i], Store::PLAIN);
                }
                if wants_df {
                    let b = if scaled { Of::<A, S>::pair(&beta[i]) } else { [Of::<A, S>::splat(A::ONE); 2] };
                    each_row!(S, r => {
                        let mut block = [b[0].mul(total[r][0]), b[1].mul(total[r][1])];
                        if dropped {
                            block = keep::<A, S>(block, &bits[r][i], threshold);
                        }
                        Of::<A, S>::store(block, &mut df[r][i], store_f);
                    });
                }
                if wants_dbeta {
                    let mut sum = Of::<A, S>::pair(&dbeta[i]);
                    each_row!(S, r => {
                        let f = Of::<A, S>::pair(&f[r][i]);
                        // Dropout zeroes the product, not one of its factors: 0 times infinity would be NaN.
                        let mut products = [f[0].mul(total[r][0]), f[1].mul(total[r][1])];
                        if dropped {
                            products = keep::<A, S>(products, &bits[r][i], threshold);
                        }
                        sum = [sum[0].add(products[0]), sum[1].add(products[1])];
                    });
                    Of::<A, S>::store(sum, &mut dbeta[i], Store::PLAIN);
                }
            }
        }
        dx.finish();
        df.finish();
    }
}

/// Returns a zero for each column's sum, padded to whole blocks; it is empty if the gradient is empty, that is, not
/// wanted.
pub fn sum_of<A: Accumulator>(gradient: &[A], cols: usize) -> Aligned<A> {
    Aligned::new(if gradient.is_empty() { 0 } else { cols.next_multiple_of(PAIR_LANES) })
}

/// Adds the sums per column, times dropout's scale, to the gradient. A gradient of one number receives the total.
pub fn finish<A: Accumulator>(sums: &[A], dropout: Option<Dropout>, gradient: &mut [A]) {
    let scale = A::from_f64(dropout.map_or(1.0, |d| d.scale));
    for (i, sum) in sums.iter().enumerate() {
        gradient[if gradient.len() == 1 { 0 } else { i }] += scale * *sum;
    }
}

/// Returns (α, β·scale) per column, where `scale` is dropout's factor of kept elements. Both are empty if α and β are 1
/// and there is no dropout, because then x⁺ is x + f.
pub fn scales<A: Accumulator>(step: &StepParameters<A>) -> (Aligned<A>, Aligned<A>) {
    if step.alpha.is_empty() && step.beta.is_empty() && step.dropout.is_none() {
        return (Aligned::new(0), Aligned::new(0));
    }
    let scale = A::from_f64(step.dropout.map_or(1.0, |d| d.scale));
    let mut beta = columns(step.beta, step.cols, A::ONE);
    for beta in beta.iter_mut() {
        *beta = *beta * scale;
    }
    (columns(step.alpha, step.cols, A::ONE), beta)
}
