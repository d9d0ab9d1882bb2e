//! One sentence's hypotheses: which continuations live on, and when the search for this sentence is over.

use super::{Continuation, Hypothesis, SearchConfig};
use crate::config::SearchRule;
use crate::error::{Error, Result};
use crate::model::EOS;
use std::ops::Range;

/// A hypothesis on its way.
pub(super) struct Partial {
    pub hypothesis: Hypothesis,
    /// Where the cache has what it was made from.
    pub slot: usize,
    /// Where its continuations are; none: they are not known, and cannot matter.
    pub next: Option<usize>,
}

pub(super) struct Beam<'a> {
    config: &'a SearchConfig,
    /// Most tokens, EOS included.
    limit: usize,
    length: usize,
    /// Best first, at most `beam`; under google's rule with the finished ones among them.
    hypotheses: Vec<Partial>,
    /// fairseq's finished ones, in the order in which they ended.
    finals: Vec<Hypothesis>,
    done: bool,
}

/// A hypothesis that may come next.
struct Candidate {
    /// Which of the hypotheses it continues,
    parent: usize,
    /// by which token; none: that one is finished and stays as it is.
    token: Option<i64>,
    log_probability: f64,
    score: f64,
}

impl Candidate {
    fn ends(&self) -> bool {
        self.token == Some(EOS)
    }
}

impl<'a> Beam<'a> {
    /// The empty hypothesis, in `slot`; the final one where the source is its end alone.
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

    /// The hypotheses that need a next token, those of these ranks among them, unless none of their continuations can
    /// come next any more: `next` has those of the better ones.
    pub fn growing(&mut self, ranks: Range<usize>, next: &[Vec<Continuation>]) -> impl Iterator<Item = &mut Partial> {
        let bar = if ranks.start == 0 || self.done { f64::NEG_INFINITY } else { self.bar(next) };
        let (done, rule, penalty) = (self.done, self.config.rule, self.penalty());
        let growing = self.hypotheses.iter_mut().filter(move |partial| !done && !partial.hypothesis.finished);
        // log p of a token is at most 0.
        growing.skip(ranks.start).take(ranks.len()).filter(move |Partial { hypothesis, .. }| match rule {
            SearchRule::Google => hypothesis.log_probability / penalty >= bar,
            SearchRule::Fairseq => hypothesis.log_probability >= bar,
        })
    }

    /// What a hypothesis must reach to come next, by the candidates that are known: `beam` of them are as good, under
    /// fairseq's rule `beam` that do not end.
    fn bar(&self, next: &[Vec<Continuation>]) -> f64 {
        let beam = self.config.beam;
        let mut known: Vec<f64> = match self.config.rule {
            SearchRule::Google => self.pool(next).iter().map(|c| c.score).collect(),
            SearchRule::Fairseq => self.pool(next).iter().filter(|c| !c.ends()).map(|c| c.log_probability).collect(),
        };
        if known.len() < beam {
            return f64::NEG_INFINITY;
        }
        *known.select_nth_unstable_by(beam - 1, |a, b| b.total_cmp(a)).1
    }

    /// lp of what comes next.
    fn penalty(&self) -> f64 {
        self.config.rule.penalty(self.length + 1, self.config.alpha)
    }

    /// Goes on by one token; `next` has the most probable ones of each hypothesis that can matter, best first.
    pub fn advance(&mut self, next: &[Vec<Continuation>]) {
        if self.done {
            return;
        }
        let pool = self.pool(next);
        self.length += 1;
        match self.config.rule {
            SearchRule::Google => self.advance_google(pool),
            SearchRule::Fairseq => self.advance_fairseq(pool),
        }
    }

    /// The `n_best` best, best first.
    pub fn finish(mut self) -> Result<Vec<Hypothesis>> {
        let mut found: Vec<Hypothesis> = match self.config.rule {
            SearchRule::Google => self.hypotheses.into_iter().map(|partial| partial.hypothesis).collect(),
            SearchRule::Fairseq => {
                self.finals.truncate(self.config.beam);
                self.finals.sort_by(|a, b| b.score.total_cmp(&a.score));
                self.finals
            }
        };
        if found.is_empty() {
            return Err(Error::invalid(format!(
                "no token has a probability above 0 after {} generated ones: the logits of all allowed types are -inf",
                self.length - 1
            )));
        }
        found.truncate(self.config.n_best);
        Ok(found)
    }

    /// Every hypothesis's continuations, hypothesis after hypothesis: the order in which equals are preferred.
    fn pool(&self, next: &[Vec<Continuation>]) -> Vec<Candidate> {
        let penalty = self.penalty();
        let known = |partial: &Partial| partial.next.map_or(1, |row| next[row].len());
        let mut pool = Vec::with_capacity(self.hypotheses.iter().map(known).sum());
        for (parent, Partial { hypothesis, next: row, .. }) in self.hypotheses.iter().enumerate() {
            if hypothesis.finished {
                let Hypothesis { log_probability, score, .. } = *hypothesis;
                pool.push(Candidate { parent, token: None, log_probability, score });
                continue;
            }
            let continuations = row.map_or(&[][..], |row| &next[row]);
            for continuation in continuations.iter().filter(|c| c.log_probability > f64::NEG_INFINITY) {
                let log_probability = hypothesis.log_probability + continuation.log_probability;
                let token = Some(continuation.token);
                pool.push(Candidate { parent, token, log_probability, score: log_probability / penalty });
            }
        }
        pool
    }

    /// The `beam` best by score, finished or not.
    fn advance_google(&mut self, mut pool: Vec<Candidate>) {
        pool.sort_by(|a, b| b.score.total_cmp(&a.score));
        pool.truncate(self.config.beam);
        self.hypotheses = pool.iter().map(|candidate| self.grown(candidate)).collect();
        self.done = self.length >= self.limit || self.hypotheses.iter().all(|partial| partial.hypothesis.finished);
    }

    /// Of the 2·beam most probable those that end within the first `beam` are final; `beam` of the others go on. At the
    /// limit only EOS is offered, so none does.
    fn advance_fairseq(&mut self, mut pool: Vec<Candidate>) {
        let beam = self.config.beam;
        pool.sort_by(|a, b| b.log_probability.total_cmp(&a.log_probability));
        pool.truncate(beam.saturating_mul(2));
        let ended = pool.iter().take(beam).filter(|c| c.ends()).map(|c| self.grown(c).hypothesis).collect::<Vec<_>>();
        self.hypotheses = pool.iter().filter(|c| !c.ends()).take(beam).map(|c| self.grown(c)).collect();
        self.finals.extend(ended);
        self.done = self.finals.len() >= beam || self.hypotheses.is_empty();
    }

    fn grown(&self, candidate: &Candidate) -> Partial {
        let Partial { hypothesis: parent, slot, next } = &self.hypotheses[candidate.parent];
        let mut tokens = parent.tokens.clone();
        tokens.extend(candidate.token.filter(|&token| token != EOS));
        let hypothesis = Hypothesis {
            tokens,
            score: candidate.score,
            log_probability: candidate.log_probability,
            finished: parent.finished || candidate.ends(),
        };
        Partial { hypothesis, slot: next.unwrap_or(*slot), next: None }
    }
}
