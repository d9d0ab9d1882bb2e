//! Row norms on an operator's tensors: threads share the rows on the CPU, and a GPU runs one kernel
//! ([`gpu`](super::gpu)).

use super::curve::{self, NUMBERS};
use super::{gpu, RowNormFns, RowNormKernel};
use crate::cpu::parallel::{self, Shared};
use crate::cpu::{Accumulator, Element};
use crate::cuda::Device;
use crate::error::Result;
use crate::kernel::dropout::Draw;
use crate::kernel::view::{by_dtype, View};

/// The views of a residual step x⁺ = α⊙x + β⊙drop(f) and of the norm after it, y = N(x⁺). For a norm without a step,
/// x⁺ is x, and f is absent.
#[derive(Clone, Copy)]
pub struct RowViews {
    pub x: View,
    pub f: View,
    pub alpha: View,
    pub beta: View,
    pub weight: View,
    pub bias: View,
    /// A curve's learned scale and shift.
    pub numbers: [View; NUMBERS],
    pub x_plus: View,
    pub y: View,
    /// The numbers per row that the backward pass needs.
    pub stats: View,
    pub eps: f64,
    /// The order p of the ℓ_p length; `None` if it is 2.
    pub order: Option<f64>,
    /// The step's dropout of f.
    pub draw: Draw,
}

impl RowViews {
    /// Returns the views for a norm of x without a residual step; y is absent.
    pub const fn alone(x: View, weight: View, stats: View, eps: f64) -> Self {
        const NO: View = View::ABSENT;
        let (order, draw) = (None, Draw::NONE);
        let (bias, numbers) = (NO, [NO; NUMBERS]);
        RowViews { x, f: NO, alpha: NO, beta: NO, weight, bias, numbers, x_plus: x, y: NO, stats, eps, order, draw }
    }

    /// Returns the curve's learned (scale, shift), with defaults for absent ones.
    ///
    /// # Safety
    /// The curve's numbers are valid views of type A.
    pub unsafe fn numbers<A: Accumulator>(&self) -> [A; NUMBERS] {
        curve::numbers(self.numbers.map(|view| view.slice::<A>().first().copied()))
    }
}

/// The inputs and outputs of a backward pass. Absent gradients are not wanted.
#[derive(Clone, Copy)]
pub struct RowGradients {
    pub dx_plus: View,
    pub dy: View,
    pub dx: View,
    pub df: View,
    pub dalpha: View,
    pub dbeta: View,
    pub dweight: View,
    pub dbias: View,
    pub dnumbers: [View; NUMBERS],
}

impl RowGradients {
    /// Returns the views for computing only the gradient of a norm's x.
    pub const fn alone(dy: View, dx: View) -> Self {
        const NO: View = View::ABSENT;
        let dnumbers = [NO; NUMBERS];
        RowGradients { dx_plus: NO, dy, dx, df: NO, dalpha: NO, dbeta: NO, dweight: NO, dbias: NO, dnumbers }
    }

    /// Writes `gradients`, those of the curve's scale and shift, to their views if they are wanted.
    ///
    /// # Safety
    /// The gradients of the curve's numbers are of type A, and nothing else accesses them.
    pub unsafe fn write_numbers<A: Accumulator>(&self, gradients: &[A]) {
        for (view, gradient) in self.dnumbers.iter().zip(gradients) {
            if let Some(to) = view.slice_mut::<A>().first_mut() {
                *to = *gradient;
            }
        }
    }
}

/// Computes y and the statistics of every row, on a GPU or, if `device` is `None`, on the CPU.
pub fn forward(device: Option<Device>, kernel: &'static RowNormKernel, v: &RowViews) -> Result<()> {
    match device {
        None => by_dtype!(v.x, E => forward_typed::<E>(kernel.get(), v)),
        Some(device) => gpu::forward(device, &kernel.program, v),
    }
}

/// Computes dx and the parameters' gradients, on a GPU or, if `device` is `None`, on the CPU.
pub fn backward(device: Option<Device>, kernel: &'static RowNormKernel, v: &RowViews, g: &RowGradients) -> Result<()> {
    match device {
        None => by_dtype!(v.x, E => backward_typed::<E>(kernel.get(), v, g)),
        Some(device) => gpu::backward(device, &kernel.program, v, g),
    }
}

