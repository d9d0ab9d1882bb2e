//! Translation of batches by several threads. Each thread takes one batch after the other, and uses one libtorch
//! thread.
//!
//! A decoding step consists of many short operations. If threads share each operation, they wait for each other after
//! each one; threads with their own batches do not wait.

use crate::cpu::parallel;
use crate::error::{Error, Result};
use crate::model::Transformer;
use crate::search::{Hypothesis, Search};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{channel, RecvTimeoutError};
use std::thread;
use std::time::Duration;
use tch::Tensor;

/// The maximum time between two calls of `check_interrupt`.
const PATIENCE: Duration = Duration::from_millis(50);

/// Returns batches, as lists of sentence indices, of at most `batch_tokens` padded tokens, EOS included, or of one
/// longer sentence. The sentences of a batch have similar lengths, and the longest come first. For several threads,
/// batches become smaller towards the end, so that the thread that finishes first does not wait long for the others:
/// each batch has at most two thirds of a thread's share of the remaining tokens, or [`LEAST`] tokens.
pub fn source_batches(source: &[Vec<u32>], batch_tokens: usize, threads: usize) -> Vec<Vec<usize>> {
    let tokens = |&sentence: &usize| source[sentence].len() + 1;
    let mut sentences: Vec<usize> = (0..source.len()).collect();
    sentences.sort_by_key(|sentence| std::cmp::Reverse(tokens(sentence)));
    // `left` counts the tokens of the sentences in `rest`.
    let mut left: usize = sentences.iter().map(tokens).sum();
    let mut batches = Vec::new();
    let mut rest = &sentences[..];
    while let Some(longest) = rest.first().map(tokens) {
        let share = if threads <= 1 { left } else { (2 * left / (3 * threads)).max(LEAST) };
        // Every sentence of the batch is padded to the longest one.
        let sentences_in_batch = (batch_tokens.min(share) / longest).clamp(1, rest.len());
        let (batch, others) = rest.split_at(sentences_in_batch);
        left -= batch.iter().map(tokens).sum::<usize>();
        batches.push(batch.to_vec());
        rest = others;
    }
    batches
}

/// The number of tokens below which batches do not become smaller: with so few rows, the time of a step hardly
/// depends on their number.
const LEAST: usize = 384;

/// Translates the batch with the given number, and returns each sentence's hypotheses. The function calls its last
/// argument at each step, to check for interrupts.
type TranslateBatch<'a> =
    dyn Fn(&Transformer, &Search, usize, &mut dyn FnMut() -> Result<()>) -> Result<Vec<Vec<Hypothesis>>> + Sync + 'a;

