//! y = xWᵀ + b by a matrix that is packed once and then multiplied many times, as decoding does.
//!
//! > y_ri = b_i + Σ_c x_rc W_ic
//!
//! W (n, k) lies in panels of 32 of its rows, transposed: a panel's 32 numbers of one column c are consecutive, and
//! zeros fill the last panel. A tile of 6 rows of x by a panel (half a panel where there is no AVX-512) stays in
//! registers while c runs, so each step is one load of the panel, one broadcast a row, and the products. libtorch packs
//! the matrix anew in each call, which costs as much as 80 rows of x.

pub mod call;

use crate::cpu::memory::Aligned;
use crate::cpu::pack::{Isa, Of, Pack, Store, PAIR_LANES};
use crate::cpu::Accumulator;
use crate::multiversion;

/// W (n, k), packed, and b (n).
pub struct PackedMatrix<A> {
    panels: Aligned<A>,
    /// Filled up with zeros to whole panels.
    bias: Aligned<A>,
    n: usize,
    k: usize,
}

impl<A: Accumulator> PackedMatrix<A> {
    /// Of a row-major matrix (n, k); without a bias b = 0.
    pub fn new(weight: &[A], bias: Option<&[A]>, n: usize, k: usize) -> Self {
        assert!(weight.len() == n * k && bias.is_none_or(|bias| bias.len() == n), "W ({n}, {k}) and b ({n})");
        let mut panels = Aligned::new(n.next_multiple_of(PAIR_LANES) * k);
        for (i, row) in weight.chunks_exact(k.max(1)).enumerate() {
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

    /// Columns of y.
    pub fn columns(&self) -> usize {
        self.n
    }

    /// Columns of x.
    pub fn inner(&self) -> usize {
        self.k
    }
}

/// y (rows, n) of x (rows, k), whose rows are `x_stride` and `y_stride` apart. Nothing is written to columns of y from n on.
pub fn product<A: Accumulator>(
    x: &[A],
    x_stride: usize,
    rows: usize,
    w: &PackedMatrix<A>,
    y: &mut [A],
    y_stride: usize,
) {
    if rows == 0 || w.n == 0 {
        return;
    }
    assert!(y_stride >= w.n && (rows - 1) * y_stride + w.n <= y.len());
    assert!(x_stride >= w.k && (rows - 1) * x_stride + w.k <= x.len());
    // Tiles of x, transposed: TILE numbers of column c are consecutive.
    let mut transposed = Aligned::<A>::new(ROWS * w.k);
    for first in (0..rows).step_by(ROWS) {
        let count = ROWS.min(rows - first);
        for (r, row) in x[first * x_stride..].chunks(x_stride).take(count).enumerate() {
            let tile = &mut transposed[r / TILE * TILE * w.k..][..TILE * w.k];
            for (to, value) in tile.chunks_exact_mut(TILE).zip(row) {
                to[r % TILE] = *value;
            }
        }
        for (p, bias) in w.bias.as_chunks::<PAIR_LANES>().0.iter().enumerate() {
            let panel = w.panels[p * PAIR_LANES * w.k..][..PAIR_LANES * w.k].as_chunks::<PAIR_LANES>().0;
            let used = PAIR_LANES.min(w.n - p * PAIR_LANES);
            for t in (0..count).step_by(TILE) {
                let mut sums = [*bias; TILE];
                add_tile(transposed[t * w.k..][..TILE * w.k].as_chunks().0, panel, &mut sums);
                for (r, sum) in sums.iter().enumerate().take(count - t) {
                    y[(first + t + r) * y_stride + p * PAIR_LANES..][..used].copy_from_slice(&sum[..used]);
                }
            }
        }
    }
}

/// Rows of x that are read again for each panel: 12 KiB of f32 where k is 128, half the first cache beside a panel.
const ROWS: usize = 24;

/// Rows of a tile: with two registers of columns each they take twelve of AVX2's sixteen.
const TILE: usize = 6;

multiversion! {
    /// sums += the product of a tile of x and a panel. Not inlined, for what the caller holds in registers would push sums
    /// out of them.
    #[inline(never)]
    fn add_tile[isa S][A: Accumulator](x: &[[A; TILE]], panel: &[[A; PAIR_LANES]], sums: &mut [[A; PAIR_LANES]; TILE]) {
        if is_wide::<S>() {
            add_columns::<A, S, true, true>(x, panel, sums);
        } else {
            add_columns::<A, S, true, false>(x, panel, sums);
            add_columns::<A, S, false, true>(x, panel, sums);
        }
    }
}

/// Whether a pack is one register, of 32 that there are.
#[inline(always)]
fn is_wide<S: Isa>() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::any::TypeId::of::<S>() == std::any::TypeId::of::<crate::cpu::pack::Avx512>();
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// The first half of the panel's columns where LOW, the second where HIGH.
#[inline(always)]
fn add_columns<A: Accumulator, S: Isa, const LOW: bool, const HIGH: bool>(
    x: &[[A; TILE]],
    panel: &[[A; PAIR_LANES]],
    sums: &mut [[A; PAIR_LANES]; TILE],
) {
    let mut totals = [[Of::<A, S>::zero(); 2]; TILE];
    for r in 0..TILE {
        totals[r] = Of::<A, S>::pair(&sums[r]);
    }
    for (x, w) in x.iter().zip(panel) {
        let w = Of::<A, S>::pair(w);
        for r in 0..TILE {
            let x = Of::<A, S>::splat(x[r]);
            if LOW {
                totals[r][0] = x.mul_add(w[0], totals[r][0]);
            }
            if HIGH {
                totals[r][1] = x.mul_add(w[1], totals[r][1]);
            }
        }
    }
    for r in 0..TILE {
        // The half that was left out keeps its values; the compiler drops its load and store.
        Pack::store(totals[r], &mut sums[r], Store::PLAIN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::{force, Level};

    fn noise(n: usize, from: usize) -> Vec<f64> {
        (from..from + n)
            .map(|i| ((i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as f64 / 8e6 - 1.0)
            .collect()
    }

    fn check<A: Accumulator>(level: Level, [rows, n, k]: [usize; 3], [x_pad, y_pad]: [usize; 2], bound: f64) {
        let typed = |values: Vec<f64>| values.into_iter().map(A::from_f64).collect::<Vec<A>>();
        let (x, w, b) = (typed(noise(rows * (k + x_pad), 0)), typed(noise(n * k, 900)), typed(noise(n, 77)));
        let untouched = A::from_f64(42.0);
        for bias in [None, Some(&b[..])] {
            let mut y = vec![untouched; rows * (n + y_pad)];
            product(&x, k + x_pad, rows, &PackedMatrix::new(&w, bias, n, k), &mut y, n + y_pad);
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
            let sizes = [[1, 1, 1], [3, 32, 16], [7, 33, 5], [25, 70, 128], [49, 31, 130], [0, 4, 4], [4, 0, 4]];
            for size in sizes {
                for pads in [[0, 0], [3, 31], [0, 5]] {
                    check::<f32>(level, size, pads, 1e-4);
                    check::<f64>(level, size, pads, 1e-12);
                }
            }
        }
        force(None);
    }
}
