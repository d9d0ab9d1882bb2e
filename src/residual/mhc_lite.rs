//! mHC-lite: n streams, which are mixed by weighted means of all permutations. Such means are exactly doubly
//! stochastic (Yang & Gao 2026).

use super::mixing::sum_at_end;
use super::{prenorm::PRENORM, Gates, HyperConnection, LayerContext, Learned, Mixing, ResidualSpec, Scheme, StackSpec};
use crate::error::Result;
use crate::options::{at_least_one, at_most, option_spec};
use crate::parametrisation::SumsOver;

option_spec! {
    /// Number of streams n of mhc-lite, at most 6: n! permutations are weighed.
    STREAMS ("mhc_lite_streams"): i64 = 4, check_streams;
}

/// The initial value of s, the factor of the scores that depend on the streams.
const SCALE: f64 = 0.01;
/// The initial bias of the read gates p and the write gates g, for all streams but one, which has 1. So a sublayer at
/// first mainly reads and writes this stream.
const ASIDE: f64 = -1.0;
/// The initial bias in the scores of all permutations of the streams except the identity, which has 0.
const APART: f64 = -8.0;

pub static MHC_LITE: Scheme = Scheme {
    name: "mhc-lite",
    equation: "H⁺_j = g_j F(N(Σ_i p_i H_i)) + Σ_i R_ij H_i of n streams H, all x at the start; p, g, R functions of H, R a weighted \
     mean of all permutations; N(Σ_i H_i) after the stack",
    source: "Yang & Gao 2026 (mHC-lite)",
    options: &[&STREAMS],
    around,
    stack,
    ..Scheme::PLAIN
};

/// Errors unless the option `name` has 1 to 6 streams.
fn check_streams(name: &str, value: i64) -> Result<()> {
    at_least_one(name, value)?;
    at_most(name, value, Gates::MOST_PERMUTED)
}

/// Declares how a sublayer reads, mixes and writes n streams. At first it mainly reads and writes one stream, and
/// hardly mixes them.
fn around(place: &LayerContext) -> ResidualSpec {
    let (n, d) = (place.options.get(&STREAMS), place.model.d_model);
    // The index of the stream that this sublayer mainly reads and writes.
    let own = place.number() % n;
    // The biases of the read gates p, of the write gates g, and of the permutations' scores.
    let p_and_g = (0..n).chain(0..n).map(|i| if i == own { 1.0 } else { ASIDE });
    // In lexicographic order, the identity is permutation 0.
    let permutations = (0..Gates::permutations(n)).map(|i| if i == 0 { 0.0 } else { APART });
    let bias: Vec<f64> = p_and_g.chain(permutations).collect();
    let rows = bias.len() as i64;
    let gates = Gates::Permuted {
        gain: Learned::new(place.numbered("hyper_gain"), &[n * d], 1.0),
        weight: Learned::new(place.numbered("hyper_weight"), &[rows, n * d], 0.0).summed_over(SumsOver::Width),
        scale: Learned::new(place.numbered("hyper_scale"), &[3], SCALE),
        bias: Learned::each(place.numbered("hyper_bias"), &[rows], bias),
    };
    let mixing = Mixing::Hyper(HyperConnection { streams: n, gates: Box::new(gates) });
    ResidualSpec { mixing: Some(mixing), ..(PRENORM.around)(place) }
}

/// Declares that the stack's output is the norm of the sum of its streams.
fn stack(place: &LayerContext) -> StackSpec {
    sum_at_end(place, place.options.get(&STREAMS))
}
