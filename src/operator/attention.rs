//! Attention over packed sentences: `softmax(scale·QKᵀ + mask)` with dropout, times V, per sentence and head.

use super::count::Count;
use super::declare::{derivative, leader, make, number, run, seed, tensor, Argument, Kernels, Kind as Type, Operator};
use super::engine::{self, Handle};
use super::ffi::{by_dtype, take, Call, Draw, Value, View};
use super::residual::{check_dropout, dropout_scale};
use crate::cpu::parallel;
use crate::cpu::{memory, Accumulator, Element};
use crate::error::{Error, Result};
use crate::kernel::attention::{self as kernel, Matrix, MatrixMut, Sequence};
use tch::{Kind, Tensor};
use torch_sys::C_tensor;

pub static COUNT: Count = Count::new("attention");
static HANDLE: Handle = Handle::new("attention");

/// Through the dispatcher: q (rows, d), k and v (rows, d), ranges int64 (n, 4) of (q_start, q_len, k_start, k_len).
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
    let [out, _lse] = HANDLE.call(&[
        q.into(),
        k.into(),
        v.into(),
        ranges.into(),
        heads.into(),
        causal.into(),
        scale.into(),
        p.into(),
        seed.into(),
        site.into(),
    ])?;
    Ok(out)
}

/// Rows of x, (rows, …), of which `back` says where each row of x went, none to two places; of `absent` ones (bool, a
/// column), which went nowhere, the gradient is 0. So the gradient is read too: adding up, as `index_select` does, takes
/// more passes, and on a GPU another order every time.
pub fn gather(x: &Tensor, rows: &Tensor, back: &Tensor, absent: &Tensor) -> Result<Tensor> {
    // SAFETY: the tensors outlive the call; a new tensor comes back.
    unsafe { take(nfrs_gather(x.as_ptr(), rows.as_ptr(), back.as_ptr(), absent.as_ptr())) }
}

/// torch's own attention on padded sentences, (sentences, heads, length, d_head), scale·QKᵀ plus a mask; see
/// `scaled_dot_product_attention`. Not cuDNN's, which torch prefers for 16 bits on recent GPUs: it builds a plan for every
/// shape it meets, and sentences have many shapes.
pub fn padded_attention([q, k, v]: [&Tensor; 3], mask: Option<&Tensor>, causal: bool, scale: f64) -> Result<Tensor> {
    struct Forbidden;
    impl Drop for Forbidden {
        fn drop(&mut self) {
            // SAFETY: no arguments; nfrs_cudnn_forbid has been called.
            unsafe { nfrs_cudnn_allow() };
        }
    }
    // SAFETY: no arguments.
    unsafe { nfrs_cudnn_forbid() };
    let _forbidden = Forbidden;
    Ok(Tensor::f_scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale, false)?)
}

extern "C" {
    fn nfrs_gather(
        x: *const C_tensor,
        rows: *const C_tensor,
        back: *const C_tensor,
        absent: *const C_tensor,
    ) -> *mut C_tensor;
    fn nfrs_cudnn_forbid();
    fn nfrs_cudnn_allow();
}

// ---- the operator ----

/// n, m, w: rows of queries, rows of keys, width.
fn queries_and_keys() -> [Argument; 4] {
    [
        leader("q", "nw").by_columns(),
        tensor("k", "mw", Type::Same).by_columns(),
        tensor("v", "mw", Type::Same).by_columns(),
        tensor("ranges", "r4", Type::Int64).on_host(),
    ]
}

fn check_heads(q: &Value, heads: i64) -> Result<()> {
    let q = q.required();
    match heads > 0 && !engine::has_columns(&q, 0) && engine::has_columns(&q, heads) {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "attention: the width {} must be a multiple of the number of heads, {heads}, and not 0",
            q.size()[1]
        ))),
    }
}

