//! Bottom-to-top: PostNorm whose last sublayer of a layer adds the layer's input, too (Takase et al. 2023).

use super::{postnorm::PostNorm, Around, Flow, Place, Scheme};

pub struct B2T;

impl Scheme for B2T {
    fn name(&self) -> &'static str {
        "b2t"
    }

    fn equation(&self) -> &'static str {
        "x⁺ = N(x + F(x)); in a layer's last sublayer x⁺ = N(x₀ + x + F(x)), x₀ the layer's input"
    }

    fn source(&self) -> &'static str {
        "Takase et al. 2023"
    }

    fn init(&self) -> &'static str {
        "b2t"
    }

    fn around(&self, place: &Place) -> Around {
        Around { adds_bottom: place.index + 1 == place.sublayers, ..PostNorm.around(place) }
    }

    fn stack(&self, place: &Place) -> Flow {
        PostNorm.stack(place)
    }
}
