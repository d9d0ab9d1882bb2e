//! Matrix products for training. The first, y = xw + b, calls oneDNN with few different shapes, because oneDNN compiles
//! a product for each shape. The second, c += aᵀb with c in f32, is for gradients of weights.

use crate::cpu::{amx, simd};
use crate::error::Result;
use crate::host::has_memory;
use libloading::os::unix::{Library, RTLD_NOW};
use std::ffi::c_int;
use std::sync::LazyLock;
use tch::{Device, Kind, Tensor};

/// A flag of glibc's dlopen: it opens only libraries that are already loaded.
const RTLD_NOLOAD: c_int = 4;
// These are values of CBLAS's enumerations CBLAS_LAYOUT and CBLAS_TRANSPOSE.
const ROW_MAJOR: c_int = 101;
const PLAIN: c_int = 111;
const TRANSPOSED: c_int = 112;

/// The type of MKL's `cblas_gemm_bf16bf16f32`, which computes C = αAB + βC with A (m, k) and B (k, n) in bf16, C in
/// f32.
type MixedProduct = unsafe extern "C" fn(
    layout: c_int,
    transpose_a: c_int,
    transpose_b: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: f32,
    a: *const u16,
    lda: c_int,
    b: *const u16,
    ldb: c_int,
    beta: f32,
    c: *mut f32,
    ldc: c_int,
);

/// MKL's function inside libtorch, for Intel processors with bf16 instructions: there it may be faster than oneDNN's
/// product followed by an addition. It is `None` on other processors, and if torch was built without MKL.
static MIXED: LazyLock<Option<MixedProduct>> = LazyLock::new(|| {
    if !simd::has_bf16_products() || !amx::is_intel() || amx::is_broken() {
        return None;
    }
    // SAFETY: the library is already loaded, so opening it runs no code; the symbol has the type that MKL documents,
    // and libtorch is never unloaded.
    unsafe {
        let torch = Library::open(Some("libtorch_cpu.so"), RTLD_NOW | RTLD_NOLOAD).ok()?;
        let symbol = *torch.get::<MixedProduct>(b"cblas_gemm_bf16bf16f32\0").ok()?;
        std::mem::forget(torch);
        Some(symbol)
    }
});

/// In 16 bits, [`product`] calls oneDNN only with multiples of this number of rows, if there are as many.
const STEP: i64 = 64;

