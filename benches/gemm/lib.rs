//! The product of the crate `gemm` behind a C function, for products.py.

use gemm::Parallelism;

/// C = AB in f32: A (m, k), B (k, n), C (m, n), each with its strides over rows and columns, on `threads` threads.
///
/// # Safety
/// The matrices are valid for their shapes and strides, and C overlaps neither A nor B.
#[no_mangle]
pub unsafe extern "C" fn product(
    m: usize,
    n: usize,
    k: usize,
    c: *mut f32,
    c_rows: isize,
    c_columns: isize,
    a: *const f32,
    a_rows: isize,
    a_columns: isize,
    b: *const f32,
    b_rows: isize,
    b_columns: isize,
    threads: usize,
) {
    let how = if threads > 1 { Parallelism::Rayon(threads) } else { Parallelism::None };
    gemm::gemm(
        m, n, k, c, c_columns, c_rows, false, a, a_columns, a_rows, b, b_columns, b_rows, 0.0, 1.0, false, false, false,
        how,
    );
}
