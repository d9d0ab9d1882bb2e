//! The fused residual step: `x⁺ = α⊙x + β⊙drop(f)`, `y = N(x⁺)`, in one pass each way.

use super::count::Count;
use super::declare::{derivative, gradient, leader, make, parameter, run, seed, tensor, Kind as Type, Operator};
use super::device_rows::{self, Rows, Sums};
use super::engine::Handle;
use super::ffi::{Call, Draw, Value, View};
use super::row_norm::{RowKernels, Rowwise};
use crate::cpu::parallel::{self, Shared};
use crate::cpu::{memory, philox, Accumulator, Element};
use crate::cuda::Program;
use crate::error::{Error, Result};
use crate::kernel::residual_step as step;
use crate::kernel::rows::{NoNorm, Rules};
use tch::{Kind, Tensor};

/// The step without a norm.
pub static COUNT: Count = Count::new("residual");
static HANDLE: Handle = Handle::new("residual");
static NO_RULES: Rules = Rules::of::<NoNorm>();

/// One step, for Rust. Gains are scalars or one number per column; none is 1.
pub struct Step<'a> {
    pub x: &'a Tensor,
    pub f: &'a Tensor,
    pub alpha: Option<&'a Tensor>,
    pub beta: Option<&'a Tensor>,
    /// Dropout on f; without a seed nothing is dropped.
    pub p: f64,
    pub seed: Option<&'a Tensor>,
    pub site: i64,
}

impl Step<'_> {
    /// x⁺ in x's dtype.
    pub fn add(&self) -> Result<Tensor> {
        let [x_plus, ..] = self.call(&HANDLE, [None, None], 0.0, None)?;
        Ok(x_plus)
    }

    /// (x⁺ in x's dtype, N(x⁺) in `kind`).
    pub fn then_norm(&self, norm: &Rowwise, kind: Kind) -> Result<(Tensor, Tensor)> {
        let parameters = [norm.weight.as_ref(), norm.bias.as_ref()];
        let [x_plus, y, _] = self.call(&norm.kernels.residual_handle, parameters, norm.eps, Some(scalar_type(kind)))?;
        Ok((x_plus, y))
    }

    fn call(
        &self,
        handle: &Handle,
        [weight, bias]: [Option<&Tensor>; 2],
        eps: f64,
        dtype: Option<i64>,
    ) -> Result<[Tensor; 3]> {
        let Step { x, f, alpha, beta, p, seed, site } = *self;
        let p = if seed.is_some() { p } else { 0.0 };
        handle.call(&[
            x.into(),
            f.into(),
            alpha.into(),
            beta.into(),
            weight.into(),
            bias.into(),
            eps.into(),
            p.into(),
            seed.into(),
            site.into(),
            dtype.into(),
        ])
    }
}

/// c10::ScalarType's number (tch keeps its own private).
fn scalar_type(kind: Kind) -> i64 {
    match kind {
        Kind::Half => 5,
        Kind::Float => 6,
        Kind::Double => 7,
        Kind::BFloat16 => 15,
        other => unreachable!("{other:?} is no floating type"),
    }
}

fn kind_of(scalar_type: i64) -> Kind {
    [Kind::Half, Kind::Float, Kind::Double, Kind::BFloat16]
        .into_iter()
        .find(|kind| self::scalar_type(*kind) == scalar_type)
        .expect("the operator's table lets floating types through alone")
}

/// drop(x): the step with α = 0.
pub fn dropout(x: Tensor, p: f64, seed: Option<&Tensor>, site: i64) -> Result<Tensor> {
    if p == 0.0 || seed.is_none() {
        return Ok(x);
    }
    let zero = Tensor::f_zeros([1i64].as_slice(), (Kind::Float, x.device()))?;
    Step { x: &x.detach(), f: &x, alpha: Some(&zero), beta: None, p, seed, site }.add()
}