/// Computes out = xw + b: x (rows, k), w (k, n), b (n), out (rows, n), all of one type. No gradient is recorded.
///
/// In 16 bits torch calls oneDNN, which compiles a product for each new shape, in half a millisecond or more; and
/// batches hardly ever have the same number of rows. So one call multiplies a multiple of 64 rows, and a second call
/// the last 64 rows, some of which are computed twice.
pub fn product(out: &Tensor, x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Result<()> {
    let rows = x.size()[0];
    let whole = rows / STEP * STEP;
    // `is_compiled` is true if torch calls oneDNN, which compiles the product.
    let is_compiled = x.device() == Device::Cpu && matches!(x.kind(), Kind::BFloat16 | Kind::Half);
    // Each part is the first row and the number of rows of one call.
    let parts = match is_compiled && 0 < whole && whole < rows {
        true => &[(0, whole), (rows - STEP, STEP)][..],
        false => &[(0, rows)],
    };
    for &(start, rows) in parts {
        let (out, x) = (out.f_narrow(0, start, rows)?, x.f_narrow(0, start, rows)?);
        // The result of these functions is `out` again.
        let _ = match bias {
            Some(bias) => bias.f_addmm_out(&out, &x, w)?,
            None => x.f_mm_out(&out, w)?,
        };
    }
    Ok(())
}

/// Computes c += aᵀb: c (m, n) in f32 or f64, a (rows, m) and b (rows, n) in c's type or in bf16. No gradient is
/// recorded.
pub fn add_product(c: &Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    if add_mixed(c, a, b) {
        return Ok(());
    }
    // In-place functions take a mutable handle, and the shallow clone is such a handle of c's memory.
    let (mut c, a_t) = (c.shallow_clone(), a.f_transpose(0, 1)?);
    // `addmm_` takes only matrices of one type.
    let _ = match a_t.kind() == c.kind() {
        true => c.f_addmm_(&a_t, b)?,
        false => c.f_add_(&a_t.f_mm(b)?)?,
    };
    Ok(())
}

/// Computes [`add_product`] with MKL and returns true, or returns false and does nothing if MKL lacks the product or
/// the tensors do not suit it.
fn add_mixed(c: &Tensor, a: &Tensor, b: &Tensor) -> bool {
    let Some(product) = *MIXED else { return false };
    // True for a matrix on the CPU with contiguous rows that do not overlap.
    let has_rows = |t: &Tensor| match (&t.size()[..], &t.stride()[..]) {
        (&[_, cols], &[row_stride, 1]) => row_stride >= cols && t.device() == Device::Cpu && has_memory(t),
        _ => false,
    };
    let are_mixed = (c.kind(), a.kind(), b.kind()) == (Kind::Float, Kind::BFloat16, Kind::BFloat16);
    if !are_mixed || ![c, a, b].into_iter().all(has_rows) || a.numel() == 0 || b.numel() == 0 {
        return false;
    }
    let (rows, m, n) = (a.size()[0], a.size()[1], b.size()[1]);
    let shapes_match = b.size()[0] == rows && c.size() == [m, n];
    // All sizes must fit MKL's 32-bit integers.
    let sizes = [m, n, rows, a.stride()[0], b.stride()[0], c.stride()[0]].map(c_int::try_from);
    let (true, [Ok(m), Ok(n), Ok(k), Ok(lda), Ok(ldb), Ok(ldc)]) = (shapes_match, sizes) else {
        return false;
    };
    // SAFETY: a is (k, m), b (k, n) and c (m, n) with rows of the given strides, on the CPU; they outlive the call, and
    // the caller may write c's memory.
    unsafe {
        let (a, b, c) = (a.data_ptr().cast(), b.data_ptr().cast(), c.data_ptr().cast());
        // With α = 1 and β = 1 the product is added to c.
        product(ROW_MAJOR, TRANSPOSED, PLAIN, m, n, k, 1.0, a, lda, b, ldb, 1.0, c, ldc);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::view::accumulation;

    #[test]
    fn few_shapes_have_the_same_products() {
        tch::manual_seed(5);
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
            for rows in [0, 1, 63, 64, 65, 128, 200] {
                let random =
                    |rows: i64, cols: i64| Tensor::randn([rows, cols], (Kind::Float, Device::Cpu)).to_kind(kind);
                let (x, w, b) = (random(rows, 24), random(24, 40), random(1, 40).view(40));
                for bias in [None, Some(&b)] {
                    // The rows before and after `out` must stay as they are.
                    let around = random(rows + 2, 40);
                    let (before, out) = (around.copy(), around.narrow(0, 1, rows));
                    product(&out, &x, &w, bias).unwrap();
                    let exact = |t: &Tensor| t.to_kind(Kind::Double);
                    let sum = exact(&x).mm(&exact(&w)) + bias.map_or(Tensor::from(0.0), exact);
                    // The bound is one unit in the last place of 16 bits, or in f32 the rounding of a sum of 24
                    // terms; torch may add f16 numbers in f16.
                    let bound = match kind {
                        Kind::Float => 1e-5,
                        Kind::BFloat16 => 2f64.powi(-7),
                        _ => 2f64.powi(-8),
                    };
                    assert!(out.allclose(&sum.to_kind(kind), bound, bound, false), "{kind:?} {rows}");
                    for end in [0, rows + 1] {
                        assert!(around.get(end).equal(&before.get(end)), "{kind:?} {rows}");
                    }
                }
            }
        }
    }

    #[test]
    fn products_are_added_where_the_sum_lies() {
        tch::manual_seed(3);
        for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
            let sum = accumulation(kind);
            for (rows, m, n) in [(1, 1, 1), (70, 33, 5), (257, 16, 48), (0, 3, 2)] {
                let random = |cols: i64| Tensor::randn([rows, cols], (Kind::Double, Device::Cpu)).to_kind(kind);
                // The matrices are columns of a wider matrix, as q, k and v are.
                let (a, b) = (random(m + 7).narrow(1, 3, m), random(n));
                let c = Tensor::randn([m, n], (Kind::Double, Device::Cpu)).to_kind(sum);
                let wanted =
                    c.to_kind(Kind::Double) + a.to_kind(Kind::Double).transpose(0, 1).mm(&b.to_kind(Kind::Double));
                add_product(&c, &a, &b).unwrap();
                let off =
                    if m * n == 0 { 0.0 } else { (c.to_kind(Kind::Double) - wanted).abs().max().double_value(&[]) };
                // oneDNN's product is rounded to bf16 before it is added.
                let bound = match (kind, *MIXED) {
                    (Kind::Double, _) => 1e-11,
                    (Kind::BFloat16, None) => 0.3,
                    _ => 1e-4,
                };
                assert!(off < bound, "{kind:?} {rows} {m} {n}: {off}");
            }
        }
    }
}
