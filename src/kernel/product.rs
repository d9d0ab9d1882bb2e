//! c += aᵀb in f32, as gradients of weights are summed: of b's columns by a's, over the rows of both.

use crate::cpu::amx;
use crate::error::Result;
use libloading::os::unix::{Library, RTLD_NOW};
use std::arch::is_x86_feature_detected;
use std::ffi::c_int;
use std::sync::LazyLock;
use tch::{Device, Kind, Tensor};

/// glibc's flag of dlopen: only a library that is loaded already.
const RTLD_NOLOAD: c_int = 4;
const ROW_MAJOR: c_int = 101;
const PLAIN: c_int = 111;
const TRANSPOSED: c_int = 112;

/// MKL's `cblas_gemm_bf16bf16f32`: C = αAB + βC; A and B in bf16, C in f32.
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

/// In the MKL that libtorch carries, where it may be faster than oneDNN's product and an addition: on Intel's processors
/// with bf16 instructions. A build of torch without MKL has none.
static MIXED: LazyLock<Option<MixedProduct>> = LazyLock::new(|| {
    if !is_x86_feature_detected!("avx512bf16") || !amx::is_intel() || amx::is_broken() {
        return None;
    }
    // SAFETY: the library is loaded already, so nothing of it runs here; the symbol has the type that MKL documents, and
    // libtorch is never unloaded.
    unsafe {
        let torch = Library::open(Some("libtorch_cpu.so"), RTLD_NOW | RTLD_NOLOAD).ok()?;
        let symbol = *torch.get::<MixedProduct>(b"cblas_gemm_bf16bf16f32\0").ok()?;
        std::mem::forget(torch);
        Some(symbol)
    }
});

/// c += aᵀb: c (m, n) in f32 or f64, a (rows, m) and b (rows, n) in c's type or in bf16. No gradient is recorded.
pub fn add_product(c: &Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    if add_mixed(c, a, b) {
        return Ok(());
    }
    let (mut c, a) = (c.shallow_clone(), a.f_transpose(0, 1)?);
    let _ = match a.kind() == c.kind() {
        true => c.f_addmm_(&a, b)?,
        false => c.f_add_(&a.f_mm(b)?)?,
    };
    Ok(())
}

/// By MKL, where it has the product and the tensors are such as it takes; else false, and nothing has happened.
fn add_mixed(c: &Tensor, a: &Tensor, b: &Tensor) -> bool {
    let Some(product) = *MIXED else { return false };
    let in_rows = |t: &Tensor| match (&t.size()[..], &t.stride()[..]) {
        (&[_, cols], &[row, 1]) => row >= cols && t.device() == Device::Cpu,
        _ => false,
    };
    let kinds = (c.kind(), a.kind(), b.kind()) == (Kind::Float, Kind::BFloat16, Kind::BFloat16);
    if !kinds || ![c, a, b].into_iter().all(in_rows) || a.numel() == 0 || b.numel() == 0 {
        return false;
    }
    let (rows, m, n) = (a.size()[0], a.size()[1], b.size()[1]);
    let numbers = [m, n, rows, a.stride()[0], b.stride()[0], c.stride()[0]].map(c_int::try_from);
    let (true, [Ok(m), Ok(n), Ok(k), Ok(lda), Ok(ldb), Ok(ldc)]) = (b.size()[0] == rows && c.size() == [m, n], numbers)
    else {
        return false;
    };
    // SAFETY: a is (k, m), b (k, n) and c (m, n) in rows of the strides given, on the CPU, and outlive the call; c's
    // memory is the caller's to write.
    unsafe {
        let (a, b, c) = (a.data_ptr().cast(), b.data_ptr().cast(), c.data_ptr().cast());
        product(ROW_MAJOR, TRANSPOSED, PLAIN, m, n, k, 1.0, a, lda, b, ldb, 1.0, c, ldc);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_added_where_the_sum_lies() {
        tch::manual_seed(3);
        for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
            let sum = if kind == Kind::Double { Kind::Double } else { Kind::Float };
            for (rows, m, n) in [(1, 1, 1), (70, 33, 5), (257, 16, 48), (0, 3, 2)] {
                let random = |cols: i64| Tensor::randn([rows, cols], (Kind::Double, Device::Cpu)).to_kind(kind);
                // Columns of a wider matrix, as q, k and v are.
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
