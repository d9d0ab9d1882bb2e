//! Batches by token count: which sentences share a batch, and the packed rows that the model reads.

use super::corpus::Corpus;
use super::random::{Purpose, Random};
use super::vocabulary::{EOS, UNK};

/// Rows of real tokens, one after the other, without padding.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PackedIds {
    /// The ids of all rows, n in total.
    pub tokens: Vec<i64>,
    /// The position of each token in its row, from 0.
    pub positions: Vec<i64>,
    /// The index of each row's first token, then the end of the last row: row r is `offsets[r]..offsets[r + 1]`.
    pub offsets: Vec<i64>,
    /// The length of the longest row.
    pub longest: usize,
}

impl PackedIds {
    /// Packs rows of token ids one after the other.
    pub fn from_rows<R: IntoIterator<Item = u32>>(rows: impl IntoIterator<Item = R>) -> Self {
        let mut packed = Self { offsets: vec![0], ..Self::default() };
        for row in rows {
            let start = packed.tokens.len();
            packed.tokens.extend(row.into_iter().map(i64::from));
            let length = packed.tokens.len() - start;
            packed.positions.extend(0..length as i64);
            packed.offsets.push(packed.tokens.len() as i64);
            packed.longest = packed.longest.max(length);
        }
        packed
    }

    /// Returns the number of rows.
    #[cfg(test)]
    pub fn rows(&self) -> usize {
        self.offsets.len().saturating_sub(1)
    }
}

/// The input of one forward pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// The source's tokens with EOS at the end; `None` in language modelling.
    pub source: Option<PackedIds>,
    /// The decoder's input: BOS, or another first token that the corpus has set, then the target's tokens.
    pub target_input: PackedIds,
    /// The token that the decoder should predict at each position of `target_input`: the target's tokens, then EOS.
    pub target_output: Vec<i64>,
    /// The index in the corpus of each row's sentence.
    pub sentences: Vec<usize>,
}

/// Returns the batches of an epoch as lists of sentence indices. `lengths` contains each sentence's (source, target)
/// length, EOS included.
///
/// The cost of a batch is its number of sentences × the length of its longest side. The cost never exceeds
/// `max_tokens`, unless a single sentence is longer than that; it then forms a batch of its own. Sentences are sorted
/// by their longer side, then by source and target length; a random order that depends on (seed, epoch) decides between
/// equal ones. The sorted list is cut greedily, so that the rows of a batch have similar lengths. Then the batches are
/// shuffled by (seed, epoch). Every epoch has the same number of batches.
pub fn plan(lengths: &[(usize, usize)], max_tokens: usize, seed: u64, epoch: u64) -> Vec<Vec<usize>> {
    let longer_side = |sentence: usize| lengths[sentence].0.max(lengths[sentence].1);
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    // The third argument numbers the generators of an epoch. Each purpose needs only one here, so it is 0.
    Random::new(seed, epoch, 0, Purpose::TieBreak).shuffle(&mut order);
    // The sort is stable, so that the random order decides between equal lengths.
    order.sort_by_key(|&sentence| (longer_side(sentence), lengths[sentence]));

    let mut batches: Vec<Vec<usize>> = Vec::new();
    for sentence in order {
        // Lengths ascend, so the newest sentence is the longest of its batch.
        match batches.last_mut() {
            Some(batch) if (batch.len() + 1) * longer_side(sentence) <= max_tokens => batch.push(sentence),
            _ => batches.push(vec![sentence]),
        }
    }
    Random::new(seed, epoch, 0, Purpose::BatchOrder).shuffle(&mut batches);
    batches
}

/// Packs the sentences with the indices `sentences` into a batch.
///
/// In translation, the input is the first token and the target, and the tokens to predict are the target and EOS.
///
/// Panics if a sentence is not in the corpus.
pub fn collate(corpus: &Corpus, sentences: &[usize]) -> Batch {
    let targets = || rows_at(&corpus.target, sentences);
    let (target_input, target_output) = match corpus.source {
        Some(_) => (
            PackedIds::from_rows(targets().map(|row| [corpus.start].into_iter().chain(row.iter().copied()))),
            targets().flat_map(with_eos).map(i64::from).collect(),
        ),
        // In language modelling, a segment without its last token is the input; without its first, it is the output.
        None => (
            PackedIds::from_rows(targets().map(|row| row[..row.len().saturating_sub(1)].iter().copied())),
            targets().flat_map(|row| row.iter().skip(1)).map(|&token| i64::from(token)).collect(),
        ),
    };
    let source = corpus.source.as_ref().map(|source| PackedIds::from_rows(rows_at(source, sentences).map(with_eos)));
    Batch { source, target_input, target_output, sentences: sentences.to_vec() }
}

/// Iterates over the rows of one side of a corpus that have the indices `sentences`.
fn rows_at<'a>(side: &'a [Vec<u32>], sentences: &'a [usize]) -> impl Iterator<Item = &'a [u32]> {
    sentences.iter().map(|&sentence| side[sentence].as_slice())
}

/// Iterates over the tokens of a row, then EOS.
fn with_eos(row: &[u32]) -> impl Iterator<Item = u32> + '_ {
    row.iter().copied().chain([EOS])
}

