//! Peri-LN: one norm before and one after each branch, and one on the embedding (Kim et al. 2025).

use super::{sandwich::SANDWICH, Change, LayerContext, NormAt, Scheme, StackSpec};
use crate::options::option_spec;

option_spec! {
    /// Add peri-ln's norm on the embedding, which its paper calls optional.
    EMBEDDING_NORM ("peri_ln_embedding_norm"): bool = true;
}

pub static PERI_LN: Scheme = Scheme {
    name: "peri-ln",
    equation: "x = N(embedding) before the stack, x⁺ = x + N(F(N(x))), N after the stack",
    source: "Kim et al. 2025",
    options: &[&EMBEDDING_NORM],
    around: SANDWICH.around,
    stack,
    ..Scheme::PLAIN
};

/// Declares the norm after the last layer, and the one on the embedding unless its option is off.
fn stack(place: &LayerContext) -> StackSpec {
    let norm = Change::Norm(NormAt { name: "embedding_norm".into(), ..place.norm() });
    let begin = if place.options.get(&EMBEDDING_NORM) { vec![norm] } else { Vec::new() };
    StackSpec { begin, ..(SANDWICH.stack)(place) }
}
