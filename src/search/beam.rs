//! Beam search for one sentence: which continuations are chosen, and when the search ends.

use super::{Continuation, Hypothesis, SearchConfig};
use crate::config::SearchRule;
use crate::error::{Error, Result};
use crate::model::EOS;
use std::ops::Range;

/// A hypothesis in the beam, with its place in the cache.
pub(super) struct Partial {
    pub hypothesis: Hypothesis,
    /// The cache slot of the hypothesis that this one continues.
    pub slot: usize,
    /// The row of this hypothesis in the `next` of [`Beam::advance`]; `None` if it has no row, because it is finished
    /// or its continuations cannot be chosen.
    pub next: Option<usize>,
}

/// The beam search for one sentence.
pub(super) struct Beam<'a> {
    config: &'a SearchConfig,
    /// The maximum number of tokens, EOS included.
    limit: usize,
    /// The number of steps so far, which is the number of tokens of every live hypothesis.
    length: usize,
    /// The hypotheses, best first, at most `beam` of them. Under google's rule they include finished ones.
    hypotheses: Vec<Partial>,
    /// Under fairseq's rule: the finished hypotheses, in the order in which they ended.
    finals: Vec<Hypothesis>,
    /// True if the search is over.
    done: bool,
}

/// A candidate for a place among the hypotheses of the next step.
struct Candidate {
    /// The index of the hypothesis that the candidate continues.
    parent: usize,
    /// The token that the candidate adds; `None` if the hypothesis is finished and stays as it is.
    token: Option<i64>,
    log_probability: f64,
    score: f64,
}

impl Candidate {
    /// True if the candidate adds EOS.
    fn ends(&self) -> bool {
        self.token == Some(EOS)
    }
}

impl<'a> Beam<'a> {
    /// Begins a search with the empty hypothesis in cache slot `slot`. `source_length` counts EOS; if the source is
    /// only EOS, the empty hypothesis is final.
    pub fn new(config: &'a SearchConfig, source_length: usize, slot: usize) -> Self {
        let is_blank = source_length <= 1;
        let hypothesis = Hypothesis { finished: is_blank, ..Default::default() };
        Beam {
            config,
            limit: config.limit(source_length),
            length: 0,
            finals: if is_blank { vec![hypothesis.clone()] } else { Vec::new() },
            hypotheses: vec![Partial { hypothesis, slot, next: None }],
            done: is_blank,
        }
    }

    /// Iterates over the hypotheses that need a next token and have these ranks among such hypotheses, from 0 for the
    /// best. Skips a hypothesis if its continuations can no longer be chosen. `next` contains the continuations of
    /// better hypotheses.
    pub fn growing(&mut self, ranks: Range<usize>, next: &[Vec<Continuation>]) -> impl Iterator<Item = &mut Partial> {
        // The score that a continuation must reach to be chosen. At the first ranks nothing is skipped, because no
        // better hypothesis has continuations yet.
        let least = if ranks.start == 0 || self.done { f64::NEG_INFINITY } else { self.least_score(next) };
        let (done, rule, penalty) = (self.done, self.config.rule, self.penalty());
        let growing = self.hypotheses.iter_mut().filter(move |partial| !done && !partial.hypothesis.finished);
        // The log-probability of a token is at most 0, so no continuation is more probable than its hypothesis.
        growing.skip(ranks.start).take(ranks.len()).filter(move |Partial { hypothesis, .. }| match rule {
            SearchRule::Google => hypothesis.log_probability / penalty >= least,
            SearchRule::Fairseq => hypothesis.log_probability >= least,
        })
    }

    /// Returns the `beam`-th best score among the candidates from `next`, or −∞ if there are fewer. No candidate with a
    /// lower score will be chosen. Under fairseq's rule, candidates that end use no place, so they do not count.
    fn least_score(&self, next: &[Vec<Continuation>]) -> f64 {
        let beam = self.config.beam;
        let mut scores: Vec<f64> = match self.config.rule {
            SearchRule::Google => self.candidates(next).iter().map(|c| c.score).collect(),
            SearchRule::Fairseq => {
                self.candidates(next).iter().filter(|c| !c.ends()).map(|c| c.log_probability).collect()
            }
        };
        if scores.len() < beam {
            return f64::NEG_INFINITY;
        }
        let (_, beam_th_best, _) = scores.select_nth_unstable_by(beam - 1, |a, b| b.total_cmp(a));
        *beam_th_best
    }

    /// Returns the length penalty of hypotheses that have one more token than the live ones.
    fn penalty(&self) -> f64 {
        self.config.rule.penalty(self.length + 1, self.config.alpha)
    }

