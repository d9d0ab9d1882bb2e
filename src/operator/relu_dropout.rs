//! `y = drop(max(x, 0))`.

use super::call::values;
use super::declare::{leader, seed, tensor, DtypeRule, Operator};
use super::dropout::{check_dropout, check_rate, draw, drawn_for};
use super::engine::Handle;
use crate::error::Result;
use crate::kernel::dropout::Draw;
use crate::kernel::relu_dropout::{call as kernel, PROGRAM};
use tch::Tensor;

static FORWARD: Handle = Handle::new("relu_dropout");
static BACKWARD: Handle = Handle::new("relu_dropout_backward");

/// Computes drop(max(x, 0)) through the dispatcher. `p` is the dropout rate. `seed` is int64 (seed, update,
/// micro-batch); without it nothing is dropped. `site` numbers the places of dropout in a model.
pub fn relu_dropout(x: &Tensor, p: f64, seed: Option<&Tensor>, site: i64) -> Result<Tensor> {
    let p = if seed.is_some() { p } else { 0.0 };
    let [y] = FORWARD.call(&values![x, p, seed, site])?;
    Ok(y)
}

/// Declares relu_dropout, with a backward operator that needs only y.
pub(super) fn operator() -> Operator {
    Operator::new(
        "relu_dropout(Tensor x, float p, Tensor? seed, int site) -> Tensor",
        [leader("x", "*"), seed()],
        [tensor("y", "*", DtypeRule::Same)],
    )
    .plan(|call| {
        let [_, p, seed, _] = call.arguments();
        check_dropout("relu_dropout", p, seed)
    })
    .kernel(|call| {
        let ([x, p, seed, site], [y]) = (call.arguments(), call.outputs());
        kernel::forward(call.device(), &x.view, &draw(call, [p, seed, site]), &y.view)
    })
    .formula(|call| {
        let [x, p, seed, site] = call.arguments();
        let x = x.required();
        Ok(vec![Some(kernel::composed(&x, drawn_for(&x, [p, seed, site])?.as_ref())?)])
    })
    .backward(
        Operator::new(
            "relu_dropout_backward(Tensor dy, Tensor y, float p) -> Tensor",
            [tensor("dy", "*", DtypeRule::Same), leader("y", "*")],
            [tensor("dx", "*", DtypeRule::Same)],
        )
        .plan(|call| {
            let [_, _, p] = call.arguments();
            check_rate("relu_dropout_backward", p.float())
        })
        .kernel(|call| {
            let ([dy, y, p], [dx]) = (call.arguments(), call.outputs());
            kernel::backward(call.device(), &dy.view, &y.view, &Draw { p: p.float(), ..Draw::NONE }, &dx.view)
        })
        .formula(|call| {
            let [dy, y, p] = call.arguments();
            let (dy, y) = (dy.required(), y.required());
            let scaled = dy.f_mul_scalar(1.0 / (1.0 - p.float()))?;
            // If y > 0 the gradient is `scaled`. Otherwise y is 0 or NaN, and the gradient is equal to y.
            Ok(vec![Some(scaled.f_where_self(&y.f_gt(0.0)?, &y)?)])
        }),
    )
    // y is piecewise linear in x. Its slope is dropout's scale if y is not 0, else 0; the backward operator returns
    // this slope for dy = 1.
    .double_backward(|call| {
        let ([_, p, ..], [y]) = (call.arguments::<4>(), call.outputs());
        let y = y.required();
        let [scale] = BACKWARD.call(&values![&y.f_ones_like()?, &y.f_detach()?, p.float()])?;
        let dx = |dy: &Tensor| Ok(dy.f_mul(&scale)?);
        call.given().iter().map(|dy| dy.as_ref().map(dx).transpose()).collect()
    })
    .program(&PROGRAM)
    .counted(&FORWARD)
}
