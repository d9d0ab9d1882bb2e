//! The border with the C++ shim: the structs both sides share, and how errors cross it.

use crate::cpu::philox::{Dropout, Stream};
use crate::cuda::{self, Device, Readiness};
use crate::error::{Error, Result};
use std::cell::{Cell, RefCell};
use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::panic::AssertUnwindSafe;
use torch_sys::C_tensor;

/// A matrix of the C++ side: `rows` rows of `cols` numbers, `stride` apart. `data` is null where a tensor is absent.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct View {
    pub data: *mut u8,
    pub rows: i64,
    pub cols: i64,
    pub stride: i64,
    pub dtype: i32,
    /// A CUDA device's number, or -1: the CPU.
    device: i32,
}

impl View {
    pub const ABSENT: View = View { data: std::ptr::null_mut(), rows: 0, cols: 0, stride: 0, dtype: -1, device: -1 };

    /// Of a contiguous tensor of f32 or f64 that kernels on `device` write.
    pub fn of(t: &tch::Tensor, device: Device) -> View {
        let cols = t.size().last().copied().unwrap_or(1);
        let rows = if cols == 0 { 0 } else { t.numel() as i64 / cols };
        let dtype = i32::from(t.kind() == tch::Kind::Double);
        View { data: t.data_ptr().cast(), rows, cols, stride: cols, dtype, device }
    }

    /// The CUDA device it lies on.
    pub fn device(&self) -> Option<Device> {
        (self.device >= 0).then_some(self.device)
    }

    pub fn is_absent(&self) -> bool {
        self.data.is_null()
    }

    pub fn rows(&self) -> usize {
        self.rows as usize
    }

    pub fn cols(&self) -> usize {
        self.cols as usize
    }

    fn len(&self) -> usize {
        match (self.rows, self.cols) {
            (0, _) | (_, 0) => 0,
            (rows, cols) => ((rows - 1) * self.stride + cols) as usize,
        }
    }

    /// # Safety
    /// The view's dtype is T, the shim keeps the tensor alive for `'a`, and nobody writes it meanwhile.
    pub unsafe fn slice<'a, T>(&self) -> &'a [T] {
        if self.is_absent() || self.len() == 0 {
            return &[];
        }
        std::slice::from_raw_parts(self.data.cast(), self.len())
    }

    /// # Safety
    /// As [`slice`](Self::slice), and this is the tensor's only slice.
    pub unsafe fn slice_mut<'a, T>(&self) -> &'a mut [T] {
        if self.is_absent() || self.len() == 0 {
            return &mut [];
        }
        std::slice::from_raw_parts_mut(self.data.cast(), self.len())
    }
}

/// What dropout needs.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Draw {
    pub p: f64,
    pub seed: i64,
    pub update: i64,
    pub micro_batch: i64,
    pub site: i64,
    /// The first three once more, where a GPU's kernel reads them.
    pub device_seed: *const i64,
}

impl Draw {
    pub const NONE: Draw = Draw { p: 0.0, seed: 0, update: 0, micro_batch: 0, site: 0, device_seed: std::ptr::null() };

    /// As kernels read it.
    pub fn of(call: &Call, [p, seed, site]: [&Value; 3]) -> Draw {
        let draw = Draw { p: p.float(), site: site.int(), ..Draw::NONE };
        if draw.p == 0.0 {
            return Draw::NONE;
        }
        match call.device() {
            Some(_) => Draw { device_seed: seed.view.data.cast(), ..draw },
            // SAFETY: the operators' tables say that a seed is three int64; C++ keeps it, contiguous, for the call.
            None => draw.seeded(unsafe { seed.view.slice() }),
        }
    }

    /// As formulas read it.
    pub fn of_formula([p, seed, site]: [&Value; 3]) -> Result<Draw> {
        let draw = Draw { p: p.float(), site: site.int(), ..Draw::NONE };
        match seed.tensor() {
            Some(seed) if draw.p > 0.0 => {
                Ok(draw.seeded(&Vec::<i64>::try_from(seed.f_to_device(tch::Device::Cpu)?.f_flatten(0, -1)?)?))
            }
            _ => Ok(Draw::NONE),
        }
    }

    fn seeded(self, seed: &[i64]) -> Draw {
        Draw { seed: seed[0], update: seed[1], micro_batch: seed[2], ..self }
    }

    pub fn dropout(&self) -> Option<Dropout> {
        let stream = Stream {
            seed: self.seed as u64,
            update: self.update as u32,
            micro_batch: self.micro_batch as u16,
            site: self.site as u16,
        };
        Dropout::new(self.p, stream)
    }
}

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

