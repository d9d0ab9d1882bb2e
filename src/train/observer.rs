//! The events that a run reports while it trains.

use super::layers::Layers;
use super::watched::Watched;
use crate::config::Precision;
use crate::error::Result;
use serde::Serialize;

/// Receives a run's events. An `Err` from any method stops the run. If the error is
/// [`Interrupted`](crate::error::Error::Interrupted), the run saves a checkpoint first.
pub trait Observer {
    /// Called before the first update of a run or a resumed run.
    fn started(&mut self, _: &Started) -> Result<()> {
        Ok(())
    }
    /// Called after each update.
    fn updated(&mut self, _: &Update) -> Result<()> {
        Ok(())
    }
    /// Called after each evaluation, before its checkpoint is saved.
    fn evaluated(&mut self, _: &Evaluation) -> Result<()> {
        Ok(())
    }
    /// Called after a checkpoint has been written.
    fn saved(&mut self, _: &Saved) -> Result<()> {
        Ok(())
    }
    /// Called during long work that reports no events, such as preparing data or evaluating. Returns an error if the
    /// user wants to stop.
    fn check_interrupt(&mut self) -> Result<()> {
        Ok(())
    }
    /// Called with a message for the user, of the level `info` or `warning`.
    fn message(&mut self, _level: &str, _text: &str) -> Result<()> {
        Ok(())
    }
}

/// The event before the first update of a run or a resumed run.
#[derive(Clone, Debug, Serialize)]
pub struct Started {
    pub parameters: usize,
    pub updates_per_epoch: f64,
    /// The number of updates that were made before, if the run is resumed.
    pub update: u64,
    /// The option `updates`: the number of updates of the run, or 0 if other rules stop it.
    pub updates: i64,
    /// The number of vocabulary entries.
    pub vocabulary: usize,
    /// The number of entries in the target vocabulary.
    pub target_vocabulary: usize,
    pub device: String,
    /// The number of processes that train together.
    pub ranks: usize,
    pub precision: Precision,
    pub threads: usize,
    /// The entropy of the target's unigram distribution, in nats per token. The loss of a model that learns soon
    /// falls below it.
    pub unigram_entropy: f64,
}

/// The event of one update. Losses are in nats per target token.
#[derive(Clone, Debug, Serialize)]
pub struct Update {
    pub update: u64,
    pub epoch: u64,
    pub loss: f64,
    pub nll: f64,
    pub lr: f64,
    /// The global gradient norm before clipping.
    pub grad_norm: f64,
    /// The largest logit of all attentions in the update's batches, measured if `qk_clip` is on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub largest_logit: Option<f64>,
    /// The number of real target tokens in this update.
    pub tokens: usize,
    /// The number of real target tokens per second, averaged over the latest updates.
    pub tokens_per_second: f64,
    /// The training time so far in seconds, without evaluations.
    pub seconds: f64,
    /// The seconds until the last update, at the present speed; `None` if the option `updates` is 0.
    pub time_left: Option<f64>,
    /// The numbers that `log_layers` requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<Layers>,
    /// The numbers that `log_statistics` requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub statistics: Option<Watched>,
}

/// The event after an evaluation on the validation set. Losses are in nats per target token.
#[derive(Clone, Debug, Serialize)]
pub struct Evaluation {
    pub update: u64,
    pub epoch: u64,
    pub loss: f64,
    pub nll: f64,
    pub perplexity: f64,
    /// `None` if BLEU was not computed.
    pub bleu: Option<f64>,
    /// True if this is the best evaluation of the run so far.
    pub best: bool,
    /// The duration of this evaluation.
    pub seconds: f64,
}

/// The event after a checkpoint has been written.
#[derive(Clone, Debug, Serialize)]
pub struct Saved {
    pub update: u64,
}
