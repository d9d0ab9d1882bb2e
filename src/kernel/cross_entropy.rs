//! Label-smoothed cross-entropy over the target vocabulary V_t, a subset of the |V| logits in a row.
//!
//! > p = softmax over V_t,  loss = A·(−log p_t) + B·Σ_{v∈V_t} −log p_v
//! > ∂loss/∂z_v = (A + B|V_t|)·p_v − A·1[v = t] − B  on V_t,  0 outside
//!
//! z are the row's logits and t is its target; A and B come from the smoothing rate ε by one of two formulas
//! ([`Smoothing`]). A logit outside V_t counts as −∞, whatever its value. Source: docs/spec.md §4.6, §4.7 (fairseq's
//! label_smoothed_cross_entropy and the release of Nguyen & Salazar 2019). A NaN inside V_t makes its row's loss NaN.
//!
//! The row's maximum m is subtracted before the exponential and never added again, so logits may share an offset of any
//! size. −log p_t = (m − z_t) + log Σ exp(z − m) and Σ −log p_v = |V_t|·(−log p_t) − Σ(z_v − z_t), combined in f64; the
//! backward pass receives m and Σ exp(z − m). A row is processed within the first two cache levels, in three passes
//! (select, exponential, gradient). Each is a flat loop over 256 columns that any instruction set vectorises, with the
//! sums in separate loops.

use crate::cpu::pack::Isa;
use crate::cpu::{memory, Accumulator, Element};
use crate::cuda::{Program, CHUNK, PRELUDE, REDUCE};
use crate::kernel::math::{exp, max, sum};
use crate::multiversion;

pub mod call;
pub mod composed;

/// The CUDA program of this kernel.
pub static PROGRAM: Program = Program {
    name: "cross_entropy.cu",
    files: &[PRELUDE, CHUNK, REDUCE, include_str!("cross_entropy.cu")],
    structs: call::STRUCTS,
};

/// The number of columns processed together: 1 KiB of f32, so that the exponentials are still in the first-level
/// cache when they are added up.
const B: usize = 256;

/// A block of numbers, aligned to a cache line because a 64-byte store across two cache lines costs twice as much.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Lanes<A, const N: usize = B>([A; N]);

/// The two weights of the loss A·(−log p_t) + B·Σ −log p_v, where t is the target and v runs over the target
/// vocabulary V_t.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Smoothing {
    /// The weight A of the target's −log p_t.
    pub nll: f64,
    /// The weight B of every −log p_v in V_t.
    pub uniform: f64,
}

impl Smoothing {
    /// Returns fairseq's weights: A = 1 − ε − B and B = ε/(|V_t| − 1), where `valid` is |V_t|. With a single valid word
    /// there is nothing to smooth, and B is 0.
    pub fn fairseq(epsilon: f64, valid: usize) -> Self {
        let uniform = if valid > 1 { epsilon / (valid - 1) as f64 } else { 0.0 };
        Smoothing { nll: 1.0 - epsilon - uniform, uniform }
    }

    /// Returns the weights of Transformers without Tears: A = 1 − ε and B = ε/|V_t|, where `valid` is |V_t|.
    pub fn twt(epsilon: f64, valid: usize) -> Self {
        Smoothing { nll: 1.0 - epsilon, uniform: epsilon / valid.max(1) as f64 }
    }
}

/// The targets of all rows.
#[derive(Clone, Copy, Debug)]
pub struct Targets<'a> {
    /// The target word of each row.
    pub ids: &'a [i64],
    /// The id that marks ignored rows, whose loss and gradient are 0.
    pub ignore: i64,
}

