//! PostNorm: `x⁺ = N(x + F(x))`, as in the original Transformer (Nguyen & Salazar 2019, eq 2).

use super::{LayerContext, ResidualSpec, Scheme};

pub static POSTNORM: Scheme = Scheme {
    name: "postnorm",
    equation: "x⁺ = N(x + F(x))",
    source: "Nguyen & Salazar 2019, eq 2",
    init: "smallinit",
    around,
    ..Scheme::PLAIN
};

/// Declares x⁺ = N(x + F(x)). The last sublayer's norm is the stack's last.
fn around(place: &LayerContext) -> ResidualSpec {
    ResidualSpec { after: place.closing_norm().into(), ..ResidualSpec::default() }
}
