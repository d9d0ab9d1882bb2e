//! An endless stream of batches, epoch after epoch, which can begin at any batch. A thread builds batches in advance.

use std::sync::mpsc::{sync_channel, Receiver};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use serde::{Deserialize, Serialize};

use super::batches::{collate, plan, word_dropout, Batch};
use super::corpus::Corpus;
use super::random::{Purpose, Random};
use crate::error::{Error, Result};

/// The number of batches built in advance. Four bridge the time of one slow batch and need little memory.
const BUILT_AHEAD: usize = 4;

/// A place in the data: the next batch has index `index` in epoch `epoch`, both counted from 0. After an epoch's last
/// batch, the cursor is at index 0 of the next epoch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    pub epoch: u64,
    pub index: u64,
}

/// The settings that determine the batches, for a given corpus.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StreamConfig {
    /// The maximum cost of a batch: its number of sentences × the length of its longest side.
    pub max_tokens: usize,
    /// The seed of the order of batches, and of word dropout.
    pub seed: u64,
    /// The probability that an input token becomes UNK.
    pub word_dropout: f64,
}

/// An endless stream of the batches of a corpus. Each batch comes with the cursor of the place *after* the batch, from
/// which a run resumes. The same corpus, configuration and cursor always produce the same batches.
#[derive(Debug)]
pub struct BatchStream {
    corpus: Arc<Corpus>,
    /// The (source, target) length of each sentence, EOS included.
    lengths: Vec<(usize, usize)>,
    config: StreamConfig,
    cursor: Cursor,
    /// The batches of epoch `cursor.epoch`, as lists of sentence indices.
    plan: Vec<Vec<usize>>,
}

impl BatchStream {
    /// Starts at `cursor`. `Cursor::default()` is the beginning of the first epoch.
    ///
    /// Errors if the corpus is empty, if a sentence is longer than `max_tokens`, or if the probability is not in 0 ≤
    /// p < 1. Also errors if the cursor is behind the last batch of its epoch. Then the cursor was saved with other
    /// data or another `max_tokens`, and the run cannot continue unchanged.
    pub fn new(corpus: Arc<Corpus>, config: StreamConfig, cursor: Cursor) -> Result<Self> {
        let lengths = corpus.lengths();
        let Some(longest) = lengths.iter().map(|&(source, target)| source.max(target)).max() else {
            return Err(Error::invalid("the corpus has no sentences; expected at least one to make batches of"));
        };
        if longest > config.max_tokens {
            return Err(Error::invalid(format!(
                "a sentence of {longest} tokens does not fit in a batch of --max-tokens {}; raise it, or leave such \
                 sentences out with --skip-long",
                config.max_tokens
            )));
        }
        if !(0.0..1.0).contains(&config.word_dropout) {
            return Err(Error::invalid(format!(
                "word dropout {}; expected a probability p with 0 <= p < 1",
                config.word_dropout
            )));
        }
        let plan = plan(&lengths, config.max_tokens, config.seed, cursor.epoch);
        if cursor.index >= plan.len() as u64 {
            return Err(Error::invalid(format!(
                "the run to resume stopped before batch {} of an epoch, and the epoch has {} batches; expected the \
                 data and --max-tokens with which the run began",
                cursor.index,
                plan.len()
            )));
        }
        Ok(Self { corpus, lengths, config, cursor, plan })
    }

    /// Moves the cursor within its epoch to the first batch with at least `share` of the sentences before it, or to the
    /// last batch.
    pub fn behind(mut self, share: f64) -> Self {
        let least_seen = (share.clamp(0.0, 1.0) * self.corpus.len() as f64).round() as usize;
        let mut seen = 0;
        let index = self.plan.iter().position(|batch| {
            let is_behind = seen >= least_seen;
            seen += batch.len();
            is_behind
        });
        // If no batch has enough sentences before it, the cursor goes to the last one. The epoch must not be over yet,
        // because the evaluation at its end follows an update.
        self.cursor.index = index.unwrap_or(self.plan.len() - 1) as u64;
        self
    }

    /// Returns the number of this epoch's sentences before the cursor.
    pub fn seen(&self) -> usize {
        self.plan[..self.cursor.index as usize].iter().map(Vec::len).sum()
    }

    /// Returns the place of the next batch.
    pub fn cursor(&self) -> Cursor {
        self.cursor
    }

    /// Moves the cursor to the beginning of an epoch, and plans the batches of that epoch.
    fn begin_epoch(&mut self, epoch: u64) {
        self.cursor = Cursor { epoch, index: 0 };
        self.plan = plan(&self.lengths, self.config.max_tokens, self.config.seed, epoch);
    }

