//! Label-smoothed cross-entropy over a target vocabulary.

use super::count::Count;
use super::device::{columns, columns_at_a_time, type_name};
use super::engine;
use super::ffi::{borrow, by_dtype, give, into_raw, pointer, status, take, View};
use crate::cpu::parallel::{self, Shared};
use crate::cpu::{Accumulator, Element};
use crate::cuda::{self, Grid};
use crate::error::{Error, Result};
use crate::kernel::cross_entropy::{self as kernel, Smoothing, Targets};
use std::ffi::c_int;
use std::sync::Mutex;
use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

pub static COUNT: Count = Count::new("label_smoothed_cross_entropy");

/// (loss, nll), one number per row, loss differentiable. `mask` is bool (V), true in the target vocabulary.
pub fn cross_entropy(
    logits: &Tensor,
    target: &Tensor,
    mask: Option<&Tensor>,
    smoothing: Smoothing,
    ignore_index: i64,
) -> Result<(Tensor, Tensor)> {
    engine::register();
    let mut nll = std::ptr::null_mut();
    // SAFETY: the tensors outlive the call; new tensors come back, nll only where loss does.
    unsafe {
        let loss = take(nfrs_cross_entropy(
            logits.as_ptr(),
            target.as_ptr(),
            pointer(mask),
            smoothing.nll,
            smoothing.uniform,
            ignore_index,
            &mut nll,
        ))?;
        Ok((loss, take(nll)?))
    }
}

/// The same, and `scale`·∂(Σ loss)/∂logits left where the logits were. `scale` is one float64 beside them.
pub fn cross_entropy_in_place(
    logits: &mut Tensor,
    target: &Tensor,
    mask: Option<&Tensor>,
    smoothing: Smoothing,
    ignore_index: i64,
    scale: &Tensor,
) -> Result<(Tensor, Tensor)> {
    engine::register();
    let mut nll = std::ptr::null_mut();
    // SAFETY: as above; the logits are borrowed mutably.
    unsafe {
        let loss = take(nfrs_cross_entropy_(
            logits.as_mut_ptr(),
            target.as_ptr(),
            pointer(mask),
            smoothing.nll,
            smoothing.uniform,
            ignore_index,
            scale.as_ptr(),
            &mut nll,
        ))?;
        Ok((loss, take(nll)?))
    }
}

/// The formula in tch, for devices without a kernel and for higher derivatives.
fn composed(
    logits: &Tensor,
    target: &Tensor,
    mask: Option<&Tensor>,
    smoothing: Smoothing,
    ignore_index: i64,
) -> Result<(Tensor, Tensor)> {
    let kind = if logits.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    let mut z = logits.f_to_kind(kind)?;
    let outside = mask.map(|m| m.f_logical_not()).transpose()?;
    if let Some(outside) = &outside {
        z = z.f_masked_fill(outside, f64::NEG_INFINITY)?;
    }
    let log_p = z.f_log_softmax(-1, kind)?;
    let ignored = target.f_eq(ignore_index)?;
    let mut target = target.f_masked_fill(&ignored, 0)?;
    let mut unknown = None;
    if target.device() != Device::Cpu {
        // A GPU that gathers out of bounds does nothing more: there a target that is no class gives NaN.
        let outside = target.f_lt(0)?.f_logical_or(&target.f_ge(*z.size().last().unwrap_or(&0))?)?;
        target = target.f_masked_fill(&outside, 0)?;
        unknown = Some(outside);
    }
    let mut nll = log_p.f_gather(-1, &target.f_unsqueeze(-1)?, false)?.f_squeeze_dim(-1)?.f_neg()?;
    if let Some(unknown) = &unknown {
        nll = nll.f_masked_fill(unknown, f64::NAN)?;
    }
    let log_p = match &outside {
        Some(outside) => log_p.f_masked_fill(outside, 0.0)?,
        None => log_p,
    };
    let uniform = log_p.f_sum_dim_intlist([-1i64].as_slice(), false, kind)?.f_neg()?;
    let loss = (&nll * smoothing.nll).f_add(&(uniform * smoothing.uniform))?;
    Ok((loss.f_masked_fill(&ignored, 0.0)?, nll.f_masked_fill(&ignored, 0.0)?))
}

extern "C" {
    fn nfrs_cross_entropy(
        logits: *const C_tensor,
        target: *const C_tensor,
        mask: *const C_tensor,
        nll_weight: f64,
        uniform_weight: f64,
        ignore_index: i64,
        nll: *mut *mut C_tensor,
    ) -> *mut C_tensor;
    fn nfrs_cross_entropy_(
        logits: *mut C_tensor,
        target: *const C_tensor,
        mask: *const C_tensor,
        nll_weight: f64,
        uniform_weight: f64,
        ignore_index: i64,
        scale: *const C_tensor,
        nll: *mut *mut C_tensor,
    ) -> *mut C_tensor;
}

