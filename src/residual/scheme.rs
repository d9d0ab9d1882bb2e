//! What a scheme says.

use super::declared::{Change, Point, ResidualSpec, StackSpec};
use super::place::LayerContext;
use crate::error::Result;
use crate::options::{AnyOption, Options};

/// A residual scheme of the table. Its functions declare, for a place in a model, what stands there.
pub struct Scheme {
    /// The name users give.
    pub name: &'static str,
    pub equation: &'static str,
    pub source: &'static str,
    pub options: &'static [&'static dyn AnyOption],
    /// Refuses options that others of its own make useless.
    pub check: fn(&Options) -> Result<()>,
    /// The initialisation that goes with it.
    pub init: &'static str,
    /// Around a sublayer.
    pub around: fn(&LayerContext) -> ResidualSpec,
    /// Inside a sublayer.
    pub inside: fn(&LayerContext) -> Vec<(Point, Change)>,
    /// On x as a layer begins.
    pub layer: fn(&LayerContext) -> Vec<Change>,
    /// How layers follow each other, and what follows the last.
    pub stack: fn(&LayerContext) -> StackSpec,
    /// Linear layers have biases.
    pub has_biases: bool,
    /// Why the outputs of branches do not simply add up, so that no factor of theirs can follow the depth; none: they do.
    pub own_depth: Option<&'static str>,
    /// The gains on x are set by profiling the first batch (docs/spec.md §3.4).
    pub is_profiled: bool,
}

impl Scheme {
    /// x⁺ = x + F(x). Every entry of the table names what differs.
    pub const PLAIN: Scheme = Scheme {
        name: "",
        equation: "",
        source: "",
        options: &[],
        check: |_| Ok(()),
        init: "xavier",
        around: |_| ResidualSpec::default(),
        inside: |_| Vec::new(),
        layer: |_| Vec::new(),
        stack: |_| StackSpec::default(),
        has_biases: true,
        own_depth: None,
        is_profiled: false,
    };
}
