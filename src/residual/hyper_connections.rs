//! Hyper-connections: n streams, which are mixed by learned numbers and by functions of each stream (Zhu et al. 2024,
//! Algorithm 2).

use super::mixing::{check_streams, sum_at_end};
use super::{
    prenorm::PRENORM, Dynamic, Gates, HyperConnection, LayerContext, Learned, Mixing, ResidualSpec, Scheme, StackSpec,
};
use crate::options::option_spec;
use crate::parametrisation::SumsOver;

option_spec! {
    /// Number of streams n of hyper-connections.
    STREAMS ("hyper_connections_streams"): i64 = 4, check_streams;
    /// Let hyper-connections depend on the streams; otherwise they are learned numbers alone.
    DYNAMIC ("hyper_connections_dynamic"): bool = true;
}

/// The initial value of s, the factor of the weights' part that depends on the streams. It is small, so that at first
/// the streams hardly influence how they are mixed.
const SCALE: f64 = 0.01;

pub static HYPER_CONNECTIONS: Scheme = Scheme {
    name: "hyper-connections",
    equation: "H⁺_j = g_j F(N(Σ_i p_i H_i)) + Σ_i R_ij H_i of n streams H, all x at the start; row i of (p, R, g) is learned, plus \
     s⊙tanh(W·LayerNorm(H_i)); N(Σ_i H_i) after the stack",
    source: "Zhu et al. 2024 (Hyper-Connections)",
    options: &[&STREAMS, &DYNAMIC],
    around,
    stack,
    ..Scheme::PLAIN
};

/// Declares how a sublayer reads, mixes and writes n streams. At first it reads one stream, keeps each stream and adds
/// F(x) to all of them.
fn around(place: &LayerContext) -> ResidualSpec {
    let (n, d) = (place.options.get(&STREAMS), place.model.d_model);
    let own = place.number() % n; // the stream that this sublayer reads at first

    // Row i holds p_i, the weight with which stream i is read, then R_i1 to R_in, its weights in the new streams, then
    // g_i, the weight with which F(x) is written to it.
    let row = |i: i64| {
        let one_if_equal = |j: i64| if i == j { 1.0 } else { 0.0 };
        [one_if_equal(own)].into_iter().chain((0..n).map(one_if_equal)).chain([1.0]).collect::<Vec<f64>>()
    };
    let gates = Gates::Each {
        bias: Learned::each(place.numbered("hyper_bias"), &[n * (n + 2)], (0..n).flat_map(row).collect())
            .summed_over(SumsOver::Depth),
        dynamic: place.options.get(&DYNAMIC).then(|| Dynamic {
            gain: Learned::new(place.numbered("hyper_norm_weight"), &[d], 1.0),
            shift: Learned::new(place.numbered("hyper_norm_bias"), &[d], 0.0),
            weight: Learned::new(place.numbered("hyper_weight"), &[n + 2, d], 0.0).summed_over(SumsOver::Width),
            scale: Learned::new(place.numbered("hyper_scale"), &[2], SCALE).summed_over(SumsOver::Depth),
        }),
    };
    let mixing = Mixing::Hyper(HyperConnection { streams: n, gates: Box::new(gates) });
    ResidualSpec { mixing: Some(mixing), ..(PRENORM.around)(place) }
}

/// Declares that the stack's output is the norm of the sum of its streams.
fn stack(place: &LayerContext) -> StackSpec {
    sum_at_end(place, place.options.get(&STREAMS))
}