/// The shim's `CrossEntropy`.
#[repr(C)]
struct Views {
    logits: View,
    target: View,
    mask: View,
    loss: View,
    nll: View,
    lse: View,
    nll_weight: f64,
    uniform_weight: f64,
    ignore_index: i64,
}

impl Views {
    fn smoothing(&self) -> Smoothing {
        Smoothing { nll: self.nll_weight, uniform: self.uniform_weight }
    }

    /// Runs `rows` on ranges of rows over threads; an Err is the first bad row within its range.
    fn each(
        &self,
        rows: impl Fn(std::ops::Range<usize>, Targets, &[u8]) -> std::result::Result<(), usize> + Sync,
    ) -> Result<()> {
        let (n, cols) = (self.logits.rows(), self.logits.cols());
        // SAFETY: the shim checked that target is int64, one per row, and mask bool, one per column; both contiguous.
        let (ids, mask) = unsafe { (self.target.slice::<i64>(), self.mask.slice::<u8>()) };
        let bad = Mutex::new(None::<usize>);
        let ignore = self.ignore_index;
        parallel::for_each(n, parallel::grain(cols), |r| {
            let targets = Targets { ids: &ids[r.clone()], ignore };
            if let Err(row) = rows(r.clone(), targets, mask) {
                let mut first = bad.lock().unwrap_or_else(|e| e.into_inner());
                *first = Some(first.map_or(r.start + row, |f| f.min(r.start + row)));
            }
        });
        match bad.into_inner().unwrap_or_else(|e| e.into_inner()) {
            None => Ok(()),
            Some(row) => Err(Error::Torch(format!(
                "label_smoothed_cross_entropy: the target of row {row} is {}, which is not in the target vocabulary \
                 ({cols} classes{}); ignored targets are {}",
                ids[row],
                if mask.is_empty() { "" } else { ", some of them masked out" },
                self.ignore_index
            ))),
        }
    }
}

#[no_mangle]
unsafe extern "C" fn nfrs_cross_entropy_forward(c: &Views) -> c_int {
    COUNT.kernel();
    status(|| match c.logits.device() {
        None => by_dtype!(c.logits, E => forward::<E>(c)),
        Some(device) => on_device(device, c, Gradient::No),
    })
}

fn forward<E: Element>(c: &Views) -> Result<()> {
    let cols = c.logits.cols();
    // SAFETY: contiguous logits of E; loss, nll and lse are fresh, one number of the accumulation type per row.
    let (logits, loss, nll, lse) = unsafe {
        let row = |v: &View| Shared::new(v.slice_mut::<E::Acc>());
        (c.logits.slice::<E>(), row(&c.loss), row(&c.nll), row(&c.lse))
    };
    let smoothing = c.smoothing();
    c.each(|r, targets, mask| {
        // SAFETY: the ranges are disjoint.
        let (loss, nll, lse) = unsafe { (loss.slice(r.clone()), nll.slice(r.clone()), lse.slice(r.clone())) };
        let logits = &logits[r.start * cols..r.end * cols];
        kernel::forward::<E>(cols, logits, targets, mask, smoothing, loss, nll, lse)
    })
}

#[no_mangle]
unsafe extern "C" fn nfrs_cross_entropy_backward(c: &Views, dloss: &View, dlogits: &View) -> c_int {
    status(|| match c.logits.device() {
        None => by_dtype!(c.logits, E => backward::<E>(c, dloss, dlogits)),
        Some(device) => on_device(device, c, Gradient::FromLse(dloss, dlogits)),
    })
}

fn backward<E: Element>(c: &Views, dloss: &View, dlogits: &View) -> Result<()> {
    let cols = c.logits.cols();
    // SAFETY: as in `forward`; dlogits is fresh.
    let (logits, lse, dloss, dlogits) = unsafe {
        let dlogits = Shared::new(dlogits.slice_mut::<E>());
        (c.logits.slice::<E>(), c.lse.slice::<E::Acc>(), dloss.slice::<E::Acc>(), dlogits)
    };
    let smoothing = c.smoothing();
    c.each(|r, targets, mask| {
        let block = r.start * cols..r.end * cols;
        // SAFETY: the ranges are disjoint.
        let dlogits = unsafe { dlogits.slice(block.clone()) };
        let (lse, dloss) = (&lse[r.clone()], &dloss[r.clone()]);
        kernel::backward::<E>(cols, &logits[block], targets, mask, smoothing, lse, dloss, dlogits)
    })
}

