//! Tests of the fused step against its parts, which are composed in f64, and of its bits in different splittings.

use super::*;
use crate::cpu::philox::{self, Stream};
use crate::cpu::simd::{force, Level};
use crate::kernel::rows::tests::{acc, near, numbers, Tested};
use crate::kernel::rows::{self, curve};
use crate::kernel::rows::{NoNorm, RowNorm};
use crate::norm::dyt::DyT;
use crate::norm::layer_norm::LayerNorm;
use crate::norm::rms_norm::RmsNorm;
use crate::norm::scale_norm::ScaleNorm;
use half::{bf16, f16};

/// The scale and the shift of a step without a curve.
const NONE: [f32; NUMBERS] = [1.0, -0.0];
const ROWS: usize = 9;
/// The place of the first row in dropout's random stream.
const FIRST: usize = 70;
const WIDTHS: [usize; 7] = [1, 7, 16, 31, 123, 512, 1000];

/// A step's settings; α and β are as in [`StepParameters`].
struct Case {
    cols: usize,
    alpha: Vec<f64>,
    beta: Vec<f64>,
    dropout: Option<Dropout>,
    /// True for each of dx⁺ and dy that the backward pass gets.
    sides: (bool, bool),
}

/// Returns cases of every width, with each form of the scales and changing rates of dropout.
fn cases() -> Vec<Case> {
    let stream = Stream { seed: 0x1234_5678_9abc_def0, update: 3, micro_batch: 1, site: 9 };
    let scales = |cols, seed| [vec![], vec![0.75], numbers::<f64>(cols, seed, 0.25, 4.0)];
    let mut cases = Vec::new();
    for cols in WIDTHS {
        for (k, (alpha, beta)) in scales(cols, 1).into_iter().zip(scales(cols, 2).into_iter().rev()).enumerate() {
            let dropout = Dropout::new([0.0, 0.3, 0.9][(k + cols) % 3], stream);
            let sides = [(true, true), (false, true), (true, false)][(k + cols / 2) % 3];
            cases.push(Case { cols, alpha, beta, dropout, sides });
        }
    }
    cases
}

/// Returns the factors by which drop() multiplies, as a matrix.
fn factors(case: &Case) -> Vec<f64> {
    let Some(dropout) = case.dropout else { return vec![1.0; ROWS * case.cols] };
    let mut bits = philox::scratch(1, case.cols);
    let mut factors = Vec::new();
    for r in 0..ROWS {
        philox::fill(&dropout.stream, FIRST + r, 1, case.cols, &mut bits);
        let kept = bits[..case.cols].iter().map(|b| if *b >= dropout.threshold { dropout.scale } else { 0.0 });
        factors.extend(kept);
    }
    factors
}

/// Returns the scale of column c: `scale` has one per column, one for all, or none, which means 1.
fn at(scale: &[f64], c: usize) -> f64 {
    if scale.len() == 1 {
        scale[0]
    } else {
        *scale.get(c).unwrap_or(&1.0)
    }
}

