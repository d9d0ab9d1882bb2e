//! What travels between host and device without anybody waiting.

use super::ffi::{shim_error, take};
use crate::error::Result;
use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use tch::{Device, Tensor};
use torch_sys::C_tensor;

/// Numbers of the host on a device, copied when its stream comes to it.
pub fn upload<T: tch::kind::Element>(numbers: &[T], device: Device) -> Result<Tensor> {
    let host = Tensor::f_from_slice(numbers)?;
    match device {
        // SAFETY: the tensor outlives the call; a new one comes back.
        Device::Cuda(index) => unsafe { take(nfrs_upload(host.as_ptr(), index as c_int)) },
        _ => Ok(host.f_to_device(device)?),
    }
}

/// Numbers of a device on their way to the host. Reading waits until the stream has come so far, and no farther: what
/// was put on it since goes on.
pub struct Late(NonNull<c_void>);

impl Late {
    /// Sets the numbers on their way.
    pub fn of(t: &Tensor) -> Result<Self> {
        // SAFETY: the tensor outlives the call; the Late that comes back is this one's own.
        NonNull::new(unsafe { nfrs_late(t.as_ptr()) }).map(Late).ok_or_else(shim_error)
    }

    /// The numbers, once they have arrived.
    pub fn read(&self) -> Result<Vec<f64>> {
        // SAFETY: the Late is alive; a new tensor comes back.
        let host = unsafe { take(nfrs_late_read(self.0.as_ptr())) }?;
        Ok(Vec::<f64>::try_from(host.f_reshape([-1i64].as_slice())?)?)
    }
}

impl Drop for Late {
    fn drop(&mut self) {
        // SAFETY: made by nfrs_late, and nobody else's.
        unsafe { nfrs_late_free(self.0.as_ptr()) }
    }
}

extern "C" {
    fn nfrs_upload(host: *const C_tensor, device: c_int) -> *mut C_tensor;
    fn nfrs_late(t: *const C_tensor) -> *mut c_void;
    fn nfrs_late_read(late: *const c_void) -> *mut C_tensor;
    fn nfrs_late_free(late: *mut c_void);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_as_they_were() {
        let there = upload(&[1.5, -2.0], Device::Cpu).unwrap();
        let late = Late::of(&there).unwrap();
        drop(there);
        assert_eq!(late.read().unwrap(), [1.5, -2.0]);
        assert_eq!(late.read().unwrap(), [1.5, -2.0]);
    }
}
