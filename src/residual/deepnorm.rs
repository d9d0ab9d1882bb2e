//! DeepNorm: `x⁺ = N(αx + F(x))`. α grows with the depth (Wang et al. 2022a; Liu et al. 2023, eq 2, 3).

use super::{Gain, LayerContext, ResidualSpec, Scheme};

pub static DEEPNORM: Scheme = Scheme {
    name: "deepnorm",
    equation: "x⁺ = N(αx + F(x)); α_e = 0.81(N⁴M)^(1/16), α_d = (3M)^(1/4), one stack (2L)^(1/4)",
    source: "Wang et al. 2022a; Liu et al. 2023, eq 2, 3",
    init: "deepnorm",
    around,
    ..Scheme::PLAIN
};

/// Declares x⁺ = N(αx + F(x)).
fn around(place: &LayerContext) -> ResidualSpec {
    ResidualSpec { alpha: Gain::Constant(alpha(place)), after: place.closing_norm().into(), ..ResidualSpec::default() }
}

/// Returns the paper's α, the factor of x. The formulas are for an encoder, for a decoder, and for a single stack. n, m
/// and l are the numbers of layers in these stacks.
fn alpha(place: &LayerContext) -> f64 {
    place.constant(
        |n, m| 0.81 * (n.powi(4) * m).powf(1.0 / 16.0),
        |_, m| (3.0 * m).powf(0.25),
        |l| (2.0 * l).powf(0.25),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::residual::tests::{near, place_of};
    use crate::residual::StackName;

    #[test]
    fn the_papers_constants() {
        for (layers, encoder, decoder) in [
            (6, "1.4179", "2.0598"),
            (18, "1.9987", "2.7108"),
            (50, "2.7505", "3.4996"),
            (100, "3.4157", "4.1618"),
            (500, "5.6482", "6.2233"),
        ] {
            near(place_of(layers, StackName::Encoder, alpha), encoder);
            near(place_of(layers, StackName::Decoder, alpha), decoder);
        }
    }
}
