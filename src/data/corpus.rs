//! Corpora: sentences of token ids, ready for batching.

use super::interrupt::Interrupt;
use super::vocabulary::{BOS, EOS};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// The treatment of sentences that are too long for a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LongSentences {
    /// Fails with an error that says how many sentences are too long.
    Refuse,
    /// Leaves the sentences out.
    Skip,
}

/// The maximum length of a sentence in tokens, EOS included, and the option that sets it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit {
    pub tokens: usize,
    /// The object that limits the length, as error messages call it.
    pub what: &'static str,
    /// The command-line flag that changes the limit.
    pub flag: &'static str,
}

impl Limit {
    /// Returns the limit for sentences that must fit into a batch.
    pub fn batch(max_tokens: usize) -> Self {
        Limit { tokens: max_tokens, what: "a batch", flag: "--max-tokens" }
    }

    /// Returns the tighter of two limits; `None` is no limit.
    pub fn and(self, other: Option<Limit>) -> Self {
        other.filter(|other| other.tokens < self.tokens).unwrap_or(self)
    }
}

/// Sentence pairs, or in language modelling the segments of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Corpus {
    /// Source sentences without EOS; `None` in language modelling.
    pub source: Option<Vec<Vec<u32>>>,
    /// Target sentences without EOS, or in language modelling the segments that [`stream`] returns.
    pub target: Vec<Vec<u32>>,
    /// The first token of the decoder's input; unused for language modelling.
    pub start: u32,
}

impl Corpus {
    /// Returns the corpus with `token` instead of BOS as the first token of the decoder's input.
    pub fn starting_with(self, token: i64) -> Self {
        Corpus { start: token as u32, ..self }
    }

    /// Builds a corpus of sentence pairs. Also returns a flag for each pair, which is false if the pair was left out
    /// because it is too long.
    ///
    /// A pair is too long if its source or its target, with EOS, exceeds the limit.
    pub fn parallel(
        mut source: Vec<Vec<u32>>,
        mut target: Vec<Vec<u32>>,
        limit: Limit,
        long: LongSentences,
    ) -> Result<(Self, Vec<bool>)> {
        if source.len() != target.len() {
            return Err(Error::invalid(format!(
                "{} source and {} target sentences; expected as many of one as of the other",
                source.len(),
                target.len()
            )));
        }
        // The length of each pair's longer side, with EOS.
        let longer_sides: Vec<usize> =
            source.iter().zip(&target).map(|(source, target)| source.len().max(target.len()) + 1).collect();
        let fits: Vec<bool> = longer_sides.iter().map(|&side| side <= limit.tokens).collect();
        let too_long = fits.iter().filter(|fits| !**fits).count();
        if too_long > 0 && long == LongSentences::Refuse {
            let Limit { tokens, what, flag } = limit;
            return Err(Error::invalid(format!(
                "{too_long} of {} sentences are longer than {what} of {flag} {tokens} (the longest has {} tokens with the \
                 end of sentence); raise {flag}, or leave them out with --skip-long",
                longer_sides.len(),
                longer_sides.iter().max().unwrap_or(&0),
            )));
        }
        if too_long > 0 {
            retain(&mut source, &fits);
            retain(&mut target, &fits);
        }
        Ok((Self { source: Some(source), target, start: BOS }, fits))
    }

    /// Builds a corpus for language modelling. The sentences, each followed by EOS, form one stream, which is cut
    /// into segments. Errors unless `segment_length` is from 1 to `max_tokens`, the size of a batch.
    pub fn language_model(sentences: &[Vec<u32>], segment_length: usize, max_tokens: usize) -> Result<Self> {
        if segment_length == 0 || segment_length > max_tokens {
            return Err(Error::invalid(format!(
                "segments of {segment_length} tokens; expected 1 to --max-tokens {max_tokens}: change one of them"
            )));
        }
        let tokens: Vec<u32> = sentences.iter().flat_map(|sentence| sentence.iter().copied().chain([EOS])).collect();
        Ok(Self { source: None, target: stream(&tokens, segment_length), start: BOS })
    }

    /// Iterates over every token that a model has to predict.
    pub fn predicted(&self) -> impl Iterator<Item = u32> + '_ {
        // In language modelling, the first token of a segment is the last one of the segment before, so it is not
        // predicted again, and EOS is already part of the segments.
        let (skipped, appended) = if self.source.is_some() { (0, Some(EOS)) } else { (1, None) };
        self.target.iter().flat_map(move |row| row.iter().copied().skip(skipped).chain(appended))
    }

    /// Returns the checksum of the sentences; see [`digest`].
    pub fn digest(&self, check_interrupt: Interrupt) -> Result<u32> {
        digest(self.source.iter().flatten().chain(&self.target), check_interrupt)
    }

    /// Returns the number of sentence pairs or segments.
    pub fn len(&self) -> usize {
        self.target.len()
    }

    pub fn is_empty(&self) -> bool {
        self.target.is_empty()
    }

    /// Returns each sentence's number of positions in the model (source, target), EOS included; the source's is 0 in
    /// language modelling.
    pub fn lengths(&self) -> Vec<(usize, usize)> {
        match &self.source {
            Some(source) => {
                source.iter().zip(&self.target).map(|(source, target)| (source.len() + 1, target.len() + 1)).collect()
            }
            // Every token of a segment except its first is predicted.
            None => self.target.iter().map(|segment| (0, segment.len().saturating_sub(1))).collect(),
        }
    }
}

