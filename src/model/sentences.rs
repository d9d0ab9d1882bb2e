//! The input of the model: packed sentences and their attention ranges.

use super::host_batch::HostBatch;
use super::{Packed, Ranges};
use crate::error::Result;
use tch::{Device, Tensor};

/// The sentences of one side or of both, and their attention ranges. A forward pass needs nothing else from a batch.
/// So once these are on the device, the pass moves nothing between host and device.
#[derive(Debug)]
pub struct Sentences {
    pub source: Option<Packed>,
    pub target: Packed,
    /// The causal ranges of the target's attention to itself.
    pub(super) own: Ranges,
    /// The ranges of the source's attention to itself, and of the target's attention to the source.
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
    /// Returns the tensors that move to a device, those of both sides and of all ranges.
    fn tensors(&mut self) -> Vec<&mut Tensor> {
        let Sentences { source, target, own, across } = self;
        let sides = source.iter_mut().chain([target]).flat_map(Packed::tensors);
        sides.chain([own].into_iter().chain(across.iter_mut().flatten()).flat_map(Ranges::tensors)).collect()
    }
}
