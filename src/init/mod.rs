//! Initialisations of the linear layers: one table (SPEC §3). γ = 1, β = 0 and biases 0 whatever the name.

mod schemes;

pub use schemes::DsInitMode;

use crate::config::TransformerConfig;
use crate::error::{unknown, Result};
use crate::residual::Place;

/// What a weight matrix is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Query,
    Key,
    Value,
    AttentionOutput,
    FeedForward1,
    FeedForward2,
}

/// Where a parameter's first values come from.
#[derive(Clone, Debug)]
pub enum Fill {
    Constant(f64),
    Normal {
        std: f64,
    },
    /// Uniform in ±bound.
    Uniform {
        bound: f64,
    },
    /// Consecutive blocks of that many rows, each with its own fill: q, k and v in one matrix.
    Rows(Vec<(i64, Fill)>),
    /// Row r of a square matrix: 1/(r + 1) up to the diagonal, 0 after it.
    RunningMean,
    /// The fill with one row zero: an embedding's padding.
    WithZeroRow(i64, Box<Fill>),
}

/// A table of word embeddings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    Source,
    Target,
    Shared,
}

/// An entry of the table.
#[derive(Clone, Copy)]
pub struct Init {
    pub name: &'static str,
    pub definition: &'static str,
    pub source: &'static str,
    /// The fill of an (fan_out, fan_in) matrix.
    pub linear: fn(Role, fan_in: i64, fan_out: i64, &Place) -> Fill,
    /// The fill of word embeddings, (V, d).
    pub embedding: fn(Table, &TransformerConfig) -> Fill,
    /// The fill of an output projection that is not tied to an embedding, (V, d).
    pub output: fn(d_model: i64, vocab_size: i64) -> Fill,
}

/// Every initialisation that models may name.
pub static INITS: &[&Init] = &[
    &schemes::XAVIER,
    &schemes::SMALL,
    &schemes::FAIRSEQ,
    &schemes::DEEPNORM,
    &schemes::SUBLN,
    &schemes::DS_INIT,
    &schemes::T_FIXUP,
    &schemes::R_FIXUP,
];

/// The table's entry of that name.
pub fn find(name: &str) -> Result<&'static Init> {
    INITS.iter().copied().find(|i| i.name == name).ok_or_else(|| unknown("init", name, INITS.iter().map(|i| i.name)))
}

/// Xavier's normal distribution: std = gain·√(2/(fan_in + fan_out)).
pub fn xavier_normal(gain: f64, fan_in: i64, fan_out: i64) -> Fill {
    Fill::Normal { std: gain * (2.0 / (fan_in + fan_out) as f64).sqrt() }
}

/// Xavier's uniform distribution: bound = gain·√(6/(fan_in + fan_out)).
pub fn xavier_uniform(gain: f64, fan_in: i64, fan_out: i64) -> Fill {
    Fill::Uniform { bound: gain * (6.0 / (fan_in + fan_out) as f64).sqrt() }
}

/// Word embeddings: N(0, 1/d).
pub fn embedding(d_model: i64) -> Fill {
    Fill::Normal { std: (d_model as f64).powf(-0.5) }
}
