//! The settings of a forward pass.

use super::linear::{linear, FlatBuffers};
use super::norm::RowContext;
use super::positions::Rotation;
use super::prepared::PreparedWeights;
use super::residual::KeptTensors;
use super::running::UsedStatistics;
use super::{times, Packed};
use crate::analysis::Watch;
use crate::config::TransformerConfig;
use crate::error::{Error, Result};
use crate::operator::{ProcessGroup, Recording};
use crate::parametrisation::UnitScaled;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use tch::{Kind, Tensor};

/// The dropout rates of a model.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rates {
    pub embedding: f64,
    pub attention: f64,
    pub activation: f64,
    pub residual: f64,
}

impl Rates {
    /// Returns the rates of a configuration; those that it leaves out are `dropout`.
    pub fn of(config: &TransformerConfig) -> Self {
        let or_default = |p: Option<f64>| p.unwrap_or(config.dropout);
        Rates {
            embedding: or_default(config.embedding_dropout),
            attention: or_default(config.attention_dropout),
            activation: or_default(config.activation_dropout),
            residual: config.dropout,
        }
    }
}

/// The settings of one forward pass, such as training or evaluation, the seed of dropout, and the type of products.
#[derive(Debug)]
pub struct Context {
    pub train: bool,
    pub rates: Rates,
    /// The seed of dropout, int64 (seed, update, micro-batch); `None` means no dropout.
    pub seed: Option<Tensor>,
    /// The type of matrix products. The residual stream and statistics keep their own types.
    pub kind: Kind,
    /// True while profiling sets the gains on x (docs/spec.md §3.4).
    pub profile: bool,
    /// True to keep only the input of each layer, and to run the layer again for its gradients.
    pub recompute: bool,
    /// True during the recomputation: the first run has already updated the statistics.
    pub is_recompute: bool,
    /// True for a micro-batch that is not the last of its update.
    pub is_partial: bool,
    /// True to measure the largest logit of each head.
    pub measures_logits: bool,
    /// The process group whose ranks' rows form one batch for norms with statistics.
    pub group: ProcessGroup,
    /// The statistics that norms used in this pass, kept for the recomputation.
    statistics: UsedStatistics,
    /// True at rows that belong to no sentence; `None` if every row belongs to one.
    spare: Option<Tensor>,
    /// The tokens of the rows and their positions, each int64 (rows).
    tokens: Option<(Tensor, Tensor)>,
    /// The rotation of queries and keys, if positions are rotary.
    rotation: Option<Rc<Rotation>>,
    /// The flat buffers of parameters and gradients; if set, linear layers add to the gradients there.
    flat: Option<Rc<FlatBuffers>>,
    /// True if products with a layer's matrices are multiplied by fan_in^(−1/2), as under u-μP.
    is_unit_scaled: bool,
    /// Weights prepared for many products; only for passes between which the weights do not change.
    prepared: Option<Arc<PreparedWeights>>,
    /// The watch to which this pass shows what it computes, if there is one.
    watch: Option<Rc<dyn Watch>>,
    /// The tensors that the running stack's layers have kept for later layers.
    kept_tensors: Rc<KeptTensors>,
    dropout_site: Rc<Cell<i64>>,
}

