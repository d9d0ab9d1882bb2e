//! The residual step on an operator's tensors: threads share the rows on the CPU, and a GPU runs the norm's kernels
//! ([`rows::gpu`](crate::kernel::rows::gpu)).

use super::{Gradients, StepParameters};
use crate::cpu::parallel::{self, Shared};
use crate::cpu::{Accumulator, Element};
use crate::cuda::Device;
use crate::error::{Error, Result};
use crate::kernel::rows::call::{RowGradients, RowViews};
use crate::kernel::rows::curve::NUMBERS;
use crate::kernel::rows::{gpu, RowNormKernel};

/// Calls `$work::<X, F, Y>($($arg),*)` with the types of the views `$x`, `$f` and `$y`, or returns an error if they are
/// not supported together. Either all have one type, or x is f32 and f has 16 bits; then y has x's type or f's.
macro_rules! by_types {
    ($x:expr, $f:expr, $y:expr, $work:ident($($arg:expr),*)) => {{
        use half::{bf16, f16};
        // The codes 0 to 3 are f32, f64, bf16 and f16. Without a norm, y is absent or empty, so its type does not
        // matter.
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

/// Computes x⁺, y and the statistics of every row on a GPU or, if `device` is `None`, on the CPU; y and stats are
/// absent without a norm.
pub fn forward(device: Option<Device>, kernel: &'static RowNormKernel, v: &RowViews) -> Result<()> {
    match device {
        None => by_types!(v.x, v.f, v.y, forward_typed(kernel, v)),
        Some(device) => gpu::forward(device, &kernel.program, v),
    }
}

/// Computes the gradients that are not absent in `g`, on a GPU or, if `device` is `None`, on the CPU.
pub fn backward(device: Option<Device>, kernel: &'static RowNormKernel, v: &RowViews, g: &RowGradients) -> Result<()> {
    match device {
        None => by_types!(v.x_plus, v.f, g.dy, backward_typed(kernel, v, g)),
        Some(device) => gpu::backward(device, &kernel.program, v, g),
    }
}

/// Returns the step's parameters, which all rows of `cols` columns share.
///
/// # Safety
/// The parameters are valid views of numbers of type A.
unsafe fn step<A: Accumulator>(v: &RowViews, cols: usize) -> StepParameters<'_, A> {
    StepParameters {
        cols,
        alpha: v.alpha.slice(),
        beta: v.beta.slice(),
        dropout: v.draw.dropout(),
        weight: v.weight.slice(),
        bias: v.bias.slice(),
        eps: A::from_f64(v.eps),
        numbers: v.numbers(),
    }
}

/// Computes [`forward`] on the CPU for the storage types X, F and Y of x, f and y.
fn forward_typed<X, F, Y>(kernel: &RowNormKernel, v: &RowViews) -> Result<()>
where
    X: Element,
    F: Element<Acc = X::Acc>,
    Y: Element<Acc = X::Acc>,
{
    let norm = kernel.get::<X::Acc>();
    let (rows, cols) = (v.x.rows(), v.x.cols());
    // SAFETY: the C++ operator passed contiguous tensors of these types and shapes.
    let (step, x, f) = unsafe { (step::<X::Acc>(v, cols), v.x.slice::<X>(), v.f.slice::<F>()) };
    // SAFETY: x_plus, y and stats are new tensors of these types.
    let (x_plus, y, stats) = unsafe {
        (Shared::new(v.x_plus.slice_mut::<X>()), Shared::new(v.y.slice_mut::<Y>()), Shared::new(v.stats.slice_mut()))
    };
    let has_y = v.y.rows() > 0;
    parallel::over_rows(rows, cols, |rows, numbers| {
        // SAFETY: the ranges are disjoint and inside x_plus, y (empty for a step without a norm) and stats.
        let (x_plus, y, stats) = unsafe {
            (
                x_plus.slice(numbers.clone()),
                if has_y { y.slice(numbers.clone()) } else { &mut [] },
                stats.slice(parallel::numbers(&rows, norm.stats)),
            )
        };
        super::forward::<X, F, Y>(norm, &step, rows.start, &x[numbers.clone()], &f[numbers], x_plus, y, stats);
    });
    Ok(())
}

/// Computes [`backward`] on the CPU for the storage types X, F and Y of x, f and y.
fn backward_typed<X, F, Y>(kernel: &RowNormKernel, v: &RowViews, g: &RowGradients) -> Result<()>
where
    X: Element,
    F: Element<Acc = X::Acc>,
    Y: Element<Acc = X::Acc>,
{
    let norm = kernel.get::<X::Acc>();
    let (rows, cols) = (v.x_plus.rows(), v.x_plus.cols());
    // SAFETY: the C++ operator passed contiguous tensors of these types and shapes; the statistics have the
    // accumulation type.
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
    // SAFETY: dx and df are new tensors of these types.
    let (dx, df) = unsafe { (Shared::new(g.dx.slice_mut::<X>()), Shared::new(g.df.slice_mut::<F>())) };
    let has_df = !g.df.is_absent();
    // SAFETY: these gradients are new tensors of the accumulation type.
    let [dweight, dbias, dalpha, dbeta]: [&mut [X::Acc]; 4] =
        unsafe { [g.dweight, g.dbias, g.dalpha, g.dbeta].map(|v| v.slice_mut()) };
    let mut curve_gradients = [X::Acc::ZERO; NUMBERS];
    let dnumbers = if norm.curve.is_some() { &mut curve_gradients[..] } else { &mut [] };
    parallel::sum_over_rows(rows, cols, [dweight, dbias, dalpha, dbeta, dnumbers], |rows, numbers, sums| {
        let [dweight, dbias, dalpha, dbeta, dnumbers] = sums;
        // Returns this range of a tensor, or an empty slice if the tensor is absent.
        fn part<T>(tensor: &[T], range: std::ops::Range<usize>) -> &[T] {
            if tensor.is_empty() {
                tensor
            } else {
                &tensor[range]
            }
        }
        // SAFETY: the ranges are disjoint and inside dx.
        let dx = unsafe { dx.slice(numbers.clone()) };
        // SAFETY: the ranges are disjoint and inside df; df never shares dx's memory, because df is left out if both
        // are equal.
        let df = if has_df { unsafe { df.slice(numbers.clone()) } } else { &mut [] };
        let mut grads = Gradients { dweight, dbias, dalpha, dbeta, dnumbers };
        super::backward::<X, F, Y>(
            norm,
            &step,
            rows.start,
            part(dx_plus, numbers.clone()),
            part(dy, numbers.clone()),
            &x_plus[numbers.clone()],
            part(x, numbers.clone()),
            part(f, numbers),
            &stats[parallel::numbers(&rows, norm.stats)],
            dx,
            df,
            &mut grads,
        );
    });
    // SAFETY: the gradients of the curve's numbers are new tensors of the accumulation type.
    unsafe { g.write_numbers(&curve_gradients) };
    Ok(())
}
