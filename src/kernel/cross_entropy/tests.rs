//! Tests of forward, backward and in-place pass against the definition, one vocabulary entry at a time in f64.

use super::*;
use crate::cpu::simd::{force, Level};
use half::{bf16, f16};

const WIDTHS: [usize; 11] = [1, 2, 7, 16, 31, 123, 128, 255, 257, 512, 1000];

/// The inputs of a call with five rows.
struct Case<E: Element> {
    cols: usize,
    logits: Vec<E>,
    ids: Vec<i64>,
    mask: Vec<u8>,
    smoothing: Smoothing,
}

/// Builds five rows of logits up to `magnitude`; the second row is ignored. If `masked`, every third word is outside
/// V_t, and the logit of one such word is NaN in each row.
fn case<E: Element>(cols: usize, magnitude: f64, masked: bool) -> Case<E> {
    let noise = |i: usize| ((i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as f64 / (1 << 23) as f64 - 1.0;
    let mut logits: Vec<E> = (0..5 * cols).map(|i| E::store(E::Acc::from_f64(magnitude * noise(i)))).collect();
    let mask: Vec<u8> = if masked { (0..cols).map(|v| (v % 3 != 1) as u8).collect() } else { vec![] };
    if masked && cols > 1 {
        logits.chunks_mut(cols).for_each(|row| row[1] = E::store(E::Acc::from_f64(f64::NAN)));
    }
    let ids = (0..5).map(|r| if r == 1 { -100 } else { (r * 7 % cols) as i64 / 3 * 3 }).collect();
    let size = if masked { mask.iter().filter(|m| **m != 0).count() } else { cols };
    let smoothing = if cols.is_multiple_of(2) { Smoothing::fairseq(0.1, size) } else { Smoothing::twt(0.1, size) };
    Case { cols, logits, ids, mask, smoothing }
}

/// Returns loss, nll, lse and gradient of row r from the definition.
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
        // The gradient is summed word by word from −log p: d(−log p_w)/dz_v = p_v − 1[v = w].
        let p = (z[*v] - lse).exp();
        gradient[*v] = a * (p - (*v == t) as u8 as f64) + b * (p * words.len() as f64 - 1.0);
    }
    (loss, lse - z[t], lse, gradient)
}

