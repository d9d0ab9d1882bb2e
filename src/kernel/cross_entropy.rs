//! Label-smoothed cross-entropy over the target vocabulary V_t, a subset of the |V| logits in a row.
//!
//! > p = softmax over V_t,  loss = A·(−log p_t) + B·Σ_{v∈V_t} −log p_v
//! > ∂loss/∂z_v = (A + B|V_t|)·p_v − A·1[v = t] − B  on V_t,  0 outside
//!
//! z the row's logits, t its target; A and B come from the smoothing rate ε by one of two formulas ([`Smoothing`]).
//! Outside V_t a logit counts as −∞, whatever it holds. Source: SPEC §4 "vocabulary mask" and "label smoothing" (fairseq's
//! label_smoothed_cross_entropy and the release of Nguyen & Salazar 2019). A NaN inside V_t makes its row's loss NaN.
//!
//! The row's maximum is subtracted before the exponential; Σ −log p_v = |V_t|·log Σ exp z − Σ z is put together in f64.
//! A row goes through the first two caches in three short passes (select, exponential, gradient), each a flat loop over
//! 256 columns that any instruction set vectorises, with the sums in loops of their own.

use crate::cpu::{Accumulator, Element};
use crate::kernel::math::{exp, fused, max, sum};
use crate::multiversion;

/// Columns taken together: 1 KiB of f32, so that the sums find the exponentials in the first cache.
const B: usize = 256;

/// Aligned to a cache line: a store of 64 bytes that crosses one costs two.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Lanes<A, const N: usize = B>([A; N]);

/// The loss's two weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Smoothing {
    /// A, of the target's own −log p.
    pub nll: f64,
    /// B, of every −log p_v in V_t.
    pub uniform: f64,
}

impl Smoothing {
    /// fairseq's: A = 1 − ε − ε_i, B = ε_i = ε/(|V_t| − 1). With a single valid word there is nothing to smooth.
    pub fn fairseq(epsilon: f64, valid: usize) -> Self {
        let each = if valid > 1 { epsilon / (valid - 1) as f64 } else { 0.0 };
        Smoothing { nll: 1.0 - epsilon - each, uniform: each }
    }

    /// Transformers without Tears': A = 1 − ε, B = ε/|V_t|.
    pub fn twt(epsilon: f64, valid: usize) -> Self {
        Smoothing { nll: 1.0 - epsilon, uniform: epsilon / valid.max(1) as f64 }
    }
}

/// What the rows are scored against.
#[derive(Clone, Copy, Debug)]
pub struct Targets<'a> {
    /// One word per row.
    pub ids: &'a [i64],
    /// Rows with this target count nothing: loss 0, gradient 0.
    pub ignore: i64,
}

/// Loss, −log p_t and log Σ_{v∈V_t} exp z_v of every row (0 for ignored rows).
///
/// `mask` has a byte per column, 1 in V_t; empty, V_t is all of them. `Err` is the first row whose target is neither
/// ignored nor in V_t; nothing is written then.
#[allow(clippy::too_many_arguments)]
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
    assert!(logits.len() == rows * cols && loss.len() == rows && nll.len() == rows && lse.len() == rows);
    let vocabulary = &check(cols, targets, mask)?;
    forward_rows(cols, logits, targets, vocabulary, smoothing, loss, nll, lse, &mut scratch::<E>(cols));
    Ok(())
}

/// ∂/∂logits of Σ_r dloss_r·loss_r from [`forward`]'s `lse`. Mask and error as there.
#[allow(clippy::too_many_arguments)]
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
    assert!(logits.len() == rows * cols && dlogits.len() == rows * cols && lse.len() == rows && dloss.len() == rows);
    let vocabulary = &check(cols, targets, mask)?;
    backward_rows(cols, logits, targets, vocabulary, smoothing, lse, dloss, dlogits);
    Ok(())
}

