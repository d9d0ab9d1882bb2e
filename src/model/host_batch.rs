//! Transfer of a batch to a device: one copy moves all its tensors.

use crate::error::{Error, Result};
use crate::host::host;
use crate::operator::upload;
use tch::{Device, Tensor};

/// A batch of tensors that are moved to a device together.
pub trait HostBatch: Sized {
    /// Returns the batch's tensors, in a fixed order.
    fn tensors(&mut self) -> Vec<&mut Tensor>;

    /// Moves the batch from the host to a device, in one copy.
    fn to(mut self, device: Device) -> Result<Self> {
        if device != Device::Cpu {
            DeviceBuffer::load(&mut self, device)?;
        }
        Ok(self)
    }
}

/// A buffer on a device that holds all tensors of a batch side by side, so that one copy fills them all.
#[derive(Debug)]
pub struct DeviceBuffer {
    bytes: Tensor,
}

/// The alignment of each tensor in the buffer, in bytes.
const ALIGN: usize = 16;

impl DeviceBuffer {
    /// Copies the batch to a new buffer on the device: each of the batch's tensors becomes a view of the buffer.
    pub fn load(batch: &mut impl HostBatch, device: Device) -> Result<Self> {
        let tensors = batch.tensors();
        let buffer = DeviceBuffer { bytes: upload(&side_by_side(&tensors)?, device)? };
        let mut start = 0; // the offset of the next tensor in the buffer, in bytes
        for t in tensors {
            // The view of bytes becomes a view of the tensor's own type and shape.
            let view = buffer.bytes.f_narrow(0, start as i64, length(t) as i64)?.f_view_dtype(t.kind())?;
            start += length(t).next_multiple_of(ALIGN);
            *t = view.f_view(t.size().as_slice())?;
        }
        Ok(buffer)
    }

    /// Overwrites the buffer with another batch of the same shapes and types. So the tensors of the first batch, which
    /// are views of the buffer, get the new values.
    pub fn reload(&mut self, batch: &mut impl HostBatch) -> Result<()> {
        let bytes = side_by_side(&batch.tensors())?;
        if bytes.len() != self.bytes.numel() {
            return Err(Error::invalid(format!(
                "{} bytes do not fit the place of {}",
                bytes.len(),
                self.bytes.numel()
            )));
        }
        self.bytes.f_copy_(&upload(&bytes, self.bytes.device())?)?;
        Ok(())
    }
}

/// Returns the number of bytes of a tensor's elements.
fn length(t: &Tensor) -> usize {
    t.numel() * t.kind().elt_size_in_bytes()
}

/// Returns the bytes of all tensors one after the other, each filled up to a multiple of [`ALIGN`].
fn side_by_side(tensors: &[&mut Tensor]) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for t in tensors {
        bytes.extend(host::<u8>("a batch's tensor", t)?);
        bytes.resize(bytes.len().next_multiple_of(ALIGN), 0);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    impl HostBatch for Vec<Tensor> {
        fn tensors(&mut self) -> Vec<&mut Tensor> {
            self.iter_mut().collect()
        }
    }

    #[test]
    fn a_buffer_holds_tensors_side_by_side() {
        let batch = |by: i64| {
            let ids = Tensor::from_slice(&[1 + by, 2, 3]).view([3, 1]);
            let real = Tensor::from_slice(&[true, false, by > 0]);
            vec![ids, real, Tensor::from(0.5 + by as f64), Tensor::from_slice(&[0i64; 0])]
        };
        let mut there = batch(0);
        let mut buffer = DeviceBuffer::load(&mut there, Device::Cpu).unwrap();
        for by in [0, 4] {
            buffer.reload(&mut batch(by)).unwrap();
            for (there, wanted) in there.iter().zip(&batch(by)) {
                assert_eq!((there.size(), there.kind()), (wanted.size(), wanted.kind()));
                assert!(there.equal(wanted));
            }
        }
        assert!(buffer.reload(&mut vec![Tensor::from(1.0)]).is_err());
    }
}
