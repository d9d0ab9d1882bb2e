//! Row norms and residual steps on a GPU: builds the arguments of `cuda/device/rows.cuh` from views, and launches.

use super::call::{RowGradients, RowViews};
use super::curve::NUMBERS;
use crate::cuda::{self, Device, Layout, Output, Program, StructLayout};
use crate::device_struct;
use crate::error::Result;
use crate::kernel::dropout::OnDevice;
use crate::kernel::launch::{aligned, columns, room, sum_partials, type_name};
use crate::kernel::view::View;
use tch::Kind;

device_struct! {
    /// The struct `Forward` of rows.cuh.
    struct Forward = "Forward" {
        x: *const u8,
        f: *const u8,
        alpha: *const u8,
        beta: *const u8,
        weight: *const u8,
        bias: *const u8,
        numbers: [*const u8; NUMBERS],
        x_plus: *mut u8,
        y: *mut u8,
        stats: *mut u8,
        rows: i64,
        chunks: i32,
        eps: f32,
        dropout: OnDevice,
    }
}

device_struct! {
    /// The struct `Backward` of rows.cuh.
    struct Backward = "Backward" {
        dx_plus: *const u8,
        dy: *const u8,
        x_plus: *const u8,
        x: *const u8,
        f: *const u8,
        stats: *const u8,
        alpha: *const u8,
        beta: *const u8,
        weight: *const u8,
        numbers: [*const u8; NUMBERS],
        dx: *mut u8,
        df: *mut u8,
        dalpha: *mut f32,
        dbeta: *mut f32,
        dweight: *mut f32,
        dbias: *mut f32,
        dscale: *mut f32,
        dshift: *mut f32,
        rows: i64,
        chunks: i32,
        sums: i32,
        eps: f32,
        dropout: OnDevice,
    }
}

/// The structs of rows.cuh.
pub const STRUCTS: &[&StructLayout] = &[&OnDevice::LAYOUT, &Forward::LAYOUT, &Backward::LAYOUT];

/// Builds the program of a row norm from a `.cu` file beside the caller.
#[macro_export]
macro_rules! row_program {
    ($file:literal) => {{
        use $crate::cuda::{Program, CHUNK, NORM, PARAMETER, PHILOX, PRELUDE, REDUCE, ROWS};
        Program {
            name: $file,
            files: &[PRELUDE, CHUNK, REDUCE, NORM, include_str!($file), PHILOX, PARAMETER, ROWS],
            structs: $crate::kernel::rows::gpu::STRUCTS,
        }
    }};
}

/// Returns a parameter's kind, as parameter.cuh numbers it: 0 if it is absent, 1 for one number, 2 for one per column.
fn kind(parameter: &View) -> i32 {
    match (parameter.is_absent(), parameter.rows * parameter.cols) {
        (true, _) => 0,
        (false, 1) => 1,
        (false, _) => 2,
    }
}

/// Returns the layout of threads, the compiler options that select the kernel's variant, and the number of chunks per
/// row. A chunk is the columns that a thread accesses at a time. `backward` chooses the pass. `types` are the dtypes of
/// x, f and y; `views` are all matrices that the kernel accesses.
fn variant(r: &RowViews, backward: bool, types: [i32; 3], views: &[&View]) -> Result<(Layout, String, i32)> {
    let cols = columns(&r.x_plus)?;
    // `bytes` is the size of the narrowest type: dtype 0 is f32, and the others that have kernels have 16 bits.
    let bytes = if types == [0; 3] { 4 } else { 2 };
    let parameters = [&r.alpha, &r.beta, &r.weight, &r.bias];
    let layout = Layout::of(cols, bytes, aligned(views) && aligned(&parameters));
    // The order p of the norm's ℓ_p length is an option of the kernel, which uses 0 for p = ∞.
    let order = r.order.map_or(String::new(), |p| format!(" -DK_ORDER={:?}f", if p.is_infinite() { 0.0 } else { p }));
    let [x, f, y] = types.map(type_name);
    // The norm's weight and bias have one type, because the C++ operator converts them to one.
    let norm_parameter = [&r.weight, &r.bias].into_iter().find(|v| !v.is_absent());
    let parameter_type = type_name(norm_parameter.map_or(0, |view| view.dtype))?;
    let [alpha, beta, weight, bias] = parameters.map(kind);
    let step = i32::from(!r.f.is_absent());
    let options = format!(
        "{} -DK_BACKWARD={} -DK_STEP={step} -DK_X={} -DK_F={} -DK_Y={} -DK_P={parameter_type} -DK_ALPHA={alpha} \
         -DK_BETA={beta} -DK_WEIGHT={weight} -DK_BIAS={bias}{order}",
        layout.options(),
        i32::from(backward),
        x?,
        f?,
        y?
    );
    Ok((layout, options, (cols / layout.vec) as i32))
}

