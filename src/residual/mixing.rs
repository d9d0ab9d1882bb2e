//! Sublayers that read x from several tensors and write F(x) to several, with weights that depend on these tensors.

use super::declared::Learned;
use crate::error::Result;
use crate::options::{at_least_one, at_most};
use serde::{Deserialize, Serialize};

/// How a sublayer reads x and writes F(x); after the last layer, how the stack's output is read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mixing {
    Hyper(HyperConnection),
    Depth(DepthAttention),
}

impl Mixing {
    /// q, k and v each have an input of their own.
    pub fn reads_apart(&self) -> bool {
        matches!(self, Mixing::Depth(DepthAttention { weights: Some(DepthWeights::Normed(query)), .. }) if query.shape.len() == 2)
    }

    /// Its parameters, in the order in which they are made.
    pub fn parameters(&self) -> Vec<&Learned> {
        match self {
            Mixing::Hyper(HyperConnection { gates, .. }) => match gates.as_ref() {
                Gates::Joint { weight, scale, bias, .. } => vec![weight, scale, bias],
                Gates::Each { bias, dynamic: None } => vec![bias],
                Gates::Each { bias, dynamic: Some(Dynamic { gain, shift, weight, scale }) } => {
                    vec![bias, gain, shift, weight, scale]
                }
                Gates::Channel { gain, down, up, write, .. } => [gain, down, up].into_iter().chain(write).collect(),
                Gates::Sum(_) => vec![],
            },
            Mixing::Depth(DepthAttention { weights, .. }) => match weights {
                Some(DepthWeights::Plain(query, gain)) => vec![query, gain],
                Some(DepthWeights::Normed(query)) => vec![query],
                None => vec![],
            },
        }
    }
}

/// Streams, at most: mHC's φ has n³·d numbers.
const MOST_STREAMS: i64 = 100;

/// The number of a hyper-connection's streams, as an option.
pub(super) fn check_streams(name: &str, value: i64) -> Result<()> {
    at_least_one(name, value)?;
    at_most(name, value, MOST_STREAMS)
}

/// A hyper-connection of n streams H, each as wide as x and all x at the start: x = Σ_i p_i⊙H_i is read, and
/// H⁺_j = g_j drop(F(x)) + Σ_i R_ij H_i is written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HyperConnection {
    /// n.
    pub streams: i64,
    pub gates: Box<Gates>,
}

/// What p, g and R are. A stack's end has p alone. ε = 1e-6.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Gates {
    /// Functions of all streams at once (docs/spec.md §2.23): m = φ vec(H)/√(mean H² + ε) has a part for each, and
    /// `scale` and `bias` have, too: p = σ(s₀m₀ + b₀) + ε, g = c·σ(s₁m₁ + b₁), R = sinkhorn(s₂m₂ + b₂).
    Joint {
        /// φ: (n + n + n², n·d); (2n, n·d) without iterations; (n, n·d) at a stack's end.
        weight: Learned,
        /// s: (3,); (2,) without iterations; (1,) at a stack's end.
        scale: Learned,
        /// b, of as many numbers as φ has rows.
        bias: Learned,
        /// c.
        magnitude: f64,
        /// How often R's columns are normalised; 0: R = I, and ε is added to g.
        iterations: i64,
    },
    /// Numbers, and functions of each stream by itself (docs/spec.md §2.31): (p_i, R_i1, …, R_in, g_i) is row i of
    /// `bias`, plus s⊙tanh(W·LayerNorm(H_i)).
    Each {
        /// (n·(n + 2),): n rows of n + 2 numbers.
        bias: Learned,
        dynamic: Option<Dynamic>,
    },
    /// p by channel (docs/spec.md §2.23): with Ĥ_i = γ_i⊙H_i/√(mean H_i² + ε), x = 1/n·Σ_i σ(U silu(V vec(Ĥ)/n))_i⊙Ĥ_i,
    /// g = c·σ(W vec(Ĥ)/n), R = I.
    Channel {
        /// γ: (n·d,).
        gain: Learned,
        /// V: (r, n·d).
        down: Learned,
        /// U: (n·d, r).
        up: Learned,
        /// W: (n, n·d); none at a stack's end.
        write: Option<Learned>,
        /// c.
        magnitude: f64,
    },
    /// At a stack's end: p_i = c.
    Sum(f64),
}

/// What moves [`Gates::Each`]: s⊙tanh(W·LayerNorm(H_i)), s having one number for p and R and one for g.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dynamic {
    /// LayerNorm's γ: (d,).
    pub gain: Learned,
    /// LayerNorm's β: (d,).
    pub shift: Learned,
    /// W: (n + 2, d).
    pub weight: Learned,
    /// s: (2,).
    pub scale: Learned,
}

/// Attention over the outputs of earlier sublayers (docs/spec.md §2.22): x = Σ_i a_i v_i. v_0 is the embedding, each other
/// v_i the sum of drop(F(x)) over a block of sublayers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DepthAttention {
    /// None: nothing but v_0 is there to be read.
    pub weights: Option<DepthWeights>,
    /// drop(F(x)) begins a new v; else it is added to the last.
    pub begins_block: bool,
}

/// What makes a; v̂ = v/√(mean v² + ε), ε = 1e-6.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum DepthWeights {
    /// Query and gain, each (d,): a = softmax_i⟨query, gain⊙v̂_i⟩.
    Plain(Learned, Learned),
    /// A query (d,): a = softmax_i(⟨query, v̂_i⟩/√d), and x = Σ_i a_i v̂_i. Three of them (3, d) read what q, k and v of
    /// self-attention are made of.
    Normed(Learned),
}
