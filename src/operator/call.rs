//! A call of an operator, as C++ shows it to Rust and takes it from Rust: declared.h's `Call` and `Value`.

use super::ffi::borrow;
use crate::cuda::Device;
use crate::kernel::view::View;
use std::cell::Cell;
use std::ffi::c_void;
use torch_sys::C_tensor;

/// One argument, output or gradient of a call: formulas read the tensor, kernels the view.
#[repr(C)]
pub struct Value {
    tag: i32,
    /// The tensor's own type, whatever it is read in.
    pub dtype: i32,
    bits: u64,
    length: i64,
    pub view: View,
}

const NONE: i32 = 0;
const TENSOR: i32 = 1;
const INTEGER: i32 = 2;
const FLOAT: i32 = 3;
const BOOLEAN: i32 = 4;
const TEXT: i32 = 5;

extern "C" {
    fn nfrs_tensor_of(list: *const c_void, i: i64) -> *const C_tensor;
    fn nfrs_number_of(list: *const c_void, i: i64) -> f64;
}

impl Value {
    const fn new(tag: i32, bits: u64) -> Self {
        Value { tag, dtype: -1, bits, length: 0, view: View::ABSENT }
    }

    pub fn is_none(&self) -> bool {
        self.tag == NONE
    }

    pub fn tensor(&self) -> Option<tch::Tensor> {
        // SAFETY: C++ keeps the tensors of a call until it is done.
        (self.tag == TENSOR).then(|| unsafe { tch::Tensor::clone_from_ptr(self.bits as *mut C_tensor) })
    }

    /// A tensor that the schema requires.
    pub fn required(&self) -> tch::Tensor {
        self.tensor().expect("the schema requires this tensor")
    }

    pub fn int(&self) -> i64 {
        self.bits as i64
    }

    pub fn float(&self) -> f64 {
        f64::from_bits(self.bits)
    }

    pub fn flag(&self) -> bool {
        self.bits != 0
    }

    /// The tensors of a list.
    pub fn tensors(&self) -> Vec<Option<tch::Tensor>> {
        // SAFETY: C++ gives a list of this length, and keeps it until the call is done.
        (0..self.length).map(|i| unsafe { borrow(nfrs_tensor_of(self.bits as *const c_void, i)) }).collect()
    }

    /// The numbers of a list.
    pub fn numbers(&self) -> Vec<f64> {
        // SAFETY: as above.
        (0..self.length).map(|i| unsafe { nfrs_number_of(self.bits as *const c_void, i) }).collect()
    }

    pub fn text(&self) -> &str {
        // SAFETY: C++ gives a string of this length, and keeps it until the call is done.
        let bytes = unsafe { std::slice::from_raw_parts(self.bits as *const u8, self.length as usize) };
        std::str::from_utf8(bytes).unwrap_or_default()
    }
}

impl From<&tch::Tensor> for Value {
    fn from(t: &tch::Tensor) -> Self {
        Value::new(TENSOR, t.as_ptr() as u64)
    }
}

impl From<f64> for Value {
    fn from(v: f64) -> Self {
        Value::new(FLOAT, v.to_bits())
    }
}

impl From<i64> for Value {
    fn from(v: i64) -> Self {
        Value::new(INTEGER, v as u64)
    }
}

impl From<bool> for Value {
    fn from(v: bool) -> Self {
        Value::new(BOOLEAN, v.into())
    }
}

impl From<&str> for Value {
    fn from(v: &str) -> Self {
        Value { length: v.len() as i64, ..Value::new(TEXT, v.as_ptr() as u64) }
    }
}

impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(v: Option<T>) -> Self {
        v.map_or(Value::new(NONE, 0), T::into)
    }
}

/// A call in one of its stages.
#[repr(C)]
pub struct Call {
    arguments: *const Value,
    n_arguments: i64,
    outputs: *const Value,
    n_outputs: i64,
    gradients: *const Value,
    device: i32,
    why: i32,
    absent: Cell<u64>,
    written: Cell<u64>,
    composed: Cell<bool>,
}

/// Why a formula runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// There is no kernel for this call.
    Device,
    /// A torch.func transform, or forward mode, differentiates it.
    Transform,
    /// vmap batches it.
    Batch,
}

/// N values.
///
/// # Safety
/// `values` points to `length` of them, which live as long as the result.
unsafe fn exactly<'a, const N: usize>(values: *const Value, length: i64) -> &'a [Value; N] {
    assert_eq!(length, N as i64, "a call with another number of arguments, or outputs, than its operator's");
    &*values.cast()
}

impl Call {
    /// The arguments, in the schema's order.
    pub fn arguments<const N: usize>(&self) -> &[Value; N] {
        // SAFETY: C++ gives that many, and keeps them for the call.
        unsafe { exactly(self.arguments, self.n_arguments) }
    }

    /// The first argument, a tensor that the schema requires.
    pub fn first(&self) -> tch::Tensor {
        // SAFETY: as above; it has one.
        unsafe { &*self.arguments }.required()
    }

    /// The outputs: for a kernel to write, for a gradient those that the forward pass kept.
    pub fn outputs<const N: usize>(&self) -> &[Value; N] {
        // SAFETY: as above.
        unsafe { exactly(self.outputs, self.n_outputs) }
    }

    /// The outputs' gradients.
    pub fn gradients<const N: usize>(&self) -> &[Value; N] {
        // SAFETY: as above.
        unsafe { exactly(self.gradients, self.n_outputs) }
    }

    /// The CUDA device whose kernels take the call.
    pub fn device(&self) -> Option<Device> {
        (self.device >= 0).then_some(self.device)
    }

    pub fn why(&self) -> Why {
        match self.why {
            0 => Why::Device,
            1 => Why::Transform,
            _ => Why::Batch,
        }
    }

    /// Output `k` is not made.
    pub fn leave_out(&self, k: usize) {
        self.absent.set(self.absent.get() | 1 << k);
    }

    /// The working copy of argument `i` has changed, and is what the argument is to be.
    pub fn write_back(&self, i: usize) {
        self.written.set(self.written.get() | 1 << i);
    }

    /// No kernel takes this call: the formula does.
    pub fn decline(&self) {
        self.composed.set(true);
    }
}
