//! A Python exception that passed through C++, kept as an error together with its Python object.

use super::Error;
use std::ffi::{c_char, c_void, CString};
use std::fmt;

// These functions are in shim.cpp; `raised` points to the object that C++ keeps for an exception.
extern "C" {
    fn nfrs_take_raised(text: *const c_char) -> *mut c_void;
    fn nfrs_drop_raised(raised: *mut c_void);
    fn nfrs_return_raised(raised: *mut c_void);
    #[cfg(feature = "python")]
    fn nfrs_restore_raised(raised: *const c_void);
}

/// The exception that C++ caught.
pub struct Raised {
    /// C++'s object; null after it has been given back.
    exception: *mut c_void,
    text: String,
    /// A second error, if the interrupted work failed once more while it ended, for example while it saved a
    /// checkpoint.
    pub ended: Option<Box<Error>>,
}

// SAFETY: any thread may drop a `std::exception_ptr` and a text; to drop a Python exception, C++ takes the GIL.
unsafe impl Send for Raised {}
// SAFETY: a shared reference only reads the text.
unsafe impl Sync for Raised {}

impl Raised {
    /// Takes this thread's last Python exception, if C++ reported it as the error `text`.
    pub(super) fn take(text: &str) -> Option<Self> {
        let c_text = CString::new(text).ok()?;
        // SAFETY: the text outlives the call.
        let exception = unsafe { nfrs_take_raised(c_text.as_ptr()) };
        (!exception.is_null()).then(|| Raised { exception, text: text.to_string(), ended: None })
    }

    /// Adds a second error, with which the interrupted work ended.
    pub fn ended(mut self, with: Error) -> Self {
        self.ended = Some(Box::new(with));
        self
    }

    /// Returns the exception to C++, which throws it again in place of an error with the same text.
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
