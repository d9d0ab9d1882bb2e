//! The rows of keys and values that each query of a decoding step reads.

use super::Ranges;
use crate::error::Result;
use crate::kernel::attention::single::{self, ReadRows};
use crate::kernel::attention::Extras;
use std::ops::Range;
use tch::{Device, Tensor};

/// The list of rows that each query reads: query i reads `rows[offsets[i]..offsets[i + 1]]`, in this order.
/// Hypotheses with a common beginning share its rows. When hypotheses are reordered, only the lists change, not the
/// rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reads {
    offsets: Vec<usize>,
    rows: Vec<u32>,
}

impl Default for Reads {
    /// Returns lists for no queries.
    fn default() -> Self {
        Reads { offsets: vec![0], rows: Vec::new() }
    }
}

impl Reads {
    /// Returns empty lists: these queries read nothing yet.
    pub fn nothing(queries: usize) -> Self {
        Reads { offsets: vec![0; queries + 1], rows: Vec::new() }
    }

    /// Returns lists in which each query reads one range of rows.
    pub fn ranges(ranges: impl IntoIterator<Item = Range<i64>>) -> Self {
        let mut reads = Reads::default();
        ranges.into_iter().for_each(|range| reads.push(range.map(|row| row as u32)));
        reads
    }

    /// Returns the number of queries.
    pub fn queries(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Returns lists in which query i reads the rows that query `order[i]` reads here.
    pub fn select(&self, order: &[i64]) -> Self {
        let mut reads = Reads::default();
        order.iter().for_each(|&i| reads.push(self.of(i as usize).iter().copied()));
        reads
    }

    /// Returns lists in which query i reads row `first + i` after its other rows.
    pub fn followed_by(&self, first: usize) -> Self {
        let mut reads = Reads::default();
        reads.rows.reserve(self.rows.len() + self.queries());
        (0..self.queries()).for_each(|i| reads.push(self.of(i).iter().copied().chain([(first + i) as u32])));
        reads
    }

    /// Appends the queries of `others`, with their rows.
    pub fn joined(mut self, others: &Reads) -> Self {
        (0..others.queries()).for_each(|i| self.push(others.of(i).iter().copied()));
        self
    }

    /// Returns the last row that each query reads; `None` for a query that reads nothing.
    pub fn last(&self) -> Vec<Option<i64>> {
        (0..self.queries()).map(|i| self.of(i).last().map(|&row| row.into())).collect()
    }

    /// Returns those of the rows 0 to `row_count` − 1 that at least one query reads, in ascending order. Also returns
    /// the lists, renumbered so that row i is the i-th returned row.
    pub fn compacted(&self, row_count: usize) -> (Vec<i64>, Self) {
        let mut is_read = vec![false; row_count];
        self.rows.iter().for_each(|&row| is_read[row as usize] = true);
        let kept: Vec<i64> = (0..row_count).filter(|&row| is_read[row]).map(|row| row as i64).collect();
        let mut new_numbers = vec![0; row_count];
        kept.iter().enumerate().for_each(|(i, &row)| new_numbers[row as usize] = i as u32);
        let rows = self.rows.iter().map(|&row| new_numbers[row as usize]).collect();
        (kept, Reads { offsets: self.offsets.clone(), rows })
    }

    /// Computes attention on the CPU, without gradients. `qkv` holds q (queries, heads·d_head), k and v. Each query
    /// reads its own rows of k and v. Scores are multiplied by `scale`.
    pub fn attention(&self, qkv: [&Tensor; 3], heads: i64, scale: f64, extras: &Extras) -> Result<Tensor> {
        single::attention(qkv, ReadRows { offsets: &self.offsets, rows: &self.rows }, heads, scale, extras)
    }

    /// Gathers the rows of k and v query by query, for kernels that need each query's rows as one range. Returns k, v
    /// and the ranges.
    pub fn gathered(&self, [k, v]: [&Tensor; 2], device: Device) -> Result<(Tensor, Tensor, Ranges)> {
        // The number of each query, and the rows that it reads.
        let queries = || (0..self.queries()).map(|i| (i as i64, self.of(i)));
        // If the rows of each query follow one another, k and v are used as they are.
        let are_ranges = queries().all(|(_, rows)| rows.windows(2).all(|two| two[0] + 1 == two[1]));
        // Both tables hold (q_start, q_len, k_start, k_len) for each query, with q_len = 1.
        if are_ranges {
            let start = |rows: &[u32]| rows.first().map_or(0, |&row| row as i64);
            let table: Vec<i64> = queries().flat_map(|(i, rows)| [i, 1, start(rows), rows.len() as i64]).collect();
            return Ok((k.shallow_clone(), v.shallow_clone(), Ranges::of(&table, device)?));
        }
        // After the rows have been gathered, those of query i begin at its offset.
        let table: Vec<i64> =
            queries().flat_map(|(i, rows)| [i, 1, self.offsets[i as usize] as i64, rows.len() as i64]).collect();
        let index: Vec<i64> = self.rows.iter().map(|&row| row as i64).collect();
        let index = Tensor::f_from_slice(&index)?.f_to_device(device)?;
        Ok((k.f_index_select(0, &index)?, v.f_index_select(0, &index)?, Ranges::of(&table, device)?))
    }

    /// Returns the rows that a query reads.
    fn of(&self, query: usize) -> &[u32] {
        &self.rows[self.offsets[query]..self.offsets[query + 1]]
    }

    /// Appends a query that reads these rows.
    fn push(&mut self, rows: impl IntoIterator<Item = u32>) {
        self.rows.extend(rows);
        self.offsets.push(self.rows.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the rows of each query.
    fn lists(reads: &Reads) -> Vec<Vec<u32>> {
        (0..reads.queries()).map(|i| reads.of(i).to_vec()).collect()
    }

    #[test]
    fn numbers_move_and_rows_stay() {
        let first = Reads::nothing(3).followed_by(0);
        assert_eq!(lists(&first), [[0], [1], [2]]);
        let second = first.select(&[2, 2, 0, 2]).followed_by(3);
        assert_eq!(lists(&second), [[2, 3], [2, 4], [0, 5], [2, 6]]);
        let joined = second.select(&[3]).joined(&second.select(&[0, 3]));
        assert_eq!(lists(&joined), [[2, 6], [2, 3], [2, 6]]);
        let (kept, compact) = joined.compacted(7);
        assert_eq!((kept, lists(&compact)), (vec![2, 3, 6], vec![vec![0, 2], vec![0, 1], vec![0, 2]]));
        assert_eq!(lists(&Reads::ranges([2..4, 0..0, 1..2])), [vec![2, 3], vec![], vec![1]]);
    }
}
