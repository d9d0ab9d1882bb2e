//! The border with the C++ shim: the structs both sides share, and how errors cross it.

use crate::cpu::philox::{Dropout, Stream};
use crate::cuda::{self, Device, Readiness};
use crate::error::{Error, Result};
use std::cell::RefCell;
use std::ffi::{c_char, c_int, CStr, CString};
use std::panic::AssertUnwindSafe;
use torch_sys::C_tensor;

/// A matrix of the C++ side: `rows` rows of `cols` numbers, `stride` apart. `data` is null where a tensor is absent.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct View {
    pub data: *mut u8,
    pub rows: i64,
    pub cols: i64,
    pub stride: i64,
    pub dtype: i32,
    /// A CUDA device's number, or -1: the CPU.
    device: i32,
}

impl View {
    pub const ABSENT: View = View { data: std::ptr::null_mut(), rows: 0, cols: 0, stride: 0, dtype: -1, device: -1 };

    /// The CUDA device it lies on.
    pub fn device(&self) -> Option<Device> {
        (self.device >= 0).then_some(self.device)
    }

    pub fn is_absent(&self) -> bool {
        self.data.is_null()
    }

    pub fn rows(&self) -> usize {
        self.rows as usize
    }

    pub fn cols(&self) -> usize {
        self.cols as usize
    }

    fn len(&self) -> usize {
        match (self.rows, self.cols) {
            (0, _) | (_, 0) => 0,
            (rows, cols) => ((rows - 1) * self.stride + cols) as usize,
        }
    }

    /// # Safety
    /// The view's dtype is T, the shim keeps the tensor alive for `'a`, and nobody writes it meanwhile.
    pub unsafe fn slice<'a, T>(&self) -> &'a [T] {
        if self.is_absent() || self.len() == 0 {
            return &[];
        }
        std::slice::from_raw_parts(self.data.cast(), self.len())
    }

    /// # Safety
    /// As [`slice`](Self::slice), and this is the tensor's only slice.
    pub unsafe fn slice_mut<'a, T>(&self) -> &'a mut [T] {
        if self.is_absent() || self.len() == 0 {
            return &mut [];
        }
        std::slice::from_raw_parts_mut(self.data.cast(), self.len())
    }
}

/// What dropout needs.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Draw {
    pub p: f64,
    pub seed: i64,
    pub update: i64,
    pub micro_batch: i64,
    pub site: i64,
    /// The first three once more, where a GPU's kernel reads them.
    pub device_seed: *const i64,
}

impl Draw {
    pub const NONE: Draw = Draw { p: 0.0, seed: 0, update: 0, micro_batch: 0, site: 0, device_seed: std::ptr::null() };

    pub fn dropout(&self) -> Option<Dropout> {
        let stream = Stream {
            seed: self.seed as u64,
            update: self.update as u32,
            micro_batch: self.micro_batch as u16,
            site: self.site as u16,
        };
        Dropout::new(self.p, stream)
    }
}

/// Calls `$body` with `$E` standing for the element type of a view's dtype.
macro_rules! by_dtype {
    ($view:expr, $E:ident => $body:expr) => {
        match $view.dtype {
            0 => {
                type $E = f32;
                $body
            }
            1 => {
                type $E = f64;
                $body
            }
            2 => {
                type $E = half::bf16;
                $body
            }
            3 => {
                type $E = half::f16;
                $body
            }
            other => Err($crate::error::Error::Torch(format!("dtype code {other} has no kernel"))),
        }
    };
}
pub(crate) use by_dtype;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

fn keep(e: Error) {
    let text = e.to_string().replace('\0', " ");
    LAST.with(|last| *last.borrow_mut() = CString::new(text).expect("no NUL is left"));
}

/// Runs a kernel for C++: 0, or 1 with the message kept. A panic becomes such a message, it never unwinds into C++.
pub fn status(work: impl FnOnce() -> Result<()>) -> c_int {
    match std::panic::catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => 0,
        Ok(Err(e)) => {
            keep(e);
            1
        }
        Err(panic) => {
            keep(match panic.downcast::<Error>() {
                Ok(e) => *e,
                Err(panic) => Error::Torch(format!("a kernel panicked: {}", panic_text(&*panic))),
            });
            1
        }
    }
}

