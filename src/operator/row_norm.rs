//! Row norms: the operators of each norm, and the table of the norms.

use super::call::{values, Value};
use super::declare::{gradient, leader, parameter, tensor, Argument, DtypeRule, Operator};
use super::engine::{self, Handle};
use crate::error::Result;
use crate::kernel::rows::call::{self as kernel, RowGradients, RowViews};
use crate::kernel::rows::curve::NUMBERS;
use crate::kernel::view::View;
use crate::norm::composed::affine;
use crate::norm::operators::RowNormOpSpec;
use crate::norm::ROW_NORMS;
use std::sync::LazyLock;
use tch::Tensor;

/// The operators of a row norm: the norm alone, and the norm after a residual step.
pub struct RowNormOp {
    pub kernels: &'static RowNormOpSpec,
    handle: Handle,
    pub(super) residual: Handle,
}

impl RowNormOp {
    /// Returns the operators of [`ROW_NORMS`], at the same indices.
    pub(super) fn all() -> &'static [RowNormOp] {
        static ALL: LazyLock<Vec<RowNormOp>> = LazyLock::new(|| {
            let operator = |kernels: &&'static RowNormOpSpec| RowNormOp {
                kernels,
                handle: Handle::new(kernels.operator),
                residual: Handle::new(kernels.residual),
            };
            ROW_NORMS.iter().map(operator).collect()
        });
        &ALL
    }

    /// Returns the operator with these kernels. The search is linear, so callers keep the result.
    pub fn of(kernels: &'static RowNormOpSpec) -> &'static Self {
        let operator = Self::all().iter().find(|o| std::ptr::eq(o.kernels, kernels));
        operator.expect("every norm with row kernels is in ROW_NORMS")
    }

    /// Computes the normalised x through the dispatcher: the call is differentiable and runs on any device. The norm
    /// must not be a curve such as DyT, which has learned numbers in place of ε.
    pub fn call(&self, x: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
        let [y, _stats] = self.handle.call(&values![x, weight, bias, eps])?;
        Ok(y)
    }
}

/// A row norm with its parameters.
pub struct BoundRowNorm {
    pub operator: &'static RowNormOp,
    pub weight: Option<Tensor>,
    pub bias: Option<Tensor>,
    /// The learned numbers of a curve.
    pub numbers: Vec<Tensor>,
    pub eps: f64,
}

impl BoundRowNorm {
    /// Computes the normalised x, like [`RowNormOp::call`].
    pub fn call(&self, x: &Tensor) -> Result<Tensor> {
        let affine = values![x, self.weight.as_ref(), self.bias.as_ref()];
        let [y, _stats] = with_extra(&affine, self.extra(), &[], |all| self.operator.handle.call(all))?;
        Ok(y)
    }

    /// Returns the norm's own arguments: ε alone, or one or two numbers of a curve.
    pub(super) fn extra(&self) -> [Option<Value>; NUMBERS] {
        match self.numbers.first() {
            None => [Some(self.eps.into()), None],
            Some(first) => [Some(first.into()), self.numbers.get(1).map(Value::from)],
        }
    }
}

/// Calls `f` with one list: `before`, then the norm's own arguments `extra`, then `after`.
pub(super) fn with_extra<T>(
    before: &[Value],
    extra: [Option<Value>; NUMBERS],
    after: &[Value],
    f: impl FnOnce(&[Value]) -> T,
) -> T {
    // A residual step has the most arguments: six, at most two of the norm's own, and four.
    const MOST: usize = 12;
    let (mut all, mut count) = ([Value::from(0.0); MOST], 0);
    for value in before.iter().copied().chain(extra.into_iter().flatten()).chain(after.iter().copied()) {
        all[count] = value;
        count += 1;
    }
    f(&all[..count])
}

/// The declaration of a norm's own arguments: ε, or a curve's numbers. The schemas of row norms differ only in these.
pub(super) struct ExtraArgs {
    /// The arguments' text in the schema, such as "float eps".
    pub schema: String,
    pub arguments: Vec<Argument>,
    pub gradients: Vec<Argument>,
}