impl From<Option<&tch::Tensor>> for Value {
    fn from(t: Option<&tch::Tensor>) -> Self {
        t.map_or(Value::new(NONE, 0), Value::from)
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

impl From<Option<i64>> for Value {
    fn from(v: Option<i64>) -> Self {
        v.map_or(Value::new(NONE, 0), Value::from)
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

/// A call of an operator, as C++ shows it: declared.h's `Call`.
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

/// Calls `$body` with `$E` standing for the element type of a view's dtype.
macro_rules! by_dtype {
    ($view:expr, $E:ident => $body:expr) => {
        match $view.dtype {
            0 => {
                type $E = f32;
                $body
            }
            1 => {
                type $E = f64;
                $body
            }
            2 => {
                type $E = half::bf16;
                $body
            }
            3 => {
                type $E = half::f16;
                $body
            }
            other => Err($crate::error::Error::Torch(format!("dtype code {other} has no kernel"))),
        }
    };
}
pub(crate) use by_dtype;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

fn keep(e: Error) {
    let text = e.to_string().replace('\0', " ");
    LAST.with(|last| *last.borrow_mut() = CString::new(text).expect("no NUL is left"));
}

/// Runs a kernel for C++: 0, or 1 with the message kept; 3 for what torch calls a NotImplementedError. A panic becomes
/// such a message and never unwinds into C++.
pub fn status(work: impl FnOnce() -> Result<()>) -> c_int {
    match std::panic::catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => 0,
        Ok(Err(e)) => {
            let status = if matches!(e, Error::NotImplemented(_)) { 3 } else { 1 };
            keep(e);
            status
        }
        Err(panic) => {
            keep(match panic.downcast::<Error>() {
                Ok(e) => *e,
                Err(panic) => Error::Torch(format!("a kernel panicked: {}", panic_text(&*panic))),
            });
            1
        }
    }
}

/// The same before a call: invalid arguments are 2, a ValueError.
pub fn status_of_plan(plan: impl FnOnce() -> Result<()>) -> c_int {
    let mut is_invalid = false;
    let status = status(|| plan().inspect_err(|e| is_invalid = matches!(e, Error::Invalid(_))));
    if is_invalid {
        2
    } else {
        status
    }
}

/// The C++ tensor behind a tch tensor, owned by whoever takes it.
pub fn into_raw(t: tch::Tensor) -> *mut C_tensor {
    let mut t = std::mem::ManuallyDrop::new(t);
    t.as_mut_ptr()
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied()).unwrap_or("unknown")
}

/// Whether kernels run on a CUDA device: 1, or 0 and -1 (they must, and cannot) with the reason kept.
#[no_mangle]
extern "C" fn nfrs_cuda_ready(device: Device) -> c_int {
    let mut ready = 1;
    let asked = status(|| {
        if let Readiness::Missing(why) = cuda::readiness(device)? {
            keep(Error::Torch(why));
            ready = 0;
        }
        Ok(())
    });
    if asked == 0 {
        ready
    } else {
        -1
    }
}

/// Whether tensors of the CPU take the CUDA kernels' way.
#[no_mangle]
extern "C" fn nfrs_cuda_stand_in() -> bool {
    cuda::stand_in()
}

/// This thread's last message, for C++.
#[no_mangle]
extern "C" fn nfrs_rust_error() -> *const c_char {
    LAST.with(|last| last.borrow().as_ptr())
}

extern "C" {
    fn nfrs_tensor_of(list: *const c_void, i: i64) -> *const C_tensor;
    fn nfrs_number_of(list: *const c_void, i: i64) -> f64;
    fn nfrs_last_error() -> *const c_char;
}

/// This thread's last message of the C++ side, without the C++ stack.
pub fn shim_error() -> Error {
    // SAFETY: the shim returns a NUL-terminated thread-local string that lives until its next failing call.
    let text = unsafe { CStr::from_ptr(nfrs_last_error()) }.to_string_lossy().into_owned();
    tch::TchError::Torch(text).into()
}

/// Takes over a tensor that the shim made, or its error.
///
/// # Safety
/// `made` is null or a new `at::Tensor` that nobody else frees.
pub unsafe fn take(made: *mut C_tensor) -> Result<tch::Tensor> {
    if made.is_null() {
        return Err(shim_error());
    }
    Ok(tch::Tensor::from_ptr(made))
}

/// The pointer of an optional tensor, null where there is none.
pub fn pointer(t: Option<&tch::Tensor>) -> *const C_tensor {
    t.map_or(std::ptr::null(), tch::Tensor::as_ptr)
}

/// A tensor of the C++ side, by a reference of our own.
///
/// # Safety
/// `t` is null or points to a live `at::Tensor`.
pub unsafe fn borrow(t: *const C_tensor) -> Option<tch::Tensor> {
    (!t.is_null()).then(|| tch::Tensor::clone_from_ptr(t.cast_mut()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_panic_said_arrives() {
        let said = |work: fn() -> Result<()>| {
            assert_eq!(status(work), 1);
            // SAFETY: a NUL-terminated string of this thread, which lives until its next failing call.
            unsafe { CStr::from_ptr(nfrs_rust_error()) }.to_string_lossy().into_owned()
        };
        assert_eq!(said(|| panic!("plain")), "a kernel panicked: plain");
        assert_eq!(said(|| panic!("row {}", 1 + 1)), "a kernel panicked: row 2");
        assert_eq!(said(|| Err(Error::invalid("no"))), "no");
        let refused = said(|| {
            crate::cpu::memory::filled(0u8, usize::MAX);
            Ok(())
        });
        assert!(refused.starts_with("not enough memory"), "{refused}");
    }

    #[test]
    fn a_panic_on_another_thread_arrives_too() {
        let failed = status(|| {
            crate::cpu::parallel::for_each(64, 1, |r| assert!(!r.contains(&63), "the last row"));
            Ok(())
        });
        // SAFETY: as above.
        let text = unsafe { CStr::from_ptr(nfrs_rust_error()) }.to_string_lossy().into_owned();
        assert_eq!((failed, text.as_str()), (1, "a kernel panicked: the last row"));
    }
}
