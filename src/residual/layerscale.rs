//! LayerScale: `x⁺ = x + λ⊙F(N(x))`. λ starts small (Touvron et al. 2021).

use super::{prenorm::PRENORM, Gain, LayerContext, Learned, ResidualSpec, Scheme};
use crate::options::option_spec;

option_spec! {
    /// Initial value of layerscale's λ.
    START ("layerscale_init"): f64 = 1e-4;
}

pub static LAYERSCALE: Scheme = Scheme {
    name: "layerscale",
    equation: "x⁺ = x + λ⊙F(N(x)), λ ∈ R^d, N after the stack",
    source: "Touvron et al. 2021",
    options: &[&START],
    around,
    stack: PRENORM.stack,
    ..Scheme::PLAIN
};

/// Declares x⁺ = x + λ⊙F(N(x)) with a learned λ per column.
fn around(place: &LayerContext) -> ResidualSpec {
    let lambda = Learned::new(place.numbered("branch_scale"), &[place.model.d_model], place.options.get(&START));
    ResidualSpec { beta: Gain::Learned(lambda), ..(PRENORM.around)(place) }
}
