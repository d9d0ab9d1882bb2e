//! Attention in tch, for devices without a kernel, for higher derivatives, and for softmax variants without a kernel.

use super::call::{sequences, Settings};
use super::Sequence;
use crate::cpu::memory;
use crate::error::Result;
use crate::host::host;
use crate::kernel::view::accumulation;
use tch::Tensor;

/// The options of a softmax that kernels do not support.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extras<'a> {
    /// The softcap c: scores s become c·tanh(s/c).
    pub softcap: Option<f64>,
    /// Sink logits (heads). The softmax of a head includes its sink as one more score, which has no value.
    pub sinks: Option<&'a Tensor>,
}

impl Extras<'_> {
    /// A plain softmax.
    pub const NONE: Extras<'static> = Extras { softcap: None, sinks: None };

    /// True if the softmax is a plain one.
    pub fn are_none(&self) -> bool {
        self.softcap.is_none() && self.sinks.is_none()
    }

    /// Returns c·tanh(scores/c) for a softcap c; without one the scores as they are.
    pub fn capped(&self, scores: Tensor) -> Result<Tensor> {
        match self.softcap {
            Some(c) => Ok(scores.f_div_scalar(c)?.f_tanh()?.f_mul_scalar(c)?),
            None => Ok(scores),
        }
    }

    /// Returns the softmax of scores (n, heads, queries, keys) over the keys; NaN if a query sees neither key nor sink.
    /// `hidden`, which broadcasts to the scores, is true where a query does not see a key.
    pub fn softmax(&self, scores: &Tensor, hidden: &Tensor) -> Result<Tensor> {
        let scores = self.capped(scores.shallow_clone())?.f_masked_fill(hidden, f64::NEG_INFINITY)?;
        let kind = scores.kind();
        let Some(sinks) = self.sinks else { return Ok(scores.f_softmax(-1, kind)?) };
        let [n, heads, queries, keys] = scores.size()[..] else { unreachable!("scores have four dimensions") };
        // A sink is one more column of scores in the softmax; its weight is then cut off.
        let sinks = sinks.f_to_kind(kind)?.f_reshape([1, heads, 1, 1].as_slice())?;
        let sinks = sinks.f_expand([n, heads, queries, 1].as_slice(), false)?;
        Ok(Tensor::f_cat(&[scores, sinks], -1)?.f_softmax(-1, kind)?.f_narrow(-1, 0, keys)?)
    }
}

