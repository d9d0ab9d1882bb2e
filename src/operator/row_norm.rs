//! The family of row norms: an operator for each, and the table of them.

use super::declare::{gradient, leader, parameter, tensor, Kind, Operator};
use super::engine::Handle;
use crate::error::Result;
use crate::kernel::rows::call::{self as kernel, RowGradients, RowViews};
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

    /// N(x) through the dispatcher: differentiable, on any device.
    pub fn call(&self, x: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
        let [y, _stats] = self.handle.call(&[x.into(), weight.into(), bias.into(), eps.into()])?;
        Ok(y)
    }
}

/// A row norm with its parameters.
pub struct Rowwise {
    pub operator: &'static RowOperator,
    pub weight: Option<Tensor>,
    pub bias: Option<Tensor>,
    pub eps: f64,
}

pub(super) fn operator(o: &'static RowOperator) -> Operator {
    let (k, name) = (o.kernels, o.kernels.operator);
    let stats = || tensor("stats", format!("*{}", k.rules.stats()), Kind::Computed);
    Operator::new(
        format!("{name}(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)"),
        [leader("x", "*d"), parameter("weight"), parameter("bias")],
        [tensor("y", "*d", Kind::Same), stats()],
    )
    .kernel(move |call| {
        let ([x, weight, bias, eps], [y, stats]) = (call.arguments(), call.outputs());
        let alone = RowViews::alone(x.view, weight.view, stats.view, eps.float());
        kernel::forward(call.device(), &k.rules, &RowViews { bias: bias.view, y: y.view, ..alone })
    })
    .formula(move |call| {
        let [x, weight, bias, eps] = call.arguments();
        let y = k.composed(&x.required(), weight.tensor().as_ref(), bias.tensor().as_ref(), eps.float())?;
        Ok(vec![Some(y), None])
    })
    .backward(
        Operator::new(
            format!(
                "{name}_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor stats, float eps) -> \
                 (Tensor, Tensor, Tensor)"
            ),
            [tensor("dy", "*d", Kind::Same), leader("x", "*d"), parameter("weight"), parameter("bias"), stats()],
            [gradient("dx", "x"), gradient("dweight", "weight"), gradient("dbias", "bias")],
        )
        .kernel(move |call| {
            let ([dy, x, weight, _, stats, eps], outputs) = (call.arguments(), call.outputs::<3>());
            let [dx, dweight, dbias] = outputs.each_ref().map(|d| d.view);
            // On a GPU a variant of the kernels is for norms with this bias, or without.
            let views = RowViews { bias: dbias, ..RowViews::alone(x.view, weight.view, stats.view, eps.float()) };
            let gradients = RowGradients { dweight, dbias, ..RowGradients::alone(dy.view, dx) };
            kernel::backward(call.device(), &k.rules, &views, &gradients)
        }),
    )
    .counted(&o.handle)
}
