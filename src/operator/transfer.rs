//! Asynchronous transfers between host and device.

use super::call::values;
use super::engine::Handle;
use super::ffi::shim_error;
use crate::error::Result;
use crate::host::host;
use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use tch::{Device, Tensor};

/// Copies bytes from the host to a device, in stream order. The bytes pass through pinned memory, which torch's
/// allocator keeps until the transfer has ended.
pub fn upload(bytes: &[u8], device: Device) -> Result<Tensor> {
    static PIN: Handle = Handle::of_torch("aten::pin_memory");
    let host = Tensor::f_from_slice(bytes)?;
    match device {
        Device::Cuda(_) => {
            let [pinned] = PIN.call(&values![&host, None::<i64>])?;
            let (non_blocking, copy) = (true, false); // `copy` would force a copy on the same device
            Ok(pinned.f_to_device_(device, host.kind(), non_blocking, copy)?)
        }
        _ => Ok(host.f_to_device(device)?),
    }
}

/// Numbers that are being copied from a device to the host. Reading waits until the stream has passed the copy, but
/// not for work that was put on the stream later.
pub struct Pending {
    host: Tensor,
    /// An event that follows the copy; `None` if the numbers were already on the host.
    arrived: Option<Event>,
}

/// An event on a CUDA device's current stream.
struct Event(NonNull<c_void>);

impl Pending {
    /// Starts the copy of a tensor's numbers to the host.
    pub fn of(t: &Tensor) -> Result<Self> {
        let (non_blocking, copy) = (true, false);
        let host = t.f_to_device_(Device::Cpu, t.kind(), non_blocking, copy)?;
        let arrived = match t.device() {
            // SAFETY: the returned event belongs to this value.
            Device::Cuda(device) => {
                Some(Event(NonNull::new(unsafe { nfrs_event(device as c_int) }).ok_or_else(shim_error)?))
            }
            _ => None,
        };
        Ok(Pending { host, arrived })
    }

    /// Returns the numbers once they have arrived.
    pub fn read(&self) -> Result<Vec<f64>> {
        // SAFETY: the event is alive.
        if self.arrived.as_ref().is_some_and(|event| !unsafe { nfrs_event_wait(event.0.as_ptr()) }) {
            return Err(shim_error());
        }
        host("a number of the device's", &self.host)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: nfrs_event created it, and nobody else uses it.
        unsafe { nfrs_event_free(self.0.as_ptr()) }
    }
}

// These functions are in shim.cpp; null or false means failure.
extern "C" {
    fn nfrs_event(device: c_int) -> *mut c_void;
    fn nfrs_event_wait(event: *const c_void) -> bool;
    fn nfrs_event_free(event: *mut c_void);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_as_they_were() {
        let there = Tensor::from_slice(&[1.5, -2.0]);
        let pending = Pending::of(&there).unwrap();
        drop(there);
        assert_eq!(pending.read().unwrap(), [1.5, -2.0]);
        assert_eq!(pending.read().unwrap(), [1.5, -2.0]);
    }
}