/// Makes a tensor for C++, which takes it over: null with the message kept where that failed.
pub fn give(work: impl FnOnce() -> Result<tch::Tensor>) -> *mut C_tensor {
    let mut made = std::ptr::null_mut();
    status(|| {
        made = into_raw(work()?);
        Ok(())
    });
    made
}

/// The C++ tensor behind a tch tensor, owned by whoever takes it.
pub fn into_raw(t: tch::Tensor) -> *mut C_tensor {
    let mut t = std::mem::ManuallyDrop::new(t);
    t.as_mut_ptr()
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied()).unwrap_or("unknown")
}

/// Whether kernels run on a CUDA device: 1, or 0 and -1 (they must, and cannot) with the reason kept.
#[no_mangle]
extern "C" fn nfrs_cuda_ready(device: Device) -> c_int {
    let mut ready = 1;
    let asked = status(|| {
        if let Readiness::Missing(why) = cuda::readiness(device)? {
            keep(Error::Torch(why));
            ready = 0;
        }
        Ok(())
    });
    if asked == 0 {
        ready
    } else {
        -1
    }
}

/// Whether tensors of the CPU take the CUDA kernels' way.
#[no_mangle]
extern "C" fn nfrs_cuda_stand_in() -> bool {
    cuda::stand_in()
}

/// Blocks that may sum over rows on a device, which has passed [`nfrs_cuda_ready`].
#[no_mangle]
extern "C" fn nfrs_cuda_blocks(device: Device) -> i64 {
    cuda::Layout::most_blocks(cuda::multiprocessors(device).unwrap_or(1)).into()
}

/// This thread's last message, for C++.
#[no_mangle]
extern "C" fn nfrs_rust_error() -> *const c_char {
    LAST.with(|last| last.borrow().as_ptr())
}

extern "C" {
    fn nfrs_last_error() -> *const c_char;
}

/// This thread's last message of the C++ side, without the C++ stack.
pub fn shim_error() -> Error {
    // SAFETY: the shim returns a NUL-terminated thread-local string that lives until its next failing call.
    let text = unsafe { CStr::from_ptr(nfrs_last_error()) }.to_string_lossy().into_owned();
    tch::TchError::Torch(text).into()
}

/// Takes over a tensor that the shim made, or its error.
///
/// # Safety
/// `made` is null or a new `at::Tensor` that nobody else frees.
pub unsafe fn take(made: *mut C_tensor) -> Result<tch::Tensor> {
    if made.is_null() {
        return Err(shim_error());
    }
    Ok(tch::Tensor::from_ptr(made))
}

/// The pointer of an optional tensor, null where there is none.
pub fn pointer(t: Option<&tch::Tensor>) -> *const C_tensor {
    t.map_or(std::ptr::null(), tch::Tensor::as_ptr)
}

/// A tensor of the C++ side, by a reference of our own.
///
/// # Safety
/// `t` is null or points to a live `at::Tensor`.
pub unsafe fn borrow(t: *const C_tensor) -> Option<tch::Tensor> {
    (!t.is_null()).then(|| tch::Tensor::clone_from_ptr(t.cast_mut()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_panic_said_arrives() {
        let said = |work: fn() -> Result<()>| {
            assert_eq!(status(work), 1);
            // SAFETY: a NUL-terminated string of this thread, which lives until its next failing call.
            unsafe { CStr::from_ptr(nfrs_rust_error()) }.to_string_lossy().into_owned()
        };
        assert_eq!(said(|| panic!("plain")), "a kernel panicked: plain");
        assert_eq!(said(|| panic!("row {}", 1 + 1)), "a kernel panicked: row 2");
        assert_eq!(said(|| Err(Error::invalid("no"))), "no");
        let refused = said(|| {
            crate::cpu::memory::filled(0u8, usize::MAX);
            Ok(())
        });
        assert!(refused.starts_with("not enough memory"), "{refused}");
    }

    #[test]
    fn a_panic_on_another_thread_arrives_too() {
        let failed = status(|| {
            crate::cpu::parallel::for_each(64, 1, |r| assert!(!r.contains(&63), "the last row"));
            Ok(())
        });
        // SAFETY: as above.
        let text = unsafe { CStr::from_ptr(nfrs_rust_error()) }.to_string_lossy().into_owned();
        assert_eq!((failed, text.as_str()), (1, "a kernel panicked: the last row"));
    }
}
