//! Groups of up to four rows, and blocks of thirty-two numbers in a row, over which the passes loop.
//!
//! The passes' loops handle only whole groups and whole blocks. A group with too few rows is padded with spare rows of
//! zeros, which add nothing to any sum. If a row ends inside a block, its last block is a copy that is padded with
//! zeros.

use super::passes::{each_row, rows};
use super::GROUP;
use crate::cpu::memory::Aligned;
use crate::cpu::pack::{Isa, PAIR_LANES};
use crate::cpu::{memory, Accumulator, Element};
use std::array::from_fn;
use std::ops::Range;
use std::slice::from_mut;

/// Returns one coefficient per column, padded to whole blocks. `values` has one per column, one for all columns, or is
/// empty, which means `default` for all.
pub fn columns<A: Accumulator>(values: &[A], cols: usize, default: A) -> Aligned<A> {
    let (len, first) = (cols.next_multiple_of(PAIR_LANES), values.first().copied().unwrap_or(default));
    match values.len() {
        0 | 1 => Aligned::filled_up(&[], len, first),
        n if n == cols => Aligned::filled_up(values, len, first),
        n => panic!("a row of {cols} columns takes 0, 1 or {cols} coefficients, not {n}"),
    }
}

/// Writes the sums per column to `to` or, if `to` is one number, their total; if `to` is empty, does nothing.
pub fn write_columns<A: Accumulator>(sums: &[A], to: &mut [A]) {
    match to {
        [sum] if sums.len() > 1 => *sum = sums.iter().fold(A::ZERO, |sum, &column| sum + column),
        _ => to.copy_from_slice(&sums[..to.len()]),
    }
}

/// Returns a copy of the sums per column, padded with zeros to whole blocks, in which a pass continues them. It is all
/// zeros if `sums` is empty.
pub fn start<A: Accumulator>(sums: &[A], cols: usize) -> Aligned<A> {
    Aligned::filled_up(sums, cols.next_multiple_of(PAIR_LANES), A::ZERO)
}

/// The division of rows into groups. A group is an array of [`GROUP`] rows; rows beyond the number that the
/// instruction set processes together are empty.
#[derive(Clone, Copy, Debug)]
pub struct Group {
    rows: usize,
    cols: usize,
    /// The number of rows in a group, at most [`GROUP`].
    size: usize,
}

impl Group {
    /// Divides a matrix of `rows` rows into groups of the size that suits the instruction set.
    pub fn new<S: Isa>(rows: usize, cols: usize) -> Self {
        Group { rows, cols, size: S::ROWS }
    }

    /// Returns the number of rows in a group.
    #[inline(always)]
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns the number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Returns the number of groups.
    #[inline(always)]
    pub fn count(&self) -> usize {
        self.rows.div_ceil(self.size)
    }

    /// Returns the indices of the rows of group `g` that exist; the last group may have fewer than `size`.
    #[inline(always)]
    pub fn range(&self, g: usize) -> Range<usize> {
        g * self.size..self.rows.min((g + 1) * self.size)
    }

    /// Returns a row of zeros, which is read in place of rows that the last group lacks; empty if it lacks none.
    pub fn spare<E: Element>(&self) -> Vec<E> {
        memory::filled(E::default(), self.missing().min(1) * self.cols)
    }

    /// Returns memory for the rows that the last group lacks, so that a pass can write whole groups.
    pub fn spare_out<E: Element>(&self) -> Vec<E> {
        memory::filled(E::default(), self.missing() * self.cols)
    }

    /// Returns the number of rows that the last group lacks.
    fn missing(&self) -> usize {
        self.rows.next_multiple_of(self.size) - self.rows
    }

    /// Returns the rows of group `g` in the matrix `all`, and `spare`, from [`spare`](Self::spare), for rows that the
    /// group lacks. An empty matrix has empty rows.
    #[inline(always)]
    pub fn rows<'a, E>(&self, g: usize, all: &'a [E], spare: &'a [E]) -> [&'a [E]; GROUP] {
        if all.is_empty() {
            return [all; GROUP];
        }
        let Range { start, end } = self.range(g);
        let rows = &all[start * self.cols..end * self.cols];
        // At first all rows of the group are spare, or empty if beyond its size; then the real ones replace them.
        let mut group = rows!(r => if r < self.size { spare } else { &[][..] });
        for (to, row) in group.iter_mut().zip(rows.chunks_exact(self.cols)) {
            *to = row;
        }
        group
    }

    /// Returns the rows of group `g` in the matrix `all` for writing, and rows of `spare`, from
    /// [`spare_out`](Self::spare_out), for those that the group lacks. An empty matrix has empty rows.
    #[inline(always)]
    pub fn rows_mut<'a, E>(&self, g: usize, all: &'a mut [E], spare: &'a mut [E]) -> [&'a mut [E]; GROUP] {
        if all.is_empty() {
            return [&mut [], &mut [], &mut [], &mut []];
        }
        let Range { start, end } = self.range(g);
        let rows = all[start * self.cols..end * self.cols].chunks_exact_mut(self.cols);
        let mut rows = rows.chain(spare.chunks_exact_mut(self.cols));
        // The real rows come first, then the spare ones that fill up the group.
        from_fn(|r| match r < self.size {
            true => rows.next().expect("spare rows make up a group"),
            false => &mut [],
        })
    }
}