/// Computes the label-smoothed `loss` and `nll` = −log p_t of every row of `cols` logits z. p is the softmax over the
/// target vocabulary V_t, and t is the row's target. `lse` receives log Σ exp z over V_t as two numbers per row, m =
/// max z and Σ exp(z − m). All results are 0 for ignored rows.
///
/// `mask` has a byte per column, 1 in V_t; if it is empty, V_t contains all columns. If a target is neither ignored
/// nor in V_t, nothing is written, and `Err` holds the first such row.
pub fn forward<E: Element>(
    cols: usize,
    logits: &[E],
    targets: Targets,
    mask: &[u8],
    smoothing: Smoothing,
    loss: &mut [E::Acc],
    nll: &mut [E::Acc],
    lse: &mut [E::Acc],
) -> Result<(), usize> {
    let rows = targets.ids.len();
    assert!(logits.len() == rows * cols && loss.len() == rows && nll.len() == rows && lse.len() == 2 * rows);
    let vocabulary = &check(cols, targets, mask)?;
    forward_rows(cols, logits, targets, vocabulary, smoothing, loss, nll, lse, &mut scratch::<E>(cols));
    Ok(())
}

/// Computes `dlogits`, the gradient of the logits, from `dloss`, the gradient of each row's loss, and [`forward`]'s
/// `lse`. The mask and the error are as in [`forward`].
pub fn backward<E: Element>(
    cols: usize,
    logits: &[E],
    targets: Targets,
    mask: &[u8],
    smoothing: Smoothing,
    lse: &[E::Acc],
    dloss: &[E::Acc],
    dlogits: &mut [E],
) -> Result<(), usize> {
    let rows = targets.ids.len();
    assert!(
        logits.len() == rows * cols && dlogits.len() == rows * cols && lse.len() == 2 * rows && dloss.len() == rows
    );
    let vocabulary = &check(cols, targets, mask)?;
    backward_rows(cols, logits, targets, vocabulary, smoothing, lse, dloss, dlogits);
    Ok(())
}

/// Computes `loss` and `nll` as [`forward`] does, and overwrites the logits z with `scale`·∂loss/∂z. The mask and the
/// error are as in [`forward`].
///
/// This is for training: it computes one exponential per logit instead of two. Call it on blocks of rows that are still
/// in the cache.
pub fn in_place<E: Element>(
    cols: usize,
    logits: &mut [E],
    targets: Targets,
    mask: &[u8],
    smoothing: Smoothing,
    scale: E::Acc,
    loss: &mut [E::Acc],
    nll: &mut [E::Acc],
) -> Result<(), usize> {
    let rows = targets.ids.len();
    assert!(logits.len() == rows * cols && loss.len() == rows && nll.len() == rows);
    let vocabulary = &check(cols, targets, mask)?;
    let scratch = &mut scratch::<E>(cols);
    in_place_rows(cols, logits, targets, vocabulary, smoothing, scale, loss, nll, scratch);
    Ok(())
}

/// The target vocabulary V_t: its size, and for each column 1 inside V_t, else 0. The ones and zeros have the
/// accumulation type, because AVX2's loops would not vectorise with bytes.
struct VocabularyMask<A> {
    /// One or zero for each column, in blocks of [`B`].
    keep: Vec<Lanes<A>>,
    /// The size |V_t|.
    size: usize,
}

/// Returns the mask of the target vocabulary V_t in the form that the loops read; an empty `mask` means all columns.
/// `Err` holds the first row whose target is neither ignored nor in V_t.
fn check<A: Accumulator>(cols: usize, targets: Targets, mask: &[u8]) -> Result<VocabularyMask<A>, usize> {
    assert!(mask.is_empty() || mask.len() == cols, "a mask of {} for {cols} columns", mask.len());
    let mut keep = memory::filled(Lanes([A::ZERO; B]), cols.div_ceil(B));
    let mut size = 0;
    for v in 0..cols {
        if mask.is_empty() || mask[v] != 0 {
            keep[v / B].0[v % B] = A::ONE;
            size += 1;
        }
    }
    let is_inside = |id: i64| usize::try_from(id).is_ok_and(|v| v < cols && keep[v / B].0[v % B] != A::ZERO);
    match targets.ids.iter().position(|id| *id != targets.ignore && !is_inside(*id)) {
        Some(row) => Err(row),
        None => Ok(VocabularyMask { keep, size }),
    }
}

