//! Label-smoothed cross-entropy over a target vocabulary.

use super::call::{values, Value};
use super::declare::{leader, tensor, Argument, DtypeRule, Operator};
use super::engine::{self, Handle};
use crate::error::{Error, Result};
use crate::kernel::cross_entropy::call::{self as kernel, LossViews, Losses};
use crate::kernel::cross_entropy::composed::composed;
use crate::kernel::cross_entropy::{Smoothing, PROGRAM};
use crate::kernel::view::{accumulation, View};
use tch::Tensor;

static HANDLE: Handle = Handle::new("label_smoothed_cross_entropy");
static IN_PLACE: Handle = Handle::new("label_smoothed_cross_entropy_");

/// Returns (loss, nll), with one number per row; only the loss is differentiable. The logits are (rows, V), `target`
/// is int64 (rows). `mask` is bool (V), true for columns in the target vocabulary. `smoothing` has the weights of the
/// target's −log p and of every class's. Rows whose target is `ignore_index` have the loss 0.
pub fn cross_entropy(
    logits: &Tensor,
    target: &Tensor,
    mask: Option<&Tensor>,
    smoothing: Smoothing,
    ignore_index: i64,
) -> Result<(Tensor, Tensor)> {
    let Smoothing { nll, uniform } = smoothing;
    let [loss, nll, _lse] = HANDLE.call(&values![logits, target, mask, nll, uniform, ignore_index])?;
    Ok((loss, nll))
}

/// Returns (loss, nll), and overwrites the logits with `scale`·∂(Σ loss)/∂logits. `scale` is one float64 number on
/// the logits' device; the other arguments are those of [`cross_entropy`].
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
    let [loss, nll] = IN_PLACE.call(&values![logits, target, mask, nll, uniform, ignore_index, scale])?;
    Ok((loss, nll))
}

// ---- the operators ----

/// Declares the logits, (rows, classes). In all sizes, n stands for the number of rows and c for that of classes.
fn logits() -> Argument {
    leader("logits", "nc")
}

/// Declares the index of each row's right class.
fn target() -> Argument {
    tensor("target", "n", DtypeRule::Int64)
}

/// Declares the mask of the classes that may be predicted.
fn mask() -> Argument {
    tensor("mask", "c", DtypeRule::Bool).optional()
}

/// Declares a tensor `name` with one number per row.
fn per_row(name: &'static str) -> Argument {
    tensor(name, "n", DtypeRule::Computed)
}

/// Declares the log of a row's sum of exponentials, as two numbers that are never added: the maximum, and the sum of
/// exponentials relative to it.
fn lse() -> Argument {
    tensor("lse", "n2", DtypeRule::Computed)
}

/// Errors if the logits have no classes.
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

/// Declares the loss, (logits, target, mask, …) → (loss, nll, lse), with its backward operator.
pub(super) fn operator() -> Operator {
    Operator::new(
        "label_smoothed_cross_entropy(Tensor logits, Tensor target, Tensor? mask, float nll_weight, \
         float uniform_weight, int ignore_index) -> (Tensor, Tensor, Tensor)",
        [logits(), target(), mask()],
        [per_row("loss"), per_row("nll"), lse()],
    )
    .plan(|call| {
        let [logits, ..] = call.arguments::<6>();
        check_classes(logits)
    })
    .kernel(|call| {
        let ([logits, target, mask, numbers @ ..], [loss, nll, lse]) = (call.arguments::<6>(), call.outputs());
        let losses = Losses { loss: loss.view, nll: nll.view, lse: lse.view };
        kernel::forward(call.device(), &views([logits, target, mask], numbers), &losses)
    })
    .formula(|call| {
        let [logits, rest @ ..] = call.arguments::<6>();
        let (loss, nll) = formula(&logits.required(), rest)?;
        Ok(vec![Some(loss), Some(nll.f_detach()?), None]) // only the backward kernel reads `lse`
    })
    .backward(
        Operator::new(
            "label_smoothed_cross_entropy_backward(Tensor dloss, Tensor logits, Tensor target, Tensor? mask, \
             Tensor lse, float nll_weight, float uniform_weight, int ignore_index) -> Tensor",
            [per_row("dloss"), logits(), target(), mask(), lse()],
            [tensor("dlogits", "nc", DtypeRule::Same)],
        )
        .plan(|call| {
            let [_, logits, ..] = call.arguments::<8>();
            check_classes(logits)
        })
        .kernel(|call| {
            let ([dloss, logits, target, mask, lse, numbers @ ..], [dlogits]) = (call.arguments::<8>(), call.outputs());
            let views = views([logits, target, mask], numbers);
            kernel::backward(call.device(), &views, lse.view, &dloss.view, &dlogits.view)
        })
        .formula(|call| {
            let [dloss, logits, target, mask, _lse, nll, uniform, ignore_index] = call.arguments();
            let rest = [*target, *mask, *nll, *uniform, *ignore_index];
            engine::gradients(&[&logits.required()], &dloss.required(), |leaves| Ok(formula(&leaves[0], &rest)?.0))
        }),
    )
    .program(&PROGRAM)
    .counted(&HANDLE)
}

/// Declares the loss that overwrites the logits with scale·∂(Σ loss)/∂logits. The scale is a tensor, so that a CUDA
/// graph can be replayed with another scale.
pub(super) fn in_place_operator() -> Operator {
    Operator::new(
        "label_smoothed_cross_entropy_(Tensor(a!) logits, Tensor target, Tensor? mask, float nll_weight, \
         float uniform_weight, int ignore_index, Tensor scale) -> (Tensor, Tensor)",
        [logits().written(), target(), mask(), tensor("scale", "=1", DtypeRule::Float64)],
        ["loss", "nll"].map(per_row),
    )
    .plan(|call| {
        let [logits, ..] = call.arguments::<7>();
        check_classes(logits)
    })
    .kernel(|call| {
        let ([logits, target, mask, numbers @ .., scale], [loss, nll]) = (call.arguments::<7>(), call.outputs());
        let losses = Losses { loss: loss.view, nll: nll.view, lse: View::ABSENT };
        kernel::in_place(call.device(), &views([logits, target, mask], numbers), &losses, &scale.view)
    })
    .formula(|call| {
        let [logits, rest @ .., scale] = call.arguments::<7>();
        let (mut logits, mut losses) = (logits.required(), None);
        let wide = logits.f_to_kind(accumulation(logits.kind()))?;
        // The differentiated function is Σ loss, a scalar (a tensor of shape []) whose own gradient is 1. While it
        // runs, it also stores the rows' losses in `losses`.
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
    })
    .counted(&HANDLE)
}

/// Returns the kernels' arguments from (logits, target, mask) and the numbers that follow them in the schema.
fn views(tensors: [&Value; 3], [nll, uniform, ignore_index]: &[Value; 3]) -> LossViews {
    let [logits, target, mask] = tensors.map(|t| t.view);
    let smoothing = Smoothing { nll: nll.float(), uniform: uniform.float() };
    LossViews { logits, target, mask, smoothing, ignore_index: ignore_index.int() }
}

/// Computes (loss, nll) with tch operations, from the logits and the arguments that follow them in the schema; autograd
/// can differentiate the loss.
fn formula(logits: &Tensor, [target, mask, nll, uniform, ignore_index]: &[Value; 5]) -> Result<(Tensor, Tensor)> {
    let smoothing = Smoothing { nll: nll.float(), uniform: uniform.float() };
    composed(logits, &target.required(), mask.tensor().as_ref(), smoothing, ignore_index.int())
}
