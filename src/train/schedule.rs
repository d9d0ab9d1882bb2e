//! Learning-rate schedules (docs/spec.md §4.10) as functions of the number n of an update. The first n is 1, or 0 in
//! schedules that count as fairseq does.

use crate::config::{DecayRule, ScheduleName, TrainingConfig};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// A schedule with its state.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    name: ScheduleName,
    /// The rate after warm-up that the options give; `None` for the schedule's own, usually λ/√d·n_w^-½ (TwT eq 7; TwT
    /// is Nguyen & Salazar 2019).
    peak: Option<f64>,
    /// λ of TwT eq 7, which only matters if `peak` is `None`.
    scale: f64,
    /// The factor of every rate.
    multiplier: f64,
    /// The number of updates of warm-up, n_w.
    warmup: f64,
    /// The rate at n = 0, at which a linear warm-up begins.
    warmup_init: f64,
    /// The number n of the first update: 1, or 0 as fairseq counts.
    first: f64,
    d_model: f64,
    /// The number of updates in the run, for the schedules that fall until the last one.
    updates: f64,
    /// The share of the peak that the rate has at the last update, for the same schedules.
    end: f64,
    /// The share of the run during which the rate falls, for the schedule `wsd`.
    decay_share: f64,
    decay: Decay,
    pub memory: ScheduleMemory,
}

/// The settings with which `val-decay` and `no-warmup` lower the rate.
#[derive(Clone, Debug, PartialEq)]
struct Decay {
    rule: DecayRule,
    /// The factor of one lowering.
    factor: f64,
    /// The number of evaluations that `rule` looks at.
    patience: usize,
}

/// The state of the schedules `val-decay` and `no-warmup`, which depends on evaluations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScheduleMemory {
    /// The factor by which the rate has been lowered so far.
    factor: f64,
    /// The scores of all evaluations, in order; higher is better.
    scores: Vec<f64>,
    /// The number of evaluations since the best one, or since the rate was last lowered.
    #[serde(default)]
    worse: usize,
}

impl Default for ScheduleMemory {
    /// Returns the state before the first evaluation.
    fn default() -> Self {
        ScheduleMemory { factor: 1.0, scores: Vec::new(), worse: 0 }
    }
}

impl ScheduleMemory {
    /// Forgets the scores, but keeps the factor by which they have lowered the rate.
    pub fn forget_scores(&mut self) {
        (self.scores, self.worse) = (Vec::new(), 0);
    }
}

/// The period P of the `t-fixup` schedule.
const T_FIXUP_PERIOD: f64 = 4000.0;
/// The rate of the `no-warmup` schedule if the options give none.
const NO_WARMUP_LR: f64 = 3e-4;

impl Schedule {
    /// Builds the schedule that the options describe; `d_model` is the width that TwT eq 7 depends on.
    pub fn new(config: &TrainingConfig, d_model: i64) -> Self {
        Schedule {
            name: config.schedule,
            peak: config.lr,
            scale: config.lr_scale,
            multiplier: config.lr_multiplier,
            warmup: match config.warmup_share {
                Some(share) => (share * config.updates as f64).round(),
                None => config.warmup as f64,
            },
            warmup_init: config.warmup_init_lr,
            first: if config.count_from_zero { 0.0 } else { 1.0 },
            d_model: d_model as f64,
            updates: config.updates as f64,
            end: config.lr_end,
            decay_share: config.decay_share,
            decay: Decay {
                rule: config.lr_decay_rule,
                factor: config.lr_decay_factor,
                patience: config.lr_decay_patience as usize,
            },
            memory: ScheduleMemory::default(),
        }
    }

    /// Errors if the run would stop at its first update, because the rate is below `min_lr`.
    pub fn check_beginning(&self, config: &TrainingConfig) -> Result<()> {
        let lr = self.learning_rate(1);
        match lr >= config.min_lr || !self.may_stop(1) {
            true => Ok(()),
            false => Err(Error::invalid(format!(
                "the first update's learning rate {lr:.2e} is below min_lr {:.2e}, which would end the run before it: raise \
                 lr, or lower min_lr",
                config.min_lr
            ))),
        }
    }

