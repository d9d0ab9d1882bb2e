//! A residual scheme that a user declares. Like the declarations of built-in schemes, it is plain data.
//!
//! Python's `Scheme` classes create this data (python/normformer_rs/schemes.py). The config.json of a run stores it,
//! so that the run can be loaded without the class.

use super::check::check;
#[cfg(test)]
use super::Scheme;
use super::{LayerContext, LayerSpec, StackName, StackSpec, SublayerSpec};
use crate::error::{Error, Result};
use crate::residual::SCHEMES;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A user's declaration of a scheme, for a model of fixed size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GivenScheme {
    pub name: String,
    #[serde(default)]
    pub equation: String,
    #[serde(default)]
    pub source: String,
    #[serde(default = "xavier")]
    pub init: String,
    #[serde(default = "yes")]
    pub has_biases: bool,
    #[serde(default)]
    pub is_profiled: bool,
    /// The declaration of each stack, under "encoder" or "decoder".
    pub stacks: BTreeMap<StackName, GivenStack>,
}

/// The declaration of a stack.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GivenStack {
    pub layers: Vec<LayerSpec>,
    #[serde(default)]
    pub stack: StackSpec,
}

/// Returns serde's default of [`GivenScheme::init`].
fn xavier() -> String {
    "xavier".into()
}

/// Returns serde's default of [`GivenScheme::has_biases`].
fn yes() -> bool {
    true
}

impl GivenScheme {
    /// Converts a built-in scheme to the data of a declared one, for one stack of a model.
    #[cfg(test)]
    pub fn of(scheme: &Scheme, name: &str, first: &LayerContext) -> Self {
        let layer = |layer| {
            let place = LayerContext { layer, ..*first };
            let sublayer = |place: LayerContext| SublayerSpec {
                around: (scheme.around)(&place),
                inside: (scheme.inside)(&place),
                scale: 1.0,
            };
            LayerSpec { begin: (scheme.layer)(&place), sublayers: place.each().map(sublayer).collect() }
        };
        let stack = GivenStack { layers: (0..first.layers()).map(layer).collect(), stack: (scheme.stack)(first) };
        GivenScheme {
            name: name.into(),
            equation: scheme.equation.into(),
            source: scheme.source.into(),
            init: scheme.init.into(),
            has_biases: scheme.has_biases,
            is_profiled: scheme.is_profiled,
            stacks: [(first.stack, stack)].into(),
        }
    }

    /// Errors if the name has forbidden characters or is a built-in scheme's.
    pub fn check_name(&self) -> Result<()> {
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_' || c == '.';
        let wrong = |why: &str| {
            Err(Error::invalid(format!("a residual scheme's name must {why}, got {:?}: give it another", self.name)))
        };
        if self.name.is_empty() || !self.name.chars().all(is_word) {
            return wrong("be made of letters, digits, -, _ and .");
        }
        if SCHEMES.iter().any(|scheme| scheme.name == self.name) {
            return wrong("be none of this package's");
        }
        Ok(())
    }

    /// Errors if the declaration cannot be built as a stack of the model; `first` is the stack's first sublayer.
    pub fn check(&self, first: &LayerContext) -> Result<()> {
        let named = |why: String| Error::invalid(format!("residual {:?}: {why}", self.name));
        let stack = self.stacks.get(&first.stack).ok_or_else(|| {
            named(format!(
                "it declares no {}, and this model has one: declare it again for this model",
                first.stack.name()
            ))
        })?;
        check(&stack.layers, &stack.stack, first).map_err(named)
    }

    /// Returns the declaration of the layer at this place; `None` if the declaration has no such layer.
    pub fn layer_at(&self, place: &LayerContext) -> Option<&LayerSpec> {
        self.stacks.get(&place.stack)?.layers.get(place.layer as usize)
    }

    /// Returns the declaration of the sublayer at this place; `None` if the declaration has no such sublayer.
    pub fn sublayer_at(&self, place: &LayerContext) -> Option<&SublayerSpec> {
        self.layer_at(place)?.sublayers.get(place.index as usize)
    }

    /// Returns the parts of the whole stack of this place; `None` if the declaration has no such stack.
    pub fn stack_at(&self, place: &LayerContext) -> Option<&StackSpec> {
        Some(&self.stacks.get(&place.stack)?.stack)
    }
}