/// Calls `run` for each of the batches 0 to `batches` − 1, on `threads` threads. Passes the number and the result of
/// each batch to `take`, in any order. Stops at the first error of a batch or of `check_interrupt`, which is called
/// often.
pub fn in_parallel(
    model: &Transformer,
    search: &Search,
    threads: usize,
    batches: usize,
    run: &TranslateBatch,
    take: &mut dyn FnMut(usize, Vec<Vec<Hypothesis>>),
    check_interrupt: &mut dyn FnMut() -> Result<()>,
) -> Result<()> {
    // Each thread builds its own model over these tensors, which share the memory of the parameters and buffers.
    let tensors = || -> BTreeMap<String, Tensor> {
        let named = model.parameters.iter().chain(model.parameters.buffers());
        named.map(|(name, t)| (name.to_string(), t.shallow_clone())).collect()
    };
    // `next` is the number of the batch that the next free thread takes.
    let (next, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let _restores_threads = ThreadsAsBefore(parallel::threads());
    thread::scope(|scope| {
        let (results, received) = channel();
        for _ in 0..threads {
            let (tensors, search, results) = (tensors(), search.share(), results.clone());
            let (next, is_over, config) = (&next, &is_over, &model.config);
            scope.spawn(move || {
                tch::set_num_threads(1);
                let work = || -> Result<()> {
                    let model = Transformer::with_parameters(config, &tensors)?;
                    let mut check_running = || match is_over.load(Ordering::Relaxed) {
                        true => Err(Error::Interrupted("the other threads have ended".into())),
                        false => Ok(()),
                    };
                    while check_running().is_ok() {
                        let batch = next.fetch_add(1, Ordering::Relaxed);
                        if batch >= batches {
                            break;
                        }
                        // Sending cannot fail, because the receiver lives longer than all senders.
                        let _ = results.send(Ok((batch, run(&model, &search, batch, &mut check_running)?)));
                    }
                    Ok(())
                };
                if let Err(e) = work() {
                    let _ = results.send(Err(e));
                }
            });
        }
        // Now only threads hold senders, so the channel closes when the last thread ends.
        drop(results);
        let mut collect_results = || -> Result<()> {
            // The number of batches that are translated.
            let mut done = 0;
            loop {
                match received.recv_timeout(PATIENCE) {
                    Ok(result) => {
                        let (batch, hypotheses) = result?;
                        take(batch, hypotheses);
                        done += 1;
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) if done == batches => return Ok(()),
                    Err(RecvTimeoutError::Disconnected) => {
                        return Err(Error::Torch("a thread ended before its translations were made".to_string()))
                    }
                }
                check_interrupt()?;
            }
        };
        let result = collect_results();
        // After an error, this stops the threads that still work.
        is_over.store(true, Ordering::Relaxed);
        result
    })
}

/// Restores libtorch's number of threads, its field, when dropped: new threads would inherit the number that was set
/// last.
struct ThreadsAsBefore(usize);

impl Drop for ThreadsAsBefore {
    /// Sets libtorch's number of threads to the one before.
    fn drop(&mut self) {
        tch::set_num_threads(self.0 as i32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{SearchRule, TransformerConfig};
    use crate::model::{Packed, EOS};
    use crate::search::SearchConfig;
    use tch::{Device, Kind};

    #[test]
    fn batches_have_like_lengths_and_become_smaller() {
        let source: Vec<Vec<u32>> = (0..1000).map(|i| vec![7; 3 + i * 7919 % 23]).collect();
        for (tokens, threads) in [(8192, 2), (100_000, 2), (8192, 1), (500, 4)] {
            let batches = source_batches(&source, tokens, threads);
            let mut all = batches.concat();
            all.sort_unstable();
            assert_eq!(all, (0..1000).collect::<Vec<_>>());
            let longest = |batch: &Vec<usize>| batch.iter().map(|&i| source[i].len() + 1).max().unwrap();
            assert!(batches.iter().all(|batch| batch.len() * longest(batch) <= tokens), "{tokens} {threads}");
            assert!(batches.iter().map(longest).is_sorted_by(|a, b| a >= b));
            let mut left = source.iter().map(|row| row.len() + 1).sum::<usize>();
            for batch in batches.iter().filter(|_| threads > 1) {
                let size = batch.iter().map(|&i| source[i].len() + 1).sum::<usize>();
                assert!(size <= LEAST.max(2 * left / (3 * threads)), "{size} of {left} for {threads}");
                left -= size;
            }
        }
        assert!(source_batches(&[], 8192, 2).is_empty());
        assert_eq!(source_batches(&[vec![7; 30], vec![7; 20]], 8, 2), [[0], [1]]);
        assert_eq!(source_batches(&[vec![7; 30], vec![7; 20]], 8192, 2).len(), 1);
    }

    /// Builds a small translation model whose parameters all have random values.
    fn model() -> Transformer {
        let config = TransformerConfig {
            vocab_size: 30,
            d_model: 16,
            d_ff: 24,
            heads: 2,
            encoder_layers: 1,
            decoder_layers: 2,
            ..Default::default()
        };
        tch::manual_seed(4);
        let model = Transformer::new(&config, 4, Device::Cpu, Kind::Double).unwrap();
        for tensor in model.parameters.tensors() {
            let _ = tch::no_grad(|| tensor.shallow_clone().f_add_(&(tensor.randn_like() * 0.3)).unwrap());
        }
        model
    }

    /// Builds a batch of three sentences with four tokens each.
    fn batch(number: usize) -> Packed {
        let sentence = |i: usize| [4, 5 + (number % 20) as i64, 6 + i as i64, EOS];
        Packed::of(&[&sentence(0), &sentence(1), &sentence(2)]).unwrap()
    }

    #[test]
    fn threads_translate_as_one_does() {
        let (model, threads) = (model(), parallel::threads());
        for beam in [1, 5] {
            let config = SearchConfig { beam, max_length: Some(12), ..SearchConfig::new(SearchRule::Fairseq) };
            let search = Search::new(&model, None, &config, Kind::Double).unwrap();
            let mut found = vec![None; 40];
            let run = |model: &Transformer,
                       search: &Search,
                       number: usize,
                       check_interrupt: &mut dyn FnMut() -> Result<()>| {
                search.run(model, &batch(number), check_interrupt)
            };
            let mut take = |number: usize, all| assert!(found[number].replace(all).is_none());
            in_parallel(&model, &search, 3, 40, &run, &mut take, &mut || Ok(())).unwrap();
            for (number, found) in found.into_iter().enumerate() {
                assert_eq!(found, Some(search.run(&model, &batch(number), &mut || Ok(())).unwrap()), "batch {number}");
            }
            assert_eq!(parallel::threads(), threads);
        }
    }

    #[test]
    fn what_fails_in_a_thread_or_between_ends_it() {
        let model = model();
        let search = Search::new(&model, None, &SearchConfig::default(), Kind::Double).unwrap();
        type Interrupt<'a> = &'a mut dyn FnMut() -> Result<()>;
        let fails = |_: &Transformer, _: &Search, number: usize, _: Interrupt| match number {
            3 => Err(Error::invalid("the fourth batch")),
            _ => Ok(vec![]),
        };
        let mut take = |_: usize, _: Vec<Vec<Hypothesis>>| {};
        let e = in_parallel(&model, &search, 2, 9, &fails, &mut take, &mut || Ok(())).unwrap_err();
        assert_eq!(e.to_string(), "the fourth batch");
        let made = AtomicUsize::new(0);
        let slow = |_: &Transformer, _: &Search, _: usize, _: Interrupt| {
            made.fetch_add(1, Ordering::Relaxed);
            thread::sleep(Duration::from_millis(5));
            Ok(vec![])
        };
        let mut stop = || Err(Error::Interrupted("enough".to_string()));
        let e = in_parallel(&model, &search, 2, 1000, &slow, &mut take, &mut stop).unwrap_err();
        assert_eq!((e.to_string().as_str(), made.load(Ordering::Relaxed) < 100), ("enough", true));
        // This search never ends by itself, so the error must end it at its next step.
        let endless = |_: &Transformer, _: &Search, _: usize, check_interrupt: Interrupt| loop {
            check_interrupt()?;
            thread::sleep(Duration::from_millis(1));
        };
        let e = in_parallel(&model, &search, 2, 2, &endless, &mut take, &mut stop).unwrap_err();
        assert_eq!(e.to_string(), "enough");
    }
}
