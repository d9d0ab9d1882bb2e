//! Depth-scaled residuals: the stream's variance does not grow with depth (Beam; `depth_scaled_residual_add`).

use super::{sandwich::Sandwich, Gain, LayerContext, ResidualSpec, Scheme, StackSpec};

pub struct DepthScaled;

impl Scheme for DepthScaled {
    fn name(&self) -> &'static str {
        "depth-scaled"
    }

    fn equation(&self) -> &'static str {
        "x⁺ = √((k − 1)/k)·x + N(F(N(x)))/√k, k the addition's number in its stack, from 2; N after the stack"
    }

    fn source(&self) -> &'static str {
        "Beam (transformers 5.23, BeamDecoderLayer)"
    }

    fn own_depth(&self) -> Option<&'static str> {
        Some("its k-th addition has the factors √((k−1)/k) and 1/√k")
    }

    fn init(&self) -> &'static str {
        "gpt2"
    }

    fn around(&self, place: &LayerContext) -> ResidualSpec {
        let k = (place.number() + 2) as f64;
        let (alpha, beta) = (Gain::Constant(((k - 1.0) / k).sqrt()), Gain::Constant(1.0 / k.sqrt()));
        ResidualSpec { alpha, beta, ..Sandwich.around(place) }
    }

    fn stack(&self, place: &LayerContext) -> StackSpec {
        Sandwich.stack(place)
    }
}
