//! The base of all CPU kernels: storage types, instruction sets chosen at run time, memory, random numbers, threads.

pub mod amx;
/// Outside Linux torch uses another OpenMP. Its waits cannot be shortened in the same way, so no watch starts.
#[cfg(not(target_os = "linux"))]
pub mod contention {
    pub use std::convert::Infallible as ContentionWatch;

    pub fn watch() -> Option<ContentionWatch> {
        None
    }
}
#[cfg(target_os = "linux")]
pub mod contention;
pub mod convert;
pub mod element;
pub mod memory;
pub mod pack;
pub mod pages;
pub mod parallel;
pub mod philox;
pub mod simd;

pub use element::{Accumulator, Element};
