//! Every Transformer normalisation, residual scheme and initialisation, for PyTorch: operators, a Transformer and its
//! training loop on libtorch tensors. The modules stand in groups, from the ground up.

// Python's bindings are the crate's only user: tests are compiled without them.
#![cfg_attr(not(feature = "python"), allow(dead_code, unused_imports))]

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