/// Cuts a stream of tokens into segments of `segment_length` predicted tokens (the last one may be shorter).
///
/// Each segment x₀ x₁ … x_T begins with the token before it in the stream, or with EOS at the start. x₀ … x_{T−1} is
/// the model's input and x₁ … x_T are its targets. So every token of the stream is predicted exactly once, with the
/// token that really comes before it as the last input.
pub fn stream(tokens: &[u32], segment_length: usize) -> Vec<Vec<u32>> {
    let mut before = EOS;
    let mut segments = Vec::with_capacity(tokens.len().div_ceil(segment_length.max(1)));
    for segment in tokens.chunks(segment_length.max(1)) {
        segments.push([&[before], segment].concat());
        before = segment.last().copied().unwrap_or(before);
    }
    segments
}

/// Checksums of a run's training text and validation set. When a run resumes, its place in the epoch is only valid for
/// the same `train`, and its best score only for the same `valid`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Digests {
    pub train: u32,
    pub valid: u32,
}

/// Returns the CRC-32 of the sentences' ids in order, with EOS after each. `check_interrupt` runs before each sentence.
pub fn digest<'a>(sentences: impl IntoIterator<Item = &'a Vec<u32>>, check_interrupt: Interrupt) -> Result<u32> {
    let mut crc = flate2::Crc::new();
    let mut bytes = Vec::new();
    for row in sentences {
        check_interrupt()?;
        bytes.clear();
        bytes.extend(row.iter().chain([&EOS]).flat_map(|id| id.to_le_bytes()));
        crc.update(&bytes);
    }
    Ok(crc.sum())
}

/// Keeps the items whose flag is true; `flags` has one flag for each item.
pub fn retain<T>(items: &mut Vec<T>, flags: &[bool]) {
    let mut flags = flags.iter();
    items.retain(|_| flags.next().is_some_and(|&flag| flag));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns sentences of these lengths, without EOS.
    fn sentences(lengths: &[usize]) -> Vec<Vec<u32>> {
        lengths.iter().map(|&length| (10..).take(length).collect()).collect()
    }

    #[test]
    fn long_sentences_are_refused_with_count_and_longest() {
        let (source, target) = (sentences(&[3, 9, 4, 2]), sentences(&[3, 4, 4, 12]));
        let limit = Limit::batch(5);
        let message = Corpus::parallel(source, target, limit, LongSentences::Refuse).unwrap_err().to_string();
        assert!(message.contains("2 of 4 sentences") && message.contains("the longest has 13"), "{message}");
        assert!(message.contains("--skip-long"), "{message}");
        let positions = Limit { tokens: 4, what: "a table", flag: "--max-positions" };
        assert_eq!([limit.and(Some(positions)), limit.and(None)], [positions, limit]);
        assert_eq!(limit.and(Some(Limit { tokens: 6, ..positions })), limit);
    }

    #[test]
    fn long_sentences_are_left_out_in_pairs_if_asked() {
        let (source, target) = (sentences(&[9, 3, 2, 4]), sentences(&[4, 1, 12, 4]));
        let (corpus, fits) = Corpus::parallel(source, target, Limit::batch(5), LongSentences::Skip).unwrap();
        assert_eq!((corpus.lengths(), fits), (vec![(4, 2), (5, 5)], vec![false, true, false, true]));
        let (corpus, fits) =
            Corpus::parallel(sentences(&[4]), sentences(&[0]), Limit::batch(5), LongSentences::Refuse).unwrap();
        assert_eq!((corpus.lengths(), fits), (vec![(5, 1)], vec![true]));
    }

    #[test]
    fn the_digest_depends_on_order_and_sentence_ends() {
        let digest = |rows: &[&[u32]]| {
            let rows: Vec<Vec<u32>> = rows.iter().map(|row| row.to_vec()).collect();
            super::digest(&rows, &mut || Ok(())).unwrap()
        };
        let texts: [&[&[u32]]; 4] = [&[&[7, 8], &[9]], &[&[9], &[7, 8]], &[&[7], &[8, 9]], &[&[7, 8], &[9], &[]]];
        let digests: std::collections::HashSet<u32> = texts.iter().map(|rows| digest(rows)).collect();
        assert_eq!(digests.len(), 4);
        assert_eq!(digest(texts[0]), digest(texts[0]));
    }

    #[test]
    fn sides_must_match() {
        let limit = Limit::batch(5);
        let message =
            Corpus::parallel(sentences(&[1, 1]), sentences(&[1]), limit, LongSentences::Skip).unwrap_err().to_string();
        assert!(message.contains("2 source and 1 target"), "{message}");
    }

    #[test]
    fn a_stream_predicts_each_token_once_from_its_predecessor() {
        let corpus = Corpus::language_model(&[vec![10, 11, 12], vec![], vec![13]], 3, 3).unwrap();
        // The stream is 10 11 12 EOS EOS 13 EOS.
        assert_eq!(corpus.target, [vec![EOS, 10, 11, 12], vec![12, EOS, EOS, 13], vec![13, EOS]]);
        assert_eq!(corpus.lengths(), [(0, 3), (0, 3), (0, 1)]);
        assert_eq!(corpus.predicted().collect::<Vec<_>>(), [10, 11, 12, EOS, EOS, 13, EOS]);
        for length in [0, 4] {
            assert!(Corpus::language_model(&[], length, 3)
                .unwrap_err()
                .to_string()
                .contains("expected 1 to --max-tokens 3"));
        }
    }
}
