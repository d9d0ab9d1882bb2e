//! The second stage of every sum over rows: what blocks have summed is added up.

use super::{launch, Device, Grid, Program, PRELUDE};
use crate::device_struct;
use crate::error::Result;

/// Adds up what blocks have summed.
pub static SUMS: Program = Program {
    name: "sums.cu",
    files: &[PRELUDE, include_str!("device/sums.cu")],
    structs: &[&Output::LAYOUT, &SumPartials::LAYOUT],
};

device_struct! {
    /// sums.cu's `Output`: where the columns from `first` on go, and as what.
    #[derive(Clone, Copy)]
    pub struct Output = "Output" {
        pub to: *mut u8,
        pub first: i32,
        pub dtype: i32,
    }
}

/// Outputs that one launch may write.
const OUTPUTS: usize = 6;

device_struct! {
    /// sums.cu's `Sums`.
    struct SumPartials = "Sums" {
        partial: *const u8,
        blocks: i32,
        columns: i32,
        outputs: [Output; OUTPUTS],
    }
}

/// Adds up `blocks` rows of `columns` numbers, each output taking its share of the columns.
pub fn sum_partials(device: Device, partial: *const u8, blocks: i32, columns: i64, to: &[Output]) -> Result<()> {
    let mut outputs = [Output { to: std::ptr::null_mut(), first: i32::MAX, dtype: 0 }; OUTPUTS];
    outputs[..to.len()].copy_from_slice(to);
    let grid = Grid { blocks: (columns as u32).div_ceil(32), threads: 256 };
    let arguments = SumPartials { partial, blocks, columns: columns as i32, outputs };
    // SAFETY: the outputs have `columns` numbers together, the workspace as many in each of `blocks` rows.
    unsafe { launch(device, &SUMS, "", "sum_partials", grid, &arguments) }
}
