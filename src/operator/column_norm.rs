//! Norms with column statistics: one operator for each norm, and the table of the norms.

use super::call::{values, Call, Value, Why};
use super::declare::{leader, tensor, DtypeRule, Operator};
use super::engine::{self, Handle};
use super::ProcessGroup;
use crate::error::{Error, Result};
use crate::kernel::columns::call::{self as kernel, ColumnGradients, ColumnViews};
use crate::kernel::columns::{ColumnOptions, Ranks, Stats};
use crate::kernel::view::View;
use crate::norm::operators::ColumnNormOpSpec;
use crate::norm::statistics::{self, StateTensors};
use crate::norm::COLUMN_NORMS;
use std::sync::LazyLock;
use tch::Tensor;

/// The operator of a norm with column statistics.
pub struct ColumnNormOp {
    pub kernels: &'static ColumnNormOpSpec,
    handle: Handle,
}

/// The arguments of [`ColumnNormOp::call`].
pub struct Column<'a> {
    /// Rows (…, d); the weight and the bias are (d,).
    pub x: &'a Tensor,
    pub weight: Option<&'a Tensor>,
    pub bias: Option<&'a Tensor>,
    /// A bool tensor (…), true at padding rows.
    pub pad_mask: Option<&'a Tensor>,
    pub state: StateTensors,
    /// The statistics of an earlier run of the same forward pass (activation checkpointing). If given, the norm uses
    /// them and leaves the state as it is.
    pub stats: Option<&'a Tensor>,
    pub options: ColumnOptions,
}

impl ColumnNormOp {
    /// Returns the operators of all norms in [`COLUMN_NORMS`], at the same indices.
    pub(super) fn all() -> &'static [ColumnNormOp] {
        static ALL: LazyLock<Vec<ColumnNormOp>> = LazyLock::new(|| {
            let operator =
                |kernels: &&'static ColumnNormOpSpec| ColumnNormOp { kernels, handle: Handle::new(kernels.operator) };
            COLUMN_NORMS.iter().map(operator).collect()
        });
        &ALL
    }

    /// Returns the operator with these kernels. The search is linear, so callers keep the result.
    pub fn of(kernels: &'static ColumnNormOpSpec) -> &'static Self {
        let operator = Self::all().iter().find(|o| std::ptr::eq(o.kernels, kernels));
        operator.expect("every norm with statistics of columns is in COLUMN_NORMS")
    }

    /// Returns the normalised x and the statistics that were used. The call goes through the dispatcher: it is
    /// differentiable and runs on any device.
    pub fn call(&self, call: &Column) -> Result<(Tensor, Tensor)> {
        let Column { x, weight, bias, pad_mask, stats, .. } = *call;
        let StateTensors { first, second, iters, refused } = &call.state;
        let ColumnOptions { train, alpha, eps, alpha_bwd, warmup, release, ranks } = call.options;
        let [first, second, iters, refused] = [first, second, iters, refused].map(Option::as_ref);
        let (variant, group) = (if release { "release" } else { "paper" }, ranks.map_or("", |r| r.name()));
        let [y, stats] = self.handle.call(&values![
            x, weight, bias, pad_mask, first, second, iters, refused, stats, train, alpha, eps, alpha_bwd, warmup,
            variant, group
        ])?;
        Ok((y, stats))
    }
}

// ---- the operators ----