    /// Returns the number of batches in an epoch; all epochs have the same number.
    pub fn batches_per_epoch(&self) -> usize {
        self.plan.len()
    }

    /// Builds the next batch and advances the cursor past it.
    pub fn next_batch(&mut self) -> (Batch, Cursor) {
        let Cursor { epoch, index } = self.cursor;
        let mut batch = collate(&self.corpus, &self.plan[index as usize]);
        if self.config.word_dropout > 0.0 {
            let mut random = Random::new(self.config.seed, epoch, index, Purpose::WordDropout);
            for input in batch.source.iter_mut().chain([&mut batch.target_input]) {
                word_dropout(&mut input.tokens, self.config.word_dropout, &mut random);
            }
        }
        self.cursor.index += 1;
        if self.cursor.index == self.plan.len() as u64 {
            self.begin_epoch(epoch + 1);
        }
        (batch, self.cursor)
    }
}

impl Iterator for BatchStream {
    type Item = (Batch, Cursor);

    /// Returns the next batch; never `None`.
    fn next(&mut self) -> Option<Self::Item> {
        Some(self.next_batch())
    }
}

/// A [`BatchStream`] whose batches are built in advance by a thread. Dropping the `Prefetch` ends the thread.
#[derive(Debug)]
pub struct Prefetch {
    /// The receiving end of the channel; `None` only while the `Prefetch` is being dropped.
    batches: Option<Receiver<(Batch, Cursor)>>,
    /// The thread that builds batches; `None` once it has been joined.
    builder: Option<JoinHandle<()>>,
}

impl Prefetch {
    /// Starts the thread that builds batches.
    pub fn new(stream: BatchStream) -> Result<Self> {
        let (sender, batches) = sync_channel(BUILT_AHEAD);
        let build = move || {
            for batch in stream {
                // The receiver has been dropped, so no more batches are needed.
                if sender.send(batch).is_err() {
                    break;
                }
            }
        };
        let builder = thread::Builder::new().name("batches".to_owned()).spawn(build);
        let builder = builder.map_err(|error| Error::io("start", "the thread that builds batches", error))?;
        Ok(Self { batches: Some(batches), builder: Some(builder) })
    }
}

impl Iterator for Prefetch {
    type Item = (Batch, Cursor);

