//! The family of row norms: kernels by norm and dtype, rows over threads, parameter gradients summed over rows.

use super::count::Count;
use super::device_rows::{self, Rows};
use super::ffi::{by_dtype, give, pointer, status, take, Draw, View};
use super::{engine, ffi};
use crate::cpu::parallel::{self, Shared};
use crate::cpu::{Accumulator, Element};
use crate::cuda::Program;
use crate::error::Result;
use crate::kernel::rows::{self, RowNorm, Rule, Rules};
use crate::norm::composed::{self, Hat};
use crate::norm::ROW_NORMS;
use std::ffi::{c_char, c_int, CStr};
use tch::Tensor;
use torch_sys::C_tensor;

/// A row norm as an operator: what the C++ shim registers under `operator`.
pub struct RowKernels {
    /// torch.ops.normformer_rs.`operator`, and `operator`_residual.
    pub operator: &'static CStr,
    stats: usize,
    pub(super) rules: Rules,
    /// Their composed form.
    hat: Hat,
    /// The same kernels for a GPU.
    pub program: Program,
    pub(super) count: Count,
    pub(super) residual_count: Count,
}

impl RowKernels {
    /// The kernels of `N`; `name` and `residual_name` are for [`super::counts`].
    pub const fn of<N: RowNorm>(operator: &'static CStr, names: [&'static str; 2], hat: Hat, program: Program) -> Self {
        RowKernels {
            operator,
            stats: N::STATS,
            rules: Rules::of::<N>(),
            hat,
            program,
            count: Count::new(names[0]),
            residual_count: Count::new(names[1]),
        }
    }

    fn index(&'static self) -> i64 {
        let found = ROW_NORMS.iter().position(|k| std::ptr::eq(*k, self));
        found.expect("every RowKernels is listed in norm::ROW_NORMS") as i64
    }
}

struct Norm {
    x: View,
    weight: View,
    bias: View,
    eps: f64,
    y: View,
    stats: View,
}

struct NormGradients {
    dy: View,
    x: View,
    weight: View,
    eps: f64,
    stats: View,
    dx: View,
    dweight: View,
    dbias: View,
}

/// A norm's call as the step that it is on a GPU: x⁺ = x.
fn alone(x: View, weight: View, stats: View, eps: f64) -> Rows {
    Rows { x, weight, stats, eps, x_plus: x, ..Rows::of(Draw::NONE) }
}

fn forward<E: Element>(rule: &Rule<E::Acc>, v: &Norm) -> Result<()> {
    let (rows, cols) = (v.x.rows(), v.x.cols());
    // SAFETY: the shim gave contiguous tensors of E (parameters and statistics of its accumulation type), y and stats
    // are its own fresh ones.
    let (x, weight, bias, y, stats) =
        unsafe { (v.x.slice::<E>(), v.weight.slice(), v.bias.slice(), v.y.slice_mut::<E>(), v.stats.slice_mut()) };
    let (y, stats) = (Shared::new(y), Shared::new(stats));
    let eps = E::Acc::from_f64(v.eps);
    parallel::for_each(rows, parallel::grain(cols), |r| {
        // SAFETY: the ranges are disjoint and inside 0..rows.
        let (y, stats) =
            unsafe { (y.slice(r.start * cols..r.end * cols), stats.slice(r.start * rule.stats..r.end * rule.stats)) };
        rows::forward_by::<E>(rule, cols, &x[r.start * cols..r.end * cols], weight, bias, eps, y, stats);
    });
    Ok(())
}