#[no_mangle]
unsafe extern "C" fn nfrs_cross_entropy_in_place(c: &Views, scale: &View) -> c_int {
    COUNT.kernel();
    status(|| match c.logits.device() {
        None => by_dtype!(c.logits, E => in_place::<E>(c, scale)),
        Some(device) => on_device(device, c, Gradient::InPlace(scale)),
    })
}

fn in_place<E: Element>(c: &Views, scale: &View) -> Result<()> {
    let cols = c.logits.cols();
    // SAFETY: the shim checked that it is one f64.
    let scale = E::Acc::from_f64(unsafe { scale.slice::<f64>() }[0]);
    // SAFETY: contiguous logits of E that the caller lent for writing; loss and nll are fresh.
    let (logits, loss, nll) = unsafe {
        let row = |v: &View| Shared::new(v.slice_mut::<E::Acc>());
        (Shared::new(c.logits.slice_mut::<E>()), row(&c.loss), row(&c.nll))
    };
    let smoothing = c.smoothing();
    c.each(|r, targets, mask| {
        // SAFETY: the ranges are disjoint.
        let (logits, loss, nll) =
            unsafe { (logits.slice(r.start * cols..r.end * cols), loss.slice(r.clone()), nll.slice(r.clone())) };
        kernel::in_place::<E>(cols, logits, targets, mask, smoothing, scale, loss, nll)
    })
}

/// What a GPU's kernel makes besides losses (cross_entropy.cu, K_GRADIENT).
enum Gradient<'a> {
    No,
    /// (dloss, dlogits)
    FromLse(&'a View, &'a View),
    /// The scale.
    InPlace(&'a View),
}

/// cross_entropy.cu's `CrossEntropy`.
#[repr(C)]
struct OnDevice {
    logits: *const u8,
    target: *const u8,
    mask: *const u8,
    loss: *mut u8,
    nll: *mut u8,
    lse: *mut u8,
    dloss: *const u8,
    dlogits: *mut u8,
    ignore_index: i64,
    nll_weight: f64,
    uniform_weight: f64,
    scale: *const u8,
    chunks: i32,
}

fn on_device(device: cuda::Device, c: &Views, gradient: Gradient) -> Result<()> {
    const LANES: u32 = 256;
    let (mode, dloss, dlogits, scale) = match gradient {
        Gradient::No => (0, View::ABSENT, View::ABSENT, View::ABSENT),
        Gradient::FromLse(dloss, dlogits) => (1, *dloss, *dlogits, View::ABSENT),
        Gradient::InPlace(scale) => (2, View::ABSENT, c.logits, *scale),
    };
    let vec = columns_at_a_time(&c.logits, &[&c.logits, &dlogits]);
    let arguments = OnDevice {
        logits: c.logits.data,
        target: c.target.data,
        mask: c.mask.data,
        loss: c.loss.data,
        nll: c.nll.data,
        lse: c.lse.data,
        dloss: dloss.data,
        dlogits: dlogits.data,
        ignore_index: c.ignore_index,
        nll_weight: c.nll_weight,
        uniform_weight: c.uniform_weight,
        scale: scale.data,
        chunks: (columns(&c.logits)? / vec) as i32,
    };
    let options =
        format!("-DK_VEC={vec} -DK_LANES={LANES} -DK_ROWS=1 -DK_X={} -DK_GRADIENT={mode}", type_name(c.logits.dtype)?);
    let blocks = u32::try_from(c.logits.rows).ok().filter(|rows| i32::try_from(*rows).is_ok());
    let blocks = blocks.ok_or_else(|| Error::Torch(format!("{} rows have no CUDA kernel", c.logits.rows)))?;
    // SAFETY: the shim gave contiguous logits, targets for every row, a mask for every column and fresh outputs, and
    // holds them until the call returns.
    unsafe {
        cuda::launch(device, &kernel::PROGRAM, &options, "cross_entropy", Grid { blocks, threads: LANES }, &arguments)
    }
}

#[no_mangle]
unsafe extern "C" fn nfrs_cross_entropy_composed(
    logits: *const C_tensor,
    target: *const C_tensor,
    mask: *const C_tensor,
    nll_weight: f64,
    uniform_weight: f64,
    ignore_index: i64,
    nll: *mut *mut C_tensor,
) -> *mut C_tensor {
    COUNT.composed();
    // SAFETY: the shim passes live tensors, or null for no mask.
    let (logits, target, mask) = unsafe { (borrow(logits), borrow(target), borrow(mask)) };
    give(|| {
        let (logits, target) = logits.as_ref().zip(target.as_ref()).expect("logits and target are never absent");
        let smoothing = Smoothing { nll: nll_weight, uniform: uniform_weight };
        let (loss, each) = composed(logits, target, mask.as_ref(), smoothing, ignore_index)?;
        // SAFETY: the shim gave a place for the pointer.
        unsafe { *nll = into_raw(each) };
        Ok(loss)
    })
}
