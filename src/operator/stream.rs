//! CUDA streams.

use super::ffi::shim_error;
use crate::error::Result;
use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::ptr::NonNull;

/// A stream from torch's pool, other than the device's current stream.
pub struct SideStream {
    device: c_int,
    /// The number by which torch identifies the stream.
    number: i64,
}

impl SideStream {
    /// Takes a stream of the CUDA device with this index.
    pub fn of(device: usize) -> Result<Self> {
        let device = device as c_int;
        // SAFETY: the function takes plain numbers.
        match unsafe { nfrs_side_stream(device) } {
            0 => Err(shim_error()),
            number => Ok(SideStream { device, number }),
        }
    }

    /// Makes this stream and its device the thread's current ones, as long as the returned guard lives.
    pub fn enter(&self) -> Result<StreamGuard<'_>> {
        // SAFETY: torch's streams are never freed; the returned pointer belongs to this guard.
        let guard = NonNull::new(unsafe { nfrs_stream_enter(self.device, self.number) }).ok_or_else(shim_error)?;
        Ok(StreamGuard { guard, stream: PhantomData })
    }
}

/// A guard that lives while a stream is the thread's current one. Its drop restores the old stream and device.
pub struct StreamGuard<'a> {
    guard: NonNull<c_void>,
    stream: PhantomData<&'a SideStream>,
}

impl Drop for StreamGuard<'_> {
    fn drop(&mut self) {
        // SAFETY: nfrs_stream_enter created it in this thread (the pointer keeps the guard there); nobody else uses it.
        unsafe { nfrs_stream_leave(self.guard.as_ptr()) }
    }
}

// These functions are in shim.cpp; 0 or null means failure.
extern "C" {
    fn nfrs_side_stream(device: c_int) -> i64;
    fn nfrs_stream_enter(device: c_int, stream: i64) -> *mut c_void;
    fn nfrs_stream_leave(guard: *mut c_void);
}
