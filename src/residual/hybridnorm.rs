//! HybridNorm: norms on queries, keys and values, and a feed-forward that adds to its own normed input (Zhuo et al. 2025).
//!
//! The paper writes the feed-forward as N(y) + F(N(y)). Nothing else reads y, so N stands after the attention before it.

use super::{prenorm::PreNorm, Change, LayerContext, Point, ResidualSpec, Scheme, StackSpec, Sublayer};

pub struct HybridNorm;

impl Scheme for HybridNorm {
    fn name(&self) -> &'static str {
        "hybridnorm"
    }

    fn equation(&self) -> &'static str {
        "y = x + Attn(x), N on each head's q, k and v; z = N(y), x⁺ = z + F(z); N after the stack"
    }

    fn source(&self) -> &'static str {
        "Zhuo et al. 2025"
    }

    fn init(&self) -> &'static str {
        "gpt2"
    }

    fn around(&self, place: &LayerContext) -> ResidualSpec {
        let is_last_attention = place.index + 2 == place.sublayers;
        match is_last_attention {
            true => ResidualSpec { after: place.norm().into(), ..ResidualSpec::default() },
            false => ResidualSpec::default(),
        }
    }

    fn inside(&self, place: &LayerContext) -> Vec<(Point, Change)> {
        if place.sublayer == Sublayer::FeedForward {
            return Vec::new();
        }
        let norm = |name: &str| Change::Norm(place.projected_norm(name, place.d_head()));
        vec![(Point::Query, norm("q_norm")), (Point::Key, norm("k_norm")), (Point::Value, norm("v_norm"))]
    }

    fn stack(&self, place: &LayerContext) -> StackSpec {
        PreNorm.stack(place)
    }
}

pub struct HybridNormStar;

impl Scheme for HybridNormStar {
    fn name(&self) -> &'static str {
        "hybridnorm-star"
    }

    fn equation(&self) -> &'static str {
        "hybridnorm, but x⁺ = x + F(N(x)) in the first layer, which keeps its norms on q, k and v"
    }

    fn source(&self) -> &'static str {
        "Zhuo et al. 2025, HybridNorm*"
    }

    fn init(&self) -> &'static str {
        HybridNorm.init()
    }

    fn around(&self, place: &LayerContext) -> ResidualSpec {
        match place.layer {
            0 => PreNorm.around(place),
            _ => HybridNorm.around(place),
        }
    }

    fn inside(&self, place: &LayerContext) -> Vec<(Point, Change)> {
        HybridNorm.inside(place)
    }

    fn stack(&self, place: &LayerContext) -> StackSpec {
        HybridNorm.stack(place)
    }
}
