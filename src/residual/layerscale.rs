//! LayerScale: `x⁺ = x + λ⊙F(N(x))`, λ small at the start (Touvron et al. 2021).

use super::{prenorm::PreNorm, Gain, LayerContext, Learned, ResidualSpec, Scheme, StackSpec};
use crate::options::{option_spec, AnyOption};

option_spec! {
    /// λ of layerscale at the start.
    START ("layerscale_init"): f64 = 1e-4;
}

pub struct LayerScale;

impl Scheme for LayerScale {
    fn name(&self) -> &'static str {
        "layerscale"
    }

    fn equation(&self) -> &'static str {
        "x⁺ = x + λ⊙F(N(x)), λ ∈ R^d, N after the stack"
    }

    fn source(&self) -> &'static str {
        "Touvron et al. 2021"
    }

    fn options(&self) -> &'static [&'static dyn AnyOption] {
        &[&START]
    }

    fn around(&self, place: &LayerContext) -> ResidualSpec {
        let lambda = Learned::new(place.numbered("branch_scale"), &[place.model.d_model], place.options.get(&START));
        ResidualSpec { beta: Gain::Learned(lambda), ..PreNorm.around(place) }
    }

    fn stack(&self, place: &LayerContext) -> StackSpec {
        PreNorm.stack(place)
    }
}