impl ExtraArgs {
    /// Declares the own arguments of the norm `spec`; without a norm, only ε. `prefix` distinguishes them from the
    /// operator's other arguments.
    pub fn of(spec: Option<&RowNormOpSpec>, prefix: &str) -> Self {
        let names = spec.map_or(&[][..], |spec| spec.numbers);
        if names.is_empty() {
            return ExtraArgs { schema: "float eps".into(), arguments: vec![], gradients: vec![] };
        }
        // Declarations live as long as the process, so their names are leaked.
        let named = |name: &&str| -> &'static str { format!("{prefix}{name}").leak() };
        let names: Vec<&'static str> = names.iter().map(named).collect();
        ExtraArgs {
            schema: names.iter().map(|name| format!("Tensor {name}")).collect::<Vec<_>>().join(", "),
            arguments: names.iter().map(|name| tensor(name, "=1", DtypeRule::Floating).computed()).collect(),
            gradients: names.iter().map(|name| gradient(format!("d{name}").leak(), name)).collect(),
        }
    }

    /// Returns the schema's result types for `before` tensors, followed by the numbers' gradients.
    pub fn results(&self, before: usize) -> String {
        format!("({})", vec!["Tensor"; before + self.gradients.len()].join(", "))
    }
}

/// Reads a norm's own arguments from a call: ε and the views of a curve's numbers. A missing ε is 0, and missing numbers
/// are absent views.
pub(super) fn extra(given: &[Value]) -> (f64, [View; NUMBERS]) {
    match given {
        // ε is the only number without a view; a curve's numbers are tensors.
        [only] if only.view.is_absent() => (only.float(), [View::ABSENT; NUMBERS]),
        numbers => (0.0, views(numbers)),
    }
}

/// Returns the views of at most two values; the views of missing values are absent.
pub(super) fn views(given: &[Value]) -> [View; NUMBERS] {
    std::array::from_fn(|i| given.get(i).map_or(View::ABSENT, |v| v.view))
}

/// Computes y with tch operations. `extra` are the norm's own arguments: ε, or a curve's numbers.
pub(super) fn composed(
    spec: &RowNormOpSpec,
    x: &Tensor,
    [weight, bias]: [&Value; 2],
    extra: &[Value],
) -> Result<Tensor> {
    let numbers: Vec<Tensor> = extra.iter().filter_map(Value::tensor).collect();
    let eps = if numbers.is_empty() { extra[0].float() } else { 0.0 };
    let (weight, bias) = (weight.tensor(), bias.tensor());
    // An x without columns has nothing to normalise; the product by 1 is a copy that autograd records.
    if engine::has_columns(x, 0) {
        return affine(x.f_mul_scalar(1.0)?, weight.as_ref(), bias.as_ref());
    }
    spec.composed(x, (weight.as_ref(), bias.as_ref()), eps, &numbers)
}

/// Returns the gradients of [`composed`] for x, weight, bias and the norm's own arguments; ε and absent ones have none.
pub(super) fn composed_gradients(
    spec: &RowNormOpSpec,
    dy: &Tensor,
    x: &Tensor,
    parameters: [&Value; 2],
    extra: &[Value],
) -> Result<Vec<Option<Tensor>>> {
    let numbers: Vec<Option<Tensor>> = extra.iter().map(Value::tensor).collect();
    let given = [Some(x.shallow_clone())].into_iter().chain(parameters.map(Value::tensor)).chain(numbers);
    let all: Vec<Option<Tensor>> = given.collect();
    let present: Vec<&Tensor> = all.iter().flatten().collect();
    let gradients = engine::gradients(&present, dy, |leaves| {
        // The leaves replace the arguments that are tensors, in order; `next` returns all other values unchanged.
        let mut leaves = leaves.iter();
        let mut next =
            |value: Value| if value.tensor().is_some() { leaves.next().map_or(value, Value::from) } else { value };
        let x = next(Value::from(x)).required();
        let [weight, bias] = parameters.map(|value| next(*value));
        let extra: Vec<Value> = extra.iter().map(|value| next(*value)).collect();
        composed(spec, &x, [&weight, &bias], &extra)
    })?;
    // `gradients` belong to the present tensors, in order; each absent one gets `None`.
    let mut gradients = gradients.into_iter();
    Ok(all.iter().map(|t| t.as_ref().and_then(|_| gradients.next().flatten())).collect())
}

