//! Matrices in memory, the operands of attention, and copies between their rows and the kernel's workspace.

use crate::cpu::{Accumulator, Element};
use crate::kernel::math::LANES;
use std::any::TypeId;

/// A matrix whose rows are `stride` elements apart, such as a slice of a fused projection.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, E> {
    pub data: &'a [E],
    pub stride: usize,
}

impl<'a, E> Matrix<'a, E> {
    /// Returns `cols` numbers of a row, from column `from` on.
    #[inline(always)]
    pub(super) fn row(&self, row: usize, from: usize, cols: usize) -> &'a [E] {
        &self.data[row * self.stride + from..][..cols]
    }
}

/// A writable [`Matrix`]. It holds a pointer instead of a slice, because dQ, dK and dV may be columns of one tensor,
/// and threads write different rows of it.
#[derive(Clone, Copy, Debug)]
pub struct MatrixMut<E> {
    data: *mut E,
    len: usize,
    stride: usize,
}

// SAFETY: `new` requires its caller to keep threads on different rows.
unsafe impl<E: Send> Send for MatrixMut<E> {}
unsafe impl<E: Send> Sync for MatrixMut<E> {}

impl<E> MatrixMut<E> {
    /// Wraps `len` elements from `data` on, with rows `stride` apart.
    ///
    /// # Safety
    /// While the matrix or a copy of it is used, the elements stay allocated, and nothing else accesses the used
    /// columns (heads·d_head, or heads for log sums) in the rows of the sequences that it is used with.
    pub unsafe fn new(data: *mut E, len: usize, stride: usize) -> Self {
        MatrixMut { data, len, stride }
    }

    /// Returns `cols` numbers of a row for writing, from column `from` on.
    #[inline(always)]
    pub(super) fn row(&mut self, row: usize, from: usize, cols: usize) -> &mut [E] {
        let start = row * self.stride + from;
        assert!(start.checked_add(cols).is_some_and(|end| end <= self.len), "row {row} of the output");
        // SAFETY: the range is within `len` by the assertion, and only this call uses it by `new`'s contract.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start), cols) }
    }
}

/// Returns f of each of sixteen values. The result is a new array, so the compiler knows that it does not overlap `x`.
#[inline(always)]
fn each<T: Copy, A: Accumulator>(x: [T; LANES], f: impl Fn(T) -> A) -> [A; LANES] {
    let mut y = [A::ZERO; LANES];
    for l in 0..LANES {
        y[l] = f(x[l]);
    }
    y
}

/// Copies a part of `from` to `to`, widened to the computing type and multiplied by `scale`: rows `first..first +
/// rows`, and one head's columns `column..column + d`. Rows of `to` are `width` apart; their padding is not written.
#[inline(always)]
pub(super) fn load<E: Element>(
    from: &Matrix<E>,
    first: usize,
    rows: usize,
    column: usize,
    d: usize,
    scale: E::Acc,
    to: &mut [E::Acc],
    width: usize,
) {
    for (i, to) in to.chunks_exact_mut(width).take(rows).enumerate() {
        let (chunks, rest) = from.row(first + i, column, d).as_chunks::<LANES>();
        let (to_chunks, to_rest) = to.split_at_mut(chunks.len() * LANES);
        for (to, chunk) in to_chunks.as_chunks_mut().0.iter_mut().zip(chunks) {
            *to = each(*chunk, |x| x.load() * scale);
        }
        for (to, x) in to_rest.iter_mut().zip(rest) {
            *to = x.load() * scale;
        }
    }
}

/// Transposes a matrix (rows, columns): copies the columns of `from`, whose rows are `width` numbers apart, to the rows
/// of `to`, which are `lanes` numbers apart. It works in blocks of four, so up to three more rows and columns are read
/// and written.
#[inline(always)]
pub(super) fn transpose<A: Accumulator>(
    from: &[A],
    rows: usize,
    columns: usize,
    width: usize,
    to: &mut [A],
    lanes: usize,
) {
    let (rows, columns) = (rows.next_multiple_of(4), columns.next_multiple_of(4));
    if rows == 0 || columns == 0 {
        return;
    }
    // These are the lengths up to the last element that is read and the last that is written.
    assert!((rows - 1) * width + columns <= from.len() && (columns - 1) * lanes + rows <= to.len());
    #[cfg(target_arch = "x86_64")]
    if TypeId::of::<A>() == TypeId::of::<f32>() {
        use std::arch::x86_64::*;
        for i in (0..rows).step_by(4) {
            for c in (0..columns).step_by(4) {
                // SAFETY: A is f32, and the assertion keeps the 4×4 elements that are read and written inside.
                unsafe {
                    let from = from.as_ptr().cast::<f32>().add(i * width + c);
                    let to = to.as_mut_ptr().cast::<f32>().add(c * lanes + i);
                    // The macro transposes four registers, each with four numbers of a row, in place.
                    let mut x = [0, 1, 2, 3].map(|r| _mm_loadu_ps(from.add(r * width)));
                    let [a, b, c, d] = &mut x;
                    _MM_TRANSPOSE4_PS(a, b, c, d);
                    _mm_storeu_ps(to, *a);
                    _mm_storeu_ps(to.add(lanes), *b);
                    _mm_storeu_ps(to.add(2 * lanes), *c);
                    _mm_storeu_ps(to.add(3 * lanes), *d);
                }
            }
        }
        return;
    }
    for i in 0..rows {
        for c in 0..columns {
            to[c * lanes + i] = from[i * width + c];
        }
    }
}

/// Rounds numbers to the storage type E and writes them to `to`.
#[inline(always)]
pub(super) fn store<E: Element>(from: &[E::Acc], to: &mut [E]) {
    for (to, x) in to.iter_mut().zip(from) {
        *to = E::store(*x);
    }
}
