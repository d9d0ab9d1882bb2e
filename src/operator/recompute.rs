//! Activation checkpointing (Chen et al. 2016): a checkpointed function keeps only its inputs, and the backward pass
//! runs it again to get its gradient.

use super::engine::{backward, Recording};
use super::function::{apply, Differentiable};
use crate::error::{Error, Result};
use tch::Tensor;

/// The function that [`recomputed`] runs, as a node of autograd.
struct CheckpointFn<F>(F);

/// Runs `function` without recording its operations; the backward pass runs it again and differentiates that run.
/// `function`'s second argument is true in the second run, so that it does not repeat updates that belong to one
/// forward pass (such as running statistics).
///
/// Gradients of parameters that `function` uses are added to their `.grad`, as usual. At least one of the inputs must
/// require a gradient.
pub fn recomputed(
    inputs: &[&Tensor],
    function: impl Fn(Vec<Tensor>, bool) -> Result<Vec<Tensor>> + 'static,
) -> Result<Vec<Tensor>> {
    apply(CheckpointFn(function), inputs)
}

impl<F: Fn(Vec<Tensor>, bool) -> Result<Vec<Tensor>>> Differentiable for CheckpointFn<F> {
    /// Returns true, because the backward pass runs the function again.
    fn saves_inputs(&self) -> bool {
        true
    }

    fn forward(&self, inputs: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let is_second_run = false;
        (self.0)(inputs, is_second_run)
    }

    /// Runs the function again on copies of the inputs, and returns the gradients of that run for the inputs.
    fn backward(&self, inputs: Vec<Tensor>, gradients: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        // Recording is on only if the gradients are to be differentiated again.
        if Recording::is_on() {
            return Err(Error::Torch("activation checkpointing has no double backward: train without it".into()));
        }
        let inputs: Vec<Tensor> = inputs.iter().map(|t| t.detach().set_requires_grad(t.requires_grad())).collect();
        let _recorded = Recording::set(true);
        let is_second_run = true;
        let outputs = (self.0)(inputs.iter().map(Tensor::shallow_clone).collect(), is_second_run)?;
        // Outputs without a gradient do not take part.
        let pairs = outputs.iter().zip(&gradients).filter_map(|(t, g)| Some(t).zip(g.as_ref()));
        let (roots, given): (Vec<_>, Vec<_>) = pairs.unzip();
        backward(&roots, &given)?; // adds the parameters' gradients to their .grad
        Ok(inputs.iter().map(|t| Some(t.grad()).filter(Tensor::defined)).collect())
    }
}
