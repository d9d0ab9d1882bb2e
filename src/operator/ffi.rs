//! The boundary with the C++ shim: passes tensors, errors and panics from one side to the other.

use crate::cuda::{self, Device, Readiness};
use crate::error::{Error, Result};
use crate::host::CTensor;
use std::cell::RefCell;
use std::ffi::{c_char, c_int, CStr, CString};
use std::panic::AssertUnwindSafe;

thread_local! {
    /// The text of this thread's last error.
    static LAST: RefCell<CString> = RefCell::default();
}

/// Stores an error's text, which C++ gets from `nfrs_rust_error`. If the error is a Python exception, C++ gets the
/// exception back and rethrows it.
pub fn keep(e: Error) {
    let text = e.to_string().replace('\0', " ");
    if let Error::Raised(raised) = e {
        raised.give_back();
    }
    LAST.with(|last| *last.borrow_mut() = CString::new(text).expect("no NUL is left"));
}

/// Runs `work`, and turns a panic into an error, so that it unwinds neither into C++ nor into Python.
pub fn caught<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    std::panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| match panic.downcast::<Error>() {
        Ok(e) => Err(*e),
        Err(panic) => Err(Error::Torch(format!("normformer_rs panicked: {}", panic_text(&*panic)))),
    })
}

/// Runs a kernel for C++. Returns 0, or 1 for an error, or 3 for torch's NotImplementedError; the message is stored.
pub fn status(work: impl FnOnce() -> Result<()>) -> c_int {
    // A kernel may panic with an `Error` as its payload, if memory is short; `caught` returns that error.
    match caught(work) {
        Ok(()) => 0,
        Err(e) => {
            let status = if matches!(e, Error::NotImplemented(_)) { 3 } else { 1 };
            keep(e);
            status
        }
    }
}

/// Runs an operator's checks before its kernel. Returns a code of [`status`], or 2 for invalid arguments, for which C++
/// raises a ValueError.
pub fn status_of_plan(plan: impl FnOnce() -> Result<()>) -> c_int {
    let mut is_invalid = false;
    let status = status(|| plan().inspect_err(|e| is_invalid = matches!(e, Error::Invalid(_))));
    if is_invalid {
        2
    } else {
        status
    }
}

/// The struct `Span` of declared.h: an array that the other side owns.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Span<T> {
    data: *const T,
    length: usize,
}

impl<T> Span<T> {
    /// Lends an array, which must outlive the span's use.
    pub fn of(array: &[T]) -> Self {
        Span { data: array.as_ptr(), length: array.len() }
    }

    /// Leaks an array, because C++ may keep it for ever.
    pub fn kept(array: Vec<T>) -> Self {
        Span::of(array.leak())
    }

    /// Returns the array.
    ///
    /// # Safety
    /// The array lives for `'a`.
    pub unsafe fn get<'a>(&self) -> &'a [T] {
        if self.length == 0 {
            return &[];
        }
        std::slice::from_raw_parts(self.data, self.length)
    }
}

/// Converts a tch tensor into a C++ tensor, which the receiver must free.
pub fn into_raw(t: tch::Tensor) -> *mut CTensor {
    let mut t = std::mem::ManuallyDrop::new(t);
    t.as_mut_ptr().cast()
}

/// Returns a panic's message without the C++ stack trace that it may contain. The line ends of the trace are escaped,
/// because the panic quotes the error.
fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    let text = text.unwrap_or("unknown");
    text.split("\\nException raised from").next().unwrap_or(text)
}

/// Returns 1 if kernels run on a CUDA device. If they cannot, stores the reason and returns 0, or -1 if they are
/// required.
#[no_mangle]
extern "C" fn nfrs_cuda_ready(device: Device) -> c_int {
    let mut ready = 1;
    let status = status(|| {
        if let Readiness::Missing(why) = cuda::readiness(device)? {
            keep(Error::Torch(why));
            ready = 0;
        }
        Ok(())
    });
    if status == 0 {
        ready
    } else {
        -1
    }
}

/// True if CPU tensors are sent through the CUDA kernels, for tests.
#[no_mangle]
extern "C" fn nfrs_cuda_stand_in() -> bool {
    cuda::stand_in()
}

/// Returns this thread's last stored message, for C++.
#[no_mangle]
extern "C" fn nfrs_rust_error() -> *const c_char {
    LAST.with(|last| last.borrow().as_ptr())
}

extern "C" {
    fn nfrs_last_error() -> *const c_char;
}

/// Returns the C++ side's last error on this thread, without its stack trace.
pub fn shim_error() -> Error {
    // SAFETY: the shim returns a NUL-terminated thread-local string that lives until its next failing call.
    let text = unsafe { CStr::from_ptr(nfrs_last_error()) }.to_string_lossy().into_owned();
    Error::of_torch(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_panic_said_arrives() {
        let message = |work: fn() -> Result<()>| {
            assert_eq!(status(work), 1);
            // SAFETY: the text is NUL-terminated and belongs to this thread; it lives until the next failing call.
            unsafe { CStr::from_ptr(nfrs_rust_error()) }.to_string_lossy().into_owned()
        };
        assert_eq!(message(|| panic!("plain")), "normformer_rs panicked: plain");
        assert_eq!(message(|| panic!("row {}", 1 + 1)), "normformer_rs panicked: row 2");
        assert_eq!(message(|| Err(Error::invalid("no"))), "no");
        let refused = message(|| {
            crate::cpu::memory::filled(0u8, usize::MAX);
            Ok(())
        });
        assert!(refused.starts_with("not enough memory"), "{refused}");
    }

    #[test]
    fn a_panic_on_another_thread_arrives_too() {
        let status = status(|| {
            crate::cpu::parallel::for_each(64, 1, |r| assert!(!r.contains(&63), "the last row"));
            Ok(())
        });
        // SAFETY: the text is NUL-terminated and belongs to this thread; it lives until the next failing call.
        let text = unsafe { CStr::from_ptr(nfrs_rust_error()) }.to_string_lossy().into_owned();
        assert_eq!((status, text.as_str()), (1, "normformer_rs panicked: the last row"));
    }
}
