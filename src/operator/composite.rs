//! Operators that are compositions of others: PyTorch differentiates, batches and traces what they are made of. On a
//! GPU `lp_norm` runs ScaleNorm's kernels with lengths of another order.

use super::count::Count;
use super::declare::{derivative, gradient, leader, make, parameter, run, tensor, title, Kernels, Kind, Operator};
use super::device_rows::{self, Rows, Sums};
use super::engine::{self, Handle};
use super::ffi::{Call, Draw, Value, View};
use super::row_norm::row_norm;
use crate::cuda::Device;
use crate::error::{Error, Result};
use crate::norm::{self, lp_norm as lp, rms_norm, scale_norm};
use tch::Tensor;

pub static COUNT: Count = Count::new("lp_norm");
static HANDLE: Handle = Handle::new("lp_norm");
static ON_DEVICE: Handle = Handle::new("lp_norm_forward");

/// y of a norm that names its operator ([`norm::Form::Operator`]), through the dispatcher; `options` as it declares them.
pub fn norm_by_name(name: &str, x: &Tensor, weight: Option<&Tensor>, options: &[f64]) -> Result<Tensor> {
    let [y] = match name {
        "lp_norm" => HANDLE.call(&[x.into(), weight.into(), options[lp::P].into(), options[lp::EPSILON].into()])?,
        other => unreachable!("no operator {other} is a norm"),
    };
    Ok(y)
}

/// lp_norm's formula; p = 2 goes to ScaleNorm's operator.
fn lp_composed(x: &Tensor, weight: Option<&Tensor>, p: f64, eps: f64) -> Result<Tensor> {
    match p == 2.0 {
        true => row_norm(&scale_norm::KERNELS, x, weight, None, eps),
        false => lp::composed(x, weight, p, eps),
    }
}

/// x (…, d) in `groups` equal parts of its last dimension, each divided by its root mean square: rmsnorm's kernels.
pub fn group_scaling(x: &Tensor, groups: i64) -> Result<Tensor> {
    let scaled = |x: &Tensor| row_norm(&rms_norm::KERNELS, x, None, None, norm::group_scaling::EPS);
    match groups {
        1 => scaled(x),
        _ => Ok(scaled(&x.f_unflatten(-1, [groups, -1].as_slice())?)?.f_flatten(-2, -1)?),
    }
}

fn composition(schema: &str) -> Operator {
    Operator { schema: schema.into(), kernels: Kernels::Composition, ..Operator::default() }
}

/// Rows of no numbers have nothing to be divided by.
fn unless_empty(x: &Tensor, y: impl FnOnce() -> Result<Tensor>) -> Result<Vec<Option<Tensor>>> {
    let y = if engine::has_columns(x, 0) { x.f_mul_scalar(1.0)? } else { y()? };
    Ok(vec![Some(y)])
}

pub(super) fn lp_norm_operator() -> Operator {
    Operator {
        arguments: vec![leader("x", "*d"), parameter("weight")],
        outputs: vec![tensor("y", "*d", Kind::Same)],
        plan: run(|call| check_order(call.arguments::<4>()[2].float())),
        formula: make(|call| {
            let [x, weight, p, eps] = call.arguments();
            let (x, weight, p, eps) = (x.required(), weight.tensor(), p.float(), eps.float());
            unless_empty(&x, || {
                if p != 2.0 && call.device().is_some() {
                    let [y, _stats] = ON_DEVICE.call(&[(&x).into(), weight.as_ref().into(), p.into(), eps.into()])?;
                    return Ok(y);
                }
                COUNT.composed();
                lp_composed(&x, weight.as_ref(), p, eps)
            })
        }),
        ..composition("lp_norm(Tensor x, Tensor? weight, float p, float eps) -> Tensor")
    }
}

