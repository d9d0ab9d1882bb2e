//! `y = drop(max(x, 0))`.

use super::count::Count;
use super::declare::{leader, make, run, seed, tensor, Derivative, Kind, Operator};
use super::device::{columns, columns_at_a_time, type_name, Dropout};
use super::engine::Handle;
use super::ffi::{by_dtype, Draw, View};
use super::residual::{check_dropout, check_rate, drop};
use crate::cpu::parallel::{self, Shared};
use crate::cpu::Element;
use crate::cuda::{self, Device, Grid};
use crate::error::Result;
use crate::kernel::relu_dropout as kernel;
use tch::Tensor;

pub static COUNT: Count = Count::new("relu_dropout");
static FORWARD: Handle = Handle::new("relu_dropout");
static BACKWARD: Handle = Handle::new("relu_dropout_backward");

/// drop(max(x, 0)) through the dispatcher. `seed` is int64 (seed, update, micro-batch), needed where p > 0.
pub fn relu_dropout(x: &Tensor, p: f64, seed: Option<&Tensor>, site: i64) -> Result<Tensor> {
    let p = if seed.is_some() { p } else { 0.0 };
    let [y] = FORWARD.call(&[x.into(), p.into(), seed.into(), site.into()])?;
    Ok(y)
}

pub(super) fn operator() -> Operator {
    Operator {
        schema: "relu_dropout(Tensor x, float p, Tensor? seed, int site) -> Tensor".into(),
        arguments: vec![leader("x", "*"), seed()],
        outputs: vec![tensor("y", "*", Kind::Same)],
        plan: run(|call| {
            let [_, p, seed, _] = call.arguments();
            check_dropout("relu_dropout", p, seed)
        }),
        kernel: run(|call| {
            let ([x, p, seed, site], [y]) = (call.arguments(), call.outputs());
            let (x, y, draw) = (&x.view, &y.view, Draw::of(call, [p, seed, site]));
            match call.device() {
                None => by_dtype!(x, E => forward::<E>(x, &draw, y)),
                Some(device) => on_device(device, x, None, &draw, y),
            }
        }),
        formula: make(|call| {
            let [x, p, seed, site] = call.arguments();
            let x = x.required();
            Ok(vec![Some(drop(x.f_relu()?, [p, seed, site])?)])
        }),
        derivative: Some(Derivative {
            backward: Box::new(Operator {
                schema: "relu_dropout_backward(Tensor dy, Tensor y, float p) -> Tensor".into(),
                arguments: vec![tensor("dy", "*", Kind::Same), leader("y", "*")],
                outputs: vec![tensor("dx", "*", Kind::Same)],
                plan: run(|call| {
                    let [_, _, p] = call.arguments();
                    check_rate("relu_dropout_backward", p.float())
                }),
                kernel: run(|call| {
                    let ([dy, y, p], [dx]) = (call.arguments(), call.outputs());
                    let (dy, y, dx, draw) = (&dy.view, &y.view, &dx.view, Draw { p: p.float(), ..Draw::NONE });
                    match call.device() {
                        None => by_dtype!(y, E => backward::<E>(dy, y, &draw, dx)),
                        Some(device) => on_device(device, y, Some(dy), &draw, dx),
                    }
                }),
                ..Operator::default()
            }),
            // Piecewise constant in x: where y is not zero it is the kept scale, which the kernel reads off.
            again: make(|call| {
                let ([_, p, ..], [y], [dy]) = (call.arguments::<4>(), call.outputs(), call.gradients());
                let y = y.required();
                let [scale] =
                    BACKWARD.call(&[(&y.f_ones_like()?).into(), (&y.f_detach()?).into(), p.float().into()])?;
                Ok(vec![Some(dy.required().f_mul(&scale)?), None])
            }),
        }),
        count: Some(&COUNT),
        ..Operator::default()
    }
}

fn forward<E: Element>(x: &View, draw: &Draw, y: &View) -> Result<()> {
    let (rows, cols) = (x.rows(), x.cols());
    // SAFETY: C++ gave a contiguous tensor of E and a fresh y of the same shape.
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
    // SAFETY: C++ gave contiguous tensors of one dtype and shape, and holds them until the call returns.
    unsafe { cuda::launch(device, &kernel::PROGRAM, &options, "relu_dropout", grid, &arguments) }
}