/// Splits a buffer of four rows into the rows.
#[inline(always)]
pub fn split<E>(all: &mut [E], cols: usize) -> [&mut [E]; GROUP] {
    let (a, rest) = all.split_at_mut(cols);
    let (b, rest) = rest.split_at_mut(cols);
    let (c, d) = rest.split_at_mut(cols);
    [a, b, c, d]
}

/// Splits a buffer of four rows into the rows, for reading.
#[inline(always)]
pub fn split_ref<E>(all: &[E], cols: usize) -> [&[E]; GROUP] {
    rows!(r => &all[r * cols..(r + 1) * cols])
}

/// A group of rows to read, in two parts: part 0 has a row's whole blocks, and part 1 one padded block if rows end
/// inside a block.
pub struct Blocks<'a, E> {
    rows: [&'a [E]; GROUP],
    /// The padded last block of each row, built at its first use.
    rest: Option<[[E; PAIR_LANES]; GROUP]>,
}

/// The number of parts of a row. Passes loop over the parts, so that their body is compiled once; a special case
/// after a loop over blocks would compile it twice.
pub const PARTS: usize = 2;

/// Returns the number of blocks in a part of a row of `cols` numbers: the whole blocks in part 0. In part 1 it is one,
/// or none if the row ends with a block.
#[inline(always)]
fn count(cols: usize, part: usize) -> usize {
    if part == 0 {
        cols / PAIR_LANES
    } else {
        (cols % PAIR_LANES).min(1)
    }
}

impl<'a, E: Copy + Default> Blocks<'a, E> {
    /// Wraps the rows of a group.
    #[inline(always)]
    pub fn of(rows: [&'a [E]; GROUP]) -> Self {
        Blocks { rows, rest: None }
    }

    /// Returns each row's first `n` blocks of this part: none for rows that the instruction set does not process
    /// together. Callers pass the part's number of blocks, or 0 for a matrix that is absent.
    #[inline(always)]
    pub fn part<S: Isa>(&mut self, part: usize, n: usize) -> [&[[E; PAIR_LANES]]; GROUP] {
        if part == 0 || n == 0 {
            return rows!(r => &self.rows[r].as_chunks().0[..if r < S::ROWS { n } else { 0 }]);
        }
        // Part 1 is one block per row, padded with zeros.
        let rest = self.rest.insert([[E::default(); PAIR_LANES]; GROUP]);
        each_row!(S, r => {
            let tail = self.rows[r].as_chunks::<PAIR_LANES>().1;
            rest[r][..tail.len()].copy_from_slice(tail);
        });
        rows!(r => &std::slice::from_ref(&rest[r])[..if r < S::ROWS { n } else { 0 }])
    }

    /// Returns the number of blocks that each row has in this part.
    #[inline(always)]
    pub fn len(&self, part: usize) -> usize {
        count(self.rows[0].len(), part)
    }
}

/// A group of rows to write, in the parts of [`Blocks`].
pub struct BlocksMut<'a, E> {
    whole: [&'a mut [[E; PAIR_LANES]]; GROUP],
    /// The ends of the rows that fill no whole block.
    tails: [&'a mut [E]; GROUP],
    /// The padded last block of each row, which a pass writes and [`finish`](Self::finish) copies to the tails.
    rest: Option<[[E; PAIR_LANES]; GROUP]>,
}

impl<'a, E: Element> BlocksMut<'a, E> {
    /// Wraps the rows of a group for writing.
    #[inline(always)]
    pub fn of(rows: [&'a mut [E]; GROUP]) -> Self {
        // Each of the four rows becomes a pair: its whole blocks, and its tail.
        let [a, b, c, d] = rows;
        let (a, b) = (a.as_chunks_mut::<PAIR_LANES>(), b.as_chunks_mut::<PAIR_LANES>());
        let (c, d) = (c.as_chunks_mut::<PAIR_LANES>(), d.as_chunks_mut::<PAIR_LANES>());
        BlocksMut { whole: [a.0, b.0, c.0, d.0], tails: [a.1, b.1, c.1, d.1], rest: None }
    }

    /// Returns each row's first `n` blocks of this part for writing: none for rows that the instruction set does not
    /// process together. Callers pass the part's number of blocks, or 0 for a matrix that is absent.
    #[inline(always)]
    pub fn part<S: Isa>(&mut self, part: usize, n: usize) -> [&mut [[E; PAIR_LANES]]; GROUP] {
        let counts = rows!(r => if r < S::ROWS { n } else { 0 });
        let [a, b, c, d] = &mut self.whole;
        if part == 0 || n == 0 {
            return [&mut a[..counts[0]], &mut b[..counts[1]], &mut c[..counts[2]], &mut d[..counts[3]]];
        }
        // Part 1 is one padded block per row, which `finish` copies to the row's tail.
        let [a, b, c, d] = self.rest.insert([[E::default(); PAIR_LANES]; GROUP]);
        let [a, b, c, d] = [from_mut(a), from_mut(b), from_mut(c), from_mut(d)];
        [&mut a[..counts[0]], &mut b[..counts[1]], &mut c[..counts[2]], &mut d[..counts[3]]]
    }

    /// Copies the numbers of the padded last blocks, without the padding, to the ends of their rows.
    #[inline(always)]
    pub fn finish(self) {
        let Some(rest) = &self.rest else { return };
        for (tail, rest) in self.tails.into_iter().zip(rest) {
            tail.copy_from_slice(&rest[..tail.len()]);
        }
    }
}