pub(super) fn operator() -> Operator {
    let [q, k, v, ranges] = queries_and_keys();
    // h: heads
    let lse = || tensor("lse", "nh", Type::Computed);
    Operator {
        schema: "attention(Tensor q, Tensor k, Tensor v, Tensor ranges, int heads, bool causal, float scale, float p, \
                 Tensor? seed, int site) -> (Tensor, Tensor)"
            .into(),
        arguments: vec![q.clone(), k.clone(), v.clone(), ranges.clone(), number("heads", "h"), seed()],
        outputs: vec![tensor("out", "nw", Type::Same), lse()],
        plan: run(|call| {
            let [q, _, _, _, heads, _, _, p, seed, _] = call.arguments();
            check_dropout("attention", p, seed)?;
            check_heads(q, heads.int())
        }),
        kernels: Kernels::Cpu,
        kernel: run(|call| {
            let ([q, k, v, ranges, numbers @ ..], [out, lse]) = (call.arguments::<10>(), call.outputs());
            let a = Views { out: out.view, lse: lse.view, ..Views::of(call, [q, k, v, ranges], numbers) };
            by_dtype!(a.q, E => forward::<E>(&a))
        }),
        formula: make(|call| {
            let [q, k, v, ranges, numbers @ ..] = call.arguments::<10>();
            let [q, k, v, ranges] = [q, k, v, ranges].map(Value::required);
            Ok(vec![Some(composed(&q, &k, &v, &ranges, &Formula::of(numbers)?)?), None])
        }),
        derivative: derivative(Operator {
            schema: "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor lse, Tensor ranges, \
                     int heads, bool causal, float scale, float p, Tensor? seed, int site) -> (Tensor, Tensor, Tensor)"
                .into(),
            arguments: vec![tensor("dout", "nw", Type::Same), q, k, v, lse(), ranges, number("heads", "h"), seed()],
            outputs: vec![
                tensor("dq", "nw", Type::Same),
                tensor("dk", "mw", Type::Same),
                tensor("dv", "mw", Type::Same),
            ],
            plan: run(|call| {
                let [_, q, _, _, _, _, heads, _, _, p, seed, _] = call.arguments();
                check_dropout("attention_backward", p, seed)?;
                check_heads(q, heads.int())
            }),
            kernels: Kernels::Cpu,
            kernel: run(|call| {
                let [dout, q, k, v, lse, ranges, numbers @ ..] = call.arguments::<12>();
                let [dq, dk, dv] = call.outputs::<3>().each_ref().map(|d| d.view);
                let a = Views { lse: lse.view, ..Views::of(call, [q, k, v, ranges], numbers) };
                let g = Gradients { dout: dout.view, dq, dk, dv };
                by_dtype!(a.q, E => backward::<E>(&a, &g))
            }),
            formula: make(|call| {
                let [dout, q, k, v, _, ranges, numbers @ ..] = call.arguments::<12>();
                let [dout, q, k, v, ranges] = [dout, q, k, v, ranges].map(Value::required);
                let numbers = Formula::of(numbers)?;
                engine::gradients(&[&q, &k, &v], &dout, |t| composed(&t[0], &t[1], &t[2], &ranges, &numbers))
            }),
            ..Operator::default()
        }),
        has_own_gradient: true,
        is_looped: true,
        count: Some(&COUNT),
    }
}

/// A call; absent views have null data.
struct Views {
    q: View,
    k: View,
    v: View,
    ranges: View,
    out: View,
    lse: View,
    heads: i64,
    causal: bool,
    scale: f64,
    draw: Draw,
}

struct Gradients {
    dout: View,
    dq: View,
    dk: View,
    dv: View,
}

impl Views {
    /// Without its outputs.
    fn of(call: &Call, tensors: [&Value; 4], [heads, causal, scale, p, seed, site]: &[Value; 6]) -> Views {
        let [q, k, v, ranges] = tensors.map(|t| t.view);
        let (heads, causal, scale) = (heads.int(), causal.flag(), scale.float());
        let draw = Draw::of(call, [p, seed, site]);
        Views { q, k, v, ranges, out: View::ABSENT, lse: View::ABSENT, heads, causal, scale, draw }
    }

    /// `keys_too` where gradients of keys are written as well.
    fn sequences(&self, keys_too: bool) -> Result<Vec<Sequence>> {
        // SAFETY: the operator's table says that ranges is an int64 matrix with four columns, contiguous.
        sequences(unsafe { self.ranges.slice::<i64>() }, [self.q.rows, self.k.rows], keys_too)
    }

    fn attention(&self) -> kernel::Attention {
        let heads = self.heads as usize;
        kernel::Attention {
            heads,
            d_head: self.q.cols() / heads,
            scale: self.scale,
            causal: self.causal,
            dropout: self.draw.dropout(),
        }
    }
}

