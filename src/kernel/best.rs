//! The most probable columns in rows of logits, with their log-probabilities: log-softmax and top-k in one.
//!
//! > log p_i = z_i − log Σ_j exp z_j
//!
//! A row is processed in parts, which are still in the second-level cache after they were computed. The first pass over
//! a part finds the maximum of each block of 64 columns, and the second adds up exp(z − max). The third reads only
//! blocks whose maximum exceeds the smallest of the best logits so far.

pub mod call;

use crate::cpu::pack::Isa;
use crate::cpu::{Accumulator, Element};
use crate::kernel::math::{exp, max, sum, LANES};
use crate::multiversion;

/// The number of columns that share a maximum.
const BLOCK: usize = 4 * LANES;

/// A column and its log-probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Likely {
    pub column: usize,
    pub log_p: f64,
}

/// The columns that may be chosen. The sum Σ exp z includes the excluded columns, too.
#[derive(Clone, Copy, Debug)]
pub enum Choice<'a> {
    /// All columns except these.
    AllBut(&'a [usize]),
    /// This column alone.
    Only(usize),
}

/// The state of a row while its columns are read, part after part.
#[derive(Clone, Debug)]
pub struct Standing {
    /// The largest logit so far.
    most: f64,
    /// The sum Σ exp(z − most) so far.
    sum: f64,
    /// The best columns so far, with their logits instead of log p.
    found: Vec<Likely>,
}

impl Standing {
    /// Returns the state before the first part, with room for the `count` best columns.
    pub fn new(count: usize) -> Self {
        Standing { most: f64::NEG_INFINITY, sum: 0.0, found: Vec::with_capacity(count) }
    }

    /// Returns the most probable columns, best first; of equal columns, the lower index comes first. There are fewer
    /// than `count` if fewer columns have a probability above 0. A row that contains a NaN returns one entry, with
    /// log p = NaN.
    pub fn finish(mut self) -> Vec<Likely> {
        let log_sum = self.sum.ln();
        if log_sum.is_nan() || self.most == f64::NEG_INFINITY {
            return vec![Likely { column: 0, log_p: f64::NAN }];
        }
        // Until here `log_p` held the logit z: log p = (z − max) − log Σ exp(z − max).
        self.found.iter_mut().for_each(|likely| likely.log_p = (likely.log_p - self.most) - log_sum);
        self.found
    }
}

multiversion! {
    /// Reads the next part of each row: `cols` logits that begin at column `start`. `logits` begins with the first
    /// row's part, and rows are `stride` apart. `count` is the number of best columns to find, and `standings` has the
    /// state of each row. Callers must pass the parts in the order of their columns.
    pub fn rank[isa S][E: Element](
        logits: &[E],
        start: usize,
        cols: usize,
        stride: usize,
        count: usize,
        choice: Choice,
        standings: &mut [Standing],
    ) {
        let mut maxima = vec![E::Acc::ZERO; cols.div_ceil(BLOCK)];
        for (r, Standing { most, sum, found }) in standings.iter_mut().enumerate() {
            let z = &logits[r * stride..][..cols];
            let largest_here = block_maxima(z, &mut maxima).to_f64();
            if largest_here > *most {
                // The sum so far is relative to the old maximum, so it is rescaled to the new one.
                *sum *= (*most - largest_here).exp();
                *most = largest_here;
            }
            // A row of only −∞ has no maximum to subtract.
            let shift = if *most == f64::NEG_INFINITY { 0.0 } else { *most };
            *sum += sum_of_exponentials::<E, S>(z, E::Acc::from_f64(shift)).to_f64();
            match choice {
                Choice::AllBut(banned) => largest(z, start, &maxima, count, banned, found),
                Choice::Only(column) if (start..start + cols).contains(&column) => {
                    found.push(Likely { column, log_p: z[column - start].load().to_f64() });
                }
                Choice::Only(_) => {} // the column lies in another part
            }
        }
    }
}

