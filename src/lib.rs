//! Transformer normalisations, residual schemes and initialisations for PyTorch: operators, a Transformer, and its
//! training loop on libtorch tensors. The modules below are in groups; a module uses its own group and those above it.

// Only the Python bindings on x86-64 use the whole crate. Tests are compiled without the bindings, so many items look
// unused there. On aarch64 the code that chooses between x86 instruction sets looks unused, too.
#![cfg_attr(not(all(feature = "python", target_arch = "x86_64")), allow(dead_code, unused_imports))]

mod atomic;
mod error;
mod host;
mod options;
mod ownership;
#[cfg(test)]
mod testing;

mod cpu;
mod cuda;
mod kernel;
mod operator;

mod analysis;
mod config;
mod init;
mod norm;
mod parametrisation;
mod residual;

mod model;

mod data;
mod metrics;
mod run;
mod search;
mod train;

#[cfg(feature = "python")]
mod bindings;