/// Calls `$work::<X, F, Y>($($arg),*)` for the dtypes that may meet: all alike, or an f32 stream with a 16-bit branch
/// whose norm is of the branch's type or the stream's.
macro_rules! by_types {
    ($x:expr, $f:expr, $y:expr, $work:ident($($arg:expr),*)) => {{
        use half::{bf16, f16};
        // A step without a norm has no y, or an empty one: any type will do.
        match ($x.dtype, $f.dtype, if $y.is_absent() { $f.dtype } else { $y.dtype }) {
            (0, 0, 0) => $work::<f32, f32, f32>($($arg),*),
            (1, 1, 1) => $work::<f64, f64, f64>($($arg),*),
            (2, 2, 2) => $work::<bf16, bf16, bf16>($($arg),*),
            (3, 3, 3) => $work::<f16, f16, f16>($($arg),*),
            (0, 2, 2) => $work::<f32, bf16, bf16>($($arg),*),
            (0, 2, 0) => $work::<f32, bf16, f32>($($arg),*),
            (0, 3, 3) => $work::<f32, f16, f16>($($arg),*),
            (0, 3, 0) => $work::<f32, f16, f32>($($arg),*),
            _ => Err(Error::Torch(
                "the residual step takes x, f and N(x) of one dtype, or x in float32 with f in bfloat16 or float16 and \
                 N(x) in either's dtype: convert the inputs".to_string(),
            )),
        }
    }};
}

// ---- the operators ----

/// The step with a norm after it, or without.
pub(super) fn operator(norm: Option<&'static RowKernels>) -> Operator {
    let name = norm.map_or("residual".to_string(), |k| format!("{}_residual", k.operator));
    let backward = format!("{name}_backward");
    let stats = || norm.map_or("*0".to_string(), RowKernels::stats);
    let gain = |name| parameter(name).computed();
    let y = match norm {
        Some(_) => tensor("y", "*d", Type::Dtype),
        None => tensor("y", "0", Type::Dtype).fixed(),
    };
    let says_dtype = tensor("dtype", "", Type::Dtype);
    let title = name.clone();
    Operator {
        schema: format!(
            "{name}(Tensor x, Tensor f, Tensor? alpha, Tensor? beta, Tensor? weight, Tensor? bias, float eps, float p, \
             Tensor? seed, int site, ScalarType? dtype=None) -> (Tensor, Tensor, Tensor)"
        ),
        arguments: vec![
            leader("x", "*d"),
            tensor("f", "*d", Type::Width),
            gain("alpha"),
            gain("beta"),
            parameter("weight"),
            parameter("bias"),
            seed(),
            says_dtype,
        ],
        outputs: vec![
            tensor("x_plus", "*d", Type::Same),
            y.like("f"),
            tensor("stats", stats(), Type::Computed),
        ],
        plan: run(move |call| {
            let [.., p, seed, _, _] = call.arguments::<11>();
            check_dropout(&title, p, seed)
        }),
        kernel: run(move |call| forward(norm, call)),
        formula: make(move |call| formula(norm, call)),
        derivative: derivative(Operator {
            schema: format!(
                "{backward}(Tensor? dx_plus, Tensor? dy, Tensor x_plus, Tensor? x, Tensor f, Tensor? alpha, Tensor? beta, \
                 Tensor? weight, Tensor? bias, Tensor stats, float eps, float p, Tensor? seed, int site) -> \
                 (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
            ),
            arguments: vec![
                tensor("dx_plus", "*d", Type::Same).optional(),
                tensor("dy", "*d", Type::Width).optional(),
                leader("x_plus", "*d"),
                tensor("x", "*d", Type::Same).optional().like("alpha"), // only α's gradient needs it
                tensor("f", "*d", Type::Width),
                gain("alpha"),
                gain("beta"),
                parameter("weight"),
                parameter("bias"),
                tensor("stats", stats(), Type::Computed),
                seed(),
            ],
            outputs: vec![
                gradient("dx", "x_plus"),
                gradient("df", "f").or_first(),
                gradient("dalpha", "alpha"),
                gradient("dbeta", "beta"),
                gradient("dweight", "weight"),
                gradient("dbias", "bias"),
            ],
            plan: run(move |call| {
                let [_, dy, x_plus, x, f, alpha, beta, .., p, seed, _] = call.arguments::<14>();
                if norm.is_none() && !dy.is_none() {
                    return Err(Error::invalid(
                        "residual_backward: without a norm there is no y, and dy must be absent",
                    ));
                }
                check_dropout(&backward, p, seed)?;
                // Where dx and df are the same numbers autograd hands dx to both: a pass over memory less.
                if p.float() == 0.0 && alpha.is_none() && beta.is_none() && x_plus.dtype == f.dtype {
                    call.leave_out(1);
                }
                if x.is_none() {
                    call.leave_out(2);
                }
                Ok(())
            }),
            kernel: run(move |call| backward_kernel(norm, call)),
            ..Operator::default()
        }),
        count: Some(norm.map_or(&COUNT, |k| &k.residual_count)),
        ..Operator::default()
    }
}

