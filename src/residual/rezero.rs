//! ReZero: `x⁺ = x + a_l F(x)` without norms. Each layer has one scalar a_l, which begins at 0 (Bachlechner et al.
//! 2020).

use super::{Gain, LayerContext, Learned, ResidualSpec, Scheme};

pub static REZERO: Scheme = Scheme {
    name: "rezero",
    equation: "x⁺ = x + a_l F(x), a_l = 0 at the start, one per layer, no norm",
    source: "Bachlechner et al. 2020",
    around,
    ..Scheme::PLAIN
};

/// Declares x⁺ = x + a F(x) with a scalar a, which begins at 0.
fn around(_: &LayerContext) -> ResidualSpec {
    // All sublayers of a layer declare this name, so they share one parameter.
    ResidualSpec { beta: Gain::Learned(Learned::new("branch_scale", &[1], 0.0)), ..ResidualSpec::default() }
}
