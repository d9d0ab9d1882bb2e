//! x₀-lambdas: before each layer the residual stream is scaled, and the embedding is added again (nanochat).

use super::{prenorm::PRENORM, Change, Gain, LayerContext, Learned, NormAt, Scheme, StackSpec};

/// The name under which the embedding is kept.
const EMBEDDING: &str = "embedding";

pub static X0_LAMBDAS: Scheme = Scheme {
    name: "x0-lambdas",
    equation: "x₀ = N(embedding); x ← λ_l x + μ_l x₀ before layer l, then prenorm; λ from 1.15 to 1.05, μ from 0.2 to 0.05 at \
     the start",
    source: "nanochat (commit 92d63d4, gpt.py)",
    init: "smallinit",
    around: PRENORM.around,
    layer,
    stack,
    own_depth: Some("every layer multiplies x by a number beside 1 and adds a part of the embedding"),
    ..Scheme::PLAIN
};

fn layer(place: &LayerContext) -> Vec<Change> {
    let depth = place.layer as f64 / (place.layers() - 1).max(1) as f64;
    let gain = |name: &str, value| Gain::Learned(Learned::new(name, &[1], value));
    let own = gain("stream_scale", 1.15 - 0.10 * depth);
    let kept = gain("embedding_scale", 0.20 - 0.15 * depth);
    vec![Change::Mix { name: EMBEDDING.into(), own, kept }]
}

fn stack(place: &LayerContext) -> StackSpec {
    let norm = Change::Norm(NormAt { name: "embedding_norm".into(), ..place.norm() });
    StackSpec { begin: vec![norm, Change::Keep(EMBEDDING.into())], ..(PRENORM.stack)(place) }
}
