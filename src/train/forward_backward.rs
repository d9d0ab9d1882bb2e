//! The forward and backward pass of a micro-batch, which returns the losses and adds to the gradients.

use super::loss::{LossSums, Objective, Workspace};
use super::micro_batch::MicroBatch;
use crate::error::Result;
use crate::model::{Context, FlatBuffers, Rates, Transformer};
use crate::operator::ProcessGroup;
use std::cell::RefCell;
use std::rc::Rc;
use tch::{Kind, Tensor};

/// The forward and backward pass of a micro-batch; on a GPU it runs asynchronously.
pub struct TrainStep {
    pub model: Transformer,
    pub objective: Objective,
    /// The type of matrix products.
    pub kind: Kind,
    /// True for activation checkpointing: backward runs each layer again.
    pub recompute: bool,
    /// True to measure the largest logit of each head.
    pub measures_logits: bool,
    /// The process group whose ranks' rows form one batch for norms with statistics.
    pub group: ProcessGroup,
    /// The flat buffers in which linear layers accumulate gradients on a CPU; `None` on a GPU.
    pub flat: Option<Rc<FlatBuffers>>,
    /// The buffer for the loss's logits.
    pub workspace: RefCell<Workspace>,
}

impl TrainStep {
    /// Runs both passes and returns the sums of the losses. Adds the gradients of `scale`·Σ loss to those of the
    /// parameters, where `scale` is the micro-batch's.
    pub fn run(&self, batch: &MicroBatch) -> Result<LossSums> {
        let ctx = self.context(&batch.seed).recomputing(self.recompute).across(self.group).adding_to(self.flat.clone());
        let ctx = ctx.partial(batch.is_partial).measuring_logits(self.measures_logits);
        let features = self.model.features(&batch.input.read, &ctx)?;
        let (output, workspace) = (&batch.input.output, &mut self.workspace.borrow_mut());
        let flat = self.flat.as_deref();
        self.objective.backward(&self.model, &features, output, &batch.scale, self.kind, flat, workspace)
    }

    /// Sets the gains that the residual scheme measures on one batch.
    pub fn profile(&self, batch: &MicroBatch) -> Result<()> {
        self.model.profile(&batch.input.read, self.context(&batch.seed))
    }

    /// Returns the context of a pass in training mode; `seed` is that of dropout.
    pub(super) fn context(&self, seed: &Tensor) -> Context {
        Context::training(Rates::of(&self.model.config), seed.shallow_clone(), self.kind)
    }
}
