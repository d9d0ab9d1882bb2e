//! y = xWᵀ + b by a matrix that is packed once and then multiplied many times, as decoding does.
//!
//! > y_ri = b_i + Σ_c x_rc W_ic
//!
//! W (n, k) lies in panels of 32 of its rows, transposed: a panel's 32 numbers of one column c are consecutive, and
//! zeros fill the last panel. A tile of 3 rows of x (6 with AVX-512) by a panel stays in registers while c runs, so each
//! step is one load of the panel, one broadcast a row, and the products. libtorch packs the matrix anew in each call,
//! which costs as much as 80 rows of x.

pub mod call;

use crate::cpu::pack::{Isa, Of, Pack, Store, BLOCK};
use crate::cpu::Accumulator;
use crate::kernel::math::Buffer;
use crate::multiversion;

/// W (n, k), packed, and b (n).
pub struct PackedMatrix<A> {
    panels: Buffer<A>,
    /// Filled up with zeros to whole panels.
    bias: Buffer<A>,
    n: usize,
    k: usize,
}

impl<A: Accumulator> PackedMatrix<A> {
    /// Of a row-major matrix (n, k); without a bias b = 0.
    pub fn new(weight: &[A], bias: Option<&[A]>, n: usize, k: usize) -> Self {
        assert!(weight.len() == n * k && bias.is_none_or(|bias| bias.len() == n), "W ({n}, {k}) and b ({n})");
        let mut panels = Buffer::new(n.next_multiple_of(BLOCK) * k);
        for (i, row) in weight.chunks_exact(k.max(1)).enumerate() {
            let panel = &mut panels[i / BLOCK * BLOCK * k..];
            for (c, w) in row.iter().enumerate() {
                panel[c * BLOCK + i % BLOCK] = *w;
            }
        }
        let mut padded = Buffer::new(n.next_multiple_of(BLOCK));
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

multiversion! {
    /// y (rows, n) of x (rows, k), whose rows are `x_stride` and `y_stride` apart. Columns of y from n on keep what they
    /// hold where `y_stride` has no room for the whole panel, and are overwritten where it has.
    pub fn product[isa S][A: Accumulator](
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
        match is_wide::<S>() {
            true => tiles::<A, S, 6>(x, x_stride, rows, w, y, y_stride),
            false => tiles::<A, S, 3>(x, x_stride, rows, w, y, y_stride),
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

/// Rows of x that are read again for each panel: 12 KiB of f32 where k is 128, half the first cache beside a panel.
const ROWS: usize = 24;

#[inline(always)]
fn tiles<A: Accumulator, S: Isa, const R: usize>(
    x: &[A],
    x_stride: usize,
    rows: usize,
    w: &PackedMatrix<A>,
    y: &mut [A],
    y_stride: usize,
) {
    let k = w.k;
    // Tiles of x, transposed: R numbers of column c are consecutive.
    let mut transposed = Buffer::<A>::new(ROWS.next_multiple_of(R) * k);
    for first in (0..rows).step_by(ROWS) {
        let count = ROWS.min(rows - first);
        for (r, row) in x[first * x_stride..].chunks(x_stride).take(count).enumerate() {
            let tile = &mut transposed[r / R * R * k..][..R * k];
            for (to, value) in tile.chunks_exact_mut(R).zip(row) {
                to[r % R] = *value;
            }
        }
        for (p, bias) in w.bias.as_chunks::<BLOCK>().0.iter().enumerate() {
            let panel = &w.panels[p * BLOCK * k..][..BLOCK * k];
            let bias = Of::<A, S>::pair(bias);
            for t in 0..count.div_ceil(R) {
                let tile = &transposed[t * R * k..][..R * k];
                let mut sums = [bias; R];
                for (x, w) in tile.as_chunks::<R>().0.iter().zip(panel.as_chunks::<BLOCK>().0) {
                    let w = Of::<A, S>::pair(w);
                    for r in 0..R {
                        let x = Of::<A, S>::splat(x[r]);
                        sums[r] = [x.mul_add(w[0], sums[r][0]), x.mul_add(w[1], sums[r][1])];
                    }
                }
                for (r, sum) in sums.into_iter().enumerate().take(count - t * R) {
                    let at = &mut y[(first + t * R + r) * y_stride..];
                    let at = &mut at[p * BLOCK..];
                    match at.first_chunk_mut::<BLOCK>().filter(|_| (p + 1) * BLOCK <= y_stride) {
                        Some(whole) => Pack::store(sum, whole, Store::PLAIN),
                        None => {
                            let mut whole = [A::ZERO; BLOCK];
                            Pack::store(sum, &mut whole, Store::PLAIN);
                            let used = w.n - p * BLOCK;
                            at[..used].copy_from_slice(&whole[..used]);
                        }
                    }
                }
            }
        }
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
