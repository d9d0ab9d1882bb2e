//! Operators that are compositions of others: PyTorch differentiates, batches and traces what they are made of. On a
//! GPU `lp_norm` runs ScaleNorm's kernels with lengths of another order.

use super::count::Count;
use super::device_rows::{self, Rows, Sums};
use super::engine;
use super::ffi::{self, give, pointer, status, take, Draw, View};
use crate::cuda::Device;
use crate::error::{Error, Result};
use crate::norm::{composed, group_scaling, lp_norm as lp, scale_norm};
use std::ffi::{c_char, c_int, CStr};
use tch::Tensor;
use torch_sys::C_tensor;

pub static COUNT: Count = Count::new("lp_norm");

/// g·x/max(‖x‖_p, ε) over the last dimension, through the dispatcher; p = 2 runs ScaleNorm's kernels.
pub fn lp_norm(x: &Tensor, weight: Option<&Tensor>, p: f64, eps: f64) -> Result<Tensor> {
    engine::register();
    // SAFETY: the tensors outlive the call; a new tensor comes back.
    unsafe { take(nfrs_lp_norm(x.as_ptr(), pointer(weight), p, eps)) }
}

extern "C" {
    fn nfrs_lp_norm(x: *const C_tensor, weight: *const C_tensor, p: f64, eps: f64) -> *mut C_tensor;
}

#[no_mangle]
unsafe extern "C" fn nfrs_lp_norm_composed(
    x: *const C_tensor,
    weight: *const C_tensor,
    p: f64,
    eps: f64,
) -> *mut C_tensor {
    COUNT.composed();
    // SAFETY: the shim passes a live x, and a live weight or null.
    let (x, weight) = unsafe { (ffi::borrow(x), ffi::borrow(weight)) };
    give(|| lp::composed(x.as_ref().expect("x is never absent"), weight.as_ref(), p, eps))
}

/// The call as a step's norm on a GPU, x⁺ = x, and the GPU.
fn on_device(x: View, weight: View, stats: View, p: f64, eps: f64) -> Result<(Device, Rows)> {
    let call = Rows { x, weight, stats, eps, order: Some(p), x_plus: x, ..Rows::of(Draw::NONE) };
    match x.device() {
        Some(device) => Ok((device, call)),
        None => Err(Error::invalid("lp_norm_forward and lp_norm_backward are for CUDA tensors: call lp_norm")),
    }
}

#[no_mangle]
unsafe extern "C" fn nfrs_lp_norm_forward(x: &View, weight: &View, p: f64, eps: f64, y: &View, stats: &View) -> c_int {
    COUNT.kernel();
    status(|| {
        let (device, call) = on_device(*x, *weight, *stats, p, eps)?;
        device_rows::forward(device, &scale_norm::KERNELS.program, &Rows { y: *y, ..call })
    })
}

#[no_mangle]
unsafe extern "C" fn nfrs_lp_norm_backward(
    dy: &View,
    x: &View,
    weight: &View,
    stats: &View,
    p: f64,
    eps: f64,
    dx: &View,
    dweight: &View,
    workspace: &View,
) -> c_int {
    let (sums, no) = (Sums { dweight: *dweight, ..Sums::in_workspace(*workspace) }, View::ABSENT);
    status(|| {
        let (device, call) = on_device(*x, *weight, *stats, p, eps)?;
        device_rows::backward(device, &scale_norm::KERNELS.program, &call, no, *dy, *dx, no, &sums)
    })
}

/// A norm of the table that is its composed form alone. `parameters` holds `count` tensors or nulls.
#[no_mangle]
unsafe extern "C" fn nfrs_composed_norm(
    name: *const c_char,
    x: *const C_tensor,
    parameters: *const *const C_tensor,
    count: i64,
    options: *const f64,
    option_count: i64,
) -> *mut C_tensor {
    // SAFETY: the shim passes a NUL-terminated name, a live x, as many live parameters or nulls as it says, and numbers.
    let (name, x, parameters, options) = unsafe {
        let parameters = (0..count as usize).map(|i| ffi::borrow(*parameters.add(i))).collect();
        let options = (0..option_count as usize).map(|i| *options.add(i)).collect::<Vec<f64>>();
        (CStr::from_ptr(name), ffi::borrow(x), parameters, options)
    };
    let x = x.as_ref().expect("x is never absent");
    give(|| composed::call(&name.to_string_lossy(), x, parameters, &options))
}

#[no_mangle]
unsafe extern "C" fn nfrs_group_scaling(x: *const C_tensor, groups: i64) -> *mut C_tensor {
    // SAFETY: the shim passes a live x.
    let x = unsafe { ffi::borrow(x) };
    give(|| group_scaling::group_scaling(x.as_ref().expect("x is never absent"), groups))
}