/// Computes x⁺, y and the statistics of every row.
pub fn forward(device: Device, program: &'static Program, r: &RowViews) -> Result<()> {
    if r.x.rows == 0 || r.x.cols == 0 {
        return Ok(());
    }
    // An absent f or y counts as having x's type, so that it adds no variant of the kernel.
    let x = r.x.dtype;
    let types = [x, if r.f.is_absent() { x } else { r.f.dtype }, if r.y.is_absent() { x } else { r.y.dtype }];
    // `false` selects the forward pass.
    let (layout, options, chunks) = variant(r, false, types, &[&r.x, &r.f, &r.x_plus, &r.y])?;
    let arguments = Forward {
        x: r.x.data,
        f: r.f.data,
        alpha: r.alpha.data,
        beta: r.beta.data,
        weight: r.weight.data,
        bias: r.bias.data,
        numbers: r.numbers.map(|v| v.data.cast_const()),
        x_plus: r.x_plus.data,
        y: r.y.data,
        stats: r.stats.data,
        rows: r.x.rows,
        chunks,
        eps: r.eps as f32,
        dropout: OnDevice::of(&r.draw),
    };
    // The second argument, the maximum number of blocks, is that of CUDA.
    let grid = layout.grid(r.x.rows as u64, i32::MAX as u32);
    // SAFETY: the C++ operator passed contiguous tensors of these types and shapes on the device, and holds them until
    // the call returns. If they are freed then, torch's allocator reuses the memory only for later work on the same
    // stream.
    unsafe { cuda::launch(device, program, &options, "rows_forward", grid, &arguments) }
}

/// Returns the number of blocks that share a sum over this many rows, from 1 to one per row.
fn sum_blocks(device: Device, rows: i64) -> i64 {
    let most = Layout::most_blocks(cuda::multiprocessors(device).unwrap_or(1));
    rows.min(most.into()).max(1)
}

/// Computes dx, df and the gradients that are sums over rows.
pub fn backward(device: Device, program: &'static Program, r: &RowViews, g: &RowGradients) -> Result<()> {
    let x = r.x_plus.dtype;
    let types = [x, if r.f.is_absent() { x } else { r.f.dtype }, if g.dy.is_absent() { x } else { g.dy.dtype }];
    let views = [&r.x, &r.f, &r.x_plus, &g.dx_plus, &g.dy, &g.dx, &g.df];
    // `true` selects the backward pass.
    let (layout, options, chunks) = variant(r, true, types, &views)?;
    // `all` are the gradients that are sums over rows. Each block stores its own sums in one row of the workspace,
    // which has a column for each number of each gradient.
    let [dscale, dshift] = &g.dnumbers;
    let all = [&g.dalpha, &g.dbeta, &g.dweight, &g.dbias, dscale, dshift];
    let lengths = all.map(|sum| if sum.is_absent() { 0 } else { sum.rows * sum.cols });
    let columns: i64 = lengths.iter().sum();
    // Gradients with a number per column come first, and every row of the workspace begins at a multiple of 16 bytes
    // (four f32). So kernels can add 16 bytes at a time. `order` has the indices in `all` in this order.
    let stride = (columns + 3) / 4 * 4;
    let mut order: Vec<usize> = (0..all.len()).filter(|&k| lengths[k] > 0).collect();
    order.sort_by_key(|&k| lengths[k] == 1);
    let (mut workspace, mut most_blocks) = (None, i32::MAX as u32);
    if columns > 0 {
        // With sums, launch only as many blocks as can run at once: a further block would start only after others end.
        // Without sums any number is fine.
        let blocks = sum_blocks(device, r.x_plus.rows);
        workspace = Some(room(device, &[blocks, stride], Kind::Float)?);
        most_blocks =
            cuda::blocks_at_once(device, program, &options, "rows_backward", layout.threads())?.min(blocks as u32);
    }
    let sums = workspace.as_ref().map_or(std::ptr::null_mut(), |room| room.data_ptr().cast::<f32>());
    // Without columns no block runs, and `sum_partials` writes zeros.
    let grid = layout.grid(if chunks > 0 { r.x_plus.rows as u64 } else { 0 }, most_blocks);
    // `partial` has, for each gradient in `all`, the address of its sums in the workspace's first row (null if not
    // wanted). `outputs` says which columns of the totals go to which gradient. `first` is the next gradient's first
    // column.
    let (mut partial, mut outputs, mut first) = ([std::ptr::null_mut(); 4 + NUMBERS], Vec::new(), 0);
    for k in order {
        // SAFETY: the workspace has a column for each number of each sum.
        partial[k] = unsafe { sums.add(first as usize) };
        outputs.push(Output { to: all[k].data, first: first as i32, dtype: all[k].dtype });
        first += lengths[k];
    }
    let [dalpha, dbeta, dweight, dbias, dscale, dshift] = partial;
    let arguments = Backward {
        dx_plus: g.dx_plus.data,
        dy: g.dy.data,
        x_plus: r.x_plus.data,
        x: r.x.data,
        f: r.f.data,
        stats: r.stats.data,
        alpha: r.alpha.data,
        beta: r.beta.data,
        weight: r.weight.data,
        numbers: r.numbers.map(|v| v.data.cast_const()),
        dx: g.dx.data,
        df: g.df.data,
        dalpha,
        dbeta,
        dweight,
        dbias,
        dscale,
        dshift,
        rows: r.x_plus.rows,
        chunks,
        sums: stride as i32,
        eps: r.eps as f32,
        dropout: OnDevice::of(&r.draw),
    };
    // SAFETY: the C++ operator passed contiguous tensors of these types and shapes, and holds them until the call
    // returns; the workspace has a row for every block.
    unsafe { cuda::launch(device, program, &options, "rows_backward", grid, &arguments)? };
    sum_partials(device, sums.cast(), grid.blocks as i32, [columns, stride], &outputs)
}
