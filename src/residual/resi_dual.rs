//! ResiDual: PostNorm's residual stream, and beside it PreNorm's, which has no norm before the end (Xie et al. 2023).
//!
//! The authors' code gives the norm after the stack ε = 1e-7 and, for f16, can scale the second stream down. Here that
//! norm has the ε of the others, and the training loop keeps streams in f32 or f64.

use super::{ExtraStream, LayerContext, NormAt, ResidualSpec, Scheme, StackSpec, StreamStep};

pub static RESI_DUAL: Scheme = Scheme {
    name: "resi-dual",
    equation: "x⁺ = N(x + F(x)), s⁺ = s + F(x), s = x at the start; x + N(s) after the stack",
    source: "Xie et al. 2023",
    init: "fairseq-0.12.2",
    around,
    stack,
    ..Scheme::PLAIN
};

fn around(place: &LayerContext) -> ResidualSpec {
    ResidualSpec { after: place.norm().into(), streams: vec![StreamStep::default()], ..ResidualSpec::default() }
}

fn stack(place: &LayerContext) -> StackSpec {
    let norm = NormAt { name: "dual_norm".into(), ..place.end_norm() };
    StackSpec { streams: vec![ExtraStream { norm: Some(norm) }], ..StackSpec::default() }
}
