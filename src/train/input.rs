//! A batch as tensors.

use crate::data::{self, Batch};
use crate::error::Result;
use crate::model::{Packed, Room, Sentences, PAD};
use crate::operator::ship;
use tch::{Device, Tensor};

/// What the model reads of a batch, and what it is to say.
#[derive(Debug)]
pub struct Input {
    pub read: Sentences,
    /// int64 (target rows)
    pub output: Tensor,
}

/// What source and target are filled up to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rooms {
    pub source: Room,
    pub target: Room,
}

impl Input {
    /// On a device.
    pub fn new(batch: &Batch, device: Device) -> Result<Self> {
        let mut input = Input::on_host(batch, None, device)?;
        ship(input.tensors(), device)?;
        Ok(input)
    }

    /// On the host, for a device.
    fn on_host(batch: &Batch, rooms: Option<Rooms>, device: Device) -> Result<Self> {
        let packed = |p: &data::Packed, room: Option<Room>| {
            let packed = Packed::new(&p.tokens, &p.positions, p.offsets.clone())?;
            match room {
                Some(room) => packed.filling(room),
                None => Ok(packed),
            }
        };
        let source = batch.source.as_ref().map(|source| packed(source, rooms.map(|r| r.source))).transpose()?;
        let target = packed(&batch.target_input, rooms.map(|r| r.target))?;
        let mut output = batch.target_output.clone();
        output.resize(target.tokens.numel(), PAD);
        Ok(Input { read: Sentences::new(source, target, device)?, output: Tensor::f_from_slice(&output)? })
    }

    fn tensors(&mut self) -> Vec<&mut Tensor> {
        self.read.tensors().into_iter().chain([&mut self.output]).collect()
    }
}

/// An input of a training step, with what its gradients depend on beside parameters.
#[derive(Debug)]
pub struct MicroBatch {
    pub input: Input,
    /// int64 (seed, update, micro-batch)
    pub seed: Tensor,
    /// What the sum of its losses is multiplied by; 0-dim f64.
    pub scale: Tensor,
}

impl MicroBatch {
    /// On the host, for a device.
    pub fn on_host(batch: &Batch, rooms: Option<Rooms>, seed: [i64; 3], scale: f64, device: Device) -> Result<Self> {
        let input = Input::on_host(batch, rooms, device)?;
        Ok(MicroBatch { input, seed: Tensor::f_from_slice(&seed)?, scale: Tensor::from(scale) })
    }

    /// Every tensor, in a fixed order.
    pub fn tensors(&mut self) -> Vec<&mut Tensor> {
        let MicroBatch { input, seed, scale } = self;
        input.tensors().into_iter().chain([seed, scale]).collect()
    }

    pub fn to(mut self, device: Device) -> Result<Self> {
        ship(self.tensors(), device)?;
        Ok(self)
    }
}
