//! The distribution of a matrix's rows over a GPU's threads.

use super::Grid;

/// The shape of a block: `rows` rows of `lanes` threads. Each thread processes chunks of `vec` columns, and keeps up
/// to `held` chunks in registers. `held` = 0 means that there are too many chunks, so none is kept. `full` is true if
/// every thread has exactly `held` chunks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Layout {
    pub vec: u32,
    pub lanes: u32,
    pub rows: u32,
    pub held: u32,
    pub full: bool,
}

/// The maximum number of chunks that a thread keeps in registers. Four chunks have up to 32 numbers of 16 bits, and a
/// backward pass keeps as many sums for each parameter's gradient.
const MOST_HELD: u32 = 4;

impl Layout {
    /// Returns the layout for rows of `cols` numbers, whose narrowest type has `bytes` bytes. `aligned` is true if
    /// all tensors start at a multiple of 16 bytes; whole rows of 16-byte chunks then do so too.
    pub fn of(cols: u32, bytes: u32, aligned: bool) -> Self {
        let widest = 16 / bytes; // the numbers in a read of 16 bytes, the widest
        let vec = if aligned && cols.is_multiple_of(widest) { widest } else { 1 };
        let chunks = cols.div_ceil(vec);
        // Choose the fewest threads that can keep a whole row in registers. If even 256 cannot, 512 threads read the
        // chunks again at each use.
        match [32, 128, 256].into_iter().find(|lanes| chunks <= MOST_HELD * lanes) {
            Some(lanes) => {
                // Powers of two keep the number of variants to compile small. A block of 32 threads, one warp, would be
                // too small, so four rows share a block.
                let held = chunks.div_ceil(lanes).max(1).next_power_of_two();
                Layout { vec, lanes, rows: if lanes == 32 { 4 } else { 1 }, held, full: chunks == held * lanes }
            }
            None => Layout { vec, lanes: 512, rows: 1, held: 0, full: false },
        }
    }

    /// Returns the grid for `rows` rows, with at most `most_blocks` blocks. Each block loops over its share of rows.
    pub fn grid(&self, rows: u64, most_blocks: u32) -> Grid {
        let blocks = rows.div_ceil(self.rows.into()).min(most_blocks.into());
        Grid { blocks: blocks as u32, threads: self.threads() }
    }

    /// Returns the number of threads in a block.
    pub fn threads(&self) -> u32 {
        self.lanes * self.rows
    }

    /// Returns the maximum number of blocks in a sum over rows: enough to fill every multiprocessor, and so few that
    /// their sums are added up quickly.
    pub fn most_blocks(multiprocessors: u32) -> u32 {
        4 * multiprocessors
    }

    /// Returns the compiler options that pass the layout to the CUDA sources.
    pub fn options(&self) -> String {
        let Layout { vec, lanes, rows, held, full } = self;
        let full = u32::from(*full);
        format!("-DK_VEC={vec} -DK_LANES={lanes} -DK_ROWS={rows} -DK_HELD={held} -DK_FULL={full}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_column_has_a_thread() {
        for cols in (0..3000).chain([4096, 8192, 8193, 65_536]) {
            for (bytes, aligned) in [(2, true), (4, true), (2, false)] {
                let layout = Layout::of(cols, bytes, aligned);
                let chunks = cols.div_ceil(layout.vec);
                assert!(layout.held == 0 || chunks <= layout.held * layout.lanes, "{cols}: {layout:?}");
                assert!(cols.is_multiple_of(layout.vec) && layout.lanes * layout.rows <= 512);
            }
        }
        assert_eq!(Layout::of(512, 2, true), Layout { vec: 8, lanes: 32, rows: 4, held: 2, full: true });
        assert!(!Layout::of(504, 2, true).full);
        assert_eq!(Layout::of(512, 2, false), Layout { vec: 1, lanes: 128, rows: 1, held: 4, full: true });
    }
}
