//! Attention on an operator's tensors: threads share the sequences on the CPU. There is no such kernel for GPUs.

use super::{backward as backward_sequences, forward as forward_sequences};
use super::{Matrix, MatrixMut, ScaledDotProduct, Sequence};
use crate::cpu::{memory, parallel, Accumulator, Element};
use crate::error::{Error, Result};
use crate::kernel::dropout::Draw;
use crate::kernel::view::{by_dtype, View};

/// The settings of an attention call, for the kernel and for the formula in tch operations.
#[derive(Clone, Copy)]
pub struct Settings {
    pub heads: i64,
    pub causal: bool,
    /// The factor of the scores.
    pub scale: f64,
    /// Dropout on the weights.
    pub draw: Draw,
}

/// The inputs of the forward and the backward pass. The rows of all sentences' queries follow each other in `q`, those
/// of their keys and values in `k` and `v`. `ranges`, int64 (sentences, 4), holds (q_start, q_len, k_start, k_len) of
/// each sentence: its first row and number of rows in `q`, and those in `k` and `v`.
pub struct AttentionViews {
    pub q: View,
    pub k: View,
    pub v: View,
    pub ranges: View,
    pub settings: Settings,
}

/// Computes the attention `out` (as `q`) and `lse`, the log Σ exp(score) of each query and head (queries, heads).
pub fn forward(a: &AttentionViews, out: &View, lse: &View) -> Result<()> {
    by_dtype!(a.q, E => forward_typed::<E>(a, out, lse))
}

/// Computes the gradients (dq, dk, dv) from `dout`, the gradient of out, and the forward pass's lse. If lse was
/// computed from more than these keys, `shares` holds the sum of each query's weights over these keys, in the shape of
/// lse.
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
        // SAFETY: the operator's declaration guarantees that `ranges` is a contiguous int64 matrix with four columns.
        sequences(unsafe { self.ranges.slice::<i64>() }, [self.q.rows, self.k.rows], keys_too)
    }

    /// Returns the settings in the form that kernels take.
    fn attention(&self) -> ScaledDotProduct {
        let Settings { heads, causal, scale, draw } = self.settings;
        let heads = heads as usize;
        ScaledDotProduct { heads, d_head: self.q.cols() / heads, scale, causal, dropout: draw.dropout() }
    }
}

/// Checks `ranges`, which holds (q_start, q_len, k_start, k_len) of each sequence, and returns the sequences. They must
/// lie inside the `q_rows` query rows and `k_rows` key rows. Their query rows must be in order and disjoint, because
/// several threads write them; with `keys_too`, their key rows too.
pub(super) fn sequences(ranges: &[i64], [q_rows, k_rows]: [i64; 2], keys_too: bool) -> Result<Vec<Sequence>> {
    let (mut q_end, mut k_end) = (0, 0);
    // True if a range ends after the last row. start + len might overflow, but rows − len does not, because `len >
    // rows` is tested first.
    let beyond = |start: i64, len: i64, rows: i64| len > rows || start > rows - len;
    let mut sequences = memory::reserved(ranges.len() / 4);
    for (i, range) in ranges.chunks_exact(4).enumerate() {
        let (q_start, q_len, k_start, k_len) = (range[0], range[1], range[2], range[3]);
        let refuse = |why: String| Err(Error::Torch(format!("attention: range {i} {range:?} {why}")));
        if range.iter().any(|v| *v < 0) || beyond(q_start, q_len, q_rows) || beyond(k_start, k_len, k_rows) {
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
/// The view's dtype is E, and its tensor lives as long as the matrix is used.
unsafe fn matrix<'a, E>(view: &View) -> Matrix<'a, E> {
    Matrix { data: view.slice(), stride: view.stride as usize }
}

/// Returns the view as a matrix to write.
///
/// # Safety
/// The conditions of [`matrix`] hold, nothing else uses the tensor, and each thread uses only the rows of its own
/// sequences.
unsafe fn matrix_mut<E>(view: &View) -> MatrixMut<E> {
    let numbers = view.slice_mut::<E>();
    MatrixMut::new(numbers.as_mut_ptr(), numbers.len(), view.stride as usize)
}

/// Returns the least number of sequences that are worth a thread of their own: as many as have about 128 query rows
/// together.
fn grain(sequences: &[Sequence]) -> usize {
    let rows: usize = sequences.iter().map(|s| s.q_len).sum();
    (128 * sequences.len() / rows.max(1)).max(1)
}

/// Computes `out` and `lse`, as [`forward`] does, for the storage type E of q, k and v; threads share the sequences.
fn forward_typed<E: Element>(a: &AttentionViews, out: &View, lse: &View) -> Result<()> {
    // The argument `false` allows sequences to share keys, which are only read.
    let (attention, sequences) = (a.attention(), a.sequences(false)?);
    // SAFETY: the operator's declaration guarantees dtypes and widths; only this call uses the new tensors out and lse,
    // and sequences have disjoint query rows.
    unsafe {
        // Sequences are disjoint, so if they have fewer rows than q, some rows are in no sequence. Results there are 0.
        if sequences.iter().map(|s| s.q_len).sum::<usize>() < a.q.rows() {
            out.slice_mut::<E>().fill(E::default());
            lse.slice_mut::<E::Acc>().fill(E::Acc::ZERO);
        }
        let (q, k, v) = (matrix::<E>(&a.q), matrix::<E>(&a.k), matrix::<E>(&a.v));
        let (out, lse) = (matrix_mut::<E>(out), matrix_mut::<E::Acc>(lse));
        parallel::for_each(sequences.len(), grain(&sequences), |range| {
            forward_sequences::<E>(&attention, &sequences[range], q, k, v, out, lse);
        });
    }
    Ok(())
}

/// Computes `gradients`, as [`backward`] does, for the storage type E of q, k and v; threads share the sequences.
fn backward_typed<E: Element>(
    a: &AttentionViews,
    dout: &View,
    lse: &View,
    shares: Option<&View>,
    [dq, dk, dv]: &[View; 3],
) -> Result<()> {
    // The argument `true` forbids sequences to share keys, because gradients of keys are written.
    let (attention, sequences) = (a.attention(), a.sequences(true)?);
    // SAFETY: the operator's declaration guarantees dtypes and widths; only this call uses the new tensors dq, dk and
    // dv. Sequences have disjoint query rows and disjoint key rows.
    unsafe {
        let queries: usize = sequences.iter().map(|s| s.q_len).sum();
        let keys: usize = sequences.iter().map(|s| s.k_len).sum();
        // Rows that are in no sequence have the gradient 0.
        for (gradient, rows_in_sequences) in [(dq, queries), (dk, keys), (dv, keys)] {
            if rows_in_sequences < gradient.rows() {
                gradient.slice_mut::<E>().fill(E::default());
            }
        }
        let (q, k, v) = (matrix::<E>(&a.q), matrix::<E>(&a.k), matrix::<E>(&a.v));
        let (dout, lse, shares) = (matrix::<E>(dout), matrix::<E::Acc>(lse), shares.map(|s| matrix::<E::Acc>(s)));
        let (dq, dk, dv) = (matrix_mut::<E>(dq), matrix_mut::<E>(dk), matrix_mut::<E>(dv));
        parallel::for_each(sequences.len(), grain(&sequences), |range| {
            backward_sequences::<E>(&attention, &sequences[range], q, k, v, dout, lse, shares, dq, dk, dv);
        });
    }
    Ok(())
}