/// Ranges, checked: inside the rows of queries and keys, queries in order and disjoint (threads write them), and keys
/// where `keys_too`.
fn sequences(ranges: &[i64], [q_rows, k_rows]: [i64; 2], keys_too: bool) -> Result<Vec<Sequence>> {
    let (mut q_end, mut k_end) = (0, 0);
    let beyond = |start: i64, len: i64, rows: i64| len > rows || start > rows - len;
    let mut sequences = memory::reserved(ranges.len() / 4);
    for (i, r) in ranges.chunks_exact(4).enumerate() {
        let (q_start, q_len, k_start, k_len) = (r[0], r[1], r[2], r[3]);
        let bad = |why: String| Err(Error::Torch(format!("attention: range {i} {r:?} {why}")));
        if r.iter().any(|v| *v < 0) || beyond(q_start, q_len, q_rows) || beyond(k_start, k_len, k_rows) {
            return bad(format!("lies outside the {q_rows} query and {k_rows} key rows"));
        }
        if q_start < q_end || keys_too && k_start < k_end {
            return bad("overlaps one before it: ranges must be in order and disjoint".to_string());
        }
        (q_end, k_end) = (q_start + q_len, k_start + k_len);
        let [q_start, q_len, k_start, k_len] = [q_start, q_len, k_start, k_len].map(|v| v as usize);
        sequences.push(Sequence { q_start, q_len, k_start, k_len });
    }
    Ok(sequences)
}

/// # Safety
/// The view is of E, and lives as long as the matrix is used.
unsafe fn matrix<'a, E>(v: &View) -> Matrix<'a, E> {
    Matrix { data: v.slice(), stride: v.stride as usize }
}

/// # Safety
/// As [`matrix`]; the tensor is fresh, and each thread keeps to the rows of its own sequences.
unsafe fn matrix_mut<E>(v: &View) -> MatrixMut<E> {
    let all = v.slice_mut::<E>();
    MatrixMut::new(all.as_mut_ptr(), all.len(), v.stride as usize)
}

/// Sequences that are worth a thread of their own.
fn grain(sequences: &[Sequence]) -> usize {
    let rows: usize = sequences.iter().map(|s| s.q_len).sum();
    (128 * sequences.len() / rows.max(1)).max(1)
}

fn forward<E: Element>(a: &Views) -> Result<()> {
    let (attention, sequences) = (a.attention(), a.sequences(false)?);
    // SAFETY: the operator's table has dtypes and widths; out and lse are fresh, and sequences have disjoint query rows.
    unsafe {
        if sequences.iter().map(|s| s.q_len).sum::<usize>() < a.q.rows() {
            a.out.slice_mut::<E>().fill(E::default()); // rows in no sequence
            a.lse.slice_mut::<E::Acc>().fill(E::Acc::ZERO);
        }
        let (q, k, v) = (matrix::<E>(&a.q), matrix::<E>(&a.k), matrix::<E>(&a.v));
        let (out, lse) = (matrix_mut::<E>(&a.out), matrix_mut::<E::Acc>(&a.lse));
        parallel::for_each(sequences.len(), grain(&sequences), |r| {
            kernel::forward::<E>(&attention, &sequences[r], q, k, v, out, lse);
        });
    }
    Ok(())
}

fn backward<E: Element>(a: &Views, g: &Gradients) -> Result<()> {
    let (attention, sequences) = (a.attention(), a.sequences(true)?);
    // SAFETY: as in `forward`; dq, dk and dv are fresh, and sequences have disjoint key rows too.
    unsafe {
        let queries: usize = sequences.iter().map(|s| s.q_len).sum();
        let keys: usize = sequences.iter().map(|s| s.k_len).sum();
        for (d, covered) in [(&g.dq, queries), (&g.dk, keys), (&g.dv, keys)] {
            if covered < d.rows() {
                d.slice_mut::<E>().fill(E::default());
            }
        }
        let (q, k, v) = (matrix::<E>(&a.q), matrix::<E>(&a.k), matrix::<E>(&a.v));
        let (dout, lse) = (matrix::<E>(&g.dout), matrix::<E::Acc>(&a.lse));
        let (dq, dk, dv) = (matrix_mut::<E>(&g.dq), matrix_mut::<E>(&g.dk), matrix_mut::<E>(&g.dv));
        parallel::for_each(sequences.len(), grain(&sequences), |r| {
            kernel::backward::<E>(&attention, &sequences[r], q, k, v, dout, lse, dq, dk, dv);
        });
    }
    Ok(())
}

