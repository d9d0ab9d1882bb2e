//! The input of the model.

use super::host_batch::HostBatch;
use super::{Packed, Ranges};
use crate::error::Result;
use tch::{Device, Tensor};

/// The sentences of one or both sides, and their attention ranges: all that a forward pass needs from a batch, so that
/// the pass moves nothing between host and device.
#[derive(Debug)]
pub struct Sentences {
    pub source: Option<Packed>,
    pub target: Packed,
    /// The target's causal ranges to itself.
    pub(super) own: Ranges,
    /// The ranges from the source to itself, and from the target to the source.
    pub(super) across: Option<[Ranges; 2]>,
}

impl Sentences {
    /// Builds the input from sides on the host, for a device; [`to`](HostBatch::to) moves it there.
    pub fn new(source: Option<Packed>, target: Packed, device: Device) -> Result<Self> {
        let own = Ranges::causal(&target, device)?;
        let across = match &source {
            Some(source) => Some([Ranges::between(source, source, device)?, Ranges::between(&target, source, device)?]),
            None => None,
        };
        Ok(Sentences { own, across, source, target })
    }
}

impl HostBatch for Sentences {
    fn tensors(&mut self) -> Vec<&mut Tensor> {
        let Sentences { source, target, own, across } = self;
        let sides = source.iter_mut().chain([target]).flat_map(Packed::tensors);
        sides.chain([own].into_iter().chain(across.iter_mut().flatten()).flat_map(Ranges::tensors)).collect()
    }
}
