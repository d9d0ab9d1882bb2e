//! A Python exception that passed through C++, kept as an error together with its Python object.

use super::Error;
use std::ffi::{c_char, c_void, CString};
use std::fmt;

extern "C" {
    fn nfrs_take_raised(text: *const c_char) -> *mut c_void;
    fn nfrs_drop_raised(raised: *mut c_void);
    fn nfrs_return_raised(raised: *mut c_void);
    #[cfg(feature = "python")]
    fn nfrs_restore_raised(raised: *const c_void);
}

/// The exception that C++ caught.
pub struct Raised {
    exception: *mut c_void,
    text: String,
    /// A further error, set later: the one with which the work ended after the exception was handled.
    pub ended: Option<Box<Error>>,
}

// SAFETY: any thread may drop a `std::exception_ptr` and a text; to drop a Python exception, C++ takes the GIL.
unsafe impl Send for Raised {}
// SAFETY: a shared reference only reads the text.
unsafe impl Sync for Raised {}

impl Raised {
    /// Takes this thread's last Python exception, if `text` is the error text that it became.
    pub(super) fn take(text: &str) -> Option<Self> {
        let ended_by_nul = CString::new(text).ok()?;
        // SAFETY: the text outlives the call.
        let exception = unsafe { nfrs_take_raised(ended_by_nul.as_ptr()) };
        (!exception.is_null()).then(|| Raised { exception, text: text.to_string(), ended: None })
    }

    /// Adds the error with which the work ended after the exception was handled.
    pub fn ended(mut self, with: Error) -> Self {
        self.ended = Some(Box::new(with));
        self
    }

    /// Returns the exception to C++, which throws it again when C++ reports an error with this text.
    pub fn give_back(mut self) {
        // SAFETY: C++ made the exception, and takes its ownership back.
        unsafe { nfrs_return_raised(std::mem::replace(&mut self.exception, std::ptr::null_mut())) }
    }

    /// Sets the exception as Python's current error. The caller holds the GIL and calls this once.
    #[cfg(feature = "python")]
    pub fn restore(&self) {
        // SAFETY: C++ made the exception, and it is still alive.
        unsafe { nfrs_restore_raised(self.exception) }
    }
}

impl Drop for Raised {
    fn drop(&mut self) {
        // SAFETY: C++ made the exception, and nobody else drops it; null is ignored.
        unsafe { nfrs_drop_raised(self.exception) }
    }
}

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for Raised {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Raised({:?})", self.text)
    }
}
