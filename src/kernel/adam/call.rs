//! An update of tensors: a launch on a GPU, or the formula in tch.

use super::PROGRAM;
use crate::cuda::{self, Device};
use crate::error::Result;
use crate::kernel::launch::{aligned, grid_of_chunks};
use crate::kernel::view::View;
use tch::Tensor;

/// What an update reads and writes: flat f32 buffers of one length, and three of one number.
pub struct Buffers<T> {
    pub parameters: T,
    pub first: T,
    pub second: T,
    /// Zeroed on the way.
    pub gradients: T,
    /// What gradients are multiplied by: clipping and the loss's normaliser. Where it is not finite nothing moves.
    pub grad_scale: T,
    /// lr·√(1−β₂ᵗ)/(1−β₁ᵗ).
    pub step_size: T,
    /// 1 − lr·weight_decay.
    pub keep: T,
}

/// β₁, β₂ and ε.
pub type Decays = [f64; 3];

/// adam.cu's `Adam`.
#[repr(C)]
struct AdamArguments {
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

pub fn launch(device: Device, buffers: &Buffers<View>, [beta1, beta2, eps]: Decays) -> Result<()> {
    let Buffers { parameters, first, second, gradients, grad_scale, step_size, keep } = buffers;
    let vec = if aligned(&[parameters, first, second, gradients]) && parameters.cols % 4 == 0 { 4 } else { 1 };
    let count = parameters.rows * parameters.cols / vec;
    let arguments = AdamArguments {
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
    let grid = grid_of_chunks(count);
    // SAFETY: by the operator's table the buffers are contiguous f32 of one length, the numbers f32 on their device.
    unsafe { cuda::launch(device, &PROGRAM, &format!("-DK_VEC={vec}"), "adam", grid, &arguments) }
}

/// The formula in tch.
pub fn composed(buffers: &Buffers<Tensor>, [beta1, beta2, eps]: Decays) -> Result<()> {
    let Buffers { parameters, first, second, gradients, grad_scale, step_size, keep } = buffers;
    let finite = grad_scale.f_isfinite()?;
    let settle = |to: &Tensor, new: &Tensor| -> Result<()> {
        to.shallow_clone().f_copy_(&new.f_where_self(&finite, to)?)?;
        Ok(())
    };
    let d = gradients.f_mul(grad_scale)?;
    let m = first.f_mul_scalar(beta1)?.f_add(&d.f_mul_scalar(1.0 - beta1)?)?;
    let v = second.f_mul_scalar(beta2)?.f_add(&d.f_square()?.f_mul_scalar(1.0 - beta2)?)?;
    let moved = m.f_mul(step_size)?.f_div(&v.f_sqrt()?.f_add_scalar(eps)?)?;
    settle(parameters, &parameters.f_mul(keep)?.f_sub(&moved)?)?;
    settle(first, &m)?;
    settle(second, &v)?;
    let _ = gradients.shallow_clone().f_zero_()?;
    Ok(())
}
