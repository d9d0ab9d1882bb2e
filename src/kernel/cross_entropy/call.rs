//! Cross-entropy on an operator's tensors: threads share the rows on the CPU; a GPU runs one kernel.

use super::{backward as backward_rows, forward as forward_rows, in_place as in_place_rows};
use super::{Smoothing, Targets, PROGRAM};
use crate::cpu::parallel::{self, Shared};
use crate::cpu::{Accumulator, Element};
use crate::cuda::{self, Device, Grid, StructLayout};
use crate::device_struct;
use crate::error::{Error, Result};
use crate::kernel::launch::{columns, columns_at_a_time, type_name};
use crate::kernel::view::{by_dtype, View};
use std::ops::Range;
use std::sync::Mutex;

/// The inputs of every pass: logits (rows, classes), a target per row, and an optional mask of classes.
pub struct LossViews {
    pub logits: View,
    pub target: View,
    pub mask: View,
    pub smoothing: Smoothing,
    pub ignore_index: i64,
}

/// The losses of the rows; `lse` (two numbers per row) is absent if no backward pass follows.
pub struct Losses {
    pub loss: View,
    pub nll: View,
    pub lse: View,
}

/// Computes the losses, and `lse`, which the backward pass needs.
pub fn forward(device: Option<Device>, c: &LossViews, losses: &Losses) -> Result<()> {
    match device {
        None => by_dtype!(c.logits, E => forward_typed::<E>(c, losses)),
        Some(device) => launch(device, c, losses, LogitGradient::No),
    }
}

/// Computes dlogits from the forward pass's `lse`.
pub fn backward(device: Option<Device>, c: &LossViews, lse: View, dloss: &View, dlogits: &View) -> Result<()> {
    match device {
        None => by_dtype!(c.logits, E => backward_typed::<E>(c, &lse, dloss, dlogits)),
        Some(device) => {
            let losses = Losses { loss: View::ABSENT, nll: View::ABSENT, lse };
            launch(device, c, &losses, LogitGradient::FromLse(dloss, dlogits))
        }
    }
}

/// Computes the losses, and overwrites the logits with `scale`·∂(Σ loss)/∂logits.
pub fn in_place(device: Option<Device>, c: &LossViews, losses: &Losses, scale: &View) -> Result<()> {
    match device {
        None => by_dtype!(c.logits, E => in_place_typed::<E>(c, losses, scale)),
        Some(device) => launch(device, c, losses, LogitGradient::InPlace(scale)),
    }
}

