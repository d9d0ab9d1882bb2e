//! Label-smoothed cross-entropy over a target vocabulary.

use super::count::Count;
use super::declare::{derivative, leader, make, run, tensor, Argument, Kind as Type, Operator};
use super::device::{columns, columns_at_a_time, type_name};
use super::engine::{self, Handle};
use super::ffi::{by_dtype, Value, View};
use crate::cpu::parallel::{self, Shared};
use crate::cpu::{Accumulator, Element};
use crate::cuda::{self, Grid};
use crate::error::{Error, Result};
use crate::kernel::cross_entropy::{self as kernel, Smoothing, Targets};
use std::sync::Mutex;
use tch::{Device, Kind, Tensor};

pub static COUNT: Count = Count::new("label_smoothed_cross_entropy");
static HANDLE: Handle = Handle::new("label_smoothed_cross_entropy");
static IN_PLACE: Handle = Handle::new("label_smoothed_cross_entropy_");

/// (loss, nll), one number per row, loss differentiable. `mask` is bool (V), true in the target vocabulary.
pub fn cross_entropy(
    logits: &Tensor,
    target: &Tensor,
    mask: Option<&Tensor>,
    smoothing: Smoothing,
    ignore_index: i64,
) -> Result<(Tensor, Tensor)> {
    let Smoothing { nll, uniform } = smoothing;
    let arguments = [logits.into(), target.into(), mask.into(), nll.into(), uniform.into(), ignore_index.into()];
    let [loss, nll, _lse] = HANDLE.call(&arguments)?;
    Ok((loss, nll))
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
    let Smoothing { nll, uniform } = smoothing;
    let logits = &*logits;
    let [loss, nll] = IN_PLACE.call(&[
        logits.into(),
        target.into(),
        mask.into(),
        nll.into(),
        uniform.into(),
        ignore_index.into(),
        scale.into(),
    ])?;
    Ok((loss, nll))
}

// ---- the operators ----

/// n, c: rows, classes.
fn logits() -> Argument {
    leader("logits", "nc")
}

fn targets() -> [Argument; 2] {
    [tensor("target", "n", Type::Int64), tensor("mask", "c", Type::Bool).optional()]
}

/// One number per row.
fn per_row(name: &'static str) -> Argument {
    tensor(name, "n", Type::Computed)
}

fn check_classes(logits: &Value) -> Result<()> {
    let logits = logits.required();
    match engine::has_columns(&logits, 0) {
        false => Ok(()),
        true => Err(Error::invalid(format!(
            "label_smoothed_cross_entropy: logits must have at least one class, got {:?}",
            logits.size()
        ))),
    }
}

pub(super) fn operator() -> Operator {
    let [target, mask] = targets();
    Operator {
        schema: "label_smoothed_cross_entropy(Tensor logits, Tensor target, Tensor? mask, float nll_weight, \
                 float uniform_weight, int ignore_index) -> (Tensor, Tensor, Tensor)"
            .into(),
        arguments: vec![logits(), target.clone(), mask.clone()],
        outputs: ["loss", "nll", "lse"].map(per_row).into(),
        plan: run(|call| check_classes(&call.arguments::<6>()[0])),
        kernel: run(|call| {
            let ([logits, target, mask, numbers @ ..], [loss, nll, lse]) = (call.arguments::<6>(), call.outputs());
            let c = Views {
                loss: loss.view,
                nll: nll.view,
                lse: lse.view,
                ..Views::of([logits, target, mask], numbers.each_ref())
            };
            match call.device() {
                None => by_dtype!(c.logits, E => forward::<E>(&c)),
                Some(device) => on_device(device, &c, Gradient::No),
            }
        }),
        formula: make(|call| {
            let [logits, rest @ ..] = call.arguments::<6>();
            let (loss, nll) = formula(&logits.required(), rest)?;
            Ok(vec![Some(loss), Some(nll.f_detach()?), None])
        }),
        derivative: derivative(Operator {
            schema: "label_smoothed_cross_entropy_backward(Tensor dloss, Tensor logits, Tensor target, Tensor? mask, \
                     Tensor lse, float nll_weight, float uniform_weight, int ignore_index) -> Tensor"
                .into(),
            arguments: vec![per_row("dloss"), logits(), target, mask, per_row("lse")],
            outputs: vec![tensor("dlogits", "nc", Type::Same)],
            plan: run(|call| check_classes(&call.arguments::<8>()[1])),
            kernel: run(|call| {
                let ([dloss, logits, target, mask, lse, numbers @ ..], [dlogits]) =
                    (call.arguments::<8>(), call.outputs());
                let c = Views { lse: lse.view, ..Views::of([logits, target, mask], numbers.each_ref()) };
                match call.device() {
                    None => by_dtype!(c.logits, E => backward::<E>(&c, &dloss.view, &dlogits.view)),
                    Some(device) => on_device(device, &c, Gradient::FromLse(&dloss.view, &dlogits.view)),
                }
            }),
            ..Operator::default()
        }),
        count: Some(&COUNT),
        ..Operator::default()
    }
}