/// The formula in tch, for devices without a kernel and for higher derivatives: sentences padded to the longest.
fn composed(q: &Tensor, k: &Tensor, v: &Tensor, ranges: &Tensor, a: &Formula) -> Result<Tensor> {
    let kind = if q.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    let device = q.device();
    let mut flat = memory::filled(0, ranges.numel());
    ranges.f_to_device(tch::Device::Cpu)?.f_contiguous()?.f_copy_data(&mut flat, ranges.numel())?;
    // Before anything is indexed by them: a GPU would not say what was wrong, and do nothing more.
    let sequences = sequences(&flat, [q.size()[0], k.size()[0]], false)?;
    let longest = |len: fn(&Sequence) -> usize| sequences.iter().map(len).max().unwrap_or(0);
    let (q_len, k_len) = (longest(|s| s.q_len), longest(|s| s.k_len));
    let n = sequences.len();
    if [n, q_len, k_len].contains(&0) {
        return Ok(q.f_mul_scalar(0.0)?);
    }
    // Row numbers by (sequence, place); a place past the end takes the sequence's first row, or where it has none the
    // first of all, and is masked.
    let rows = |range: fn(&Sequence) -> (usize, usize), longest: usize| -> Result<Tensor> {
        let mut rows = memory::reserved::<i64>(n.saturating_mul(longest));
        rows.extend(sequences.iter().map(range).flat_map(|(start, len)| {
            let spare = if len > 0 { start } else { 0 };
            (0..longest).map(move |i| if i < len { start + i } else { spare } as i64)
        }));
        Ok(Tensor::f_from_slice(&rows)?.f_to_device(device)?)
    };
    let (q_rows, k_rows) = (rows(|s| (s.q_start, s.q_len), q_len)?, rows(|s| (s.k_start, s.k_len), k_len)?);
    let mut visible = memory::reserved::<bool>(n.saturating_mul(q_len).saturating_mul(k_len));
    visible.extend(sequences.iter().flat_map(|s| {
        let past = move |i: usize, j: usize| j + s.q_len <= i + s.k_len;
        (0..q_len).flat_map(move |i| (0..k_len).map(move |j| j < s.k_len && (!a.causal || past(i, j))))
    }));
    let mut real = memory::reserved::<i64>(sequences.iter().map(|s| s.q_len).sum());
    real.extend(sequences.iter().enumerate().flat_map(|(i, s)| (0..s.q_len).map(move |t| (i * q_len + t) as i64)));
    let (n, q_len, k_len) = (n as i64, q_len as i64, k_len as i64);
    let visible = Tensor::f_from_slice(&visible)?.f_reshape([n, 1, q_len, k_len].as_slice())?.f_to_device(device)?;
    let heads = |t: &Tensor, rows: &Tensor, len: i64| -> Result<Tensor> {
        let t = t.f_to_kind(kind)?.f_index_select(0, rows)?;
        Ok(t.f_reshape([n, len, a.heads, -1].as_slice())?.f_transpose(1, 2)?) // (n, heads, len, d_head)
    };
    let (qh, kh, vh) = (heads(q, &q_rows, q_len)?, heads(k, &k_rows, k_len)?, heads(v, &k_rows, k_len)?);
    let scores = qh.f_matmul(&kh.f_transpose(-2, -1)?)?.f_mul_scalar(a.scale)?;
    let hidden = visible.f_logical_not()?;
    let mut weights =
        scores.f_masked_fill(&hidden, f64::NEG_INFINITY)?.f_softmax(-1, kind)?.f_masked_fill(&hidden, 0.0)?;
    if a.draw.p > 0.0 {
        // Element (query row·heads + head, key), as the kernel draws it.
        let all = dropout_scale(&a.draw, (q.size()[0] * a.heads) as usize, k_len as usize)?;
        let all = all.f_to_kind(kind)?.f_to_device(device)?.f_reshape([q.size()[0], a.heads, k_len].as_slice())?;
        let mask =
            all.f_index_select(0, &q_rows)?.f_reshape([n, q_len, a.heads, k_len].as_slice())?.f_transpose(1, 2)?;
        weights = weights.f_mul(&mask)?;
    }
    let out = weights.f_matmul(&vh)?.f_transpose(1, 2)?.f_reshape([n * q_len, -1].as_slice())?; // (n·q_len, d)
    let real = Tensor::f_from_slice(&real)?.f_to_device(device)?;
    let zeros = q.f_to_kind(kind)?.f_zeros_like()?;
    Ok(zeros.f_index_copy(0, &q_rows.f_index_select(0, &real)?, &out.f_index_select(0, &real)?)?.f_to_kind(q.kind())?)
}

/// The composed formula's numbers.
struct Formula {
    heads: i64,
    causal: bool,
    scale: f64,
    draw: Draw,
}

impl Formula {
    fn of([heads, causal, scale, p, seed, site]: &[Value; 6]) -> Result<Self> {
        let draw = Draw::of_formula([p, seed, site])?;
        Ok(Formula { heads: heads.int(), causal: causal.flag(), scale: scale.float(), draw })
    }
}
