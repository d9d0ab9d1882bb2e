//! Norms with column statistics on a GPU: builds the arguments of the kernels in `cuda/device/columns.cuh` and
//! `settle.cuh` from views, and launches the passes in order. The host reads no number back, so it never waits for the
//! device.

use super::call::{ColumnGradients, ColumnViews};
use super::{ColumnNormKernel, ColumnOptions};
use crate::cuda::{self, Device, Grid, Output, StructLayout};
use crate::device_struct;
use crate::error::{Error, Result};
use crate::kernel::launch::{columns, columns_at_a_time, room, sum_partials, type_name};
use crate::kernel::view::View;
use std::ptr::null_mut;
use tch::{Kind, Tensor};

/// The number of threads in a block: eight warps.
const THREADS: u32 = 256;
/// The minimum number of rows in a slab, eight per warp. A slab is the rows that one block processes.
const SLAB: i64 = 64;
/// The maximum number of slabs. With more rows the slabs grow instead, so that their partial results are merged
/// quickly.
const MOST_SLABS: i64 = 512;
/// The maximum number of partial results that a slab has per column: PARTS in columns.cuh, or a gradient's two sums.
const MOST_PARTS: i64 = 3;

/// Returns the number of rows per slab, and the number of slabs, for a matrix of `rows` rows.
pub fn slabs(rows: i64) -> (i64, i64) {
    let slab = SLAB.max((rows + MOST_SLABS - 1) / MOST_SLABS);
    (slab, (rows + slab - 1) / slab)
}

/// Returns the length of the workspace: [`MOST_PARTS`] partial results per column for each slab, then each slab's count
/// of real rows, then a flag.
fn partial_length(rows: i64, cols: i64) -> i64 {
    slabs(rows).1 * (MOST_PARTS * cols + 1) + 1
}

device_struct! {
    /// The struct `Rows` of columns.cuh: the padding mask, the numbers of rows and of rows per slab, and the number of
    /// chunks in a row. A chunk is the columns that a thread accesses at a time.
    #[derive(Clone, Copy)]
    struct Rows = "Rows" {
        pad: *const u8,
        count: i64,
        slab: i64,
        chunks: i32,
    }
}

device_struct! {
    /// The struct `Ahead` of columns.cuh: what the measuring kernel needs to write y as well.
    struct Ahead = "Ahead" {
        first: *const u8,
        iters: *const u8,
        weight: *const u8,
        bias: *const u8,
        y: *mut u8,
        wrote: *mut f32,
        options: DeviceOptions,
    }
}

device_struct! {
    /// The struct `Measure` of columns.cuh.
    struct Measure = "Measure" {
        x: *const u8,
        rows: Rows,
        partial: *mut f32,
        counts: *mut f32,
        ahead: Ahead,
    }
}

device_struct! {
    /// The struct `Normalise` of columns.cuh.
    struct Normalise = "Normalise" {
        x: *const u8,
        rows: Rows,
        stats: *const u8,
        weight: *const u8,
        bias: *const u8,
        y: *mut u8,
        wrote: *const f32,
    }
}

device_struct! {
    /// The struct `GradientSums` of columns.cuh.
    struct GradientSums = "GradientSums" {
        dy: *const u8,
        x: *const u8,
        rows: Rows,
        stats: *const u8,
        partial: *mut u8,
        weight: *const u8,
        second: *const u8,
        alpha_bwd: f64,
        dx: *mut u8,
    }
}

device_struct! {
    /// The struct `Gradient` of columns.cuh.
    struct Gradient = "Gradient" {
        dy: *const u8,
        x: *const u8,
        rows: Rows,
        stats: *const u8,
        slopes: *const u8,
        dx: *mut u8,
    }
}

device_struct! {
    /// The struct `Merge` of settle.cuh.
    struct Merge = "Merge" {
        partial: *const f32,
        counts: *const f32,
        mean: *mut f64,
        square: *mut f64,
        count: *mut f64,
        slabs: i32,
        cols: i32,
    }
}

device_struct! {
    /// The struct `Options` of column_norm.cuh.
    struct DeviceOptions = "Options" {
        alpha: f64,
        eps: f64,
        warmup: i64,
        train: bool,
        release: bool,
        running: bool,
    }
}

device_struct! {
    /// The struct `Settle` of settle.cuh.
    struct Settle = "Settle" {
        mean: *const f64,
        square: *const f64,
        square_of_all: *const f64,
        count: *const f64,
        rows: f64,
        first: *mut u8,
        second: *mut u8,
        iters: *mut u8,
        refused: *mut u8,
        stats: *mut u8,
        cols: i32,
        options: DeviceOptions,
        largest: f64,
    }
}

