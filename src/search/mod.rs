//! Greedy and beam search (docs/spec.md §4.12).
//!
//! A hypothesis y is ranked by
//!
//! ```text
//! score(y) = Σ log p(y_t | y_<t, x) / lp(len),   len = generated tokens, EOS included
//! ```
//!
//! by one of two rules.
//!
//! `google` (Wu et al. 2016, eq 14; Nguyen and Salazar 2019): lp = ((5 + len)/6)^α. Finished hypotheses stay in the
//! beam and compete with their final score. The search ends when all are finished, or when len = source tokens + 50.
//!
//! `fairseq`: lp = len^α. Each step considers the 2·beam most probable continuations. Those among the first `beam` that
//! end with EOS are final, and the best `beam` that do not end stay in the beam. The search ends when `beam` hypotheses
//! are final, and each final hypothesis ends with EOS.
//!
//! Under both rules the first token is not EOS, and PAD and BOS are never generated. On ties, the continuation of the
//! better hypothesis comes first, then the lower id.
//!
//! Each live hypothesis occupies one slot of the key/value cache. All sentences advance together, one token per step.
//! A finished sentence frees its slots, so the cost of a step depends on the number of live hypotheses. A further token
//! never makes a hypothesis more probable. So a hypothesis is not continued if `beam` continuations of better
//! hypotheses are already more probable than the hypothesis itself.

mod beam;
mod continuation;
mod generate;
mod length;
mod output;
mod sampling;
#[cfg(test)]
mod tests;

use crate::config::{SearchOptions, SearchRule};
use crate::cpu::memory;
use crate::error::{Error, Result};
use crate::model::{Context, Packed, PreparedWeights, Reads, StackCache, Transformer};
use beam::Beam;
use continuation::{Continuation, Eos, TargetVocabulary};
pub use generate::{generate, GenerationConfig, Prompt};
use output::OutputLayer;
use std::ops::Range;
use std::sync::Arc;
use tch::{Kind, Tensor};

/// The settings of a search. [`SearchConfig::new`] returns each rule's usual settings.
#[derive(Clone, Debug, PartialEq)]
pub struct SearchConfig {
    /// The number of live hypotheses; 1 is greedy search.
    pub beam: usize,
    pub rule: SearchRule,
    /// The exponent of the length penalty. A larger one leads to longer translations.
    pub alpha: f64,
    /// The number of hypotheses that are returned for each sentence, at most `beam`.
    pub n_best: usize,
    /// The maximum number of generated tokens. `None` means the source's length + 50 under google's rule, which counts
    /// EOS, or 200 under fairseq's, which does not.
    pub max_length: Option<usize>,
    /// The maximum number of tokens, EOS included, that the model can produce, even if `max_length` is larger.
    /// [`Search::new`] sets it.
    pub longest: Option<usize>,
}

impl SearchConfig {
    /// Returns the usual settings of a rule: beam 4 and α 0.6 for google (Nguyen and Salazar 2019), beam 5 and α 1
    /// for fairseq (its `--lenpen`).
    pub fn new(rule: SearchRule) -> Self {
        let beam = match rule {
            SearchRule::Google => 4,
            SearchRule::Fairseq => 5,
        };
        SearchConfig { beam, rule, alpha: rule.alpha(), n_best: 1, max_length: None, longest: None }
    }

    /// Builds the settings from options.
    pub fn of(options: &SearchOptions) -> Result<Self> {
        // Converts the option `name`, which must not be negative.
        let size = |name: &str, n: i64| {
            usize::try_from(n).map_err(|_| Error::invalid(format!("{name} must be at least 1, got {n}")))
        };
        let config = SearchConfig {
            beam: size("beam", options.beam)?,
            rule: options.rule,
            alpha: options.alpha.unwrap_or(options.rule.alpha()),
            n_best: size("n_best", options.n_best)?,
            max_length: options.max_length.map(|n| size("max_length", n)).transpose()?,
            longest: None,
        };
        config.validate()?;
        Ok(config)
    }

    /// Errors if a setting is out of range.
    pub fn validate(&self) -> Result<()> {
        let wrong = |what: String| Err(Error::invalid(what));
        if self.beam < 1 {
            return wrong(format!("beam must be at least 1, got {}", self.beam));
        }
        if !(1..=self.beam).contains(&self.n_best) {
            return wrong(format!("n_best must lie between 1 and the beam, {}; got {}", self.beam, self.n_best));
        }
        // With much larger exponents len^α overflows, and every score is 0.
        if !(-ALPHA..=ALPHA).contains(&self.alpha) {
            return wrong(format!("alpha must lie in [-{ALPHA}, {ALPHA}], got {}", self.alpha));
        }
        if self.max_length == Some(0) {
            return wrong("max_length must be at least 1, got 0".into());
        }
        Ok(())
    }