/// The loss, with the logits turned into scale·∂(Σ loss)/∂logits. The scale is a tensor so that a CUDA graph can be
/// replayed with another.
pub(super) fn in_place_operator() -> Operator {
    let [target, mask] = targets();
    Operator {
        schema: "label_smoothed_cross_entropy_(Tensor(a!) logits, Tensor target, Tensor? mask, float nll_weight, \
                 float uniform_weight, int ignore_index, Tensor scale) -> (Tensor, Tensor)"
            .into(),
        arguments: vec![logits().written(), target, mask, tensor("scale", "=1", Type::Float64)],
        outputs: ["loss", "nll"].map(per_row).into(),
        plan: run(|call| check_classes(&call.arguments::<7>()[0])),
        kernel: run(|call| {
            let ([logits, target, mask, a, b, ignored, scale], [loss, nll]) = (call.arguments(), call.outputs());
            let c = Views { loss: loss.view, nll: nll.view, ..Views::of([logits, target, mask], [a, b, ignored]) };
            match call.device() {
                None => by_dtype!(c.logits, E => in_place::<E>(&c, &scale.view)),
                Some(device) => on_device(device, &c, Gradient::InPlace(&scale.view)),
            }
        }),
        formula: make(|call| {
            let [logits, rest @ .., scale] = call.arguments::<7>();
            let (mut logits, mut losses) = (logits.required(), None);
            let wide = logits.f_to_kind(computed(&logits))?;
            let one = Tensor::f_ones([0i64; 0].as_slice(), (wide.kind(), wide.device()))?;
            let dlogits = engine::gradients(&[&wide], &one, |leaves| {
                let (loss, nll) = formula(&leaves[0], rest)?;
                let sum = loss.f_sum(loss.kind())?;
                losses = Some([loss.f_detach()?, nll.f_detach()?]);
                Ok(sum)
            })?;
            let scale = scale.required().f_reshape([0i64; 0].as_slice())?;
            if let [Some(dlogits)] = &dlogits[..] {
                tch::no_grad(|| logits.f_copy_(&dlogits.f_mul(&scale)?))?;
            }
            Ok(losses.into_iter().flatten().map(Some).collect())
        }),
        count: Some(&COUNT),
        ..Operator::default()
    }
}

fn computed(t: &Tensor) -> Kind {
    if t.kind() == Kind::Double {
        Kind::Double
    } else {
        Kind::Float
    }
}

/// (loss, nll) by the formula in tch.
fn formula(logits: &Tensor, [target, mask, nll, uniform, ignore_index]: &[Value; 5]) -> Result<(Tensor, Tensor)> {
    let (target, mask) = (target.required(), mask.tensor());
    let smoothing = Smoothing { nll: nll.float(), uniform: uniform.float() };
    composed(logits, &target, mask.as_ref(), smoothing, ignore_index.int())
}

fn composed(
    logits: &Tensor,
    target: &Tensor,
    mask: Option<&Tensor>,
    smoothing: Smoothing,
    ignore_index: i64,
) -> Result<(Tensor, Tensor)> {
    let kind = computed(logits);
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

/// A call; absent views have null data.
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
    /// Without its outputs.
    fn of(tensors: [&Value; 3], [nll_weight, uniform_weight, ignore_index]: [&Value; 3]) -> Views {
        let ([logits, target, mask], absent) = (tensors.map(|t| t.view), View::ABSENT);
        let (nll_weight, uniform_weight) = (nll_weight.float(), uniform_weight.float());
        let (loss, nll, lse, ignore_index) = (absent, absent, absent, ignore_index.int());
        Views { logits, target, mask, loss, nll, lse, nll_weight, uniform_weight, ignore_index }
    }

    fn smoothing(&self) -> Smoothing {
        Smoothing { nll: self.nll_weight, uniform: self.uniform_weight }
    }

    /// Runs `rows` on ranges of rows over threads; an Err is the first bad row within its range.
    fn each(
        &self,
        rows: impl Fn(std::ops::Range<usize>, Targets, &[u8]) -> std::result::Result<(), usize> + Sync,
    ) -> Result<()> {
        let (n, cols) = (self.logits.rows(), self.logits.cols());
        // SAFETY: by the operator's table targets are int64, one per row, and mask bool, one per column; both contiguous.
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

fn in_place<E: Element>(c: &Views, scale: &View) -> Result<()> {
    let cols = c.logits.cols();
    // SAFETY: the operator's table says that it is one f64.
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
    // SAFETY: C++ gave contiguous logits, targets for every row, a mask for every column and fresh outputs, and
    // holds them until the call returns.
    unsafe {
        cuda::launch(device, &kernel::PROGRAM, &options, "cross_entropy", Grid { blocks, threads: LANES }, &arguments)
    }
}
