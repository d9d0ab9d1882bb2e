//! An exception of Python's that passed through C++: an error that keeps the object.

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

/// The exception, as C++ caught it.
pub struct Raised {
    exception: *mut c_void,
    text: String,
    /// What came of the work that it ended, once somebody has seen to that.
    pub ended: Option<Box<Error>>,
}

// SAFETY: a `std::exception_ptr` and a text, which any thread may drop: exceptions of Python's take its lock for that.
unsafe impl Send for Raised {}
// SAFETY: a shared reference reads the text alone.
unsafe impl Sync for Raised {}

impl Raised {
    /// This thread's last exception of Python's, if it became an error of this text.
    pub(super) fn take(text: &str) -> Option<Self> {
        let ended_by_nul = CString::new(text).ok()?;
        // SAFETY: the text outlives the call.
        let exception = unsafe { nfrs_take_raised(ended_by_nul.as_ptr()) };
        (!exception.is_null()).then(|| Raised { exception, text: text.to_string(), ended: None })
    }

    /// The same, with what came of the work that it ended.
    pub fn ended(mut self, with: Error) -> Self {
        self.ended = Some(Box::new(with));
        self
    }

    /// Gives it back to C++, which throws it again where it hands on an error of this text.
    pub fn give_back(mut self) {
        // SAFETY: C++ made it, and owns it again.
        unsafe { nfrs_return_raised(std::mem::replace(&mut self.exception, std::ptr::null_mut())) }
    }

    /// Makes it Python's current error. The caller holds Python's lock, and does so once.
    #[cfg(feature = "python")]
    pub fn restore(&self) {
        // SAFETY: C++ made it, and it lives.
        unsafe { nfrs_restore_raised(self.exception) }
    }
}

impl Drop for Raised {
    fn drop(&mut self) {
        // SAFETY: C++ made it, and nobody else drops it; null is nothing.
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
