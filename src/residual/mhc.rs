//! mHC, manifold-constrained hyper-connections: n streams, mixed by doubly stochastic matrices (Xie et al. 2025).
//!
//! The arithmetic is that of DeepSeek's reference (deepseek-ai/TileKernels). The reference gives no initial values;
//! those used here combine published ones. The other forms, those of Hunyuan V4, Qwen4-exp and GLM-5,
//! follow the classes in Hugging Face's transformers (docs/spec.md §2.23).

use super::{
    mixing::check_streams, prenorm::PRENORM, Gates, HyperConnection, LayerContext, Learned, Mixing, ResidualSpec,
    Scheme, StackSpec,
};
use crate::choice;
use crate::error::{Error, Result};
use crate::options::{at_least_one, option_spec, positive, AnyOption, Options};
use crate::parametrisation::SumsOver;

choice! {
    /// The mixing and the reading of mhc's streams.
    pub enum MhcMixing ("mhc_mixing") {
        /// Streams are mixed by doubly stochastic matrices.
        Sinkhorn = "sinkhorn",
        /// Streams are not mixed.
        None = "none",
        /// Streams are not mixed; each channel of each stream is read with its own gate.
        Channel = "channel",
    }
}
choice! {
    /// The stack's output in mhc: a gated sum of the streams, or their mean.
    pub enum MhcEnd ("mhc_end") { Gates = "gates", Mean = "mean" }
}

option_spec! {
    /// Number of streams n of mhc.
    STREAMS ("mhc_streams"): i64 = 4, check_streams;
    /// Number of times that mhc's Sinkhorn iteration normalises columns.
    ITERATIONS ("mhc_iterations"): i64 = 20, at_least_one;
    /// Mixing of mhc's streams: by doubly stochastic matrices (sinkhorn), none, or none with gates by channel
    /// (channel).
    MIXING ("mhc_mixing"): MhcMixing = MhcMixing::Sinkhorn;
    /// Upper bound c of mhc's gates, between 0 and c, on what a sublayer adds to a stream.
    MAGNITUDE ("mhc_magnitude"): f64 = 2.0, positive;
    /// Rank of mhc's gates by channel.
    RANK ("mhc_rank"): i64 = 320, at_least_one;
    /// Reading of mhc's streams at the end: with gates, or as their mean.
    END ("mhc_end"): MhcEnd = MhcEnd::Gates;
}

/// The initial value of s, the factor of the scores that depend on the streams. It is small, so that at first the
/// streams hardly influence how they are mixed (Xie et al. 2025; Hunyuan V4).
const SCALE: f64 = 0.01;
/// The initial bias of the read gates p and the write gates g, for all streams but one, which has 1. So a sublayer at
/// first mainly reads and writes this stream (mHC-lite's code).
const ASIDE: f64 = -1.0;
/// The initial bias of the elements off the diagonal of R, the matrix that mixes streams. Those on the diagonal have 0,
/// so R begins close to the identity (mHC-lite's code).
const APART: f64 = -8.0;
/// The standard deviation of the initial matrices in the forms `none` and `channel`, in which nothing else makes the
/// streams differ (`initializer_range` in transformers).
const STD: f64 = 0.02;

pub static MHC: Scheme = Scheme {
    name: "mhc",
    equation: "H⁺_j = g_j F(N(Σ_i p_i H_i)) + Σ_i R_ij H_i of n streams H, all x at the start; p, g, R functions of H, R doubly \
     stochastic; N(Σ_i p_i H_i) after the stack",
    source: "Xie et al. 2025 (mHC)",
    options: &[&STREAMS, &ITERATIONS, &MIXING, &MAGNITUDE, &RANK, &END],
    check,
    around,
    stack,
    ..Scheme::PLAIN
};

/// Errors if an option is set that only another form of mixing uses.
fn check(options: &Options) -> Result<()> {
    let mixing = options.get(&MIXING);
    // Errors if the option has another value than its default, and the mixing is not `user`, the one that uses it.
    let unused = |option: &dyn AnyOption, user: MhcMixing| {
        let value = options.value(option);
        match mixing == user || value == option.field("").default {
            true => Ok(()),
            false => Err(Error::invalid(format!(
                "{} = {value} is an option of mhc_mixing = {:?}, and here it is {:?}: leave it out",
                option.name(),
                user.name(),
                mixing.name()
            ))),
        }
    };
    unused(&ITERATIONS, MhcMixing::Sinkhorn)?;
    unused(&RANK, MhcMixing::Channel)
}