/// Loss and −log p_t of every row, with `scale`·∂loss/∂z left where the logits were. Mask and error as in [`forward`].
///
/// One exponential per logit, for the trainer: call it on blocks of rows that are still in the cache.
#[allow(clippy::too_many_arguments)]
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

/// V_t's size, and a 1 for each of its columns: as wide as what it selects, or AVX2's loops would not vectorise.
struct Vocabulary<A> {
    keep: Vec<Lanes<A>>,
    size: usize,
}

/// Refuses the first target outside V_t; spells an empty mask out, so that the loops have one form.
fn check<A: Accumulator>(cols: usize, targets: Targets, mask: &[u8]) -> Result<Vocabulary<A>, usize> {
    assert!(mask.is_empty() || mask.len() == cols, "a mask of {} for {cols} columns", mask.len());
    let mut keep = vec![Lanes([A::ZERO; B]); cols.div_ceil(B)];
    let mut size = 0;
    for v in 0..cols {
        if mask.is_empty() || mask[v] != 0 {
            keep[v / B].0[v % B] = A::ONE;
            size += 1;
        }
    }
    let known = |t: i64| usize::try_from(t).is_ok_and(|t| t < cols && keep[t / B].0[t % B] != A::ZERO);
    match targets.ids.iter().position(|t| *t != targets.ignore && !known(*t)) {
        Some(row) => Err(row),
        None => Ok(Vocabulary { keep, size }),
    }
}

/// A row's work space.
fn scratch<E: Element>(cols: usize) -> Vec<Lanes<E::Acc>> {
    vec![Lanes([E::Acc::ZERO; B]); cols.div_ceil(B)]
}

multiversion! {
    fn forward_rows[E: Element](
        cols: usize,
        logits: &[E],
        targets: Targets,
        vocabulary: &Vocabulary<E::Acc>,
        smoothing: Smoothing,
        loss: &mut [E::Acc],
        nll: &mut [E::Acc],
        lse: &mut [E::Acc],
        scratch: &mut [Lanes<E::Acc>],
    ) {
        let fused = fused();
        for (r, &target) in targets.ids.iter().enumerate() {
            (loss[r], nll[r], lse[r]) = (E::Acc::ZERO, E::Acc::ZERO, E::Acc::ZERO);
            if target == targets.ignore {
                continue;
            }
            let z = &logits[r * cols..(r + 1) * cols];
            let sums = softmax(z, vocabulary, fused, scratch);
            (loss[r], nll[r]) = sums.losses(z[target as usize].load(), vocabulary.size, smoothing);
            lse[r] = sums.max + sums.exp.ln();
        }
    }
}

multiversion! {
    fn backward_rows[E: Element](
        cols: usize,
        logits: &[E],
        targets: Targets,
        vocabulary: &Vocabulary<E::Acc>,
        smoothing: Smoothing,
        lse: &[E::Acc],
        dloss: &[E::Acc],
        dlogits: &mut [E],
    ) {
        let fused = fused();
        for (r, &target) in targets.ids.iter().enumerate() {
            let (z, dz) = (&logits[r * cols..(r + 1) * cols], &mut dlogits[r * cols..(r + 1) * cols]);
            if target == targets.ignore {
                dz.fill(E::store(E::Acc::ZERO));
                continue;
            }
            let weights = Weights::new(smoothing, vocabulary.size, dloss[r]);
            if fused {
                gradient_from_lse::<E, true>(z, &vocabulary.keep, lse[r], weights, dz);
            } else {
                gradient_from_lse::<E, false>(z, &vocabulary.keep, lse[r], weights, dz);
            }
            let p = (z[target as usize].load() - lse[r]).exp();
            dz[target as usize] = E::store(weights.all * p - weights.target);
        }
    }
}

