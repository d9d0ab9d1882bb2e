//! Streams of a device.

use super::ffi::shim_error;
use crate::error::Result;
use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::ptr::NonNull;

/// A stream of a CUDA device beside its current one, out of torch's.
pub struct SideStream(NonNull<c_void>);

// SAFETY: it is torch's plain number of a stream, which any thread may use.
unsafe impl Send for SideStream {}

impl SideStream {
    pub fn of(device: usize) -> Result<Self> {
        // SAFETY: what comes back is this one's own.
        NonNull::new(unsafe { nfrs_side_stream(device as c_int) }).map(SideStream).ok_or_else(shim_error)
    }

    /// Makes it this thread's current stream, and its device the current one, for as long as the result lives.
    pub fn enter(&self) -> Result<Entered<'_>> {
        // SAFETY: the stream is alive; what comes back is the Entered's own.
        let guard = NonNull::new(unsafe { nfrs_stream_enter(self.0.as_ptr()) }).ok_or_else(shim_error)?;
        Ok(Entered { guard, stream: PhantomData })
    }
}

impl Drop for SideStream {
    fn drop(&mut self) {
        // SAFETY: made by nfrs_side_stream, and nobody else's.
        unsafe { nfrs_stream_free(self.0.as_ptr()) }
    }
}

/// While it lives a stream is the thread's current one; then stream and device are what they were.
pub struct Entered<'a> {
    guard: NonNull<c_void>,
    stream: PhantomData<&'a SideStream>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        // SAFETY: made by nfrs_stream_enter in this thread (a pointer keeps it from leaving), and nobody else's.
        unsafe { nfrs_stream_leave(self.guard.as_ptr()) }
    }
}

extern "C" {
    fn nfrs_side_stream(device: c_int) -> *mut c_void;
    fn nfrs_stream_enter(stream: *const c_void) -> *mut c_void;
    fn nfrs_stream_leave(guard: *mut c_void);
    fn nfrs_stream_free(stream: *mut c_void);
}