/// Returns the largest number, and writes the maximum of each block of 64 to `maxima`; NaN is ignored.
#[inline(always)]
fn block_maxima<E: Element>(z: &[E], maxima: &mut [E::Acc]) -> E::Acc {
    let lowest = E::Acc::from_f64(f64::NEG_INFINITY);
    let mut most = lowest;
    for (z, maximum) in z.chunks(BLOCK).zip(maxima) {
        let mut lanes = [lowest; LANES];
        let (whole, rest) = z.as_chunks::<LANES>();
        for z in whole {
            for l in 0..LANES {
                lanes[l] = z[l].load().max(lanes[l]);
            }
        }
        for (lane, z) in lanes.iter_mut().zip(rest) {
            *lane = z.load().max(*lane);
        }
        *maximum = max(lanes);
        most = maximum.max(most);
    }
    most
}

/// Returns Σ exp(z − most), computed with one sum per lane.
#[inline(always)]
fn sum_of_exponentials<E: Element, S: Isa>(z: &[E], most: E::Acc) -> E::Acc {
    let mut totals = [E::Acc::ZERO; LANES];
    let (whole, rest) = z.as_chunks::<LANES>();
    for z in whole {
        for l in 0..LANES {
            totals[l] += exp::<E::Acc, S>(z[l].load() - most);
        }
    }
    for (total, z) in totals.iter_mut().zip(rest) {
        *total += exp::<E::Acc, S>(z.load() - most);
    }
    sum(totals)
}