multiversion! {
    fn in_place_rows[E: Element](
        cols: usize,
        logits: &mut [E],
        targets: Targets,
        vocabulary: &Vocabulary<E::Acc>,
        smoothing: Smoothing,
        scale: E::Acc,
        loss: &mut [E::Acc],
        nll: &mut [E::Acc],
        scratch: &mut [Lanes<E::Acc>],
    ) {
        let fused = fused();
        for (r, &target) in targets.ids.iter().enumerate() {
            let z = &mut logits[r * cols..(r + 1) * cols];
            if target == targets.ignore {
                (loss[r], nll[r]) = (E::Acc::ZERO, E::Acc::ZERO);
                z.fill(E::store(E::Acc::ZERO));
                continue;
            }
            let target = target as usize;
            let sums = softmax(z, vocabulary, fused, scratch);
            (loss[r], nll[r]) = sums.losses(z[target].load(), vocabulary.size, smoothing);
            let mut weights = Weights::new(smoothing, vocabulary.size, scale);
            weights.all = weights.all / sums.exp;
            gradient_from_exp(scratch, weights, z);
            z[target] = E::store(weights.all * scratch[target / B].0[target % B] - weights.target);
        }
    }
}

/// The gradient's factors: `all`·p − `uniform`, and at the target `all`·p − `target`.
#[derive(Clone, Copy)]
struct Weights<A> {
    all: A,
    uniform: A,
    target: A,
}

impl<A: Accumulator> Weights<A> {
    #[inline(always)]
    fn new(smoothing: Smoothing, size: usize, scale: A) -> Self {
        let Smoothing { nll, uniform } = smoothing;
        Weights {
            all: A::from_f64(nll + uniform * size as f64) * scale,
            uniform: A::from_f64(uniform) * scale,
            target: A::from_f64(nll + uniform) * scale,
        }
    }
}

/// m = max z, Σ exp(z − m) and Σ z over V_t.
struct Sums<A> {
    max: A,
    exp: A,
    total: A,
}

impl<A: Accumulator> Sums<A> {
    /// Loss and −log p_t for the target's z.
    #[inline(always)]
    fn losses(&self, target: A, size: usize, smoothing: Smoothing) -> (A, A) {
        let lse = self.max.to_f64() + self.exp.to_f64().ln();
        let nll = lse - target.to_f64();
        let mut loss = smoothing.nll * nll;
        // Not 0·∞ where nothing is smoothed and a logit is −∞.
        if smoothing.uniform != 0.0 {
            loss += smoothing.uniform * (size as f64 * lse - self.total.to_f64());
        }
        (A::from_f64(loss), A::from_f64(nll))
    }
}

/// Leaves the row in `w`, −∞ outside V_t, and returns max z (anything if one is NaN) and Σ z over V_t.
#[inline(always)]
fn select<E: Element>(z: &[E], keep: &[Lanes<E::Acc>], w: &mut [Lanes<E::Acc>]) -> (E::Acc, E::Acc) {
    let lowest = E::Acc::from_f64(f64::NEG_INFINITY);
    let zero = E::Acc::ZERO;
    let (mut most, mut total) = (Lanes([lowest; B / 4]), Lanes([zero; B / 4]));
    for ((z, Lanes(k)), Lanes(w)) in z.chunks(B).zip(keep).zip(w) {
        for ((z, k), w) in z.iter().zip(k).zip(w.iter_mut()) {
            *w = if *k != zero { z.load() } else { lowest };
        }
        w[z.len()..].fill(lowest);
        let (w, k) = (quarters(w), quarters(k));
        for l in 0..B / 4 {
            most.0[l] = w[0][l].max(w[1][l]).max(w[2][l].max(w[3][l])).max(most.0[l]);
            let a = if k[0][l] != zero { w[0][l] } else { zero };
            let b = if k[1][l] != zero { w[1][l] } else { zero };
            let c = if k[2][l] != zero { w[2][l] } else { zero };
            let d = if k[3][l] != zero { w[3][l] } else { zero };
            total.0[l] += (a + b) + (c + d);
        }
    }
    (max(most.0), sum(total.0))
}

fn quarters<A>(x: &[A; B]) -> &[[A; B / 4]; 4] {
    x.as_chunks().0.try_into().expect("B is four quarters")
}

