//! Sandwich: `x⁺ = x + N(F(N(x)))` (Ding et al. 2021).

use super::{prenorm::PreNorm, LayerContext, NormAt, ResidualSpec, Scheme, StackSpec};

pub struct Sandwich;

impl Scheme for Sandwich {
    fn name(&self) -> &'static str {
        "sandwich"
    }

    fn equation(&self) -> &'static str {
        "x⁺ = x + N(F(N(x))), N after the stack"
    }

    fn source(&self) -> &'static str {
        "Ding et al. 2021"
    }

    fn around(&self, place: &LayerContext) -> ResidualSpec {
        let branch = NormAt { name: place.numbered("post_norm"), ..place.norm() };
        ResidualSpec { branch: branch.into(), ..PreNorm.around(place) }
    }

    fn stack(&self, place: &LayerContext) -> StackSpec {
        PreNorm.stack(place)
    }
}
