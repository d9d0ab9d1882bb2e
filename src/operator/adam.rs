//! Adam's update of flat f32 buffers on a GPU, with everything that changes from step to step read on the device.

use super::count::Count;
use super::declare::{make, run, tensor, Kernels, Kind, Operator};
use super::device::aligned;
use super::engine::Handle;
use super::ffi::{Value, View};
use crate::cuda::{self, Device, Grid};
use crate::error::Result;
use crate::kernel::adam::PROGRAM;
use tch::Tensor;

pub static COUNT: Count = Count::new("adam_");
static HANDLE: Handle = Handle::new("adam_");

/// What an update reads and writes: flat f32 tensors of one length, and three of one number.
pub struct AdamBuffers<'a> {
    pub parameters: &'a Tensor,
    pub first: &'a Tensor,
    pub second: &'a Tensor,
    /// Zeroed on the way.
    pub gradients: &'a Tensor,
    /// What gradients are multiplied by: clipping and the loss's normaliser. Where it is not finite nothing moves.
    pub grad_scale: &'a Tensor,
    /// lr·√(1−β₂ᵗ)/(1−β₁ᵗ).
    pub step_size: &'a Tensor,
    /// 1 − lr·weight_decay.
    pub keep: &'a Tensor,
}

/// One update through the dispatcher, on any device.
pub fn adam_in_place(buffers: &AdamBuffers, beta1: f64, beta2: f64, eps: f64) -> Result<()> {
    let AdamBuffers { parameters, first, second, gradients, grad_scale, step_size, keep } = *buffers;
    let [] = HANDLE.call(&[
        parameters.into(),
        first.into(),
        second.into(),
        gradients.into(),
        grad_scale.into(),
        step_size.into(),
        keep.into(),
        beta1.into(),
        beta2.into(),
        eps.into(),
    ])?;
    Ok(())
}

pub(super) fn operator() -> Operator {
    // n: numbers of a buffer
    let buffer = |name| tensor(name, "=n", Kind::Float32).written();
    let one = |name| tensor(name, "=1", Kind::Float32);
    Operator {
        schema: "adam_(Tensor(a!) parameters, Tensor(b!) first, Tensor(c!) second, Tensor(d!) gradients, \
                 Tensor grad_scale, Tensor step_size, Tensor keep, float beta1, float beta2, float eps) -> ()"
            .into(),
        arguments: vec![
            buffer("parameters").leading(),
            buffer("first"),
            buffer("second"),
            buffer("gradients"),
            one("grad_scale"),
            one("step_size"),
            one("keep"),
        ],
        kernels: Kernels::Gpu,
        kernel: run(|call| {
            let [views @ .., beta1, beta2, eps] = call.arguments::<10>();
            let device = call.device().expect("the kernels are a GPU's");
            on_device(device, &views.each_ref().map(|v| v.view), beta1.float(), beta2.float(), eps.float())
        }),
        formula: make(|call| {
            let [tensors @ .., beta1, beta2, eps] = call.arguments::<10>();
            formula(tensors.each_ref().map(Value::required), beta1.float(), beta2.float(), eps.float())?;
            Ok(vec![])
        }),
        count: Some(&COUNT),
        ..Operator::default()
    }
}

/// adam.cu's `Adam`.
#[repr(C)]
struct Adam {
    parameters: *mut u8,
    first: *mut u8,
    second: *mut u8,
    gradients: *mut u8,
    grad_scale: *const u8,
    step_size: *const u8,
    keep: *const u8,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    eps: f32,
    count: i64,
}

fn on_device(device: Device, views: &[View; 7], beta1: f64, beta2: f64, eps: f64) -> Result<()> {
    const THREADS: u32 = 256;
    let [parameters, first, second, gradients, grad_scale, step_size, keep] = views;
    let vec = if aligned(&[parameters, first, second, gradients]) && parameters.cols % 4 == 0 { 4 } else { 1 };
    let count = parameters.rows * parameters.cols / vec;
    let arguments = Adam {
        parameters: parameters.data,
        first: first.data,
        second: second.data,
        gradients: gradients.data,
        grad_scale: grad_scale.data,
        step_size: step_size.data,
        keep: keep.data,
        beta1: beta1 as f32,
        rest1: (1.0 - beta1) as f32,
        beta2: beta2 as f32,
        rest2: (1.0 - beta2) as f32,
        eps: eps as f32,
        count,
    };
    let blocks = (count as u64).div_ceil(THREADS.into()).min(i32::MAX as u64) as u32;
    let grid = Grid { blocks, threads: THREADS };
    // SAFETY: by the operator's table the buffers are contiguous f32 of one length, the numbers f32 on their device.
    unsafe { cuda::launch(device, &PROGRAM, &format!("-DK_VEC={vec}"), "adam", grid, &arguments) }
}

/// The formula in tch.
fn formula(tensors: [Tensor; 7], beta1: f64, beta2: f64, eps: f64) -> Result<()> {
    let [parameters, first, second, gradients, grad_scale, step_size, keep] = tensors;
    let finite = grad_scale.f_isfinite()?;
    let settle = |to: &Tensor, new: &Tensor| -> Result<()> {
        to.shallow_clone().f_copy_(&new.f_where_self(&finite, to)?)?;
        Ok(())
    };
    let d = gradients.f_mul(&grad_scale)?;
    let m = first.f_mul_scalar(beta1)?.f_add(&d.f_mul_scalar(1.0 - beta1)?)?;
    let v = second.f_mul_scalar(beta2)?.f_add(&d.f_square()?.f_mul_scalar(1.0 - beta2)?)?;
    let moved = m.f_mul(&step_size)?.f_div(&v.f_sqrt()?.f_add_scalar(eps)?)?;
    settle(&parameters, &parameters.f_mul(&keep)?.f_sub(&moved)?)?;
    settle(&first, &m)?;
    settle(&second, &v)?;
    let _ = gradients.shallow_clone().f_zero_()?;
    Ok(())
}