/// Allocates the workspace of a row, `cols` numbers rounded up to whole blocks.
fn scratch<E: Element>(cols: usize) -> Vec<Lanes<E::Acc>> {
    memory::filled(Lanes([E::Acc::ZERO; B]), cols.div_ceil(B))
}

multiversion! {
    /// Computes [`forward`] for targets that are ignored or in V_t; `scratch` is the workspace of one row.
    fn forward_rows[isa S][E: Element](
        cols: usize,
        logits: &[E],
        targets: Targets,
        vocabulary: &VocabularyMask<E::Acc>,
        smoothing: Smoothing,
        loss: &mut [E::Acc],
        nll: &mut [E::Acc],
        lse: &mut [E::Acc],
        scratch: &mut [Lanes<E::Acc>],
    ) {
        for (r, &target) in targets.ids.iter().enumerate() {
            let lse = &mut lse[2 * r..][..2];
            (loss[r], nll[r]) = (E::Acc::ZERO, E::Acc::ZERO);
            lse.fill(E::Acc::ZERO);
            if target == targets.ignore {
                continue;
            }
            let z = &logits[r * cols..(r + 1) * cols];
            let sums = softmax::<S, E>(z, z[target as usize].load(), vocabulary, scratch);
            (loss[r], nll[r]) = sums.losses(vocabulary.size, smoothing);
            lse.copy_from_slice(&[sums.max, sums.exp]);
        }
    }
}

multiversion! {
    /// Computes [`backward`] for targets that are ignored or in V_t.
    fn backward_rows[isa S][E: Element](
        cols: usize,
        logits: &[E],
        targets: Targets,
        vocabulary: &VocabularyMask<E::Acc>,
        smoothing: Smoothing,
        lse: &[E::Acc],
        dloss: &[E::Acc],
        dlogits: &mut [E],
    ) {
        for (r, &target) in targets.ids.iter().enumerate() {
            let (z, dz) = (&logits[r * cols..(r + 1) * cols], &mut dlogits[r * cols..(r + 1) * cols]);
            if target == targets.ignore {
                dz.fill(E::store(E::Acc::ZERO));
                continue;
            }
            let [max, sum_exp] = [lse[2 * r], lse[2 * r + 1]];
            let mut weights = Weights::new(smoothing, vocabulary.size, dloss[r]);
            // p_v = exp(z_v − max)/Σ exp(z − max). The divisor is the same for all columns, so it enters the
            // coefficient.
            weights.all = weights.all / sum_exp;
            gradient_from_max::<E, S>(z, &vocabulary.keep, max, weights, dz);
            // The target's gradient has another constant term, so it replaces what the loop over all columns wrote.
            dz[target as usize] = E::store(weights.of_target((z[target as usize].load() - max).exp()));
        }
    }
}

multiversion! {
    /// Computes [`in_place`] for targets that are ignored or in V_t; `scratch` is the workspace of one row.
    fn in_place_rows[isa S][E: Element](
        cols: usize,
        logits: &mut [E],
        targets: Targets,
        vocabulary: &VocabularyMask<E::Acc>,
        smoothing: Smoothing,
        scale: E::Acc,
        loss: &mut [E::Acc],
        nll: &mut [E::Acc],
        scratch: &mut [Lanes<E::Acc>],
    ) {
        for (r, &target) in targets.ids.iter().enumerate() {
            let z = &mut logits[r * cols..(r + 1) * cols];
            if target == targets.ignore {
                (loss[r], nll[r]) = (E::Acc::ZERO, E::Acc::ZERO);
                z.fill(E::store(E::Acc::ZERO));
                continue;
            }
            let target = target as usize;
            let sums = softmax::<S, E>(z, z[target].load(), vocabulary, scratch);
            (loss[r], nll[r]) = sums.losses(vocabulary.size, smoothing);
            let mut weights = Weights::new(smoothing, vocabulary.size, scale);
            // p_v = exp(z_v − max)/Σ exp(z − max). The divisor is the same for all columns, so it enters the
            // coefficient.
            weights.all = weights.all / sums.exp;
            gradient_from_exp(scratch, weights, z);
            // The target's gradient has another constant term, so it replaces what the loop over all columns wrote.
            z[target] = E::store(weights.of_target(scratch[target / B].0[target % B]));
        }
    }
}

