//! Collective operations of a process group, with torch.distributed's own operators.

use super::call::{values, Value};
use super::engine::Handle;
use crate::error::{Error, Result};
use crate::kernel::columns::Ranks;
use std::sync::{Mutex, MutexGuard};
use tch::Tensor;

/// A process group of torch.distributed, or a single process.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProcessGroup(Option<&'static GroupMember>);

// These are operators of torch.distributed, which move the data. Callers pass tensors on the device that the group's
// backend requires (gloo: CPU, NCCL: CUDA).
static ALL_REDUCE: Handle = Handle::of_torch("_c10d_functional::all_reduce");
static ALL_REDUCE_IN_PLACE: Handle = Handle::of_torch("_c10d_functional::all_reduce_");
static ALL_GATHER: Handle = Handle::of_torch("_c10d_functional::all_gather_into_tensor");
static BROADCAST: Handle = Handle::of_torch("_c10d_functional::broadcast");
static WAIT: Handle = Handle::of_torch("_c10d_functional::wait_tensor");

/// Parts of the messages with which gloo and NCCL report a lost process. The first letter is left out if its case
/// varies.
const LOST_PROCESS: [&str; 7] =
    ["onnection closed", "onnection reset", "onnection refused", "roken pipe", "imed out", "NCCL", "remote process"];

/// This process's place in a registered process group.
#[derive(Debug)]
struct GroupMember {
    name: String,
    rank: usize,
    size: usize,
}

impl GroupMember {
    /// Calls a collective operation with these arguments, waits for it, and returns its result. If another process has
    /// died, the error says so in one line.
    fn waited(&self, collective: &Handle, arguments: &[Value]) -> Result<Tensor> {
        let call = || {
            let [t] = collective.call(arguments)?;
            let [t] = WAIT.call(&values![&t])?;
            Ok(t)
        };
        call().map_err(|e| match e {
            Error::Torch(text) if LOST_PROCESS.iter().any(|part| text.contains(part)) => Error::Torch(format!(
                "rank {} of {} lost a partner, which has died or cannot be reached ({}): start all of them again, with \
                 --resume where the run had begun",
                self.rank,
                self.size,
                text.lines().next().unwrap_or_default()
            )),
            other => other,
        })
    }
}

/// The registered groups, which are never removed.
static KNOWN: Mutex<Vec<&'static GroupMember>> = Mutex::new(Vec::new());

/// Locks the list of registered groups.
fn known() -> MutexGuard<'static, Vec<&'static GroupMember>> {
    KNOWN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Ranks for GroupMember {
    fn name(&self) -> &str {
        &self.name
    }

    /// Returns the t of all ranks, stacked along a new first dimension.
    fn gather(&self, t: &Tensor) -> Result<Tensor> {
        let t = t.f_unsqueeze(0)?.f_contiguous()?;
        self.waited(&ALL_GATHER, &values![&t, self.size as i64, self.name()])
    }

    fn sum(&self, t: &Tensor) -> Result<Tensor> {
        self.waited(&ALL_REDUCE, &values![t, "sum", self.name()])
    }
}

impl ProcessGroup {
    /// A single process.
    pub const ALONE: ProcessGroup = ProcessGroup(None);

    /// Registers the process group `name` of torch.distributed, in which this process is `rank` of `size`.
    pub fn new(name: &str, rank: usize, size: usize) -> Result<Self> {
        if rank >= size {
            return Err(Error::invalid(format!("rank {rank} of a process group of {size}; expected one below {size}")));
        }
        if size == 1 {
            return Ok(ProcessGroup::ALONE);
        }
        // A group that is already registered is not leaked a second time.
        let mut known = known();
        let is_same = |group: &&&GroupMember| (group.name.as_str(), group.rank, group.size) == (name, rank, size);
        let registered = known.iter().find(is_same).copied();
        Ok(ProcessGroup(Some(registered.unwrap_or_else(|| {
            let new = Box::leak(Box::new(GroupMember { name: name.to_string(), rank, size }));
            known.push(new);
            new
        }))))
    }

    /// Returns the group registered as `name`; "" is a single process.
    pub fn named(name: &str) -> Option<Self> {
        if name.is_empty() {
            return Some(ProcessGroup::ALONE);
        }
        known().iter().find(|group| group.name == name).map(|group| ProcessGroup(Some(*group)))
    }

    /// Returns the group in the form that norms with statistics over several processes need; `None` for a single
    /// process.
    pub fn ranks(self) -> Option<&'static dyn Ranks> {
        self.0.map(|member| member as &dyn Ranks)
    }

    /// Returns this process's index in the group.
    pub fn rank(self) -> usize {
        self.0.map_or(0, |member| member.rank)
    }

    /// Returns the number of processes.
    pub fn size(self) -> usize {
        self.0.map_or(1, |member| member.size)
    }

    pub fn is_alone(self) -> bool {
        self.0.is_none()
    }

    /// True for the process that writes files and messages.
    pub fn is_first(self) -> bool {
        self.rank() == 0
    }

    /// Returns the sum of t over all ranks.
    pub fn sum(self, t: &Tensor) -> Result<Tensor> {
        self.0.map_or_else(|| Ok(t.shallow_clone()), |member| member.sum(t))
    }

    /// Replaces t by its sum over all ranks, so that a model's gradients need no copy.
    pub fn sum_in_place(self, t: &mut Tensor) -> Result<()> {
        self.reduce_in_place(t, "sum")
    }

    /// Replaces each number of t by its maximum over all ranks.
    pub fn largest_in_place(self, t: &mut Tensor) -> Result<()> {
        self.reduce_in_place(t, "max")
    }

    /// Replaces t by its reduction over all ranks; `reduction` is "sum" or "max".
    fn reduce_in_place(self, t: &mut Tensor, reduction: &str) -> Result<()> {
        if let Some(member) = self.0 {
            let _ = member.waited(&ALL_REDUCE_IN_PLACE, &values![&*t, reduction, member.name()])?;
        }
        Ok(())
    }

    /// Returns the t of rank 0 on every rank.
    pub fn first(self, t: &Tensor) -> Result<Tensor> {
        match self.0 {
            None => Ok(t.shallow_clone()),
            Some(member) => {
                let source_rank = 0i64;
                member.waited(&BROADCAST, &values![t, source_rank, member.name()])
            }
        }
    }
}
