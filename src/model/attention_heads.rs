//! The heads of an attention as QK-clip sees them: their largest logits, and their rows of the projections
//! (docs/spec.md §4.9).

use crate::error::Result;
use tch::Tensor;

pub struct AttentionHeads {
    /// The name of the attention, such as "decoder.layers.0.self_attn".
    pub name: String,
    /// The stacked projections to queries, keys and values, (d + 2·kv_width, d), and their biases.
    pub(super) weight: Tensor,
    pub(super) bias: Option<Tensor>,
    pub kv_heads: i64,
    /// The largest logit of each head so far: the largest scaled score among the pairs that softmax sees, (heads).
    pub largest: Tensor,
}

impl AttentionHeads {
    /// Returns the same heads, which share the tensors.
    pub fn shallow_clone(&self) -> Self {
        let AttentionHeads { name, weight, bias, kv_heads, largest } = self;
        AttentionHeads {
            name: name.clone(),
            weight: weight.shallow_clone(),
            bias: bias.as_ref().map(Tensor::shallow_clone),
            kv_heads: *kv_heads,
            largest: largest.shallow_clone(),
        }
    }

    /// Multiplies the key projection of each head of keys, and the projections of the query heads that share it, by the
    /// head's factor; `factors` is (kv_heads). Projections to values stay as they are.
    pub fn scale(&self, factors: &Tensor) -> Result<()> {
        let d = self.weight.size()[1];
        let factors = factors.f_unsqueeze(-1)?;
        for stacked in [Some(&self.weight), self.bias.as_ref()].into_iter().flatten() {
            let key_rows = (stacked.size()[0] - d) / 2; // values have as many rows as keys
            let (queries, keys) = ((0, d), (d, key_rows)); // the first row and the number of rows
            for (start, rows) in [queries, keys] {
                // The query heads that share a key head are consecutive, so each row here is one key head's part.
                let by_head = stacked.f_narrow(0, start, rows)?.f_view([self.kv_heads, -1].as_slice())?;
                let _ = by_head.shallow_clone().f_mul_(&factors)?;
            }
        }
        Ok(())
    }
}
