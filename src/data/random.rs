//! Random numbers that depend only on a seed: they are the same on every platform and in every version.
//!
//! The generator is ChaCha with 8 rounds, from the crate `rand_chacha`, which promises never to change its values.
//! The key encodes the purpose of the numbers and the place of the run (epoch and index) where they are used. So a
//! resumed run generates the numbers of its place directly, and checkpoints store no generator state.

use rand_chacha::rand_core::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// The purpose of random numbers. Each purpose has its own sequence of numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Order of sentences with the same lengths.
    TieBreak = 1,
    /// Order of an epoch's batches.
    BatchOrder = 2,
    /// Choice of the tokens in a batch that become UNK.
    WordDropout = 3,
    /// Choice of the next token that a language model generates.
    NextToken = 4,
}

/// The random numbers for one purpose at one place of the run.
#[derive(Debug, Clone)]
pub struct Random(ChaCha8Rng);

impl Random {
    /// Builds the generator for one place of the run: `index` is that of a batch in its epoch, for example. The key
    /// consists of seed, epoch, index and purpose, each 8 bytes, little-endian.
    pub fn new(seed: u64, epoch: u64, index: u64, purpose: Purpose) -> Self {
        let mut key = [0; 32];
        for (bytes, word) in key.chunks_exact_mut(8).zip([seed, epoch, index, purpose as u64]) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        Self(ChaCha8Rng::from_seed(key))
    }

    /// Returns true with probability `p`.
    pub fn chance(&mut self, p: f64) -> bool {
        self.uniform() < p
    }

    /// Returns a uniform number in [0, 1): the upper 53 bits of a random u64, times 2⁻⁵³.
    pub fn uniform(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Shuffles the items uniformly (Fisher and Yates, beginning at the end).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.up_to(last as u64) as usize);
        }
    }

    /// Returns a uniform integer in 0 ..= `most`, by rejection sampling: the next integer replaces one above `most`. A
    /// remainder would make small integers more probable.
    fn up_to(&mut self, most: u64) -> u64 {
        // The mask keeps as many bits as `most` has, so that few integers are rejected. It keeps at least one bit, as a
        // shift by 64 is an error.
        let mask = u64::MAX >> most.leading_zeros().min(63);
        loop {
            let drawn = self.0.next_u64() & mask;
            if drawn <= most {
                return drawn;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_never_change() {
        let mut items: Vec<u8> = (0..10).collect();
        Random::new(1, 2, 3, Purpose::BatchOrder).shuffle(&mut items);
        // An independent ChaCha8 in Python computed this order.
        assert_eq!(items, [6, 0, 4, 9, 7, 5, 1, 2, 8, 3]);
    }

    #[test]
    fn every_part_of_the_key_counts() {
        let first = |seed, epoch, index, purpose| Random::new(seed, epoch, index, purpose).0.next_u64();
        let all = [
            first(0, 0, 0, Purpose::TieBreak),
            first(1, 0, 0, Purpose::TieBreak),
            first(0, 1, 0, Purpose::TieBreak),
            first(0, 0, 1, Purpose::TieBreak),
            first(0, 0, 0, Purpose::WordDropout),
        ];
        assert_eq!(std::collections::HashSet::from(all).len(), all.len());
    }

    #[test]
    fn orders_are_uniform() {
        let mut random = Random::new(7, 0, 0, Purpose::TieBreak);
        let mut counts = std::collections::HashMap::new();
        for _ in 0..6000 {
            let mut items = [0, 1, 2];
            random.shuffle(&mut items);
            *counts.entry(items).or_insert(0) += 1;
        }
        // Each order is expected 1000 times, with a standard deviation of 29.
        assert!(counts.len() == 6 && counts.values().all(|count| (880..1120).contains(count)), "{counts:?}");
    }

    #[test]
    fn chances_have_their_probability() {
        let mut random = Random::new(7, 0, 0, Purpose::WordDropout);
        let hits = (0..10_000).filter(|_| random.chance(0.1)).count();
        // On average there are 1000 hits, with a standard deviation of 30.
        assert!((880..1120).contains(&hits), "{hits}");
        assert!((0..100).all(|_| !random.chance(0.0) && random.chance(1.0)));
    }
}
