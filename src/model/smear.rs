//! Smear: each embedding gets a share of the previous token's embedding (nanochat).

use super::column_gate::ColumnGate;
use super::{Builder, Context};
use crate::error::Result;
use crate::init::Fill;
use crate::parametrisation::SumsOver;
use tch::Tensor;

/// The number of columns of x that the gate reads.
const GATE_COLUMNS: i64 = 24;

/// x_t ← x_t + λσ(w·x_t)x_{t−1}, in which w reads only the first 24 columns of x_t. The first token of a sentence does
/// not change.
pub struct Smear {
    gate: ColumnGate,
    /// The factor λ, (1).
    scale: Tensor,
}

impl Smear {
    /// Declares the gate and λ, which begins at 0, so that embeddings do not change at first.
    pub fn build(b: &mut Builder, d_model: i64) -> Result<Self> {
        let gate = ColumnGate::build(b, "smear_gate", 1, GATE_COLUMNS, d_model)?;
        let scale = b.own("smear_scale", &[1], &Fill::Constant(0.0), SumsOver::Nothing)?;
        Ok(Smear { gate, scale })
    }

    /// Returns x (rows, d) after the addition. `before` holds the previous row of each row, or zeros where a sentence
    /// begins.
    pub fn apply(&self, x: &Tensor, before: &Tensor, ctx: &Context) -> Result<Tensor> {
        let gate = self.gate.of(x, ctx)?.f_to_kind(x.kind())?; // σ(w·x), (rows, 1)
        Ok(x.f_add(&gate.f_mul(&self.scale.f_to_kind(x.kind())?)?.f_mul(before)?)?)
    }
}
