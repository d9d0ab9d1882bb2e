//! Adam's update of tensors: a kernel launch on a GPU, or the formula in tch operations.

use super::{Rounding, PROGRAM, ROW, SITE};
use crate::cpu::philox;
use crate::cuda::{self, Device, StructLayout};
use crate::device_struct;
use crate::error::Result;
use crate::kernel::launch::{aligned, grid_of_chunks, type_name};
use crate::kernel::view::View;
use tch::{Kind, Tensor};

/// The tensors of an update. The first four are flat and have one length; the last three hold one number each. The
/// moments are f32 or bf16, all others f32.
pub struct Buffers<T> {
    pub parameters: T,
    /// The first moments m and the second moments v.
    pub first: T,
    pub second: T,
    /// The gradients, which the update zeroes.
    pub gradients: T,
    /// The factor of the gradients, which clips them and divides the loss by its normaliser. If it is not finite, only
    /// the gradients change.
    pub grad_scale: T,
    /// The step size lr·√(1−β₂ᵗ)/(1−β₁ᵗ).
    pub step_size: T,
    /// The factor 1 − lr·weight_decay, by which the parameters are multiplied.
    pub keep: T,
}

/// The scalar settings of an update.
#[derive(Clone, Copy, Debug)]
pub struct Coefficients {
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    /// The source of the random bits for moments in bf16.
    pub rounding: Rounding,
}

/// The structs of adam.cu.
pub const STRUCTS: &[&StructLayout] = &[&AdamArguments::LAYOUT];

device_struct! {
    /// The struct `Adam` of adam.cu. `rest1` is 1 − β₁, and `rest2` 1 − β₂. `site` and `update` select the random
    /// stream; `place` is the first element's index in the run. `count` is the number of chunks of K_VEC elements.
    struct AdamArguments = "Adam" {
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
        seed_low: u32,
        seed_high: u32,
        site: u32,
        update: u32,
        place: i64,
        count: i64,
    }
}

/// Computes the update on a GPU.
pub fn launch(device: Device, buffers: &Buffers<View>, settings: &Coefficients) -> Result<()> {
    let Buffers { parameters, first, second, gradients, grad_scale, step_size, keep } = buffers;
    let Coefficients { beta1, beta2, eps, rounding } = *settings;
    // A thread updates chunks of four elements if three conditions hold. A chunk is 16 aligned bytes, no smaller chunk
    // is left at the end, and a chunk's random bits lie in one block of the generator Philox.
    let is_multiple_of_4 = |n: i64| n % 4 == 0;
    let is_wide = aligned(&[parameters, first, second, gradients]) && is_multiple_of_4(parameters.cols);
    let vec = if is_wide && is_multiple_of_4(rounding.first as i64) { 4 } else { 1 };
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
        seed_low: rounding.seed as u32,
        seed_high: (rounding.seed >> 32) as u32,
        site: SITE.into(),
        update: rounding.update,
        place: rounding.first as i64,
        count,
    };
    let grid = grid_of_chunks(count);
    let options =
        format!("-DK_VEC={vec} -DK_FIRST={} -DK_SECOND={}", type_name(first.dtype)?, type_name(second.dtype)?);
    // SAFETY: the operator's declaration guarantees that the buffers are contiguous and of one length, parameters and
    // gradients f32, the moments of these types, and the single numbers f32 on the same device.
    unsafe { cuda::launch(device, &PROGRAM, &options, "adam", grid, &arguments) }
}

/// Computes the update with tch operations.
pub fn composed(buffers: &Buffers<Tensor>, settings: &Coefficients) -> Result<()> {
    let Buffers { parameters, first, second, gradients, grad_scale, step_size, keep } = buffers;
    let Coefficients { beta1, beta2, eps, rounding } = settings;
    let finite = grad_scale.f_isfinite()?;
    // Writes `new` to `to`, or leaves `to` as it is if the gradient scale is not finite. The shallow clone is a mutable
    // handle of the same memory.
    let write_if_finite = |to: &Tensor, new: &Tensor| -> Result<()> {
        to.shallow_clone().f_copy_(&new.f_where_self(&finite, to)?)?;
        Ok(())
    };
    let widened = |moment: &Tensor| moment.f_to_kind(parameters.kind());
    // `d` is the scaled gradient; `m` and `v` are the new moments before rounding.
    let d = gradients.f_mul(grad_scale)?;
    let m = widened(first)?.f_mul_scalar(*beta1)?.f_add(&d.f_mul_scalar(1.0 - beta1)?)?;
    let v = widened(second)?.f_mul_scalar(*beta2)?.f_add(&d.f_square()?.f_mul_scalar(1.0 - beta2)?)?;
    let change = m.f_mul(step_size)?.f_div(&v.f_sqrt()?.f_add_scalar(*eps)?)?;
    write_if_finite(parameters, &parameters.f_mul(keep)?.f_sub(&change)?)?;
    for (moment, new, index) in [(first, m, 0), (second, v, 1)] {
        match moment.kind() {
            Kind::BFloat16 => write_if_finite(moment, &rounded(&new, rounding, index)?)?,
            _ => write_if_finite(moment, &new)?,
        }
    }
    let _ = gradients.shallow_clone().f_zero_()?;
    Ok(())
}

/// Returns the moments `exact` rounded stochastically to bf16, with the random bits that the kernels use. `moment` is 0
/// for the first moment, 1 for the second.
fn rounded(exact: &Tensor, rounding: &Rounding, moment: usize) -> Result<Tensor> {
    // A row of the stream has the bits of ROW elements: one half word per element for m, then one per element for v.
    // The first element is number `start` of its row.
    let (count, start) = (exact.numel(), rounding.first % ROW);
    let rows = (start + count).div_ceil(ROW);
    let mut bits = philox::scratch(rows, 2 * ROW);
    philox::fill(&rounding.stream(), rounding.first / ROW, rows, 2 * ROW, &mut bits);
    let moment_bits = bits.chunks_exact(2 * ROW).flat_map(|row| &row[moment * ROW..][..ROW]);
    let bits: Vec<i32> = moment_bits.skip(start).take(count).map(|bits| i32::from(*bits)).collect();
    let bits = Tensor::f_from_slice(&bits)?.f_to_device(exact.device())?.f_view_as(exact)?;
    // bf16 is the upper half of an f32. The random bits are added to the lower half, which is then dropped.
    let sum = exact.f_to_kind(Kind::Float)?.f_view_dtype(Kind::Int)?.f_add(&bits)?;
    Ok(sum.f_bitwise_and(0xffff_0000u32 as i32 as i64)?.f_view_dtype(Kind::Float)?.f_to_kind(Kind::BFloat16)?)
}
