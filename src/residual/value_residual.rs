//! Value residuals: the values of each layer are mixed with those of the first layer (Zhou et al. 2024, ResFormer).

use super::{prenorm::PRENORM, Change, Gain, LayerContext, Learned, Point, Scheme, Sublayer};
use crate::options::option_spec;

option_spec! {
    /// Value, or initial value, of value-residual's two factors.
    START ("value_residual_start"): f64 = 0.5;
    /// Learn value-residual's factors, two per layer; otherwise they are constants.
    LEARNED ("value_residual_learned"): bool = true;
}

/// The name under which the first layer's values are kept.
const VALUES: &str = "first_values";

pub static VALUE_RESIDUAL: Scheme = Scheme {
    name: "value-residual",
    equation: "prenorm; in self-attention V_l ← λ_l V_l + μ_l V_1, V_1 the first layer's, λ = μ = ½ at the start",
    source: "Zhou et al. 2024 (ResFormer)",
    options: &[&START, &LEARNED],
    init: "smallinit",
    around: PRENORM.around,
    inside,
    stack: PRENORM.stack,
    ..Scheme::PLAIN
};

/// Lets the first layer keep its values, and every later layer mix its own values with them.
fn inside(place: &LayerContext) -> Vec<(Point, Change)> {
    let start = place.options.get(&START);
    let gain = |name: &str| match place.options.get(&LEARNED) {
        true => Gain::Learned(Learned::new(place.path_of(name), &[1], start)),
        false => Gain::Constant(start),
    };
    match (place.sublayer, place.layer) {
        (Sublayer::SelfAttention, 0) => vec![(Point::Value, Change::Keep(VALUES.into()))],
        (Sublayer::SelfAttention, _) => {
            let (own, kept) = (gain("value_scale"), gain("first_value_scale"));
            vec![(Point::Value, Change::Mix { name: VALUES.into(), own, kept })]
        }
        _ => Vec::new(),
    }
}
