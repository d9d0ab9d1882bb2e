//! The one door to a tensor's memory: [`host`] looks before it reads.
//!
//! A tensor may have no numbers where they should lie: those of FakeTensorMode and other wrapper subclasses, meta tensors,
//! tensors whose memory was freed, other layouts. Others mean something else than their memory says: negated views, the
//! wrappers of torch.func. tch asks for none of this, and copies from whatever address it gets.

use crate::error::{without_stack, Error, Result};
use std::ffi::{c_char, c_int, c_void, CStr};
use std::marker::PhantomData;
use std::ops::Deref;
use tch::Tensor;

/// C++'s at::Tensor, which tch calls `C_tensor` and does not name to us.
#[derive(Debug)]
#[repr(C)]
pub struct CTensor {
    _opaque: [u8; 0],
}

/// A number that tensors hold.
pub trait Number: Copy {
    /// c10::ScalarType's number (tch keeps its own private).
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

/// Whatever the tensor's own type is.
impl Number for u8 {
    const SCALAR_TYPE: c_int = -1;
}

/// A tensor's numbers, row by row, from wherever it lies and converted to T; as u8 the bytes of its own type. Where it
/// has none in memory the error names `what` it is, of which kind, and what to do.
pub fn host<T: Number>(what: &str, t: &Tensor) -> Result<Vec<T>> {
    let held = Held::<T>::new(what, t)?;
    let mut numbers = Vec::new();
    if numbers.try_reserve_exact(held.len()).is_err() {
        return Err(Error::Torch(format!("not enough memory for the {} bytes of {what}", size_of_val(&*held))));
    }
    numbers.extend_from_slice(&held);
    Ok(numbers)
}

/// The numbers that [`host`] copies, without the copy. Those of a contiguous tensor on the host are its own memory:
/// nobody may write to it while this lives.
#[derive(Debug)]
pub struct Held<T> {
    memory: HostMemory,
    _tensor: Tensor,
    _numbers: PhantomData<T>,
}

impl<T: Number> Held<T> {
    /// Errors as for [`host`].
    pub fn new(what: &str, t: &Tensor) -> Result<Self> {
        let mut memory = HostMemory { data: std::ptr::null(), bytes: 0 };
        // SAFETY: the tensor outlives the call.
        let held = unsafe { nfrs_host(t.as_ptr().cast(), T::SCALAR_TYPE, &mut memory) };
        if held.is_null() {
            // SAFETY: a NUL-terminated string of this thread, which lives until its next failing call.
            let why = unsafe { CStr::from_ptr(nfrs_last_error()) }.to_string_lossy();
            return Err(Error::invalid(format!("{what} {}", without_stack(&why))));
        }
        // SAFETY: C++ made it, and it is ours.
        Ok(Held { memory, _tensor: unsafe { Tensor::from_ptr(held.cast()) }, _numbers: PhantomData })
    }
}

impl<T> Deref for Held<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self.memory.bytes / size_of::<T>() {
            0 => &[],
            // SAFETY: the tensor has so many bytes there, numbers of T, as long as it is held.
            count => unsafe { std::slice::from_raw_parts(self.memory.data.cast(), count) },
        }
    }
}

/// Whether the memory at the tensor's address is all there, and says what the tensor means.
pub fn has_memory(t: &Tensor) -> bool {
    // SAFETY: the tensor outlives the call.
    unsafe { nfrs_has_memory(t.as_ptr().cast()) }
}

/// shim.cpp's.
#[derive(Debug)]
#[repr(C)]
struct HostMemory {
    data: *const c_void,
    bytes: usize,
}

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
        let said = |t: &Tensor| host::<f64>("x", t).unwrap_err().to_string();
        let x = Tensor::ones([2, 2], (Kind::Double, Device::Cpu));
        assert_eq!(said(&x.to_sparse(None, None::<i64>, None)).find("x has layout Sparse"), Some(0));
        assert!(said(&x.to_kind(Kind::Float).quantize_per_tensor(1.0, 0, Kind::QInt8))
            .contains("quantised: call dequantize"));
        assert!(said(&Tensor::new()).contains("undefined"));
    }
}
