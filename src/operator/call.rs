//! A call of an operator, as C++ passes it to Rust and back (`Call` and `Value` in declared.h).

use super::ffi::Span;
use crate::cuda::Device;
use crate::kernel::view::View;
use std::cell::Cell;
use std::ffi::c_void;
use tch::{Kind, Tensor};

/// One argument, output or gradient of a call. Formulas read its tensor, kernels its view.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Value {
    /// One of the constants below.
    tag: i32,
    /// The code of the tensor's own type, even if kernels read a converted copy.
    pub dtype: i32,
    /// A number's bits, or the address of a tensor, a text or a list.
    bits: u64,
    /// The length of a text or list.
    length: i64,
    pub view: View,
}

// These are values of `Value::tag`. A list of tensors or numbers has a further value, which only C++ uses.
const NONE: i32 = 0;
const TENSOR: i32 = 1;
const INTEGER: i32 = 2;
const FLOAT: i32 = 3;
const BOOLEAN: i32 = 4;
const TEXT: i32 = 5;

extern "C" {
    /// Returns element `i` of a list.
    fn nfrs_element(list: *const c_void, i: i64) -> Value;
}

impl Value {
    /// Returns a value without a view; C++ adds the view.
    const fn new(tag: i32, bits: u64) -> Self {
        Value { tag, dtype: -1, bits, length: 0, view: View::ABSENT }
    }

    pub fn is_none(&self) -> bool {
        self.tag == NONE
    }

    /// Returns the tensor; `None` for every other kind of value.
    pub fn tensor(&self) -> Option<Tensor> {
        // SAFETY: C++ keeps a call's tensors alive until the call has ended.
        (self.tag == TENSOR).then(|| unsafe { Tensor::clone_from_ptr(self.bits as *mut _) })
    }

    /// Returns a tensor that the schema requires.
    pub fn required(&self) -> Tensor {
        self.tensor().expect("the schema requires this tensor")
    }

    /// Returns an integer argument. The schema guarantees that it is one, as for `float`, `flag` and `text`.
    pub fn int(&self) -> i64 {
        self.bits as i64
    }

    /// Returns a float argument.
    pub fn float(&self) -> f64 {
        f64::from_bits(self.bits)
    }

    /// Returns a bool argument.
    pub fn flag(&self) -> bool {
        self.bits != 0
    }

    /// Returns the elements of a list.
    pub fn elements(&self) -> Vec<Value> {
        // SAFETY: C++ passes a list of this length, and keeps it until the call has ended.
        (0..self.length).map(|i| unsafe { nfrs_element(self.bits as *const c_void, i) }).collect()
    }

    /// Returns a string argument.
    pub fn text(&self) -> &str {
        // SAFETY: C++ passes a string of this length, and keeps it until the call has ended.
        let bytes = unsafe { std::slice::from_raw_parts(self.bits as *const u8, self.length as usize) };
        std::str::from_utf8(bytes).unwrap_or_default()
    }
}

impl From<&Tensor> for Value {
    fn from(t: &Tensor) -> Self {
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

/// Builds the arguments of a call, each as a [`Value`].
macro_rules! values {
    ($($argument:expr),+ $(,)?) => { [$($crate::operator::call::Value::from($argument)),+] };
}
pub(super) use values;

/// A call in one of its stages: plan, kernel, formula or gradient. declared.h has the same struct for C++.
#[repr(C)]
pub struct Call {
    arguments: Span<Value>,
    outputs: Span<Value>,
    /// A gradient for each output, in the gradient stage.
    gradients: *const Value,
    /// A bit for each argument whose gradient is wanted.
    wanted: u64,
    /// The CUDA device whose kernels run, or -1.
    device: i32,
    /// The number of a [`Why`].
    why: i32,
    /// A bit for each output that is not computed. Rust sets this field and the next two during the call.
    absent: Cell<u64>,
    /// A bit for each argument whose working copy has changed.
    written: Cell<u64>,
    /// True if no kernel accepts the call.
    composed: Cell<bool>,
}

/// The reason why a formula runs instead of a kernel.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// There is no kernel for this call.
    Device,
    /// A torch.func transform or forward-mode autograd differentiates the call.
    Transform,
    /// vmap batches the call.
    Batch,
}

impl Call {
    /// Returns the arguments, in the schema's order.
    pub fn arguments<const N: usize>(&self) -> &[Value; N] {
        exactly(self.all())
    }

