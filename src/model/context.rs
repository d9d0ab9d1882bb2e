//! What a forward pass must know beside its inputs.

use crate::config::TransformerConfig;
use crate::norm::Rows;
use std::cell::Cell;
use tch::{Kind, Tensor};

/// Dropout rates.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rates {
    pub embedding: f64,
    pub attention: f64,
    pub activation: f64,
    pub residual: f64,
}

impl Rates {
    pub fn of(config: &TransformerConfig) -> Self {
        let or = |p: Option<f64>| p.unwrap_or(config.dropout);
        Rates {
            embedding: or(config.embedding_dropout),
            attention: or(config.attention_dropout),
            activation: or(config.activation_dropout),
            residual: config.dropout,
        }
    }
}

/// One forward pass: training or not, its random numbers, its computing type.
pub struct Context {
    pub train: bool,
    pub rates: Rates,
    /// int64 (seed, update, micro-batch); none: no dropout.
    pub seed: Option<Tensor>,
    /// The type of matrix products; residual stream and statistics keep their own.
    pub kind: Kind,
    /// Gains on x are being set by profiling (SPEC §3, `admin`).
    pub profile: bool,
    site: Cell<i64>,
}

impl Context {
    /// Evaluation: nothing is dropped.
    pub fn evaluation(kind: Kind) -> Self {
        Context { train: false, rates: Rates::default(), seed: None, kind, profile: false, site: Cell::new(0) }
    }

    pub fn training(rates: Rates, seed: Tensor, kind: Kind) -> Self {
        Context { train: true, rates, seed: Some(seed), kind, profile: false, site: Cell::new(0) }
    }

    /// The same pass, setting gains by profiling.
    pub fn profiling(self) -> Self {
        Context { profile: true, ..self }
    }

    /// The next dropout site: sites are numbered in order of execution, whether or not their rate is zero.
    pub fn site(&self) -> i64 {
        self.site.replace(self.site.get() + 1)
    }

    /// Packed rows: all of them real.
    pub fn rows(&self) -> Rows<'static> {
        Rows { train: self.train, pad_mask: None }
    }
}
