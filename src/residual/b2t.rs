//! Bottom-to-top: PostNorm whose last sublayer of a layer adds the layer's input, too (Takase et al. 2023).

use super::{postnorm::PostNorm, Change, Gain, LayerContext, ResidualSpec, Scheme, StackSpec};

/// What the layer's input is kept under.
const INPUT: &str = "layer_input";

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

    fn layer(&self, _: &LayerContext) -> Vec<Change> {
        vec![Change::Keep(INPUT.into())]
    }

    fn around(&self, place: &LayerContext) -> ResidualSpec {
        match place.index + 1 == place.sublayers {
            true => ResidualSpec {
                skip: vec![Change::Mix { name: INPUT.into(), own: Gain::One, kept: Gain::One }],
                ..PostNorm.around(place)
            },
            false => PostNorm.around(place),
        }
    }

    fn stack(&self, place: &LayerContext) -> StackSpec {
        PostNorm.stack(place)
    }
}
