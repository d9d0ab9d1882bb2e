//! LayerScale: `x⁺ = x + λ⊙F(N(x))`, λ small at the start (Touvron et al. 2021).

use super::{prenorm::PreNorm, Around, Flow, Gain, Learned, Place, Scheme};

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

    fn around(&self, place: &Place) -> Around {
        let lambda =
            Learned::new(place.numbered("branch_scale"), &[place.config.d_model], place.config.layerscale_init);
        Around { beta: Gain::Learned(lambda), ..PreNorm.around(place) }
    }

    fn stack(&self, place: &Place) -> Flow {
        PreNorm.stack(place)
    }
}
