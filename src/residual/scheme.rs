//! What a scheme must say.

use super::declared::{Around, Change, Flow, Learned, Point};
use super::place::Place;
use crate::options::Listed;

pub trait Scheme: Sync {
    fn name(&self) -> &'static str;
    fn equation(&self) -> &'static str;
    fn source(&self) -> &'static str;

    /// Its options.
    fn options(&self) -> &'static [&'static dyn Listed] {
        &[]
    }

    /// The initialisation that goes with it.
    fn init(&self) -> &'static str {
        "xavier"
    }

    /// Around a sublayer.
    fn around(&self, place: &Place) -> Around;

    /// Inside a sublayer.
    fn inside(&self, _: &Place) -> Vec<(Point, Change)> {
        Vec::new()
    }

    /// Parameters that the sublayers of a layer share, for [`Gain::Shared`].
    fn layer(&self, _: &Place) -> Vec<Learned> {
        Vec::new()
    }

    /// How layers follow each other, and what follows the last.
    fn stack(&self, place: &Place) -> Flow;

    /// Linear layers have biases.
    fn has_biases(&self) -> bool {
        true
    }

    /// The gains on x are set by profiling the first batch (docs/spec.md §3.4).
    fn is_profiled(&self) -> bool {
        false
    }
}
