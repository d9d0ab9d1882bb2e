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

/// The losses of the rows. `lse` has two numbers per row, and is absent for [`in_place`], after which no backward pass
/// follows.
pub struct Losses {
    pub loss: View,
    pub nll: View,
    pub lse: View,
}

/// Computes the losses and `lse`, which the backward pass needs, on a GPU or, if `device` is `None`, on the CPU.
pub fn forward(device: Option<Device>, views: &LossViews, losses: &Losses) -> Result<()> {
    match device {
        None => by_dtype!(views.logits, E => forward_typed::<E>(views, losses)),
        Some(device) => launch(device, views, losses, LogitGradient::No),
    }
}

/// Computes `dlogits` from `dloss`, the gradient of each row's loss, and from the forward pass's `lse`.
pub fn backward(device: Option<Device>, views: &LossViews, lse: View, dloss: &View, dlogits: &View) -> Result<()> {
    match device {
        None => by_dtype!(views.logits, E => backward_typed::<E>(views, &lse, dloss, dlogits)),
        Some(device) => {
            let losses = Losses { loss: View::ABSENT, nll: View::ABSENT, lse };
            launch(device, views, &losses, LogitGradient::FromLse(dloss, dlogits))
        }
    }
}

/// Computes the losses, and overwrites the logits with `scale`·∂(Σ loss)/∂logits.
pub fn in_place(device: Option<Device>, views: &LossViews, losses: &Losses, scale: &View) -> Result<()> {
    match device {
        None => by_dtype!(views.logits, E => in_place_typed::<E>(views, losses, scale)),
        Some(device) => launch(device, views, losses, LogitGradient::InPlace(scale)),
    }
}

