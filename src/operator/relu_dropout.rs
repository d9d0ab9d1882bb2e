//! `y = drop(max(x, 0))`.

use super::count::Count;
use super::engine;
use super::ffi::{by_dtype, pointer, status, take, Draw, View};
use crate::cpu::parallel::{self, Shared};
use crate::cpu::Element;
use crate::error::Result;
use crate::kernel::relu_dropout as kernel;
use std::ffi::c_int;
use tch::Tensor;
use torch_sys::C_tensor;

pub static COUNT: Count = Count::new("relu_dropout");

/// drop(max(x, 0)) through the dispatcher. `seed` is int64 (seed, update, micro-batch), needed where p > 0.
pub fn relu_dropout(x: &Tensor, p: f64, seed: Option<&Tensor>, site: i64) -> Result<Tensor> {
    engine::register();
    let p = if seed.is_some() { p } else { 0.0 };
    // SAFETY: the tensors outlive the call; a new tensor comes back.
    unsafe { take(nfrs_relu_dropout(x.as_ptr(), p, pointer(seed), site)) }
}

extern "C" {
    fn nfrs_relu_dropout(x: *const C_tensor, p: f64, seed: *const C_tensor, site: i64) -> *mut C_tensor;
}

#[no_mangle]
unsafe extern "C" fn nfrs_relu_dropout_forward(x: &View, draw: &Draw, y: &View) -> c_int {
    COUNT.kernel();
    status(|| by_dtype!(x, E => forward::<E>(x, draw, y)))
}

fn forward<E: Element>(x: &View, draw: &Draw, y: &View) -> Result<()> {
    let (rows, cols) = (x.rows(), x.cols());
    // SAFETY: the shim gave a contiguous tensor of E and a fresh y of the same shape.
    let (x, y) = unsafe { (x.slice::<E>(), Shared::new(y.slice_mut::<E>())) };
    let dropout = draw.dropout();
    parallel::for_each(rows, parallel::grain(cols), |r| {
        let range = r.start * cols..r.end * cols;
        // SAFETY: the ranges are disjoint and inside 0..rows.
        let y = unsafe { y.slice(range.clone()) };
        kernel::forward::<E>(cols, dropout.as_ref(), r.start, &x[range], y);
    });
    Ok(())
}

#[no_mangle]
unsafe extern "C" fn nfrs_relu_dropout_backward(dy: &View, y: &View, draw: &Draw, dx: &View) -> c_int {
    status(|| by_dtype!(y, E => backward::<E>(dy, y, draw, dx)))
}

fn backward<E: Element>(dy: &View, y: &View, draw: &Draw, dx: &View) -> Result<()> {
    let (rows, cols) = (y.rows(), y.cols());
    // SAFETY: as in `forward`.
    let (dy, y, dx) = unsafe { (dy.slice::<E>(), y.slice::<E>(), Shared::new(dx.slice_mut::<E>())) };
    let dropout = draw.dropout();
    parallel::for_each(rows, parallel::grain(cols), |r| {
        let range = r.start * cols..r.end * cols;
        // SAFETY: the ranges are disjoint and inside 0..rows.
        let dx = unsafe { dx.slice(range.clone()) };
        kernel::backward::<E>(dropout.as_ref(), &y[range.clone()], &dy[range], dx);
    });
    Ok(())
}
