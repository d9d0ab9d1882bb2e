//! Adam's update of flat f32 buffers on a GPU, with everything that changes from step to step read on the device.

use super::count::Count;
use super::device::aligned;
use super::engine;
use super::ffi::{borrow, shim_error, status, View};
use crate::cuda::{self, Device, Grid};
use crate::error::Result;
use crate::kernel::adam::PROGRAM;
use std::ffi::c_int;
use tch::Tensor;
use torch_sys::C_tensor;

pub static COUNT: Count = Count::new("adam_");

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
    engine::register();
    let AdamBuffers { parameters, first, second, gradients, grad_scale, step_size, keep } = buffers;
    let tensors = [parameters, first, second, gradients, grad_scale, step_size, keep].map(|t| t.as_ptr());
    // SAFETY: the tensors outlive the call.
    match unsafe { nfrs_adam_(tensors.as_ptr(), beta1, beta2, eps) } {
        true => Ok(()),
        false => Err(shim_error()),
    }
}

extern "C" {
    fn nfrs_adam_(tensors: *const *const C_tensor, beta1: f64, beta2: f64, eps: f64) -> bool;
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

/// `views` are seven, in the order of [`AdamBuffers`].
#[no_mangle]
unsafe extern "C" fn nfrs_adam_kernel(views: &[View; 7], beta1: f64, beta2: f64, eps: f64) -> c_int {
    COUNT.kernel();
    status(|| {
        let device = views[0].device().expect("the shim sends what is on a GPU");
        on_device(device, views, beta1, beta2, eps)
    })
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
    // SAFETY: the shim checked that the buffers are contiguous f32 of one length and the numbers f32 on their device.
    unsafe { cuda::launch(device, &PROGRAM, &format!("-DK_VEC={vec}"), "adam", grid, &arguments) }
}

/// The formula in tch, for devices without a kernel.
#[no_mangle]
unsafe extern "C" fn nfrs_adam_composed(tensors: &[*const C_tensor; 7], beta1: f64, beta2: f64, eps: f64) -> c_int {
    COUNT.composed();
    status(|| {
        // SAFETY: the shim passes live tensors.
        let tensors = tensors.map(|t| unsafe { borrow(t) }.expect("no tensor is absent"));
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
    })
}
