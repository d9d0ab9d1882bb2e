//! Gradient-preserving activation scaling: x is scaled after each addition, its gradient is not (Chen et al. 2025).

use super::ln_scaling::{self, LnScaling};
use super::mix_ln::{self, MixLn};
use super::{deepnorm::DeepNorm, postnorm::PostNorm, prenorm::PreNorm, sandwich::Sandwich};
use super::{Change, LayerContext, Learned, Point, ResidualSpec, Scheme, StackSpec};
use crate::choice;
use crate::options::{option_spec, AnyOption};

choice! {
    /// The scheme under gpas.
    pub enum GpasScheme ("gpas_scheme") {
        PreNorm = "prenorm",
        PostNorm = "postnorm",
        DeepNorm = "deepnorm",
        Sandwich = "sandwich",
        LnScaling = "ln-scaling",
        MixLn = "mix-ln",
    }
}

option_spec! {
    /// The scheme that gpas adds its gates to.
    SCHEME ("gpas_scheme"): GpasScheme = GpasScheme::PreNorm;
}

impl GpasScheme {
    fn of(place: &LayerContext) -> &'static dyn Scheme {
        match place.options.get(&SCHEME) {
            GpasScheme::PreNorm => &PreNorm,
            GpasScheme::PostNorm => &PostNorm,
            GpasScheme::DeepNorm => &DeepNorm,
            GpasScheme::Sandwich => &Sandwich,
            GpasScheme::LnScaling => &LnScaling,
            GpasScheme::MixLn => &MixLn,
        }
    }
}

pub struct Gpas;

impl Scheme for Gpas {
    fn name(&self) -> &'static str {
        "gpas"
    }

    fn equation(&self) -> &'static str {
        "x⁺ = y − silu(a)·sg(y), y = x + F(N(x)), sg without gradient, one a = 0 per layer; N after the stack"
    }

    fn source(&self) -> &'static str {
        "Chen et al. 2025 (GPAS)"
    }

    fn options(&self) -> &'static [&'static dyn AnyOption] {
        &[&SCHEME, &ln_scaling::MODE, &mix_ln::PART]
    }

    fn init(&self) -> &'static str {
        "smallinit"
    }

    /// Where a norm follows the sum, the gate stands on x in the sum.
    fn around(&self, place: &LayerContext) -> ResidualSpec {
        let gate = vec![Change::DampForward(Learned::new("forward_gate", &[1], 0.0))];
        let around = GpasScheme::of(place).around(place);
        match around.after.is_empty() {
            true => ResidualSpec { after: gate, ..around },
            false => ResidualSpec { skip: gate, ..around },
        }
    }

    fn inside(&self, place: &LayerContext) -> Vec<(Point, Change)> {
        GpasScheme::of(place).inside(place)
    }

    fn stack(&self, place: &LayerContext) -> StackSpec {
        GpasScheme::of(place).stack(place)
    }
}
