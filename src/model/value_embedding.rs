//! Value embeddings: each token has a row in a table, which a gate adds to a layer's values (nanochat).

use super::column_gate::ColumnGate;
use super::{Builder, Context};
use crate::error::Result;
use crate::init::{Init, Role};
use crate::residual::{LayerContext, Sublayer};
use tch::Tensor;

/// The number of columns of attention's input that the gate reads.
const GATE_COLUMNS: i64 = 12;
/// The largest value that the gate can have.
const LARGEST: f64 = 3.0;

/// v ← v + 3σ(W_g x)⊙E[token], where x is the first 12 columns of attention's input. Each head of values has one gate.
pub struct ValueEmbedding {
    /// The table E, (V, kv_width).
    table: Tensor,
    gate: ColumnGate,
}

impl ValueEmbedding {
    /// Builds the table and the gate for the self-attention of this place. Only every second layer has them, counted
    /// down from the last layer, which has them; returns `None` for the others.
    pub fn build(b: &mut Builder, place: &LayerContext, init: &Init) -> Result<Option<Self>> {
        let is_here = place.sublayer == Sublayer::SelfAttention && (place.layers() - 1 - place.layer) % 2 == 0;
        let Some(vocab_size) = place.model.value_embeddings.filter(|_| is_here) else { return Ok(None) };
        let (width, heads) = (place.kv_width(), place.model.kv_heads);
        // The table's initial values are those of a projection to values.
        let as_values = init.matrix(Role::Value, place.model.d_model, width, place);
        let table = b.within("value_embedding", |b| b.parameter("weight", &[vocab_size, width], &as_values))?;
        let gate = ColumnGate::build(b, "value_gate", heads, GATE_COLUMNS, place.model.d_model)?;
        Ok(Some(ValueEmbedding { table, gate }))
    }

    /// Returns the values v (rows, kv_width), with the value embeddings of the rows' tokens added; x (rows, d) is
    /// attention's input.
    pub fn added(&self, v: Tensor, x: &Tensor, ctx: &Context) -> Result<Tensor> {
        let gate = self.gate.of(x, ctx)?.f_mul_scalar(LARGEST)?; // (rows, heads of values)
        let (padding_id, scale_grad_by_freq, sparse) = (-1, false, false); // −1: no id counts as padding
        let rows = Tensor::f_embedding(&self.table, ctx.tokens()?, padding_id, scale_grad_by_freq, sparse)?;
        let rows = rows.f_to_kind(v.kind())?;
        let by_head = rows.f_unflatten(-1, [gate.size()[1], -1].as_slice())?;
        Ok(v.f_add(&by_head.f_mul(&gate.f_unsqueeze(-1)?)?.f_flatten(-2, -1)?)?)
    }
}
