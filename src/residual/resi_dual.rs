//! ResiDual: PostNorm's residual stream, and beside it PreNorm's, which is normed only at the end (Xie et al. 2023).
//!
//! In the authors' code, the norm after the stack has ε = 1e-7, and with f16 the second stream can be scaled down.
//! Here that norm has the same ε as the others. The training loop keeps streams in f32 or f64, so the second stream
//! needs no scaling.

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

/// Declares x⁺ = N(x + F(x)), and s⁺ = s + F(x) for a second stream s.
fn around(place: &LayerContext) -> ResidualSpec {
    ResidualSpec { after: place.norm().into(), streams: vec![StreamStep::default()], ..ResidualSpec::default() }
}

/// Declares the second stream s. After the last layer its norm N(s) is added to x.
fn stack(place: &LayerContext) -> StackSpec {
    let norm = NormAt { name: "dual_norm".into(), ..place.end_norm() };
    StackSpec { streams: vec![ExtraStream { norm: Some(norm) }], ..StackSpec::default() }
}