/// Declares how a sublayer reads, mixes and writes the streams, and the norm on what it reads.
fn around(place: &LayerContext) -> ResidualSpec {
    let is_end = false;
    let mixing = Some(connection(place, is_end, |stem| place.numbered(stem)));
    match place.options.get(&MIXING) {
        // In this form the gates have norms of their own, so PreNorm's are left out.
        MhcMixing::Channel => ResidualSpec { mixing, ..ResidualSpec::default() },
        _ => ResidualSpec { mixing, ..(PRENORM.around)(place) },
    }
}

/// Declares how the stack's output is read from the streams, and the norm after it, if the gates have none.
fn stack(place: &LayerContext) -> StackSpec {
    let is_end = true;
    let mixing = Some(connection(place, is_end, |stem| format!("end_{stem}")));
    match (place.options.get(&MIXING), place.options.get(&END)) {
        (MhcMixing::Channel, MhcEnd::Gates) => StackSpec { mixing, ..StackSpec::default() },
        _ => StackSpec { mixing, ..(PRENORM.stack)(place) },
    }
}

/// Returns the mixing of a sublayer, or of the stack's end. `name` makes a parameter's full name from its stem. The
/// biases set the initial weights: p with which the n streams are read, g with which F(x) is written to them, and R,
/// which mixes them.
fn connection(place: &LayerContext, is_end: bool, name: impl Fn(&str) -> String) -> Mixing {
    let options = place.options;
    let (n, d, magnitude) = (options.get(&STREAMS), place.model.d_model, options.get(&MAGNITUDE));
    // Declares gates that are functions of all streams together, with `scales` numbers s and the initial values `bias`.
    // `weight` declares the matrix, from its name and shape.
    let joint = |scales: i64, bias: Vec<f64>, weight: fn(String, &[i64]) -> Learned, iterations: i64| {
        let rows = bias.len() as i64;
        Gates::Joint {
            weight: weight(name("hyper_weight"), &[rows, n * d]).summed_over(SumsOver::Width),
            scale: Learned::new(name("hyper_scale"), &[scales], SCALE),
            bias: Learned::each(name("hyper_bias"), &[rows], bias),
            magnitude,
            iterations,
        }
    };
    let gates = match (options.get(&MIXING), is_end) {
        (_, true) if options.get(&END) == MhcEnd::Mean => Gates::Sum(1.0 / n as f64),
        (MhcMixing::Sinkhorn, is_end) => {
            let own = place.number() % n; // the stream that this sublayer mainly reads and writes
            let p_and_g = (0..n).chain(0..n).map(|i| if i == own { 1.0 } else { ASIDE });
            let is_diagonal = |i: i64| i / n == i % n; // i counts R's elements row by row
            let r = (0..n * n).map(|i| if is_diagonal(i) { 0.0 } else { APART });
            let bias = if is_end { vec![0.0; n as usize] } else { p_and_g.chain(r).collect() };
            let scales = if is_end { 1 } else { 3 }; // one for p alone, or for each of p, g and R
            joint(scales, bias, |name, shape| Learned::new(name, shape, 0.0), options.get(&ITERATIONS))
        }
        (MhcMixing::None, is_end) => {
            let even = -((n - 1).max(1) as f64).ln(); // p = σ(even) = 1/n, if there are several streams
            let written = if is_end { 0 } else { n as usize };
            let bias = [vec![even; n as usize], vec![0.0; written]].concat();
            let scales = if is_end { 1 } else { 2 }; // one for p alone, or for each of p and g
            let iterations = 0; // R = I, so streams are not mixed
            joint(scales, bias, |name, shape| Learned::normal(name, shape, STD), iterations)
        }
        (MhcMixing::Channel, is_end) => {
            let drawn = |stem: &str, shape: [i64; 2]| Learned::normal(name(stem), &shape, STD);
            let rank = options.get(&RANK);
            Gates::Channel {
                gain: Learned::new(name("hyper_gain"), &[n * d], 1.0),
                down: drawn("hyper_down", [rank, n * d]).summed_over(SumsOver::Width),
                up: drawn("hyper_up", [n * d, rank]),
                write: (!is_end).then(|| drawn("hyper_weight", [n, n * d]).summed_over(SumsOver::Width)),
                magnitude,
            }
        }
    };
    Mixing::Hyper(HyperConnection { streams: n, gates: Box::new(gates) })
}
