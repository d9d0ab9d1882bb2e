//! Checked reads of tensors' memory: [`host`] checks a tensor before it reads.
//!
//! Some tensors have no data at their address: FakeTensorMode's tensors and other wrapper subclasses, meta tensors,
//! tensors whose memory was freed, and non-strided layouts. For other tensors the data is not their value: negated
//! views and torch.func's wrappers. tch does not check any of this, and copies from any address.

use crate::error::{without_stack, Error, Result};
use std::ffi::{c_char, c_int, c_void, CStr};
use std::marker::PhantomData;
use std::ops::Deref;
use tch::Tensor;

/// The type at::Tensor of C++. tch has a name for it too, `C_tensor`, which is private.
#[derive(Debug)]
#[repr(C)]
pub struct CTensor {
    _opaque: [u8; 0],
}

/// An element type to which tensors are converted when read.
pub trait Number: Copy {
    /// The type's number in c10::ScalarType, which tch does not publish; −1 stands for the tensor's own type.
    const SCALAR_TYPE: c_int;
}

impl Number for i64 {
    const SCALAR_TYPE: c_int = 4;
}

impl Number for f64 {
    const SCALAR_TYPE: c_int = 7;
}

impl Number for bool {
    const SCALAR_TYPE: c_int = 11;
}

/// The bytes of elements of any type.
impl Number for u8 {
    const SCALAR_TYPE: c_int = -1;
}

/// Copies a tensor's elements to the host in row-major order, converted to T; u8 gives the bytes of the tensor's own
/// type. If the tensor has no data in memory, the error begins with `what`, and names the kind of the tensor and the
/// remedy.
pub fn host<T: Number>(what: &str, t: &Tensor) -> Result<Vec<T>> {
    let held = Held::<T>::new(what, t)?;
    let mut numbers = Vec::new();
    if numbers.try_reserve_exact(held.len()).is_err() {
        return Err(Error::Torch(format!("not enough memory for the {} bytes of {what}", size_of_val(&*held))));
    }
    numbers.extend_from_slice(&held);
    Ok(numbers)
}

/// A tensor's elements on the host, like the result of [`host`] but without a copy if possible. For a contiguous tensor
/// on the host they are the tensor's own memory, which nobody may write as long as this value lives.
#[derive(Debug)]
pub struct Held<T> {
    memory: HostMemory,
    /// The tensor that owns the memory, and keeps it alive.
    _tensor: Tensor,
    _numbers: PhantomData<T>,
}

impl<T: Number> Held<T> {
    /// Holds the tensor's elements, converted to T; `what` begins the error's message. Errors like [`host`].
    pub fn new(what: &str, t: &Tensor) -> Result<Self> {
        let mut memory = HostMemory { data: std::ptr::null(), bytes: 0 };
        // SAFETY: the tensor outlives the call.
        let held = unsafe { nfrs_host(t.as_ptr().cast(), T::SCALAR_TYPE, &mut memory) };
        if held.is_null() {
            // SAFETY: the string is NUL-terminated and belongs to this thread, and lives until the thread's next
            // failing call.
            let why = unsafe { CStr::from_ptr(nfrs_last_error()) }.to_string_lossy();
            return Err(Error::invalid(format!("{what} {}", without_stack(&why))));
        }
        // SAFETY: C++ made the tensor and passes its ownership to us.
        Ok(Held { memory, _tensor: unsafe { Tensor::from_ptr(held.cast()) }, _numbers: PhantomData })
    }
}

impl<T> Deref for Held<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self.memory.bytes / size_of::<T>() {
            0 => &[],
            // SAFETY: at this address the tensor, which lives as long as `self`, has `count` elements of type T.
            count => unsafe { std::slice::from_raw_parts(self.memory.data.cast(), count) },
        }
    }
}

/// True if the tensor's data lies at its address, and that data is the tensor's value.
pub fn has_memory(t: &Tensor) -> bool {
    // SAFETY: the tensor outlives the call.
    unsafe { nfrs_has_memory(t.as_ptr().cast()) }
}

/// The struct `Memory` of shim.cpp: the address and the length of a tensor's data.
#[derive(Debug)]
#[repr(C)]
struct HostMemory {
    data: *const c_void,
    bytes: usize,
}

// These functions are in shim.cpp. A null result of `nfrs_host` means failure, with its message in `nfrs_last_error`.
extern "C" {
    fn nfrs_host(t: *const CTensor, scalar_type: c_int, memory: *mut HostMemory) -> *mut CTensor;
    fn nfrs_has_memory(t: *const CTensor) -> bool;
    fn nfrs_last_error() -> *const c_char;
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    #[test]
    fn numbers_arrive_in_rows_and_in_the_type_asked_for() {
        let t = Tensor::from_slice(&[1i64, 2, 3, 4]).reshape([2, 2]).transpose(0, 1);
        assert_eq!(host::<i64>("t", &t).unwrap(), [1, 3, 2, 4]);
        assert_eq!(host::<f64>("t", &t).unwrap(), [1.0, 3.0, 2.0, 4.0]);
        assert_eq!(host::<bool>("t", &t.gt(2)).unwrap(), [false, true, false, true]);
        assert_eq!(host::<u8>("t", &Tensor::from_slice(&[1.0f32])).unwrap(), 1.0f32.to_le_bytes());
        assert_eq!(host::<i64>("t", &Tensor::from_slice::<i64>(&[])).unwrap(), [0i64; 0]);
    }

    #[test]
    fn a_negated_view_is_what_it_says() {
        let complex = Tensor::complex(&Tensor::from_slice(&[1.0f64, 2.0]), &Tensor::from_slice(&[3.0, 4.0]));
        let t = complex.conj().imag();
        assert!(t.is_neg() && !has_memory(&t) && has_memory(&complex));
        assert_eq!(host::<f64>("t", &t).unwrap(), [-3.0, -4.0]);
    }

    #[test]
    fn what_has_no_numbers_says_why() {
        let message = |t: &Tensor| host::<f64>("x", t).unwrap_err().to_string();
        let x = Tensor::ones([2, 2], (Kind::Double, Device::Cpu));
        assert_eq!(message(&x.to_sparse(None, None::<i64>, None)).find("x has layout Sparse"), Some(0));
        assert!(message(&x.to_kind(Kind::Float).quantize_per_tensor(1.0, 0, Kind::QInt8))
            .contains("quantised: call dequantize"));
        assert!(message(&Tensor::new()).contains("undefined"));
    }
}
