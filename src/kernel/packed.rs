//! The product y = xWᵀ + b with a matrix that is packed once and then multiplied many times, as in decoding.
//!
//! > y_ri = b_i + Σ_c x_rc W_ic
//!
//! W (n, k) is stored in panels of 32 of its rows, transposed: a panel's 32 numbers of one column c are consecutive,
//! and zeros pad the last panel. A tile of y (some rows of x times one panel) stays in registers during the loop over
//! c. So each step of the loop loads 32 numbers of the panel, broadcasts one number per row of x, and multiplies.
//! libtorch packs the matrix again in each call, which takes as long as the product with 80 rows of x.

pub mod call;

use crate::cpu::memory::Aligned;
use crate::cpu::pack::{pack, Isa, Of, Pack, PAIR_LANES, WIDTH};
use crate::cpu::Accumulator;
use crate::multiversion;
use std::array::from_fn;
use std::ops::Range;

/// A matrix W (n, k), packed, and a bias b (n).
pub struct PackedMatrix<A> {
    /// The panels, one after the other, each with its 32 numbers of column 0, of column 1, and so on.
    panels: Aligned<A>,
    /// The bias, padded with zeros to a whole number of panels.
    bias: Aligned<A>,
    /// The numbers of rows and of columns of W.
    n: usize,
    k: usize,
}

impl<A: Accumulator> PackedMatrix<A> {
    /// Packs a row-major matrix (n, k) and a bias (n). Without a bias, b is 0.
    pub fn new(weight: &[A], bias: Option<&[A]>, n: usize, k: usize) -> Self {
        assert!(weight.len() == n * k && bias.is_none_or(|bias| bias.len() == n), "W ({n}, {k}) and b ({n})");
        let mut panels = Aligned::new(n.next_multiple_of(PAIR_LANES) * k);
        for (i, row) in weight.chunks_exact(k.max(1)).enumerate() {
            // Row i of W is in panel ⌊i/32⌋, which begins at ⌊i/32⌋·32·k, and is number i mod 32 in each of its
            // columns.
            let panel = &mut panels[i / PAIR_LANES * PAIR_LANES * k..];
            for (c, w) in row.iter().enumerate() {
                panel[c * PAIR_LANES + i % PAIR_LANES] = *w;
            }
        }
        let mut padded = Aligned::new(n.next_multiple_of(PAIR_LANES));
        if let Some(bias) = bias {
            padded[..n].copy_from_slice(bias);
        }
        PackedMatrix { panels, bias: padded, n, k }
    }

    /// Returns n, the number of columns of the product y.
    pub fn columns(&self) -> usize {
        self.n
    }

    /// Returns k, the number of columns that x must have.
    pub fn inner(&self) -> usize {
        self.k
    }
}

/// Computes y = xWᵀ + b (rows, n) from x (rows, k). Rows of x are `x_stride` numbers apart, rows of y `y_stride`.
/// Columns of y after the n-th are not written.
pub fn product<A: Accumulator>(
    x: &[A],
    x_stride: usize,
    rows: usize,
    w: &PackedMatrix<A>,
    y: &mut [A],
    y_stride: usize,
) {
    product_columns(x, x_stride, rows, w, 0..w.n, y, y_stride);
}

/// Computes the columns `columns` of y = xWᵀ + b, and writes them to the beginning of y's rows. The other arguments are
/// those of [`product`]. `columns.start` must be a multiple of a panel's width, 32.
pub fn product_columns<A: Accumulator>(
    x: &[A],
    x_stride: usize,
    rows: usize,
    w: &PackedMatrix<A>,
    columns: Range<usize>,
    y: &mut [A],
    y_stride: usize,
) {
    if rows == 0 || columns.is_empty() {
        return;
    }
    assert!(columns.start.is_multiple_of(PAIR_LANES) && columns.end <= w.n, "{columns:?} of {}", w.n);
    assert!(y_stride >= columns.len() && (rows - 1) * y_stride + columns.len() <= y.len());
    assert!(x_stride >= w.k && (rows - 1) * x_stride + w.k <= x.len());
    for first in (0..rows).step_by(ROWS) {
        for column in columns.clone().step_by(PAIR_LANES) {
            multiply_panel(&mut PanelProduct {
                x: &x[first * x_stride..],
                x_stride,
                rows: ROWS.min(rows - first),
                panel: w.panels[column * w.k..][..PAIR_LANES * w.k].as_chunks().0,
                bias: w.bias[column..].first_chunk().expect("b has whole panels"),
                y: &mut y[first * y_stride + column - columns.start..],
                y_stride,
                used: PAIR_LANES.min(columns.end - column),
            });
        }
    }
}

