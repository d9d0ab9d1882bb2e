//! The fused residual step, `x⁺ = α⊙x + β⊙drop(f)` and `y = N(x⁺)`, as operators.

use super::call::{scalar_type, values, Call, Value};
use super::declare::{gradient, leader, parameter, seed, tensor, DtypeRule, Operator};
use super::dropout::{check_dropout, draw, drawn_for};
use super::engine::Handle;
use super::row_norm::{composed, composed_gradients, extra, views, with_extra, BoundRowNorm, ExtraArgs, RowNormOp};
use crate::error::{Error, Result};
use crate::kernel::residual_step::{call as kernel, NO_NORM};
use crate::kernel::rows::call::{RowGradients, RowViews};
use crate::kernel::rows::curve::NUMBERS;
use crate::kernel::view::{accumulation, View};
use crate::norm::operators::RowNormOpSpec;
use tch::{Kind, Tensor};

/// The handle of the operator for a step without a norm.
static HANDLE: Handle = Handle::new("residual");

/// The arguments of a residual step, x⁺ = α⊙x + β⊙drop(f). α and β are one number or one per column; `None` is 1.
pub struct Step<'a> {
    pub x: &'a Tensor,
    pub f: &'a Tensor,
    pub alpha: Option<&'a Tensor>,
    pub beta: Option<&'a Tensor>,
    /// The dropout rate of f; without a seed nothing is dropped.
    pub p: f64,
    /// An int64 tensor (seed, update, micro-batch).
    pub seed: Option<&'a Tensor>,
    /// The number of this place of dropout in the model.
    pub site: i64,
}

impl Step<'_> {
    /// Returns x⁺ in x's dtype.
    pub fn add(&self) -> Result<Tensor> {
        // Without a norm, the schema still has an ε, which nothing reads.
        let unused_eps: [Option<Value>; NUMBERS] = [Some(0.0.into()), None];
        let [x_plus, ..] = self.call(&HANDLE, [None, None], unused_eps, None)?;
        Ok(x_plus)
    }

    /// Returns x⁺ in x's dtype, and the norm N(x⁺) in `kind`.
    pub fn then_norm(&self, norm: &BoundRowNorm, kind: Kind) -> Result<(Tensor, Tensor)> {
        let parameters = [norm.weight.as_ref(), norm.bias.as_ref()];
        let [x_plus, y, _] = self.call(&norm.operator.residual, parameters, norm.extra(), Some(scalar_type(kind)))?;
        Ok((x_plus, y))
    }

    /// Calls a residual operator. Returns x⁺, y and the norm's statistics. `extra` are the norm's own arguments, and
    /// `dtype` is y's type in c10::ScalarType.
    fn call(
        &self,
        handle: &Handle,
        [weight, bias]: [Option<&Tensor>; 2],
        extra: [Option<Value>; NUMBERS],
        dtype: Option<i64>,
    ) -> Result<[Tensor; 3]> {
        let Step { x, f, alpha, beta, p, seed, site } = *self;
        let p = if seed.is_some() { p } else { 0.0 };
        let before = values![x, f, alpha, beta, weight, bias];
        let after = values![p, seed, site, dtype];
        with_extra(&before, extra, &after, |all| handle.call(all))
    }
}

/// Returns the type with this number in c10::ScalarType; the inverse of [`scalar_type`].
fn kind_of(scalar_type: i64) -> Kind {
    [Kind::Half, Kind::Float, Kind::Double, Kind::BFloat16]
        .into_iter()
        .find(|kind| super::call::scalar_type(*kind) == scalar_type)
        .expect("the operator's table admits only floating types")
}

/// Computes drop(x), as a residual step with f = x and α = 0. The arguments are as in [`Step`].
pub fn dropout(x: Tensor, p: f64, seed: Option<&Tensor>, site: i64) -> Result<Tensor> {
    if p == 0.0 || seed.is_none() {
        return Ok(x);
    }
    let zero = Tensor::f_zeros([1i64].as_slice(), (Kind::Float, x.device()))?;
    Step { x: &x.detach(), f: &x, alpha: Some(&zero), beta: None, p, seed, site }.add()
}

// ---- the operators ----

