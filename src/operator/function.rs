//! A function of Rust's as a node of autograd.

use super::call::Value;
use super::ffi::{into_raw, shim_error, status, Span};
use crate::error::Result;
use crate::host::CTensor;
use std::ffi::{c_int, c_void};
use tch::Tensor;

/// What a function makes of tensors, and how gradients go back through it.
///
/// It may hold what is no `Send`: an `Rc` of the model's layers. Autograd runs it for its gradient, and may drop it, on
/// the thread of its device. SAFETY: nobody else uses the layers meanwhile. The thread that holds the model has called
/// `backward` and waits in it until the engine has run all nodes; the engine lets go of a node before it counts it as
/// done, and its queue orders either thread's accesses before the other's.
pub trait Differentiable {
    /// The backward pass gets the inputs.
    fn saves_inputs(&self) -> bool;

    /// The outputs. Nothing that it calls is recorded.
    fn forward(&self, inputs: Vec<Tensor>) -> Result<Vec<Tensor>>;

    /// A gradient of each input, from the outputs'.
    fn backward(&self, inputs: Vec<Tensor>, gradients: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>>;
}

/// The outputs. One of the inputs must require a gradient.
pub fn apply(function: impl Differentiable + 'static, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
    #[cfg(test)]
    super::register();
    let saves = function.saves_inputs();
    let function: Box<Box<dyn Differentiable>> = Box::new(Box::new(function));
    let inputs: Vec<Value> = inputs.iter().map(|t| (*t).into()).collect();
    let mut outputs: Vec<Tensor> = Vec::new();
    let list = std::ptr::from_mut(&mut outputs).cast();
    // SAFETY: the tensors and the list outlive the call; C++ owns the function from here on and drops it by
    // nfrs_function_drop.
    match unsafe { nfrs_function(Box::into_raw(function).cast(), saves, Span::of(&inputs), list, push) } {
        true => Ok(outputs),
        false => Err(shim_error()),
    }
}

/// Appends a tensor to a list of the other side, which takes it over.
type Push = unsafe extern "C" fn(list: *mut c_void, t: *mut CTensor);

unsafe extern "C" fn push(list: *mut c_void, t: *mut CTensor) {
    // SAFETY: the list is `apply`'s, which waits for C++; the tensor is new.
    unsafe { (*list.cast::<Vec<Tensor>>()).push(Tensor::from_ptr(t.cast())) }
}

extern "C" {
    fn nfrs_function(function: *mut c_void, saves: bool, inputs: Span<Value>, outputs: *mut c_void, push: Push)
        -> bool;
}

#[no_mangle]
unsafe extern "C" fn nfrs_function_run(
    function: *mut c_void,
    back: bool,
    inputs: Span<Value>,
    gradients: Span<Value>,
    made: *mut c_void,
    push: Push,
) -> c_int {
    status(|| {
        // SAFETY: C++ hands back the box of `apply`, and tensors that live for the call.
        let (function, inputs, gradients) =
            unsafe { (&*function.cast::<Box<dyn Differentiable>>(), inputs.get(), gradients.get()) };
        let inputs = inputs.iter().map(Value::required).collect();
        let all = match back {
            false => function.forward(inputs)?.into_iter().map(Some).collect(),
            true => function.backward(inputs, gradients.iter().map(Value::tensor).collect())?,
        };
        for t in all {
            // SAFETY: C++'s list takes over the tensor.
            unsafe { push(made, t.map_or(std::ptr::null_mut(), into_raw)) };
        }
        Ok(())
    })
}

#[no_mangle]
unsafe extern "C" fn nfrs_function_drop(function: *mut c_void) {
    let drop_function = || {
        // SAFETY: C++ hands back the box of `apply`, once.
        drop(unsafe { Box::from_raw(function.cast::<Box<dyn Differentiable>>()) });
        Ok(())
    };
    status(drop_function);
}