impl Context {
    /// Returns the settings of an evaluation pass, without dropout; `kind` is the type of matrix products.
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
            measures_logits: false,
            group: ProcessGroup::ALONE,
            statistics: UsedStatistics::default(),
            spare: None,
            tokens: None,
            rotation: None,
            flat: None,
            is_unit_scaled: false,
            prepared: None,
            watch: None,
            kept_tensors: Rc::default(),
            dropout_site: Rc::default(),
        }
    }

    /// Returns the settings of a training pass; `kind` is the type of matrix products.
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
            measures_logits: false,
            group: ProcessGroup::ALONE,
            statistics: UsedStatistics::default(),
            spare: None,
            tokens: None,
            rotation: None,
            flat: None,
            is_unit_scaled: false,
            prepared: None,
            watch: None,
            kept_tensors: Rc::default(),
            dropout_site: Rc::default(),
        }
    }

    /// Turns on activation checkpointing if `on`: layers run again for their gradients.
    pub fn recomputing(self, on: bool) -> Self {
        Context { recompute: on, ..self }
    }

    /// Marks the pass as a micro-batch that is not the last of its update, if `on`.
    pub fn partial(self, on: bool) -> Self {
        Context { is_partial: on, ..self }
    }

    /// Measures the largest logit of each head, if `on`. A recomputation measures none.
    pub fn measuring_logits(self, on: bool) -> Self {
        Context { measures_logits: on, ..self }
    }

    /// Sets the process group whose ranks run this pass together.
    pub fn across(self, group: ProcessGroup) -> Self {
        Context { group, ..self }
    }

    /// Multiplies products with layers' matrices by fan_in^(−1/2), if `on`.
    pub fn unit_scaled(self, on: bool) -> Self {
        Context { is_unit_scaled: on, ..self }
    }

    /// Lets linear layers add to the gradients in these flat buffers.
    pub fn adding_to(self, flat: Option<Rc<FlatBuffers>>) -> Self {
        Context { flat, ..self }
    }

    /// Uses prepared weights; for several passes between which the weights do not change.
    pub fn with_prepared(self, weights: Arc<PreparedWeights>) -> Self {
        Context { prepared: Some(weights), ..self }
    }

    /// Returns a copy of the settings, for a run that begins at the current dropout site. `is_recompute` is true for
    /// the second run of a layer, which computes its gradients.
    pub fn fork(&self, is_recompute: bool) -> Self {
        let dropout_site = Rc::new(Cell::new(self.dropout_site.get()));
        Context { is_recompute, dropout_site, kept_tensors: Rc::default(), ..self.clone() }
    }

    /// Returns the settings for the rows of one side, encoder or decoder, with the side's padding and tokens.
    pub fn over(&self, side: &Packed) -> Self {
        let tokens = Some((side.tokens.shallow_clone(), side.positions.shallow_clone()));
        Context { spare: side.spare.as_ref().map(Tensor::shallow_clone), tokens, ..self.clone() }
    }

    /// Returns the rows' tokens, int64 (rows); errors in a pass without tokens.
    pub fn tokens(&self) -> Result<&Tensor> {
        self.tokens.as_ref().map(|(tokens, _)| tokens).ok_or_else(no_tokens)
    }

    /// Returns the rows' positions in their sentences, int64 (rows); errors in a pass without tokens.
    pub fn positions(&self) -> Result<&Tensor> {
        self.tokens.as_ref().map(|(_, positions)| positions).ok_or_else(no_tokens)
    }

    /// Sets the rotation of the rows' queries and keys.
    pub fn turning(self, rotation: Option<Rotation>) -> Self {
        Context { rotation: rotation.map(Rc::new), ..self }
    }

    /// True if parameters and gradients lie in flat buffers, as in a training loop on a CPU.
    pub fn has_flat(&self) -> bool {
        self.flat.is_some()
    }

    /// True if positions rotate queries and keys.
    pub fn turns(&self) -> bool {
        self.rotation.is_some()
    }

    /// Rotates queries or keys by the positions of their rows; returns them unchanged if positions are not rotary.
    pub fn turned(&self, x: Tensor) -> Result<Tensor> {
        match &self.rotation {
            Some(rotation) => rotation.turn(&x),
            None => Ok(x),
        }
    }

    /// Returns a copy of the settings, which shares all tensors and the counter of dropout sites.
    fn clone(&self) -> Self {
        // Tensors have no `Clone`, so this function cannot be derived.
        let shared = |t: &Option<Tensor>| t.as_ref().map(Tensor::shallow_clone);
        let (seed, spare) = (shared(&self.seed), shared(&self.spare));
        let (statistics, watch, kept_tensors, dropout_site) =
            (self.statistics.clone(), self.watch.clone(), self.kept_tensors.clone(), self.dropout_site.clone());
        let tokens = self.tokens.as_ref().map(|(ids, positions)| (ids.shallow_clone(), positions.shallow_clone()));
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

    /// Makes this pass a profiling pass, which sets the gains on x (docs/spec.md §3.4).
    pub fn profiling(self) -> Self {
        Context { profile: true, ..self }
    }

    /// Shows `watch` what the pass computes.
    pub fn watched(self, watch: Rc<dyn Watch>) -> Self {
        Context { watch: Some(watch), ..self }
    }

    /// Returns the watch to which this pass shows what it computes, if there is one.
    pub fn watch(&self) -> Option<&dyn Watch> {
        self.watch.as_deref()
    }

    /// Calls `record` with the watch, if there is one.
    pub fn show(&self, record: impl FnOnce(&dyn Watch) -> Result<()>) -> Result<()> {
        self.watch.as_deref().map_or(Ok(()), record)
    }

    /// Computes y = x Wᵀ + b in the type of products; under u-μP, (x Wᵀ + b)·fan_in^(−1/2). x is (…, fan_in), W is
    /// (fan_out, fan_in).
    pub fn linear(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        // Products with prepared weights record no gradients.
        let y = match &self.prepared {
            Some(weights) if !Recording::is_on() => weights.linear(x, weight, bias, self.kind),
            _ => linear(x, weight, bias, self.kind, self.flat.as_deref()),
        }?;
        let y = times(y, if self.is_unit_scaled { UnitScaled::product(weight.size()[1]) } else { 1.0 })?;
        self.show(|watch| watch.product(weight, x, &y))?;
        Ok(y)
    }

    /// Returns the tensors that layers of the running stack have kept, by name.
    pub fn kept_tensors(&self) -> &KeptTensors {
        &self.kept_tensors
    }

    /// Returns the number of the next dropout in this pass, its site, which selects the dropout's mask. Sites are
    /// numbered in order of execution, even if their rate is zero.
    pub fn dropout_site(&self) -> i64 {
        self.dropout_site.replace(self.dropout_site.get() + 1)
    }

    /// Returns the number of dropout sites passed so far, which is the number of the next one.
    pub fn dropout_sites(&self) -> i64 {
        self.dropout_site.get()
    }

    /// Sets the number of the next dropout site.
    pub fn set_dropout_sites(&self, dropout_sites: i64) {
        self.dropout_site.set(dropout_sites);
    }

    /// Returns the facts about the pass and its packed rows that norms need. Rows that belong to no sentence are
    /// padding.
    pub fn rows(&self) -> RowContext<'_> {
        // Norms update no statistics in a recomputation, and neither may a profiling pass.
        let is_recompute = self.is_recompute || self.profile;
        // Norms store the statistics that they use only if layers will run again for their gradients.
        let statistics = self.recompute.then_some(&self.statistics);
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

/// Returns the error of a model that reads tokens or positions, in a pass that has none.
fn no_tokens() -> Error {
    Error::invalid("this pass has no tokens, and the model reads them")
}
