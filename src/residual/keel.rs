//! Keel: `x⁺ = N(αx + F(N(x)))`, in which α is the stack's number of additions (Chen & Wei 2026).

use super::{prenorm::PRENORM, Gain, LayerContext, NormAt, ResidualSpec, Scheme};
use crate::options::{option_spec, zero_or_more};

option_spec! {
    /// α of keel, the factor of x; 0 means the number of sublayers in the stack.
    ALPHA ("keel_alpha"): f64 = 0.0, zero_or_more;
}

pub static KEEL: Scheme = Scheme {
    name: "keel",
    equation: "x⁺ = N(αx + F(N(x))), α the stack's number of sublayers",
    source: "Chen & Wei 2026 (Keel)",
    options: &[&ALPHA],
    around,
    ..Scheme::PLAIN
};

/// Declares x⁺ = N(αx + F(N(x))).
fn around(place: &LayerContext) -> ResidualSpec {
    let alpha = match place.options.get(&ALPHA) {
        0.0 => place.additions() as f64, // the option's default
        given => given,
    };
    let after = NormAt { name: place.numbered("post_norm"), ..place.closing_norm() };
    ResidualSpec { alpha: Gain::Constant(alpha), after: after.into(), ..(PRENORM.around)(place) }
}