impl LossViews {
    /// Calls `work(rows, logits_range, targets, mask)` on ranges of rows, which threads share: with the range, the
    /// index range of its logits, its targets and the mask. If a target is wrong, `work` returns the first such row,
    /// counted within its range; the error names the first one of all ranges.
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
        parallel::over_rows(n, cols, |rows, logits_range| {
            let targets = Targets { ids: &ids[rows.clone()], ignore };
            if let Err(row_in_range) = work(rows.clone(), logits_range, targets, mask) {
                let row = rows.start + row_in_range;
                // Ranges end in any order, so the smallest row is kept.
                let mut first = first_wrong.lock().unwrap_or_else(|e| e.into_inner());
                *first = Some(first.map_or(row, |first| first.min(row)));
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

/// Returns the index range of these rows' numbers in `lse`, which has two numbers per row.
fn pairs(rows: &Range<usize>) -> Range<usize> {
    2 * rows.start..2 * rows.end
}

/// Computes the losses, as [`forward`] does, on the CPU for the storage type E of the logits; writes them to `to`.
fn forward_typed<E: Element>(views: &LossViews, to: &Losses) -> Result<()> {
    let (cols, smoothing) = (views.logits.cols(), views.smoothing);
    // SAFETY: the logits are contiguous and of E. loss, nll and lse are new tensors of the accumulation type, lse with
    // two numbers per row, the others with one.
    let (logits, loss, nll, lse) = unsafe {
        let shared = |view: &View| Shared::new(view.slice_mut::<E::Acc>());
        (views.logits.slice::<E>(), shared(&to.loss), shared(&to.nll), shared(&to.lse))
    };
    views.over_rows(|rows, logits_range, targets, mask| {
        // SAFETY: the ranges are disjoint and inside the outputs.
        let (loss, nll, lse) = unsafe { (loss.slice(rows.clone()), nll.slice(rows.clone()), lse.slice(pairs(&rows))) };
        forward_rows::<E>(cols, &logits[logits_range], targets, mask, smoothing, loss, nll, lse)
    })
}

/// Computes dlogits, as [`backward`] does, on the CPU for the storage type E of the logits.
fn backward_typed<E: Element>(views: &LossViews, lse: &View, dloss: &View, dlogits: &View) -> Result<()> {
    let (cols, smoothing) = (views.logits.cols(), views.smoothing);
    // SAFETY: the logits are contiguous and of E; lse and dloss are of the accumulation type, and dlogits is a new
    // tensor of E.
    let (logits, lse, dloss, dlogits) = unsafe {
        let dlogits = Shared::new(dlogits.slice_mut::<E>());
        (views.logits.slice::<E>(), lse.slice::<E::Acc>(), dloss.slice::<E::Acc>(), dlogits)
    };
    views.over_rows(|rows, logits_range, targets, mask| {
        // SAFETY: the ranges are disjoint and inside dlogits.
        let dlogits = unsafe { dlogits.slice(logits_range.clone()) };
        let (lse, dloss) = (&lse[pairs(&rows)], &dloss[rows.clone()]);
        backward_rows::<E>(cols, &logits[logits_range], targets, mask, smoothing, lse, dloss, dlogits)
    })
}

/// Computes [`in_place`] on the CPU for the storage type E of the logits; writes the losses to `to`.
fn in_place_typed<E: Element>(views: &LossViews, to: &Losses, scale: &View) -> Result<()> {
    let (cols, smoothing) = (views.logits.cols(), views.smoothing);
    // SAFETY: the operator's declaration guarantees that `scale` is one f64.
    let scale = E::Acc::from_f64(unsafe { scale.slice::<f64>() }[0]);
    // SAFETY: the logits are contiguous and of E, and the caller allows overwriting them; loss and nll are new.
    let (logits, loss, nll) = unsafe {
        let shared = |view: &View| Shared::new(view.slice_mut::<E::Acc>());
        (Shared::new(views.logits.slice_mut::<E>()), shared(&to.loss), shared(&to.nll))
    };
    views.over_rows(|rows, logits_range, targets, mask| {
        // SAFETY: the ranges are disjoint and inside these tensors.
        let (logits, loss, nll) =
            unsafe { (logits.slice(logits_range), loss.slice(rows.clone()), nll.slice(rows.clone())) };
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
fn launch(device: Device, views: &LossViews, losses: &Losses, gradient: LogitGradient) -> Result<()> {
    // The number of threads in a block.
    const LANES: u32 = 256;
    // `mode` is the value of the kernel's option K_GRADIENT. The gradient in place is written where the logits are.
    let (mode, dloss, dlogits, scale) = match gradient {
        LogitGradient::No => (0, View::ABSENT, View::ABSENT, View::ABSENT),
        LogitGradient::FromLse(dloss, dlogits) => (1, *dloss, *dlogits, View::ABSENT),
        LogitGradient::InPlace(scale) => (2, View::ABSENT, views.logits, *scale),
    };
    let vec = columns_at_a_time(&views.logits, &[&views.logits, &dlogits]);
    let arguments = Arguments {
        logits: views.logits.data,
        target: views.target.data,
        mask: views.mask.data,
        loss: losses.loss.data,
        nll: losses.nll.data,
        lse: losses.lse.data,
        dloss: dloss.data,
        dlogits: dlogits.data,
        ignore_index: views.ignore_index,
        nll_weight: views.smoothing.nll,
        uniform_weight: views.smoothing.uniform,
        scale: scale.data,
        chunks: (columns(&views.logits)? / vec) as i32,
    };
    let options = format!(
        "-DK_VEC={vec} -DK_LANES={LANES} -DK_ROWS=1 -DK_X={} -DK_GRADIENT={mode}",
        type_name(views.logits.dtype)?
    );
    let blocks = u32::try_from(views.logits.rows).ok().filter(|rows| i32::try_from(*rows).is_ok());
    let blocks = blocks.ok_or_else(|| Error::Torch(format!("{} rows have no CUDA kernel", views.logits.rows)))?;
    // SAFETY: the C++ operator passed contiguous logits, a target for every row, a mask byte for every column and new
    // outputs, and holds them until the call returns.
    unsafe { cuda::launch(device, &PROGRAM, &options, "cross_entropy", Grid { blocks, threads: LANES }, &arguments) }
}