/// The number of rows of x in a block. The block is read again for each panel, so it must stay in the first-level
/// cache: with k = 128 it has 24 KiB of f32, half of a cache of 48 KiB.
const ROWS: usize = 48;

/// The operands of y = xP + b for `rows` rows of x, where P is a panel.
struct PanelProduct<'a, A> {
    x: &'a [A],
    x_stride: usize,
    rows: usize,
    panel: &'a [[A; PAIR_LANES]],
    bias: &'a [A; PAIR_LANES],
    y: &'a mut [A],
    y_stride: usize,
    /// The number of the panel's columns that are written to y.
    used: usize,
}

multiversion! {
    /// Computes a [`PanelProduct`], tile by tile. This is not inlined, because the caller's values in registers would
    /// leave too few for a tile.
    #[inline(never)]
    fn multiply_panel[isa S][A: Accumulator](all: &mut PanelProduct<A>) {
        // A tile has as many rows as the registers allow. Each row has two packs of sums, each of one AVX-512 register
        // (12 rows: 24 of 32 registers), or one pack in two AVX2 registers (6 rows: 12 of 16).
        let tallest = if is_wide::<S>() { 12 } else { 6 };
        for first in (0..all.rows).step_by(tallest) {
            // A tile's height is a constant, because only then do its sums stay in registers. So the macro generates
            // one function for each height, and chooses it at run time.
            macro_rules! of_height {
                ($($height:literal)+) => {
                    match tallest.min(all.rows - first) {
                        $($height => multiply_tile::<A, S, $height>(all, first),)+
                        _ => unreachable!("no tile is taller"),
                    }
                };
            }
            of_height!(1 2 3 4 5 6 7 8 9 10 11 12);
        }
    }
}

/// True if a pack fits one register and there are 32 registers (AVX-512).
#[inline(always)]
fn is_wide<S: Isa>() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::any::TypeId::of::<S>() == std::any::TypeId::of::<crate::cpu::pack::Avx512>();
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// Computes HEIGHT rows of a product, from row `first` on. The panel's two packs of 16 columns are computed together if
/// there are enough registers, otherwise one after the other.
#[inline(always)]
fn multiply_tile<A: Accumulator, S: Isa, const HEIGHT: usize>(all: &mut PanelProduct<A>, first: usize) {
    // The last two parameters are the first pack and the number of packs.
    if is_wide::<S>() {
        multiply_columns::<A, S, HEIGHT, 0, 2>(all, first);
    } else {
        multiply_columns::<A, S, HEIGHT, 0, 1>(all, first);
        multiply_columns::<A, S, HEIGHT, 1, 1>(all, first);
    }
}