/// w ← exp(w − m), and the sum.
#[inline(always)]
fn exponentials<A: Accumulator, const FMA: bool>(max: A, w: &mut [Lanes<A>]) -> A {
    let mut total = Lanes([A::ZERO; B / 4]);
    for Lanes(w) in w {
        for w in w.iter_mut() {
            *w = exp::<A, FMA>(*w - max);
        }
        let w = quarters(w);
        for l in 0..B / 4 {
            total.0[l] += (w[0][l] + w[1][l]) + (w[2][l] + w[3][l]);
        }
    }
    sum(total.0)
}

/// The softmax's row of sums; its exponentials stay in `w`.
#[inline(always)]
fn softmax<E: Element>(z: &[E], vocabulary: &Vocabulary<E::Acc>, fused: bool, w: &mut [Lanes<E::Acc>]) -> Sums<E::Acc> {
    let (max, total) = select(z, &vocabulary.keep, w);
    let exp = if fused { exponentials::<_, true>(max, w) } else { exponentials::<_, false>(max, w) };
    Sums { max, exp, total }
}

/// dz from the exponentials; 0 stands for outside V_t.
#[inline(always)]
fn gradient_from_exp<E: Element>(e: &[Lanes<E::Acc>], w: Weights<E::Acc>, dz: &mut [E]) {
    for (dz, Lanes(e)) in dz.chunks_mut(B).zip(e) {
        for (dz, e) in dz.iter_mut().zip(e) {
            let g = w.all * *e - w.uniform;
            *dz = E::store(if *e != E::Acc::ZERO { g } else { E::Acc::ZERO });
        }
    }
}

