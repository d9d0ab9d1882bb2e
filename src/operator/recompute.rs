//! Activation checkpointing (Chen et al. 2016): a piece of the model keeps only its inputs, and is run again for its
//! gradient.

use super::ffi::{self, into_raw, shim_error, status};
use crate::error::Result;
use std::ffi::{c_int, c_void};
use tch::Tensor;
use torch_sys::C_tensor;

/// What a piece computes from its inputs. The flag says that it has been run before, so that what happens once per
/// training forward (statistics) does not happen twice.
///
/// It may hold what is no `Send`: an `Rc` of the model's layers. Autograd runs it for its gradient, and may drop it, on
/// the thread of its device. SAFETY: nobody else uses the layers meanwhile. The thread that holds the model has called
/// `backward` and waits in it until the engine has run all nodes; the engine lets go of a node before it counts it as
/// done, and its queue orders either thread's accesses before the other's.
type Piece = dyn Fn(Vec<Tensor>, bool) -> Result<Vec<Tensor>>;

/// Runs `piece` without recording its operations; its backward pass runs it again and differentiates that.
///
/// Parameters inside get their gradients added to `.grad`, as ever. One of the inputs must require a gradient.
pub fn recomputed(
    inputs: &[&Tensor],
    piece: impl Fn(Vec<Tensor>, bool) -> Result<Vec<Tensor>> + 'static,
) -> Result<Vec<Tensor>> {
    #[cfg(test)]
    super::register();
    let piece: Box<Box<Piece>> = Box::new(Box::new(piece));
    let inputs: Vec<_> = inputs.iter().map(|t| t.as_ptr()).collect();
    let mut outputs: Vec<Tensor> = Vec::new();
    let list = std::ptr::from_mut(&mut outputs).cast();
    // SAFETY: the tensors and the list outlive the call; the shim owns the piece from here on and drops it by
    // nfrs_piece_drop.
    match unsafe { nfrs_recompute(Box::into_raw(piece).cast(), inputs.as_ptr(), inputs.len(), list, push) } {
        true => Ok(outputs),
        false => Err(shim_error()),
    }
}

/// Appends a tensor to a list of the other side, which takes it over.
type Push = unsafe extern "C" fn(list: *mut c_void, t: *mut C_tensor);

unsafe extern "C" fn push(list: *mut c_void, t: *mut C_tensor) {
    // SAFETY: the list is `recomputed`'s, which waits for the shim; the tensor is new.
    unsafe { (*list.cast::<Vec<Tensor>>()).push(Tensor::from_ptr(t)) }
}

extern "C" {
    fn nfrs_recompute(
        piece: *mut c_void,
        inputs: *const *const C_tensor,
        count: usize,
        outputs: *mut c_void,
        push: Push,
    ) -> bool;
}

#[no_mangle]
unsafe extern "C" fn nfrs_piece_run(
    piece: *mut c_void,
    again: bool,
    inputs: *const *const C_tensor,
    count: usize,
    outputs: *mut c_void,
    push: Push,
) -> c_int {
    status(|| {
        // SAFETY: the shim passes the box of `recomputed` and `count` live tensors.
        let (piece, inputs) = unsafe {
            let inputs = std::slice::from_raw_parts(inputs, count);
            (&*piece.cast::<Box<Piece>>(), inputs.iter().filter_map(|t| ffi::borrow(*t)).collect())
        };
        for t in piece(inputs, again)? {
            // SAFETY: the shim's list takes over the tensor.
            unsafe { push(outputs, into_raw(t)) };
        }
        Ok(())
    })
}

#[no_mangle]
unsafe extern "C" fn nfrs_piece_drop(piece: *mut c_void) {
    let drop_piece = || {
        // SAFETY: the shim passes the box of `recomputed`, once.
        drop(unsafe { Box::from_raw(piece.cast::<Box<Piece>>()) });
        Ok(())
    };
    status(drop_piece);
}
