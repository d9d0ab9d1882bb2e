//! Attention over packed sentences: `softmax(scale·QKᵀ + mask)` with dropout, times V, per sentence and head.

use super::call::{values, Value};
use super::declare::{leader, number, seed, tensor, DtypeRule, Kernels, Operator};
use super::dropout::{check_dropout, draw, drawn, dropout_mask};
use super::engine::{self, Handle};
use crate::error::{Error, Result};
use crate::kernel::attention::call::{self as kernel, AttentionViews, Settings};
use crate::kernel::attention::{composed, Extras};
use crate::kernel::dropout::Draw;
use std::sync::{Mutex, PoisonError};
use tch::Tensor;

static HANDLE: Handle = Handle::new("attention");

/// Computes attention through the dispatcher. q is (query rows, d); k and v are (key rows, d). `ranges` is int64 (n,
/// 4), with the (q_start, q_len, k_start, k_len) of each sentence. `p` is the dropout rate of the weights. `seed` is
/// int64 (seed, update, micro-batch); without it nothing is dropped. `site` numbers the places of dropout in a model.
/// Returns the output (rows, d).
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    ranges: &Tensor,
    heads: i64,
    causal: bool,
    scale: f64,
    p: f64,
    seed: Option<&Tensor>,
    site: i64,
) -> Result<Tensor> {
    let p = if seed.is_some() { p } else { 0.0 };
    let [out, _lse] = HANDLE.call(&values![q, k, v, ranges, heads, causal, scale, p, seed, site])?;
    Ok(out)
}

/// Computes attention with options that no kernel has, using tch operations. The scores of all sentences, padded to
/// the longest, are in memory at the same time. `dropout` is (p, seed, site); the other arguments and the result are
/// those of [`attention`].
pub fn composed_attention(
    [q, k, v]: [&Tensor; 3],
    ranges: &Tensor,
    heads: i64,
    causal: bool,
    scale: f64,
    extras: &Extras,
    dropout: Option<(f64, &Tensor, i64)>,
) -> Result<Tensor> {
    let settings = Settings { heads, causal, scale, draw: Draw::NONE };
    // The formula asks for the dropout factors itself, so its settings have none.
    let draw = |rows, cols| dropout.map(|(p, seed, site)| dropout_mask(seed, rows, cols, p, site)).transpose();
    composed(q, k, v, ranges, &settings, extras, draw)
}

/// Computes attention with torch's `scaled_dot_product_attention` on padded sentences, (sentences, heads, length,
/// d_head). The mask is added to scale·QKᵀ. cuDNN's kernel, which torch prefers for 16 bits on recent GPUs, is turned
/// off, because it builds a plan for every new shape, and sentences have many shapes.
pub fn padded_attention([q, k, v]: [&Tensor; 3], mask: Option<&Tensor>, causal: bool, scale: f64) -> Result<Tensor> {
    let _without = WithoutCudnn::new();
    let (dropout, has_grouped_heads) = (0.0, false);
    Ok(Tensor::f_scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale, has_grouped_heads)?)
}

/// A guard that keeps torch's attention from using cuDNN. torch has only one switch per process. So meanwhile other
/// threads' attention does not use cuDNN either; its results then differ by rounding.
struct WithoutCudnn;

/// The number of live guards, and the switch's setting before the first of them.
static WITHOUT_CUDNN: Mutex<(usize, bool)> = Mutex::new((0, false));

impl WithoutCudnn {
    /// Turns cuDNN's attention off, unless another guard has done so.
    fn new() -> Self {
        let mut state = WITHOUT_CUDNN.lock().unwrap_or_else(PoisonError::into_inner);
        let (guards, was_on) = &mut *state;
        if *guards == 0 {
            // SAFETY: the function sets torch's switch, and returns the old setting.
            *was_on = unsafe { nfrs_set_cudnn_attention(false) };
        }
        *guards += 1;
        WithoutCudnn
    }
}

impl Drop for WithoutCudnn {
    /// Turns cuDNN's attention on again if this is the last guard, and if it was on before the first one.
    fn drop(&mut self) {
        let mut state = WITHOUT_CUDNN.lock().unwrap_or_else(PoisonError::into_inner);
        let (guards, was_on) = &mut *state;
        *guards -= 1;
        if *guards == 0 && *was_on {
            // SAFETY: the function sets torch's switch.
            unsafe { nfrs_set_cudnn_attention(true) };
        }
    }
}

extern "C" {
    /// Allows or forbids cuDNN in torch's attention, and returns the old setting.
    fn nfrs_set_cudnn_attention(on: bool) -> bool;
}

// ---- the operator ----

