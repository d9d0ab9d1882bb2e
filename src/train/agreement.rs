//! Numbers and stop requests that the ranks of a process group exchange between updates.

use crate::error::{Error, Result};
use crate::host::host;
use crate::operator::ProcessGroup;
use tch::{Device, Tensor};

impl ProcessGroup {
    /// Returns the sums over ranks of each of the `numbers`, which lie on the host. `device` is the device on which the
    /// group's backend exchanges tensors.
    pub fn sum_of<const N: usize>(self, numbers: [f64; N], device: Device) -> Result<[f64; N]> {
        self.exchanged(numbers, device, ProcessGroup::sum)
    }

    /// Returns rank 0's numbers, on the host of every rank.
    pub fn first_of<const N: usize>(self, numbers: [f64; N], device: Device) -> Result<[f64; N]> {
        self.exchanged(numbers, device, ProcessGroup::first)
    }

    /// Returns the result of a collective operation on numbers that lie on the host. One process alone keeps its
    /// numbers.
    fn exchanged<const N: usize>(
        self,
        numbers: [f64; N],
        device: Device,
        collective: impl FnOnce(Self, &Tensor) -> Result<Tensor>,
    ) -> Result<[f64; N]> {
        if self.is_alone() {
            return Ok(numbers);
        }
        let results =
            host("what ranks share", &collective(self, &Tensor::f_from_slice(&numbers)?.f_to_device(device)?)?)?;
        Ok(std::array::from_fn(|i| results[i]))
    }

    /// Returns this rank's result, or an error if any rank has an error. Thus all ranks stop at the same place.
    pub fn agree<T>(self, result: Result<T>, device: Device) -> Result<T> {
        // `mine` is what this rank adds to two counts: of interrupted ranks and of failed ranks.
        let mine = match &result {
            Ok(_) => [0.0, 0.0],
            Err(Error::Interrupted(_) | Error::Raised(_)) => [1.0, 0.0],
            Err(_) => [0.0, 1.0],
        };
        let [interrupted, failed] = self.sum_of(mine, device)?;
        // Another rank's failure outranks an interruption. A rank's own error is returned as it is.
        match result {
            Ok(_) | Err(Error::Interrupted(_) | Error::Raised(_)) if failed > 0.0 => {
                Err(Error::invalid("another rank failed: its message says why"))
            }
            Ok(_) if interrupted > 0.0 => Err(Error::Interrupted("another rank was stopped".into())),
            own => own,
        }
    }
}
