//! The events of a run.

use super::layers::Layers;
use super::watched::Watched;
use crate::config::Precision;
use crate::error::Result;
use serde::Serialize;

/// Receives a run's events. An `Err` from any of these stops it; [`Interrupted`](crate::error::Error::Interrupted)
/// saves first.
pub trait Observer {
    fn started(&mut self, _: &Started) -> Result<()> {
        Ok(())
    }
    fn updated(&mut self, _: &Update) -> Result<()> {
        Ok(())
    }
    fn evaluated(&mut self, _: &Evaluation) -> Result<()> {
        Ok(())
    }
    fn saved(&mut self, _: &Saved) -> Result<()> {
        Ok(())
    }
    /// The interrupt check of long work without events: preparing data, evaluating.
    fn check_interrupt(&mut self) -> Result<()> {
        Ok(())
    }
    fn message(&mut self, _level: &str, _text: &str) -> Result<()> {
        Ok(())
    }
}

/// What is about to be trained.
#[derive(Clone, Debug, Serialize)]
pub struct Started {
    pub parameters: usize,
    pub updates_per_epoch: f64,
    /// Updates done already.
    pub update: u64,
    pub updates: i64,
    pub vocabulary: usize,
    /// Types in the target vocabulary.
    pub target_vocabulary: usize,
    pub device: String,
    /// Processes that train together.
    pub ranks: usize,
    pub precision: Precision,
    pub threads: usize,
    /// Entropy of the target's unigram distribution, in nats per token: what an untrained model should soon beat.
    pub unigram_entropy: f64,
}

/// One update. Losses in nats per target token.
#[derive(Clone, Debug, Serialize)]
pub struct Update {
    pub update: u64,
    pub epoch: u64,
    pub loss: f64,
    pub nll: f64,
    pub lr: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Real target tokens of this update.
    pub tokens: usize,
    /// Real target tokens per second, over the last updates.
    pub tokens_per_second: f64,
    /// Training time so far, evaluations left out.
    pub seconds: f64,
    /// Until the last update at this rate; none where nothing but patience ends the run.
    pub time_left: Option<f64>,
    /// Where `log_layers` asks for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<Layers>,
    /// Where `log_statistics` asks for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub statistics: Option<Watched>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Evaluation {
    pub update: u64,
    pub epoch: u64,
    pub loss: f64,
    pub nll: f64,
    pub perplexity: f64,
    pub bleu: Option<f64>,
    pub best: bool,
    pub seconds: f64,
}

/// A checkpoint that stands.
#[derive(Clone, Debug, Serialize)]
pub struct Saved {
    pub update: u64,
}
