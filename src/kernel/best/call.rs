//! The most probable columns of a matrix product. The logits are computed in blocks, and each block is read while it
//! and its columns' weights are in the cache.

use super::{rank, Choice, Likely, Standing};
use crate::cpu::memory::Aligned;
use crate::cpu::parallel::{self, Shared};
use crate::cpu::Accumulator;
use crate::error::{Error, Result};
use crate::kernel::math::tanh;
use crate::kernel::packed::call::kind;
use crate::kernel::packed::{product_columns, PackedMatrix};
use crate::kernel::view::View;
use crate::multiversion;
use tch::Tensor;

/// The numbers of rows and of columns in a block of logits, which has 256 KiB of f32. With k = 128 columns in h, the
/// rows of W for one block have 256 KiB, too.
const ROWS: usize = 128;
const COLUMNS: usize = 512;

/// The least number of rows that are worth a thread of their own.
const GRAIN: usize = 24;

multiversion! {
    /// Applies the softcap c to logits: z ← c·tanh(z/c).
    fn cap[isa S][A: Accumulator](logits: &mut [A], c: A) {
        for z in logits {
            *z = tanh::<A, S>(*z / c).0 * c;
        }
    }
}

/// Returns the `count` most probable columns of each row of z = hWᵀ + b, best first, with their log-probabilities. h is
/// (rows, k) on the CPU, and `w` holds W and b. With a `softcap` c, the logits are c·tanh(z/c).
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
    let mut best: Vec<Vec<Likely>> = vec![Vec::new(); rows];
    let to = Shared::new(&mut best);
    // SAFETY: `h` outlives this function and is of type A.
    let h = unsafe { view.slice::<A>() };
    parallel::for_each(rows, GRAIN, |range| {
        let mut logits = Aligned::<A>::new(ROWS.min(range.len()) * COLUMNS);
        for first in range.clone().step_by(ROWS) {
            let block_rows = first..range.end.min(first + ROWS);
            let mut standings: Vec<Standing> = block_rows.clone().map(|_| Standing::new(count)).collect();
            for start in (0..cols).step_by(COLUMNS) {
                let columns = start..cols.min(start + COLUMNS);
                product_columns(&h[first * k..], k, block_rows.len(), w, columns.clone(), &mut logits, COLUMNS);
                if let Some(c) = softcap {
                    cap::<A>(&mut logits[..block_rows.len() * COLUMNS], A::from_f64(c));
                }
                // Rows of a block are COLUMNS numbers apart, even if the last block has fewer columns.
                rank(&logits, start, columns.len(), COLUMNS, count, choice, &mut standings);
            }
            // SAFETY: these rows lie in this thread's range, and nobody else accesses them.
            let best = unsafe { to.slice(block_rows) };
            for (best, standing) in best.iter_mut().zip(standings) {
                *best = standing.finish();
            }
        }
    });
    Ok(best)
}
