//! The family of row norms: kernels by norm and dtype, rows over threads, parameter gradients summed over rows.

use super::count::Count;
use super::declare::{derivative, gradient, leader, make, parameter, run, tensor, Kind, Operator};
use super::device_rows::{self, Rows, Sums};
use super::engine::Handle;
use super::ffi::{by_dtype, Call, Draw, View};
use crate::cpu::parallel::{self, Shared};
use crate::cpu::{Accumulator, Element};
use crate::cuda::Program;
use crate::error::Result;
use crate::kernel::rows::{self, RowNorm, Rule, Rules};
use crate::norm::composed::{self, Hat};
use tch::Tensor;

/// A row norm as an operator, and with a residual step before it as another.
pub struct RowKernels {
    /// torch.ops.normformer_rs.`operator`, and `operator`_residual.
    pub operator: &'static str,
    stats: usize,
    pub(super) rules: Rules,
    /// The composed form.
    hat: Hat,
    /// The same kernels for a GPU.
    pub program: Program,
    pub(super) count: Count,
    pub(super) residual_count: Count,
    handle: Handle,
    pub(super) residual_handle: Handle,
}

impl RowKernels {
    /// The kernels of `N`; `names` are the operators': of the norm alone, and after a residual step.
    pub const fn of<N: RowNorm>(names: [&'static str; 2], hat: Hat, program: Program) -> Self {
        RowKernels {
            operator: names[0],
            stats: N::STATS,
            rules: Rules::of::<N>(),
            hat,
            program,
            count: Count::new(names[0]),
            residual_count: Count::new(names[1]),
            handle: Handle::new(names[0]),
            residual_handle: Handle::new(names[1]),
        }
    }

    /// y in x's type, by the composed form.
    pub(super) fn formula(
        &self,
        x: &Tensor,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Result<Tensor> {
        composed::apply(self.hat, x, &[], (weight, bias), &[eps])
    }

    /// The size of the statistics that a forward pass keeps of x, (*d).
    pub(super) fn stats(&self) -> String {
        format!("*{}", self.stats)
    }
}

/// A row norm with its parameters.
pub struct Rowwise {
    pub kernels: &'static RowKernels,
    pub weight: Option<Tensor>,
    pub bias: Option<Tensor>,
    pub eps: f64,
}

/// N(x) through the dispatcher: differentiable, on any device.
pub fn row_norm(
    kernels: &'static RowKernels,
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    let [y, _stats] = kernels.handle.call(&[x.into(), weight.into(), bias.into(), eps.into()])?;
    Ok(y)
}

pub(super) fn operator(k: &'static RowKernels) -> Operator {
    let name = k.operator;
    Operator {
        schema: format!("{name}(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)"),
        arguments: vec![leader("x", "*d"), parameter("weight"), parameter("bias")],
        outputs: vec![tensor("y", "*d", Kind::Same), tensor("stats", k.stats(), Kind::Computed)],
        kernel: run(move |call| forward(k, call)),
        formula: make(move |call| {
            let [x, weight, bias, eps] = call.arguments();
            let y = k.formula(&x.required(), weight.tensor().as_ref(), bias.tensor().as_ref(), eps.float())?;
            Ok(vec![Some(y), None])
        }),
        derivative: derivative(Operator {
            schema: format!(
                "{name}_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor stats, float eps) -> \
                 (Tensor, Tensor, Tensor)"
            ),
            arguments: vec![
                tensor("dy", "*d", Kind::Same),
                leader("x", "*d"),
                parameter("weight"),
                parameter("bias"),
                tensor("stats", k.stats(), Kind::Computed),
            ],
            outputs: vec![gradient("dx", "x"), gradient("dweight", "weight"), gradient("dbias", "bias")],
            kernel: run(move |call| backward(k, call)),
            ..Operator::default()
        }),
        count: Some(&k.count),
        ..Operator::default()
    }
}

fn forward(k: &'static RowKernels, call: &Call) -> Result<()> {
    let ([x, weight, bias, eps], [y, stats]) = (call.arguments(), call.outputs());
    let (x, eps, v) =
        (x.view, eps.float(), Norm { weight: weight.view, bias: bias.view, y: y.view, stats: stats.view });
    match call.device() {
        None => by_dtype!(x, E => forward_typed::<E>(k.rules.get(), &x, eps, &v)),
        Some(device) => {
            let rows = Rows { bias: v.bias, y: v.y, ..alone(x, v.weight, v.stats, eps) };
            device_rows::forward(device, &k.program, &rows)
        }
    }
}

fn backward(k: &'static RowKernels, call: &Call) -> Result<()> {
    let ([dy, x, weight, _, stats, eps], [dx, dweight, dbias]) = (call.arguments(), call.outputs());
    match call.device() {
        None => {
            let (dx, dweight, dbias) = (dx.view, dweight.view, dbias.view);
            let v = Gradients { dy: dy.view, weight: weight.view, stats: stats.view, dx, dweight, dbias };
            by_dtype!(x.view, E => backward_typed::<E>(k.rules.get(), &x.view, eps.float(), &v))
        }
        Some(device) => {
            let rows = Rows { bias: dbias.view, ..alone(x.view, weight.view, stats.view, eps.float()) };
            let sums = Sums { dweight: dweight.view, dbias: dbias.view, ..Sums::NONE };
            device_rows::backward(device, &k.program, &rows, View::ABSENT, dy.view, dx.view, View::ABSENT, &sums)
        }
    }
}

/// A norm's call as the step that it is on a GPU: x⁺ = x.
fn alone(x: View, weight: View, stats: View, eps: f64) -> Rows {
    Rows { x, weight, stats, eps, x_plus: x, ..Rows::of(Draw::NONE) }
}

struct Norm {
    weight: View,
    bias: View,
    y: View,
    stats: View,
}

struct Gradients {
    dy: View,
    weight: View,
    stats: View,
    dx: View,
    dweight: View,
    dbias: View,
}

fn forward_typed<E: Element>(rule: &Rule<E::Acc>, x: &View, eps: f64, v: &Norm) -> Result<()> {
    let (rows, cols) = (x.rows(), x.cols());
    // SAFETY: C++ gave contiguous tensors of E (parameters and statistics of its accumulation type); y and stats are
    // fresh.
    let (x, weight, bias, y, stats) =
        unsafe { (x.slice::<E>(), v.weight.slice(), v.bias.slice(), v.y.slice_mut::<E>(), v.stats.slice_mut()) };
    let (y, stats) = (Shared::new(y), Shared::new(stats));
    let eps = E::Acc::from_f64(eps);
    parallel::for_each(rows, parallel::grain(cols), |r| {
        // SAFETY: the ranges are disjoint and inside 0..rows.
        let (y, stats) =
            unsafe { (y.slice(r.start * cols..r.end * cols), stats.slice(r.start * rule.stats..r.end * rule.stats)) };
        rows::forward_by::<E>(rule, cols, &x[r.start * cols..r.end * cols], weight, bias, eps, y, stats);
    });
    Ok(())
}

fn backward_typed<E: Element>(rule: &Rule<E::Acc>, x: &View, eps: f64, v: &Gradients) -> Result<()> {
    let (rows, cols) = (x.rows(), x.cols());
    // SAFETY: as in `forward_typed`; dx, dweight and dbias are fresh.
    let (dy, x, weight, stats, dx) =
        unsafe { (v.dy.slice::<E>(), x.slice::<E>(), v.weight.slice(), v.stats.slice(), v.dx.slice_mut::<E>()) };
    // SAFETY: as above.
    let (dweight, dbias): (&mut [E::Acc], &mut [E::Acc]) = unsafe { (v.dweight.slice_mut(), v.dbias.slice_mut()) };
    let dx = Shared::new(dx);
    let eps = E::Acc::from_f64(eps);
    parallel::sum_over_rows(rows, cols, &mut [dweight, dbias], |r, sums| {
        let [dweight, dbias] = sums else { unreachable!("two sums were asked for") };
        // SAFETY: the ranges are disjoint and inside 0..rows.
        let dx = unsafe { dx.slice(r.start * cols..r.end * cols) };
        let (dy, x) = (&dy[r.start * cols..r.end * cols], &x[r.start * cols..r.end * cols]);
        let stats = &stats[r.start * rule.stats..r.end * rule.stats];
        rows::backward_by::<E>(rule, cols, dy, x, weight, eps, stats, dx, dweight, dbias);
    });
    Ok(())
}
