//! Attention residuals: a sublayer's input is a softmax-weighted sum of earlier sublayers' outputs (Kimi Team 2026).

use super::{
    prenorm::PreNorm, DepthAttention, DepthWeights, Learned, Mixing, Place, ResidualSpec, Scheme, StackSpec,
};
use crate::choice;
use crate::options::{at_least_one, setting, Listed};

choice! {
    /// What attnres sums up: outputs, or outputs over their root mean squares.
    pub enum AttnResForm ("attnres_form") { Plain = "plain", Normed = "normed" }
}

setting! {
    /// Sublayers whose outputs attnres adds up to one that later ones attend to; 1: all are attended to one by one.
    BLOCK ("attnres_block"): i64 = 1, at_least_one;
    /// Whether attnres sums up outputs (plain), or outputs over their root mean squares by scores over √d (normed).
    FORM ("attnres_form"): AttnResForm = AttnResForm::Plain;
}

pub struct AttnRes;

impl AttnRes {
    fn weights(place: &Place, name: impl Fn(&str) -> String) -> Option<DepthWeights> {
        let shape = [place.model.d_model];
        let query = Learned::new(name("depth_query"), &shape, 0.0);
        Some(match place.options.get(&FORM) {
            AttnResForm::Plain => DepthWeights::Plain(query, Learned::new(name("depth_gain"), &shape, 1.0)),
            AttnResForm::Normed => DepthWeights::Normed(query),
        })
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
        &[&BLOCK, &FORM]
    }

    fn around(&self, place: &Place) -> ResidualSpec {
        let weights = match place.number() {
            0 => None,
            _ => AttnRes::weights(place, |stem| place.numbered(stem)),
        };
        let begins_block = place.number() % place.options.get(&BLOCK) == 0;
        ResidualSpec { mixing: Some(Mixing::Depth(DepthAttention { weights, begins_block })), ..PreNorm.around(place) }
    }

    fn stack(&self, place: &Place) -> StackSpec {
        let weights = AttnRes::weights(place, |stem| format!("end_{stem}"));
        StackSpec {
            mixing: Some(Mixing::Depth(DepthAttention { weights, begins_block: false })),
            ..PreNorm.stack(place)
        }
    }
}