/// A norm's rules and its program for a GPU, or those of the step without one.
fn kernels(norm: Option<&'static RowKernels>) -> (&'static Rules, &'static Program) {
    norm.map_or((&NO_RULES, &step::NO_NORM), |k| (&k.rules, &k.program))
}

fn forward(norm: Option<&'static RowKernels>, call: &Call) -> Result<()> {
    let [x, f, alpha, beta, weight, bias, eps, p, seed, site, _] = call.arguments();
    let [x_plus, y, stats] = call.outputs();
    let [x, f, alpha, beta, weight, bias] = [x, f, alpha, beta, weight, bias].map(|v| v.view);
    let (eps, draw) = (eps.float(), Draw::of(call, [p, seed, site]));
    // None without a norm.
    let y = if norm.is_some() { y.view } else { View::ABSENT };
    let (x_plus, stats) = (x_plus.view, stats.view);
    let rows = Rows { x, f, alpha, beta, weight, bias, x_plus, y, stats, eps, order: None, draw };
    let (rules, program) = kernels(norm);
    match call.device() {
        None => by_types!(x, f, y, forward_typed(rules, &rows)),
        Some(device) => device_rows::forward(device, program, &rows),
    }
}

fn backward_kernel(norm: Option<&'static RowKernels>, call: &Call) -> Result<()> {
    let [dx_plus, dy, x_plus, x, f, alpha, beta, weight, bias, stats, eps, p, seed, site] = call.arguments();
    let [dx, df, dalpha, dbeta, dweight, dbias] = call.outputs::<6>().each_ref().map(|v| v.view);
    let [x, f, alpha, beta, weight, bias] = [x, f, alpha, beta, weight, bias].map(|v| v.view);
    let (eps, draw) = (eps.float(), Draw::of(call, [p, seed, site]));
    let (x_plus, stats, y) = (x_plus.view, stats.view, View::ABSENT);
    let rows = Rows { x, f, alpha, beta, weight, bias, x_plus, y, stats, eps, order: None, draw };
    let sums = Sums { dalpha, dbeta, dweight, dbias };
    let back = Gradients { dx_plus: dx_plus.view, dy: dy.view, dx, df };
    let (rules, program) = kernels(norm);
    match call.device() {
        None => by_types!(x_plus, f, back.dy, backward_typed(rules, &rows, &back, &sums)),
        Some(device) => device_rows::backward(device, program, &rows, back.dx_plus, back.dy, dx, df, &sums),
    }
}

/// What goes into a step's backward pass and comes out of it, beside what is summed over rows.
struct Gradients {
    dx_plus: View,
    dy: View,
    dx: View,
    df: View,
}

