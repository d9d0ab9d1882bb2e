//! Progressive residual warmup: branches are multiplied by min(t/(T·l), 1) in layer l, counted from 1 (Chen et al.
//! 2026).

use super::ln_scaling::{self, LN_SCALING};
use super::{deepnorm::DEEPNORM, postnorm::POSTNORM, prenorm::PRENORM, sandwich::SANDWICH};
use super::{Change, Gain, Growth, GrowthCurve, LayerContext, Point, ResidualSpec, Scheme, StackSpec};
use crate::choice;
use crate::options::{not_negative, option_spec};

choice! {
    /// The scheme whose branches prores scales.
    pub enum ProResScheme ("prores_scheme") {
        PreNorm = "prenorm",
        PostNorm = "postnorm",
        DeepNorm = "deepnorm",
        Sandwich = "sandwich",
        LnScaling = "ln-scaling",
    }
}

impl ProResScheme {
    /// Returns the scheme whose branches are warmed up, as the option `prores_scheme` says.
    fn of(place: &LayerContext) -> &'static Scheme {
        match place.options.get(&SCHEME) {
            ProResScheme::PreNorm => &PRENORM,
            ProResScheme::PostNorm => &POSTNORM,
            ProResScheme::DeepNorm => &DEEPNORM,
            ProResScheme::Sandwich => &SANDWICH,
            ProResScheme::LnScaling => &LN_SCALING,
        }
    }
}

option_spec! {
    /// Number of updates T of prores: branches of layer l, counted from 1, have full strength from update T·l on.
    STEPS ("prores_steps"): i64 = 1000, not_negative;
    /// Scheme whose branches prores multiplies.
    SCHEME ("prores_scheme"): ProResScheme = ProResScheme::PreNorm;
}

pub static PRORES: Scheme = Scheme {
    name: "prores",
    equation: "x⁺ = x + min(t/(T·l), 1)·F(N(x)) in layer l, counted from 1; N after the stack",
    source: "Chen et al. 2026",
    options: &[&STEPS, &SCHEME, &ln_scaling::MODE],
    init: "smallinit",
    around,
    inside,
    stack,
    ..Scheme::PLAIN
};

/// Declares the connection of the scheme that is warmed up, with the growing α_t on its branch.
fn around(place: &LayerContext) -> ResidualSpec {
    ResidualSpec { beta: Gain::Growing, ..(ProResScheme::of(place).around)(place) }
}

/// Returns the changes inside a sublayer of the scheme that is warmed up.
fn inside(place: &LayerContext) -> Vec<(Point, Change)> {
    (ProResScheme::of(place).inside)(place)
}

/// Declares the schedule of α_t, which takes longer in higher layers.
fn stack(place: &LayerContext) -> StackSpec {
    let growth = Growth { steps: place.options.get(&STEPS), curve: GrowthCurve::Linear, by_layer: true };
    StackSpec { growth: Some(growth), ..(ProResScheme::of(place).stack)(place) }
}