/// Compares all three functions with the definition, for logits of these magnitudes. `unit` is the storage type's
/// rounding, and gradients may also be off by `tiny`.
fn compare<E: Element>(unit: f64, tiny: f64, magnitudes: &[f64]) {
    // `acc` is the rounding of the computing type.
    let acc = if size_of::<E::Acc>() == 8 { f64::EPSILON } else { f32::EPSILON as f64 };
    for level in Level::ALL {
        force(Some(level));
        for (cols, magnitude) in WIDTHS.iter().flat_map(|c| magnitudes.iter().map(move |m| (*c, *m))) {
            for masked in [false, true] {
                let c = case::<E>(cols, magnitude, masked);
                let zero = E::Acc::ZERO;
                let (mut loss, mut nll, mut lse) = ([zero; 5], [zero; 5], [zero; 10]);
                let targets = Targets { ids: &c.ids, ignore: -100 };
                forward(cols, &c.logits, targets, &c.mask, c.smoothing, &mut loss, &mut nll, &mut lse).unwrap();
                let scale = 1.5;
                let dloss = [E::Acc::from_f64(scale); 5];
                let mut dlogits = c.logits.clone();
                backward(cols, &c.logits, targets, &c.mask, c.smoothing, &lse, &dloss, &mut dlogits).unwrap();
                let (mut inside, mut loss2, mut nll2) = (c.logits.clone(), [zero; 5], [zero; 5]);
                in_place(cols, &mut inside, targets, &c.mask, c.smoothing, dloss[0], &mut loss2, &mut nll2).unwrap();
                for r in 0..5 {
                    let (want_loss, want_nll, want_lse, want) = naive(&c, r);
                    // The tolerance covers the rounding of z − m and of the sums, of √cols additions with rounding
                    // `acc`, relative to the largest term.
                    let tolerance = 2.0 * acc * (magnitude + 8.0) * (cols as f64).sqrt().max(2.0);
                    let at = format!("{level:?} cols {cols} magnitude {magnitude} masked {masked} row {r}");
                    let sum = match lse[2 * r + 1] {
                        none if none == zero => zero,
                        exp => lse[2 * r] + exp.ln(),
                    };
                    for (got, want) in [loss[r], loss2[r], nll[r], nll2[r], sum]
                        .iter()
                        .zip([want_loss, want_loss, want_nll, want_nll, want_lse])
                    {
                        assert!((got.to_f64() - want).abs() <= tolerance, "{at}: {} for {want}", got.to_f64());
                    }
                    for v in 0..cols {
                        let want = scale * want[v];
                        // exp passes the rounding of its argument, at most magnitude·acc, on to p ≤ 1.
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
    // Fairseq's label distribution is 1 − ε at the target and ε/(n−1) at each other word. That of Nguyen & Salazar's
    // release is 1 − ε + ε/n at the target and ε/n at each other word.
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
fn an_offset_changes_nothing() {
    // The logits are sixteenths, and the offsets keep them exact in f32.
    let z: Vec<f32> = (0..300).map(|i| (i * 37 % 101) as f32 / 16.0 - 3.0).collect();
    let targets = Targets { ids: &[7], ignore: -1 };
    let run = |offset: f32| {
        let mut moved: Vec<f32> = z.iter().map(|z| z + offset).collect();
        let (mut loss, mut nll, mut lse, mut dz) = ([0.0], [0.0], [0.0; 2], vec![0.0; 300]);
        let smoothing = Smoothing::fairseq(0.1, 300);
        forward(300, &moved, targets, &[], smoothing, &mut loss, &mut nll, &mut lse).unwrap();
        backward(300, &moved, targets, &[], smoothing, &lse, &[1.0], &mut dz).unwrap();
        let (mut loss2, mut nll2) = ([0.0], [0.0]);
        in_place(300, &mut moved, targets, &[], smoothing, 1.0, &mut loss2, &mut nll2).unwrap();
        (loss, nll, dz, loss2, nll2, moved)
    };
    let plain = run(0.0);
    for offset in [1e4, 524288.0, -524288.0] {
        assert!(run(offset) == plain, "{offset}");
    }
}

#[test]
fn logits_at_the_end_of_the_range() {
    let targets = Targets { ids: &[0], ignore: -1 };
    for smoothing in [Smoothing { nll: 1.0, uniform: 0.0 }, Smoothing::twt(0.1, 4)] {
        let (mut z, mut loss, mut nll) = ([3e38f32; 4], [0.0], [0.0]);
        in_place(4, &mut z, targets, &[], smoothing, 1.0, &mut loss, &mut nll).unwrap();
        assert!((loss[0] - 4f32.ln()).abs() < 1e-6 && nll == [4f32.ln()], "{loss:?} {nll:?}");
        // The target is 6e38 below the other logits.
        let (mut z, mut loss, mut nll) = ([-3e38f32, 3e38, 3e38, 3e38], [0.0], [0.0]);
        in_place(4, &mut z, targets, &[], smoothing, 1.0, &mut loss, &mut nll).unwrap();
        assert_eq!((loss, nll), ([f32::INFINITY], [f32::INFINITY]));
    }
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
    forward::<f32>(0, &[], ignored, &[], smoothing, &mut [1.0; 2], &mut [1.0; 2], &mut [1.0; 4]).unwrap();
    in_place::<f32>(3, &mut [1.0; 6], ignored, &[0; 3], smoothing, 1.0, &mut [1.0; 2], &mut [1.0; 2]).unwrap();
}