#[inline(always)]
fn gradient_from_lse<E: Element, const FMA: bool>(
    z: &[E],
    keep: &[Lanes<E::Acc>],
    lse: E::Acc,
    w: Weights<E::Acc>,
    dz: &mut [E],
) {
    for ((dz, z), Lanes(keep)) in dz.chunks_mut(B).zip(z.chunks(B)).zip(keep) {
        for ((dz, z), keep) in dz.iter_mut().zip(z).zip(keep) {
            let g = w.all * exp::<E::Acc, FMA>(z.load() - lse) - w.uniform;
            *dz = E::store(if *keep != E::Acc::ZERO { g } else { E::Acc::ZERO });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::{force, Level};
    use half::{bf16, f16};

    const WIDTHS: [usize; 11] = [1, 2, 7, 16, 31, 123, 128, 255, 257, 512, 1000];

    struct Case<E: Element> {
        cols: usize,
        logits: Vec<E>,
        ids: Vec<i64>,
        mask: Vec<u8>,
        smoothing: Smoothing,
    }

    /// Five rows, the second ignored; every third word outside V_t, one of them with a NaN in each row.
    fn case<E: Element>(cols: usize, magnitude: f64, masked: bool) -> Case<E> {
        let noise =
            |i: usize| ((i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as f64 / (1 << 23) as f64 - 1.0;
        let mut logits: Vec<E> = (0..5 * cols).map(|i| E::store(E::Acc::from_f64(magnitude * noise(i)))).collect();
        let mask: Vec<u8> = if masked { (0..cols).map(|v| (v % 3 != 1) as u8).collect() } else { vec![] };
        if masked && cols > 1 {
            logits.chunks_mut(cols).for_each(|row| row[1] = E::store(E::Acc::from_f64(f64::NAN)));
        }
        let ids = (0..5).map(|r| if r == 1 { -100 } else { (r * 7 % cols) as i64 / 3 * 3 }).collect();
        let size = if masked { mask.iter().filter(|m| **m != 0).count() } else { cols };
        let smoothing = if cols % 2 == 0 { Smoothing::fairseq(0.1, size) } else { Smoothing::twt(0.1, size) };
        Case { cols, logits, ids, mask, smoothing }
    }

    /// Loss, nll, lse and gradient of row r from the definition.
    fn naive<E: Element>(c: &Case<E>, r: usize) -> (f64, f64, f64, Vec<f64>) {
        let z: Vec<f64> = c.logits[r * c.cols..][..c.cols].iter().map(|z| z.load().to_f64()).collect();
        let inside = |v: &usize| c.mask.is_empty() || c.mask[*v] != 0;
        let words: Vec<usize> = (0..c.cols).filter(inside).collect();
        let mut gradient = vec![0.0; c.cols];
        if c.ids[r] == -100 {
            return (0.0, 0.0, 0.0, gradient);
        }
        let t = c.ids[r] as usize;
        let m = words.iter().map(|v| z[*v]).fold(f64::NEG_INFINITY, f64::max);
        let lse = m + words.iter().map(|v| (z[*v] - m).exp()).sum::<f64>().ln();
        let Smoothing { nll: a, uniform: b } = c.smoothing;
        let loss = a * (lse - z[t]) + b * words.iter().map(|v| lse - z[*v]).sum::<f64>();
        for v in &words {
            // Word by word from −log p: d(−log p_w)/dz_v = p_v − 1[v = w].
            let p = (z[*v] - lse).exp();
            gradient[*v] = a * (p - (*v == t) as u8 as f64) + b * (p * words.len() as f64 - 1.0);
        }
        (loss, lse - z[t], lse, gradient)
    }

    /// All three functions against the definition. `unit` is the storage type's rounding, `acc` the accumulator's.
    fn compare<E: Element>(unit: f64, tiny: f64, magnitudes: &[f64]) {
        let acc = if size_of::<E::Acc>() == 8 { f64::EPSILON } else { f32::EPSILON as f64 };
        for level in Level::ALL {
            force(Some(level));
            for (cols, magnitude) in WIDTHS.iter().flat_map(|c| magnitudes.iter().map(move |m| (*c, *m))) {
                for masked in [false, true] {
                    let c = case::<E>(cols, magnitude, masked);
                    let zero = E::Acc::ZERO;
                    let (mut loss, mut nll, mut lse) = ([zero; 5], [zero; 5], [zero; 5]);
                    let targets = Targets { ids: &c.ids, ignore: -100 };
                    forward(cols, &c.logits, targets, &c.mask, c.smoothing, &mut loss, &mut nll, &mut lse).unwrap();
                    let scale = 1.5;
                    let dloss = [E::Acc::from_f64(scale); 5];
                    let mut dlogits = c.logits.clone();
                    backward(cols, &c.logits, targets, &c.mask, c.smoothing, &lse, &dloss, &mut dlogits).unwrap();
                    let (mut inside, mut loss2, mut nll2) = (c.logits.clone(), [zero; 5], [zero; 5]);
                    let s = dloss[0];
                    in_place(cols, &mut inside, targets, &c.mask, c.smoothing, s, &mut loss2, &mut nll2).unwrap();
                    for r in 0..5 {
                        let (want_loss, want_nll, want_lse, want) = naive(&c, r);
                        // Rounding of z − m and of the sums, relative to the largest term: √cols additions of rounding acc.
                        let tolerance = 2.0 * acc * (magnitude + 8.0) * (cols as f64).sqrt().max(2.0);
                        let at = format!("{level:?} cols {cols} magnitude {magnitude} masked {masked} row {r}");
                        for (got, want) in [loss[r], loss2[r], nll[r], nll2[r], lse[r]]
                            .iter()
                            .zip([want_loss, want_loss, want_nll, want_nll, want_lse])
                        {
                            assert!((got.to_f64() - want).abs() <= tolerance, "{at}: {} for {want}", got.to_f64());
                        }
                        for v in 0..cols {
                            let want = scale * want[v];
                            // exp carries the rounding of its argument, at most magnitude·acc, over to p ≤ 1.
                            let tolerance = unit * want.abs() + 4.0 * acc * (magnitude + 8.0) + tiny;
                            for got in [dlogits[r * cols + v], inside[r * cols + v]] {
                                let got = got.load().to_f64();
                                assert!((got - want).abs() <= tolerance, "{at} word {v}: {got} for {want}");
                            }
                        }
                    }
                }
            }
        }
        force(None);
    }

    #[test]
    fn agrees_with_the_definition_in_f32() {
        compare::<f32>(f32::EPSILON as f64, 0.0, &[0.0, 4.0, 300.0, 1e6]);
    }

    #[test]
    fn agrees_with_the_definition_in_f64() {
        compare::<f64>(f64::EPSILON, 0.0, &[4.0, 1e3, 1e6]);
    }

    #[test]
    fn agrees_with_the_definition_in_bf16() {
        compare::<bf16>(2f64.powi(-8), 0.0, &[4.0, 300.0]);
    }

    #[test]
    fn agrees_with_the_definition_in_f16() {
        compare::<f16>(2f64.powi(-11), 2f64.powi(-25), &[4.0, 300.0]);
    }

    #[test]
    fn smoothing_weights_sum_to_one_over_the_vocabulary() {
        // fairseq's: the target has 1 − ε, the others ε/(n−1) each. TwT's: 1 − ε + ε/n, the others ε/n.
        let Smoothing { nll, uniform } = Smoothing::fairseq(0.1, 11);
        assert!((nll + uniform - 0.9).abs() < 1e-15 && (nll + 11.0 * uniform - 1.0).abs() < 1e-15);
        let Smoothing { nll, uniform } = Smoothing::twt(0.1, 10);
        assert!((nll - 0.9).abs() < 1e-15 && (uniform - 0.01).abs() < 1e-15);
    }

    #[test]
    fn an_underflowing_probability_still_gets_the_uniform_gradient() {
        let smoothing = Smoothing::twt(0.5, 2);
        let mut z = [0.0f32, -1e4];
        let (mut loss, mut nll) = ([0.0], [0.0]);
        let targets = Targets { ids: &[0], ignore: -1 };
        in_place(2, &mut z, targets, &[], smoothing, 1.0, &mut loss, &mut nll).unwrap();
        assert_eq!(z, [0.25, -0.25]);
        assert_eq!(loss, [2500.0]);
    }

    #[test]
    fn not_a_number_shows_in_the_loss() {
        for bad in [f32::NAN, f32::INFINITY] {
            let (mut z, mut loss, mut nll) = ([1.0, bad, 2.0, 0.5], [0.0; 2], [0.0; 2]);
            let targets = Targets { ids: &[0, 1], ignore: -1 };
            in_place(2, &mut z, targets, &[], Smoothing::twt(0.1, 2), 1.0, &mut loss, &mut nll).unwrap();
            assert!(loss[0].is_nan() && loss[1].is_finite());
        }
    }

    #[test]
    fn targets_outside_the_vocabulary_are_refused() {
        for bad in [1, 3, -2, i64::MAX, i64::MIN] {
            let (mut z, mut loss, mut nll) = ([1.0f32; 6], [7.0; 2], [7.0; 2]);
            let targets = Targets { ids: &[0, bad], ignore: -1 };
            let smoothing = Smoothing::twt(0.1, 2);
            assert_eq!(in_place(3, &mut z, targets, &[1, 0, 1], smoothing, 1.0, &mut loss, &mut nll), Err(1));
            assert_eq!((z, loss), ([1.0; 6], [7.0; 2]));
        }
    }

    #[test]
    fn no_rows_and_no_words() {
        let none = Targets { ids: &[], ignore: -1 };
        let smoothing = Smoothing::twt(0.1, 0);
        forward::<f32>(7, &[], none, &[], smoothing, &mut [], &mut [], &mut []).unwrap();
        let ignored = Targets { ids: &[-1, -1], ignore: -1 };
        forward::<f32>(0, &[], ignored, &[], smoothing, &mut [1.0; 2], &mut [1.0; 2], &mut [1.0; 2]).unwrap();
        in_place::<f32>(3, &mut [1.0; 6], ignored, &[0; 3], smoothing, 1.0, &mut [1.0; 2], &mut [1.0; 2]).unwrap();
    }
}
