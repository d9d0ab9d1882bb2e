//! mHC, manifold-constrained hyper-connections: n streams, which doubly stochastic matrices mix (Xie et al. 2025).
//!
//! The arithmetic is that of DeepSeek's reference (deepseek-ai/TileKernels). First values are ours, put together from
//! published ones (docs/spec.md §2.23).

use super::{prenorm::PreNorm, FirstValue, HyperConnection, Learned, Mixing, Place, ResidualSpec, Scheme, StackSpec};
use crate::options::{at_least_one, setting, Listed};

setting! {
    /// Streams n of mhc.
    STREAMS ("mhc_streams"): i64 = 4, at_least_one;
    /// How often mhc's Sinkhorn iteration normalises columns.
    ITERATIONS ("mhc_iterations"): i64 = 20, at_least_one;
}

/// s, so that the streams move their weights little at first (Xie et al. 2025).
const SCALE: f64 = 0.01;
/// b of streams that are hardly read or written; of the sublayer's own it is 1 (mHC-lite's code).
const ASIDE: f64 = -1.0;
/// b of R beside the diagonal, where it is 0: R begins close to the identity (mHC-lite's code).
const APART: f64 = -8.0;

pub struct Mhc;

impl Mhc {
    /// The connection of sublayer `own`, counted from 0, or without one the reading at the end.
    fn connection(place: &Place, names: [String; 3], own: Option<i64>) -> Mixing {
        let n = place.options.get(&STREAMS);
        let near = |i: i64| own.map_or(0.0, |own| if i == own % n { 1.0 } else { ASIDE });
        let mut bias: Vec<f64> = (0..n).map(near).collect();
        if own.is_some() {
            bias.extend((0..n).map(near));
            bias.extend((0..n * n).map(|i| if i / n == i % n { 0.0 } else { APART }));
        }
        let rows = bias.len() as i64;
        let [weight, scale, bias_name] = names;
        Mixing::Hyper(HyperConnection {
            streams: n,
            iterations: place.options.get(&ITERATIONS),
            weight: Learned::new(weight, &[rows, n * place.model.d_model], 0.0),
            scale: Learned::new(scale, &[if own.is_some() { 3 } else { 1 }], SCALE),
            bias: Learned { name: bias_name, shape: vec![rows], value: FirstValue::Each(bias) },
        })
    }
}

impl Scheme for Mhc {
    fn name(&self) -> &'static str {
        "mhc"
    }

    fn equation(&self) -> &'static str {
        "H⁺_j = g_j F(N(Σ_i p_i H_i)) + Σ_i R_ij H_i of n streams H, all x at the start; p, g, R functions of H, R doubly \
         stochastic; N(Σ_i p_i H_i) after the stack"
    }

    fn source(&self) -> &'static str {
        "Xie et al. 2025 (mHC)"
    }

    fn options(&self) -> &'static [&'static dyn Listed] {
        &[&STREAMS, &ITERATIONS]
    }

    fn around(&self, place: &Place) -> ResidualSpec {
        let names = ["hyper_weight", "hyper_scale", "hyper_bias"].map(|stem| place.numbered(stem));
        let mixing = Mhc::connection(place, names, Some(place.layer * place.sublayers + place.index));
        ResidualSpec { mixing: Some(mixing), ..PreNorm.around(place) }
    }

    fn stack(&self, place: &Place) -> StackSpec {
        let names = ["end_hyper_weight", "end_hyper_scale", "end_hyper_bias"].map(String::from);
        StackSpec { mixing: Some(Mhc::connection(place, names, None)), ..PreNorm.stack(place) }
    }
}
