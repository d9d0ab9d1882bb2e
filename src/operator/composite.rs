//! Operators composed of other operators, which PyTorch differentiates, batches and traces one by one. On a GPU
//! `lp_norm` runs ScaleNorm's kernels, with the p-norm in place of the Euclidean norm.

use super::call::{values, Call, Value};
use super::declare::{gradient, leader, parameter, parameter_or_matrix, tensor, title, Argument, DtypeRule, Operator};
use super::engine::{self, Handle};
use super::row_norm::RowNormOp;
use crate::cuda::Device;
use crate::error::{Error, Result};
use crate::kernel::rows::call::{self as kernel, RowGradients, RowViews};
use crate::norm::conventions::Conventions;
use crate::norm::operators::{CompositeNormOpSpec, OwnNorm, MOST};
use crate::norm::spec::NormArgs;
use crate::norm::{find, group_scaling as scaling, lp_norm as lp, rms_norm, scale_norm};
use std::sync::LazyLock;
use tch::Tensor;

static HANDLE: Handle = Handle::new("lp_norm");
/// lp_norm's kernels, which exist only on GPUs.
static ON_DEVICE: Handle = Handle::new("lp_norm_forward");
/// The operator of all norms that users declare in Python.
static OWN: Handle = Handle::new("own_norm");
static CONVENTIONAL: Handle = Handle::new("conventional_rms_norm");

/// Computes y of the norm `own`, which a user declared, with an operator that Python defines in
/// normformer_rs/declarations/norm.py. `parameters` are the norm's parameters in order.
pub fn norm_of_ones_own(own: &OwnNorm, x: &Tensor, parameters: &[Tensor]) -> Result<Tensor> {
    // The schema has MOST parameters; those that the norm does not have are None.
    let parameter = |i: usize| Value::from(parameters.get(i));
    let mut arguments = vec![Value::from(x)];
    arguments.extend((0..MOST).map(parameter));
    arguments.push(own.declaration.as_str().into());
    if !OWN.exists() {
        return Err(Error::invalid(format!(
            "norm {:?} is a function in Python, which a run does not hold: import the module that declares it, or name \
             it with norm = \"file.py:Class\"",
            own.name
        )));
    }
    let [y] = OWN.call(&arguments)?;
    Ok(y)
}

/// Computes y of the norm `own`, which has its own operator, through the dispatcher. `given` are the norm's options.
pub fn own_norm(own: &CompositeNormOpSpec, x: &Tensor, weight: Option<&Tensor>, given: &NormArgs) -> Result<Tensor> {
    let handle = [&HANDLE, &CONVENTIONAL].into_iter().find(|handle| handle.name == own.operator);
    // Options are passed as words or as numbers.
    let option = |keyword: &&str| match given.value(keyword) {
        // JSON has no infinity, so the text "inf" stands for that number.
        Some(serde_json::Value::String(word)) if word != "inf" => word.as_str().into(),
        _ => given.float(keyword).into(),
    };
    let arguments: Vec<Value> = values![x, weight].into_iter().chain(own.keywords.iter().map(option)).collect();
    let [y] = handle.expect("every norm's own operator has a handle here").call(&arguments)?;
    Ok(y)
}

/// Divides each of `groups` equal parts of the last dimension of x (…, d) by its root mean square, with RMSNorm's
/// kernel.
pub fn group_scaling(x: &Tensor, groups: i64) -> Result<Tensor> {
    static NORM: LazyLock<&RowNormOp> = LazyLock::new(|| RowNormOp::of(&rms_norm::OPERATOR));
    if groups == 1 {
        return NORM.call(x, None, None, scaling::EPS);
    }
    let parts = x.f_unflatten(-1, [groups, -1].as_slice())?;
    Ok(NORM.call(&parts, None, None, scaling::EPS)?.f_flatten(-2, -1)?)
}

// ---- the operators ----
// The shape "*d" is (…, d), with any leading dimensions. The types and devices of an operator's other tensors are
// compared with those of its leader.