/// Computes HEIGHT rows of a product, from row `first` on, for PACKS packs of 16 of the panel's columns, from pack
/// FIRST on. The sums begin with the bias.
#[inline(always)]
fn multiply_columns<A: Accumulator, S: Isa, const HEIGHT: usize, const FIRST: usize, const PACKS: usize>(
    all: &mut PanelProduct<A>,
    first: usize,
) {
    let PanelProduct { x, x_stride, panel, bias, y_stride, used, .. } = *all;
    let rows: [&[A]; HEIGHT] = from_fn(|r| &x[(first + r) * x_stride..][..panel.len()]);
    let mut totals: [[Of<A, S>; PACKS]; HEIGHT] = [from_fn(|p| Pack::load(pack(bias, FIRST + p))); HEIGHT];
    for (c, w) in panel.iter().enumerate() {
        let w: [Of<A, S>; PACKS] = from_fn(|p| Pack::load(pack(w, FIRST + p)));
        for r in 0..HEIGHT {
            let x = Of::<A, S>::splat(rows[r][c]);
            for p in 0..PACKS {
                totals[r][p] = x.mul_add(w[p], totals[r][p]);
            }
        }
    }
    for r in 0..HEIGHT {
        for p in 0..PACKS {
            let row = &mut all.y[(first + r) * y_stride..][..used];
            // If only a part of the panel is used, fewer than WIDTH of the pack's columns may be in y, or none.
            let to = row.chunks_mut(WIDTH).nth(FIRST + p).unwrap_or_default();
            if let Some(to) = to.first_chunk_mut() {
                totals[r][p].put(to);
            } else {
                let mut whole = [A::ZERO; WIDTH];
                totals[r][p].put(&mut whole);
                to.copy_from_slice(&whole[..to.len()]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::{force, Level};

    /// Returns n numbers in about [−1, 1) that look random; `from` selects them.
    fn noise(n: usize, from: usize) -> Vec<f64> {
        // The product scrambles the bits of i; its upper 24 bits are the number.
        (from..from + n)
            .map(|i| ((i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as f64 / 8e6 - 1.0)
            .collect()
    }

    /// Checks y (rows, n) = xWᵀ + b, and its columns after the first panel alone, up to the error `bound`. Rows of x
    /// and y have `x_pad` and `y_pad` more columns, which must stay unread and unwritten.
    fn check<A: Accumulator>(level: Level, [rows, n, k]: [usize; 3], [x_pad, y_pad]: [usize; 2], bound: f64) {
        let typed = |values: Vec<f64>| values.into_iter().map(A::from_f64).collect::<Vec<A>>();
        let (x, w, b) = (typed(noise(rows * (k + x_pad), 0)), typed(noise(n * k, 900)), typed(noise(n, 77)));
        let untouched = A::from_f64(42.0);
        for bias in [None, Some(&b[..])] {
            let (packed, stride) = (PackedMatrix::new(&w, bias, n, k), n + y_pad);
            let mut y = vec![untouched; rows * stride];
            product(&x, k + x_pad, rows, &packed, &mut y, stride);
            assert!(y.chunks(stride.max(1)).all(|row| row[n..].iter().all(|y| *y == untouched)));
            if rows > 0 && n > PAIR_LANES {
                let mut rest = vec![untouched; rows * stride];
                product_columns(&x, k + x_pad, rows, &packed, PAIR_LANES..n, &mut rest, stride);
                for (rest, y) in rest.chunks(stride).zip(y.chunks(stride)) {
                    assert!(rest[..n - PAIR_LANES] == y[PAIR_LANES..n]);
                    assert!(rest[n - PAIR_LANES..].iter().all(|y| *y == untouched));
                }
            }
            for (r, i) in (0..rows).flat_map(|r| (0..n).map(move |i| (r, i))) {
                let terms = (0..k).map(|c| x[r * (k + x_pad) + c].to_f64() * w[i * k + c].to_f64());
                let wanted = bias.map_or(0.0, |b| b[i].to_f64()) + terms.sum::<f64>();
                let got = y[r * (n + y_pad) + i].to_f64();
                assert!((got - wanted).abs() < bound, "{level:?} ({rows}, {n}, {k}) at ({r}, {i}): {got} for {wanted}");
            }
        }
    }

    #[test]
    fn a_packed_product_is_the_product() {
        for level in Level::ALL {
            let level = force(Some(level));
            let sizes = [[1, 1, 1], [3, 32, 16], [25, 70, 128], [49, 31, 130], [0, 4, 4], [4, 0, 4]];
            let heights = (1..=13).flat_map(|rows| [[rows, 33, 5], [rows, 45, 4]]);
            for size in sizes.into_iter().chain(heights) {
                for pads in [[0, 0], [3, 31], [0, 5]] {
                    check::<f32>(level, size, pads, 1e-4);
                    check::<f64>(level, size, pads, 1e-12);
                }
            }
        }
        force(None);
    }
}