/// Declares the operator of a norm, (x, parameters, mask, buffers, …) → (y, statistics), with its backward operator. In
/// the sizes, d is the number of columns, and "*" stands for the leading dimensions, the rows.
pub(super) fn operator(norm: &'static ColumnNormOp) -> Operator {
    let (spec, name, [first, second]) = (norm.kernels, norm.kernels.operator, norm.kernels.state);
    let per_column = |name| tensor(name, "=d", DtypeRule::Floating).optional();
    let pad = || tensor("pad_mask", "*", DtypeRule::Bool).optional();
    let counter = |name| tensor(name, "=1", DtypeRule::Int64).optional().state();
    let stats = || tensor("stats", format!("{}d", Stats::ROWS), DtypeRule::Computed);
    Operator::new(
        format!(
            "{name}(Tensor x, Tensor? weight=None, Tensor? bias=None, Tensor? pad_mask=None, Tensor(a!)? {first}=None, \
             Tensor(b!)? {second}=None, Tensor(c!)? iters=None, Tensor(d!)? refused=None, Tensor? stats=None, *, \
             bool train, float alpha=0.9, float eps=1e-05, float alpha_bwd=0.9, int warmup=0, str variant=\"paper\", \
             str group=\"\") -> (Tensor, Tensor)"
        ),
        [
            leader("x", "*d"),
            per_column("weight").computed(),
            per_column("bias").computed().kept(), // only `double_backward` reads the bias and the first buffer
            pad(),
            per_column(first).state().kept_plain(),
            per_column(second).state(),
            counter("iters"),
            counter("refused"),
            stats().optional(),
        ],
        [tensor("y", "*d", DtypeRule::Same), stats()],
    )
    .plan(move |call| plan(spec, call))
    .kernel(move |call| forward(spec, call))
    .formula(move |call| {
        // Between the mask and `stats` are the four buffers of the state. `options` reads the last seven arguments.
        let [x, weight, bias, pad, buffers @ .., stats, _, _, _, _, _, _, _] = call.arguments::<16>();
        let [weight, bias, pad, stats] = [weight, bias, pad, stats].map(Value::tensor);
        let [first, second, iters, refused] = buffers.each_ref().map(Value::tensor);
        let state = StateTensors { first, second, iters, refused };
        let (parameters, options) = ((weight.as_ref(), bias.as_ref()), options(spec, call)?);
        let (pad, stats) = (pad.as_ref(), stats.as_ref());
        let (y, used) = statistics::forward(spec, &x.required(), parameters, pad, &state, stats, &options)?;
        Ok(vec![Some(y), Some(used)])
    })
    .backward(
        Operator::new(
            format!(
                "{name}_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? pad_mask, Tensor(a!)? {second}, \
                 Tensor(b!)? refused, Tensor stats, *, bool train, float alpha_bwd=0.9, str variant=\"paper\", \
                 str group=\"\") -> (Tensor, Tensor, Tensor)"
            ),
            [
                tensor("dy", "*d", DtypeRule::Same),
                leader("x", "*d"),
                per_column("weight").computed(),
                pad(),
                per_column(second).state(),
                counter("refused"),
                stats(),
            ],
            [
                tensor("dx", "*d", DtypeRule::Same),
                tensor("dweight", "d", DtypeRule::Computed),
                tensor("dbias", "d", DtypeRule::Computed),
            ],
        )
        .plan(move |call| {
            let options = backward_options(spec, call)?;
            // The GPU kernels support only one process.
            if call.device().is_some() && options.ranks.is_some() {
                call.decline();
            }
            Ok(())
        })
        .kernel(move |call| backward(spec, call))
        .formula(move |call| {
            let [dy, x, weight, pad, second, refused, stats, ..] = call.arguments::<11>();
            let [dy, x, stats] = [dy, x, stats].map(Value::required);
            let [weight, pad, second, refused] = [weight, pad, second, refused].map(Value::tensor);
            let state = StateTensors { second, refused, ..StateTensors::default() };
            let (weight, pad, options) = (weight.as_ref(), pad.as_ref(), backward_options(spec, call)?);
            let (dx, dweight, dbias) = statistics::backward(spec, &dy, &x, weight, pad, &stats, &state, &options)?;
            Ok([dx, dweight, dbias].map(Some).into())
        }),
    )
    .double_backward(move |call| double_backward(norm, call))
    .with_own_gradient()
    .program(&norm.kernels.kernel.program)
    .counted(&norm.handle)
}

/// True if the argument `variant` chooses the variant that PowerNorm's authors released, false for that of their paper.
fn is_release(spec: &ColumnNormOpSpec, variant: &Value) -> Result<bool> {
    match variant.text() {
        "paper" => Ok(false),
        "release" => Ok(true),
        other => {
            let name = spec.operator;
            Err(Error::invalid(format!("{name}: variant must be one of paper, release; got \"{other}\"")))
        }
    }
}

