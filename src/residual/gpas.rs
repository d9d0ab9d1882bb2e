//! Gradient-preserving activation scaling: after each addition x is scaled but its gradient is not (Chen et al.
//! 2025).

use super::ln_scaling::{self, LN_SCALING};
use super::mix_ln::{self, MIX_LN};
use super::{deepnorm::DEEPNORM, postnorm::POSTNORM, prenorm::PRENORM, sandwich::SANDWICH};
use super::{Change, LayerContext, Learned, Point, ResidualSpec, Scheme, StackSpec};
use crate::choice;
use crate::options::option_spec;

choice! {
    /// The scheme to which gpas adds its gates.
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
    /// Scheme to which gpas adds its gates.
    SCHEME ("gpas_scheme"): GpasScheme = GpasScheme::PreNorm;
}

impl GpasScheme {
    /// Returns the scheme to which gpas adds its gates, as the option `gpas_scheme` says.
    fn of(place: &LayerContext) -> &'static Scheme {
        match place.options.get(&SCHEME) {
            GpasScheme::PreNorm => &PRENORM,
            GpasScheme::PostNorm => &POSTNORM,
            GpasScheme::DeepNorm => &DEEPNORM,
            GpasScheme::Sandwich => &SANDWICH,
            GpasScheme::LnScaling => &LN_SCALING,
            GpasScheme::MixLn => &MIX_LN,
        }
    }
}

pub static GPAS: Scheme = Scheme {
    name: "gpas",
    equation: "x⁺ = y − silu(a)·sg(y), y = x + F(N(x)), sg without gradient, one a = 0 per layer; N after the stack",
    source: "Chen et al. 2025 (GPAS)",
    options: &[&SCHEME, &ln_scaling::MODE, &mix_ln::PART],
    init: "smallinit",
    around,
    inside,
    stack,
    ..Scheme::PLAIN
};

/// Declares the connection of the scheme that gpas changes, with a gate on the sum. If a norm follows the sum, the gate
/// is on x before the sum. A layer's sublayers share one gate, because its name is the same.
fn around(place: &LayerContext) -> ResidualSpec {
    let gate = vec![Change::DampForward(Learned::new("forward_gate", &[1], 0.0))];
    let around = (GpasScheme::of(place).around)(place);
    match around.after.is_empty() {
        true => ResidualSpec { after: gate, ..around },
        false => ResidualSpec { skip: gate, ..around },
    }
}

/// Returns the changes inside a sublayer of the scheme to which gpas is applied.
fn inside(place: &LayerContext) -> Vec<(Point, Change)> {
    (GpasScheme::of(place).inside)(place)
}

/// Returns the whole stack's parts in the scheme to which gpas is applied.
fn stack(place: &LayerContext) -> StackSpec {
    (GpasScheme::of(place).stack)(place)
}
