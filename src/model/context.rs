//! A forward pass's settings beside its inputs.

use super::linear::{linear, FlatBuffers};
use super::norm::RowContext;
use super::positions::Rotation;
use super::prepared::PreparedWeights;
use super::residual::KeptTensors;
use super::running::UsedStatistics;
use super::Packed;
use crate::analysis::Watch;
use crate::config::TransformerConfig;
use crate::error::Result;
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

/// One forward pass: training or not, its random numbers, its computing type.
#[derive(Debug)]
pub struct Context {
    pub train: bool,
    pub rates: Rates,
    /// int64 (seed, update, micro-batch); none: no dropout.
    pub seed: Option<Tensor>,
    /// The type of matrix products; residual stream and statistics keep their own.
    pub kind: Kind,
    /// Gains on x are being set by profiling (docs/spec.md §3.4).
    pub profile: bool,
    /// Keep only what enters each layer, and run layers again for their gradients.
    pub recompute: bool,
    /// This is the recomputation: statistics have moved already.
    pub is_recompute: bool,
    /// Of a micro-batch that is not its update's last.
    pub is_partial: bool,
    /// Ranks whose rows are one batch for norms with statistics.
    pub group: ProcessGroup,
    /// The statistics that norms used, for the second run.
    statistics: UsedStatistics,
    /// True at rows that belong to no sentence; none: there are no such rows.
    spare: Option<Tensor>,
    /// Of the rows' queries and keys, where positions are rotary.
    rotation: Option<Rc<Rotation>>,
    /// Where parameters and their gradients lie, if linear layers add to gradients there.
    flat: Option<Rc<FlatBuffers>>,
    /// Weights that do not change between passes, if there are several.
    prepared: Option<Arc<PreparedWeights>>,
    watch: Option<Rc<Watch>>,
    /// Tensors that the running stack's layers have kept.
    kept_tensors: Rc<KeptTensors>,
    dropout_site: Rc<Cell<i64>>,
}

impl Context {
    /// Evaluation: nothing is dropped.
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
            rotation: None,
            flat: None,
            prepared: None,
            watch: None,
            kept_tensors: Rc::default(),
            dropout_site: Rc::default(),
        }
    }

    /// The same pass with activation checkpointing, if `on`.
    pub fn recomputing(self, on: bool) -> Self {
        Context { recompute: on, ..self }
    }

    /// The same pass, of a micro-batch that is not its update's last, if `on`.
    pub fn partial(self, on: bool) -> Self {
        Context { is_partial: on, ..self }
    }

    /// The same pass on every rank of a group.
    pub fn across(self, group: ProcessGroup) -> Self {
        Context { group, ..self }
    }

    /// The same pass, adding to gradients in these buffers.
    pub fn adding_to(self, flat: Option<Rc<FlatBuffers>>) -> Self {
        Context { flat, ..self }
    }

    /// The same pass, one of several with the same weights.
    pub fn with_prepared(self, weights: Arc<PreparedWeights>) -> Self {
        Context { prepared: Some(weights), ..self }
    }

    /// This pass from where it stands, to be run later; `is_recompute`: for its gradient, a second time.
    pub fn fork(&self, is_recompute: bool) -> Self {
        let dropout_site = Rc::new(Cell::new(self.dropout_site.get()));
        Context { is_recompute, dropout_site, kept_tensors: Rc::default(), ..self.clone() }
    }

    /// This pass over one side of it, on whose rows norms with statistics look.
    pub fn over(&self, side: &Packed) -> Self {
        Context { spare: side.spare.as_ref().map(Tensor::shallow_clone), ..self.clone() }
    }

    /// The same pass, the queries and keys of its rows turned so.
    pub fn turning(self, rotation: Option<Rotation>) -> Self {
        Context { rotation: rotation.map(Rc::new), ..self }
    }

    /// Parameters and their gradients lie in the flat buffers of a training loop on a CPU.
    pub fn has_flat(&self) -> bool {
        self.flat.is_some()
    }

    /// Positions turn queries and keys.
    pub fn turns(&self) -> bool {
        self.rotation.is_some()
    }

    /// Queries or keys of the pass's rows, turned by their positions where those are rotary.
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
        let (rotation, flat, prepared) = (self.rotation.clone(), self.flat.clone(), self.prepared.clone());
        Context { seed, spare, rotation, statistics, watch, kept_tensors, dropout_site, flat, prepared, ..*self }
    }

    /// The same pass, setting gains by profiling.
    pub fn profiling(self) -> Self {
        Context { profile: true, ..self }
    }

    /// The same pass, looked at.
    pub fn watched(self, watch: Rc<Watch>) -> Self {
        Context { watch: Some(watch), ..self }
    }

    /// Who looks at this pass.
    pub fn watch(&self) -> Option<&Watch> {
        self.watch.as_deref()
    }

    /// Passes something to the watch, if there is one.
    pub fn show(&self, what: impl FnOnce(&Watch) -> Result<()>) -> Result<()> {
        self.watch.as_deref().map_or(Ok(()), what)
    }

    /// y = x Wᵀ + b in the computing type.
    pub fn linear(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        match &self.prepared {
            Some(weights) if !Recording::is_on() => weights.linear(x, weight, bias, self.kind),
            _ => linear(x, weight, bias, self.kind, self.flat.as_deref()),
        }
    }

    /// Tensors that the running stack's layers have kept, by name.
    pub fn kept_tensors(&self) -> &KeptTensors {
        &self.kept_tensors
    }

    /// The next dropout site: sites are numbered in order of execution, whether or not their rate is zero.
    pub fn dropout_site(&self) -> i64 {
        self.dropout_site.replace(self.dropout_site.get() + 1)
    }

    /// Dropout sites passed so far.
    pub fn dropout_sites(&self) -> i64 {
        self.dropout_site.get()
    }

    /// As if so many dropout sites had been passed.
    pub fn set_dropout_sites(&self, dropout_sites: i64) {
        self.dropout_site.set(dropout_sites);
    }

    /// Packed rows: real but for those that fill a batch up. Profiling moves no statistics.
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