    /// Returns the number of continuations of a hypothesis that can be chosen: `beam`, or twice as many under fairseq's
    /// rule, because half of them may end.
    fn candidates(&self) -> usize {
        match self.rule {
            SearchRule::Google => self.beam,
            SearchRule::Fairseq => self.beam.saturating_mul(2),
        }
    }

    /// Returns the maximum number of tokens, EOS included, that are generated for a source of this length.
    fn limit(&self, source_length: usize) -> usize {
        self.rule.limit(source_length, self.max_length).min(self.longest.unwrap_or(usize::MAX))
    }
}

/// The largest exponent of the length penalty, positive or negative; papers use 0 to 2.
const ALPHA: f64 = 10.0;

impl Default for SearchConfig {
    fn default() -> Self {
        SearchConfig::new(SearchRule::Google)
    }
}

/// A translation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Hypothesis {
    /// The tokens, without BOS and EOS.
    pub tokens: Vec<i64>,
    /// The score by which the rule ranks hypotheses: log p(y|x) divided by the length penalty.
    pub score: f64,
    /// log p(y|x), including the EOS if the hypothesis ends with one.
    pub log_probability: f64,
    /// True if the hypothesis ends with EOS. Under google's rule, a hypothesis without EOS was cut off at the limit.
    pub finished: bool,
}

/// Returns the `n_best` best translations of each sentence, best first, with sentences in the order of `source`.
///
/// `source` is the encoder's input, EOS included. A source of EOS alone is a blank line, and its translation is
/// blank, too. `mask` is bool (V), true in the target vocabulary V_t; tokens outside V_t have p = 0. `None` means V_t
/// = V. `kind` is the type of matrix products. Log-probabilities are float32, or float64 if `kind` is.
///
/// # Errors
///
/// Errors if settings are out of range, if the model has no encoder, if the mask allows no sentence, if a source is
/// longer than the model reads, if logits are NaN, if the hypotheses do not fit into memory, or if `check_interrupt`,
/// which runs at each step, returns an error.
pub fn search(
    model: &Transformer,
    source: &Packed,
    mask: Option<&Tensor>,
    config: &SearchConfig,
    kind: Kind,
    check_interrupt: &mut dyn FnMut() -> Result<()>,
) -> Result<Vec<Vec<Hypothesis>>> {
    Search::new(model, mask, config, kind)?.run(model, source, check_interrupt)
}

/// The settings of a search and the model's prepared weights, for any number of sources. The model's parameters must
/// not change while a `Search` exists.
pub struct Search {
    config: SearchConfig,
    /// The type of matrix products.
    kind: Kind,
    output: OutputLayer,
    weights: Arc<PreparedWeights>,
}

impl Search {
    /// Prepares a search; see [`search`].
    pub fn new(model: &Transformer, mask: Option<&Tensor>, config: &SearchConfig, kind: Kind) -> Result<Self> {
        config.validate()?;
        let longest = model.config.longest().map(|longest| longest.tokens as usize);
        let config = SearchConfig { longest, ..config.clone() };
        let vocabulary = TargetVocabulary::new(mask, model.config.vocab_size)?;
        let output = tch::no_grad(|| OutputLayer::new(model, vocabulary, kind))?;
        Ok(Search { config, kind, output, weights: Arc::default() })
    }

    /// True if the hypothesis ended because of the length limit, and not because the model predicted its end.
    pub fn is_cut(&self, hypothesis: &Hypothesis) -> bool {
        // Under fairseq's rule the limit does not depend on the source, hence `limit(0)`. At the limit EOS is forced,
        // whatever the model predicts. EOS is not among `tokens`, hence + 1.
        let is_forced = self.config.rule == SearchRule::Fairseq && hypothesis.tokens.len() + 1 >= self.config.limit(0);
        !hypothesis.finished || is_forced
    }

    /// Returns a search with the same weights for another thread, whose own model has the same tensors.
    pub fn share(&self) -> Self {
        let (output, weights) = (self.output.share(), self.weights.clone());
        Search { config: self.config.clone(), kind: self.kind, output, weights }
    }