/// Returns the attention of q (rows, heads·d_head) to k and v, as the kernel computes it; sentences are padded to the
/// longest. `ranges` (sentences, 4) holds (q_start, q_len, k_start, k_len) of each sentence: its rows in q, and in k
/// and v. `draw(rows, columns)` returns dropout's factors, or `None` without dropout; `settings.draw` is for kernels
/// only.
pub fn composed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    ranges: &Tensor,
    settings: &Settings,
    extras: &Extras,
    draw: impl FnOnce(i64, i64) -> Result<Option<Tensor>>,
) -> Result<Tensor> {
    let kind = accumulation(q.kind());
    let device = q.device();
    // Ranges are checked before anything is indexed with them: a GPU would fail without a clear message, and then stay
    // unusable. The argument `false` allows sentences to share keys.
    let sequences = sequences(&host("attention: ranges", ranges)?, [q.size()[0], k.size()[0]], false)?;
    let longest = |len: fn(&Sequence) -> usize| sequences.iter().map(len).max().unwrap_or(0);
    let (q_len, k_len) = (longest(|s| s.q_len), longest(|s| s.k_len));
    let n = sequences.len();
    // If no query has a key, the result is 0. As a product with q it stays in autograd's graph.
    if [n, q_len, k_len].contains(&0) {
        return Ok(q.f_mul_scalar(0.0)?);
    }
    // Returns the row to read for each (sequence, position). `range` returns a sequence's (first row, length). A
    // position past a sequence's end reads the sequence's first row (row 0 if the sequence is empty), and is masked.
    let rows = |range: fn(&Sequence) -> (usize, usize), longest: usize| -> Result<Tensor> {
        let mut rows = memory::reserved::<i64>(n.saturating_mul(longest));
        rows.extend(sequences.iter().map(range).flat_map(|(start, len)| {
            let padding_row = if len > 0 { start } else { 0 };
            (0..longest).map(move |i| if i < len { start + i } else { padding_row } as i64)
        }));
        Ok(Tensor::f_from_slice(&rows)?.f_to_device(device)?)
    };
    let (q_rows, k_rows) = (rows(|s| (s.q_start, s.q_len), q_len)?, rows(|s| (s.k_start, s.k_len), k_len)?);
    let mut visible = memory::reserved::<bool>(n.saturating_mul(q_len).saturating_mul(k_len));
    visible.extend(sequences.iter().flat_map(|s| {
        // With a causal mask, key j is visible to query i if j ≤ i + k_len − q_len; this form avoids negative numbers.
        let is_past = move |i: usize, j: usize| j + s.q_len <= i + s.k_len;
        (0..q_len).flat_map(move |i| (0..k_len).map(move |j| j < s.k_len && (!settings.causal || is_past(i, j))))
    }));
    // `real` holds the indices of the real queries among the n·q_len padded positions. Query t of sequence i is at
    // position i·q_len + t.
    let mut real = memory::reserved::<i64>(sequences.iter().map(|s| s.q_len).sum());
    real.extend(sequences.iter().enumerate().flat_map(|(i, s)| (0..s.q_len).map(move |t| (i * q_len + t) as i64)));
    let (n, q_len, k_len) = (n as i64, q_len as i64, k_len as i64);
    let visible = Tensor::f_from_slice(&visible)?.f_reshape([n, 1, q_len, k_len].as_slice())?.f_to_device(device)?;
    // Gathers the rows of each sequence, and splits them into heads: (n, heads, len, d_head).
    let split_heads = |t: &Tensor, rows: &Tensor, len: i64| -> Result<Tensor> {
        let t = t.f_to_kind(kind)?.f_index_select(0, rows)?;
        Ok(t.f_reshape([n, len, settings.heads, -1].as_slice())?.f_transpose(1, 2)?)
    };
    let qh = split_heads(q, &q_rows, q_len)?;
    let (kh, vh) = (split_heads(k, &k_rows, k_len)?, split_heads(v, &k_rows, k_len)?);
    let scores = qh.f_matmul(&kh.f_transpose(-2, -1)?)?.f_mul_scalar(settings.scale)?;
    let hidden = visible.f_logical_not()?;
    let mut weights = extras.softmax(&scores, &hidden)?.f_masked_fill(&hidden, 0.0)?;
    // Dropout's factors have a row for each query row and head, and a column for each key, as in the kernel, so both
    // drop the same weights.
    let (rows, heads) = (q.size()[0], settings.heads);
    if let Some(factors) = draw(rows * heads, k_len)? {
        let factors = factors.f_to_kind(kind)?.f_to_device(device)?.f_reshape([rows, heads, k_len].as_slice())?;
        let factors = factors.f_index_select(0, &q_rows)?.f_reshape([n, q_len, heads, k_len].as_slice())?;
        weights = weights.f_mul(&factors.f_transpose(1, 2)?)?;
    }
    let out = weights.f_matmul(&vh)?.f_transpose(1, 2)?.f_reshape([n * q_len, -1].as_slice())?; // (n·q_len, d)
    let real = Tensor::f_from_slice(&real)?.f_to_device(device)?;
    // Rows of q that are in no sequence stay 0.
    let zeros = q.f_to_kind(kind)?.f_zeros_like()?;
    Ok(zeros.f_index_copy(0, &q_rows.f_index_select(0, &real)?, &out.f_index_select(0, &real)?)?.f_to_kind(q.kind())?)
}
