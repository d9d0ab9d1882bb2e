//! Every Transformer normalisation, residual scheme and initialisation, for PyTorch: operators, a Transformer and its
//! training loop on libtorch tensors. The modules stand in groups, from the ground up.

pub mod atomic;
pub mod error;
pub mod host;
pub mod options;
pub mod ownership;
#[cfg(test)]
mod testing;

pub mod cpu;
pub mod cuda;
pub mod kernel;
pub mod operator;

pub mod analysis;
pub mod config;
pub mod init;
pub mod norm;
pub mod parametrisation;
pub mod residual;

pub mod model;

pub mod data;
pub mod metrics;
pub mod run;
pub mod search;
pub mod train;

#[cfg(feature = "python")]
mod bindings;