    /// Returns the `n_best` best translations of each sentence. `check_interrupt` runs at each step.
    pub fn run(
        &self,
        model: &Transformer,
        source: &Packed,
        check_interrupt: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Vec<Vec<Hypothesis>>> {
        if source.sentences() == 0 {
            return Ok(Vec::new());
        }
        tch::no_grad(|| {
            let ctx = Context::evaluation(self.kind).with_prepared(self.weights.clone());
            let Some(encoded) = model.encode(source, &ctx)? else {
                return Err(Error::invalid(
                    "search translates with an encoder-decoder model; this one is decoder-only",
                ));
            };
            let config = &self.config;
            // Each sentence begins with one hypothesis, in the cache slot of the sentence's index.
            let source_lengths = source.offsets.windows(2).map(|ends| (ends[1] - ends[0]) as usize);
            let mut beams: Vec<Beam> = source_lengths.enumerate().map(|(i, len)| Beam::new(config, len, i)).collect();
            let mut cache = StackCache::default();
            // `Reads` lists the cache rows that each slot reads: at first none, for one slot per sentence.
            cache.set_reads(Reads::nothing(beams.len()));
            // `length` is the number of tokens that each live hypothesis has.
            for length in 0.. {
                check_interrupt()?;
                let start = model.config.decoder_start.id();
                // Better hypotheses are continued first, so that worse ones may be skipped. Each pass sets the cache's
                // lists to those of its own slots, so the lists of all slots before and after the step are kept here.
                let (reads_before, mut reads_after) = (cache.reads().clone(), Reads::default());
                let mut next = Vec::new(); // a row of continuations for each slot, in the order of the passes
                for ranks in passes(config.beam, reads_before.queries()) {
                    let live = Live::take_slots(&mut beams, ranks, &next, start);
                    if live.tokens.is_empty() {
                        continue;
                    }
                    cache.set_reads(reads_before.select(&live.origins));
                    let positions = vec![length as i64; live.tokens.len()];
                    let features = model.step_features(
                        &live.tokens,
                        &positions,
                        &live.sentences,
                        Some(&encoded),
                        &mut cache,
                        &ctx,
                    )?;
                    let candidates = config.candidates().min(model.config.vocab_size as usize);
                    live.room(candidates, config.beam)?;
                    let best = self.output.best(&features, candidates, Eos::at(length, config), self.kind)?;
                    live.refuse_nan(&best, length)?;
                    next.extend(best);
                    // The model has appended the new token's row to the rows that each slot of this pass reads.
                    reads_after = reads_after.joined(cache.reads());
                }
                if next.is_empty() {
                    break;
                }
                // `advance` expects that slot i of the cache belongs to row i of `next`.
                cache.set_reads(reads_after);
                beams.iter_mut().for_each(|beam| beam.advance(&next));
                cache.compact()?;
            }
            beams.into_iter().map(Beam::finish).collect()
        })
    }
}

/// Returns the ranks of the hypotheses that each pass through the model continues, in beams of `beam` hypotheses. With
/// at least [`MANY`] slots, the better half of each beam comes first, because some hypotheses of the worse half then
/// need no continuation.
fn passes(beam: usize, slots: usize) -> impl Iterator<Item = Range<usize>> {
    let first = if slots < MANY { beam } else { beam.div_ceil(2) };
    [0..first, first..beam].into_iter().filter(|ranks| !ranks.is_empty())
}

/// The smallest number of slots that is split into two passes through the model. From this number on, half of the slots
/// still make an efficient pass.
const MANY: usize = 256;

/// The live hypotheses of one pass, one per slot, ordered by sentence.
struct Live {
    /// The last token of each slot.
    tokens: Vec<i64>,
    /// The sentence that each slot translates.
    sentences: Vec<usize>,
    /// The cache slot of the earlier hypothesis that each slot continues.
    origins: Vec<i64>,
}

impl Live {
    /// Assigns a slot to each hypothesis with one of these ranks. `next` contains the continuations from earlier passes
    /// of this step; the caller will append one row for each new slot. `start` is the token before the first one of a
    /// hypothesis.
    fn take_slots(beams: &mut [Beam], ranks: Range<usize>, next: &[Vec<Continuation>], start: i64) -> Self {
        let mut live = Live { tokens: Vec::new(), sentences: Vec::new(), origins: Vec::new() };
        for (sentence, beam) in beams.iter_mut().enumerate() {
            for partial in beam.growing(ranks.clone(), next) {
                partial.next = Some(next.len() + live.tokens.len());
                live.origins.push(partial.slot as i64);
                live.tokens.push(partial.hypothesis.tokens.last().copied().unwrap_or(start));
                live.sentences.push(sentence);
            }
        }
        live
    }

    /// Errors if `candidates` continuations of each slot do not fit into memory. Each is stored in four forms: as a
    /// number, a token, a `Continuation` and a `Candidate`. The message names the size of the `beam`.
    fn room(&self, candidates: usize, beam: usize) -> Result<()> {
        let bytes_each = 4 * size_of::<Continuation>() as u128;
        memory::room(bytes_each * (self.tokens.len() * candidates) as u128, || {
            format!("{} hypotheses of {candidates} continuations (beam {beam}: take a smaller one)", self.tokens.len())
        })
    }

    /// Errors if a log-probability is NaN, and names the sentence. `length` is the number of generated tokens.
    fn refuse_nan(&self, next: &[Vec<Continuation>], length: usize) -> Result<()> {
        match next.iter().position(|row| row.iter().any(|c| c.log_probability.is_nan())) {
            None => Ok(()),
            Some(slot) => Err(Error::invalid(format!(
                "the logits after {length} generated tokens of sentence {} (from 0) are not numbers (NaN): the weights \
                 hold non-finite or huge values; use an earlier checkpoint, or f32 where this was a smaller type",
                self.sentences[slot]
            ))),
        }
    }
}