/// Updates `found`, the `count` best columns so far in descending order, with the columns of `z`, the first of which is
/// `start`. `maxima` has the maximum of each block of z; `banned` columns are left out. In `found`, the fields `log_p`
/// hold logits.
#[inline(always)]
fn largest<E: Element>(
    z: &[E],
    start: usize,
    maxima: &[E::Acc],
    count: usize,
    banned: &[usize],
    found: &mut Vec<Likely>,
) {
    // A column enters the list only if its logit is larger than `least`: the last of `count` entries, or −∞ if there
    // are fewer.
    let mut least = E::Acc::from_f64(found.get(count - 1).map_or(f64::NEG_INFINITY, |last| last.log_p));
    for (block, (z, maximum)) in z.chunks(BLOCK).zip(maxima).enumerate() {
        // A block whose maximum equals `least` is skipped too: the lower of two columns with equal logits wins, and
        // columns are read in ascending order.
        if *maximum <= least {
            continue;
        }
        for (i, z) in z.iter().enumerate() {
            let value = z.load();
            let column = start + block * BLOCK + i;
            if value > least && !banned.contains(&column) {
                let logit = value.to_f64();
                // The column comes after larger and equal logits, because the lower of two equal columns is first.
                let place = found.partition_point(|better| better.log_p >= logit);
                // If there are `count` entries, the last one makes room.
                found.truncate(count - 1);
                found.insert(place, Likely { column, log_p: logit });
                if found.len() == count {
                    least = E::Acc::from_f64(found[count - 1].log_p);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::{force, Level};
    use half::bf16;

    /// Finds the best columns of each row of z twice: from whole rows, and from parts of 64 columns. Rows have `cols`
    /// logits and are `stride` apart. Checks that both ways agree, and returns the best columns of each row.
    fn run<E: Element>(z: &[f64], cols: usize, stride: usize, count: usize, choice: Choice) -> Vec<Vec<Likely>> {
        let logits: Vec<E> = z.iter().map(|z| E::store(E::Acc::from_f64(*z))).collect();
        let [whole, parts] = [cols, 64].map(|part| {
            let mut standings = vec![Standing::new(count); logits.len() / stride];
            for start in (0..cols).step_by(part) {
                rank(&logits[start..], start, part.min(cols - start), stride, count, choice, &mut standings);
            }
            standings.into_iter().map(Standing::finish).collect::<Vec<_>>()
        });
        for (whole, parts) in whole.iter().zip(&parts) {
            assert_eq!(whole.len(), parts.len());
            for (whole, part) in whole.iter().zip(parts) {
                assert_eq!((whole.column, whole.log_p.is_nan()), (part.column, part.log_p.is_nan()));
                assert!(whole.log_p.is_nan() || (whole.log_p - part.log_p).abs() < 1e-6, "{whole:?} {part:?}");
            }
        }
        parts
    }

    /// Returns the `count` best allowed columns of one row z, found by sorting.
    fn naive(z: &[f64], count: usize, choice: Choice) -> Vec<Likely> {
        let most = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = most + z.iter().map(|z| (z - most).exp()).sum::<f64>().ln();
        let allowed = |column: &usize| match choice {
            Choice::AllBut(banned) => !banned.contains(column),
            Choice::Only(only) => *column == only,
        };
        let mut all: Vec<Likely> = (0..z.len())
            .filter(|column| allowed(column) && z[*column] > f64::NEG_INFINITY)
            .map(|column| Likely { column, log_p: z[column] - lse })
            .collect();
        all.sort_by(|a, b| b.log_p.total_cmp(&a.log_p));
        all.truncate(count);
        all
    }

    /// Returns n numbers that look random; `seed` selects them. They are multiples of 1/8, so that bf16 holds them
    /// exactly and many are equal.
    fn logits(n: usize, seed: u64) -> Vec<f64> {
        (0..n as u64)
            // The product scrambles the bits of i; its upper 7 bits are the number of eighths above −9.
            .map(|i| ((i + 77 * seed + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 57) as f64 / 8.0 - 9.0)
            .collect()
    }

    /// Compares the best columns of many rows with those that sorting finds; `bound` is the error of log p.
    fn check<E: Element>(level: Level, bound: f64) {
        for (seed, cols) in [1, 2, 15, 64, 65, 300, 1000].into_iter().enumerate() {
            let stride = cols + seed % 3;
            let mut z = logits(3 * stride, seed as u64);
            // A row of only −∞ would give NaN.
            z[0] = if cols > 1 { f64::NEG_INFINITY } else { 0.5 };
            for (count, banned) in [(1, &[][..]), (2, &[0, 1]), (10, &[0, 1, 2]), (2000, &[0])] {
                let choice = Choice::AllBut(banned);
                for (r, found) in run::<E>(&z, cols, stride, count, choice).iter().enumerate() {
                    let wanted = naive(&z[r * stride..][..cols], count, choice);
                    assert_eq!(found.len(), wanted.len(), "{level:?} {cols} {count}");
                    for (found, wanted) in found.iter().zip(&wanted) {
                        assert_eq!(found.column, wanted.column, "{level:?} {cols} {count}");
                        assert!((found.log_p - wanted.log_p).abs() < bound, "{found:?} for {wanted:?}");
                        assert!(found.log_p <= 0.0);
                    }
                }
            }
        }
    }

    #[test]
    fn the_best_are_those_that_sorting_finds() {
        for level in Level::ALL {
            let level = force(Some(level));
            check::<f32>(level, 2e-6);
            check::<f64>(level, 1e-12);
            check::<bf16>(level, 2e-6);
        }
        force(None);
    }

    #[test]
    fn only_one_column_may_be_all_there_is() {
        let found = run::<f32>(&[0.0; 70], 70, 70, 4, Choice::Only(68));
        assert_eq!((found[0].len(), found[0][0].column), (1, 68));
        assert!((found[0][0].log_p + 70f64.ln()).abs() < 1e-6);
    }

    #[test]
    fn a_part_may_have_no_probability() {
        let mut z = [f64::NEG_INFINITY; 200];
        z[150..].fill(1.0);
        let found = run::<f32>(&z, 200, 200, 3, Choice::AllBut(&[]));
        assert_eq!(found[0].iter().map(|l| l.column).collect::<Vec<_>>(), [150, 151, 152]);
        assert!((found[0][0].log_p + 50f64.ln()).abs() < 1e-6);
    }

    #[test]
    fn a_nan_is_all_that_is_found() {
        // There are three rows of 70 columns, of which the second has one bad logit.
        for place in [0, 63, 69] {
            for bad in [f64::NAN, f64::INFINITY] {
                let mut z = vec![0.5; 3 * 70];
                z[70 + place] = bad;
                let is_nan: Vec<bool> = run::<f32>(&z, 70, 70, 2, Choice::AllBut(&[]))
                    .iter()
                    .map(|found| found.len() == 1 && found[0].log_p.is_nan())
                    .collect();
                assert_eq!(is_nan, [false, true, false], "{bad} at {place}");
            }
        }
        assert!(run::<f32>(&[f64::NEG_INFINITY; 9], 9, 9, 2, Choice::AllBut(&[]))[0][0].log_p.is_nan());
    }
}
