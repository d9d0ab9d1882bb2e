//! Progressive residual warmup: branches × min(t/(T·l), 1) in layer l, counted from 1 (Chen et al. 2026).

use super::ln_scaling::{self, LnScaling};
use super::{deepnorm::DeepNorm, postnorm::PostNorm, prenorm::PreNorm, sandwich::Sandwich};
use super::{Change, Gain, Growth, GrowthCurve, LayerContext, Point, ResidualSpec, Scheme, StackSpec};
use crate::choice;
use crate::options::{not_negative, option_spec, AnyOption};

choice! {
    /// The scheme under prores.
    pub enum ProResScheme ("prores_scheme") {
        PreNorm = "prenorm",
        PostNorm = "postnorm",
        DeepNorm = "deepnorm",
        Sandwich = "sandwich",
        LnScaling = "ln-scaling",
    }
}

impl ProResScheme {
    fn of(place: &LayerContext) -> &'static dyn Scheme {
        match place.options.get(&SCHEME) {
            ProResScheme::PreNorm => &PreNorm,
            ProResScheme::PostNorm => &PostNorm,
            ProResScheme::DeepNorm => &DeepNorm,
            ProResScheme::Sandwich => &Sandwich,
            ProResScheme::LnScaling => &LnScaling,
        }
    }
}

option_spec! {
    /// T of prores: branches of layer l, counted from 1, are in full strength from update T·l on.
    STEPS ("prores_steps"): i64 = 1000, not_negative;
    /// The scheme that prores multiplies the branches of.
    SCHEME ("prores_scheme"): ProResScheme = ProResScheme::PreNorm;
}

pub struct ProRes;

impl Scheme for ProRes {
    fn name(&self) -> &'static str {
        "prores"
    }

    fn equation(&self) -> &'static str {
        "x⁺ = x + min(t/(T·l), 1)·F(N(x)) in layer l, counted from 1; N after the stack"
    }

    fn source(&self) -> &'static str {
        "Chen et al. 2026"
    }

    fn options(&self) -> &'static [&'static dyn AnyOption] {
        &[&STEPS, &SCHEME, &ln_scaling::MODE]
    }

    fn init(&self) -> &'static str {
        "smallinit"
    }

    fn around(&self, place: &LayerContext) -> ResidualSpec {
        ResidualSpec { beta: Gain::Growing, ..ProResScheme::of(place).around(place) }
    }

    fn inside(&self, place: &LayerContext) -> Vec<(Point, Change)> {
        ProResScheme::of(place).inside(place)
    }

    fn stack(&self, place: &LayerContext) -> StackSpec {
        let growth = Growth { steps: place.options.get(&STEPS), curve: GrowthCurve::Linear, by_layer: true };
        StackSpec { growth: Some(growth), ..ProResScheme::of(place).stack(place) }
    }
}
