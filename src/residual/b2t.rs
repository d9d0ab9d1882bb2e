//! Bottom-to-top: PostNorm in which a layer's last sublayer also adds the layer's input (Takase et al. 2023).

use super::{postnorm::POSTNORM, Change, Gain, LayerContext, ResidualSpec, Scheme};

/// The name under which a layer's input is kept for the layer's last sublayer.
const INPUT: &str = "layer_input";

pub static B2T: Scheme = Scheme {
    name: "b2t",
    equation: "x⁺ = N(x + F(x)); in a layer's last sublayer x⁺ = N(x₀ + x + F(x)), x₀ the layer's input",
    source: "Takase et al. 2023",
    init: "b2t",
    around,
    layer,
    stack: POSTNORM.stack,
    ..Scheme::PLAIN
};

/// Keeps each layer's input for the layer's last sublayer.
fn layer(_: &LayerContext) -> Vec<Change> {
    vec![Change::Keep(INPUT.into())]
}

/// Declares x⁺ = N(x + F(x)), or N(x₀ + x + F(x)) in the layer's last sublayer, where x₀ is the layer's input.
fn around(place: &LayerContext) -> ResidualSpec {
    let is_last_of_layer = place.index + 1 == place.sublayers;
    match is_last_of_layer {
        // x₀ + x takes the place of x in the sum; a gain of 1 multiplies each of the two.
        true => ResidualSpec {
            skip: vec![Change::Mix { name: INPUT.into(), own: Gain::One, kept: Gain::One }],
            ..(POSTNORM.around)(place)
        },
        false => (POSTNORM.around)(place),
    }
}
