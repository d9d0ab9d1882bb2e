//! BranchNorm: `x⁺ = N(x + α_t F(x))`. α_t grows to 1 over the first T updates (Liu et al. 2023, eq 7, 8).

use super::{Gain, Growth, GrowthCurve, LayerContext, ResidualSpec, Scheme, StackSpec};
use crate::options::{not_negative, option_spec};

option_spec! {
    /// Update T at which branchnorm's α_t = min(1, t/T) reaches 1.
    STEPS ("branchnorm_steps"): i64 = 4000, not_negative;
    /// Curve by which branchnorm's α grows.
    GROWTH ("branchnorm_growth"): GrowthCurve = GrowthCurve::Linear;
}

pub static BRANCHNORM: Scheme = Scheme {
    name: "branchnorm",
    equation: "x⁺ = N(x + α_t F(x)), α_t = min(1, t/T)",
    source: "Liu et al. 2023, eq 7, 8",
    options: &[&STEPS, &GROWTH],
    init: "deepnorm",
    around,
    stack,
    ..Scheme::PLAIN
};

/// Declares x⁺ = N(x + α_t F(x)).
fn around(place: &LayerContext) -> ResidualSpec {
    ResidualSpec { beta: Gain::Growing, after: place.closing_norm().into(), ..ResidualSpec::default() }
}

/// Declares the schedule of α_t, which is the same in all layers.
fn stack(place: &LayerContext) -> StackSpec {
    let growth = Growth { steps: place.options.get(&STEPS), curve: place.options.get(&GROWTH), by_layer: false };
    StackSpec { growth: Some(growth), ..StackSpec::default() }
}