/// Returns the process group that the argument names, or an error if it was not registered. `None` is a single process.
fn ranks(spec: &ColumnNormOpSpec, name: &Value) -> Result<Option<&'static dyn Ranks>> {
    let group = ProcessGroup::named(name.text()).ok_or_else(|| {
        Error::invalid(format!(
            "{}: \"{}\" is no process group that normformer_rs was told of; give the module sync=True, which tells it",
            spec.operator,
            name.text()
        ))
    })?;
    Ok(group.ranks())
}

/// Reads the options of a forward call, the last seven arguments.
fn options(spec: &ColumnNormOpSpec, call: &Call) -> Result<ColumnOptions> {
    let [.., train, alpha, eps, alpha_bwd, warmup, variant, group] = call.arguments::<16>();
    Ok(ColumnOptions {
        alpha: alpha.float(),
        alpha_bwd: alpha_bwd.float(),
        eps: eps.float(),
        warmup: warmup.int(),
        ranks: ranks(spec, group)?,
        train: train.flag(),
        release: is_release(spec, variant)?,
    })
}

/// Reads the options of a backward call, the last four arguments; all others keep their defaults.
fn backward_options(spec: &ColumnNormOpSpec, call: &Call) -> Result<ColumnOptions> {
    let [.., train, alpha_bwd, variant, group] = call.arguments::<11>();
    let (ranks, release) = (ranks(spec, group)?, is_release(spec, variant)?);
    Ok(ColumnOptions { alpha_bwd: alpha_bwd.float(), ranks, train: train.flag(), release, ..ColumnOptions::default() })
}

/// Errors if the call's buffers, or the reason why a formula runs, do not suit the norm. Declines calls that the GPU
/// kernels cannot compute.
fn plan(spec: &ColumnNormOpSpec, call: &Call) -> Result<()> {
    let ([_x, _weight, _bias, _pad, first, second, iters, ..], options) =
        (call.arguments::<16>(), options(spec, call)?);
    let (name, [first_name, second_name]) = (spec.operator, spec.state);
    // PowerNorm, the norm with an approximate gradient, cannot compute without its buffers.
    if spec.kernel.approximate && [first, second, iters].into_iter().any(Value::is_none) {
        return Err(Error::invalid(format!("{name} needs its buffers {first_name}, {second_name} and iters")));
    }
    // A norm that centres keeps a running mean and a running variance; one alone would be of no use.
    if spec.kernel.centred && first.is_none() != second.is_none() {
        let both = format!("{name} needs both of its buffers {first_name} and {second_name}, or neither");
        return Err(Error::invalid(both));
    }
    let refuse = |why: &str| Err(Error::NotImplemented(format!("{name}: {why}")));
    match call.why() {
        Why::Transform if spec.kernel.approximate && options.train => refuse(
            "torch.func differentiates formulas, and the gradient in training is PowerNorm's approximation, which is no \
             formula's: use loss.backward(), or call eval() first",
        ),
        Why::Transform if options.ranks.is_some() => {
            refuse("torch.func sees one process only: train without sync, or use loss.backward()")
        }
        Why::Batch if options.train && !first.is_none() => refuse(
            "under vmap every example would move the running statistics: call eval() first, or give no buffers",
        ),
        _ => {
            // The GPU kernels support only one process, and only buffers of one type.
            let mixed = !second.is_none() && first.dtype != second.dtype;
            if call.device().is_some() && (mixed || options.ranks.is_some()) {
                call.decline();
            }
            Ok(())
        }
    }
}

