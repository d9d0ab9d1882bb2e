//! LayerScale: `x⁺ = x + λ⊙F(N(x))`, λ small at the start (Touvron et al. 2021).

use super::{prenorm::PreNorm, Around, Flow, Gain, Learned, Place, Scheme};
use crate::options::{setting, Listed};

setting! {
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

    fn options(&self) -> &'static [&'static dyn Listed] {
        &[&START]
    }

    fn around(&self, place: &Place) -> Around {
        let lambda = Learned::new(place.numbered("branch_scale"), &[place.model.d_model], place.options.get(&START));
        Around { beta: Gain::Learned(lambda), ..PreNorm.around(place) }
    }

    fn stack(&self, place: &Place) -> Flow {
        PreNorm.stack(place)
    }
}