/// Checks one case against its parts, composed in f64.
fn check<N: RowNorm, X: Tested, F: Tested<Acc = X::Acc> + Element, Y: Tested<Acc = X::Acc>>(case: &Case) {
    let (cols, n) = (case.cols, ROWS * case.cols);
    let normed = N::STATS > 0;
    let f64s = |seed| numbers::<f64>(cols, seed, 0.5, 2.0).iter().map(|v| *v as f32 as f64).collect::<Vec<_>>();
    // Numbers that f32 holds exactly are the same in the step and in the expected values.
    let round = |v: &[f64]| v.iter().map(|v| *v as f32 as f64).collect::<Vec<f64>>();
    let (alpha, beta, weight, bias, eps) = (round(&case.alpha), round(&case.beta), f64s(3), f64s(4), 1e-5f32 as f64);
    let (a, b, w, c) = (acc(&alpha), acc(&beta), acc(&weight), acc(&bias));
    let (learned, mut dn) = (curve::numbers([None; NUMBERS]), []);
    let step = StepParameters {
        cols,
        alpha: &a,
        beta: &b,
        dropout: case.dropout,
        weight: &w,
        bias: &c,
        eps: X::Acc::from_f64(eps),
        numbers: learned,
    };
    let (x, f): (Vec<X>, Vec<F>) = (numbers(n, 5, 1.0, 0.5), numbers(n, 6, 1.0, 0.0));
    let (dx_plus, dy): (Vec<X>, Vec<Y>) = (numbers(n, 7, 1.0, 0.0), numbers(n, 8, 1.0, 0.1));
    let dx_plus = if case.sides.0 { dx_plus } else { Vec::new() };
    let dy = if case.sides.1 && normed { dy } else { Vec::new() };

    let (mut x_plus, mut y) = (vec![X::default(); n], vec![Y::default(); if normed { n } else { 0 }]);
    let mut stats = vec![X::Acc::ZERO; ROWS * N::STATS];
    forward::<X, F, Y>(&RowNormFns::of::<N>(), &step, FIRST, &x, &f, &mut x_plus, &mut y, &mut stats);
    let (mut dx, mut df) = (vec![X::default(); n], vec![F::default(); n]);
    let [mut dw, mut dc, mut da, mut db] = [&w, &c, &a, &b].map(|v| vec![X::Acc::ZERO; v.len()]);
    let mut grads = Gradients { dweight: &mut dw, dbias: &mut dc, dalpha: &mut da, dbeta: &mut db, dnumbers: &mut dn };
    if !(dx_plus.is_empty() && dy.is_empty()) {
        backward::<X, F, Y>(
            &RowNormFns::of::<N>(),
            &step,
            FIRST,
            &dx_plus,
            &dy,
            &x_plus,
            &x,
            &f,
            &stats,
            &mut dx,
            &mut df,
            &mut grads,
        );
    }

    let drop = factors(case);
    let unit = 8.0 * X::UNIT_ACC * (cols as f64).sqrt();
    for i in 0..n {
        let want = at(&alpha, i % cols) * x[i].value() + at(&beta, i % cols) * drop[i] * f[i].value();
        near(x_plus[i], want, 64.0 * X::UNIT_ACC, format_args!("x⁺ {i} of {cols}"));
    }
    // The expected values start from x⁺ as stored.
    let wide: Vec<f64> = x_plus.iter().map(|v| v.value()).collect();
    let (mut want_y, mut want_stats) = (vec![0.0; n], vec![0.0; ROWS * N::STATS]);
    rows::forward::<f64>(&RowNormFns::of::<N>(), cols, &wide, &weight, &bias, eps, &mut want_y, &mut want_stats);
    for (i, y) in y.iter().enumerate() {
        near(*y, want_y[i], unit * 8.0, format_args!("y {i} of {cols}"));
    }
    let mut total = vec![0.0; n];
    let (mut want_dw, mut want_dc) = (vec![0.0; cols], vec![0.0; cols]);
    if !dy.is_empty() {
        let dy: Vec<f64> = dy.iter().map(|v| v.value()).collect();
        rows::backward::<f64>(
            &RowNormFns::of::<N>(),
            cols,
            &dy,
            &wide,
            &weight,
            eps,
            &want_stats,
            &mut total,
            &mut want_dw,
            &mut want_dc,
        );
    }
    // `scale` is the largest of the rows' scales, which multiply the rounding errors of G.
    let scale =
        want_stats.iter().skip(N::STATS.saturating_sub(1)).step_by(N::STATS.max(1)).fold(1.0, |m: f64, v| m.max(*v));
    let (mut want_da, mut want_db) = (vec![0.0; a.len()], vec![0.0; b.len()]);
    for (i, total) in total.iter_mut().enumerate() {
        *total += dx_plus.get(i).map_or(0.0, |v| v.value());
        let (c, error) = (i % cols, unit * 64.0 * scale);
        near(dx[i], at(&alpha, c) * *total, error, format_args!("dx {i} of {cols}"));
        near(df[i], at(&beta, c) * drop[i] * *total, error * drop[i], format_args!("df {i} of {cols}"));
        // A gradient of one number receives all columns.
        let (last_a, last_b) = (want_da.len().wrapping_sub(1), want_db.len().wrapping_sub(1));
        if let Some(da) = want_da.get_mut(c.min(last_a)) {
            *da += *total * x[i].value();
        }
        if let Some(db) = want_db.get_mut(c.min(last_b)) {
            *db += *total * drop[i] * f[i].value();
        }
    }
    let pairs = [(&dw, &want_dw), (&dc, &want_dc), (&da, &want_da), (&db, &want_db)];
    for (k, (got, want)) in pairs.into_iter().enumerate() {
        let terms = if want.len() == 1 { n as f64 } else { ROWS as f64 };
        for (got, want) in got.iter().zip(want) {
            let bound = unit * 256.0 * scale * terms.sqrt() + unit * want.abs();
            assert!((got.to_f64() - want).abs() <= bound, "sum {k} of {cols}: {} {want} {bound}", got.to_f64());
        }
    }
}

