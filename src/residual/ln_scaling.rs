//! LayerNorm scaling: `x⁺ = x + F(N(x)/√l)` in layer l, counted from 1 (Sun et al. 2025).

use super::{prenorm::PRENORM, Change, LayerContext, NormAt, Point, ResidualSpec, Scheme};
use crate::choice;
use crate::options::option_spec;

choice! {
    /// The form of 1/√l: a constant on the norm's output, or the initial value of its weight.
    pub enum LnScalingMode ("ln_scaling_mode") { Constant = "constant", Weight = "weight" }
}

option_spec! {
    /// Form of ln-scaling's 1/√l, alone or under prores: a constant on the norm's output (OLMo-core), or the initial
    /// value of its weight (GPAS, ProRes's release).
    pub MODE ("ln_scaling_mode"): LnScalingMode = LnScalingMode::Constant;
}

pub static LN_SCALING: Scheme = Scheme {
    name: "ln-scaling",
    equation: "x⁺ = x + F(N(x)/√l) in layer l, counted from 1; N after the stack",
    source: "Sun et al. 2025",
    options: &[&MODE],
    around,
    inside,
    stack: PRENORM.stack,
    ..Scheme::PLAIN
};

/// Declares PreNorm. In the form `weight`, the norm's weight begins at 1/√l.
fn around(place: &LayerContext) -> ResidualSpec {
    let start = match place.options.get(&MODE) {
        LnScalingMode::Constant => 1.0,
        LnScalingMode::Weight => factor(place),
    };
    ResidualSpec { before: NormAt { start, ..place.norm() }.into(), ..ResidualSpec::default() }
}

/// Declares the constant factor 1/√l on the norm's output, which is the sublayer's input. The form `weight` has none,
/// because the norm's own weight begins at 1/√l.
fn inside(place: &LayerContext) -> Vec<(Point, Change)> {
    match place.options.get(&MODE) {
        LnScalingMode::Constant => vec![(Point::Input, Change::Times(factor(place)))],
        LnScalingMode::Weight => Vec::new(),
    }
}

/// Returns 1/√l for layer l, counted from 1.
fn factor(place: &LayerContext) -> f64 {
    ((place.layer + 1) as f64).sqrt().recip()
}
