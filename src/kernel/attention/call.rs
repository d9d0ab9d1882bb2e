//! Attention on an operator's tensors: threads share the sequences on the CPU. There is no such kernel for GPUs.

use super::{backward as backward_sequences, forward as forward_sequences};
use super::{Matrix, MatrixMut, ScaledDotProduct, Sequence};
use crate::cpu::{memory, parallel, Accumulator, Element};
use crate::error::{Error, Result};
use crate::kernel::dropout::Draw;
use crate::kernel::view::{by_dtype, View};

/// The settings of a call, for kernels and for the formula.
#[derive(Clone, Copy)]
pub struct Settings {
    pub heads: i64,
    pub causal: bool,
    /// The factor of the scores.
    pub scale: f64,
    /// Dropout on the weights.
    pub draw: Draw,
}

/// The inputs of the forward and the backward pass. n query rows and m key rows are packed sentences; `ranges`, int64
/// (sentences, 4), holds (q_start, q_len, k_start, k_len) of each sentence.
pub struct AttentionViews {
    pub q: View,
    pub k: View,
    pub v: View,
    pub ranges: View,
    pub settings: Settings,
}

/// Computes out and each query's log sum of exponentials, lse.
pub fn forward(a: &AttentionViews, out: &View, lse: &View) -> Result<()> {
    by_dtype!(a.q, E => forward_typed::<E>(a, out, lse))
}

/// Computes dq, dk and dv from the forward pass's lse. If lse was computed from more than these keys, `shares` holds
/// the sum of each query's weights over these keys, in the shape of lse.
pub fn backward(
    a: &AttentionViews,
    dout: &View,
    lse: &View,
    shares: Option<&View>,
    gradients: &[View; 3],
) -> Result<()> {
    by_dtype!(a.q, E => backward_typed::<E>(a, dout, lse, shares, gradients))
}

impl AttentionViews {
    /// Returns the sequences of `ranges` after checking them. `keys_too` is true if gradients of keys are written as
    /// well.
    fn sequences(&self, keys_too: bool) -> Result<Vec<Sequence>> {
        // SAFETY: the operator's declaration guarantees that ranges is a contiguous int64 matrix with four columns.
        sequences(unsafe { self.ranges.slice::<i64>() }, [self.q.rows, self.k.rows], keys_too)
    }

    /// Returns the settings in the form that kernels take.
    fn attention(&self) -> ScaledDotProduct {
        let Settings { heads, causal, scale, draw } = self.settings;
        let heads = heads as usize;
        ScaledDotProduct { heads, d_head: self.q.cols() / heads, scale, causal, dropout: draw.dropout() }
    }
}

/// Checks ranges and returns their sequences. Sequences must be inside the rows of queries and keys. Their query rows
/// must be in order and disjoint, because several threads write them; with `keys_too`, their key rows too.
pub(super) fn sequences(ranges: &[i64], [q_rows, k_rows]: [i64; 2], keys_too: bool) -> Result<Vec<Sequence>> {
    let (mut q_end, mut k_end) = (0, 0);
    // start + len might overflow, rows − len does not: `len > rows` is tested first.
    let beyond = |start: i64, len: i64, rows: i64| len > rows || start > rows - len;
    let mut sequences = memory::reserved(ranges.len() / 4);
    for (i, r) in ranges.chunks_exact(4).enumerate() {
        let (q_start, q_len, k_start, k_len) = (r[0], r[1], r[2], r[3]);
        let refuse = |why: String| Err(Error::Torch(format!("attention: range {i} {r:?} {why}")));
        if r.iter().any(|v| *v < 0) || beyond(q_start, q_len, q_rows) || beyond(k_start, k_len, k_rows) {
            return refuse(format!("lies outside the {q_rows} query and {k_rows} key rows"));
        }
        if q_start < q_end || keys_too && k_start < k_end {
            return refuse("overlaps one before it: ranges must be in order and disjoint".to_string());
        }
        (q_end, k_end) = (q_start + q_len, k_start + k_len);
        let [q_start, q_len, k_start, k_len] = [q_start, q_len, k_start, k_len].map(|v| v as usize);
        sequences.push(Sequence { q_start, q_len, k_start, k_len });
    }
    Ok(sequences)
}