/// Declares an operator composed of other operators. `y` computes its result from the call and the first argument x.
/// An x without columns is copied, without calling `y`.
fn composition(
    schema: &str,
    arguments: impl Into<Vec<Argument>>,
    y: impl Fn(&Call, &Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Operator {
    let formula = move |call: &Call| {
        let x = call.first();
        let is_empty = engine::has_columns(&x, 0); // true if x has 0 columns
        let y = if is_empty { x.f_mul_scalar(1.0)? } else { y(call, &x)? };
        Ok(vec![Some(y)])
    };
    Operator::new(schema, arguments, [tensor("y", "*d", DtypeRule::Same)]).formula(formula).composition()
}

/// Declares y = g·x/max(‖x‖_p, ε), which calls ScaleNorm's operator or a GPU's kernels if they suit, else the composed
/// form.
pub(super) fn lp_norm_operator() -> Operator {
    static NORM: LazyLock<&RowNormOp> = LazyLock::new(|| RowNormOp::of(&scale_norm::OPERATOR));
    let schema = "lp_norm(Tensor x, Tensor? weight, float p, float eps) -> Tensor";
    composition(schema, [leader("x", "*d"), parameter("weight")], |call, x| {
        let [_, weight, p, eps] = call.arguments();
        let (weight, p, eps) = (weight.tensor(), p.float(), eps.float());
        // For p = 2, ScaleNorm's operator computes the same on every device. Other orders have kernels only on GPUs.
        if p != 2.0 && call.device().is_some() {
            let [y, _stats] = ON_DEVICE.call(&values![x, weight.as_ref(), p, eps])?;
            return Ok(y);
        }
        if p == 2.0 {
            return NORM.call(x, weight.as_ref(), None, eps);
        }
        HANDLE.count_composed();
        lp::composed(x, weight.as_ref(), p, eps)
    })
    .plan(check_order)
}

/// Declares lp_norm's kernels, which exist only for GPUs.
pub(super) fn lp_norm_on_device() -> Operator {
    let weight = || parameter("weight").computed();
    let stats = || tensor("stats", "*1", DtypeRule::Float32);
    Operator::new(
        "lp_norm_forward(Tensor x, Tensor? weight, float p, float eps) -> (Tensor, Tensor)",
        [leader("x", "*d"), weight()],
        [tensor("y", "*d", DtypeRule::Same), stats()],
    )
    .plan(check_order)
    .kernel(|call| {
        let ([x, weight, p, eps], [y, stats]) = (call.arguments(), call.outputs());
        let (device, views) = on_device(call, [x, weight, stats, p, eps])?;
        kernel::forward(device, &scale_norm::OPERATOR.kernel, &RowViews { y: y.view, ..views })
    })
    .formula(|call| {
        let [x, weight, p, eps] = call.arguments();
        let y = lp::composed(&x.required(), weight.tensor().as_ref(), p.float(), eps.float())?;
        Ok(vec![Some(y), None]) // no statistics
    })
    .backward(
        Operator::new(
            "lp_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor stats, float p, float eps) -> \
             (Tensor, Tensor)",
            [tensor("dy", "*d", DtypeRule::Same), leader("x", "*d"), weight(), stats()],
            [gradient("dx", "x"), gradient("dweight", "weight")],
        )
        .plan(check_order)
        .kernel(|call| {
            let ([dy, x, weight, stats, p, eps], [dx, dweight]) = (call.arguments(), call.outputs());
            let (device, views) = on_device(call, [x, weight, stats, p, eps])?;
            let gradients = RowGradients { dweight: dweight.view, ..RowGradients::alone(dy.view, dx.view) };
            kernel::backward(device, &scale_norm::OPERATOR.kernel, &views, &gradients)
        })
        .formula(|call| {
            let [dy, x, weight, _, p, eps] = call.arguments();
            let (x, weight, p, eps) = (x.required(), weight.tensor(), p.float(), eps.float());
            let present: Vec<&Tensor> = [&x].into_iter().chain(&weight).collect(); // x, and the weight if there is one
            let composed = |leaves: &[Tensor]| lp::composed(&leaves[0], leaves.get(1), p, eps);
            let mut gradients = engine::gradients(&present, &dy.required(), composed)?;
            gradients.resize_with(2, || None); // without a weight, dweight is absent
            Ok(gradients)
        }),
    )
    .counted(&HANDLE)
}

/// Errors if p, the last argument but one, is not the order of a norm.
fn check_order(call: &Call) -> Result<()> {
    let [.., p, _eps] = call.all() else { unreachable!("the schema has these") };
    lp::check("lp_norm: p", p.float())
}

/// Declares RMSNorm with its conventions. It uses RMSNorm's kernels if they compute the same x̂, otherwise a composed
/// form.
pub(super) fn conventional_rms_norm() -> Operator {
    static NORM: LazyLock<&RowNormOp> = LazyLock::new(|| RowNormOp::of(&rms_norm::OPERATOR));
    /// Returns the call's conventions, weight and ε.
    fn read(call: &Call) -> Result<(Conventions, Option<Tensor>, f64)> {
        let [_, weight, eps, cast, eps_place, part] = call.arguments();
        let conventions = Conventions::parse(cast.text(), eps_place.text(), part.float())?;
        Ok((conventions, weight.tensor(), eps.float()))
    }
    let schema =
        "conventional_rms_norm(Tensor x, Tensor? weight, float eps, str cast, str eps_place, float part) -> Tensor";
    composition(schema, [leader("x", "*d"), parameter("weight")], |call, x| {
        let (conventions, weight, eps) = read(call)?;
        if !conventions.has_kernel(x.kind()) {
            CONVENTIONAL.count_composed();
            return conventions.composed(x, weight.as_ref(), eps, conventions.measured(engine::width(x)?)?);
        }
        match conventions.rounds_first(x.kind()) {
            true => conventions.times_gain(NORM.call(x, None, None, eps)?, weight.as_ref()),
            false => NORM.call(x, weight.as_ref(), None, eps),
        }
    })
    // The plan errors if the part of a row that is measured has no numbers.
    .plan(|call| {
        let (conventions, ..) = read(call)?;
        conventions.measured(engine::width(&call.first())?).map(drop)
    })
}

/// Returns the GPU of the call, and the arguments of ScaleNorm's kernels; errors on the CPU.
fn on_device(call: &Call, [x, weight, stats, p, eps]: [&Value; 5]) -> Result<(Option<Device>, RowViews)> {
    let order = Some(p.float());
    let views = RowViews { order, ..RowViews::alone(x.view, weight.view, stats.view, eps.float()) };
    match call.device() {
        None => Err(Error::Torch("lp_norm_forward and lp_norm_backward are for CUDA tensors: call lp_norm".into())),
        device => Ok((device, views)),
    }
}

/// Declares x/√(m + 1e-5), where m is the mean of x² over each of `groups` equal parts of a row.
pub(super) fn group_scaling_operator() -> Operator {
    composition("group_scaling(Tensor x, int groups=1) -> Tensor", [leader("x", "*d")], |call, x| {
        let [_, groups] = call.arguments();
        group_scaling(x, groups.int())
    })
    .plan(|call| {
        let [x, groups] = call.arguments();
        let (x, groups) = (x.required(), groups.int());
        let refuse = |wanted: String| Err(Error::invalid(format!("group_scaling: groups must {wanted}")));
        if groups < 1 {
            return refuse(format!("be at least 1, got {groups}"));
        }
        match engine::has_columns(&x, groups) {
            true => Ok(()),
            false => refuse(format!(
                "divide the width of x, got {groups} groups and width {}",
                x.size().last().copied().unwrap_or(1)
            )),
        }
    })
}

/// Declares one operator for the composed forms of all row norms; the argument `name` chooses the norm. `parameters`
/// are those that the norm's kernels receive.
pub(super) fn composed_norm() -> Operator {
    composition(
        "composed_norm(Tensor x, Tensor?[] parameters, float[] options, str name) -> Tensor",
        [leader("x", "*d"), parameter_or_matrix("parameters"), title("name")],
        |call, x| {
            let [_, parameters, options, name] = call.arguments();
            let parameters = parameters.elements().iter().map(Value::tensor).collect();
            let options: Vec<f64> = options.elements().iter().map(Value::float).collect();
            find(name.text())?.composed(x, engine::width(x)?, parameters, &options)
        },
    )
}