device_struct! {
    /// The struct `Slopes` of settle.cuh.
    struct Slopes = "Slopes" {
        sum: *const u8,
        sum_x: *const u8,
        stats: *const u8,
        weight: *const u8,
        second: *mut u8,
        refused: *mut u8,
        slopes: *mut u8,
        cols: i32,
        alpha_bwd: f64,
        largest: f64,
    }
}

/// The structs of columns.cuh and settle.cuh.
pub const STRUCTS: &[&StructLayout] = &[
    &Rows::LAYOUT,
    &DeviceOptions::LAYOUT,
    &Ahead::LAYOUT,
    &Measure::LAYOUT,
    &Normalise::LAYOUT,
    &GradientSums::LAYOUT,
    &Gradient::LAYOUT,
    &Merge::LAYOUT,
    &Settle::LAYOUT,
    &Slopes::LAYOUT,
];

/// Builds the program of a norm with column statistics from a `.cu` file beside the caller.
#[macro_export]
macro_rules! column_program {
    ($file:literal) => {{
        use $crate::cuda::{Program, CHUNK, COLUMNS, COLUMN_NORM, PRELUDE, REDUCE, SETTLE};
        Program {
            name: $file,
            files: &[PRELUDE, CHUNK, REDUCE, COLUMN_NORM, include_str!($file), COLUMNS, SETTLE],
            structs: $crate::kernel::columns::gpu::STRUCTS,
        }
    }};
}

/// Launches a norm's kernels for one matrix.
struct Launcher {
    device: Device,
    norm: &'static ColumnNormKernel,
    options: String,
    rows: Rows,
    cols: u32,
    slabs: i64,
    /// The workspace for the slabs' partial results.
    partial: Tensor,
    /// The grid in which each block processes one slab and one tile of columns.
    tiled: Grid,
}

impl Launcher {
    /// Prepares the launches for the matrix `v.x`. `views` are all tensors that the kernels access several columns at a
    /// time, if alignment allows. `measures` is true if a kernel computes partial results of slabs, for which it needs
    /// a workspace.
    fn of(
        device: Device,
        norm: &'static ColumnNormKernel,
        v: &ColumnViews,
        views: &[&View],
        measures: bool,
    ) -> Result<Self> {
        let cols = columns(&v.stats)?;
        let vec = columns_at_a_time(&v.x, views);
        let state = if v.wide_state { "double" } else { "f32" };
        let x = type_name(v.x.dtype)?;
        let (slab, slabs) = slabs(v.x.rows);
        let chunks = cols / vec;
        let length = if measures { partial_length(v.x.rows, cols.into()) } else { 0 };
        // Each block processes one slab and one tile of 32 chunks; CUDA's grids have at most i32::MAX blocks.
        let blocks = i32::try_from(slabs * i64::from(chunks.div_ceil(32)));
        let blocks = blocks.map_err(|_| Error::Torch(format!("rows of {cols} numbers have no CUDA kernel")))?;
        Ok(Launcher {
            device,
            norm,
            options: format!("-DK_LANES={THREADS} -DK_ROWS=1 -DK_VEC={vec} -DK_X={x} -DK_STATE={state}"),
            rows: Rows { pad: v.pad.data, count: v.x.rows, slab, chunks: chunks as i32 },
            cols,
            slabs,
            partial: room(device, &[length], Kind::Float)?,
            tiled: Grid { blocks: blocks as u32, threads: THREADS },
        })
    }

    /// Returns the kernels' description of all rows, without the mask, so that padding counts as real.
    fn all_rows(&self) -> Rows {
        Rows { pad: null_mut(), ..self.rows }
    }

    /// Returns the kernels' description of the rows in which y and dx are computed. They include padding only with
    /// `release`, PowerNorm's released variant.
    fn written(&self, release: bool) -> Rows {
        if release {
            self.all_rows()
        } else {
            self.rows
        }
    }

    /// Returns the grid in which each block processes 32 columns, for the kernel that merges slabs.
    fn by_columns(&self) -> Grid {
        Grid { blocks: self.cols.div_ceil(32), threads: THREADS }
    }

    /// Launches the norm's kernel with the name `kernel`. A is the kernel's struct of arguments.
    ///
    /// # Safety
    /// The same conditions hold as for [`cuda::launch`].
    unsafe fn launch<A>(&self, kernel: &'static str, grid: Grid, arguments: &A) -> Result<()> {
        // SAFETY: guaranteed by the caller.
        unsafe { cuda::launch(self.device, &self.norm.program, &self.options, kernel, grid, arguments) }
    }

