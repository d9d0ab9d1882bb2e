//! What the ranks of a process group do together, by torch.distributed's own collectives.

use super::engine::Handle;
use super::ffi::Value;
use crate::cpu::memory;
use crate::error::{Error, Result};
use std::sync::{Mutex, MutexGuard};
use tch::{Device, Kind, Tensor};

/// A process group of torch.distributed, or a process alone: a small number, so that operators can hand it on.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Group(i64);

// torch.distributed's, of which nothing of ours travels. Tensors lie where the group's backend wants them (gloo: CPU,
// NCCL: CUDA).
static ALL_REDUCE: Handle = Handle::of_torch("_c10d_functional::all_reduce");
static ALL_REDUCE_IN_PLACE: Handle = Handle::of_torch("_c10d_functional::all_reduce_");
static ALL_GATHER: Handle = Handle::of_torch("_c10d_functional::all_gather_into_tensor");
static BROADCAST: Handle = Handle::of_torch("_c10d_functional::broadcast");
static WAIT: Handle = Handle::of_torch("_c10d_functional::wait_tensor");

fn waited(collective: &Handle, arguments: &[Value]) -> Result<Tensor> {
    let [t] = collective.call(arguments)?;
    let [t] = WAIT.call(&[(&t).into()])?;
    Ok(t)
}

struct Known {
    name: String,
    rank: usize,
    size: usize,
}

static KNOWN: Mutex<Vec<Known>> = Mutex::new(Vec::new());

fn known() -> MutexGuard<'static, Vec<Known>> {
    KNOWN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Group {
    /// One process.
    pub const ALONE: Group = Group(0);

    /// The group that torch.distributed knows by this name, of which this process is `rank` of `size`.
    pub fn new(name: &str, rank: usize, size: usize) -> Result<Self> {
        if rank >= size {
            return Err(Error::invalid(format!("rank {rank} of a process group of {size}; expected one below {size}")));
        }
        if size == 1 {
            return Ok(Group::ALONE);
        }
        let mut known = known();
        let found = known.iter().position(|k| (k.name.as_str(), k.rank, k.size) == (name, rank, size));
        Ok(Group(
            1 + found.unwrap_or_else(|| {
                known.push(Known { name: name.to_string(), rank, size });
                known.len() - 1
            }) as i64,
        ))
    }

    /// The group that was told of by this name; "" is a process alone.
    pub fn named(name: &str) -> Option<Self> {
        if name.is_empty() {
            return Some(Group::ALONE);
        }
        known().iter().position(|k| k.name == name).map(|i| Group(i as i64 + 1))
    }

    fn with<T>(self, of: impl FnOnce(Option<&Known>) -> T) -> T {
        let known = known();
        of((self.0 as usize).checked_sub(1).and_then(|i| known.get(i)))
    }

    pub fn rank(self) -> usize {
        self.with(|k| k.map_or(0, |k| k.rank))
    }

    pub fn size(self) -> usize {
        self.with(|k| k.map_or(1, |k| k.size))
    }

    pub fn is_alone(self) -> bool {
        self == Group::ALONE
    }

    /// This process writes files and speaks.
    pub fn is_first(self) -> bool {
        self.rank() == 0
    }

    pub fn name(self) -> String {
        self.with(|k| k.map(|k| k.name.clone()).unwrap_or_default())
    }

    /// Σ over ranks.
    pub fn sum(self, t: &Tensor) -> Result<Tensor> {
        match self.is_alone() {
            true => Ok(t.shallow_clone()),
            false => waited(&ALL_REDUCE, &[t.into(), "sum".into(), self.name().as_str().into()]),
        }
    }

    /// t ← Σ over ranks. The gradients of a model need no copy.
    pub fn sum_in_place(self, t: &mut Tensor) -> Result<()> {
        if !self.is_alone() {
            let _ = waited(&ALL_REDUCE_IN_PLACE, &[(&*t).into(), "sum".into(), self.name().as_str().into()])?;
        }
        Ok(())
    }

    /// (ranks, …): every rank's t.
    pub fn gather(self, t: &Tensor) -> Result<Tensor> {
        let t = t.f_unsqueeze(0)?;
        if self.is_alone() {
            return Ok(t);
        }
        let size = self.size() as i64;
        waited(&ALL_GATHER, &[(&t.f_contiguous()?).into(), size.into(), self.name().as_str().into()])
    }

    /// Rank 0's t.
    pub fn first(self, t: &Tensor) -> Result<Tensor> {
        match self.is_alone() {
            true => Ok(t.shallow_clone()),
            false => waited(&BROADCAST, &[t.into(), 0i64.into(), self.name().as_str().into()]),
        }
    }

    /// `sum` of numbers of the host, where the backend works on `device`.
    pub fn sum_of<const N: usize>(self, numbers: [f64; N], device: Device) -> Result<[f64; N]> {
        if self.is_alone() {
            return Ok(numbers);
        }
        host(&self.sum(&Tensor::f_from_slice(&numbers)?.f_to_device(device)?)?)
    }

    /// `first` of numbers of the host.
    pub fn first_of<const N: usize>(self, numbers: [f64; N], device: Device) -> Result<[f64; N]> {
        if self.is_alone() {
            return Ok(numbers);
        }
        host(&self.first(&Tensor::f_from_slice(&numbers)?.f_to_device(device)?)?)
    }

    /// This rank's result; an error where any rank has one, so that all stop at the same place.
    pub fn agree<T>(self, result: Result<T>, device: Device) -> Result<T> {
        let mine = match &result {
            Ok(_) => [0.0, 0.0],
            Err(Error::Interrupted(_)) => [1.0, 0.0],
            Err(_) => [0.0, 1.0],
        };
        let [interrupted, failed] = self.sum_of(mine, device)?;
        match result {
            Ok(_) | Err(Error::Interrupted(_)) if failed > 0.0 => {
                Err(Error::invalid("another rank failed: its message says why"))
            }
            Ok(_) if interrupted > 0.0 => Err(Error::Interrupted("another rank was stopped".into())),
            other => other,
        }
    }
}

fn host<const N: usize>(t: &Tensor) -> Result<[f64; N]> {
    let numbers = numbers(t)?;
    Ok(std::array::from_fn(|i| numbers[i]))
}

/// A tensor's numbers in its kernel's work space; tch's `Vec::try_from` ends the process where memory is short.
pub(super) fn numbers(t: &Tensor) -> Result<Vec<f64>> {
    let t = t.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?;
    let mut numbers = memory::filled(0.0, t.numel());
    t.f_copy_data(&mut numbers, t.numel())?;
    Ok(numbers)
}