fn formula(norm: Option<&'static RowKernels>, call: &Call) -> Result<Vec<Option<Tensor>>> {
    let [x, f, alpha, beta, weight, bias, eps, p, seed, site, dtype] = call.arguments();
    let (x, f) = (x.required(), f.required());
    let kind = if x.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    let gained = |t: Tensor, gain: &Value| match gain.tensor() {
        Some(gain) => Ok(t.f_mul(&gain.f_to_kind(kind)?)?),
        None => Ok::<_, Error>(t),
    };
    let branch = gained(drop(f.f_to_kind(kind)?, [p, seed, site])?, beta)?;
    let x_plus = gained(x.f_to_kind(kind)?, alpha)?.f_add(&branch)?.f_to_kind(x.kind())?;
    let y = match norm {
        Some(k) => {
            let (weight, bias) = (weight.tensor(), bias.tensor());
            let y = k.formula(&x_plus.f_to_kind(kind)?, weight.as_ref(), bias.as_ref(), eps.float())?;
            Some(y.f_to_kind(if dtype.is_none() { f.kind() } else { kind_of(dtype.int()) })?)
        }
        None => None,
    };
    Ok(vec![Some(x_plus), y, None])
}

// ---- dropout, as other operators have it, too ----

pub(super) fn check_rate(operator: &str, p: f64) -> Result<()> {
    match (0.0..1.0).contains(&p) {
        true => Ok(()),
        false => Err(Error::invalid(format!("{operator}: dropout p must lie in [0, 1), got {p}"))),
    }
}

pub(super) fn check_dropout(operator: &str, p: &Value, seed: &Value) -> Result<()> {
    check_rate(operator, p.float())?;
    match p.float() == 0.0 || !seed.is_none() {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "{operator}: with p > 0 a seed is needed, an int64 tensor (seed, update, micro_batch)"
        ))),
    }
}

/// drop(t) by the formula: times 0 or 1/(1 − p).
pub(super) fn drop(t: Tensor, draw: [&Value; 3]) -> Result<Tensor> {
    let draw = Draw::of_formula(draw)?;
    if draw.p == 0.0 {
        return Ok(t);
    }
    let size = t.size();
    let cols = size.last().map_or(1, |n| *n as usize);
    let rows = size.iter().product::<i64>() as usize / cols.max(1);
    let scale = dropout_scale(&draw, rows, cols)?.f_to_device(t.device())?.f_to_kind(t.kind())?;
    Ok(t.f_mul(&scale.f_reshape(size.as_slice())?)?)
}

/// The dropout mask times its scale, float64 on the CPU: what the formulas multiply by.
pub(super) fn dropout_scale(draw: &Draw, rows: usize, cols: usize) -> Result<Tensor> {
    let mut scale = memory::filled(1.0, rows.saturating_mul(cols));
    if let (Some(dropout), true) = (draw.dropout(), rows * cols > 0) {
        let mut random = philox::scratch(rows, cols);
        philox::fill(&dropout.stream, 0, rows, cols, &mut random);
        for (scale, random) in scale.chunks_exact_mut(cols).zip(random.chunks_exact(philox::padded(cols))) {
            for (s, r) in scale.iter_mut().zip(random) {
                *s = if *r >= dropout.threshold { dropout.scale } else { 0.0 };
            }
        }
    }
    Ok(Tensor::f_from_slice(&scale)?.f_reshape([rows as i64, cols as i64].as_slice())?)
}

// ---- the kernels on the CPU ----

/// # Safety
/// The views' dtypes have the accumulation type A.
unsafe fn step<A: Accumulator>(v: &Rows, cols: usize) -> step::Step<'_, A> {
    step::Step {
        cols,
        alpha: v.alpha.slice(),
        beta: v.beta.slice(),
        dropout: v.draw.dropout(),
        weight: v.weight.slice(),
        bias: v.bias.slice(),
        eps: A::from_f64(v.eps),
    }
}

