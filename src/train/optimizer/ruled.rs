//! The parameters that a rule updates instead of Adam, one at a time.

use super::rule::{self, rule_of, Rule};
use crate::config::TrainingConfig;
use crate::error::Result;
use crate::operator::ProcessGroup;
use crate::parametrisation::Multipliers;
use std::collections::BTreeMap;
use std::ops::Range;
use tch::{Kind, Tensor};

/// The largest number of elements that are orthogonalised at a time: 64 MB in f32.
const BATCH: i64 = 1 << 24;

/// A rule, with the parameters that it updates.
pub struct Ruled {
    pub rule: Box<dyn Rule>,
    parameters: Vec<RuledParameter>,
    /// The factor of the learning rate for these parameters.
    lr_multiplier: f64,
}

/// A parameter with its gradient and the rule's state for it.
struct RuledParameter {
    name: String,
    value: Tensor,
    gradient: Tensor,
    state: Vec<Tensor>,
    /// The rows of each matrix in the parameter. The projections of queries, keys and values are three matrices in one
    /// parameter.
    blocks: Vec<Range<i64>>,
    multipliers: Multipliers,
}

impl RuledParameter {
    /// Returns the parts of the state that belong to the matrix with the rows `block`. They share the state's memory.
    fn state_of(&self, block: &Range<i64>) -> Result<Vec<Tensor>> {
        self.state.iter().map(|t| rows(t, block)).collect()
    }
}

impl Ruled {
    /// Returns the rule that the options name, without parameters yet; `None` for Adam.
    pub fn of(config: &TrainingConfig) -> Option<Self> {
        let rule = rule_of(config)?;
        Some(Ruled { rule, parameters: Vec::new(), lr_multiplier: config.muon_lr_multiplier })
    }

    /// Adds a parameter; `value` and `gradient` are views of the flat buffers. `moments` is the type of the average of
    /// its gradients, and `d_model` the model's width.
    pub fn add(
        &mut self,
        name: &str,
        value: Tensor,
        gradient: Tensor,
        moments: Kind,
        d_model: i64,
        multipliers: Multipliers,
    ) -> Result<()> {
        let state = rule::zeros(self.rule.as_ref(), &value, moments)?;
        let (name, blocks) = (name.to_string(), blocks(name, &value.size(), d_model));
        self.parameters.push(RuledParameter { name, value, gradient, state, blocks, multipliers });
        Ok(())
    }

    /// Updates the parameters and zeroes their gradients, which are first multiplied by `scale` for clipping.
    /// `is_healthy` is given on a GPU; if it is false there, no parameter and no state changes.
    pub fn step(
        &mut self,
        lr: f64,
        weight_decay: f64,
        scale: &Tensor,
        is_healthy: Option<&Tensor>,
        group: ProcessGroup,
    ) -> Result<()> {
        let rule = self.rule.as_ref();
        let mut old_values = Vec::new();
        if is_healthy.is_some() {
            // The host does not know yet whether the update is healthy. If it is not, old values are restored below.
            for t in self.parameters.iter().flat_map(|p| [&p.value].into_iter().chain(&p.state)) {
                old_values.push((t.shallow_clone(), t.f_detach_copy()?));
            }
        }
        let mut directions = Vec::new();
        for parameter in &self.parameters {
            for block in &parameter.blocks {
                let gradient = rows(&parameter.gradient, block)?.f_mul_(scale)?;
                directions.push(rule.direction(&gradient, &mut parameter.state_of(block)?)?);
            }
        }
        if rule.is_orthogonal() {
            directions = orthogonalised(rule, &directions, group)?;
        }
        let mut directions = directions.into_iter();
        for parameter in &mut self.parameters {
            // `keep` is the factor of the parameter's old value; weight decay makes it less than 1.
            let rate = lr * self.lr_multiplier * parameter.multipliers.lr;
            let keep = 1.0 - rate * weight_decay * parameter.multipliers.weight_decay;
            for (block, direction) in parameter.blocks.iter().zip(&mut directions) {
                let (mut value, mut state) = (rows(&parameter.value, block)?, parameter.state_of(block)?);
                rule::apply(rule, &mut value, direction, &mut state, rate, keep)?;
            }
            let _ = parameter.gradient.f_zero_()?;
        }
        if let Some(is_healthy) = is_healthy {
            for (mut t, old) in old_values {
                let new = t.f_where_self(is_healthy, &old)?;
                t.f_copy_(&new)?;
            }
        }
        Ok(())
    }