/// Computes [`forward`] on the CPU for the storage type E of x.
fn forward_typed<E: Element>(norm: &RowNormFns<E::Acc>, v: &RowViews) -> Result<()> {
    let (rows, cols) = (v.x.rows(), v.x.cols());
    // SAFETY: the C++ operator passed contiguous tensors of E (parameters and statistics in its accumulation type); y
    // and stats are new.
    let (x, weight, bias, y, stats) =
        unsafe { (v.x.slice::<E>(), v.weight.slice(), v.bias.slice(), v.y.slice_mut::<E>(), v.stats.slice_mut()) };
    let (y, stats) = (Shared::new(y), Shared::new(stats));
    if let Some(curve) = &norm.curve {
        // SAFETY: the curve's numbers are of the accumulation type.
        let numbers = unsafe { v.numbers() };
        parallel::over_rows(rows, cols, |_, range| {
            // SAFETY: the ranges are disjoint and inside y.
            let y = unsafe { y.slice(range.clone()) };
            curve::forward::<E>(curve, cols, &x[range], numbers, weight, bias, y);
        });
        return Ok(());
    }
    let eps = E::Acc::from_f64(v.eps);
    parallel::over_rows(rows, cols, |rows, range| {
        // SAFETY: the ranges are disjoint and inside y and stats.
        let (y, stats) = unsafe { (y.slice(range.clone()), stats.slice(parallel::numbers(&rows, norm.stats))) };
        super::forward::<E>(norm, cols, &x[range], weight, bias, eps, y, stats);
    });
    Ok(())
}

/// Computes [`backward`] on the CPU for the storage type E of x.
fn backward_typed<E: Element>(norm: &RowNormFns<E::Acc>, v: &RowViews, g: &RowGradients) -> Result<()> {
    let (rows, cols) = (v.x.rows(), v.x.cols());
    // SAFETY: the C++ operator passed contiguous tensors of E (parameters and statistics in its accumulation type); dx
    // is new.
    let (dy, x, weight, stats, dx) =
        unsafe { (g.dy.slice::<E>(), v.x.slice::<E>(), v.weight.slice(), v.stats.slice(), g.dx.slice_mut::<E>()) };
    // SAFETY: dweight and dbias are new tensors of the accumulation type.
    let (dweight, dbias): (&mut [E::Acc], &mut [E::Acc]) = unsafe { (g.dweight.slice_mut(), g.dbias.slice_mut()) };
    let dx = Shared::new(dx);
    if let Some(curve) = &norm.curve {
        // SAFETY: the curve's numbers are of the accumulation type.
        let (numbers, mut dnumbers) = (unsafe { v.numbers() }, [E::Acc::ZERO; NUMBERS]);
        parallel::sum_over_rows(rows, cols, [dweight, dbias, &mut dnumbers], |_, range, [dweight, dbias, dnumbers]| {
            // SAFETY: the ranges are disjoint and inside dx.
            let dx = unsafe { dx.slice(range.clone()) };
            let (dy, x) = (&dy[range.clone()], &x[range]);
            curve::backward::<E>(curve, cols, dy, x, numbers, weight, dx, dweight, dbias, dnumbers);
        });
        // SAFETY: the gradients of the curve's numbers are new tensors of the accumulation type.
        unsafe { g.write_numbers(&dnumbers) };
        return Ok(());
    }
    let eps = E::Acc::from_f64(v.eps);
    parallel::sum_over_rows(rows, cols, [dweight, dbias], |rows, range, [dweight, dbias]| {
        // SAFETY: the ranges are disjoint and inside dx.
        let dx = unsafe { dx.slice(range.clone()) };
        let stats = &stats[parallel::numbers(&rows, norm.stats)];
        let (dy, x) = (&dy[range.clone()], &x[range]);
        super::backward::<E>(norm, cols, dy, x, weight, eps, stats, dx, dweight, dbias);
    });
    Ok(())
}
