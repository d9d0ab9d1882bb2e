//! Row norms and residual steps on a GPU: what `cuda/device/rows.cuh` takes, made from the shim's views.

use super::device::{self, aligned, columns, sum_partials, type_name, Dropout, Output};
use super::ffi::{Draw, View};
use crate::cuda::{self, Device, Layout, Program};
use crate::error::Result;
use tch::Kind;

/// A step and the norm after it; a norm alone has x⁺ = x and no f.
#[derive(Clone, Copy)]
pub struct Rows {
    pub x: View,
    pub f: View,
    pub alpha: View,
    pub beta: View,
    pub weight: View,
    pub bias: View,
    pub x_plus: View,
    pub y: View,
    pub stats: View,
    pub eps: f64,
    /// p of the length, where it is not 2.
    pub order: Option<f64>,
    pub draw: Draw,
}

impl Rows {
    /// Nothing but dropout.
    pub const fn of(draw: Draw) -> Self {
        const NO: View = View::ABSENT;
        let (eps, order) = (0.0, None);
        Rows { x: NO, f: NO, alpha: NO, beta: NO, weight: NO, bias: NO, x_plus: NO, y: NO, stats: NO, eps, order, draw }
    }
}

/// The gradients that are sums over rows.
#[derive(Clone, Copy)]
pub struct Sums {
    pub dalpha: View,
    pub dbeta: View,
    pub dweight: View,
    pub dbias: View,
}

impl Sums {
    pub const NONE: Sums =
        Sums { dalpha: View::ABSENT, dbeta: View::ABSENT, dweight: View::ABSENT, dbias: View::ABSENT };

    fn all(&self) -> [&View; 4] {
        [&self.dalpha, &self.dbeta, &self.dweight, &self.dbias]
    }
}

/// rows.cuh's `Forward`.
#[repr(C)]
struct Forward {
    x: *const u8,
    f: *const u8,
    alpha: *const u8,
    beta: *const u8,
    weight: *const u8,
    bias: *const u8,
    x_plus: *mut u8,
    y: *mut u8,
    stats: *mut u8,
    rows: i64,
    chunks: i32,
    eps: f32,
    dropout: Dropout,
}

/// rows.cuh's `Backward`.
#[repr(C)]
struct Backward {
    dx_plus: *const u8,
    dy: *const u8,
    x_plus: *const u8,
    x: *const u8,
    f: *const u8,
    stats: *const u8,
    alpha: *const u8,
    beta: *const u8,
    weight: *const u8,
    dx: *mut u8,
    df: *mut u8,
    partial: [*mut f32; 4],
    rows: i64,
    chunks: i32,
    sums: i32,
    eps: f32,
    dropout: Dropout,
}

/// parameter.cuh's kinds.
fn kind(parameter: &View) -> i32 {
    match (parameter.is_absent(), parameter.rows * parameter.cols) {
        (true, _) => 0,
        (false, 1) => 1,
        (false, _) => 2,
    }
}

/// The layout, the options that name a variant, and chunks per row.
fn variant(r: &Rows, backward: bool, types: [i32; 3], views: &[&View]) -> Result<(Layout, String, i32)> {
    let cols = columns(&r.x_plus)?;
    let bytes = if types == [0; 3] { 4 } else { 2 };
    let parameters = [&r.alpha, &r.beta, &r.weight, &r.bias];
    let layout = Layout::of(cols, bytes, aligned(views) && aligned(&parameters));
    // norm.cuh takes the largest for 0.
    let order = r.order.map_or(String::new(), |p| format!(" -DK_ORDER={:?}f", if p.is_infinite() { 0.0 } else { p }));
    let [x, f, y] = types.map(type_name);
    // Of a norm's parameters, which C++ makes one type.
    let of_norm = [&r.weight, &r.bias].into_iter().find(|v| !v.is_absent());
    let p = type_name(of_norm.map_or(0, |v| v.dtype))?;
    let [alpha, beta, weight, bias] = parameters.map(kind);
    let step = i32::from(!r.f.is_absent());
    let options = format!(
        "{} -DK_BACKWARD={} -DK_STEP={step} -DK_X={} -DK_F={} -DK_Y={} -DK_P={p} -DK_ALPHA={alpha} -DK_BETA={beta} -DK_WEIGHT={weight} \
         -DK_BIAS={bias}{order}",
        layout.options(),
        i32::from(backward),
        x?,
        f?,
        y?
    );
    Ok((layout, options, (cols / layout.vec) as i32))
}