#[test]
fn equals_its_parts() {
    for level in Level::ALL {
        force(Some(level));
        for case in cases() {
            check::<LayerNorm, f32, f32, f32>(&case);
            check::<RmsNorm, f64, f64, f64>(&case);
            check::<ScaleNorm, bf16, bf16, bf16>(&case);
            check::<LayerNorm, f16, f16, f16>(&case);
            check::<LayerNorm, f32, bf16, bf16>(&case);
            check::<RmsNorm, f32, f16, f16>(&case);
            check::<ScaleNorm, f32, bf16, f32>(&case);
            check::<NoNorm, f32, bf16, bf16>(&case);
        }
    }
    force(None);
}

#[test]
fn rows_do_not_depend_on_how_they_are_split() {
    let stream = Stream { seed: 3, ..Default::default() };
    for cols in WIDTHS {
        let weight = vec![1.25f32; cols];
        let step = StepParameters {
            cols,
            alpha: &[],
            beta: &[],
            dropout: Dropout::new(0.4, stream),
            weight: &weight,
            bias: &[],
            eps: 1e-5,
            numbers: NONE,
        };
        let n = 8 * cols;
        let (x, f): (Vec<f32>, Vec<bf16>) = (numbers(n, 1, 1.0, 0.0), numbers(n, 2, 1.0, 0.0));
        let run = |rows: usize| {
            let (mut x_plus, mut y, mut dx, mut df) = (vec![0.0; n], vec![bf16::ZERO; n], vec![0.0; n], f.clone());
            let mut dweight = vec![0.0; cols];
            for first in (0..8).step_by(rows) {
                let range = first * cols..(first + rows) * cols;
                let mut stats = vec![0.0; rows];
                let (x, f) = (&x[range.clone()], &f[range.clone()]);
                let (x_plus, y) = (&mut x_plus[range.clone()], &mut y[range.clone()]);
                forward::<f32, bf16, bf16>(&RowNormFns::of::<RmsNorm>(), &step, 5 + first, x, f, x_plus, y, &mut stats);
                let grads = &mut Gradients {
                    dweight: &mut dweight,
                    dbias: &mut [],
                    dalpha: &mut [],
                    dbeta: &mut [],
                    dnumbers: &mut [],
                };
                let (dx, df) = (&mut dx[range.clone()], &mut df[range.clone()]);
                backward::<f32, bf16, bf16>(
                    &RowNormFns::of::<RmsNorm>(),
                    &step,
                    5 + first,
                    x,
                    y,
                    x_plus,
                    &[],
                    &[],
                    &stats,
                    dx,
                    df,
                    grads,
                );
            }
            (x_plus, y, dx, df, dweight)
        };
        assert!(run(8) == run(1) && run(8) == run(4), "{cols}");
    }
}

#[test]
fn a_dropped_element_is_zero_whatever_it_was() {
    let dropout = Dropout::new(0.5, Stream::default());
    let step =
        StepParameters { cols: 512, alpha: &[], beta: &[], dropout, weight: &[], bias: &[], eps: 1e-5, numbers: NONE };
    let (mut x_plus, mut y) = ([0.0f32; 512], [0.0f32; 0]);
    forward::<f32, f32, f32>(
        &RowNormFns::of::<NoNorm>(),
        &step,
        0,
        &[1.0; 512],
        &[f32::NAN; 512],
        &mut x_plus,
        &mut y,
        &mut [],
    );
    // A dropped element adds 0 to x = 1; a kept one adds NaN.
    let dropped = x_plus.iter().filter(|v| **v == 1.0).count();
    assert!((200..312).contains(&dropped) && x_plus.iter().filter(|v| v.is_nan()).count() == 512 - dropped);
}

#[test]
fn nothing_in_nothing_out() {
    for cols in [0, 4] {
        let step = StepParameters {
            cols,
            alpha: &[],
            beta: &[],
            dropout: None,
            weight: &[],
            bias: &[],
            eps: 1e-5f32,
            numbers: NONE,
        };
        forward::<f32, f32, f32>(&RowNormFns::of::<LayerNorm>(), &step, 0, &[], &[], &mut [], &mut [], &mut []);
        let grads =
            &mut Gradients { dweight: &mut [], dbias: &mut [], dalpha: &mut [], dbeta: &mut [], dnumbers: &mut [] };
        backward::<f32, f32, f32>(
            &RowNormFns::of::<LayerNorm>(),
            &step,
            0,
            &[],
            &[],
            &[],
            &[],
            &[],
            &[],
            &mut [],
            &mut [],
            grads,
        );
    }
}

