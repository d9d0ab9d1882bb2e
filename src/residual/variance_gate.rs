//! Variance-preserving gates: the branch has a learned factor β, and x has the factor α that keeps the variance of
//! the sum constant (Muse Spark).

use super::{sandwich::SANDWICH, Gain, LayerContext, Learned, ResidualSpec, Scheme};
use crate::options::{option_spec, positive};

option_spec! {
    /// Temperature τ of variance-gate: β = σ(w/τ).
    TEMPERATURE ("variance_gate_temperature"): f64 = 0.3, positive;
}

/// The standard deviation of the initial w, transformers' `initializer_range`.
const START: f64 = 0.02;

pub static VARIANCE_GATE: Scheme = Scheme {
    name: "variance-gate",
    equation: "x⁺ = α⊙x + β⊙N(F(N(x))), β = σ(w/τ), α = √max((1 − β)(1 + β), 10⁻³), w per column; N after the stack",
    source: "Muse Spark (transformers 5.23, MuseSparkResidualGate)",
    options: &[&TEMPERATURE],
    init: "gpt2",
    around,
    stack: SANDWICH.stack,
    own_depth: Some("every addition multiplies x by a gate below 1"),
    ..Scheme::PLAIN
};

/// Declares x⁺ = α⊙x + β⊙N(F(N(x))), in which one parameter w sets both gates: β = σ(w/τ) and α = √max(1 − β², 10⁻³).
fn around(place: &LayerContext) -> ResidualSpec {
    let w = Learned::normal(place.numbered("residual_gate"), &[place.model.d_model], START);
    let temperature = place.options.get(&TEMPERATURE);
    let alpha = Gain::CoSigmoid { of: w.clone(), temperature };
    ResidualSpec { alpha, beta: Gain::Sigmoid { of: w, temperature }, ..(SANDWICH.around)(place) }
}
