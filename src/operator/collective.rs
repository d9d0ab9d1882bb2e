//! What the ranks of a process group do together, by torch.distributed's own collectives.

use super::ffi::{shim_error, take};
use crate::error::{Error, Result};
use std::ffi::{c_char, CStr, CString};
use std::sync::{Mutex, MutexGuard};
use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

/// A process group of torch.distributed, or a process alone: a small number, so that operators can hand it on.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Group(i64);

struct Known {
    name: CString,
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
        let name = CString::new(name).map_err(|_| Error::invalid("the name of a process group holds a NUL"))?;
        let mut known = known();
        let found = known.iter().position(|k| (&k.name, k.rank, k.size) == (&name, rank, size));
        Ok(Group(
            1 + found.unwrap_or_else(|| {
                known.push(Known { name, rank, size });
                known.len() - 1
            }) as i64,
        ))
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

    fn name(self) -> CString {
        self.with(|k| k.map(|k| k.name.clone()).unwrap_or_default())
    }

    fn call(
        self,
        t: &Tensor,
        act: unsafe extern "C" fn(*const C_tensor, i64, *const c_char) -> *mut C_tensor,
    ) -> Result<Tensor> {
        let name = self.name();
        // SAFETY: the tensor and the name outlive the call; a new tensor comes back.
        unsafe { take(act(t.as_ptr(), self.size() as i64, name.as_ptr())) }
    }

    /// Σ over ranks.
    pub fn sum(self, t: &Tensor) -> Result<Tensor> {
        match self.is_alone() {
            true => Ok(t.shallow_clone()),
            false => self.call(t, nfrs_all_reduce),
        }
    }

    /// t ← Σ over ranks.
    pub fn sum_in_place(self, t: &mut Tensor) -> Result<()> {
        let name = self.name();
        // SAFETY: the tensor and the name outlive the call.
        match self.is_alone() || unsafe { nfrs_all_reduce_(t.as_mut_ptr(), name.as_ptr()) } {
            true => Ok(()),
            false => Err(shim_error()),
        }
    }

    /// (ranks, …): every rank's t.
    pub fn gather(self, t: &Tensor) -> Result<Tensor> {
        match self.is_alone() {
            true => Ok(t.f_unsqueeze(0)?),
            false => self.call(t, nfrs_all_gather),
        }
    }

    /// Rank 0's t.
    pub fn first(self, t: &Tensor) -> Result<Tensor> {
        match self.is_alone() {
            true => Ok(t.shallow_clone()),
            false => self.call(t, nfrs_broadcast),
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
    let numbers = Vec::<f64>::try_from(t.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?)?;
    Ok(std::array::from_fn(|i| numbers[i]))
}

/// For operators, which are given a group by its name; "": alone.
///
/// # Safety
/// `name` is NUL-terminated.
#[no_mangle]
unsafe extern "C" fn nfrs_group(name: *const c_char) -> i64 {
    // SAFETY: the shim passes a std::string's c_str().
    let name = unsafe { CStr::from_ptr(name) };
    match known().iter().position(|k| k.name.as_c_str() == name) {
        Some(i) => i as i64 + 1,
        None if name.is_empty() => 0,
        None => -1,
    }
}

/// The name of a group, for operators that hand it on; the caller copies it into `to`, which has room for `room` bytes.
#[no_mangle]
unsafe extern "C" fn nfrs_group_name(group: i64, to: *mut c_char, room: i64) -> bool {
    let name = Group(group).name();
    let bytes = name.as_bytes_with_nul();
    if bytes.len() > room as usize {
        return false;
    }
    // SAFETY: the shim's buffer has `room` bytes.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), to, bytes.len()) };
    true
}

extern "C" {
    fn nfrs_all_reduce(t: *const C_tensor, size: i64, group: *const c_char) -> *mut C_tensor;
    fn nfrs_all_reduce_(t: *mut C_tensor, group: *const c_char) -> bool;
    fn nfrs_all_gather(t: *const C_tensor, size: i64, group: *const c_char) -> *mut C_tensor;
    fn nfrs_broadcast(t: *const C_tensor, size: i64, group: *const c_char) -> *mut C_tensor;
}