    /// Returns the learning rate of the `update`-th update.
    pub fn learning_rate(&self, update: u64) -> f64 {
        let n = self.number(update);
        self.multiplier
            * match self.name {
                ScheduleName::InverseSqrt => self.inverse_sqrt(n),
                ScheduleName::ValDecay => self.warm(n, self.peak()) * self.memory.factor,
                ScheduleName::NoWarmup => self.peak() * self.memory.factor,
                ScheduleName::TFixup => self.peak() * (T_FIXUP_PERIOD / (T_FIXUP_PERIOD + n)).sqrt(),
                ScheduleName::Constant => self.warm(n, self.peak()),
                // The schedules below have the same warm-up.
                _ if n < self.warmup => self.warm(n, self.peak()),
                ScheduleName::Cosine => {
                    // The cosine falls from 1 at the end of warm-up to 0 at the last update.
                    let wave = 0.5 * (1.0 + (std::f64::consts::PI * self.part(n, self.warmup)).cos());
                    self.peak() * (self.end + (1.0 - self.end) * wave)
                }
                ScheduleName::Linear => self.peak() * self.line(n, self.warmup),
                ScheduleName::Wsd => {
                    let falls_from = (self.updates * (1.0 - self.decay_share)).max(self.warmup);
                    self.peak() * self.line(n, falls_from)
                }
            }
    }

    /// Returns the share, in [0, 1], of the updates between number `from` and the last one that is done at number n.
    fn part(&self, n: f64, from: f64) -> f64 {
        ((n - from) / (self.updates - from).max(1.0)).clamp(0.0, 1.0)
    }

    /// Returns a factor that is 1 up to update `from` and falls linearly to `end` at the last update.
    fn line(&self, n: f64, from: f64) -> f64 {
        1.0 - (1.0 - self.end) * self.part(n, from)
    }

    /// True if the run may stop at the `update`-th update because the rate is small.
    pub fn may_stop(&self, update: u64) -> bool {
        !self.is_warming(update) && !self.name.falls_to_the_end()
    }

    /// Returns n for the `update`-th update (from 1): `update`, or `update` − 1 if the schedule counts from 0.
    fn number(&self, update: u64) -> f64 {
        update as f64 - 1.0 + self.first
    }

    /// True if the `update`-th update belongs to warm-up. During warm-up the rate is not lowered, and a small rate
    /// does not stop the run.
    pub fn is_warming(&self, update: u64) -> bool {
        let warms = !matches!(self.name, ScheduleName::NoWarmup | ScheduleName::TFixup);
        warms && self.number(update) < self.warmup
    }

    /// Records the score of an evaluation after the `update`-th update; a higher score is better. A score that is not
    /// finite counts as the worst.
    pub fn evaluated(&mut self, update: u64, score: f64) {
        if !matches!(self.name, ScheduleName::ValDecay | ScheduleName::NoWarmup) {
            return;
        }
        // Checkpoints store the scores as JSON, which has no infinities, so the worst score is the smallest f64.
        let score = if score.is_finite() { score } else { f64::MIN };
        let is_warming = self.is_warming(update);
        let (Decay { rule, factor, patience }, memory) = (&self.decay, &mut self.memory);
        let falls = match rule {
            DecayRule::Release => {
                // The rate falls if the score is worse than each of the last `patience` scores.
                let worst = memory.scores.iter().rev().take(*patience).copied().fold(f64::INFINITY, f64::min);
                memory.scores.len() >= *patience && score < worst
            }
            DecayRule::Paper => {
                // The rate falls if `patience` evaluations in a row were no better than the best before them.
                let best = memory.scores.iter().copied().fold(f64::MIN, f64::max);
                memory.worse = if is_warming || score > best { 0 } else { memory.worse + 1 };
                memory.worse >= *patience
            }
        };
        if falls && !is_warming {
            memory.factor *= factor;
            memory.worse = 0;
        }
        memory.scores.push(score);
    }

    /// Returns the rate after warm-up with the options' multiplier, before the schedule lowers it.
    pub fn highest(&self) -> f64 {
        self.multiplier * self.peak()
    }

