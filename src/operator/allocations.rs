//! Measures the memory of tensors: torch reports every block that a thread allocates or frees.

use crate::error::{Error, Result};
use std::ffi::c_void;

/// Runs `work`. Returns its result, and the peak size in bytes of the tensors that it allocated.
///
/// Backward passes on the CPU are counted too, because they run on this thread. While `work` runs, an active torch
/// profiler receives no reports of memory.
pub fn peak_of<T>(work: impl FnOnce() -> Result<T>) -> Result<(T, usize)> {
    let counter = Counter::new()?;
    let result = work()?;
    Ok((result, counter.peak()))
}

/// A C++ counter of this thread's allocations, which counts until it is dropped.
struct Counter(*mut c_void);

impl Counter {
    /// Starts counting the allocations of this thread.
    fn new() -> Result<Self> {
        // SAFETY: the function takes no arguments, and the counter belongs to us until `drop`.
        let counter = unsafe { nfrs_count_memory() };
        if counter.is_null() {
            return Err(Error::Torch("memory cannot be counted".into()));
        }
        Ok(Counter(counter))
    }

    /// Returns the largest number of bytes that were allocated at once since `new`.
    fn peak(&self) -> usize {
        // SAFETY: `new` created the counter, and `drop` has not run.
        unsafe { nfrs_counted_peak(self.0) }.max(0) as usize
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        // SAFETY: `new` created the counter on this thread; a type with a raw pointer is not Send, so it is still on
        // this thread.
        unsafe { nfrs_count_end(self.0) }
    }
}

// These functions are in shim.cpp.
extern "C" {
    fn nfrs_count_memory() -> *mut c_void;
    fn nfrs_counted_peak(counter: *const c_void) -> i64;
    fn nfrs_count_end(counter: *mut c_void);
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind, Tensor};

    #[test]
    fn what_lives_at_once_is_counted() {
        let numbers = |n: i64| Tensor::zeros([n], (Kind::Float, Device::Cpu));
        let before = numbers(1000);
        let (kept, peak) = peak_of(|| {
            drop(numbers(5000));
            drop(before);
            let _large = numbers(3000);
            Ok(numbers(4000))
        })
        .unwrap();
        assert_eq!((kept.numel(), peak), (4000, 7000 * 4));
        assert_eq!(peak_of(|| Ok(())).unwrap().1, 0);
    }

    #[test]
    fn a_backward_pass_is_counted() {
        let x = Tensor::ones([1000], (Kind::Double, Device::Cpu)).set_requires_grad(true);
        let ((), peak) = peak_of(|| {
            x.exp().exp().sum(Kind::Double).backward();
            Ok(())
        })
        .unwrap();
        assert!((3 * 8000..5 * 8000).contains(&peak), "{peak}");
    }
}
