//! QK-clip: after each update, the queries and keys of heads whose largest logit exceeds τ shrink (Kimi Team 2025;
//! docs/spec.md §4.9).

use crate::error::Result;
use crate::model::{AttentionHeads, Parameters};
use crate::operator::ProcessGroup;
use tch::{no_grad, Kind, Tensor};

/// The limit for logits, and the attentions whose queries and keys it scales.
pub struct QkClip {
    /// τ, the largest logit that stays as it is.
    limit: f64,
    /// The largest logit of each head since the last update, (attentions, heads); −∞ before the first logit.
    largest: Tensor,
    attentions: Vec<AttentionHeads>,
}

impl QkClip {
    /// Moves the largest logits of all attentions into one tensor, so that one collective operation, or one copy to the
    /// host, transfers all of them.
    pub fn new(parameters: &Parameters, limit: f64) -> Result<Self> {
        let attentions: Vec<_> = parameters.attentions().iter().map(AttentionHeads::shallow_clone).collect();
        let largest = Tensor::f_stack(&attentions.iter().map(|heads| &heads.largest).collect::<Vec<_>>(), 0)?;
        for (row, heads) in attentions.iter().enumerate() {
            // The attention's own tensor now refers to a row of the joint tensor.
            heads.largest.shallow_clone().f_set_data(&largest.f_select(0, row as i64)?)?;
        }
        Ok(QkClip { limit, largest, attentions })
    }

    /// Replaces every rank's largest logits by the largest of all ranks.
    pub fn join_ranks(&mut self, group: ProcessGroup) -> Result<()> {
        group.largest_in_place(&mut self.largest)
    }

    /// Returns the names of all heads: the attention's name and the head's number.
    pub fn heads(&self) -> Vec<String> {
        let count = self.largest.size()[1];
        self.attentions.iter().flat_map(|heads| (0..count).map(|head| format!("{}.{head}", heads.name))).collect()
    }

    /// Returns the largest logits in the order of [`heads`](Self::heads), f64.
    pub fn largest(&self) -> Result<Tensor> {
        Ok(self.largest.f_flatten(0, -1)?.f_to_kind(Kind::Double)?)
    }

    /// Returns the largest logit of all heads, 0-dim f64.
    pub fn largest_of_all(&self) -> Result<Tensor> {
        Ok(self.largest.f_max()?.f_to_kind(Kind::Double)?)
    }

    /// Multiplies the queries and keys of each head by √min(1, τ/S), where S is the largest logit of all heads that
    /// share the head's keys. `is_alive` is given on a GPU; if it is false there, because an update was not finite,
    /// nothing changes.
    pub fn apply(&self, is_alive: Option<&Tensor>) -> Result<()> {
        no_grad(|| {
            for (row, heads) in self.attentions.iter().enumerate() {
                // Each row of `logits` has the heads of queries that share one head of keys.
                let logits = self.largest.f_select(0, row as i64)?.f_view([heads.kv_heads, -1].as_slice())?;
                let group_largest = logits.f_amax([-1i64].as_slice(), false)?;
                // √(τ/S) for each head of keys.
                let root = group_largest.f_full_like(self.limit)?.f_div(&group_largest)?.f_sqrt()?;
                // Neither NaN nor −∞, which stands for no logits, exceeds the limit, so the factor is then 1.
                let exceeds = group_largest.f_gt(self.limit)?;
                let is_scaled = is_alive.map_or(Ok(exceeds.shallow_clone()), |alive| exceeds.f_logical_and(alive))?;
                heads.scale(&root.f_where_self(&is_scaled, &root.f_ones_like()?)?)?;
            }
            Ok(())
        })
    }

    /// Resets the largest logits after an update.
    pub fn forget(&mut self) -> Result<()> {
        let _ = self.largest.f_fill_(f64::NEG_INFINITY)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::from_json;
    use crate::model::Transformer;
    use tch::Device;

    const LIMIT: f64 = 2.0;

    /// Returns a model with two heads of keys for four of queries, and its clip. `largest` has each group's largest
    /// logit.
    fn clip(largest: [f64; 2]) -> (Transformer, QkClip) {
        let options = r#"{"vocab_size": 9, "d_model": 8, "heads": 4, "kv_heads": 2, "architecture": "decoder-only",
                          "decoder_layers": 1, "init": "normal"}"#;
        let model = Transformer::new(&from_json("model", options).unwrap(), 1, Device::Cpu, Kind::Double).unwrap();
        let clip = QkClip::new(&model.parameters, LIMIT).unwrap();
        let logits = Tensor::from_slice(&[largest[0], -9.0, -9.0, largest[1]]);
        model.parameters.attentions()[0].largest.shallow_clone().copy_(&logits);
        (model, clip)
    }

    /// Returns the factors by which the clip has multiplied the rows of the projections of queries, keys and values.
    fn factors(largest: [f64; 2], is_alive: Option<bool>) -> Vec<f64> {
        let (model, clip) = clip(largest);
        // The stacked projections: 8 rows of queries, 4 of keys and 4 of values.
        let weight = model.parameters.tensors().iter().find(|t| t.size() == [16, 8]).unwrap();
        let before = weight.detach().copy();
        clip.apply(is_alive.map(Tensor::from).as_ref()).unwrap();
        let ratio = (weight.detach() / before).mean_dim([1i64].as_slice(), false, Kind::Double);
        Vec::try_from(ratio).unwrap()
    }

    #[test]
    fn heads_that_share_keys_shrink_together() {
        for is_alive in [None, Some(true)] {
            let found = factors([1.0, 8.0], is_alive);
            // Each head has two rows: four rows of queries for each group, two of keys, then the values.
            let rows = [[1.0; 4], [0.5; 4], [1.0, 1.0, 0.5, 0.5], [1.0; 4]].concat();
            assert!(found.iter().zip(&rows).all(|(a, b)| (a - b).abs() < 1e-12), "{found:?}");
        }
    }

    #[test]
    fn logits_that_are_none_and_updates_that_are_not_finite_change_nothing() {
        for (largest, is_alive) in
            [([f64::NAN; 2], None), ([f64::NEG_INFINITY; 2], None), ([0.0, LIMIT], None), ([9.0; 2], Some(false))]
        {
            assert_eq!(factors(largest, is_alive), vec![1.0; 16], "{largest:?}");
        }
    }

    #[test]
    fn a_clip_forgets_the_logits_of_its_update() {
        let (model, mut clip) = clip([1.0, 8.0]);
        assert_eq!(clip.largest_of_all().unwrap().double_value(&[]), 8.0);
        clip.forget().unwrap();
        let own = &model.parameters.attentions()[0].largest;
        assert_eq!(Vec::<f64>::try_from(own).unwrap(), [f64::NEG_INFINITY; 4]);
        assert_eq!(clip.heads()[3], "decoder.layers.0.self_attn.3");
    }
}
