//! PreNorm: `x⁺ = x + F(N(x))`, and N after the stack (Nguyen & Salazar 2019, eq 3).

use super::{LayerContext, ResidualSpec, Scheme, StackSpec};

pub struct PreNorm;

impl Scheme for PreNorm {
    fn name(&self) -> &'static str {
        "prenorm"
    }

    fn equation(&self) -> &'static str {
        "x⁺ = x + F(N(x)), N after the stack"
    }

    fn source(&self) -> &'static str {
        "Nguyen & Salazar 2019, eq 3"
    }

    fn init(&self) -> &'static str {
        "smallinit"
    }

    fn around(&self, place: &LayerContext) -> ResidualSpec {
        ResidualSpec { before: place.norm().into(), ..ResidualSpec::default() }
    }

    fn stack(&self, place: &LayerContext) -> StackSpec {
        StackSpec { end: place.end_norm().into(), ..StackSpec::default() }
    }
}
