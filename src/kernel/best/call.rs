//! The most probable columns of a projection: some rows at a time go through the product and on to the choice while
//! their logits are in the cache.

use super::{best, Choice, Likely};
use crate::cpu::memory::Aligned;
use crate::cpu::pack::PAIR_LANES;
use crate::cpu::parallel::{self, Shared};
use crate::cpu::Accumulator;
use crate::error::{Error, Result};
use crate::kernel::math::tanh;
use crate::kernel::packed::call::kind;
use crate::kernel::packed::{product, PackedMatrix};
use crate::kernel::view::View;
use crate::multiversion;
use tch::Tensor;

/// Rows of logits that are made and read together: 1 MB of f32 for 10,000 columns.
const ROWS: usize = 24;

multiversion! {
    /// z ← c·tanh(z/c).
    fn cap[isa S][A: Accumulator](logits: &mut [A], c: A) {
        for z in logits {
            *z = tanh::<A, S>(*z / c).0 * c;
        }
    }
}

/// Of each row of z = hWᵀ + b the `count` most probable columns, as [`best`] has them; h (rows, k) on the CPU. With a
/// `softcap` c, of c·tanh(z/c).
pub fn best_of_product<A: Accumulator>(
    h: &Tensor,
    w: &PackedMatrix<A>,
    softcap: Option<f64>,
    count: usize,
    choice: Choice,
) -> Result<Vec<Vec<Likely>>> {
    let h = h.f_to_kind(kind::<A>())?.f_contiguous()?;
    let Some(view) = View::of(&h).filter(|view| view.cols() == w.inner()) else {
        let (size, k) = (h.size(), w.inner());
        return Err(Error::Torch(format!(
            "a projection of {k} columns takes a matrix of as many on the CPU, got {size:?}"
        )));
    };
    let (rows, k, cols) = (view.rows(), w.inner(), w.columns());
    let mut found: Vec<Vec<Likely>> = vec![Vec::with_capacity(count); rows];
    let to = Shared::new(&mut found);
    // SAFETY: `h` outlives this function and is of type A.
    let h = unsafe { view.slice::<A>() };
    parallel::for_each(rows, ROWS, |range| {
        let stride = cols.next_multiple_of(PAIR_LANES);
        let mut logits = Aligned::<A>::new(ROWS.min(range.len()) * stride);
        for first in range.clone().step_by(ROWS) {
            let end = range.end.min(first + ROWS);
            product(&h[first * k..], k, end - first, w, &mut logits, stride);
            if let Some(c) = softcap {
                cap::<A>(&mut logits[..(end - first) * stride], A::from_f64(c));
            }
            // SAFETY: these rows lie in this thread's range, and nobody else has them.
            best(&logits, cols, stride, count, choice, unsafe { to.slice(first..end) });
        }
    });
    Ok(found)
}
