//! OLMo 2's order: a norm only on the branch's output, and norms on all heads' queries and keys together (Team OLMo
//! 2025).

use super::{prenorm::PRENORM, Change, LayerContext, Point, ResidualSpec, Scheme, Sublayer};

pub static OLMO2: Scheme = Scheme {
    name: "olmo2",
    equation: "x⁺ = x + N(F(x)), N on q and k over all heads joined, N after the stack",
    source: "Team OLMo 2025; OLMo-core, ReorderedNormTransformerBlock",
    around,
    inside,
    stack: PRENORM.stack,
    ..Scheme::PLAIN
};

/// Declares x⁺ = x + N(F(x)).
fn around(place: &LayerContext) -> ResidualSpec {
    ResidualSpec { branch: place.norm().into(), ..ResidualSpec::default() }
}

/// Declares norms on queries and keys, each over all heads together.
fn inside(place: &LayerContext) -> Vec<(Point, Change)> {
    if place.sublayer == Sublayer::FeedForward {
        return Vec::new();
    }
    let norm = |name: &str, width: i64| Change::Norm(place.projected_norm(name, width));
    let (queries, keys) = (place.model.d_model, place.kv_width());
    vec![(Point::Query, norm("q_norm", queries)), (Point::Key, norm("k_norm", keys))]
}
