//! Attention residuals: a sublayer's input is a softmax-weighted sum of earlier sublayers' outputs (Kimi Team 2026).

use super::{prenorm::PreNorm, DepthAttention, Learned, Mixing, Place, ResidualSpec, Scheme, StackSpec};
use crate::options::{at_least_one, setting, Listed};

setting! {
    /// Sublayers whose outputs attnres adds up to one that later ones attend to; 1: all are attended to one by one.
    BLOCK ("attnres_block"): i64 = 1, at_least_one;
}

pub struct AttnRes;

impl AttnRes {
    fn weights(place: &Place, query: String, gain: String) -> Option<(Learned, Learned)> {
        let shape = [place.model.d_model];
        Some((Learned::new(query, &shape, 0.0), Learned::new(gain, &shape, 1.0)))
    }
}

impl Scheme for AttnRes {
    fn name(&self) -> &'static str {
        "attnres"
    }

    fn equation(&self) -> &'static str {
        "input of a sublayer: N(Σ_i a_i v_i), a = softmax_i⟨w, RMS(v_i)⟩, v_0 = x, v_i = F_i; the same after the stack"
    }

    fn source(&self) -> &'static str {
        "Kimi Team 2026 (Attention Residuals)"
    }

    fn options(&self) -> &'static [&'static dyn Listed] {
        &[&BLOCK]
    }

    fn around(&self, place: &Place) -> ResidualSpec {
        let number = place.layer * place.sublayers + place.index;
        let weights = match number {
            0 => None,
            _ => AttnRes::weights(place, place.numbered("depth_query"), place.numbered("depth_gain")),
        };
        let begins_block = number % place.options.get(&BLOCK) == 0;
        ResidualSpec { mixing: Some(Mixing::Depth(DepthAttention { weights, begins_block })), ..PreNorm.around(place) }
    }

    fn stack(&self, place: &Place) -> StackSpec {
        let weights = AttnRes::weights(place, "end_depth_query".into(), "end_depth_gain".into());
        StackSpec {
            mixing: Some(Mixing::Depth(DepthAttention { weights, begins_block: false })),
            ..PreNorm.stack(place)
        }
    }
}
