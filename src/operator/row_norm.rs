//! Row norms: an operator for each, and the table of them.

use super::call::{values, Value};
use super::declare::{gradient, leader, parameter, tensor, Argument, Kind, Operator};
use super::engine::{self, Handle};
use crate::error::Result;
use crate::kernel::rows::call::{self as kernel, RowGradients, RowViews};
use crate::kernel::rows::curve::NUMBERS;
use crate::kernel::view::View;
use crate::norm::composed::affine;
use crate::norm::kernels::RowKernels;
use crate::norm::ROW_NORMS;
use std::sync::LazyLock;
use tch::Tensor;

/// A row norm as an operator, and with a residual step before it as another.
pub struct RowOperator {
    pub kernels: &'static RowKernels,
    handle: Handle,
    pub(super) residual: Handle,
}

impl RowOperator {
    /// Those of [`ROW_NORMS`], at the same places.
    pub(super) fn all() -> &'static [RowOperator] {
        static ALL: LazyLock<Vec<RowOperator>> = LazyLock::new(|| {
            let operator = |kernels: &&'static RowKernels| RowOperator {
                kernels,
                handle: Handle::new(kernels.operator),
                residual: Handle::new(kernels.residual),
            };
            ROW_NORMS.iter().map(operator).collect()
        });
        &ALL
    }

    /// The operator of these kernels, for who will call it often.
    pub fn of(kernels: &'static RowKernels) -> &'static Self {
        let found = Self::all().iter().find(|o| std::ptr::eq(o.kernels, kernels));
        found.expect("every norm with row kernels is in ROW_NORMS")
    }

    /// N(x) through the dispatcher: differentiable, on any device. Of a norm without a curve.
    pub fn call(&self, x: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
        let [y, _stats] = self.handle.call(&values![x, weight, bias, eps])?;
        Ok(y)
    }
}

/// A row norm with its parameters.
pub struct Rowwise {
    pub operator: &'static RowOperator,
    pub weight: Option<Tensor>,
    pub bias: Option<Tensor>,
    /// A curve's.
    pub numbers: Vec<Tensor>,
    pub eps: f64,
}

impl Rowwise {
    /// N(x), as [`RowOperator::call`].
    pub fn call(&self, x: &Tensor) -> Result<Tensor> {
        let affine = values![x, self.weight.as_ref(), self.bias.as_ref()];
        let [y, _stats] = with_own(&affine, self.own(), &[], |all| self.operator.handle.call(all))?;
        Ok(y)
    }

    /// The norm's own arguments: a curve's numbers, or ε.
    pub(super) fn own(&self) -> [Option<Value>; NUMBERS] {
        match self.numbers.first() {
            None => [Some(self.eps.into()), None],
            Some(first) => [Some(first.into()), self.numbers.get(1).map(Value::from)],
        }
    }
}

/// Calls `f` with `before`, a norm's own arguments, and `after`, in a row.
pub(super) fn with_own<T>(
    before: &[Value],
    own: [Option<Value>; NUMBERS],
    after: &[Value],
    f: impl FnOnce(&[Value]) -> T,
) -> T {
    const MOST: usize = 12;
    let (mut all, mut count) = ([Value::from(0.0); MOST], 0);
    for value in before.iter().copied().chain(own.into_iter().flatten()).chain(after.iter().copied()) {
        all[count] = value;
        count += 1;
    }
    f(&all[..count])
}

/// How an operator declares a norm's own arguments: ε, or a curve's numbers. Row norms' schemas differ in nothing else.
pub(super) struct Own {
    /// As in the schema, "float eps".
    pub schema: String,
    pub arguments: Vec<Argument>,
    pub gradients: Vec<Argument>,
}

impl Own {
    /// `prefix` keeps the names of numbers apart from those of the operator's other arguments.
    pub fn of(k: Option<&RowKernels>, prefix: &str) -> Self {
        let names = k.map_or(&[][..], |k| k.numbers);
        if names.is_empty() {
            return Own { schema: "float eps".into(), arguments: vec![], gradients: vec![] };
        }
        let named = |name: &&str| -> &'static str { format!("{prefix}{name}").leak() };
        let names: Vec<&'static str> = names.iter().map(named).collect();
        Own {
            schema: names.iter().map(|name| format!("Tensor {name}")).collect::<Vec<_>>().join(", "),
            arguments: names.iter().map(|name| tensor(name, "=1", Kind::Floating).computed()).collect(),
            gradients: names.iter().map(|name| gradient(format!("d{name}").leak(), name)).collect(),
        }
    }