    /// Returns the address in the workspace of the slabs' counts of real rows. They follow the partial results; the
    /// flag [`wrote`](Self::wrote) comes after them.
    fn counts(&self) -> *mut f32 {
        // SAFETY: the workspace is `partial_length` long.
        unsafe { self.partial.data_ptr().cast::<f32>().add((self.slabs * MOST_PARTS) as usize * self.cols as usize) }
    }

    /// Returns the address of the flag that y has been written.
    fn wrote(&self) -> *mut f32 {
        // SAFETY: the workspace is `partial_length` long, and the flag is its last number.
        unsafe { self.counts().add(self.slabs as usize) }
    }

    /// Writes the mean and the mean square of each column over `rows`, and the count of real rows, to `mean`, `square`
    /// and `count` on the device; `mean` and `count` may be null. With `write` it also writes y, if y does not depend
    /// on the batch's statistics.
    ///
    /// # Safety
    /// The views belong to a forward call, and the outputs have room for every column.
    unsafe fn measure(
        &self,
        v: &ColumnViews,
        rows: Rows,
        [mean, square, count]: [*mut f64; 3],
        write: bool,
    ) -> Result<()> {
        let (partial, counts) = (self.partial.data_ptr().cast::<f32>(), self.counts());
        let ahead = Ahead {
            first: v.first.data,
            iters: v.iters.data,
            weight: v.weight.data,
            bias: v.bias.data,
            y: if write { v.y.data } else { null_mut() },
            wrote: self.wrote(),
            options: DeviceOptions::of(v),
        };
        let measure = Measure { x: v.x.data, rows, partial, counts, ahead };
        let (slabs, cols) = (self.slabs as i32, self.cols as i32);
        let merge = Merge { partial, counts, mean, square, count, slabs, cols };
        // SAFETY: the workspace has room for every slab's results, and the caller guarantees the rest.
        unsafe {
            self.launch("columns_measure", self.tiled, &measure)?;
            self.launch("columns_merge", self.by_columns(), &merge)
        }
    }
}

impl DeviceOptions {
    /// Returns the call's options for the device; `running` is true if evaluation uses the running statistics.
    fn of(v: &ColumnViews) -> Self {
        let ColumnOptions { alpha, eps, warmup, train, release, .. } = v.options;
        let running = !train && !v.first.is_absent();
        DeviceOptions { alpha, eps, warmup, train, release, running }
    }
}

/// The grid of kernels that process all columns in one block.
const ONE_BLOCK: Grid = Grid { blocks: 1, threads: THREADS };

/// Computes y and its statistics. If the statistics are not given, they come from the batch and the buffers, and the
/// buffers are updated in training.
pub fn forward(device: Device, norm: &'static ColumnNormKernel, v: &ColumnViews) -> Result<()> {
    if v.stats.cols == 0 {
        return Ok(());
    }
    let measures = !v.given && !DeviceOptions::of(v).running;
    let kernels = Launcher::of(device, norm, v, &[&v.x, &v.y, &v.stats, &v.weight, &v.bias], measures)?;
    // The flag at `wrote` tells the last kernel whether the measuring kernel has already written y.
    let may_have_written = !v.given && settle(&kernels, v)?;
    let normalise = Normalise {
        x: v.x.data,
        rows: kernels.written(v.options.release),
        stats: v.stats.data,
        weight: v.weight.data,
        bias: v.bias.data,
        y: v.y.data,
        wrote: if may_have_written { kernels.wrote() } else { null_mut() },
    };
    // SAFETY: the C++ operator passed contiguous tensors of these types and shapes on the device, and holds them until
    // the call returns; only this call uses y. If they are freed then, torch's allocator reuses the memory only for
    // later work on the same stream.
    unsafe { kernels.launch("columns_normalise", kernels.tiled, &normalise) }
}

