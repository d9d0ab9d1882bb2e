//! The interface of a residual scheme.

use super::declared::{Change, Point, ResidualSpec, StackSpec};
use super::place::LayerContext;
use crate::error::Result;
use crate::options::{AnyOption, Options};

/// A residual scheme of the table. Its functions return the declarations for one place in a model.
pub struct Scheme {
    /// The name by which users choose the scheme.
    pub name: &'static str,
    pub equation: &'static str,
    pub source: &'static str,
    pub options: &'static [&'static dyn AnyOption],
    /// Errors if options of the scheme have no effect, because of its other options.
    pub check: fn(&Options) -> Result<()>,
    /// The name of the initialisation that is used with the scheme by default.
    pub init: &'static str,
    /// Returns the residual connection around a sublayer at this place.
    pub around: fn(&LayerContext) -> ResidualSpec,
    /// Returns the changes inside a sublayer at this place.
    pub inside: fn(&LayerContext) -> Vec<(Point, Change)>,
    /// Returns the changes that x gets when a layer begins.
    pub layer: fn(&LayerContext) -> Vec<Change>,
    /// Returns what belongs to the whole stack: the changes before the first layer, between layers, and after the
    /// last.
    pub stack: fn(&LayerContext) -> StackSpec,
    /// True if linear layers have biases in models with this scheme.
    pub has_biases: bool,
    /// The reason why branches' outputs do not simply add up; then no factor of F(x) that depends on the depth can be
    /// used. `None` if they do add up.
    pub own_depth: Option<&'static str>,
    /// True if the scheme keeps vectors at length 1. Then it sets the factor of attention's scores itself, and the
    /// numbers in its vectors fall as 1/√d.
    pub on_sphere: bool,
    /// True if profiling on the first batch sets the gains of x (docs/spec.md §3.4).
    pub is_profiled: bool,
}

impl Scheme {
    /// The scheme x⁺ = x + F(x). The entries of the table are made from it by replacing fields.
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
        on_sphere: false,
        is_profiled: false,
    };
}
