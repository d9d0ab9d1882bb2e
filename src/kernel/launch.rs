//! Helpers for CUDA launches: type names and sizes for the sources, workspaces, the second stage of sums over rows.

use super::view::View;
use crate::cuda::{self, Device, Grid, Output, SumPartials, OUTPUTS, SUMS};
use crate::error::{Error, Result};
use tch::{Kind, Tensor};

/// Allocates a workspace of this shape and type on the GPU, for the kernels of one call. The tensor may be dropped
/// before the kernels run, because torch's allocator reuses its memory only for later work on the same stream.
pub fn room(device: Device, sizes: &[i64], kind: Kind) -> Result<Tensor> {
    // In tests, CPU tensors may stand in for the device's.
    let torch_device = if cuda::stand_in() { tch::Device::Cpu } else { tch::Device::Cuda(device as usize) };
    Ok(Tensor::f_empty(sizes, (kind, torch_device))?)
}

/// Returns the name of a storage type in the CUDA sources. `dtype` is a [`View`]'s code: 0 is f32, 1 f64 (without
/// kernels), 2 bf16, 3 f16.
pub fn type_name(dtype: i32) -> Result<&'static str> {
    match dtype {
        0 => Ok("f32"),
        2 => Ok("bf16"),
        3 => Ok("f16"),
        other => Err(Error::Torch(format!("dtype code {other} has no CUDA kernel"))),
    }
}

/// True if every pointer is aligned to 16 bytes.
pub fn aligned(views: &[&View]) -> bool {
    views.iter().all(|v| v.data.addr().is_multiple_of(16))
}

/// Returns the number of columns that a kernel accesses at a time: as many as fill 16 bytes, or 1. It is 1 if a tensor
/// is not aligned to 16 bytes, or if its rows do not divide into them. `views` are all tensors that the kernel accesses
/// in this way; `matrix` has their width and dtype.
pub fn columns_at_a_time(matrix: &View, views: &[&View]) -> u32 {
    // 16 bytes are four numbers of f32 (dtype 0), or eight of 16 bits.
    let widest = if matrix.dtype == 0 { 4 } else { 8 };
    if aligned(views) && matrix.cols % widest == 0 {
        widest as u32
    } else {
        1
    }
}

/// Returns the number of columns of a matrix. Errors if it exceeds the i32 in which kernels count columns.
pub fn columns(matrix: &View) -> Result<u32> {
    let cols = i32::try_from(matrix.cols).map(|c| c as u32);
    cols.map_err(|_| Error::Torch(format!("rows of {} numbers have no CUDA kernel", matrix.cols)))
}

/// Returns a grid with a thread for each of `count` chunks. A chunk is the group of columns that a thread accesses at a
/// time. If there are more chunks than the largest grid has threads, each thread processes several.
pub fn grid_of_chunks(count: i64) -> Grid {
    const THREADS: u32 = 256;
    let blocks = (count as u64).div_ceil(THREADS.into()).min(i32::MAX as u64) as u32;
    Grid { blocks, threads: THREADS }
}

/// Adds up the rows of the workspace `partial`, one row of f32 from each of `blocks` blocks. A row has `columns`
/// numbers, and rows are `stride` numbers apart. Each output in `to`, sorted by column, receives the totals from its
/// column `first` up to the next output's.
pub fn sum_partials(
    device: Device,
    partial: *const u8,
    blocks: i32,
    [columns, stride]: [i64; 2],
    to: &[Output],
) -> Result<()> {
    // The kernel takes a fixed number of outputs. An unused one begins after the last column, so it receives nothing.
    let mut outputs = [Output { to: std::ptr::null_mut(), first: i32::MAX, dtype: 0 }; OUTPUTS];
    outputs[..to.len()].copy_from_slice(to);
    // A block of eight warps processes 32 columns (sums.cu).
    let grid = Grid { blocks: (columns as u32).div_ceil(32), threads: 256 };
    let arguments = SumPartials { partial, blocks, columns: columns as i32, stride: stride as i32, outputs };
    // The kernel has no variants, so it is compiled without options.
    // SAFETY: the outputs have `columns` numbers together, and so has each of the workspace's `blocks` rows, which are
    // `stride` apart.
    unsafe { cuda::launch(device, &SUMS, "", "sum_partials", grid, &arguments) }
}
