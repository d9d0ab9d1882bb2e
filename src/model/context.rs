//! The settings of a forward pass.

use super::linear::{linear, FlatBuffers};
use super::norm::RowContext;
use super::positions::Rotation;
use super::prepared::PreparedWeights;
use super::residual::KeptTensors;
use super::running::UsedStatistics;
use super::Packed;
use crate::analysis::Watch;
use crate::config::TransformerConfig;
use crate::error::{Error, Result};
use crate::operator::{ProcessGroup, Recording};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use tch::{Kind, Tensor};

/// Dropout rates.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rates {
    pub embedding: f64,
    pub attention: f64,
    pub activation: f64,
    pub residual: f64,
}

impl Rates {
    pub fn of(config: &TransformerConfig) -> Self {
        let or = |p: Option<f64>| p.unwrap_or(config.dropout);
        Rates {
            embedding: or(config.embedding_dropout),
            attention: or(config.attention_dropout),
            activation: or(config.activation_dropout),
            residual: config.dropout,
        }
    }
}

/// The settings of one forward pass: training or evaluation, its random numbers, its computing type.
#[derive(Debug)]
pub struct Context {
    pub train: bool,
    pub rates: Rates,
    /// int64 (seed, update, micro-batch); `None` means no dropout.
    pub seed: Option<Tensor>,
    /// The type of matrix products; the residual stream and statistics keep their own types.
    pub kind: Kind,
    /// True while profiling sets the gains on x (docs/spec.md §3.4).
    pub profile: bool,
    /// True to keep only the input of each layer, and run layers again for their gradients.
    pub recompute: bool,
    /// True during the recomputation, when statistics have been updated already.
    pub is_recompute: bool,
    /// True for a micro-batch that is not the last of its update.
    pub is_partial: bool,
    /// The ranks whose rows form one batch for norms with statistics.
    pub group: ProcessGroup,
    /// The statistics that norms used, for the recomputation.
    statistics: UsedStatistics,
    /// True at rows that belong to no sentence; `None` if there are none.
    spare: Option<Tensor>,
    /// The rows' tokens and their positions, int64 (rows) each.
    tokens: Option<(Tensor, Tensor)>,
    /// The rotation of queries and keys, if positions are rotary.
    rotation: Option<Rc<Rotation>>,
    /// The flat buffers of parameters and gradients, if linear layers add to gradients there.
    flat: Option<Rc<FlatBuffers>>,
    /// Weights prepared for many products, if they do not change between several passes.
    prepared: Option<Arc<PreparedWeights>>,
    watch: Option<Rc<Watch>>,
    /// The tensors that layers of the running stack have kept.
    kept_tensors: Rc<KeptTensors>,
    dropout_site: Rc<Cell<i64>>,
}

impl Context {
    /// Returns the settings of an evaluation pass, without dropout.
    pub fn evaluation(kind: Kind) -> Self {
        Context {
            train: false,
            rates: Rates::default(),
            seed: None,
            kind,
            profile: false,
            recompute: false,
            is_recompute: false,
            is_partial: false,
            group: ProcessGroup::ALONE,
            statistics: UsedStatistics::default(),
            spare: None,
            tokens: None,
            rotation: None,
            flat: None,
            prepared: None,
            watch: None,
            kept_tensors: Rc::default(),
            dropout_site: Rc::default(),
        }
    }

    pub fn training(rates: Rates, seed: Tensor, kind: Kind) -> Self {
        Context {
            train: true,
            rates,
            seed: Some(seed),
            kind,
            profile: false,
            recompute: false,
            is_recompute: false,
            is_partial: false,
            group: ProcessGroup::ALONE,
            statistics: UsedStatistics::default(),
            spare: None,
            tokens: None,
            rotation: None,
            flat: None,
            prepared: None,
            watch: None,
            kept_tensors: Rc::default(),
            dropout_site: Rc::default(),
        }
    }

    /// Turns on activation checkpointing if `on`.
    pub fn recomputing(self, on: bool) -> Self {
        Context { recompute: on, ..self }
    }

    /// Marks the pass as a micro-batch that is not the last of its update, if `on`.
    pub fn partial(self, on: bool) -> Self {
        Context { is_partial: on, ..self }
    }

    /// Sets the group whose ranks run the same pass.
    pub fn across(self, group: ProcessGroup) -> Self {
        Context { group, ..self }
    }

    /// Lets the pass add to gradients in these buffers.
    pub fn adding_to(self, flat: Option<Rc<FlatBuffers>>) -> Self {
        Context { flat, ..self }
    }

    /// Uses prepared weights, for several passes with the same weights.
    pub fn with_prepared(self, weights: Arc<PreparedWeights>) -> Self {
        Context { prepared: Some(weights), ..self }
    }

