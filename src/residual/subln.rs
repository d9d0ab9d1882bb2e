//! Sub-LN: PreNorm with a norm before each sublayer's last projection (Wang et al. 2022b).

use super::{prenorm::PreNorm, Change, LayerContext, NormAt, Point, ResidualSpec, Scheme, StackSpec, Sublayer};

pub struct SubLn;

impl Scheme for SubLn {
    fn name(&self) -> &'static str {
        "subln"
    }

    fn equation(&self) -> &'static str {
        "x + W^O N(Attn(N(x))), x + W₂N(φ(W₁N(x))); N after the stack"
    }

    fn source(&self) -> &'static str {
        "Wang et al. 2022b"
    }

    fn init(&self) -> &'static str {
        "subln"
    }

    fn around(&self, place: &LayerContext) -> ResidualSpec {
        PreNorm.around(place)
    }

    fn inside(&self, place: &LayerContext) -> Vec<(Point, Change)> {
        let (point, width) = match place.sublayer {
            Sublayer::SelfAttention => (Point::AfterHeads, place.model.d_model),
            Sublayer::CrossAttention => return Vec::new(),
            Sublayer::FeedForward => (Point::AfterActivation, place.model.d_ff),
        };
        let name = format!("{}inner_norm", place.sublayer.path());
        vec![(point, Change::Norm(NormAt { name, width, ..place.norm() }))]
    }

    fn stack(&self, place: &LayerContext) -> StackSpec {
        PreNorm.stack(place)
    }
}
