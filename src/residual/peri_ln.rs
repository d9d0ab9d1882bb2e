//! Peri-LN: a norm before and one after each branch, and one on the embedding (Kim et al. 2025).

use super::{sandwich::Sandwich, Change, LayerContext, NormAt, ResidualSpec, Scheme, StackSpec};
use crate::options::{option_spec, AnyOption};

option_spec! {
    /// peri-ln's norm on the embedding, which its paper calls optional.
    EMBEDDING_NORM ("peri_ln_embedding_norm"): bool = true;
}

pub struct PeriLn;

impl Scheme for PeriLn {
    fn name(&self) -> &'static str {
        "peri-ln"
    }

    fn equation(&self) -> &'static str {
        "x = N(embedding) before the stack, x⁺ = x + N(F(N(x))), N after the stack"
    }

    fn source(&self) -> &'static str {
        "Kim et al. 2025"
    }

    fn options(&self) -> &'static [&'static dyn AnyOption] {
        &[&EMBEDDING_NORM]
    }

    fn around(&self, place: &LayerContext) -> ResidualSpec {
        Sandwich.around(place)
    }

    fn stack(&self, place: &LayerContext) -> StackSpec {
        let norm = Change::Norm(NormAt { name: "embedding_norm".into(), ..place.norm() });
        let begin = if place.options.get(&EMBEDDING_NORM) { vec![norm] } else { Vec::new() };
        StackSpec { begin, ..Sandwich.stack(place) }
    }
}