/// Returns the view as a matrix to read.
///
/// # Safety
/// The view is of E, and lives as long as the matrix is used.
unsafe fn matrix<'a, E>(v: &View) -> Matrix<'a, E> {
    Matrix { data: v.slice(), stride: v.stride as usize }
}

/// Returns the view as a matrix to write.
///
/// # Safety
/// The conditions of [`matrix`] hold, the tensor is fresh, and each thread uses only the rows of its own sequences.
unsafe fn matrix_mut<E>(v: &View) -> MatrixMut<E> {
    let all = v.slice_mut::<E>();
    MatrixMut::new(all.as_mut_ptr(), all.len(), v.stride as usize)
}

/// Returns the least number of sequences that are worth a thread of their own: those with about 128 query rows.
fn grain(sequences: &[Sequence]) -> usize {
    let rows: usize = sequences.iter().map(|s| s.q_len).sum();
    (128 * sequences.len() / rows.max(1)).max(1)
}

/// Runs [`forward`] for the storage type E of q, k and v; threads share the sequences.
fn forward_typed<E: Element>(a: &AttentionViews, out: &View, lse: &View) -> Result<()> {
    // Keys are only read, so sequences may share them.
    let (attention, sequences) = (a.attention(), a.sequences(false)?);
    // SAFETY: the operator's declaration guarantees dtypes and widths; out and lse are fresh, and sequences have
    // disjoint query rows.
    unsafe {
        // Sequences are disjoint, so if they have fewer rows than q, some rows are in no sequence. Their results are 0.
        if sequences.iter().map(|s| s.q_len).sum::<usize>() < a.q.rows() {
            out.slice_mut::<E>().fill(E::default());
            lse.slice_mut::<E::Acc>().fill(E::Acc::ZERO);
        }
        let (q, k, v) = (matrix::<E>(&a.q), matrix::<E>(&a.k), matrix::<E>(&a.v));
        let (out, lse) = (matrix_mut::<E>(out), matrix_mut::<E::Acc>(lse));
        parallel::for_each(sequences.len(), grain(&sequences), |r| {
            forward_sequences::<E>(&attention, &sequences[r], q, k, v, out, lse);
        });
    }
    Ok(())
}

/// Runs [`backward`] for the storage type E of q, k and v; threads share the sequences.
fn backward_typed<E: Element>(
    a: &AttentionViews,
    dout: &View,
    lse: &View,
    shares: Option<&View>,
    [dq, dk, dv]: &[View; 3],
) -> Result<()> {
    // Gradients of keys are written, so sequences must not share keys.
    let (attention, sequences) = (a.attention(), a.sequences(true)?);
    // SAFETY: the conditions of `forward_typed` hold; dq, dk and dv are fresh, and sequences have disjoint key rows
    // too.
    unsafe {
        let queries: usize = sequences.iter().map(|s| s.q_len).sum();
        let keys: usize = sequences.iter().map(|s| s.k_len).sum();
        // Rows that are in no sequence have the gradient 0.
        for (d, covered) in [(dq, queries), (dk, keys), (dv, keys)] {
            if covered < d.rows() {
                d.slice_mut::<E>().fill(E::default());
            }
        }
        let (q, k, v) = (matrix::<E>(&a.q), matrix::<E>(&a.k), matrix::<E>(&a.v));
        let (dout, lse, shares) = (matrix::<E>(dout), matrix::<E::Acc>(lse), shares.map(|s| matrix::<E::Acc>(s)));
        let (dq, dk, dv) = (matrix_mut::<E>(dq), matrix_mut::<E>(dk), matrix_mut::<E>(dv));
        parallel::for_each(sequences.len(), grain(&sequences), |r| {
            backward_sequences::<E>(&attention, &sequences[r], q, k, v, dout, lse, shares, dq, dk, dv);
        });
    }
    Ok(())
}
