//! HybridNorm: norms on queries, keys and values, and a feed-forward whose output is added to its normed input (Zhuo
//! et al. 2025).
//!
//! The paper writes the feed-forward sublayer as N(y) + F(N(y)). Only this sublayer reads y, so here N is declared
//! after the attention that computes y.

use super::{prenorm::PRENORM, Change, LayerContext, Point, ResidualSpec, Scheme, Sublayer};

pub static HYBRIDNORM: Scheme = Scheme {
    name: "hybridnorm",
    equation: "y = x + Attn(x), N on each head's q, k and v; z = N(y), x⁺ = z + F(z); N after the stack",
    source: "Zhuo et al. 2025",
    init: "gpt2",
    around,
    inside,
    stack: PRENORM.stack,
    ..Scheme::PLAIN
};

/// Declares x⁺ = x + F(x). After the layer's last attention a norm follows the sum, so that the feed-forward reads the
/// normed sum, and its output is added to it.
fn around(place: &LayerContext) -> ResidualSpec {
    let is_last_attention = place.index + 2 == place.sublayers; // the feed-forward is the last sublayer
    match is_last_attention {
        true => ResidualSpec { after: place.norm().into(), ..ResidualSpec::default() },
        false => ResidualSpec::default(),
    }
}

/// Declares norms on each head's queries, keys and values.
fn inside(place: &LayerContext) -> Vec<(Point, Change)> {
    if place.sublayer == Sublayer::FeedForward {
        return Vec::new();
    }
    let norm = |name: &str| Change::Norm(place.projected_norm(name, place.d_head()));
    vec![(Point::Query, norm("q_norm")), (Point::Key, norm("k_norm")), (Point::Value, norm("v_norm"))]
}

pub static HYBRIDNORM_STAR: Scheme = Scheme {
    name: "hybridnorm-star",
    equation: "hybridnorm, but x⁺ = x + F(N(x)) in the first layer, which keeps its norms on q, k and v",
    source: "Zhuo et al. 2025, HybridNorm*",
    init: HYBRIDNORM.init,
    around: around_star,
    inside: HYBRIDNORM.inside,
    stack: HYBRIDNORM.stack,
    ..Scheme::PLAIN
};

/// Declares PreNorm in the first layer, and HybridNorm in the others.
fn around_star(place: &LayerContext) -> ResidualSpec {
    match place.layer {
        0 => (PRENORM.around)(place),
        _ => (HYBRIDNORM.around)(place),
    }
}
