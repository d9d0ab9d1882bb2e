//! Operators that are compositions of others: PyTorch differentiates, batches and traces what they are made of.

use super::count::Count;
use super::ffi::{self, give};
use crate::error::{Error, Result};
use crate::norm::{group_scaling, lp_norm as lp, Build};
use std::ffi::{c_char, CStr};
use tch::Tensor;
use torch_sys::C_tensor;

pub static COUNT: Count = Count::new("lp_norm");

/// g·x/max(‖x‖_p, ε) over the last dimension; p = 2 runs ScaleNorm's kernels.
pub fn lp_norm(x: &Tensor, weight: Option<&Tensor>, p: f64, eps: f64) -> Result<Tensor> {
    COUNT.composed();
    lp::composed(x, weight, p, eps)
}

#[no_mangle]
unsafe extern "C" fn nfrs_lp_norm(x: *const C_tensor, weight: *const C_tensor, p: f64, eps: f64) -> *mut C_tensor {
    // SAFETY: the shim passes a live x, and a live weight or null.
    let (x, weight) = unsafe { (ffi::borrow(x), ffi::borrow(weight)) };
    give(|| lp_norm(x.as_ref().expect("x is never absent"), weight.as_ref(), p, eps))
}

/// A norm of the table that is its formula alone.
#[no_mangle]
unsafe extern "C" fn nfrs_norm_formula(
    name: *const c_char,
    x: *const C_tensor,
    weight: *const C_tensor,
    bias: *const C_tensor,
    eps: f64,
) -> *mut C_tensor {
    // SAFETY: the shim passes a NUL-terminated name, a live x, and live parameters or null.
    let (name, x, weight, bias) =
        unsafe { (CStr::from_ptr(name), ffi::borrow(x), ffi::borrow(weight), ffi::borrow(bias)) };
    give(|| match &crate::norm::find(&name.to_string_lossy())?.build {
        Build::Formula(formula) => {
            formula.apply(x.as_ref().expect("x is never absent"), weight.as_ref(), bias.as_ref(), eps)
        }
        Build::Own(_) => Err(Error::invalid(format!("{name:?} is more than a formula: call its own operator"))),
    })
}

#[no_mangle]
unsafe extern "C" fn nfrs_group_scaling(x: *const C_tensor, groups: i64) -> *mut C_tensor {
    // SAFETY: the shim passes a live x.
    let x = unsafe { ffi::borrow(x) };
    give(|| group_scaling::group_scaling(x.as_ref().expect("x is never absent"), groups))
}
