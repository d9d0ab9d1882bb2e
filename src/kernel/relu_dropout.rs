//! ReLU and dropout in one pass.
//!
//! > y = M∘max(x, 0),  dx = dy/(1 − p) where y ≠ 0, else 0
//!
//! M dropout's factors, 0 or 1/(1 − p), from [`Dropout`]'s stream, element by (row, column). The output alone tells the
//! backward which elements passed: 1/(1 − p) ≥ 1 makes no positive x zero, in any storage type. Source: SPEC §4 (dropout
//! "after ReLU"). A NaN in x is a NaN in y, dropped or not, and one in y a NaN in dx.

use crate::cpu::philox::{self, Dropout};
use crate::cpu::{Accumulator, Element};
use crate::multiversion;

/// Random half words drawn at a time: 8 KiB, a sixth of the first cache.
const DRAWN: usize = 4096;

multiversion! {
    /// y from x, both whole rows of `cols` columns, the first being row `first_row` of the stream's matrix.
    pub fn forward[E: Element](cols: usize, dropout: Option<&Dropout>, first_row: usize, x: &[E], y: &mut [E]) {
        assert_eq!(x.len(), y.len());
        let Some(dropout) = dropout else {
            for (y, x) in y.iter_mut().zip(x) {
                *y = E::store(relu(x.load()));
            }
            return;
        };
        if x.is_empty() {
            return;
        }
        assert!(cols > 0 && x.len() % cols == 0, "{} elements in rows of {cols}", x.len());
        let (kept, per_row) = (E::Acc::from_f64(dropout.scale), philox::padded(cols));
        let rows = (DRAWN / per_row).max(1);
        let mut random = philox::scratch(rows, cols);
        for (i, (x, y)) in x.chunks(rows * cols).zip(y.chunks_mut(rows * cols)).enumerate() {
            philox::fill(&dropout.stream, first_row + i * rows, x.len() / cols, cols, &mut random);
            for ((x, y), random) in x.chunks(cols).zip(y.chunks_mut(cols)).zip(random.chunks(per_row)) {
                for ((x, y), random) in x.iter().zip(y).zip(random) {
                    let factor = if *random >= dropout.threshold { kept } else { E::Acc::ZERO };
                    *y = E::store(relu(x.load()) * factor);
                }
            }
        }
    }
}

multiversion! {
    /// dx from y and dy.
    pub fn backward[E: Element](dropout: Option<&Dropout>, y: &[E], dy: &[E], dx: &mut [E]) {
        assert!(y.len() == dy.len() && y.len() == dx.len());
        let scale = dropout.map_or(E::Acc::ONE, |d| E::Acc::from_f64(d.scale));
        for ((y, dy), dx) in y.iter().zip(dy).zip(dx) {
            let (y, g) = (y.load(), dy.load() * scale);
            let g = if y == E::Acc::ZERO { E::Acc::ZERO } else { g };
            #[allow(clippy::eq_op)]
            let nan = y != y;
            *dx = E::store(if nan { y } else { g });
        }
    }
}

/// max(x, 0), and NaN for NaN.
#[inline(always)]
fn relu<A: Accumulator>(x: A) -> A {
    if x <= A::ZERO {
        A::ZERO
    } else {
        x
    }
}
