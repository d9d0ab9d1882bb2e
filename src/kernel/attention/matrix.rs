//! Views of the operands, and the way from their rows into the work space and back.

use crate::cpu::{Accumulator, Element};
use crate::kernel::math::LANES;
use std::any::TypeId;

/// Rows of a tensor, `stride` elements apart: a slice of a fused projection, say.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, E> {
    pub data: &'a [E],
    pub stride: usize,
}

impl<'a, E> Matrix<'a, E> {
    #[inline(always)]
    pub(super) fn row(&self, row: usize, from: usize, cols: usize) -> &'a [E] {
        &self.data[row * self.stride + from..][..cols]
    }
}

/// [`Matrix`] to write to. A pointer, because dQ, dK and dV interleave in one tensor and threads share it by rows.
#[derive(Clone, Copy, Debug)]
pub struct MatrixMut<E> {
    data: *mut E,
    len: usize,
    stride: usize,
}

// SAFETY: `new` has its caller keep threads to different rows.
unsafe impl<E: Send> Send for MatrixMut<E> {}
unsafe impl<E: Send> Sync for MatrixMut<E> {}

impl<E> MatrixMut<E> {
    /// `len` elements from `data` on, `stride` to a row.
    ///
    /// # Safety
    /// While the matrix or a copy of it is used, the elements are allocated, and those in the used columns (heads·d_head
    /// of them, or heads for log sums) of the rows of the sequences it is used with are accessed through nothing else.
    pub unsafe fn new(data: *mut E, len: usize, stride: usize) -> Self {
        MatrixMut { data, len, stride }
    }

    #[inline(always)]
    pub(super) fn row(&mut self, row: usize, from: usize, cols: usize) -> &mut [E] {
        let start = row * self.stride + from;
        assert!(start.checked_add(cols).is_some_and(|end| end <= self.len), "row {row} of the output");
        // SAFETY: within `len` by the assertion, and this call's alone by `new`'s contract.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start), cols) }
    }
}

/// `f` of sixteen values. All are read before any is written, which spares the compiler the question of overlap.
#[inline(always)]
fn each<T: Copy, A: Accumulator>(x: [T; LANES], f: impl Fn(T) -> A) -> [A; LANES] {
    let mut y = [A::ZERO; LANES];
    for l in 0..LANES {
        y[l] = f(x[l]);
    }
    y
}

/// Rows of one head, widened and scaled, `width` apart; what pads them stays as it was.
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
        let (xs, rest) = from.row(first + i, column, d).as_chunks::<LANES>();
        let (whole, part) = to.split_at_mut(xs.len() * LANES);
        for (to, x) in whole.as_chunks_mut().0.iter_mut().zip(xs) {
            *to = each(*x, |x| x.load() * scale);
        }
        for (to, x) in part.iter_mut().zip(rest) {
            *to = x.load() * scale;
        }
    }
}

/// A column of `from` to a row of `to`, rows `width` and `lanes` apart. Goes by blocks of four: up to three rows and
/// columns more are read and written.
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
    assert!((rows - 1) * width + columns <= from.len() && (columns - 1) * lanes + rows <= to.len());
    #[cfg(target_arch = "x86_64")]
    if TypeId::of::<A>() == TypeId::of::<f32>() {
        use std::arch::x86_64::*;
        for i in (0..rows).step_by(4) {
            for c in (0..columns).step_by(4) {
                // SAFETY: A is f32; the 4×4 elements read and written lie inside by the assertion.
                unsafe {
                    let from = from.as_ptr().cast::<f32>().add(i * width + c);
                    let to = to.as_mut_ptr().cast::<f32>().add(c * lanes + i);
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

#[inline(always)]
pub(super) fn store<E: Element>(from: &[E::Acc], to: &mut [E]) {
    for (to, x) in to.iter_mut().zip(from) {
        *to = E::store(*x);
    }
}
