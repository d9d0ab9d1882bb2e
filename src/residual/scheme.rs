//! What a scheme must say.

use super::declared::{Change, Point, ResidualSpec, StackSpec};
use super::place::LayerContext;
use crate::error::Result;
use crate::options::{AnyOption, Options};

pub trait Scheme: Send + Sync {
    fn name(&self) -> &str;
    fn equation(&self) -> &str;
    fn source(&self) -> &str;

    /// Its options.
    fn options(&self) -> &'static [&'static dyn AnyOption] {
        &[]
    }

    /// Refuses options that others of its own make useless.
    fn check(&self, _: &Options) -> Result<()> {
        Ok(())
    }

    /// The initialisation that goes with it.
    fn init(&self) -> &str {
        "xavier"
    }

    /// Around a sublayer.
    fn around(&self, place: &LayerContext) -> ResidualSpec;

    /// Inside a sublayer.
    fn inside(&self, _: &LayerContext) -> Vec<(Point, Change)> {
        Vec::new()
    }

    /// On x as a layer begins.
    fn layer(&self, _: &LayerContext) -> Vec<Change> {
        Vec::new()
    }

    /// How layers follow each other, and what follows the last.
    fn stack(&self, place: &LayerContext) -> StackSpec;

    /// Linear layers have biases.
    fn has_biases(&self) -> bool {
        true
    }

    /// Why the outputs of branches do not simply add up, so that no factor of theirs can follow the depth; none: they do.
    fn own_depth(&self) -> Option<&'static str> {
        None
    }

    /// The gains on x are set by profiling the first batch (docs/spec.md §3.4).
    fn is_profiled(&self) -> bool {
        false
    }
}