/// Declares the step (x, f, α, β, …) → (x⁺, y, statistics), with its backward operator; y is N(x⁺). Without a norm,
/// there is no y. The arguments `own` in the bodies are the norm's own: ε, or a curve's numbers.
pub(super) fn operator(norm: Option<&'static RowNormOp>) -> Operator {
    let spec = norm.map(|norm| norm.kernels);
    let row_kernel = spec.map_or(&NO_NORM, |spec| &spec.kernel);
    let name = spec.map_or("residual", |spec| spec.residual);
    let backward = format!("{name}_backward");
    let stats = || tensor("stats", format!("*{}", row_kernel.stats()), DtypeRule::Computed);
    let gain = |name| parameter(name).computed();
    let declared = ExtraArgs::of(spec, "norm_");
    // Without a norm, y is an empty tensor without a derivative.
    let y = match norm {
        Some(_) => tensor("y", "*d", DtypeRule::Dtype),
        None => tensor("y", "0", DtypeRule::Dtype).fixed(),
    };
    Operator::new(
        format!(
            "{name}(Tensor x, Tensor f, Tensor? alpha, Tensor? beta, Tensor? weight, Tensor? bias, {}, float p, \
             Tensor? seed, int site, ScalarType? dtype=None) -> (Tensor, Tensor, Tensor)",
            declared.schema
        ),
        [
            vec![
                leader("x", "*d"),
                tensor("f", "*d", DtypeRule::Width),
                gain("alpha"),
                gain("beta"),
                parameter("weight"),
                parameter("bias"),
            ],
            declared.arguments.clone(),
            vec![seed(), tensor("dtype", "", DtypeRule::Dtype)],
        ]
        .concat(),
        [tensor("x_plus", "*d", DtypeRule::Same), y.like("f"), stats()],
    )
    .plan(move |call| {
        let [.., p, seed, _, _] = call.all() else { unreachable!("the schema has these") };
        check_dropout(name, p, seed)
    })
    .kernel(move |call| {
        let ([x, f, alpha, beta, weight, bias, own @ .., p, seed, site, _], [x_plus, y, stats]) =
            (call.all(), call.outputs())
        else {
            unreachable!("the schema has these")
        };
        let [x, f, alpha, beta, weight, bias] = [x, f, alpha, beta, weight, bias].map(|v| v.view);
        let ((eps, numbers), draw) = (extra(own), draw(call, [p, seed, site]));
        // Without a norm, y is absent.
        let y = if norm.is_some() { y.view } else { View::ABSENT };
        let (x_plus, stats) = (x_plus.view, stats.view);
        let views = RowViews { x, f, alpha, beta, weight, bias, numbers, x_plus, y, stats, eps, order: None, draw };
        kernel::forward(call.device(), row_kernel, &views)
    })
    .formula(move |call| formula(spec, call))
    .backward(
        Operator::new(
            format!(
                "{backward}(Tensor? dx_plus, Tensor? dy, Tensor x_plus, Tensor? x, Tensor f, Tensor? alpha, Tensor? beta, \
                 Tensor? weight, Tensor? bias, Tensor stats, {}, float p, Tensor? seed, int site) -> {}",
                declared.schema,
                declared.results(6)
            ),
            [
                vec![
                tensor("dx_plus", "*d", DtypeRule::Same).optional(),
                tensor("dy", "*d", DtypeRule::Width).optional(),
                leader("x_plus", "*d"),
                tensor("x", "*d", DtypeRule::Same).optional().like("alpha"), // needed only for α's gradient
                tensor("f", "*d", DtypeRule::Width),
                gain("alpha"),
                gain("beta"),
                parameter("weight"),
                parameter("bias"),
                stats(),
                ],
                declared.arguments.clone(),
                vec![seed()],
            ].concat(),
            [
                vec![
                gradient("dx", "x_plus"),
                gradient("df", "f").or_first(),
                gradient("dalpha", "alpha"),
                gradient("dbeta", "beta"),
                gradient("dweight", "weight"),
                gradient("dbias", "bias"),
                ],
                declared.gradients.clone(),
            ].concat(),
        )
        .plan(move |call| {
            let [_, dy, x_plus, x, f, alpha, beta, .., p, seed, _] = call.all() else {
                unreachable!("the schema has these")
            };
            if norm.is_none() && !dy.is_none() {
                return Err(Error::invalid("residual_backward: without a norm there is no y, and dy must be absent"));
            }
            check_dropout(&backward, p, seed)?;
            // If dx and df are equal, only dx is computed and autograd passes it to both, which saves a pass over
            // memory.
            if p.float() == 0.0 && alpha.is_none() && beta.is_none() && x_plus.dtype == f.dtype {
                call.leave_out(1); // df
            }
            if x.is_none() {
                call.leave_out(2); // dalpha
            }
            Ok(())
        })
        .kernel(move |call| {
            let (
                [dx_plus, dy, x_plus, x, f, alpha, beta, weight, bias, stats, own @ .., p, seed, site],
                [dx, df, dalpha, dbeta, dweight, dbias, dnumbers @ ..],
            ) = (call.all(), call.all_outputs())
            else {
                unreachable!("the schema has these")
            };
            let [dx_plus, dy, x_plus, x, f, alpha, beta, weight, bias, stats] =
                [dx_plus, dy, x_plus, x, f, alpha, beta, weight, bias, stats].map(|v| v.view);
            let [dx, df, dalpha, dbeta, dweight, dbias] = [dx, df, dalpha, dbeta, dweight, dbias].map(|v| v.view);
            let ((eps, numbers), dnumbers) = (extra(own), views(dnumbers));
            let (y, draw) = (View::ABSENT, draw(call, [p, seed, site]));
            let views = RowViews { x, f, alpha, beta, weight, bias, numbers, x_plus, y, stats, eps, order: None, draw };
            let gradients = RowGradients { dx_plus, dy, dx, df, dalpha, dbeta, dweight, dbias, dnumbers };
            kernel::backward(call.device(), row_kernel, &views, &gradients)
        })
        .formula(move |call| gradients(spec, call)),
    )
    .program(&row_kernel.program)
    .counted(norm.map_or(&HANDLE, |norm| &norm.residual))
}

