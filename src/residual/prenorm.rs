//! PreNorm: `x⁺ = x + F(N(x))`, with a norm after the last layer (Nguyen & Salazar 2019, eq 3).

use super::{LayerContext, ResidualSpec, Scheme, StackSpec};

pub static PRENORM: Scheme = Scheme {
    name: "prenorm",
    equation: "x⁺ = x + F(N(x)), N after the stack",
    source: "Nguyen & Salazar 2019, eq 3",
    init: "smallinit",
    around,
    stack,
    ..Scheme::PLAIN
};

/// Declares x⁺ = x + F(N(x)).
fn around(place: &LayerContext) -> ResidualSpec {
    ResidualSpec { before: place.norm().into(), ..ResidualSpec::default() }
}

/// Declares a norm after the last layer.
fn stack(place: &LayerContext) -> StackSpec {
    StackSpec { end: place.end_norm().into(), ..StackSpec::default() }
}
