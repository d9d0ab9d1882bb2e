//! Value embeddings: a table of rows by token, added to a layer's values through a gate (nanochat).

use super::{Builder, Context};
use crate::error::Result;
use crate::init::{Fill, Init, Role};
use crate::residual::{LayerContext, Sublayer};
use tch::Tensor;

/// The number of columns of attention's input that the gate reads, or all of a narrower input.
const GATE_COLUMNS: i64 = 12;
/// The gate's largest value.
const LARGEST: f64 = 3.0;
/// The bound of the gate's first weights, which are uniform from 0.
const GATE_BOUND: f64 = 0.02;

/// v ← v + 3σ(W_g x)⊙E[token], with x the first 12 columns of attention's input and one gate for each head of values.
pub struct ValueEmbedding {
    /// E, (V, kv_width).
    table: Tensor,
    /// W_g, (kv_heads, columns).
    gate: Tensor,
}

impl ValueEmbedding {
    /// Builds the table and gate of the place's self-attention, `None` where it has none: every second layer has one,
    /// the last among them.
    pub fn build(b: &mut Builder, place: &LayerContext, init: &Init) -> Result<Option<Self>> {
        let is_here = place.sublayer == Sublayer::SelfAttention && (place.layers() - 1 - place.layer) % 2 == 0;
        let Some(vocab_size) = place.model.value_embeddings.filter(|_| is_here) else { return Ok(None) };
        let (width, heads) = (place.kv_width(), place.model.kv_heads);
        let as_values = init.matrix(Role::Value, place.model.d_model, width, place);
        let table = b.within("value_embedding", |b| b.parameter("weight", &[vocab_size, width], &as_values))?;
        let columns = GATE_COLUMNS.min(place.model.d_model);
        let start = Fill::UpTo { bound: GATE_BOUND };
        let gate = b.within("value_gate", |b| b.parameter("weight", &[heads, columns], &start))?;
        Ok(Some(ValueEmbedding { table, gate }))
    }

    /// Returns the values v (rows, kv_width) of attention's input x (rows, d) with those of the tokens added.
    pub fn added(&self, v: Tensor, x: &Tensor, ctx: &Context) -> Result<Tensor> {
        let read = x.f_narrow(-1, 0, self.gate.size()[1])?.f_contiguous()?;
        let gate = ctx.linear(&read, &self.gate, None)?.f_sigmoid()?.f_mul_scalar(LARGEST)?;
        let rows = Tensor::f_embedding(&self.table, ctx.tokens()?, -1, false, false)?.f_to_kind(v.kind())?;
        let heads = rows.f_unflatten(-1, [gate.size()[1], -1].as_slice())?;
        Ok(v.f_add(&heads.f_mul(&gate.f_unsqueeze(-1)?)?.f_flatten(-2, -1)?)?)
    }
}