/// Launches the kernels that choose the statistics of x̂ from the batch and the buffers, and update the buffers.
/// Returns true if the measuring kernel may have written y; the device's flag at [`Launcher::wrote`] is 1 if it has.
fn settle(kernels: &Launcher, v: &ColumnViews) -> Result<bool> {
    let options = DeviceOptions::of(v);
    // In training with running statistics, y may be independent of the batch; the device decides whether it is.
    let writes = options.train && !v.first.is_absent();
    let [mut mean, mut square, mut square_of_all, mut count] = [null_mut::<f64>(); 4];
    // The four rows of this workspace are the mean, the mean square, the mean square with padding, and the count of
    // real rows (in its first column).
    let batch = room(kernels.device, &[4, v.stats.cols], Kind::Double)?;
    if !options.running {
        // SAFETY: the workspace has four rows, and i is at most 3.
        let row = |i: usize| unsafe { batch.data_ptr().cast::<f64>().add(i * v.stats.cols()) };
        // Without padding, the mean square of all rows is that of the real rows, row 1.
        (mean, square, square_of_all, count) = (row(0), row(1), row(1), row(3));
        // SAFETY: the C++ operator passed valid views of a forward call; the rows of `batch` have room for every
        // column.
        unsafe { kernels.measure(v, kernels.rows, [mean, square, count], writes)? };
        if options.release && !v.pad.is_absent() {
            square_of_all = row(2);
            let only_square = [null_mut(), square_of_all, null_mut()];
            // SAFETY: this row of `batch` has room for every column, and the views belong to a forward call. The
            // argument `false` is for `write`: the first measurement writes y.
            unsafe { kernels.measure(v, kernels.all_rows(), only_square, false)? };
        }
    }
    let settle = Settle {
        mean,
        square,
        square_of_all,
        count,
        rows: v.x.rows as f64,
        first: v.first.data,
        second: v.second.data,
        iters: v.iters.data,
        refused: v.refused.data,
        stats: v.stats.data,
        cols: kernels.cols as i32,
        options,
        largest: v.largest(),
    };
    // SAFETY: the C++ operator passed valid views; the buffers, of one type, and the statistics have a number for every
    // column.
    unsafe { kernels.launch("columns_settle", ONE_BLOCK, &settle)? };
    Ok(writes)
}

/// Computes dx and the parameters' gradients. In training it also updates PowerNorm's running ν, a statistic of the
/// gradients.
pub fn backward(device: Device, norm: &'static ColumnNormKernel, v: &ColumnViews, d: &ColumnGradients) -> Result<()> {
    if v.stats.cols == 0 {
        return Ok(());
    }
    let kernels = Launcher::of(device, norm, v, &[&v.x, &d.dy, &d.dx, &v.stats, &v.weight], true)?;
    let slopes = room(device, &[3, v.stats.cols], Kind::Float)?;
    let rows = kernels.written(v.options.release);
    let (dy, x, stats) = (d.dy.data, v.x.data, v.stats.data);
    let [partial, slopes] = [&kernels.partial, &slopes].map(|room| room.data_ptr().cast::<u8>());
    let cols = kernels.cols as i32;
    // A slab's partial result is Σdy per column (from place 0), which becomes dbias, then Σdy⊙x̂ per column (from place
    // `cols`), which becomes dweight.
    let sums = [(0, &d.dbias), (cols, &d.dweight)];
    let sums = sums.map(|(first, gradient)| Output { to: gradient.data, first, dtype: gradient.dtype });
    // A null second buffer tells the kernels not to update ν.
    let updates_nu = norm.approximate && v.options.train;
    let second = if updates_nu { v.second.data } else { null_mut() };
    let (weight, alpha_bwd, dx) = (v.weight.data, v.options.alpha_bwd, d.dx.data);
    let sums_arguments = GradientSums { dy, x, rows, stats, partial, weight, second, alpha_bwd, dx };
    let slopes_arguments = Slopes {
        sum: d.dbias.data,
        sum_x: d.dweight.data,
        stats,
        weight,
        second,
        refused: v.refused.data,
        slopes,
        cols,
        alpha_bwd,
        largest: v.largest(),
    };
    // SAFETY: the C++ operator passed valid views and new tensors for the gradients; the workspace has room for every
    // slab, and `slopes` has three rows.
    unsafe {
        kernels.launch("columns_gradient_sums", kernels.tiled, &sums_arguments)?;
        // Partial results of 2·cols numbers follow each other without gaps, so their stride is their length.
        sum_partials(device, partial, kernels.slabs as i32, [2 * i64::from(cols); 2], &sums)?;
        kernels.launch("columns_slopes", ONE_BLOCK, &slopes_arguments)?;
        kernels.launch("columns_gradient", kernels.tiled, &Gradient { dy, x, rows, stats, slopes, dx })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slabs_hold_every_row_and_none_is_empty() {
        for rows in (0..3000).chain([32_768, 32_769, 140_000, 10_000_019]) {
            let (slab, slabs) = slabs(rows);
            assert!(slab * slabs >= rows && slab * (slabs - 1) < rows.max(1) && slabs <= MOST_SLABS, "{rows}");
        }
    }
}
