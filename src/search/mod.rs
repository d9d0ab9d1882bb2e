//! Greedy and beam search (docs/spec.md §4.12).
//!
//! A hypothesis y is ranked by
//!
//! ```text
//! score(y) = Σ log p(y_t | y_<t, x) / lp(len),   len = generated tokens, EOS included
//! ```
//!
//! in one of two ways. `google` (Wu et al. 2016, eq 14; Nguyen and Salazar 2019): lp = ((5 + len)/6)^α; finished
//! hypotheses stay in the beam, and compete, with their score frozen; the search ends when all are finished or
//! len = source tokens + 50. `fairseq`: lp = len^α; of the 2·beam most probable continuations those that end within the
//! first `beam` are final, the others go on; the search ends at `beam` final ones, and the last token is EOS. Under both
//! the first token is not EOS, PAD and BOS are never generated, and of equals the one of the better hypothesis, then of
//! the lower id, comes first.
//!
//! A live hypothesis holds one slot of the key/value cache. All sentences move on together, one token a step; what is
//! finished gives its slot up, so a step costs what is still alive. A hypothesis is not continued at all where `beam`
//! continuations of better ones are more probable than itself: no token makes it more probable.

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

/// How to search. [`SearchConfig::new`] has each rule's usual settings.
#[derive(Clone, Debug, PartialEq)]
pub struct SearchConfig {
    /// Hypotheses alive at a time; 1: greedy.
    pub beam: usize,
    pub rule: SearchRule,
    /// Exponent of the length penalty: the larger, the longer the translations.
    pub alpha: f64,
    /// Hypotheses returned per sentence, at most `beam`.
    pub n_best: usize,
    /// Most tokens generated; none: the source's + 50 (google, which counts EOS) or 200 (fairseq, which does not).
    pub max_length: Option<usize>,
    /// Most tokens that the model can say, EOS included, whatever the rule allows; [`Search::new`] asks the model.
    pub longest: Option<usize>,
}

impl SearchConfig {
    /// google: beam 4, α 0.6 (Nguyen and Salazar 2019); fairseq: beam 5, α 1 (its `--lenpen`).
    pub fn new(rule: SearchRule) -> Self {
        let beam = match rule {
            SearchRule::Google => 4,
            SearchRule::Fairseq => 5,
        };
        SearchConfig { beam, rule, alpha: rule.alpha(), n_best: 1, max_length: None, longest: None }
    }

    /// The search that the options ask for.
    pub fn of(options: &SearchOptions) -> Result<Self> {
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

    pub fn validate(&self) -> Result<()> {
        let wrong = |what: String| Err(Error::invalid(what));
        if self.beam < 1 {
            return wrong(format!("beam must be at least 1, got {}", self.beam));
        }
        if !(1..=self.beam).contains(&self.n_best) {
            return wrong(format!("n_best must lie between 1 and the beam, {}; got {}", self.beam, self.n_best));
        }
        // Beyond it len^α leaves the numbers there are, and every score is 0.
        if !(-ALPHA..=ALPHA).contains(&self.alpha) {
            return wrong(format!("alpha must lie in [-{ALPHA}, {ALPHA}], got {}", self.alpha));
        }
        if self.max_length == Some(0) {
            return wrong("max_length must be at least 1, got 0".into());
        }
        Ok(())
    }

    /// Continuations of a hypothesis that can matter: under fairseq's rule half of them may end.
    fn candidates(&self) -> usize {
        match self.rule {
            SearchRule::Google => self.beam,
            SearchRule::Fairseq => self.beam.saturating_mul(2),
        }
    }

    /// The most tokens generated from a source, EOS included.
    fn limit(&self, source_length: usize) -> usize {
        self.rule.limit(source_length, self.max_length).min(self.longest.unwrap_or(usize::MAX))
    }
}

/// The largest exponent of the length penalty, either way; papers take 0 to 2.
const ALPHA: f64 = 10.0;

impl Default for SearchConfig {
    fn default() -> Self {
        SearchConfig::new(SearchRule::Google)
    }
}

/// A translation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Hypothesis {
    /// Without BOS and EOS.
    pub tokens: Vec<i64>,
    /// What the rule ranks by: log p(y|x) over the length penalty.
    pub score: f64,
    /// log p(y|x), EOS's included where there is one.
    pub log_probability: f64,
    /// Ends with EOS; google's rule cuts the others off at its limit.
    pub finished: bool,
}

/// The `n_best` best translations of each sentence, best first, sentences in the order of `source`.
///
/// `source`: what the encoder reads, EOS included; one of EOS alone is a blank line, and its translation is, too. `mask`: bool (V), true in the target vocabulary V_t, outside of which
/// p = 0; none: V_t = V. `kind`: the type of matrix products; log-probabilities are float32, or float64 if `kind` is.
///
/// # Errors
///
/// Settings out of range; a decoder-only model; a mask that allows no sentence; a source longer than the model reads;
/// logits that are not numbers (NaN); more hypotheses than memory; an error of `check_interrupt`, which runs at each
/// step.
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

