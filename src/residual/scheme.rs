//! The interface of a residual scheme.

use super::declared::{Change, Point, ResidualSpec, StackSpec};
use super::place::LayerContext;
use crate::error::Result;
use crate::options::{AnyOption, Options};

/// A built-in residual scheme. Its functions return the declarations for one place in a model.
pub struct Scheme {
    /// The name by which users choose the scheme.
    pub name: &'static str,
    pub equation: &'static str,
    pub source: &'static str,
    pub options: &'static [&'static dyn AnyOption],
    /// Errors if an option of the scheme is set, but has no effect because of the scheme's other options.
    pub check: fn(&Options) -> Result<()>,
    /// The name of the initialisation that is used with the scheme by default.
    pub init: &'static str,
    /// Returns the residual connection around a sublayer at this place.
    pub around: fn(&LayerContext) -> ResidualSpec,
    /// Returns the changes inside a sublayer at this place.
    pub inside: fn(&LayerContext) -> Vec<(Point, Change)>,
    /// Returns the changes of x at a layer's beginning.
    pub layer: fn(&LayerContext) -> Vec<Change>,
    /// Returns the parts that belong to the whole stack: before the first layer, between layers, and after the last.
    pub stack: fn(&LayerContext) -> StackSpec,
    /// True if linear layers have biases in models with this scheme.
    pub has_biases: bool,
    /// The reason why the residual stream is not a plain sum of branch outputs; `None` if it is one. Parametrisations
    /// whose factor of F(x) depends on the depth need a plain sum.
    pub own_depth: Option<&'static str>,
    /// True if the scheme keeps vectors at length 1. Then the scheme sets the factor of attention's scores, and the
    /// elements of its vectors shrink as 1/√d.
    pub on_sphere: bool,
    /// True if profiling on the first batch sets the gains of x (docs/spec.md §3.4).
    pub is_profiled: bool,
}

impl Scheme {
    /// The scheme x⁺ = x + F(x). Each built-in scheme replaces some of its fields.
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
