//! Batches as tensors, for the model and its loss.

use crate::data::{self, Batch};
use crate::error::Result;
use crate::model::{HostBatch, Packed, PaddedShape, Sentences, PAD};
use tch::{Device, Tensor};

/// The model's input from one batch, with the targets that the model should predict.
#[derive(Debug)]
pub struct Input {
    pub read: Sentences,
    /// The tokens to predict, int64 (target rows).
    pub output: Tensor,
}

/// The shape to which a batch is padded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    pub source_rows: i64,
    pub target_rows: i64,
    pub sentences: i64,
    /// The length of the longest sentence on either side, in tokens.
    pub longest: i64,
}

impl Shape {
    /// Returns the padded shape of one side, which has this number of rows.
    fn padded_shape(self, rows: i64) -> PaddedShape {
        PaddedShape { rows, sentences: self.sentences, longest: self.longest }
    }
}

impl Input {
    /// Builds the input on a device.
    pub fn new(batch: &Batch, device: Device) -> Result<Self> {
        Input::on_host(batch, None, device)?.to(device)
    }

    /// Builds the input on the host, padded to `shape` if that is given; `device` is the device to which the input will
    /// be moved.
    fn on_host(batch: &Batch, shape: Option<Shape>, device: Device) -> Result<Self> {
        // Packs the sentences of one side, and pads them if there is a shape.
        let packed = |ids: &data::PackedIds, padded_shape: Option<PaddedShape>| {
            let packed = Packed::new(&ids.tokens, &ids.positions, ids.offsets.clone())?;
            match padded_shape {
                Some(padded_shape) => packed.filling(padded_shape),
                None => Ok(packed),
            }
        };
        let source = batch
            .source
            .as_ref()
            .map(|source| packed(source, shape.map(|s| s.padded_shape(s.source_rows))))
            .transpose()?;
        let target = packed(&batch.target_input, shape.map(|s| s.padded_shape(s.target_rows)))?;
        let mut output = batch.target_output.clone();
        // Padding rows predict PAD, which the loss ignores.
        output.resize(target.tokens.numel(), PAD);
        Ok(Input { read: Sentences::new(source, target, device)?, output: Tensor::f_from_slice(&output)? })
    }
}

impl HostBatch for Input {
    /// Returns the tensors that are moved to the device.
    fn tensors(&mut self) -> Vec<&mut Tensor> {
        self.read.tensors().into_iter().chain([&mut self.output]).collect()
    }
}

/// The input of one training step, and everything else that the gradients depend on except the parameters.
#[derive(Debug)]
pub struct MicroBatch {
    pub input: Input,
    /// The seed of dropout, int64 (seed, update, micro-batch).
    pub seed: Tensor,
    /// The factor that the sum of the losses is multiplied by before back-propagation; 0-dim f64.
    pub scale: Tensor,
    /// True if other micro-batches of the same update follow.
    pub is_partial: bool,
}

/// The place of a micro-batch in its update. The fields mean the same as [`MicroBatch`]'s.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    pub seed: [i64; 3],
    pub scale: f64,
    pub is_partial: bool,
}

impl MicroBatch {
    /// Builds the micro-batch on the host, padded to `shape` if that is given; `device` is the device to which it will
    /// be moved.
    pub fn on_host(batch: &Batch, shape: Option<Shape>, turn: Turn, device: Device) -> Result<Self> {
        let (input, Turn { seed, scale, is_partial }) = (Input::on_host(batch, shape, device)?, turn);
        Ok(MicroBatch { input, seed: Tensor::f_from_slice(&seed)?, scale: Tensor::from(scale), is_partial })
    }
}

impl HostBatch for MicroBatch {
    /// Returns the tensors that are moved to the device.
    fn tensors(&mut self) -> Vec<&mut Tensor> {
        let MicroBatch { input, seed, scale, .. } = self;
        input.tensors().into_iter().chain([seed, scale]).collect()
    }
}
