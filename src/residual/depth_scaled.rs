//! Depth-scaled residuals: the variance of the residual stream does not grow with the depth (Beam;
//! `depth_scaled_residual_add`).

use super::{sandwich::SANDWICH, Gain, LayerContext, ResidualSpec, Scheme};

pub static DEPTH_SCALED: Scheme = Scheme {
    name: "depth-scaled",
    equation: "x⁺ = √((k − 1)/k)·x + N(F(N(x)))/√k, k the addition's number in its stack, from 2; N after the stack",
    source: "Beam (transformers 5.23, BeamDecoderLayer)",
    init: "gpt2",
    around,
    stack: SANDWICH.stack,
    own_depth: Some("its k-th addition has the factors √((k−1)/k) and 1/√k"),
    ..Scheme::PLAIN
};

/// Declares x⁺ = √((k − 1)/k)·x + N(F(N(x)))/√k for the sum of k terms.
fn around(place: &LayerContext) -> ResidualSpec {
    let k = (place.number() + 2) as f64; // the number of terms in the sum, the embedding included
    let (alpha, beta) = (Gain::Constant(((k - 1.0) / k).sqrt()), Gain::Constant(1.0 / k.sqrt()));
    ResidualSpec { alpha, beta, ..(SANDWICH.around)(place) }
}