fn backward<E: Element>(rule: &Rule<E::Acc>, v: &NormGradients) -> Result<()> {
    let (rows, cols) = (v.x.rows(), v.x.cols());
    // SAFETY: as in `forward`; dx, dweight and dbias are fresh.
    let (dy, x, weight, stats, dx) =
        unsafe { (v.dy.slice::<E>(), v.x.slice::<E>(), v.weight.slice(), v.stats.slice(), v.dx.slice_mut::<E>()) };
    // SAFETY: as above.
    let (dweight, dbias): (&mut [E::Acc], &mut [E::Acc]) = unsafe { (v.dweight.slice_mut(), v.dbias.slice_mut()) };
    let dx = Shared::new(dx);
    let eps = E::Acc::from_f64(v.eps);
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

/// N(x) through the dispatcher: differentiable, on any device.
pub fn row_norm(
    kernels: &'static RowKernels,
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    engine::register();
    // SAFETY: the tensors outlive the call; a new tensor comes back.
    unsafe { take(nfrs_norm(kernels.index(), x.as_ptr(), pointer(weight), pointer(bias), eps)) }
}

extern "C" {
    fn nfrs_norm(
        norm: i64,
        x: *const C_tensor,
        weight: *const C_tensor,
        bias: *const C_tensor,
        eps: f64,
    ) -> *mut C_tensor;
}

// ---- what the shim calls ----

#[no_mangle]
extern "C" fn nfrs_norm_count() -> i64 {
    ROW_NORMS.len() as i64
}

#[no_mangle]
extern "C" fn nfrs_norm_name(norm: i64) -> *const c_char {
    ROW_NORMS[norm as usize].operator.as_ptr()
}

#[no_mangle]
extern "C" fn nfrs_norm_stats(norm: i64) -> i64 {
    ROW_NORMS[norm as usize].stats as i64
}

#[no_mangle]
unsafe extern "C" fn nfrs_norm_forward(
    norm: i64,
    x: &View,
    weight: &View,
    bias: &View,
    eps: f64,
    y: &View,
    stats: &View,
) -> c_int {
    let kernels = ROW_NORMS[norm as usize];
    kernels.count.kernel();
    if let Some(device) = x.device() {
        let rows = Rows { bias: *bias, y: *y, ..alone(*x, *weight, *stats, eps) };
        return status(|| device_rows::forward(device, &kernels.program, &rows));
    }
    let v = Norm { x: *x, weight: *weight, bias: *bias, eps, y: *y, stats: *stats };
    status(|| by_dtype!(x, E => forward::<E>(kernels.rules.get(), &v)))
}

#[no_mangle]
unsafe extern "C" fn nfrs_norm_backward(
    norm: i64,
    dy: &View,
    x: &View,
    weight: &View,
    eps: f64,
    stats: &View,
    dx: &View,
    dweight: &View,
    dbias: &View,
    workspace: &View,
) -> c_int {
    let kernels = ROW_NORMS[norm as usize];
    if let Some(device) = x.device() {
        let rows = Rows { bias: *dbias, ..alone(*x, *weight, *stats, eps) };
        let sums =
            device_rows::Sums { dweight: *dweight, dbias: *dbias, ..device_rows::Sums::in_workspace(*workspace) };
        return status(|| {
            device_rows::backward(device, &kernels.program, &rows, View::ABSENT, *dy, *dx, View::ABSENT, &sums)
        });
    }
    let (dx, dweight, dbias) = (*dx, *dweight, *dbias);
    let v = NormGradients { dy: *dy, x: *x, weight: *weight, eps, stats: *stats, dx, dweight, dbias };
    status(|| by_dtype!(x, E => backward::<E>(kernels.rules.get(), &v)))
}

#[no_mangle]
unsafe extern "C" fn nfrs_norm_composed(
    norm: i64,
    x: *const C_tensor,
    weight: *const C_tensor,
    bias: *const C_tensor,
    eps: f64,
) -> *mut C_tensor {
    let kernels = ROW_NORMS[norm as usize];
    kernels.count.composed();
    // SAFETY: the shim passes live tensors, or null where a parameter is absent.
    let (x, weight, bias) = unsafe { (ffi::borrow(x), ffi::borrow(weight), ffi::borrow(bias)) };
    give(|| {
        let x = x.as_ref().expect("x is never absent");
        composed::apply(kernels.hat, x, &[], (weight.as_ref(), bias.as_ref()), &[eps])
    })
}
