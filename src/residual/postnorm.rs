//! PostNorm: `x⁺ = N(x + F(x))`, the original Transformer's (Nguyen & Salazar 2019, eq 2).

use super::{LayerContext, ResidualSpec, Scheme, StackSpec};

pub struct PostNorm;

impl Scheme for PostNorm {
    fn name(&self) -> &'static str {
        "postnorm"
    }

    fn equation(&self) -> &'static str {
        "x⁺ = N(x + F(x))"
    }

    fn source(&self) -> &'static str {
        "Nguyen & Salazar 2019, eq 2"
    }

    fn init(&self) -> &'static str {
        "smallinit"
    }

    fn around(&self, place: &LayerContext) -> ResidualSpec {
        ResidualSpec { after: place.closing_norm().into(), ..ResidualSpec::default() }
    }

    fn stack(&self, _: &LayerContext) -> StackSpec {
        StackSpec::default()
    }
}
