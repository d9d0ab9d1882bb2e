//! Activation checkpointing (Chen et al. 2016): a piece of the model keeps only its inputs, and is run again for its
//! gradient.

use super::engine;
use super::ffi::{self, into_raw, pointer, status, take};
use crate::error::Result;
use std::ffi::{c_int, c_void};
use tch::Tensor;
use torch_sys::C_tensor;

/// A piece's inputs; all but the first may be absent.
pub type Inputs = [Option<Tensor>; 3];

/// What a piece computes from its inputs: one output, or two. The flag says that it has been run before, so that what
/// happens once per training forward (statistics) does not happen twice.
///
/// It may hold what is no `Send`: an `Rc` of the model's layers. Autograd runs it for its gradient, and may drop it, on
/// the thread of its device. SAFETY: nobody else uses the layers meanwhile. The thread that holds the model has called
/// `backward` and waits in it until the engine has run all nodes; the engine lets go of a node before it counts it as
/// done, and its queue orders either thread's accesses before the other's.
type Piece = dyn Fn(Inputs, bool) -> Result<(Tensor, Option<Tensor>)>;

/// Runs `piece` without recording its operations; its backward pass runs it again and differentiates that.
///
/// Parameters inside get their gradients added to `.grad`, as ever. The first input must require a gradient.
pub fn recomputed(
    inputs: [Option<&Tensor>; 3],
    piece: impl Fn(Inputs, bool) -> Result<(Tensor, Option<Tensor>)> + 'static,
) -> Result<(Tensor, Option<Tensor>)> {
    engine::register();
    let piece: Box<Box<Piece>> = Box::new(Box::new(piece));
    let mut second = std::ptr::null_mut();
    let [a, b, c] = inputs.map(pointer);
    // SAFETY: the tensors outlive the call; the shim owns the piece from here on and drops it by nfrs_piece_drop.
    let first = unsafe { take(nfrs_recompute(Box::into_raw(piece).cast(), a, b, c, &mut second))? };
    // SAFETY: the shim made the second output along with the first, or left the pointer null.
    Ok((first, if second.is_null() { None } else { Some(unsafe { take(second)? }) }))
}

extern "C" {
    fn nfrs_recompute(
        piece: *mut c_void,
        a: *const C_tensor,
        b: *const C_tensor,
        c: *const C_tensor,
        second: *mut *mut C_tensor,
    ) -> *mut C_tensor;
}

#[no_mangle]
unsafe extern "C" fn nfrs_piece_run(
    piece: *mut c_void,
    again: bool,
    inputs: *const *const C_tensor,
    outputs: *mut *mut C_tensor,
) -> c_int {
    status(|| {
        // SAFETY: the shim passes the box of `recomputed`, three live tensors or nulls, and room for two outputs.
        let (piece, inputs, outputs) = unsafe {
            let inputs = std::slice::from_raw_parts(inputs, 3);
            let piece = &*piece.cast::<Box<Piece>>();
            (piece, [0, 1, 2].map(|i| ffi::borrow(inputs[i])), std::slice::from_raw_parts_mut(outputs, 2))
        };
        let (first, second) = piece(inputs, again)?;
        outputs[0] = into_raw(first);
        if let Some(second) = second {
            outputs[1] = into_raw(second);
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
