//! What the model reads.

use super::host_batch::HostBatch;
use super::{Packed, Ranges};
use crate::error::Result;
use tch::{Device, Tensor};

/// Sentences of one side or two, and who attends to whom: all that a forward pass needs of a batch, so that in it nothing
/// travels between host and device.
#[derive(Debug)]
pub struct Sentences {
    pub source: Option<Packed>,
    pub target: Packed,
    /// The target to its own past.
    pub(super) own: Ranges,
    /// The source to itself, and the target to the source.
    pub(super) across: Option<[Ranges; 2]>,
}

impl Sentences {
    /// Of sides on the host, for a device; [`to`](HostBatch::to) takes them there.
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
