//! The fused residual step: `x⁺ = α⊙x + β⊙drop(f)`, `y = N(x⁺)`, in one pass each way.

use super::count::Count;
use super::device_rows::{self, Rows, Sums};
use super::engine;
use super::ffi::{give, pointer, status, take, Draw, View};
use crate::cpu::parallel::{self, Shared};
use crate::cpu::{memory, philox, Accumulator, Element};
use crate::cuda::Program;
use crate::error::{Error, Result};
use crate::kernel::residual_step as step;
use crate::kernel::rows::{NoNorm, Rules};
use crate::norm::{self, ROW_NORMS};
use std::ffi::c_int;
use tch::{Kind, Tensor};
use torch_sys::C_tensor;

/// The step without a norm.
pub static COUNT: Count = Count::new("residual");
const NO_NORM: i64 = -1;
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
        self.call(NO_NORM, None, None, 0.0, None, std::ptr::null_mut())
    }

    /// (x⁺ in x's dtype, N(x⁺) in `kind`).
    pub fn then_norm(&self, norm: &norm::Rowwise, kind: Kind) -> Result<(Tensor, Tensor)> {
        let k = ROW_NORMS.iter().position(|k| std::ptr::eq(*k, norm.kernels));
        let k = k.expect("every RowKernels is listed in norm::ROW_NORMS") as i64;
        let mut y = std::ptr::null_mut();
        let x_plus = self.call(k, norm.weight.as_ref(), norm.bias.as_ref(), norm.eps, Some(kind), &mut y)?;
        // SAFETY: the shim made y along with x⁺.
        Ok((x_plus, unsafe { take(y)? }))
    }

    fn call(
        &self,
        norm: i64,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
        kind: Option<Kind>,
        y: *mut *mut C_tensor,
    ) -> Result<Tensor> {
        engine::register();
        let p = if self.seed.is_some() { self.p } else { 0.0 };
        let dtype = kind.map_or(-1, scalar_type);
        let (alpha, beta) = (pointer(self.alpha), pointer(self.beta));
        // SAFETY: the tensors outlive the call; new tensors come back.
        unsafe {
            take(nfrs_residual(
                norm,
                self.x.as_ptr(),
                self.f.as_ptr(),
                alpha,
                beta,
                pointer(weight),
                pointer(bias),
                eps,
                p,
                pointer(self.seed),
                self.site,
                dtype,
                y,
            ))
        }
    }
}

/// c10::ScalarType's number (tch keeps its own private).
fn scalar_type(kind: Kind) -> i32 {
    match kind {
        Kind::Half => 5,
        Kind::Float => 6,
        Kind::Double => 7,
        Kind::BFloat16 => 15,
        other => unreachable!("{other:?} is no floating type"),
    }
}

/// drop(x): the step with α = 0.
pub fn dropout(x: Tensor, p: f64, seed: Option<&Tensor>, site: i64) -> Result<Tensor> {
    if p == 0.0 || seed.is_none() {
        return Ok(x);
    }
    let zero = Tensor::f_zeros([1i64].as_slice(), (Kind::Float, x.device()))?;
    Step { x: &x.detach(), f: &x, alpha: Some(&zero), beta: None, p, seed, site }.add()
}

extern "C" {
    fn nfrs_residual(
        norm: i64,
        x: *const C_tensor,
        f: *const C_tensor,
        alpha: *const C_tensor,
        beta: *const C_tensor,
        weight: *const C_tensor,
        bias: *const C_tensor,
        eps: f64,
        p: f64,
        seed: *const C_tensor,
        site: i64,
        dtype: i32,
        y: *mut *mut C_tensor,
    ) -> *mut C_tensor;
}

/// The shim's `Step`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct StepViews {
    x: View,
    f: View,
    alpha: View,
    beta: View,
    weight: View,
    bias: View,
    x_plus: View,
    y: View,
    stats: View,
    eps: f64,
    draw: Draw,
}

/// The shim's `StepGradients`.
#[repr(C)]
pub struct StepGradients {
    dx_plus: View,
    dy: View,
    dx: View,
    df: View,
    dalpha: View,
    dbeta: View,
    dweight: View,
    dbias: View,
    /// A GPU's kernels sum over rows in two stages; the first leaves its sums here.
    workspace: View,
}

