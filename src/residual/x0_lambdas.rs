//! x₀-lambdas: before each layer the residual stream is scaled and a part of the embedding is added again (nanochat).

use super::{prenorm::PRENORM, Change, Gain, LayerContext, Learned, NormAt, Scheme, StackSpec};
use crate::options::option_spec;

option_spec! {
    /// Let x0-lambdas subtract a learned share of the middle layer's output before the norm after the stack.
    BACKOUT ("x0_lambdas_backout"): bool = false;
}

/// The name under which the embedding is kept.
const EMBEDDING: &str = "embedding";
/// The name under which the middle layer's output is kept.
const MIDDLE: &str = "middle";

pub static X0_LAMBDAS: Scheme = Scheme {
    name: "x0-lambdas",
    equation: "x₀ = N(embedding); x ← λ_l x + μ_l x₀ before layer l, then prenorm; λ from 1.15 to 1.05, μ from 0.2 to 0.05 at \
     the start",
    source: "nanochat (commit 92d63d4, gpt.py)",
    options: &[&BACKOUT],
    init: "smallinit",
    around: PRENORM.around,
    layer,
    stack,
    own_depth: Some("every layer multiplies x by a number beside 1 and adds a part of the embedding"),
    ..Scheme::PLAIN
};

/// Declares x ← λx + μx₀ at a layer's beginning, and keeps the middle layer's output if `backout` needs it.
fn layer(place: &LayerContext) -> Vec<Change> {
    // `depth` runs from 0 in the first layer to 1 in the last, and the gains' initial values fall with it.
    let depth = place.layer as f64 / (place.layers() - 1).max(1) as f64;
    let gain = |name: &str, value| Gain::Learned(Learned::new(name, &[1], value)); // λ and μ, one per layer
    let own = gain("stream_scale", 1.15 - 0.10 * depth);
    let kept = gain("embedding_scale", 0.20 - 0.15 * depth);
    let mix = Change::Mix { name: EMBEDDING.into(), own, kept };
    match place.options.get(&BACKOUT) && place.layer == after_middle(place) {
        true => vec![Change::Keep(MIDDLE.into()), mix],
        false => vec![mix],
    }
}

/// Returns the index of the layer whose input is the middle layer's output. If it equals the number of layers, that
/// output is the input of the stack's end.
fn after_middle(place: &LayerContext) -> i64 {
    place.layers() / 2 + 1
}

/// Declares the norm of the embedding x₀, which is kept, and with `backout` the subtraction before the stack's last
/// norm.
fn stack(place: &LayerContext) -> StackSpec {
    let norm = Change::Norm(NormAt { name: "embedding_norm".into(), ..place.norm() });
    let prenorm = (PRENORM.stack)(place);
    let mut end = Vec::new();
    if place.options.get(&BACKOUT) {
        if after_middle(place) == place.layers() {
            end.push(Change::Keep(MIDDLE.into()));
        }
        // At the start a fifth of the middle layer's output is subtracted.
        let kept = Gain::Learned(Learned::new("backout_scale", &[1], -0.2));
        end.push(Change::Mix { name: MIDDLE.into(), own: Gain::One, kept });
    }
    end.extend(prenorm.end);
    StackSpec { begin: vec![norm, Change::Keep(EMBEDDING.into())], end, ..prenorm }
}