    /// Returns all arguments, for operators whose number of arguments depends on what a user declares.
    pub fn all(&self) -> &[Value] {
        // SAFETY: C++ keeps the arguments until the call has ended.
        unsafe { self.arguments.get() }
    }

    /// Returns all outputs, for operators whose number of outputs depends on what a user declares.
    pub fn all_outputs(&self) -> &[Value] {
        // SAFETY: C++ keeps the outputs until the call has ended.
        unsafe { self.outputs.get() }
    }

    /// Returns the first argument, which is a required tensor.
    pub fn first(&self) -> Tensor {
        self.all()[0].required()
    }

    /// Returns the outputs: for a kernel, those that it must write; for a gradient, those that the forward pass kept.
    pub fn outputs<const N: usize>(&self) -> &[Value; N] {
        exactly(self.all_outputs())
    }

    /// Returns the gradients of the outputs, which the gradient stage is given.
    pub fn given(&self) -> Vec<Option<Tensor>> {
        let n_outputs = self.all_outputs().len();
        // SAFETY: in the gradient stage C++ passes a gradient for each output, and keeps them until the call has ended.
        (0..n_outputs).map(|k| unsafe { &*self.gradients.add(k) }.tensor()).collect()
    }

    /// Returns the arguments as tensors, with `None` for those whose gradient is not wanted.
    pub fn wanted(&self) -> Vec<Option<Tensor>> {
        let is_wanted = |i: usize| self.wanted >> i & 1 == 1; // bit i belongs to argument i
        self.all().iter().enumerate().map(|(i, v)| v.tensor().filter(|_| is_wanted(i))).collect()
    }

    /// Calls `formula` with a copy of this call, in which those of `tensors` that are `Some` replace the arguments.
    pub fn with<T>(&self, tensors: &[Option<Tensor>], formula: impl FnOnce(&Call) -> T) -> T {
        self.with_values(&replaced(self.all(), tensors), formula)
    }

    /// Calls `formula` with a copy of this call that has these arguments.
    pub fn with_values<T>(&self, arguments: &[Value], formula: impl FnOnce(&Call) -> T) -> T {
        // The three cells are new, because bits that Rust sets during `formula` must not change this call.
        let (no_bits, is_composed) = (Cell::new(0), Cell::new(false));
        let arguments = Span::of(arguments);
        formula(&Call { arguments, absent: no_bits.clone(), written: no_bits, composed: is_composed, ..*self })
    }

    /// Returns the CUDA device whose kernels run the call; `None` for the CPU.
    pub fn device(&self) -> Option<Device> {
        (self.device >= 0).then_some(self.device)
    }

    /// Returns the reason why a formula runs.
    pub fn why(&self) -> Why {
        match self.why {
            0 => Why::Device,
            1 => Why::Transform,
            _ => Why::Batch,
        }
    }

    /// Marks output `k` as not computed.
    pub fn leave_out(&self, k: usize) {
        self.absent.set(self.absent.get() | 1 << k);
    }

    /// Marks the working copy of argument `i` as changed, so that it becomes the argument's value.
    pub fn write_back(&self, i: usize) {
        self.written.set(self.written.get() | 1 << i);
    }

    /// Tells C++ that no kernel accepts this call, so that the formula runs.
    pub fn decline(&self) {
        self.composed.set(true);
    }
}

/// Returns a copy of `given` in which the tensors that are `Some` replace the values at their indices.
pub fn replaced(given: &[Value], tensors: &[Option<Tensor>]) -> Vec<Value> {
    given.iter().zip(tensors).map(|(value, t)| t.as_ref().map_or(*value, Value::from)).collect()
}

/// Returns the number of a floating type in c10::ScalarType, which tch does not publish.
pub fn scalar_type(kind: Kind) -> i64 {
    match kind {
        Kind::Half => 5,
        Kind::Float => 6,
        Kind::Double => 7,
        Kind::BFloat16 => 15,
        other => unreachable!("{other:?} is no floating type"),
    }
}

/// Returns the values as an array; panics if their number is not N.
fn exactly<const N: usize>(values: &[Value]) -> &[Value; N] {
    values.try_into().expect("a call has as many arguments and outputs as its operator")
}
