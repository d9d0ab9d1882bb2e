//! Admin: `x⁺ = N(ω⊙x + F(x))`. ω grows with the depth, so that early branches keep their share of the residual stream
//! (Liu et al. 2020; admin-torch).

use super::{Gain, LayerContext, Learned, ResidualSpec, Scheme};

/// The name, equation and source of admin's profiling, which measures the initial ω.
pub const PROFILING: [&str; 3] = [
    "admin's profiling",
    "one training batch with dropout; down each stack, with r = 1 at first: ω ← r, r ← √(Var(ω⊙x) + Var(F(x)))",
    "Liu et al. 2020",
];

pub static ADMIN: Scheme = Scheme {
    name: "admin",
    equation: "x⁺ = N(ω⊙x + F(x)), ω learned, its first values from profiling one batch",
    source: "Liu et al. 2020",
    around,
    is_profiled: true,
    ..Scheme::PLAIN
};

/// Declares x⁺ = N(ω⊙x + F(x)) with a learned ω per column, which profiling sets before the first update.
fn around(place: &LayerContext) -> ResidualSpec {
    let omega = Learned::new(place.numbered("residual_scale"), &[place.model.d_model], 1.0);
    ResidualSpec { alpha: Gain::Learned(omega), after: place.closing_norm().into(), ..ResidualSpec::default() }
}

pub static ADMIN_CONST: Scheme = Scheme {
    name: "admin-const",
    equation: "x⁺ = N(ωx + F(x)), ω = √((n+1)/ln(n+1) − 1), n = 2N, 3M, or 2L in one stack",
    source: "admin-torch; Liu et al. 2020",
    around: around_const,
    ..Scheme::PLAIN
};

/// Declares x⁺ = N(ωx + F(x)) with a constant ω.
fn around_const(place: &LayerContext) -> ResidualSpec {
    ResidualSpec { alpha: Gain::Constant(omega(place)), after: place.closing_norm().into(), ..ResidualSpec::default() }
}

/// Returns ω = √((b + 1)/ln(b + 1) − 1) for b branches: 2N in an encoder of N layers, 3M in a decoder of M layers, or
/// 2L in a single stack of depth L.
fn omega(place: &LayerContext) -> f64 {
    // The formulas are for an encoder, for a decoder, and for a single stack.
    let branches = place.constant(|n, _| 2.0 * n, |_, m| 3.0 * m, |l| 2.0 * l);
    ((branches + 1.0) / (branches + 1.0).ln() - 1.0).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::residual::tests::{near, place_of};
    use crate::residual::StackName;

    #[test]
    fn the_constants() {
        for (layers, encoder, decoder) in [(6, "2.017", "2.335"), (100, "6.075", "7.193")] {
            near(place_of(layers, StackName::Encoder, omega), encoder);
            near(place_of(layers, StackName::Decoder, omega), decoder);
        }
    }
}
