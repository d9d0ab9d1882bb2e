//! ReZero: `x⁺ = x + a_l F(x)`, one scalar a_l = 0 per layer, no norm (Bachlechner et al. 2020).

use super::{Gain, LayerContext, Learned, ResidualSpec, Scheme};

pub static REZERO: Scheme = Scheme {
    name: "rezero",
    equation: "x⁺ = x + a_l F(x), a_l = 0 at the start, one per layer, no norm",
    source: "Bachlechner et al. 2020",
    around,
    ..Scheme::PLAIN
};

fn around(_: &LayerContext) -> ResidualSpec {
    // One name means one parameter for all sublayers of a layer.
    ResidualSpec { beta: Gain::Learned(Learned::new("branch_scale", &[1], 0.0)), ..ResidualSpec::default() }
}
