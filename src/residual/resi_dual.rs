//! ResiDual: PostNorm's stream, and beside it PreNorm's, which no norm touches before the end (Xie et al. 2023).
//!
//! The authors' code gives the norm after the stack ε = 1e-7 and, for f16, can scale the second stream down. Here that
//! norm has the ε of the others, and the training loop keeps streams in f32 or f64.

use super::{ExtraStream, LayerContext, NormAt, ResidualSpec, Scheme, StackSpec, StreamStep};

pub struct ResiDual;

impl Scheme for ResiDual {
    fn name(&self) -> &'static str {
        "resi-dual"
    }

    fn equation(&self) -> &'static str {
        "x⁺ = N(x + F(x)), s⁺ = s + F(x), s = x at the start; x + N(s) after the stack"
    }

    fn source(&self) -> &'static str {
        "Xie et al. 2023"
    }

    fn init(&self) -> &'static str {
        "fairseq-0.12.2"
    }

    fn around(&self, place: &LayerContext) -> ResidualSpec {
        ResidualSpec { after: place.norm().into(), streams: vec![StreamStep::default()], ..ResidualSpec::default() }
    }

    fn stack(&self, place: &LayerContext) -> StackSpec {
        let norm = NormAt { name: "dual_norm".into(), ..place.end_norm() };
        StackSpec { streams: vec![ExtraStream { norm: Some(norm) }], ..StackSpec::default() }
    }
}
