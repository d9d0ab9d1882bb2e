//! NormFormer: PreNorm with scaled heads, with a norm after the attention and a norm inside the feed-forward
//! (Shleifer et al. 2021).

use super::{prenorm::PRENORM, Change, Gain, LayerContext, Learned, NormAt, Point, ResidualSpec, Scheme, Sublayer};
use crate::choice;
use crate::options::option_spec;

choice! {
    /// The place of the head scales: before the output projection (`paper`) or, as in fairseq, after it.
    pub enum NormFormerMode ("normformer_mode") { Paper = "paper", Fairseq = "fairseq" }
}

option_spec! {
    /// Scale each head in normformer by a learned scalar (1).
    HEAD_SCALE ("normformer_head_scale"): bool = true;
    /// Add a norm on the self-attention's output in normformer (2).
    ATTENTION_NORM ("normformer_attention_norm"): bool = true;
    /// Add a norm inside the feed-forward in normformer (3).
    FFN_NORM ("normformer_ffn_norm"): bool = true;
    /// Add a learned scale on the feed-forward's residual in normformer (4).
    RESIDUAL_SCALE ("normformer_residual_scale"): bool = false;
    /// Place of normformer's head scales: before the output projection (paper) or after it (fairseq).
    MODE ("normformer_mode"): NormFormerMode = NormFormerMode::Paper;
}

pub static NORMFORMER: Scheme = Scheme {
    name: "normformer",
    equation: "prenorm; Concat(γ_h head_h)W^O; N(attention); W₂N(σ(W₁N(x)+b₁))+b₂; optionally λ⊙x in the feed-forward's residual",
    source: "Shleifer et al. 2021",
    options: &[&HEAD_SCALE, &ATTENTION_NORM, &FFN_NORM, &RESIDUAL_SCALE, &MODE],
    around,
    inside,
    stack: PRENORM.stack,
    ..Scheme::PLAIN
};

/// Declares PreNorm, with a norm on self-attention's output and a scale λ of the feed-forward's x, if their options are
/// on.
fn around(place: &LayerContext) -> ResidualSpec {
    let mut around = (PRENORM.around)(place);
    match place.sublayer {
        Sublayer::SelfAttention if place.options.get(&ATTENTION_NORM) => {
            around.branch = NormAt { name: place.numbered("post_norm"), ..place.norm() }.into();
        }
        Sublayer::FeedForward if place.options.get(&RESIDUAL_SCALE) => {
            let lambda = Learned::new(place.numbered("residual_scale"), &[place.model.d_model], 1.0);
            around.alpha = Gain::Learned(lambda);
        }
        _ => {}
    }
    around
}

/// Declares the scales of self-attention's heads and the norm inside the feed-forward, if their options are on.
fn inside(place: &LayerContext) -> Vec<(Point, Change)> {
    match place.sublayer {
        Sublayer::SelfAttention if place.options.get(&HEAD_SCALE) => {
            let point = match place.options.get(&MODE) {
                NormFormerMode::Paper => Point::AfterHeads,
                NormFormerMode::Fairseq => Point::AfterOutput,
            };
            let gamma = Learned::new(format!("{}head_scale", place.sublayer.path()), &[place.model.heads], 1.0);
            vec![(point, Change::HeadScale(gamma))]
        }
        Sublayer::FeedForward if place.options.get(&FFN_NORM) => {
            let norm = NormAt { name: "inner_norm".into(), width: place.model.d_ff, ..place.norm() };
            vec![(Point::AfterActivation, Change::Norm(norm))]
        }
        _ => Vec::new(),
    }
}
