//! ReLU with dropout on an operator's tensors: threads share the rows on the CPU, a GPU runs one kernel, and
//! elsewhere the formula runs in tch.

use super::{backward as backward_rows, forward as forward_rows, PROGRAM};
use crate::cpu::parallel::{self, Shared};
use crate::cpu::Element;
use crate::cuda::{self, Device, StructLayout};
use crate::device_struct;
use crate::error::Result;
use crate::kernel::dropout::{self, Draw};
use crate::kernel::launch::{columns, columns_at_a_time, grid_of_chunks, type_name};
use crate::kernel::view::{by_dtype, View};
use tch::Tensor;

/// Computes y = dropout(max(x, 0)), on a GPU or, if `device` is `None`, on the CPU.
pub fn forward(device: Option<Device>, x: &View, draw: &Draw, y: &View) -> Result<()> {
    match device {
        None => by_dtype!(x, E => forward_typed::<E>(x, draw, y)),
        Some(device) => launch(device, x, None, draw, y),
    }
}

/// Computes dx from dy and the forward pass's y, on a GPU or, if `device` is `None`, on the CPU. It uses only the rate
/// p of `draw`.
pub fn backward(device: Option<Device>, dy: &View, y: &View, draw: &Draw, dx: &View) -> Result<()> {
    match device {
        None => by_dtype!(y, E => backward_typed::<E>(dy, y, draw, dx)),
        Some(device) => launch(device, y, Some(dy), draw, dx),
    }
}

/// Returns y = mask·max(x, 0), computed with tch operations; `mask` holds dropout's factors, and is `None` without
/// dropout.
pub fn composed(x: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
    let y = x.f_relu()?;
    match mask {
        Some(mask) => Ok(y.f_mul(mask)?),
        None => Ok(y),
    }
}

/// Computes [`forward`] on the CPU for the storage type E of x.
fn forward_typed<E: Element>(x: &View, draw: &Draw, y: &View) -> Result<()> {
    let (rows, cols) = (x.rows(), x.cols());
    // SAFETY: the C++ operator passed a contiguous tensor of E and a new y of the same shape.
    let (x, y) = unsafe { (x.slice::<E>(), Shared::new(y.slice_mut::<E>())) };
    let dropout = draw.dropout();
    parallel::over_rows(rows, cols, |rows, numbers| {
        // SAFETY: the ranges are disjoint and inside y.
        let y = unsafe { y.slice(numbers.clone()) };
        forward_rows::<E>(cols, dropout.as_ref(), rows.start, &x[numbers], y);
    });
    Ok(())
}

/// Computes [`backward`] on the CPU for the storage type E of y.
fn backward_typed<E: Element>(dy: &View, y: &View, draw: &Draw, dx: &View) -> Result<()> {
    let (rows, cols) = (y.rows(), y.cols());
    // SAFETY: the C++ operator passed contiguous tensors of E and of one shape; dx is new.
    let (dy, y, dx) = unsafe { (dy.slice::<E>(), y.slice::<E>(), Shared::new(dx.slice_mut::<E>())) };
    let dropout = draw.dropout();
    parallel::over_rows(rows, cols, |_, numbers| {
        // SAFETY: the ranges are disjoint and inside dx.
        let dx = unsafe { dx.slice(numbers.clone()) };
        backward_rows::<E>(dropout.as_ref(), &y[numbers.clone()], &dy[numbers], dx);
    });
    Ok(())
}

/// The structs of relu_dropout.cu.
pub const STRUCTS: &[&StructLayout] = &[&dropout::OnDevice::LAYOUT, &Relu::LAYOUT];

device_struct! {
    /// The struct `Relu` of relu_dropout.cu.
    struct Relu = "Relu" {
        x: *const u8,
        dy: *const u8,
        y: *mut u8,
        count: i64,
        chunks: i32,
        dropout: dropout::OnDevice,
    }
}

/// Launches the forward kernel or, if `dy` is given, the backward kernel; then x is the forward pass's y, and `to` is
/// dx.
fn launch(device: Device, x: &View, dy: Option<&View>, draw: &Draw, to: &View) -> Result<()> {
    let vec = columns_at_a_time(x, &[x, dy.unwrap_or(x), to]);
    let chunks = columns(x)? / vec;
    let count = x.rows * i64::from(chunks);
    let dy_data = dy.map_or(std::ptr::null(), |dy| dy.data.cast_const());
    let dropout = dropout::OnDevice::of(draw);
    let arguments = Relu { x: x.data, dy: dy_data, y: to.data, count, chunks: chunks as i32, dropout };
    let backward = i32::from(dy.is_some()); // the kernel's option that selects the backward pass
    let options = format!("-DK_VEC={vec} -DK_X={} -DK_BACKWARD={backward}", type_name(x.dtype)?);
    // SAFETY: the C++ operator passed contiguous tensors of one dtype and shape, and holds them until the call returns.
    unsafe { cuda::launch(device, &PROGRAM, &options, "relu_dropout", grid_of_chunks(count), &arguments) }
}