/// lp_norm where a GPU has kernels for it.
pub(super) fn lp_norm_on_device() -> Operator {
    let weight = || parameter("weight").computed();
    let stats = || tensor("stats", "*1", Kind::Float32);
    Operator {
        schema: "lp_norm_forward(Tensor x, Tensor? weight, float p, float eps) -> (Tensor, Tensor)".into(),
        arguments: vec![leader("x", "*d"), weight()],
        outputs: vec![tensor("y", "*d", Kind::Same), stats()],
        plan: run(|call| check_order(call.arguments::<4>()[2].float())),
        kernel: run(|call| {
            let ([x, weight, p, eps], [y, stats]) = (call.arguments(), call.outputs());
            let (device, rows) = on_device(call, x.view, weight.view, stats.view, p, eps)?;
            device_rows::forward(device, &scale_norm::KERNELS.program, &Rows { y: y.view, ..rows })
        }),
        formula: make(|call| {
            let [x, weight, p, eps] = call.arguments();
            let y = lp_composed(&x.required(), weight.tensor().as_ref(), p.float(), eps.float())?;
            Ok(vec![Some(y), None])
        }),
        derivative: derivative(Operator {
            schema: "lp_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor stats, float p, float eps) -> \
                     (Tensor, Tensor)"
                .into(),
            arguments: vec![tensor("dy", "*d", Kind::Same), leader("x", "*d"), weight(), stats()],
            outputs: vec![gradient("dx", "x"), gradient("dweight", "weight")],
            plan: run(|call| check_order(call.arguments::<6>()[4].float())),
            kernel: run(|call| {
                let ([dy, x, weight, stats, p, eps], [dx, dweight]) = (call.arguments(), call.outputs());
                let (device, rows) = on_device(call, x.view, weight.view, stats.view, p, eps)?;
                let (sums, no) = (Sums { dweight: dweight.view, ..Sums::NONE }, View::ABSENT);
                device_rows::backward(device, &scale_norm::KERNELS.program, &rows, no, dy.view, dx.view, no, &sums)
            }),
            ..Operator::default()
        }),
        count: Some(&COUNT),
        ..Operator::default()
    }
}

fn check_order(p: f64) -> Result<()> {
    match p >= 1.0 {
        true => Ok(()),
        false => Err(Error::invalid(format!("lp_norm: p must be at least 1, or inf, got {p}"))),
    }
}

/// The call as a step's norm on a GPU, x⁺ = x, and the GPU.
fn on_device(call: &Call, x: View, weight: View, stats: View, p: &Value, eps: &Value) -> Result<(Device, Rows)> {
    let order = Some(p.float());
    let rows = Rows { x, weight, stats, eps: eps.float(), order, x_plus: x, ..Rows::of(Draw::NONE) };
    let only = "lp_norm_forward and lp_norm_backward are for CUDA tensors: call lp_norm";
    call.device().map(|device| (device, rows)).ok_or_else(|| Error::Torch(only.into()))
}

/// x/√(mean over each group of x² + 1e-5).
pub(super) fn group_scaling_operator() -> Operator {
    Operator {
        arguments: vec![leader("x", "*d")],
        outputs: vec![tensor("y", "*d", Kind::Same)],
        plan: run(|call| {
            let [x, groups] = call.arguments();
            let (x, groups) = (x.required(), groups.int());
            let bad = |why: String| Err(Error::invalid(format!("group_scaling: groups must {why}")));
            if groups < 1 {
                return bad(format!("be at least 1, got {groups}"));
            }
            match engine::has_columns(&x, groups) {
                true => Ok(()),
                false => bad(format!(
                    "divide the width of x, got {groups} groups and width {}",
                    x.size().last().copied().unwrap_or(1)
                )),
            }
        }),
        formula: make(|call| {
            let [x, groups] = call.arguments();
            let x = x.required();
            unless_empty(&x, || group_scaling(&x, groups.int()))
        }),
        ..composition("group_scaling(Tensor x, int groups=1) -> Tensor")
    }
}

/// The norm of the table that has this name and is its composed form alone.
pub(super) fn composed_norm() -> Operator {
    Operator {
        arguments: vec![leader("x", "*d"), parameter("parameters"), title("name")],
        outputs: vec![tensor("y", "*d", Kind::Same)],
        formula: make(|call| {
            let [x, parameters, options, name] = call.arguments();
            let x = x.required();
            let spec = norm::find(name.text())?;
            unless_empty(&x, || spec.composed(&x, parameters.tensors(), &options.numbers()))
        }),
        ..composition("composed_norm(Tensor x, Tensor?[] parameters, float[] options, str name) -> Tensor")
    }
}