/// Returns the formula's gradients, which can be differentiated again.
fn double_backward(norm: &ColumnNormOp, call: &Call) -> Result<Vec<Option<Tensor>>> {
    let spec = norm.kernels;
    let [x, weight, bias, pad, first, ..] = call.arguments::<16>();
    let ([_, stats], options) = (call.outputs(), options(spec, call)?);
    let refuse = |why: &str| Err(Error::NotImplemented(format!("{}: {why}", spec.operator)));
    if options.ranks.is_some() {
        return refuse(
            "statistics over several ranks have no second derivative: train without create_graph, or without sync",
        );
    }
    if spec.kernel.approximate && options.train {
        return refuse(
            "the gradient in training is PowerNorm's approximation (Shen et al. 2020, eq 11), which is no function's \
             derivative and has none itself: train without create_graph, take powernorm-v, or call eval() first",
        );
    }
    norm.handle.count_composed();
    // If the batch's own statistics were used, the formula measures them again; running statistics are constants.
    let from_batch = options.train || first.is_none();
    let given = if from_batch { None } else { stats.tensor() };
    let (pad, state) = (pad.tensor(), StateTensors::default());
    let options = ColumnOptions { train: from_batch, ..options };
    let inputs = [x, weight, bias].map(Value::tensor);
    engine::gradients_again(&inputs, &call.given(), |inputs| {
        let [Some(x), weight, bias] = inputs else { unreachable!("the schema requires x") };
        let parameters = (weight.as_ref(), bias.as_ref());
        let (y, _) = statistics::forward(spec, x, parameters, pad.as_ref(), &state, given.as_ref(), &options)?;
        Ok(vec![Some(y)])
    })
}

// ---- the kernels' arguments ----

/// Runs the forward kernel. If `stats` of an earlier pass are given, they become this pass's, and no buffer changes.
fn forward(spec: &'static ColumnNormOpSpec, call: &Call) -> Result<()> {
    let ([x, weight, bias, pad, first, second, iters, refused, given, ..], [y, stats]) =
        (call.arguments::<16>(), call.outputs());
    let views = ColumnViews {
        x: x.view,
        weight: weight.view,
        bias: bias.view,
        pad: row_mask(&x.view, pad),
        first: first.view,
        second: second.view,
        iters: iters.view,
        refused: refused.view,
        wide_state: is_wide(first),
        given: !given.is_none(),
        options: options(spec, call)?,
        y: y.view,
        stats: stats.view,
    };
    if let Some(given) = given.tensor() {
        stats.required().f_copy_(&given)?;
    }
    kernel::forward(call.device(), &spec.kernel, &views)?;
    if views.options.train && !views.given {
        // These are the indices of the changed buffers among the arguments. PowerNorm's second buffer (5) changes only
        // in the backward pass.
        let moved: &[usize] = if spec.kernel.approximate { &[4, 6, 7] } else { &[4, 5, 6, 7] };
        moved.iter().for_each(|i| call.write_back(*i));
    }
    Ok(())
}

/// Runs the backward kernel, which also updates PowerNorm's second buffer in training.
fn backward(spec: &'static ColumnNormOpSpec, call: &Call) -> Result<()> {
    let ([dy, x, weight, pad, second, refused, stats, ..], [dx, dweight, dbias]) =
        (call.arguments::<11>(), call.outputs());
    let views = ColumnViews {
        x: x.view,
        weight: weight.view,
        bias: View::ABSENT,
        pad: row_mask(&x.view, pad),
        first: View::ABSENT,
        second: second.view,
        iters: View::ABSENT,
        refused: refused.view,
        wide_state: is_wide(second),
        given: false,
        options: backward_options(spec, call)?,
        y: View::ABSENT,
        stats: stats.view,
    };
    let gradients = ColumnGradients { dy: dy.view, dx: dx.view, dweight: dweight.view, dbias: dbias.view };
    kernel::backward(call.device(), &spec.kernel, &views, &gradients)?;
    if views.options.train && spec.kernel.approximate {
        // These are the indices of the second buffer and of `refused` among the backward operator's arguments.
        [4, 5].into_iter().for_each(|i| call.write_back(i));
    }
    Ok(())
}

/// True if the buffer is float64, whose code is 1 (`dtype_code` in call.h).
fn is_wide(buffer: &Value) -> bool {
    buffer.dtype == 1
}

/// Returns the padding mask of x's rows. It is absent if x has no columns, because the view of x then has no rows.
fn row_mask(x: &View, pad: &Value) -> View {
    match x.rows() {
        0 => View::ABSENT,
        _ => pad.view,
    }
}