/// What searches with one model share: its weights as products take them. The model must not change meanwhile.
pub struct Search {
    config: SearchConfig,
    kind: Kind,
    output: OutputLayer,
    weights: Arc<PreparedWeights>,
}

impl Search {
    /// See [`search`].
    pub fn new(model: &Transformer, mask: Option<&Tensor>, config: &SearchConfig, kind: Kind) -> Result<Self> {
        config.validate()?;
        let longest = model.config.longest().map(|longest| longest.tokens as usize);
        let config = SearchConfig { longest, ..config.clone() };
        let vocabulary = TargetVocabulary::new(mask, model.config.vocab_size)?;
        let output = tch::no_grad(|| OutputLayer::new(model, vocabulary, kind))?;
        Ok(Search { config, kind, output, weights: Arc::default() })
    }

    /// The greatest length ended the hypothesis, not the model.
    pub fn is_cut(&self, hypothesis: &Hypothesis) -> bool {
        // fairseq's rule puts EOS at the limit.
        let is_forced = self.config.rule == SearchRule::Fairseq && hypothesis.tokens.len() + 1 >= self.config.limit(0);
        !hypothesis.finished || is_forced
    }

    /// The same search for another thread, which has a model of the same tensors.
    pub fn share(&self) -> Self {
        let (output, weights) = (self.output.share(), self.weights.clone());
        Search { config: self.config.clone(), kind: self.kind, output, weights }
    }

    /// The `n_best` best translations of each sentence. `check_interrupt` runs at each step.
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
            let Some(memory) = model.encode(source, &ctx)? else {
                return Err(Error::invalid(
                    "search translates with an encoder-decoder model; this one is decoder-only",
                ));
            };
            let config = &self.config;
            let source_lengths = source.offsets.windows(2).map(|ends| (ends[1] - ends[0]) as usize);
            let mut beams: Vec<Beam> = source_lengths.enumerate().map(|(i, len)| Beam::new(config, len, i)).collect();
            let mut cache = StackCache::default();
            cache.set_reads(Reads::nothing(beams.len()));
            for length in 0.. {
                check_interrupt()?;
                let start = model.config.decoder_start.id();
                // A better hypothesis's continuations may leave no place for those of a worse one.
                let (before, mut after) = (cache.reads().clone(), Reads::default());
                let mut next = Vec::new();
                for ranks in waves(config.beam, before.queries()) {
                    let live = Live::take_slots(&mut beams, ranks, &next, start);
                    if live.tokens.is_empty() {
                        continue;
                    }
                    cache.set_reads(before.select(&live.origins));
                    let features = model.step_features(
                        &live.tokens,
                        &vec![length as i64; live.tokens.len()],
                        &live.sentences,
                        Some(&memory),
                        &mut cache,
                        &ctx,
                    )?;
                    let candidates = config.candidates().min(model.config.vocab_size as usize);
                    live.room(candidates, config.beam)?;
                    let found = self.output.best(&features, candidates, Eos::at(length, config), self.kind)?;
                    live.refuse_nan(&found, length)?;
                    next.extend(found);
                    after = after.joined(cache.reads());
                }
                if next.is_empty() {
                    break;
                }
                cache.set_reads(after);
                beams.iter_mut().for_each(|beam| beam.advance(&next));
                cache.compact()?;
            }
            beams.into_iter().map(Beam::finish).collect()
        })
    }
}

/// The ranks of hypotheses that are continued together. A batch of many is continued in parts: the first one often
/// spares some of the others.
fn waves(beam: usize, slots: usize) -> impl Iterator<Item = Range<usize>> {
    let first = if slots < MANY { beam } else { beam.div_ceil(2) };
    [0..first, first..beam].into_iter().filter(|ranks| !ranks.is_empty())
}

/// Slots from which a part of them is enough for a product at full speed.
const MANY: usize = 256;

/// Live hypotheses, sentence after sentence: slot i holds
struct Live {
    /// the last token,
    tokens: Vec<i64>,
    /// the sentence it translates,
    sentences: Vec<usize>,
    /// and the slot in which the hypothesis that it continues was.
    origins: Vec<i64>,
}

impl Live {
    /// Those of these ranks in their beams. `next`: the continuations that are known, to which theirs will be added.
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

    /// Asks for the memory of so many continuations of each, as numbers, as tokens and as candidates.
    fn room(&self, candidates: usize, beam: usize) -> Result<()> {
        let each = 4 * size_of::<Continuation>() as u128;
        memory::room(each * (self.tokens.len() * candidates) as u128, || {
            format!("{} hypotheses of {candidates} continuations (beam {beam}: take a smaller one)", self.tokens.len())
        })
    }

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
