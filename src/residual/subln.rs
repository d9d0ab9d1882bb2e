//! Sub-LN: PreNorm with a norm before each sublayer's last projection (Wang et al. 2022b).

use super::{prenorm::PRENORM, Change, LayerContext, NormAt, Point, Scheme, Sublayer};

pub static SUBLN: Scheme = Scheme {
    name: "subln",
    equation: "x + W^O N(Attn(N(x))), x + W₂N(φ(W₁N(x))); N after the stack",
    source: "Wang et al. 2022b",
    init: "subln",
    around: PRENORM.around,
    inside,
    stack: PRENORM.stack,
    ..Scheme::PLAIN
};

/// Declares a norm before the last projection of self-attention and of the feed-forward.
fn inside(place: &LayerContext) -> Vec<(Point, Change)> {
    let (point, width) = match place.sublayer {
        Sublayer::SelfAttention => (Point::AfterHeads, place.model.d_model),
        Sublayer::CrossAttention => return Vec::new(),
        Sublayer::FeedForward => (Point::AfterActivation, place.model.d_ff),
    };
    let name = format!("{}inner_norm", place.sublayer.path());
    vec![(point, Change::Norm(NormAt { name, width, ..place.norm() }))]
}