    /// Returns the pass from its current dropout site, to be run later; `is_recompute` is true for the second run, for
    /// gradients.
    pub fn fork(&self, is_recompute: bool) -> Self {
        let dropout_site = Rc::new(Cell::new(self.dropout_site.get()));
        Context { is_recompute, dropout_site, kept_tensors: Rc::default(), ..self.clone() }
    }

    /// Returns the pass over one side's rows, which norms with statistics and layers that read tokens need.
    pub fn over(&self, side: &Packed) -> Self {
        let tokens = Some((side.tokens.shallow_clone(), side.positions.shallow_clone()));
        Context { spare: side.spare.as_ref().map(Tensor::shallow_clone), tokens, ..self.clone() }
    }

    /// Returns the rows' tokens, int64 (rows).
    pub fn tokens(&self) -> Result<&Tensor> {
        self.tokens.as_ref().map(|(tokens, _)| tokens).ok_or_else(no_tokens)
    }

    /// Returns the rows' positions in their sentences, int64 (rows).
    pub fn positions(&self) -> Result<&Tensor> {
        self.tokens.as_ref().map(|(_, positions)| positions).ok_or_else(no_tokens)
    }

    /// Sets the rotation of the rows' queries and keys.
    pub fn turning(self, rotation: Option<Rotation>) -> Self {
        Context { rotation: rotation.map(Rc::new), ..self }
    }

    /// True if parameters and gradients lie in the flat buffers of a training loop on a CPU.
    pub fn has_flat(&self) -> bool {
        self.flat.is_some()
    }

    /// True if positions rotate queries and keys.
    pub fn turns(&self) -> bool {
        self.rotation.is_some()
    }

    /// Rotates queries or keys of the pass's rows by their positions, if those are rotary.
    pub fn turned(&self, x: Tensor) -> Result<Tensor> {
        match &self.rotation {
            Some(rotation) => rotation.turn(&x),
            None => Ok(x),
        }
    }

    fn clone(&self) -> Self {
        let shared = |t: &Option<Tensor>| t.as_ref().map(Tensor::shallow_clone);
        let (seed, spare) = (shared(&self.seed), shared(&self.spare));
        let (statistics, watch, kept_tensors, dropout_site) =
            (self.statistics.clone(), self.watch.clone(), self.kept_tensors.clone(), self.dropout_site.clone());
        let tokens = self.tokens.as_ref().map(|(t, at)| (t.shallow_clone(), at.shallow_clone()));
        let (rotation, flat, prepared) = (self.rotation.clone(), self.flat.clone(), self.prepared.clone());
        Context {
            seed,
            spare,
            tokens,
            rotation,
            statistics,
            watch,
            kept_tensors,
            dropout_site,
            flat,
            prepared,
            ..*self
        }
    }

    /// Lets profiling set the gains.
    pub fn profiling(self) -> Self {
        Context { profile: true, ..self }
    }

    /// Records diagnostics in `watch`.
    pub fn watched(self, watch: Rc<Watch>) -> Self {
        Context { watch: Some(watch), ..self }
    }

    /// Returns the watch that records this pass, if there is one.
    pub fn watch(&self) -> Option<&Watch> {
        self.watch.as_deref()
    }

    /// Passes something to the watch, if there is one.
    pub fn show(&self, what: impl FnOnce(&Watch) -> Result<()>) -> Result<()> {
        self.watch.as_deref().map_or(Ok(()), what)
    }

    /// Computes y = x Wᵀ + b in the computing type.
    pub fn linear(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        match &self.prepared {
            Some(weights) if !Recording::is_on() => weights.linear(x, weight, bias, self.kind),
            _ => linear(x, weight, bias, self.kind, self.flat.as_deref()),
        }
    }

    /// Returns the tensors that layers of the running stack have kept, by name.
    pub fn kept_tensors(&self) -> &KeptTensors {
        &self.kept_tensors
    }

    /// Returns the next dropout site. Sites are numbered in order of execution, even if their rate is zero.
    pub fn dropout_site(&self) -> i64 {
        self.dropout_site.replace(self.dropout_site.get() + 1)
    }

    /// Returns the number of dropout sites passed so far.
    pub fn dropout_sites(&self) -> i64 {
        self.dropout_site.get()
    }

    /// Sets the number of dropout sites passed so far.
    pub fn set_dropout_sites(&self, dropout_sites: i64) {
        self.dropout_site.set(dropout_sites);
    }

    /// Returns the context of the packed rows, all real except those that fill up a batch. Profiling updates no
    /// statistics.
    pub fn rows(&self) -> RowContext<'_> {
        let (is_recompute, statistics) =
            (self.is_recompute || self.profile, self.recompute.then_some(&self.statistics));
        RowContext {
            train: self.train,
            is_recompute,
            is_partial: self.is_partial,
            pad_mask: self.spare.as_ref(),
            statistics,
            group: self.group,
            watch: self.watch.as_deref(),
            kept_tensors: Some(&self.kept_tensors),
        }
    }
}

fn no_tokens() -> Error {
    Error::invalid("this pass has no tokens, and the model reads them")
}