    /// The results' types in the schema: `before` tensors and the gradients.
    pub fn results(&self, before: usize) -> String {
        format!("({})", vec!["Tensor"; before + self.gradients.len()].join(", "))
    }
}

/// What a call has of them: ε, and the numbers.
pub(super) fn own(given: &[Value]) -> (f64, [View; NUMBERS]) {
    match given {
        [only] if only.view.is_absent() => (only.float(), [View::ABSENT; NUMBERS]),
        numbers => (0.0, views(numbers)),
    }
}

/// The views of at most two values.
pub(super) fn views(given: &[Value]) -> [View; NUMBERS] {
    std::array::from_fn(|i| given.get(i).map_or(View::ABSENT, |v| v.view))
}

/// y by the composed form, from x, weight, bias and a norm's own arguments.
pub(super) fn composed(k: &RowKernels, x: &Tensor, [weight, bias]: [&Value; 2], own: &[Value]) -> Result<Tensor> {
    let numbers: Vec<Tensor> = own.iter().filter_map(Value::tensor).collect();
    let eps = if numbers.is_empty() { own[0].float() } else { 0.0 };
    let (weight, bias) = (weight.tensor(), bias.tensor());
    if engine::has_columns(x, 0) {
        return affine(x.f_mul_scalar(1.0)?, weight.as_ref(), bias.as_ref());
    }
    k.composed(x, (weight.as_ref(), bias.as_ref()), eps, &numbers)
}

pub(super) fn operator(o: &'static RowOperator) -> Operator {
    let (k, name) = (o.kernels, o.kernels.operator);
    let stats = || tensor("stats", format!("*{}", k.rules.stats()), Kind::Computed);
    let declared = Own::of(Some(k), "");
    let with_own = |arguments: Vec<Argument>| [arguments, declared.arguments.clone()].concat();
    Operator::new(
        format!("{name}(Tensor x, Tensor? weight, Tensor? bias, {}) -> (Tensor, Tensor)", declared.schema),
        with_own(vec![leader("x", "*d"), parameter("weight"), parameter("bias")]),
        [tensor("y", "*d", Kind::Same), stats()],
    )
    .kernel(move |call| {
        let ([x, weight, bias, given @ ..], [y, stats]) = (call.all(), call.outputs()) else {
            unreachable!("the schema has these")
        };
        let (eps, numbers) = own(given);
        let alone = RowViews::alone(x.view, weight.view, stats.view, eps);
        kernel::forward(call.device(), &k.rules, &RowViews { bias: bias.view, y: y.view, numbers, ..alone })
    })
    .formula(move |call| {
        let [x, weight, bias, given @ ..] = call.all() else { unreachable!("the schema has these") };
        Ok(vec![Some(composed(k, &x.required(), [weight, bias], given)?), None])
    })
    .backward(
        Operator::new(
            format!(
                "{name}_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor stats, {}) -> {}",
                declared.schema,
                declared.results(3)
            ),
            with_own(vec![
                tensor("dy", "*d", Kind::Same),
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
            let ([dy, x, weight, _, stats, given @ ..], [dx, dweight, dbias, dnumbers @ ..]) =
                (call.all(), call.all_outputs())
            else {
                unreachable!("the schema has these")
            };
            let ((eps, numbers), dnumbers) = (own(given), views(dnumbers));
            let (dweight, dbias) = (dweight.view, dbias.view);
            // On a GPU a variant of the kernels is for norms with this bias, or without.
            let alone = RowViews::alone(x.view, weight.view, stats.view, eps);
            let views = RowViews { bias: dbias, numbers, ..alone };
            let gradients = RowGradients { dweight, dbias, dnumbers, ..RowGradients::alone(dy.view, dx.view) };
            kernel::backward(call.device(), &k.rules, &views, &gradients)
        }),
    )
    .counted(&o.handle)
}
