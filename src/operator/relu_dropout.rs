//! `y = drop(max(x, 0))`.

use super::count::Count;
use super::device::{columns, columns_at_a_time, type_name, Dropout};
use super::engine;
use super::ffi::{by_dtype, pointer, status, take, Draw, View};
use crate::cpu::parallel::{self, Shared};
use crate::cpu::Element;
use crate::cuda::{self, Device, Grid};
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
    status(|| match x.device() {
        None => by_dtype!(x, E => forward::<E>(x, draw, y)),
        Some(device) => on_device(device, x, None, draw, y),
    })
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
    status(|| match y.device() {
        None => by_dtype!(y, E => backward::<E>(dy, y, draw, dx)),
        Some(device) => on_device(device, y, Some(dy), draw, dx),
    })
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

/// relu_dropout.cu's `Relu`.
#[repr(C)]
struct Relu {
    x: *const u8,
    dy: *const u8,
    y: *mut u8,
    count: i64,
    chunks: i32,
    dropout: Dropout,
}

/// The same on a GPU; with `dy`, x is the forward's y and `to` is dx.
fn on_device(device: Device, x: &View, dy: Option<&View>, draw: &Draw, to: &View) -> Result<()> {
    const THREADS: u32 = 256;
    let vec = columns_at_a_time(x, &[x, dy.unwrap_or(x), to]);
    let chunks = columns(x)? / vec;
    let count = x.rows * i64::from(chunks);
    let dy_data = dy.map_or(std::ptr::null(), |dy| dy.data.cast_const());
    let dropout = Dropout::of(draw);
    let arguments = Relu { x: x.data, dy: dy_data, y: to.data, count, chunks: chunks as i32, dropout };
    let backward = i32::from(dy.is_some());
    let options = format!("-DK_VEC={vec} -DK_X={} -DK_BACKWARD={backward}", type_name(x.dtype)?);
    let blocks = (count as u64).div_ceil(THREADS.into()).min(i32::MAX as u64) as u32;
    let grid = Grid { blocks, threads: THREADS };
    // SAFETY: the shim gave contiguous tensors of one dtype and shape, and holds them until the call returns.
    unsafe { cuda::launch(device, &kernel::PROGRAM, &options, "relu_dropout", grid, &arguments) }
}