/// Errors unless the width of q (rows, width) is a positive multiple of `heads`.
fn check_heads(q: &Value, heads: i64) -> Result<()> {
    let q = q.required();
    // `has_columns(q, n)` is true if n divides q's width; for n = 0, if the width is 0.
    match heads > 0 && !engine::has_columns(&q, 0) && engine::has_columns(&q, heads) {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "attention: the width {} must be a multiple of the number of heads, {heads}, and not 0",
            q.size()[1]
        ))),
    }
}

/// Declares attention. Its second output `lse` is each query's and head's log sum of exponentials.
pub(super) fn operator() -> Operator {
    // The letters of sizes: n query rows, m key rows, w columns (the width), h heads, r sentences.
    let queries = |name| tensor(name, "nw", DtypeRule::Same);
    let keys = |name| tensor(name, "mw", DtypeRule::Same);
    let q = || leader("q", "nw").by_columns();
    let (k, v) = (|| keys("k").by_columns(), || keys("v").by_columns());
    let ranges = || tensor("ranges", "r4", DtypeRule::Int64).on_host();
    let heads = || number("heads", "h");
    let lse = || tensor("lse", "nh", DtypeRule::Computed);
    Operator::new(
        "attention(Tensor q, Tensor k, Tensor v, Tensor ranges, int heads, bool causal, float scale, float p, \
         Tensor? seed, int site) -> (Tensor, Tensor)",
        [q(), k(), v(), ranges(), heads(), seed()],
        [queries("out"), lse()],
    )
    .plan(|call| {
        let [q, _, _, _, heads, _, _, p, seed, _] = call.arguments();
        check_dropout("attention", p, seed)?;
        check_heads(q, heads.int())
    })
    .kernel_on(Kernels::Cpu, |call| {
        let ([q, k, v, ranges, numbers @ .., p, seed, site], [out, lse]) = (call.arguments::<10>(), call.outputs());
        let settings = settings(numbers, draw(call, [p, seed, site]));
        kernel::forward(&views([q, k, v, ranges], settings), &out.view, &lse.view)
    })
    .formula(|call| {
        let [q, k, v, ranges, numbers @ .., p, seed, site] = call.arguments::<10>();
        let [q, k, v, ranges] = [q, k, v, ranges].map(Value::required);
        let (settings, draw) = (settings(numbers, Draw::NONE), |rows, cols| drawn([p, seed, site], rows, cols));
        let out = composed(&q, &k, &v, &ranges, &settings, &Extras::NONE, draw)?;
        Ok(vec![Some(out), None]) // only the backward kernel reads `lse`
    })
    .backward(
        Operator::new(
            "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor lse, Tensor ranges, int heads, \
             bool causal, float scale, float p, Tensor? seed, int site) -> (Tensor, Tensor, Tensor)",
            [queries("dout"), q(), k(), v(), lse(), ranges(), heads(), seed()],
            [queries("dq"), keys("dk"), keys("dv")],
        )
        .plan(|call| {
            let [_, q, _, _, _, _, heads, _, _, p, seed, _] = call.arguments();
            check_dropout("attention_backward", p, seed)?;
            check_heads(q, heads.int())
        })
        .kernel_on(Kernels::Cpu, |call| {
            let [dout, q, k, v, lse, ranges, numbers @ .., p, seed, site] = call.arguments::<12>();
            let settings = settings(numbers, draw(call, [p, seed, site]));
            let gradients = call.outputs::<3>().each_ref().map(|d| d.view);
            let shares = None; // they are needed only if `lse` was computed from more keys than these
            kernel::backward(&views([q, k, v, ranges], settings), &dout.view, &lse.view, shares, &gradients)
        })
        .formula(|call| {
            let [dout, q, k, v, _, ranges, numbers @ .., p, seed, site] = call.arguments::<12>();
            let [dout, q, k, v, ranges] = [dout, q, k, v, ranges].map(Value::required);
            let (settings, draw) = (settings(numbers, Draw::NONE), |rows, cols| drawn([p, seed, site], rows, cols));
            let formula = |t: &[Tensor]| composed(&t[0], &t[1], &t[2], &ranges, &settings, &Extras::NONE, draw);
            engine::gradients(&[&q, &k, &v], &dout, formula)
        }),
    )
    .with_own_gradient()
    .looped()
    .counted(&HANDLE)
}

/// Returns the kernels' arguments from (q, k, v, ranges).
fn views(tensors: [&Value; 4], settings: Settings) -> AttentionViews {
    let [q, k, v, ranges] = tensors.map(|t| t.view);
    AttentionViews { q, k, v, ranges, settings }
}

/// Returns the settings of a call from its arguments and its dropout.
fn settings([heads, causal, scale]: &[Value; 3], draw: Draw) -> Settings {
    Settings { heads: heads.int(), causal: causal.flag(), scale: scale.float(), draw }
}