    /// Returns the tensors of the state under the names that they have in a checkpoint.
    pub fn state(&self) -> Vec<(String, Tensor)> {
        let state_of = |parameter: &RuledParameter| {
            let kinds = self.rule.state(&parameter.value.size());
            let tensors = kinds.iter().zip(&parameter.state);
            tensors.map(|((kind, _), t)| (format!("{kind}.{}", parameter.name), t.shallow_clone())).collect::<Vec<_>>()
        };
        self.parameters.iter().flat_map(state_of).collect()
    }
}

/// Returns the rows `block` of a parameter, or of a state tensor that has the same rows.
fn rows(t: &Tensor, block: &Range<i64>) -> Result<Tensor> {
    Ok(t.f_narrow(0, block.start, block.end - block.start)?)
}

/// Returns the rows of each matrix in a parameter of this name and size. `in_proj_weight` has `d_model` rows of queries
/// first, then equally many of keys and of values.
fn blocks(name: &str, size: &[i64], d_model: i64) -> Vec<Range<i64>> {
    let rows = size.first().copied().unwrap_or(1);
    if !name.ends_with("in_proj_weight") || rows <= d_model {
        return std::iter::once(0..rows).collect();
    }
    let keys_end = d_model + (rows - d_model) / 2;
    vec![0..d_model, d_model..keys_end, keys_end..rows]
}

/// Orthogonalises the directions, and returns them in the same order. Each of the K ranks computes every K-th one and
/// has zeros for the others, so a sum over ranks gives all of them.
fn orthogonalised(rule: &dyn Rule, directions: &[Tensor], group: ProcessGroup) -> Result<Vec<Tensor>> {
    let sizes: Vec<_> = directions.iter().map(Tensor::size).collect();
    // The indices of the directions that this rank computes.
    let own_indices = (group.rank()..directions.len()).step_by(group.size());
    let mut results: Vec<Option<Tensor>> = directions.iter().map(|_| None).collect();
    for batch in batches(own_indices, &sizes) {
        let stacked: Vec<&Tensor> = batch.iter().map(|i| &directions[*i]).collect();
        let matrices = rule.orthogonalised(&Tensor::f_stack(&stacked, 0)?)?.f_unbind(0)?;
        batch.into_iter().zip(matrices).for_each(|(i, matrix)| results[i] = Some(matrix));
    }
    if group.size() == 1 {
        return Ok(results.into_iter().flatten().collect());
    }
    // A direction that another rank computes is zeros here.
    let flattened = |(result, direction): (Option<Tensor>, &Tensor)| {
        Ok(result.map_or_else(|| direction.f_zeros_like(), Ok)?.f_reshape([-1i64].as_slice())?)
    };
    let own_results = results.into_iter().zip(directions).map(flattened).collect::<Result<Vec<Tensor>>>()?;
    let mut all_results = Tensor::f_cat(&own_results, 0)?;
    group.sum_in_place(&mut all_results)?;
    let lengths: Vec<i64> = directions.iter().map(|direction| direction.numel() as i64).collect();
    let parts = all_results.f_split_with_sizes(lengths.as_slice(), 0)?;
    parts.iter().zip(&sizes).map(|(part, size)| Ok(part.f_view(size.as_slice())?)).collect()
}

/// Splits indices into batches. The matrices of a batch have equal sizes, and at most `BATCH` elements together unless
/// the batch is a single matrix.
fn batches(indices: impl Iterator<Item = usize>, sizes: &[Vec<i64>]) -> Vec<Vec<usize>> {
    let mut by_size: BTreeMap<&[i64], Vec<usize>> = BTreeMap::new();
    for i in indices {
        by_size.entry(&sizes[i]).or_default().push(i);
    }
    let batch_length = |size: &[i64]| (BATCH / size.iter().product::<i64>().max(1)).max(1) as usize;
    by_size.iter().flat_map(|(size, all)| all.chunks(batch_length(size)).map(<[usize]>::to_vec)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_of_one_size_are_one_batch_up_to_a_limit() {
        let sizes = [vec![4, 4], vec![4, 8], vec![4, 4], vec![BATCH, 1], vec![BATCH, 1], vec![4, 4]];
        let found = batches((0..6).filter(|i| *i != 5), &sizes);
        assert_eq!(found, [vec![0, 2], vec![1], vec![3], vec![4]]);
    }

    #[test]
    fn projections_of_attention_are_three_matrices() {
        assert_eq!(blocks("a.in_proj_weight", &[24, 8], 8), [0..8, 8..16, 16..24]);
        assert_eq!(blocks("a.in_proj_weight", &[12, 8], 8), [0..8, 8..10, 10..12]);
        assert_eq!(blocks("a.linear1.weight", &[24, 8], 8).first(), Some(&(0..24)));
    }
}