/// Computes the backward operator's outputs with tch: dx = α⊙g, df = β⊙mask⊙g, the gradients of α and β, and those of
/// the norm's parameters. Here g is dx⁺ plus the norm's gradient at x⁺.
fn gradients(norm: Option<&RowNormOpSpec>, call: &Call) -> Result<Vec<Option<Tensor>>> {
    let [dx_plus, dy, x_plus, x, f, alpha, beta, weight, bias, _, extra @ .., p, seed, site] = call.all() else {
        unreachable!("the schema has these")
    };
    let (x_plus, f) = (x_plus.required(), f.required());
    let kind = accumulation(x_plus.kind());
    let wide = |value: &Value| Ok::<_, Error>(value.tensor().map(|t| t.f_to_kind(kind)).transpose()?);
    let mut g = wide(dx_plus)?;
    // The gradients of weight, bias and, for a curve, its numbers. Without a norm or dy, weight and bias have none.
    let mut norm_gradients: Vec<Option<Tensor>> = (0..2).map(|_| None).collect();
    if let (Some(spec), Some(dy)) = (norm, wide(dy)?) {
        // The gradients of x⁺, weight, bias and the norm's own arguments.
        let mut all = composed_gradients(spec, &dy, &x_plus.f_to_kind(kind)?, [weight, bias], extra)?;
        all.truncate(3 + spec.numbers.len()); // drops ε, which has no gradient
        let through_norm = all.remove(0);
        g = match (g, through_norm) {
            (Some(g), Some(through_norm)) => Some(g.f_add(&through_norm)?),
            (g, through_norm) => g.or(through_norm),
        };
        norm_gradients = all;
    }
    let g = g.map_or_else(|| x_plus.f_zeros_like()?.f_to_kind(kind), Ok)?;
    let mask = drawn_for(&f.f_to_kind(kind)?, [p, seed, site])?;
    let undropped = mask.map_or_else(|| Ok(g.shallow_clone()), |mask| g.f_mul(&mask))?;
    // `times` returns gain⊙t, or t without a gain. `sum` returns the gain's gradient: g⊙factor, summed to the gain's
    // shape.
    let times = |t: &Tensor, gain: &Value| match wide(gain)? {
        Some(gain) => Ok::<_, Error>(t.f_mul(&gain)?),
        None => Ok(t.shallow_clone()),
    };
    let sum = |gain: &Value, g: &Tensor, factor: Option<Tensor>| match (gain.tensor(), factor) {
        (Some(gain), Some(factor)) => Ok::<_, Error>(Some(g.f_mul(&factor)?.f_sum_to_size(gain.size().as_slice())?)),
        _ => Ok(None),
    };
    let (dx, df) = (times(&g, alpha)?, times(&undropped, beta)?);
    let gain_gradients = [sum(alpha, &g, wide(x)?)?, sum(beta, &undropped, Some(f.f_to_kind(kind)?))?];
    let dx_and_df = [Some(dx.f_to_kind(x_plus.kind())?), Some(df.f_to_kind(f.kind())?)];
    Ok(dx_and_df.into_iter().chain(gain_gradients).chain(norm_gradients).collect())
}

/// Computes x⁺ = α⊙x + β⊙drop(f) in f32 or f64, rounds it to x's type, and applies the norm to the rounded x⁺. Returns
/// x⁺, y and the statistics; y and statistics that nothing reads are `None`.
fn formula(norm: Option<&RowNormOpSpec>, call: &Call) -> Result<Vec<Option<Tensor>>> {
    let [x, f, alpha, beta, weight, bias, extra @ .., p, seed, site, dtype] = call.all() else {
        unreachable!("the schema has these")
    };
    let (x, f) = (x.required(), f.required());
    let kind = accumulation(x.kind());
    let times = |t: Tensor, gain: &Value| match gain.tensor() {
        Some(gain) => Ok(t.f_mul(&gain.f_to_kind(kind)?)?),
        None => Ok::<_, Error>(t),
    };
    let mut branch = f.f_to_kind(kind)?;
    if let Some(mask) = drawn_for(&branch, [p, seed, site])? {
        branch = branch.f_mul(&mask)?;
    }
    let branch = times(branch, beta)?;
    let x_plus = times(x.f_to_kind(kind)?, alpha)?.f_add(&branch)?.f_to_kind(x.kind())?;
    let y = match norm {
        Some(spec) => {
            let y = composed(spec, &x_plus.f_to_kind(kind)?, [weight, bias], extra)?;
            let y_kind = if dtype.is_none() { f.kind() } else { kind_of(dtype.int()) };
            Some(y.f_to_kind(y_kind)?)
        }
        None => None,
    };
    Ok(vec![Some(x_plus), y, None]) // no statistics
}