/// x⁺, y and the statistics of every row.
pub fn forward(device: Device, program: &'static Program, r: &Rows) -> Result<()> {
    if r.x.rows == 0 || r.x.cols == 0 {
        return Ok(());
    }
    let x = r.x.dtype;
    let types = [x, if r.f.is_absent() { x } else { r.f.dtype }, if r.y.is_absent() { x } else { r.y.dtype }];
    let (layout, options, chunks) = variant(r, false, types, &[&r.x, &r.f, &r.x_plus, &r.y])?;
    let arguments = Forward {
        x: r.x.data,
        f: r.f.data,
        alpha: r.alpha.data,
        beta: r.beta.data,
        weight: r.weight.data,
        bias: r.bias.data,
        x_plus: r.x_plus.data,
        y: r.y.data,
        stats: r.stats.data,
        rows: r.x.rows,
        chunks,
        eps: r.eps as f32,
        dropout: Dropout::of(&r.draw),
    };
    let grid = layout.grid(r.x.rows as u64, i32::MAX as u32);
    // SAFETY: C++ gave contiguous tensors of these types and shapes on the device, and holds them until the call
    // returns; torch's allocator keeps what is freed then for the stream that the kernel is on.
    unsafe { cuda::launch(device, program, &options, "rows_forward", grid, &arguments) }
}

/// Blocks that may sum over this many rows.
fn sum_blocks(device: Device, rows: i64) -> i64 {
    let most = Layout::most_blocks(cuda::multiprocessors(device).unwrap_or(1));
    rows.min(most.into()).max(1)
}

/// dx, df and the gradients that are sums over rows.
pub fn backward(
    device: Device,
    program: &'static Program,
    r: &Rows,
    dx_plus: View,
    dy: View,
    dx: View,
    df: View,
    sums: &Sums,
) -> Result<()> {
    let x = r.x_plus.dtype;
    let types = [x, if r.f.is_absent() { x } else { r.f.dtype }, if dy.is_absent() { x } else { dy.dtype }];
    let views = [&r.x, &r.f, &r.x_plus, &dx_plus, &dy, &dx, &df];
    let (layout, options, chunks) = variant(r, true, types, &views)?;
    // Each block leaves its sums, as many numbers as the gradients have together.
    let lengths = sums.all().map(|sum| if sum.is_absent() { 0 } else { sum.rows * sum.cols });
    let columns: i64 = lengths.iter().sum();
    let room = match columns {
        0 => None,
        _ => Some(device::room(device, &[sum_blocks(device, r.x_plus.rows), columns], Kind::Float)?),
    };
    let workspace = room.as_ref().map_or(View::ABSENT, |room| View::of(room, device));
    // Blocks that sum run at once: one more would begin when others end. Without sums there may be any number.
    let most = match columns {
        0 => i32::MAX as u32,
        _ => cuda::blocks_at_once(device, program, &options, "rows_backward", layout.threads())?
            .min(workspace.rows as u32),
    };
    let grid = layout.grid(if chunks > 0 { r.x_plus.rows as u64 } else { 0 }, most);
    let (mut partial, mut outputs, mut first) = ([std::ptr::null_mut(); 4], Vec::new(), 0);
    for ((partial, sum), length) in partial.iter_mut().zip(sums.all()).zip(lengths).filter(|(_, length)| *length > 0) {
        // SAFETY: the workspace has a column for each number of each sum.
        *partial = unsafe { workspace.data.cast::<f32>().add(first as usize) };
        outputs.push(Output::from_column(first, sum));
        first += length;
    }
    let arguments = Backward {
        dx_plus: dx_plus.data,
        dy: dy.data,
        x_plus: r.x_plus.data,
        x: r.x.data,
        f: r.f.data,
        stats: r.stats.data,
        alpha: r.alpha.data,
        beta: r.beta.data,
        weight: r.weight.data,
        dx: dx.data,
        df: df.data,
        partial,
        rows: r.x_plus.rows,
        chunks,
        sums: columns as i32,
        eps: r.eps as f32,
        dropout: Dropout::of(&r.draw),
    };
    // SAFETY: as in `forward`; the workspace has a row for every block.
    unsafe { cuda::launch(device, program, &options, "rows_backward", grid, &arguments)? };
    sum_partials(device, workspace.data, grid.blocks as i32, columns, &outputs)
}
