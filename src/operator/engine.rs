//! What tch does not bind: registration, and two calls of the autograd engine.

use super::ffi::shim_error;
use crate::error::Result;
use std::sync::Once;
use tch::Tensor;
use torch_sys::C_tensor;

extern "C" {
    fn nfrs_register() -> bool;
    fn nfrs_backward(root: *const C_tensor, gradient: *const C_tensor) -> bool;
    fn nfrs_set_grad(leaf: *const C_tensor, gradient: *const C_tensor) -> bool;
}

/// Registers the operators with PyTorch; later calls do nothing. Everything below calls it.
pub fn register() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: no arguments; C++ exceptions are caught in the shim.
        if !unsafe { nfrs_register() } {
            panic!("the operators could not be registered with PyTorch: {}", shim_error());
        }
    });
}

/// Back-propagates `gradient` from `root`, which need not be a scalar.
pub fn backward_from(root: &Tensor, gradient: &Tensor) -> Result<()> {
    // SAFETY: both tensors outlive the call.
    match unsafe { nfrs_backward(root.as_ptr(), gradient.as_ptr()) } {
        true => Ok(()),
        false => Err(shim_error()),
    }
}

/// Makes `gradient` the tensor that backward passes add into: leaf.grad.
pub fn set_grad(leaf: &Tensor, gradient: &Tensor) -> Result<()> {
    // SAFETY: both tensors outlive the call; the leaf keeps its own reference to the gradient.
    match unsafe { nfrs_set_grad(leaf.as_ptr(), gradient.as_ptr()) } {
        true => Ok(()),
        false => Err(shim_error()),
    }
}