    /// Waits for the next batch. Never returns `None`, because the thread builds batches until the receiver is dropped,
    /// unless it panics. Its panic is resumed here, since a `None` would look like the end of the data.
    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.batches.as_ref()?.recv().ok();
        if batch.is_none() {
            if let Some(Err(panic)) = self.builder.take().map(JoinHandle::join) {
                std::panic::resume_unwind(panic);
            }
        }
        batch
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        // The receiver is dropped first, which wakes the thread if it waits for room in the channel. A panic of the
        // thread no longer matters.
        drop(self.batches.take());
        if let Some(builder) = self.builder.take() {
            let _ = builder.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: StreamConfig = StreamConfig { max_tokens: 40, seed: 3, word_dropout: 0.1 };

    /// Returns 60 sentence pairs with 1 to 11 tokens on each side.
    fn corpus() -> Arc<Corpus> {
        let side = |step: usize| (0..60).map(|i| (10..).take(1 + i * step % 11).collect()).collect();
        Arc::new(Corpus { source: Some(side(7)), target: side(5), start: 0 })
    }

    /// Returns the stream of `corpus` from this cursor.
    fn stream(cursor: Cursor) -> BatchStream {
        BatchStream::new(corpus(), CONFIG, cursor).unwrap()
    }

    #[test]
    fn any_cursor_resumes_with_the_same_batches() {
        let per_epoch = stream(Cursor::default()).batches_per_epoch();
        let all: Vec<_> = stream(Cursor::default()).take(3 * per_epoch).collect();
        for (place, (_, after)) in all.iter().enumerate() {
            let (epoch, index) = ((place + 1) / per_epoch, (place + 1) % per_epoch);
            assert_eq!(*after, Cursor { epoch: epoch as u64, index: index as u64 });
            let rest: Vec<_> = stream(*after).take(all.len() - place - 1).collect();
            assert_eq!(rest, all[place + 1..]);
        }
        let sentences = |epoch: usize| {
            let batches = &all[epoch * per_epoch..(epoch + 1) * per_epoch];
            batches.iter().flat_map(|(batch, _)| batch.sentences.clone()).collect::<Vec<_>>()
        };
        assert_ne!(sentences(0), sentences(1));
        let mut second = sentences(1);
        second.sort_unstable();
        assert_eq!(second, (0..60).collect::<Vec<_>>());
    }

    /// The share of sentences before the cursor is the same for all old and new batch sizes.
    #[test]
    fn another_batch_size_keeps_the_share_of_sentences() {
        for (before, now) in [(40, 12), (12, 40), (40, 40), (300, 12)] {
            let stream_of =
                |max_tokens, cursor| BatchStream::new(corpus(), StreamConfig { max_tokens, ..CONFIG }, cursor).unwrap();
            for index in 0..stream_of(before, Cursor { epoch: 2, index: 0 }).batches_per_epoch() as u64 {
                // `left` is where the run stopped, `found` where it goes on. The corpus has 60 sentences.
                let left = stream_of(before, Cursor { epoch: 2, index });
                let found = stream_of(now, Cursor { epoch: 2, index: 0 }).behind(left.seen() as f64 / 60.0);
                let largest = stream_of(now, Cursor::default()).plan.iter().map(Vec::len).max().unwrap();
                let seen = found.seen();
                let is_last = found.cursor().index as usize + 1 == found.batches_per_epoch();
                assert!(found.cursor().epoch == 2 && seen < left.seen() + largest, "{before} {now} {index}: {seen}");
                assert!(seen >= left.seen() || is_last, "{before} {now} {index}: {seen}");
                assert!(before != now || found.cursor() == left.cursor());
            }
        }
        let whole = stream(Cursor { epoch: 1, index: 0 }).behind(1.0);
        let last = whole.batches_per_epoch() as u64 - 1;
        assert_eq!(whole.cursor(), Cursor { epoch: 1, index: last });
    }

    #[test]
    fn word_dropout_does_not_change_the_tokens_to_predict() {
        let plain = StreamConfig { word_dropout: 0.0, ..CONFIG };
        let plain = BatchStream::new(corpus(), plain, Cursor::default()).unwrap();
        let changed =
            |left: &[i64], right: &[i64]| left.iter().zip(right).filter(|(left, right)| left != right).count();
        let (mut source, mut input) = (0, 0);
        for ((dropped, _), (plain, _)) in stream(Cursor::default()).zip(plain).take(30) {
            assert_eq!(dropped.target_output, plain.target_output);
            source += changed(&dropped.source.unwrap().tokens, &plain.source.unwrap().tokens);
            input += changed(&dropped.target_input.tokens, &plain.target_input.tokens);
        }
        assert!(source > 0 && input > 0);
    }

    #[test]
    fn prefetching_changes_nothing_and_ends_on_drop() {
        let corpus = corpus();
        let stream = || BatchStream::new(corpus.clone(), CONFIG, Cursor::default()).unwrap();
        let ahead = Prefetch::new(stream()).unwrap();
        assert!(ahead.take(50).eq(stream().take(50)));
        // Streams are dropped at three times: at once, while the thread builds, and while it waits for room. Each
        // time the thread must end and release the corpus.
        drop(Prefetch::new(stream()).unwrap());
        let waiting = Prefetch::new(stream()).unwrap();
        thread::sleep(std::time::Duration::from_millis(50));
        drop(waiting);
        assert_eq!(Arc::strong_count(&corpus), 1);
    }

    #[test]
    fn a_panic_of_the_builder_reaches_the_reader() {
        let mut broken = stream(Cursor::default());
        broken.plan[2] = vec![usize::MAX];
        let mut ahead = Prefetch::new(broken).unwrap();
        assert!(ahead.next().is_some() && ahead.next().is_some());
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| ahead.next()));
        assert!(caught.is_err());
    }

    #[test]
    fn bad_configurations_are_refused() {
        let message = |corpus: Corpus, config, cursor| {
            BatchStream::new(Arc::new(corpus), config, cursor).unwrap_err().to_string()
        };
        let full = || Corpus::clone(&corpus());
        let empty = Corpus { source: None, target: vec![], start: 0 };
        assert!(message(empty, CONFIG, Cursor::default()).contains("no sentences"));
        let short = StreamConfig { max_tokens: 11, ..CONFIG };
        assert!(message(full(), short, Cursor::default()).contains("a sentence of 12 tokens"));
        let certain = StreamConfig { word_dropout: 1.0, ..CONFIG };
        assert!(message(full(), certain, Cursor::default()).contains("0 <= p < 1"));
        let past = Cursor { epoch: 1, index: 500 };
        assert!(message(full(), CONFIG, past).contains("before batch 500"));
    }

    #[test]
    fn a_cursor_keeps_its_names_in_checkpoints() {
        let json = serde_json::to_string(&Cursor { epoch: 3, index: 14 }).unwrap();
        assert_eq!(json, r#"{"epoch":3,"index":14}"#);
    }
}
