//! Rows that decoding writes once and reads again for every later token.

use crate::error::Result;
use tch::Tensor;

/// A tensor (capacity, width) of rows. The capacity doubles when new rows do not fit.
pub struct WrittenRows(Tensor);

impl WrittenRows {
    /// The room that a text reserves, as a multiple of its rows, so that the first tokens after it need no copy.
    pub const ROOM_OF_TEXT: i64 = 2;
    /// The room that the first step of decoding reserves, as a multiple of its rows, so that few steps need a copy.
    pub const ROOM_OF_STEP: i64 = 16;

    /// Reserves memory for `room` rows of the width and type of `like`.
    pub fn empty(like: &Tensor, room: i64) -> Result<Self> {
        Ok(WrittenRows(Tensor::f_empty([room, like.size()[1]].as_slice(), (like.kind(), like.device()))?))
    }

    /// Returns all rows of the memory, (capacity, width); those that were never written hold arbitrary numbers.
    pub fn all(&self) -> &Tensor {
        &self.0
    }

    /// Writes rows, from `first_row` on. If they do not fit, the rows before `first_row` move to larger memory.
    pub fn write(&mut self, rows: &Tensor, first_row: i64) -> Result<()> {
        let (end, room) = (first_row + rows.size()[0], self.0.size()[0]);
        if end > room {
            let larger = WrittenRows::empty(rows, end.max(2 * room))?;
            larger.put(&self.0.f_narrow(0, 0, first_row)?, 0)?;
            *self = larger;
        }
        self.put(rows, first_row)
    }

    /// Copies rows into the existing memory, from `first_row` on.
    fn put(&self, rows: &Tensor, first_row: i64) -> Result<()> {
        self.0.f_narrow(0, first_row, rows.size()[0])?.f_copy_(rows)?;
        Ok(())
    }

    /// Keeps only the rows that `kept` lists: row kept[i] becomes row i.
    pub fn keep(&mut self, kept: &Tensor) -> Result<()> {
        self.0 = self.0.f_index_select(0, &kept.f_to_device(self.0.device())?)?;
        Ok(())
    }
}