impl StepViews {
    fn rows(&self) -> Rows {
        let StepViews { x, f, alpha, beta, weight, bias, x_plus, y, stats, eps, draw } = *self;
        Rows { x, f, alpha, beta, weight, bias, x_plus, y, stats, eps, order: None, draw }
    }

    /// # Safety
    /// The views' dtypes have the accumulation type A.
    unsafe fn step<A: Accumulator>(&self, cols: usize) -> step::Step<'_, A> {
        step::Step {
            cols,
            alpha: self.alpha.slice(),
            beta: self.beta.slice(),
            dropout: self.draw.dropout(),
            weight: self.weight.slice(),
            bias: self.bias.slice(),
            eps: A::from_f64(self.eps),
        }
    }
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

fn forward(rules: &Rules, v: &StepViews) -> Result<()> {
    by_types!(v.x, v.f, v.y, forward_typed(rules, v))
}

fn forward_typed<X, F, Y>(rules: &Rules, v: &StepViews) -> Result<()>
where
    X: Element,
    F: Element<Acc = X::Acc>,
    Y: Element<Acc = X::Acc>,
{
    let rule = rules.get::<X::Acc>();
    let (rows, cols) = (v.x.rows(), v.x.cols());
    // SAFETY: the shim gave contiguous tensors of these types and shapes; x_plus, y and stats are fresh.
    let (step, x, f) = unsafe { (v.step::<X::Acc>(cols), v.x.slice::<X>(), v.f.slice::<F>()) };
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

fn backward(rules: &Rules, v: &StepViews, g: &StepGradients) -> Result<()> {
    by_types!(v.x_plus, v.f, g.dy, backward_typed(rules, v, g))
}

fn backward_typed<X, F, Y>(rules: &Rules, v: &StepViews, g: &StepGradients) -> Result<()>
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
            v.step::<X::Acc>(cols),
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
        unsafe { [g.dweight.slice_mut(), g.dbias.slice_mut(), g.dalpha.slice_mut(), g.dbeta.slice_mut()] };
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
        // SAFETY: as above; where df is dx itself, the shim asks for one of them.
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

/// A norm's rules and its program for a GPU, or those of the step without one.
fn kernels(norm: i64) -> (&'static Rules, &'static Program) {
    match norm {
        NO_NORM => (&NO_RULES, &step::NO_NORM),
        norm => {
            let kernels = ROW_NORMS[norm as usize];
            (&kernels.rules, &kernels.program)
        }
    }
}

#[no_mangle]
unsafe extern "C" fn nfrs_residual_forward(norm: i64, step: &StepViews) -> c_int {
    let count = if norm == NO_NORM { &COUNT } else { &ROW_NORMS[norm as usize].residual_count };
    count.kernel();
    let (rules, program) = kernels(norm);
    status(|| match step.x.device() {
        None => forward(rules, step),
        Some(device) => {
            let y = if step.y.rows > 0 { step.y } else { View::ABSENT }; // none without a norm
            device_rows::forward(device, program, &Rows { y, ..step.rows() })
        }
    })
}

#[no_mangle]
unsafe extern "C" fn nfrs_residual_backward(norm: i64, step: &StepViews, gradients: &StepGradients) -> c_int {
    let (rules, program) = kernels(norm);
    status(|| match step.x_plus.device() {
        None => backward(rules, step, gradients),
        Some(device) => {
            let StepGradients { dx_plus, dy, dx, df, dalpha, dbeta, dweight, dbias, workspace } = *gradients;
            let sums = Sums { dalpha, dbeta, dweight, dbias, ..Sums::in_workspace(workspace) };
            device_rows::backward(device, program, &step.rows(), dx_plus, dy, dx, df, &sums)
        }
    })
}

/// The dropout mask times its scale, float64 on the CPU: what the composed formulas multiply by.
#[no_mangle]
unsafe extern "C" fn nfrs_dropout_scale(draw: &Draw, rows: i64, cols: i64) -> *mut C_tensor {
    give(|| dropout_scale(draw, rows as usize, cols as usize))
}

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