/// Checks that a step before a curve gives the same numbers as x⁺ followed by the curve, if all tensors have one
/// type.
fn check_curve<X: Tested, F: Tested<Acc = X::Acc> + Element>(case: &Case) {
    let (cols, n) = (case.cols, ROWS * case.cols);
    let norm = RowNormFns::<X::Acc>::of_curve::<DyT>();
    let bend = norm.curve.as_ref().expect("DyT is a curve");
    let [weight, bias] = [3, 4].map(|seed| acc::<X::Acc>(&numbers::<f64>(cols, seed, 0.5, 2.0)));
    let (alpha, beta) = (acc::<X::Acc>(&case.alpha), acc::<X::Acc>(&case.beta));
    let learned = [0.75, 0.25].map(X::Acc::from_f64);
    let step = |numbers| StepParameters {
        cols,
        alpha: &alpha,
        beta: &beta,
        dropout: case.dropout,
        weight: &weight,
        bias: &bias,
        eps: X::Acc::ZERO,
        numbers,
    };
    let (x, f): (Vec<X>, Vec<F>) = (numbers(n, 5, 1.0, 0.5), numbers(n, 6, 1.0, 0.0));
    let (dx_plus, dy): (Vec<X>, Vec<X>) = (numbers(n, 7, 1.0, 0.0), numbers(n, 8, 1.0, 0.1));
    let none = RowNormFns::of::<NoNorm>();
    let [mut x_plus, mut y, mut plain, mut plain_y] = [(); 4].map(|()| vec![X::default(); n]);
    forward::<X, F, X>(&norm, &step(learned), FIRST, &x, &f, &mut x_plus, &mut y, &mut []);
    forward::<X, F, X>(&none, &step(learned), FIRST, &x, &f, &mut plain, &mut [], &mut []);
    curve::forward::<X>(bend, cols, &plain, learned, &weight, &bias, &mut plain_y);
    assert!(x_plus == plain && y == plain_y, "{cols}");

    // The step keeps G in X's accumulator, so its gradients are rounded once less than the expected ones.
    let run = |norm: &RowNormFns<X::Acc>, dx_plus: &[X], dy: &[X]| {
        let (mut dx, mut df) = (vec![X::default(); n], vec![F::default(); n]);
        let sums = [cols, cols, alpha.len(), beta.len(), NUMBERS].map(|len| vec![X::Acc::ZERO; len]);
        let [mut dweight, mut dbias, mut dalpha, mut dbeta, mut dnumbers] = sums;
        let mut grads = Gradients {
            dweight: &mut dweight,
            dbias: &mut dbias,
            dalpha: &mut dalpha,
            dbeta: &mut dbeta,
            dnumbers: if norm.curve.is_some() { &mut dnumbers } else { &mut [] },
        };
        let step = step(learned);
        backward::<X, F, X>(norm, &step, FIRST, dx_plus, dy, &x_plus, &x, &f, &[], &mut dx, &mut df, &mut grads);
        (dx, df, [dweight, dbias, dalpha, dbeta, dnumbers])
    };
    let dx_plus = if case.sides.0 { dx_plus } else { Vec::new() };
    let dy = if case.sides.1 { dy } else { Vec::new() };
    let (dx, df, sums) = run(&norm, &dx_plus, &dy);
    let (mut norm_dx, mut want) = (vec![X::default(); n], sums.each_ref().map(|sum| vec![X::Acc::ZERO; sum.len()]));
    if !dy.is_empty() {
        let [dweight, dbias, _, _, dnumbers] = &mut want;
        curve::backward::<X>(bend, cols, &dy, &plain, learned, &weight, &mut norm_dx, dweight, dbias, dnumbers);
    }
    let total: Vec<X> = (0..n).map(|i| X::of(norm_dx[i].value() + dx_plus.get(i).map_or(0.0, |v| v.value()))).collect();
    let (want_dx, want_df, [_, _, dalpha, dbeta, _]) = run(&none, &total, &[]);
    (want[2], want[3]) = (dalpha, dbeta);
    let unit = 4.0 * (X::UNIT + X::UNIT_ACC);
    for i in 0..n {
        near(dx[i], want_dx[i].value(), unit * 4.0, format_args!("dx {i} of {cols}"));
        near(df[i], want_df[i].value(), unit * 40.0, format_args!("df {i} of {cols}"));
    }
    for (k, (got, want)) in sums.iter().flatten().zip(want.iter().flatten()).enumerate() {
        let bound = unit * (100.0 * (n as f64).sqrt() + want.to_f64().abs());
        assert!((got.to_f64() - want.to_f64()).abs() <= bound, "sum {k} of {cols}: {} {}", got.to_f64(), want.to_f64());
    }
}

#[test]
fn a_curve_follows_the_step() {
    for level in Level::ALL {
        force(Some(level));
        for case in cases() {
            check_curve::<f32, f32>(&case);
            check_curve::<f64, f64>(&case);
            check_curve::<bf16, bf16>(&case);
            check_curve::<f16, f16>(&case);
            check_curve::<f32, bf16>(&case);
        }
    }
    force(None);
}