/// Applies word dropout: each token, EOS included, becomes UNK with probability `p`. Callers apply it to the source and
/// to the decoder's input, but not to the tokens to predict.
pub fn word_dropout(tokens: &mut [i64], p: f64, random: &mut Random) {
    for token in tokens {
        if random.chance(p) {
            *token = i64::from(UNK);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::vocabulary::BOS;

    /// Returns pairs of lengths from 2 to 41, EOS included, many of them equal. The factors are primes, so that
    /// the order looks random.
    fn lengths() -> Vec<(usize, usize)> {
        (0..1000).map(|i| (2 + i * 7919 % 23, 2 + i * 104_729 % 40)).collect()
    }

    /// Returns the length of a pair's longer side.
    fn longer_side((source, target): (usize, usize)) -> usize {
        source.max(target)
    }

    /// Returns three sentence pairs, without EOS. The second target is empty.
    fn corpus() -> Corpus {
        let target = vec![vec![20, 21], vec![], vec![22]];
        Corpus { source: Some(vec![vec![10], vec![11, 12, 13], vec![14, 15]]), target, start: BOS }
    }

    #[test]
    fn every_sentence_is_in_one_batch_of_allowed_cost() {
        let lengths = lengths();
        // Batches of at most 100 tokens, for seed 1 and epoch 0.
        let batches = plan(&lengths, 100, 1, 0);
        let mut all = batches.concat();
        all.sort_unstable();
        assert_eq!(all, (0..lengths.len()).collect::<Vec<_>>());
        let cost = |batch: &Vec<usize>| batch.len() * batch.iter().map(|&s| longer_side(lengths[s])).max().unwrap();
        assert!(batches.iter().all(|batch| cost(batch) <= 100), "{batches:?}");
        // The sentences of a batch have similar lengths, so padding costs less than 1 %.
        let real: usize = lengths.iter().map(|&pair| longer_side(pair)).sum();
        assert!(batches.iter().map(cost).sum::<usize>() < real * 101 / 100);
    }

    #[test]
    fn a_sentence_over_the_limit_is_alone_and_not_lost() {
        assert_eq!(plan(&[(9, 200)], 100, 1, 0), [[0]]);
        assert_eq!(plan(&[], 100, 1, 0), [[0; 0]; 0]);
    }

    #[test]
    fn seed_and_epoch_fix_the_order() {
        let lengths = lengths();
        let first = plan(&lengths, 100, 1, 0);
        assert_eq!(plan(&lengths, 100, 1, 0), first);
        for (seed, epoch) in [(2, 0), (1, 1)] {
            let other = plan(&lengths, 100, seed, epoch);
            assert_eq!(other.len(), first.len());
            let sorted = |mut batches: Vec<Vec<usize>>| {
                batches.iter_mut().for_each(|batch| batch.sort_unstable());
                batches.sort_unstable();
                batches
            };
            // Ties are broken differently in each epoch, so batches differ in content, not only in order.
            assert_ne!(sorted(other), sorted(first.clone()));
        }
        // These values must never change: a resumed run relies on the same order.
        let small: Vec<_> = (0..8).map(|i| (2 + i % 2, 2)).collect();
        assert_eq!(plan(&small, 6, 1, 2), [vec![4, 0, 2], vec![6, 3], vec![5], vec![7, 1]]);
    }

    #[test]
    fn translation_batches_are_packed_with_eos() {
        let batch = collate(&corpus(), &[2, 1, 0]);
        // Token 2 is EOS, token 0 is BOS.
        let source = batch.source.unwrap();
        assert_eq!(source.tokens, [14, 15, 2, 11, 12, 13, 2, 10, 2]);
        assert_eq!(source.positions, [0, 1, 2, 0, 1, 2, 3, 0, 1]);
        assert_eq!((source.offsets.as_slice(), source.longest, source.rows()), (&[0, 3, 7, 9][..], 4, 3));
        assert_eq!(batch.target_input.tokens, [0, 22, 0, 0, 20, 21]);
        assert_eq!(batch.target_input.offsets, [0, 2, 3, 6]);
        assert_eq!(batch.target_output, [22, 2, 2, 20, 21, 2]);
        assert_eq!(batch.sentences, [2, 1, 0]);
    }

    #[test]
    fn language_model_batches_are_shifted_by_one() {
        // The stream 10 11 12 EOS 13 EOS is cut into segments of four predicted tokens.
        let corpus = Corpus::language_model(&[vec![10, 11, 12], vec![13]], 4, 8).unwrap();
        let batch = collate(&corpus, &[1, 0]);
        assert_eq!(batch.source, None);
        assert_eq!(batch.target_input.tokens, [2, 13, 2, 10, 11, 12]);
        assert_eq!(batch.target_input.positions, [0, 1, 0, 1, 2, 3]);
        assert_eq!(batch.target_output, [13, 2, 10, 11, 12, 2]);
    }

    #[test]
    fn lengths_are_those_of_the_packed_rows() {
        let language_model = Corpus::language_model(&[vec![10, 11, 12], vec![13]], 4, 8).unwrap();
        for corpus in [corpus(), language_model] {
            for (sentence, &(source, target)) in corpus.lengths().iter().enumerate() {
                let batch = collate(&corpus, &[sentence]);
                assert_eq!(batch.source.map_or(0, |packed| packed.longest), source);
                assert_eq!((batch.target_input.longest, batch.target_output.len()), (target, target));
            }
        }
    }

    #[test]
    fn word_dropout_hits_all_tokens_alike() {
        let mut tokens = vec![i64::from(EOS); 10_000];
        word_dropout(&mut tokens, 0.1, &mut Random::new(1, 0, 0, Purpose::WordDropout));
        let hit = tokens.iter().filter(|&&token| token == i64::from(UNK)).count();
        // On average 1000 tokens become UNK, with a standard deviation of 30.
        assert!((880..1120).contains(&hit), "{hit}");
        assert!(tokens.iter().all(|&token| token == i64::from(UNK) || token == i64::from(EOS)));
    }
}