fn forward_typed<X, F, Y>(rules: &Rules, v: &Rows) -> Result<()>
where
    X: Element,
    F: Element<Acc = X::Acc>,
    Y: Element<Acc = X::Acc>,
{
    let rule = rules.get::<X::Acc>();
    let (rows, cols) = (v.x.rows(), v.x.cols());
    // SAFETY: C++ gave contiguous tensors of these types and shapes; x_plus, y and stats are fresh.
    let (step, x, f) = unsafe { (step::<X::Acc>(v, cols), v.x.slice::<X>(), v.f.slice::<F>()) };
    // SAFETY: as above.
    let (x_plus, y, stats) = unsafe {
        (Shared::new(v.x_plus.slice_mut::<X>()), Shared::new(v.y.slice_mut::<Y>()), Shared::new(v.stats.slice_mut()))
    };
    let has_y = v.y.rows() > 0;
    parallel::for_each(rows, parallel::grain(cols), |r| {
        let block = r.start * cols..r.end * cols;
        // SAFETY: the ranges are disjoint and inside 0..rows; y is empty for a step without a norm.
        let (x_plus, y, stats) = unsafe {
            (
                x_plus.slice(block.clone()),
                if has_y { y.slice(block.clone()) } else { &mut [] },
                stats.slice(r.start * rule.stats..r.end * rule.stats),
            )
        };
        step::forward_by::<X, F, Y>(rule, &step, r.start, &x[block.clone()], &f[block], x_plus, y, stats);
    });
    Ok(())
}

fn backward_typed<X, F, Y>(rules: &Rules, v: &Rows, g: &Gradients, sums: &Sums) -> Result<()>
where
    X: Element,
    F: Element<Acc = X::Acc>,
    Y: Element<Acc = X::Acc>,
{
    let rule = rules.get::<X::Acc>();
    let (rows, cols) = (v.x_plus.rows(), v.x_plus.cols());
    // SAFETY: as in `forward_typed`; the gradients are fresh, their sums of the accumulation type.
    let (step, x_plus, x, f, stats, dx_plus, dy) = unsafe {
        (
            step::<X::Acc>(v, cols),
            v.x_plus.slice::<X>(),
            v.x.slice::<X>(),
            v.f.slice::<F>(),
            v.stats.slice::<X::Acc>(),
            g.dx_plus.slice::<X>(),
            g.dy.slice::<Y>(),
        )
    };
    // SAFETY: as above.
    let (dx, df) = unsafe { (Shared::new(g.dx.slice_mut::<X>()), Shared::new(g.df.slice_mut::<F>())) };
    let has_df = !g.df.is_absent();
    // SAFETY: as above.
    let mut sums: [&mut [X::Acc]; 4] =
        unsafe { [sums.dweight, sums.dbias, sums.dalpha, sums.dbeta].map(|v| v.slice_mut()) };
    parallel::sum_over_rows(rows, cols, &mut sums, |r, sums| {
        let [dweight, dbias, dalpha, dbeta] = sums else { unreachable!("four sums were asked for") };
        let block = r.start * cols..r.end * cols;
        // An absent tensor is empty and stays so.
        fn part<T>(all: &[T], block: std::ops::Range<usize>) -> &[T] {
            if all.is_empty() {
                all
            } else {
                &all[block]
            }
        }
        // SAFETY: the ranges are disjoint and inside 0..rows.
        let dx = unsafe { dx.slice(block.clone()) };
        // SAFETY: as above; where df is dx itself, one of them is left out.
        let df = if has_df { unsafe { df.slice(block.clone()) } } else { &mut [] };
        let mut grads = step::Gradients { dweight, dbias, dalpha, dbeta };
        step::backward_by::<X, F, Y>(
            rule,
            &step,
            r.start,
            part(dx_plus, block.clone()),
            part(dy, block.clone()),
            &x_plus[block.clone()],
            part(x, block.clone()),
            part(f, block),
            &stats[r.start * rule.stats..r.end * rule.stats],
            dx,
            df,
            &mut grads,
        );
    });
    Ok(())
}