/// The coefficients of ∂loss/∂z: it is `all`·e − `uniform`, or `all`·e − `target` at the target, where e = exp(z − max
/// z).
#[derive(Clone, Copy)]
struct Weights<A> {
    all: A,
    uniform: A,
    target: f64,
}

impl<A: Accumulator> Weights<A> {
    /// Returns `scale` times the coefficients of ∂loss/∂z = (A + B|V_t|)·p − B, or (A + B|V_t|)·p − (A + B) at the
    /// target; `size` is |V_t|. They multiply p, so the caller divides `all` by the row's sum of exponentials.
    #[inline(always)]
    fn new(smoothing: Smoothing, size: usize, scale: A) -> Self {
        let Smoothing { nll, uniform } = smoothing;
        Weights {
            all: A::from_f64(nll + uniform * size as f64) * scale,
            uniform: A::from_f64(uniform) * scale,
            target: (nll + uniform) * scale.to_f64(),
        }
    }

    /// Returns the target's gradient from its exponential exp(z − max z). This gradient is rounded only once, from f64,
    /// because it is the row's largest, and the loss's A + B is not exact in f32.
    #[inline(always)]
    fn of_target(&self, exp: A) -> A {
        A::from_f64(self.all.to_f64() * exp.to_f64() - self.target)
    }
}

/// A row's target logit, and sums over the logits z in the target vocabulary V_t.
struct LogitSums<A> {
    /// The target's logit z_t.
    target: A,
    /// The largest logit m.
    max: A,
    /// Σ exp(z − m).
    exp: A,
    /// Σ(z − z_t).
    above: A,
}

impl<A: Accumulator> LogitSums<A> {
    /// Returns (loss, −log p_t) of the row; `size` is |V_t|.
    #[inline(always)]
    fn losses(&self, size: usize, smoothing: Smoothing) -> (A, A) {
        // −log p_t = (m − z_t) + log Σ exp(z − m), in f64.
        let exact = (self.max.to_f64() - self.target.to_f64()) + self.exp.to_f64().ln();
        let nll = A::from_f64(exact);
        if nll == A::from_f64(f64::INFINITY) {
            // The sum below would be ∞ − ∞, which is NaN; but no term −log p_v is negative, so the loss is ∞.
            return (nll, nll);
        }
        let mut loss = smoothing.nll * exact;
        // Without smoothing, a logit of −∞ would give 0·∞. The sum is Σ −log p_v = |V_t|·(−log p_t) − Σ(z_v − z_t).
        if smoothing.uniform != 0.0 {
            loss += smoothing.uniform * (size as f64 * exact - self.above.to_f64());
        }
        (A::from_f64(loss), nll)
    }
}

/// Copies the row's logits z to `selected`, with −∞ where `keep` is 0, outside the target vocabulary. Returns (max z,
/// Σ(z − target)) over the target vocabulary, where `target` is the target's logit; max z is undefined if there is a
/// NaN.
#[inline(always)]
fn select<E: Element>(
    z: &[E],
    target: E::Acc,
    keep: &[Lanes<E::Acc>],
    selected: &mut [Lanes<E::Acc>],
) -> (E::Acc, E::Acc) {
    let lowest = E::Acc::from_f64(f64::NEG_INFINITY);
    let zero = E::Acc::ZERO;
    let (mut most, mut total) = (Lanes([lowest; B / 4]), Lanes([zero; B / 4]));
    for ((z, Lanes(keep)), Lanes(selected)) in z.chunks(B).zip(keep).zip(selected) {
        for ((z, keep), to) in z.iter().zip(keep).zip(selected.iter_mut()) {
            *to = if *keep != zero { z.load() } else { lowest };
        }
        selected[z.len()..].fill(lowest);
        // A block is read in four quarters, and lane l of `most` and `total` serves lane l of each quarter. Outside the
        // target vocabulary `selected` is −∞, so the difference is formed only inside.
        let (z, keep) = (quarters(selected), quarters(keep));
        for l in 0..B / 4 {
            most.0[l] = z[0][l].max(z[1][l]).max(z[2][l].max(z[3][l])).max(most.0[l]);
            let distance = |q: usize| if keep[q][l] != zero { z[q][l] - target } else { zero };
            total.0[l] += (distance(0) + distance(1)) + (distance(2) + distance(3));
        }
    }
    (max(most.0), sum(total.0))
}

