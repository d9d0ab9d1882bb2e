//! NormFormer: PreNorm with scaled heads and norms after the attention and inside the feed-forward (Shleifer et al. 2021).

use super::{prenorm::PreNorm, Around, Change, Flow, Gain, Learned, NormAt, Place, Point, Scheme, Sublayer};
use crate::choice;

choice! {
    /// Head scales before the output projection (`paper`) or, as in fairseq, after it.
    pub enum NormFormerMode ("normformer_mode") { Paper = "paper", Fairseq = "fairseq" }
}

pub struct NormFormer;

impl Scheme for NormFormer {
    fn name(&self) -> &'static str {
        "normformer"
    }

    fn equation(&self) -> &'static str {
        "prenorm; Concat(γ_h head_h)W^O; N(attention); W₂N(σ(W₁N(x)+b₁))+b₂; λ⊙x on the feed-forward's residual"
    }

    fn source(&self) -> &'static str {
        "Shleifer et al. 2021"
    }

    fn around(&self, place: &Place) -> Around {
        let (config, mut around) = (place.config, PreNorm.around(place));
        match place.sublayer {
            Sublayer::SelfAttention if config.normformer_attention_norm => {
                around.amid = Some(NormAt { name: place.numbered("post_norm"), ..place.norm() });
            }
            Sublayer::FeedForward if config.normformer_residual_scale => {
                let lambda = Learned::new(place.numbered("residual_scale"), &[config.d_model], 1.0);
                around.alpha = Gain::Learned(lambda);
            }
            _ => {}
        }
        around
    }

    fn inside(&self, place: &Place) -> Vec<(Point, Change)> {
        let config = place.config;
        match place.sublayer {
            Sublayer::SelfAttention if config.normformer_head_scale => {
                let point = match config.normformer_mode {
                    NormFormerMode::Paper => Point::AfterHeads,
                    NormFormerMode::Fairseq => Point::AfterOutput,
                };
                let gamma = Learned::new(format!("{}head_scale", place.sublayer.path()), &[config.heads], 1.0);
                vec![(point, Change::HeadScale(gamma))]
            }
            Sublayer::FeedForward if config.normformer_ffn_norm => {
                let norm = NormAt { name: "inner_norm".into(), width: config.d_ff, ..place.norm() };
                vec![(Point::Amid, Change::Norm(norm))]
            }
            _ => Vec::new(),
        }
    }

    fn stack(&self, place: &Place) -> Flow {
        PreNorm.stack(place)
    }
}
