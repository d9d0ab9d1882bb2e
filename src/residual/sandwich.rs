//! Sandwich: `x⁺ = x + N(F(N(x)))` (Ding et al. 2021).

use super::{prenorm::PRENORM, LayerContext, NormAt, ResidualSpec, Scheme};

pub static SANDWICH: Scheme = Scheme {
    name: "sandwich",
    equation: "x⁺ = x + N(F(N(x))), N after the stack",
    source: "Ding et al. 2021",
    around,
    stack: PRENORM.stack,
    ..Scheme::PLAIN
};

/// Declares x⁺ = x + N(F(N(x))): PreNorm with one more norm, on the branch's output.
fn around(place: &LayerContext) -> ResidualSpec {
    let branch = NormAt { name: place.numbered("post_norm"), ..place.norm() };
    ResidualSpec { branch: branch.into(), ..(PRENORM.around)(place) }
}
