//! Measurement of the memory that an update needs.

use super::forward_backward::TrainStep;
use super::micro_batch::{MicroBatch, Turn};
use super::optimizer::Optimizer;
use super::trainer::kind_of;
use super::Objective;
use crate::config::{TrainingConfig, TransformerConfig};
use crate::data::Batch;
use crate::error::Result;
use crate::model::{HostBatch, Transformer};
use crate::operator::{peak_of, ProcessGroup};
use std::rc::Rc;
use tch::{Device, Kind};

/// Returns the largest number of bytes that tensors hold during the forward and backward pass of a batch on the CPU:
/// activations and the workspace of the loss. Parameters, gradients and moments are not counted.
pub fn peak_of_update(
    model: &TransformerConfig,
    training: &TrainingConfig,
    objective: Objective,
    batch: &Batch,
) -> Result<usize> {
    let model = Transformer::new(model, 0, Device::Cpu, Kind::Float)?;
    let kind = kind_of(training.precision);
    let flat = Optimizer::new(&model.parameters, training, &model.config)?.flat(kind)?.map(Rc::new);
    let (recompute, measures_logits) = (training.activation_checkpointing, training.qk_clip > 0.0);
    let (group, workspace) = (ProcessGroup::ALONE, Default::default());
    let step = TrainStep { model, objective, kind, recompute, measures_logits, group, flat, workspace };
    step.model.set_update(1)?;
    // The seed of dropout is (seed, update, micro-batch). Any seed measures the same memory.
    let turn = Turn { seed: [0, 1, 0], scale: 1.0, is_partial: false };
    // The batch is part of what is measured, so `run` builds it.
    let run = || {
        let micro_batch = MicroBatch::on_host(batch, None, turn, Device::Cpu)?.to(Device::Cpu)?;
        step.run(&micro_batch).map(drop)
    };
    let ((), peak) = peak_of(run)?;
    Ok(peak)
}
