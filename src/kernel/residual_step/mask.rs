//! Dropout's random bits, drawn for groups of rows.

use crate::cpu::philox::{self, Dropout};
use crate::kernel::rows::{rows, Group, GROUP};
use crate::multiversion;

/// A dropout threshold and, for each row of a group, a random half word per column. An element is kept if its half word
/// is at least the threshold. `None` without dropout.
pub type Bits<'a> = Option<(u16, [&'a [u16]; GROUP])>;

/// The dropout mask. It is drawn for several groups of rows at a time, because the random generator, Philox, computes
/// sixteen blocks of eight columns at once, and narrow rows have fewer blocks.
pub struct Mask {
    dropout: Option<Dropout>,
    /// The place of the first row in dropout's random stream.
    first_row: usize,
    /// The division of the rows into groups.
    group: Group,
    cols: usize,
    /// The number of groups drawn together.
    batch: usize,
    /// The random bits of the last batch; empty without dropout.
    bits: Vec<u16>,
}

impl Mask {
    /// Prepares the mask of the rows that `group` divides; the first one is row `first_row` of the whole matrix.
    pub fn new(dropout: Option<Dropout>, first_row: usize, group: Group) -> Self {
        let cols = group.cols();
        // About 2,048 half words (4 KiB) are drawn at a time, but at least one group and at most all groups.
        let batch = (2048 / (group.size() * philox::padded(cols))).clamp(1, group.count().max(1));
        let bits = if dropout.is_some() { philox::scratch(batch * group.size(), cols) } else { Vec::new() };
        Mask { dropout, first_row, group, cols, batch, bits }
    }

    /// Returns the random bits of group `g`. Callers must request the groups in order. Rows that only fill up the last
    /// group get bits too, which have no effect.
    #[inline(always)]
    pub fn group(&mut self, g: usize) -> Bits<'_> {
        let dropout = self.dropout?;
        // Group g is number `index` of its batch.
        let (index, size) = (g % self.batch, self.group.size());
        // The first group of a batch draws the bits of the whole batch. The last batch may have fewer groups.
        if index == 0 {
            let rows = size * self.batch.min(self.group.count() - g);
            fill(&dropout.stream, self.first_row + size * g, rows, self.cols, &mut self.bits);
        }
        let (per_row, cols) = (philox::padded(self.cols), self.cols);
        let bits = &self.bits[index * size * per_row..];
        Some((dropout.threshold, rows!(r => if r < size { &bits[r * per_row..r * per_row + cols] } else { &[] })))
    }
}

multiversion! {
    /// Runs [`philox::fill`], which writes random half words, compiled for each instruction set.
    fn fill(stream: &philox::Stream, first_row: usize, rows: usize, cols: usize, out: &mut [u16]) {
        philox::fill(stream, first_row, rows, cols, out);
    }
}