    /// Adds one token to the hypotheses. `next` has a row for each hypothesis, of any sentence, whose continuations can
    /// be chosen: the most probable next tokens, best first.
    pub fn advance(&mut self, next: &[Vec<Continuation>]) {
        if self.done {
            return;
        }
        let candidates = self.candidates(next);
        self.length += 1;
        match self.config.rule {
            SearchRule::Google => self.advance_google(candidates),
            SearchRule::Fairseq => self.advance_fairseq(candidates),
        }
    }

    /// Returns the `n_best` best hypotheses, best first.
    pub fn finish(mut self) -> Result<Vec<Hypothesis>> {
        let mut ranked: Vec<Hypothesis> = match self.config.rule {
            // `advance_google` has sorted the hypotheses already.
            SearchRule::Google => self.hypotheses.into_iter().map(|partial| partial.hypothesis).collect(),
            SearchRule::Fairseq => {
                // The search ends with the `beam`-th final hypothesis; later ones of the same step do not count.
                self.finals.truncate(self.config.beam);
                self.finals.sort_by(|a, b| b.score.total_cmp(&a.score));
                self.finals
            }
        };
        if ranked.is_empty() {
            // `length` also counts the step that found no token.
            return Err(Error::invalid(format!(
                "no token has a probability above 0 after {} generated ones: the logits of all allowed types are -inf",
                self.length - 1
            )));
        }
        ranked.truncate(self.config.n_best);
        Ok(ranked)
    }

    /// Returns the candidates for the next step: all continuations of the hypotheses, those of better hypotheses first,
    /// and finished hypotheses as they are. The stable sorts in `advance_google` and `advance_fairseq` keep this order
    /// on ties.
    fn candidates(&self, next: &[Vec<Continuation>]) -> Vec<Candidate> {
        let penalty = self.penalty();
        // A hypothesis without a row in `next` has at most one candidate, itself.
        let count_of = |partial: &Partial| partial.next.map_or(1, |row| next[row].len());
        let mut candidates = Vec::with_capacity(self.hypotheses.iter().map(count_of).sum());
        for (parent, Partial { hypothesis, next: row, .. }) in self.hypotheses.iter().enumerate() {
            if hypothesis.finished {
                let Hypothesis { log_probability, score, .. } = *hypothesis;
                candidates.push(Candidate { parent, token: None, log_probability, score });
                continue;
            }
            // A hypothesis without a row has no continuation that could be chosen.
            let continuations = row.map_or(&[][..], |row| &next[row]);
            for continuation in continuations.iter().filter(|c| c.log_probability > f64::NEG_INFINITY) {
                let log_probability = hypothesis.log_probability + continuation.log_probability;
                let token = Some(continuation.token);
                candidates.push(Candidate { parent, token, log_probability, score: log_probability / penalty });
            }
        }
        candidates
    }

    /// Keeps the `beam` candidates with the best scores, finished or not.
    fn advance_google(&mut self, mut candidates: Vec<Candidate>) {
        candidates.sort_by(|a, b| b.score.total_cmp(&a.score));
        candidates.truncate(self.config.beam);
        self.hypotheses = candidates.iter().map(|candidate| self.grow(candidate)).collect();
        self.done = self.length >= self.limit || self.hypotheses.iter().all(|partial| partial.hypothesis.finished);
    }

    /// Considers the 2·beam most probable candidates. Those that end within the first `beam` become final, and `beam`
    /// of those that do not end stay in the beam. At the maximum length only EOS is allowed, so none stays.
    fn advance_fairseq(&mut self, mut candidates: Vec<Candidate>) {
        let beam = self.config.beam;
        candidates.sort_by(|a, b| b.log_probability.total_cmp(&a.log_probability));
        candidates.truncate(beam.saturating_mul(2));
        let ending = candidates.iter().take(beam).filter(|c| c.ends());
        let ended = ending.map(|c| self.grow(c).hypothesis).collect::<Vec<_>>();
        self.hypotheses = candidates.iter().filter(|c| !c.ends()).take(beam).map(|c| self.grow(c)).collect();
        self.finals.extend(ended);
        self.done = self.finals.len() >= beam || self.hypotheses.is_empty();
    }

    /// Returns the hypothesis that a candidate describes: its parent, with the candidate's token if it has one. An EOS
    /// is not stored.
    fn grow(&self, candidate: &Candidate) -> Partial {
        let Partial { hypothesis: parent, slot, next: row } = &self.hypotheses[candidate.parent];
        let mut tokens = parent.tokens.clone();
        tokens.extend(candidate.token.filter(|&token| token != EOS));
        let hypothesis = Hypothesis {
            tokens,
            score: candidate.score,
            log_probability: candidate.log_probability,
            finished: parent.finished || candidate.ends(),
        };
        // When hypotheses grow, cache slot i holds row i of the continuations. So the parent's row is also its slot. A
        // finished parent has no row, and its slot is not used again.
        Partial { hypothesis, slot: row.unwrap_or(*slot), next: None }
    }
}