/// Leaves out the last of [`composed_gradients`]' results if it is ε's, for which the backward operator has no output.
pub(super) fn gradients_of_outputs(spec: &RowNormOpSpec, all: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
    // The outputs are the gradients of x, weight, bias and a curve's numbers.
    Ok(all.into_iter().take(3 + spec.numbers.len()).collect())
}

/// Declares the operator of a norm, (x, weight, bias, own arguments) → (y, statistics), with its backward operator.
pub(super) fn operator(norm: &'static RowNormOp) -> Operator {
    let (spec, name) = (norm.kernels, norm.kernels.operator);
    let stats = || tensor("stats", format!("*{}", spec.kernel.stats()), DtypeRule::Computed);
    let declared = ExtraArgs::of(Some(spec), "");
    let with_extra = |arguments: Vec<Argument>| [arguments, declared.arguments.clone()].concat();
    Operator::new(
        format!("{name}(Tensor x, Tensor? weight, Tensor? bias, {}) -> (Tensor, Tensor)", declared.schema),
        with_extra(vec![leader("x", "*d"), parameter("weight"), parameter("bias")]),
        [tensor("y", "*d", DtypeRule::Same), stats()],
    )
    .kernel(move |call| {
        let ([x, weight, bias, own @ ..], [y, stats]) = (call.all(), call.outputs()) else {
            unreachable!("the schema has these")
        };
        let (eps, numbers) = extra(own);
        let alone = RowViews::alone(x.view, weight.view, stats.view, eps);
        kernel::forward(call.device(), &spec.kernel, &RowViews { bias: bias.view, y: y.view, numbers, ..alone })
    })
    .formula(move |call| {
        let [x, weight, bias, own @ ..] = call.all() else { unreachable!("the schema has these") };
        Ok(vec![Some(composed(spec, &x.required(), [weight, bias], own)?), None])
    })
    .backward(
        Operator::new(
            format!(
                "{name}_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor stats, {}) -> {}",
                declared.schema,
                declared.results(3)
            ),
            with_extra(vec![
                tensor("dy", "*d", DtypeRule::Same),
                leader("x", "*d"),
                parameter("weight"),
                parameter("bias"),
                stats(),
            ]),
            [
                vec![gradient("dx", "x"), gradient("dweight", "weight"), gradient("dbias", "bias")],
                declared.gradients.clone(),
            ]
            .concat(),
        )
        .kernel(move |call| {
            let ([dy, x, weight, _, stats, own @ ..], [dx, dweight, dbias, dnumbers @ ..]) =
                (call.all(), call.all_outputs())
            else {
                unreachable!("the schema has these")
            };
            let ((eps, numbers), dnumbers) = (extra(own), views(dnumbers));
            let (dweight, dbias) = (dweight.view, dbias.view);
            // The GPU kernels have a variant with and one without a bias; the view of dbias chooses the variant.
            let alone = RowViews::alone(x.view, weight.view, stats.view, eps);
            let views = RowViews { bias: dbias, numbers, ..alone };
            let gradients = RowGradients { dweight, dbias, dnumbers, ..RowGradients::alone(dy.view, dx.view) };
            kernel::backward(call.device(), &spec.kernel, &views, &gradients)
        })
        .formula(move |call| {
            let [dy, x, weight, bias, _, own @ ..] = call.all() else { unreachable!("the schema has these") };
            gradients_of_outputs(spec, composed_gradients(spec, &dy.required(), &x.required(), [weight, bias], own)?)
        }),
    )
    .counted(&norm.handle)
}
