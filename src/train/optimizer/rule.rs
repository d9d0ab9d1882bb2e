//! The rule of an optimizer other than Adam, which updates one parameter at a time (docs/spec.md §4.9).

use super::lion::Lion;
use super::muon::Muon;
use super::normuon::NorMuon;
use crate::config::{OptimizerName, TrainingConfig};
use crate::error::{Error, Result};
use crate::parametrisation::{Part, StepSize};
use tch::{Kind, Tensor};

/// A rule's step is p ← (1 − ηλ)p − η·`factor`·`finished`(`orthogonalised`(`direction`)), with learning rate η and
/// weight decay λ.
pub trait Rule {
    /// Returns the name in a checkpoint and the size of each tensor of the state, for a parameter of this size. Each
    /// tensor's first dimension is the parameter's.
    fn state(&self, size: &[i64]) -> Vec<(&'static str, Vec<i64>)>;

    /// True if the rule updates a parameter with this part and size; Adam updates the others.
    fn takes(&self, part: Part, size: &[i64]) -> bool;

    /// Updates the state with a gradient, and returns the direction of the step.
    fn direction(&self, gradient: &Tensor, state: &mut [Tensor]) -> Result<Tensor>;

    /// True if directions are orthogonalised, matrix by matrix. The ranks share this work.
    fn is_orthogonal(&self) -> bool {
        false
    }

    /// Orthogonalises the directions of matrices of one shape, (matrices, rows, columns).
    fn orthogonalised(&self, directions: &Tensor) -> Result<Tensor> {
        Ok(directions.shallow_clone())
    }

    /// Returns the step of one parameter without weight decay, for a learning rate of 1, divided by `factor`.
    fn finished(&self, direction: Tensor, _state: &mut [Tensor]) -> Result<Tensor> {
        Ok(direction)
    }

    /// Returns the factor of the step of a parameter of this size.
    fn factor(&self, _size: &[i64]) -> f64 {
        1.0
    }

    /// Returns the measure of a step's size that is the same at all widths. A parametrisation's learning rates depend
    /// on this measure.
    fn step_size(&self) -> StepSize {
        StepSize::Entries
    }

    /// True if a step leaves the Frobenius norm of a parameter unchanged.
    fn keeps_norm(&self) -> bool {
        false
    }
}

/// Returns the rule that the options name; `None` for Adam.
pub fn rule_of(config: &TrainingConfig) -> Option<Box<dyn Rule>> {
    match config.optimizer {
        OptimizerName::Adam => None,
        OptimizerName::Muon => Some(Box::new(Muon::of(config))),
        OptimizerName::Normuon => Some(Box::new(NorMuon::of(config))),
        OptimizerName::Lion => Some(Box::new(Lion { beta1: config.beta1, beta2: config.beta2 })),
    }
}

/// Mixes a new value into an average: average ← average + weight·(value − average). A 16-bit average is rounded once,
/// after the sum.
pub fn mix(average: &mut Tensor, value: &Tensor, weight: f64) -> Result<()> {
    if average.kind() == value.kind() {
        let _ = average.f_lerp_(value, weight)?;
        return Ok(());
    }
    let mixed = average.f_to_kind(value.kind())?.f_lerp(value, weight)?;
    average.f_copy_(&mixed)?;
    Ok(())
}

/// Applies one step to the parameter `p`, or to some of its rows. `direction` is already orthogonalised; `lr` is the
/// learning rate η, and `keep` the factor 1 − ηλ of p.
pub fn apply(
    rule: &dyn Rule,
    p: &mut Tensor,
    direction: Tensor,
    state: &mut [Tensor],
    lr: f64,
    keep: f64,
) -> Result<()> {
    let norm = rule.keeps_norm().then(|| p.f_norm()).transpose()?;
    let step = rule.finished(direction, state)?;
    let _ = p.f_mul_scalar_(keep)?.f_sub_(&step.f_mul_scalar(lr * rule.factor(&p.size()))?)?;
    if let Some(norm) = norm {
        // The factor is 1 if the matrix was zero before the step or is zero now: then no factor restores the norm.
        // `f_nan_to_num` replaces NaN, ∞ and −∞, which a division by 0 gives, by 1.
        let ratio = norm.f_div(&p.f_norm()?)?.f_nan_to_num(1.0, 1.0, 1.0)?;
        let ratio = ratio.f_where_self(&norm.f_gt(0.0)?, &norm.f_ones_like()?)?;
        let _ = p.f_mul_(&ratio)?;
    }
    Ok(())
}

/// Returns the rule's initial state for the parameter `p`: zeros. The first tensor, an average of gradients, has type
/// `kind`; the others have the parameter's type.
pub fn zeros(rule: &dyn Rule, p: &Tensor, kind: Kind) -> Result<Vec<Tensor>> {
    let size = p.size();
    let zeros = |(i, (_, state_size)): (usize, (_, Vec<i64>))| {
        let kind = if i == 0 { kind } else { p.kind() };
        Ok(Tensor::f_zeros(state_size.as_slice(), (kind, p.device()))?)
    };
    rule.state(&size).into_iter().enumerate().map(zeros).collect()
}

/// Applies one step to a single matrix or vector `p`, with the rule that the options name. `state` has the tensors that
/// `Rule::state` lists, and is updated.
pub fn step(config: &TrainingConfig, p: &mut Tensor, gradient: &Tensor, state: &mut [Tensor], lr: f64) -> Result<()> {
    let rule = rule_of(config).ok_or_else(|| Error::invalid("optimizer = \"adam\" is no rule for one parameter"))?;
    let expected = rule.state(&p.size());
    if state.len() != expected.len() || state.iter().zip(&expected).any(|(t, (_, size))| t.size() != *size) {
        return Err(Error::invalid(format!("the state must be {expected:?}")));
    }
    let direction = rule.direction(gradient, state)?;
    // `orthogonalised` takes a batch of matrices, here of one.
    let direction = match rule.is_orthogonal() {
        true => rule.orthogonalised(&direction.f_unsqueeze(0)?)?.f_squeeze_dim(0)?,
        false => direction,
    };
    apply(rule.as_ref(), p, direction, state, lr, 1.0 - lr * config.weight_decay)
}
