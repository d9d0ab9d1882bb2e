//! The matrix product of the attention kernel, for operands in the first-level cache.

use crate::cpu::pack::Isa;
use crate::cpu::simd::{level, Level};
use crate::cpu::Accumulator;
use crate::kernel::math::{mul_add, LANES};
use crate::multiversion;
use std::any::TypeId;

/// The number of rows computed together; row counts are padded to a multiple of it.
pub(super) const TILE: usize = 8;
/// The values of [`product()`]'s last argument: replace C, or add to it.
pub(super) const REPLACE: bool = false;
pub(super) const ADD: bool = true;

multiversion! {
    /// Computes C = A·B, or C += A·B if `add` is true. `shape` is [m, n, k]: A is (m, k), B (k, n) and C (m, n), with m
    /// a multiple of [`TILE`] and n of [`LANES`]. A's element (i, p) lies at i·strides[0] + p·strides[1], so A may be
    /// the transpose of what is stored. The rows of B are `ldb` apart, those of C `ldc`.
    pub(super) fn product[isa S][A: Accumulator](
        shape: [usize; 3],
        a: &[A],
        strides: [usize; 2],
        b: &[A],
        ldb: usize,
        c: &mut [A],
        ldc: usize,
        add: bool,
    ) {
        let [m, n, k] = shape;
        if m == 0 || n == 0 {
            return;
        }
        // `last` is the largest index at which A is read.
        let last = (m - 1) * strides[0] + k.saturating_sub(1) * strides[1];
        assert!(m.is_multiple_of(TILE) && n.is_multiple_of(LANES) && (k == 0 || last < a.len() && (k - 1) * ldb + n <= b.len()));
        assert!((m - 1) * ldc + n <= c.len());
        #[cfg(target_arch = "x86_64")]
        if TypeId::of::<A>() == TypeId::of::<f32>() && level() == Level::Avx512 {
            let (a, b, c) = (a.as_ptr().cast(), b.as_ptr().cast(), c.as_mut_ptr().cast());
            // SAFETY: A is f32, the processor has AVX-512, and the assertions keep all accesses inside.
            return unsafe { avx512_f32([m, n, k], a, strides, b, ldb, c, ldc, add) };
        }
        tiles::<A, S>(shape, a, strides, b, ldb, c, ldc, add);
    }
}

/// Computes C = A·B or C += A·B with the arguments of [`product()`], one tile of [`TILE`] rows and [`LANES`] columns of
/// C at a time. A tile starts at row i and column j; its sums stay in registers while p runs over the inner dimension.
#[inline(always)]
fn tiles<A: Accumulator, S: Isa>(
    [m, n, k]: [usize; 3],
    a: &[A],
    strides: [usize; 2],
    b: &[A],
    ldb: usize,
    c: &mut [A],
    ldc: usize,
    add: bool,
) {
    for i in (0..m).step_by(TILE) {
        for j in (0..n).step_by(LANES) {
            let mut tile = [[A::ZERO; LANES]; TILE];
            for p in 0..k {
                let b: &[A; LANES] = b[p * ldb + j..].first_chunk().unwrap();
                for (r, tile) in tile.iter_mut().enumerate() {
                    let factor = a[(i + r) * strides[0] + p * strides[1]];
                    for l in 0..LANES {
                        tile[l] = mul_add::<A, S>(factor, b[l], tile[l]);
                    }
                }
            }
            for (r, tile) in tile.iter().enumerate() {
                let c: &mut [A; LANES] = c[(i + r) * ldc + j..].first_chunk_mut().unwrap();
                for l in 0..LANES {
                    c[l] = if add { c[l] + tile[l] } else { tile[l] };
                }
            }
        }
    }
}

/// Computes C = A·B or C += A·B with the arguments of [`product()`], in f32 with AVX-512. The loop of `tiles` has
/// bounds checks, which make attention's forward pass a quarter slower. Without the checks the compiler vectorises it
/// along the wrong index, which makes it five times slower.
///
/// # Safety
/// The arguments satisfy the assertions of `product`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn avx512_f32(
    [m, n, k]: [usize; 3],
    a: *const f32,
    strides: [usize; 2],
    b: *const f32,
    ldb: usize,
    c: *mut f32,
    ldc: usize,
    add: bool,
) {
    use std::arch::x86_64::*;
    for i in (0..m).step_by(TILE) {
        for j in (0..n).step_by(LANES) {
            let mut tile = [_mm512_setzero_ps(); TILE];
            for p in 0..k {
                let b_row = _mm512_loadu_ps(b.add(p * ldb + j));
                let a_column = a.add(i * strides[0] + p * strides[1]);
                for (r, tile) in tile.iter_mut().enumerate() {
                    *tile = _mm512_fmadd_ps(_mm512_set1_ps(*a_column.add(r * strides[0])), b_row, *tile);
                }
            }
            for (r, tile) in tile.into_iter().enumerate() {
                let to = c.add((i + r) * ldc + j);
                _mm512_storeu_ps(to, if add { _mm512_add_ps(_mm512_loadu_ps(to), tile) } else { tile });
            }
        }
    }
}
