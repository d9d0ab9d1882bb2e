//! Smear: each embedding gets a share of the previous token's embedding (nanochat).

use super::{Builder, Context};
use crate::error::Result;
use crate::init::Fill;
use crate::parametrisation::SumsOver;
use tch::Tensor;

/// The number of columns of x that the gate reads; if x has fewer, the gate reads all of them.
const GATE_COLUMNS: i64 = 24;
/// The gate's weights are drawn uniformly between 0 and this bound.
const GATE_BOUND: f64 = 0.02;

/// x_t ← x_t + λσ(w·x_t)x_{t−1}, in which the gate w reads the first 24 columns. A sentence's first token stays as it
/// is.
pub struct Smear {
    /// The weight w of the gate, (1, columns).
    gate: Tensor,
    /// The factor λ, (1).
    scale: Tensor,
}

impl Smear {
    pub fn build(b: &mut Builder, d_model: i64) -> Result<Self> {
        let start = Fill::UpTo { bound: GATE_BOUND };
        let gate = b.within("smear_gate", |b| b.parameter("weight", &[1, GATE_COLUMNS.min(d_model)], &start))?;
        let scale = b.own("smear_scale", &[1], &Fill::Constant(0.0), SumsOver::Nothing)?;
        Ok(Smear { gate, scale })
    }

    /// Returns x (rows, d) after the addition. `before` holds the previous row of each row, or zeros where a sentence
    /// begins.
    pub fn apply(&self, x: &Tensor, before: &Tensor, ctx: &Context) -> Result<Tensor> {
        let read = x.f_narrow(-1, 0, self.gate.size()[1])?.f_contiguous()?;
        let gate = ctx.linear(&read, &self.gate, None)?.f_to_kind(x.kind())?.f_sigmoid()?;
        Ok(x.f_add(&gate.f_mul(&self.scale.f_to_kind(x.kind())?)?.f_mul(before)?)?)
    }
}
