//! A Rust function as an autograd node.

use super::call::Value;
use super::engine::Recording;
use super::ffi::{into_raw, shim_error, status, Span};
use crate::error::Result;
use crate::host::CTensor;
use std::ffi::{c_int, c_void};
use tch::Tensor;

/// A function of tensors, with its gradient.
///
/// The function may hold values that are not `Send`, such as an `Rc` of the model's layers, although autograd may call
/// `backward` and drop the function on another thread. SAFETY: meanwhile nobody else uses the layers. The thread that
/// holds the model has started the backward pass, and waits until the engine has run all nodes. The engine releases
/// a node before it counts the node as done, and its queue orders the accesses of the two threads.
pub trait Differentiable {
    /// True if the backward pass needs the inputs.
    fn saves_inputs(&self) -> bool;

    /// Computes the outputs. Autograd does not record its operations.
    fn forward(&self, inputs: Vec<Tensor>) -> Result<Vec<Tensor>>;

    /// Returns a gradient for each input, given the gradients of the outputs.
    fn backward(&self, inputs: Vec<Tensor>, gradients: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>>;
}

/// Runs the function as an autograd node, and returns its outputs. At least one of the inputs must require a gradient.
pub fn apply(function: impl Differentiable + 'static, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
    #[cfg(test)]
    super::register();
    let saves = function.saves_inputs();
    // C++ holds one plain pointer, but a pointer to a trait object has two parts. So a second box holds the first one.
    let function: Box<Box<dyn Differentiable>> = Box::new(Box::new(function));
    let inputs: Vec<Value> = inputs.iter().map(|t| (*t).into()).collect();
    let mut outputs: Vec<Tensor> = Vec::new();
    let list = std::ptr::from_mut(&mut outputs).cast();
    // SAFETY: the tensors and the list outlive the call. C++ owns the function from here on, and drops it with
    // nfrs_function_drop.
    match unsafe { nfrs_function(Box::into_raw(function).cast(), saves, Span::of(&inputs), list, push) } {
        true => Ok(outputs),
        false => Err(shim_error()),
    }
}

/// Returns the function's outputs. Autograd records the function if it is on and an input requires a gradient.
pub fn evaluate(function: impl Differentiable + 'static, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
    match Recording::is_on() && inputs.iter().any(|t| t.requires_grad()) {
        true => apply(function, inputs),
        false => function.forward(inputs.iter().map(|t| t.shallow_clone()).collect()),
    }
}

/// A callback that appends a tensor to a list. The list takes ownership of the tensor.
type Push = unsafe extern "C" fn(list: *mut c_void, t: *mut CTensor);

/// Appends a new tensor to the outputs of [`apply`].
unsafe extern "C" fn push(list: *mut c_void, t: *mut CTensor) {
    // SAFETY: the list belongs to `apply`, which waits for C++ to return; the tensor is new.
    unsafe { (*list.cast::<Vec<Tensor>>()).push(Tensor::from_ptr(t.cast())) }
}

extern "C" {
    /// Makes an autograd node of the function, which saves the inputs if `saves` is true, and runs its forward pass.
    fn nfrs_function(function: *mut c_void, saves: bool, inputs: Span<Value>, outputs: *mut c_void, push: Push)
        -> bool;
}

/// Runs the function for C++ or, if `is_backward` is true, its backward pass, which receives the gradients of the
/// outputs. Passes each result to `push`, which appends it to the list `made`. Returns a code of [`status`].
#[no_mangle]
unsafe extern "C" fn nfrs_function_run(
    function: *mut c_void,
    is_backward: bool,
    inputs: Span<Value>,
    gradients: Span<Value>,
    made: *mut c_void,
    push: Push,
) -> c_int {
    status(|| {
        // SAFETY: C++ passes the box that `apply` made, and tensors that live until the call has ended.
        let (function, inputs, gradients) =
            unsafe { (&*function.cast::<Box<dyn Differentiable>>(), inputs.get(), gradients.get()) };
        let inputs = inputs.iter().map(Value::required).collect();
        let results = match is_backward {
            false => function.forward(inputs)?.into_iter().map(Some).collect(),
            true => function.backward(inputs, gradients.iter().map(Value::tensor).collect())?,
        };
        for t in results {
            // SAFETY: C++'s list takes ownership of the tensor.
            unsafe { push(made, t.map_or(std::ptr::null_mut(), into_raw)) };
        }
        Ok(())
    })
}

/// Drops the function for C++.
#[no_mangle]
unsafe extern "C" fn nfrs_function_drop(function: *mut c_void) {
    let drop_function = || {
        // SAFETY: C++ returns the box that `apply` made, and only once.
        drop(unsafe { Box::from_raw(function.cast::<Box<dyn Differentiable>>()) });
        Ok(())
    };
    status(drop_function);
}