/// Splits a block into four quarters. A reduction first combines the same lane of all quarters.
#[inline(always)]
fn quarters<A>(x: &[A; B]) -> &[[A; B / 4]; 4] {
    x.as_chunks().0.try_into().expect("B is four quarters")
}

/// Replaces each logit z by exp(z − max), and returns the sum.
#[inline(always)]
fn exponentials<A: Accumulator, S: Isa>(max: A, logits: &mut [Lanes<A>]) -> A {
    let mut total = Lanes([A::ZERO; B / 4]);
    for Lanes(block) in logits {
        for z in block.iter_mut() {
            *z = exp::<A, S>(*z - max);
        }
        let e = quarters(block);
        for (l, total) in total.0.iter_mut().enumerate() {
            *total += (e[0][l] + e[1][l]) + (e[2][l] + e[3][l]);
        }
    }
    sum(total.0)
}

/// Returns the sums of a row's softmax over the target vocabulary; `target` is the target's logit. `scratch` receives
/// the exponentials exp(z − max z), 0 outside the target vocabulary.
#[inline(always)]
fn softmax<S: Isa, E: Element>(
    z: &[E],
    target: E::Acc,
    vocabulary: &VocabularyMask<E::Acc>,
    scratch: &mut [Lanes<E::Acc>],
) -> LogitSums<E::Acc> {
    let (max, above) = select(z, target, &vocabulary.keep, scratch);
    let exp = exponentials::<_, S>(max, scratch);
    LogitSums { target, max, exp, above }
}

/// Computes dz from the exponentials e = exp(z − max z) and their coefficients `weights`, as if no column were the
/// target. Columns outside the target vocabulary have the exponential 0, and get the gradient 0.
#[inline(always)]
fn gradient_from_exp<E: Element>(e: &[Lanes<E::Acc>], weights: Weights<E::Acc>, dz: &mut [E]) {
    for (dz, Lanes(e)) in dz.chunks_mut(B).zip(e) {
        for (dz, e) in dz.iter_mut().zip(e) {
            let gradient = weights.all * *e - weights.uniform;
            *dz = E::store(if *e != E::Acc::ZERO { gradient } else { E::Acc::ZERO });
        }
    }
}

/// Computes dz from the logits z and the row's maximum, as if no column were the target. It is for a backward pass in
/// which the exponentials were not kept. Columns where `keep` is 0 get the gradient 0.
#[inline(always)]
fn gradient_from_max<E: Element, S: Isa>(
    z: &[E],
    keep: &[Lanes<E::Acc>],
    max: E::Acc,
    weights: Weights<E::Acc>,
    dz: &mut [E],
) {
    for ((dz, z), Lanes(keep)) in dz.chunks_mut(B).zip(z.chunks(B)).zip(keep) {
        for ((dz, z), keep) in dz.iter_mut().zip(z).zip(keep) {
            let gradient = weights.all * exp::<E::Acc, S>(z.load() - max) - weights.uniform;
            *dz = E::store(if *keep != E::Acc::ZERO { gradient } else { E::Acc::ZERO });
        }
    }
}

#[cfg(test)]
mod tests;