impl LossViews {
    /// Calls `work` on ranges of rows, which threads share, with the range, the index range of its logits, its targets
    /// and the mask. `work` returns the first row with a wrong target, counted in its range; the error names that row.
    fn over_rows(
        &self,
        work: impl Fn(Range<usize>, Range<usize>, Targets, &[u8]) -> std::result::Result<(), usize> + Sync,
    ) -> Result<()> {
        let (n, cols) = (self.logits.rows(), self.logits.cols());
        // SAFETY: the operator's declaration guarantees int64 targets, one per row, and a bool mask, one per column;
        // both are contiguous.
        let (ids, mask) = unsafe { (self.target.slice::<i64>(), self.mask.slice::<u8>()) };
        let first_wrong = Mutex::new(None::<usize>);
        let ignore = self.ignore_index;
        parallel::over_rows(n, cols, |r, all| {
            let targets = Targets { ids: &ids[r.clone()], ignore };
            // Of all ranges' rows the first is reported.
            if let Err(row) = work(r.clone(), all, targets, mask) {
                let mut first = first_wrong.lock().unwrap_or_else(|e| e.into_inner());
                *first = Some(first.map_or(r.start + row, |f| f.min(r.start + row)));
            }
        });
        match first_wrong.into_inner().unwrap_or_else(|e| e.into_inner()) {
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

/// Returns the range in `lse` of the numbers for these rows, two per row.
fn pairs(rows: &Range<usize>) -> Range<usize> {
    2 * rows.start..2 * rows.end
}

/// Runs [`forward`] on the CPU for the storage type E of the logits.
fn forward_typed<E: Element>(c: &LossViews, to: &Losses) -> Result<()> {
    let (cols, smoothing) = (c.logits.cols(), c.smoothing);
    // SAFETY: the logits are contiguous and of E. loss, nll and lse are fresh and of the accumulation type, lse with
    // two numbers per row, the others with one.
    let (logits, loss, nll, lse) = unsafe {
        let row = |v: &View| Shared::new(v.slice_mut::<E::Acc>());
        (c.logits.slice::<E>(), row(&to.loss), row(&to.nll), row(&to.lse))
    };
    c.over_rows(|r, all, targets, mask| {
        // SAFETY: the ranges are disjoint.
        let (loss, nll, lse) = unsafe { (loss.slice(r.clone()), nll.slice(r.clone()), lse.slice(pairs(&r))) };
        forward_rows::<E>(cols, &logits[all], targets, mask, smoothing, loss, nll, lse)
    })
}

/// Runs [`backward`] on the CPU for the storage type E of the logits.
fn backward_typed<E: Element>(c: &LossViews, lse: &View, dloss: &View, dlogits: &View) -> Result<()> {
    let (cols, smoothing) = (c.logits.cols(), c.smoothing);
    // SAFETY: the conditions of `forward_typed` hold; dlogits is fresh.
    let (logits, lse, dloss, dlogits) = unsafe {
        let dlogits = Shared::new(dlogits.slice_mut::<E>());
        (c.logits.slice::<E>(), lse.slice::<E::Acc>(), dloss.slice::<E::Acc>(), dlogits)
    };
    c.over_rows(|r, all, targets, mask| {
        // SAFETY: the ranges are disjoint.
        let dlogits = unsafe { dlogits.slice(all.clone()) };
        let (lse, dloss) = (&lse[pairs(&r)], &dloss[r.clone()]);
        backward_rows::<E>(cols, &logits[all], targets, mask, smoothing, lse, dloss, dlogits)
    })
}

/// Runs [`in_place`] on the CPU for the storage type E of the logits.
fn in_place_typed<E: Element>(c: &LossViews, to: &Losses, scale: &View) -> Result<()> {
    let (cols, smoothing) = (c.logits.cols(), c.smoothing);
    // SAFETY: the operator's declaration guarantees that `scale` is one f64.
    let scale = E::Acc::from_f64(unsafe { scale.slice::<f64>() }[0]);
    // SAFETY: the logits are contiguous and of E, and the caller allows overwriting them; loss and nll are fresh.
    let (logits, loss, nll) = unsafe {
        let row = |v: &View| Shared::new(v.slice_mut::<E::Acc>());
        (Shared::new(c.logits.slice_mut::<E>()), row(&to.loss), row(&to.nll))
    };
    c.over_rows(|r, all, targets, mask| {
        // SAFETY: the ranges are disjoint.
        let (logits, loss, nll) = unsafe { (logits.slice(all), loss.slice(r.clone()), nll.slice(r.clone())) };
        in_place_rows::<E>(cols, logits, targets, mask, smoothing, scale, loss, nll)
    })
}

/// The gradient that the GPU's kernel computes besides the losses (K_GRADIENT in cross_entropy.cu).
enum LogitGradient<'a> {
    No,
    /// From lse; the views are dloss and dlogits.
    FromLse(&'a View, &'a View),
    /// In the place of the logits; the view is the scale.
    InPlace(&'a View),
}

/// The structs of cross_entropy.cu.
pub const STRUCTS: &[&StructLayout] = &[&Arguments::LAYOUT];

device_struct! {
    /// The struct `CrossEntropy` of cross_entropy.cu.
    struct Arguments = "CrossEntropy" {
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
}

/// Launches the kernel, which computes the losses that are not absent, and the gradient. Each block computes one row.
fn launch(device: Device, c: &LossViews, losses: &Losses, gradient: LogitGradient) -> Result<()> {
    // A block has this number of threads.
    const LANES: u32 = 256;
    // `mode` is the number of K_GRADIENT. The gradient in place is written where the logits are.
    let (mode, dloss, dlogits, scale) = match gradient {
        LogitGradient::No => (0, View::ABSENT, View::ABSENT, View::ABSENT),
        LogitGradient::FromLse(dloss, dlogits) => (1, *dloss, *dlogits, View::ABSENT),
        LogitGradient::InPlace(scale) => (2, View::ABSENT, c.logits, *scale),
    };
    let vec = columns_at_a_time(&c.logits, &[&c.logits, &dlogits]);
    let arguments = Arguments {
        logits: c.logits.data,
        target: c.target.data,
        mask: c.mask.data,
        loss: losses.loss.data,
        nll: losses.nll.data,
        lse: losses.lse.data,
        dloss: dloss.data,
        dlogits: dlogits.data,
        ignore_index: c.ignore_index,
        nll_weight: c.smoothing.nll,
        uniform_weight: c.smoothing.uniform,
        scale: scale.data,
        chunks: (columns(&c.logits)? / vec) as i32,
    };
    let options =
        format!("-DK_VEC={vec} -DK_LANES={LANES} -DK_ROWS=1 -DK_X={} -DK_GRADIENT={mode}", type_name(c.logits.dtype)?);
    let blocks = u32::try_from(c.logits.rows).ok().filter(|rows| i32::try_from(*rows).is_ok());
    let blocks = blocks.ok_or_else(|| Error::Torch(format!("{} rows have no CUDA kernel", c.logits.rows)))?;
    // SAFETY: C++ gave contiguous logits, targets for every row, a mask for every column and fresh outputs, and
    // holds them until the call returns.
    unsafe { cuda::launch(device, &PROGRAM, &options, "cross_entropy", Grid { blocks, threads: LANES }, &arguments) }
}