    /// Returns the rate after warm-up. Without the option `lr` this is a constant for `no-warmup`, and TwT eq 7 at n =
    /// n_w for all other schedules.
    fn peak(&self) -> f64 {
        self.peak.unwrap_or_else(|| match self.name {
            ScheduleName::NoWarmup => NO_WARMUP_LR,
            _ => self.scale / (self.d_model * self.warmup.max(1.0)).sqrt(),
        })
    }

    /// Without the option `lr`, returns λ/√d·min(1/√n, n/n_w^1.5), with λ = `scale`, d = `d_model` and n_w = `warmup`.
    /// With `lr`, returns a linear warm-up from `warmup_init` to this peak, then peak·√(n_w/n). If n_w = 0, the rate is
    /// constant.
    fn inverse_sqrt(&self, n: f64) -> f64 {
        match self.peak {
            _ if self.warmup == 0.0 => self.peak(),
            None => self.scale / self.d_model.sqrt() * (1.0 / n.sqrt()).min(n / self.warmup.powf(1.5)),
            Some(peak) => self.warm(n, peak) * (self.warmup / n.max(self.warmup)).sqrt(),
        }
    }

    /// Returns the rate at n of a linear warm-up from `warmup_init` to `peak`, and `peak` afterwards.
    fn warm(&self, n: f64, peak: f64) -> f64 {
        match n < self.warmup {
            true => self.warmup_init + (peak - self.warmup_init) * n / self.warmup,
            false => peak,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Builds a schedule for d_model = 512.
    fn schedule(name: ScheduleName, lr: Option<f64>, warmup: i64) -> Schedule {
        Schedule::new(&TrainingConfig { schedule: name, lr, warmup, ..Default::default() }, 512)
    }

    #[test]
    fn inverse_sqrt_peaks_at_the_end_of_warmup() {
        // The expected value is TwT eq 7 at n = n_w: 1/√(512·4000).
        let s = schedule(ScheduleName::InverseSqrt, None, 4000);
        assert!((s.learning_rate(4000) - 1.0 / (512f64 * 4000.0).sqrt()).abs() < 1e-15);
        assert!((s.learning_rate(2000) * 2.0 - s.learning_rate(4000)).abs() < 1e-15);
        assert!((s.learning_rate(16000) * 2.0 - s.learning_rate(4000)).abs() < 1e-15);
        let s = schedule(ScheduleName::InverseSqrt, Some(5e-3), 2000);
        assert_eq!((s.learning_rate(1000), s.learning_rate(2000), s.learning_rate(8000)), (2.5e-3, 5e-3, 2.5e-3));
        assert_eq!(schedule(ScheduleName::InverseSqrt, Some(1e-3), 0).learning_rate(9), 1e-3);
    }

    #[test]
    fn some_fall_until_the_last_update() {
        let of = |name, end| {
            let config =
                TrainingConfig { schedule: name, lr: Some(1.0), warmup: 10, updates: 110, ..Default::default() };
            Schedule::new(&TrainingConfig { lr_end: end, decay_share: 0.5, ..config }, 512)
        };
        let at = |s: &Schedule, updates: [u64; 5]| updates.map(|n| (s.learning_rate(n) * 1e9).round() / 1e9);
        let quarter = 0.5 + 0.5 * (std::f64::consts::PI / 4.0).cos();
        let quarter = (quarter * 1e9).round() / 1e9;
        assert_eq!(at(&of(ScheduleName::Cosine, 0.0), [5, 10, 35, 60, 110]), [0.5, 1.0, quarter, 0.5, 0.0]);
        assert_eq!(at(&of(ScheduleName::Linear, 0.1), [5, 10, 60, 110, 200]), [0.5, 1.0, 0.55, 0.1, 0.1]);
        assert_eq!(at(&of(ScheduleName::Wsd, 0.0), [5, 10, 55, 88, 110]), [0.5, 1.0, 1.0, 0.4, 0.0]);
        assert!(!of(ScheduleName::Cosine, 0.0).may_stop(110));
        let config = TrainingConfig { warmup_share: Some(0.1), updates: 50, lr: Some(1.0), ..Default::default() };
        assert_eq!(Schedule::new(&config, 512).learning_rate(1), 0.2);
    }

    #[test]
    fn fairseq_counts_from_0() {
        let config = TrainingConfig { lr: Some(5e-3), warmup: 2000, count_from_zero: true, ..Default::default() };
        let s = Schedule::new(&TrainingConfig { warmup_init_lr: 1e-3, ..config.clone() }, 512);
        assert_eq!([1, 1001, 2001, 8001].map(|update| s.learning_rate(update)), [1e-3, 3e-3, 5e-3, 2.5e-3]);
        let s = Schedule::new(&TrainingConfig { lr: None, ..config.clone() }, 512);
        assert_eq!(s.learning_rate(1), 0.0);
        let s = Schedule::new(&TrainingConfig { warmup: 1, ..config }, 512);
        assert_eq!((s.learning_rate(1), s.is_warming(1), s.is_warming(2)), (0.0, true, false));
    }

    #[test]
    fn val_decay_falls_when_a_score_is_below_the_last_three() {
        let mut s = schedule(ScheduleName::ValDecay, Some(1.0), 10);
        for (n, score, lr) in
            [(5, 3.0, 1.0), (6, 4.0, 1.0), (7, 5.0, 1.0), (8, 1.0, 1.0), (20, 0.5, 0.8), (21, 0.7, 0.8)]
        {
            s.evaluated(n, score);
            assert!((s.learning_rate(20) - lr).abs() < 1e-12, "after update {n}");
        }
        let mut s = schedule(ScheduleName::NoWarmup, None, 4000);
        for score in [3.0, 3.0, 3.0, 2.0] {
            s.evaluated(1, score);
        }
        assert!((s.learning_rate(1) - 2.4e-4).abs() < 1e-15);
    }

    #[test]
    fn by_the_papers_rule_a_flatline_decays() {
        let config = TrainingConfig { lr_decay_rule: DecayRule::Paper, ..config_of(0.5, 2) };
        let mut s = Schedule::new(&config, 512);
        for (score, lr) in [(3.0, 1.0), (3.0, 1.0), (3.0, 0.5), (2.9, 0.5), (4.0, 0.5), (4.0, 0.5), (3.5, 0.25)] {
            s.evaluated(1, score);
            assert_eq!(s.learning_rate(1), lr, "after {score}");
        }
        let mut s = Schedule::new(&TrainingConfig { schedule: ScheduleName::ValDecay, warmup: 10, ..config }, 512);
        [1, 2, 3, 4].into_iter().for_each(|update| s.evaluated(update, 1.0));
        assert_eq!(s.learning_rate(20), 1.0, "evaluations of the warm-up do not count");
        s.evaluated(20, 1.0);
        s.evaluated(21, 1.0);
        assert_eq!(s.learning_rate(21), 0.5);
        let release = TrainingConfig { lr_decay_rule: DecayRule::Release, ..config_of(0.5, 2) };
        let mut s = Schedule::new(&release, 512);
        [3.0, 3.0, 3.0, 3.0].into_iter().for_each(|score| s.evaluated(1, score));
        assert_eq!(s.learning_rate(1), 1.0, "the release's never falls on a flatline");
        s.evaluated(1, 2.0);
        assert_eq!(s.learning_rate(1), 0.5);
    }

    /// Returns options whose rate is 1 until evaluations lower it.
    fn config_of(factor: f64, patience: i64) -> TrainingConfig {
        TrainingConfig {
            schedule: ScheduleName::NoWarmup,
            lr: Some(1.0),
            lr_decay_factor: factor,
            lr_decay_patience: patience,
            ..Default::default()
        }
    }

    #[test]
    fn a_score_that_is_not_finite_is_the_worst_and_can_be_saved() {
        let mut s = schedule(ScheduleName::NoWarmup, None, 0);
        for score in [3.0, 3.0, 3.0, f64::NAN, f64::NEG_INFINITY] {
            s.evaluated(1, score);
        }
        assert!((s.learning_rate(1) - 2.4e-4).abs() < 1e-15);
        let saved = serde_json::to_string(&s.memory).unwrap();
        assert_eq!(serde_json::from_str::<ScheduleMemory>(&saved).unwrap(), s.memory);
    }
}
