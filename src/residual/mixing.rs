//! Sublayers that read x from several tensors and write F(x) to several. The weights may depend on these tensors.

use super::declared::{Learned, StackSpec};
use super::place::LayerContext;
use super::prenorm::PRENORM;
use crate::error::Result;
use crate::options::{at_least_one, at_most};
use serde::{Deserialize, Serialize};

/// How a sublayer reads x and writes F(x), or how the stack's output is read after the last layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mixing {
    Hyper(HyperConnection),
    Depth(DepthAttention),
}

impl Mixing {
    /// True if q, k and v have separate inputs.
    pub fn reads_apart(&self) -> bool {
        let Mixing::Depth(DepthAttention { weights: Some(DepthWeights::Normed(query)), .. }) = self else {
            return false;
        };
        query.shape.len() == 2 // (3, d): one query for each of q, k and v
    }

    /// Returns the mixing's parameters, in the order in which they are declared.
    pub fn parameters(&self) -> Vec<&Learned> {
        match self {
            Mixing::Hyper(HyperConnection { gates, .. }) => match gates.as_ref() {
                Gates::Joint { weight, scale, bias, .. } => vec![weight, scale, bias],
                Gates::Each { bias, dynamic: None } => vec![bias],
                Gates::Each { bias, dynamic: Some(Dynamic { gain, shift, weight, scale }) } => {
                    vec![bias, gain, shift, weight, scale]
                }
                Gates::Permuted { gain, weight, scale, bias } => vec![gain, weight, scale, bias],
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

/// The maximum number of streams n. The matrix of mHC's gates has about n³·d numbers, so memory grows fast with n.
const MOST_STREAMS: i64 = 100;

/// Declares a stack whose output is the norm of the sum of its `streams` streams.
pub(super) fn sum_at_end(place: &LayerContext, streams: i64) -> StackSpec {
    let end = HyperConnection { streams, gates: Box::new(Gates::Sum(1.0)) };
    StackSpec { mixing: Some(Mixing::Hyper(end)), ..(PRENORM.stack)(place) }
}

/// Errors unless `value`, a number of streams, lies between 1 and [`MOST_STREAMS`]; `name` is the option's.
pub(super) fn check_streams(name: &str, value: i64) -> Result<()> {
    at_least_one(name, value)?;
    at_most(name, value, MOST_STREAMS)
}

/// A hyper-connection of n streams H, which are as wide as x and begin with the value of x. A sublayer reads x = Σ_i
/// p_i⊙H_i and writes H⁺_j = g_j drop(F(x)) + Σ_i R_ij H_i.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HyperConnection {
    /// The number of streams n.
    pub streams: i64,
    pub gates: Box<Gates>,
}

/// How p, g and R are computed. The end of a stack only has p. ε is 1e-6.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Gates {
    /// The gates are functions of all streams together (docs/spec.md §2.23). With m = φ vec(H)/√(mean H² + ε): p =
    /// σ(s₀m₀ + b₀) + ε, g = c·σ(s₁m₁ + b₁), R = sinkhorn(s₂m₂ + b₂). The indices 0, 1 and 2 denote the parts of
    /// `scale`, of m and of `bias` that belong to p, g and R.
    Joint {
        /// φ: (n + n + n², n·d), (2n, n·d) without iterations, or (n, n·d) at a stack's end.
        weight: Learned,
        /// s: (3,), (2,) without iterations, or (1,) at a stack's end.
        scale: Learned,
        /// b, with as many numbers as φ has rows.
        bias: Learned,
        /// The factor c of the write gates g, which is also their upper bound.
        magnitude: f64,
        /// How often R's columns are normalised; 0 means that R = I, and that ε is added to g.
        iterations: i64,
    },
    /// The gates are learned numbers plus functions of each stream alone (docs/spec.md §2.31). (p_i, R_i1, …, R_in,
    /// g_i) is row i of `bias` plus s⊙tanh(W·LayerNorm(H_i)).
    Each {
        /// n rows of n + 2 numbers, stored as (n·(n + 2),).
        bias: Learned,
        dynamic: Option<Dynamic>,
    },
    /// The gates are functions of all streams together, and R is a weighted mean of permutations (docs/spec.md
    /// §2.33). With m = φ(γ⊙vec(H)·√(nd)/max(‖vec(H)‖, 1e-12)): p = σ(s₀m₀ + b₀), g = 2σ(s₁m₁ + b₁), R = Σ_r
    /// softmax(s₂m₂ + b₂)_r P_r over all permutations P_r of n streams, in lexicographic order.
    Permuted {
        /// γ, of shape (n·d,).
        gain: Learned,
        /// φ, of shape (2n + n!, n·d).
        weight: Learned,
        /// s, of shape (3,).
        scale: Learned,
        /// b, of shape (2n + n!,).
        bias: Learned,
    },
    /// Each channel has its own gates (docs/spec.md §2.23). With Ĥ_i = γ_i⊙H_i/√(mean H_i² + ε): x = 1/n·Σ_i σ(U
    /// silu(V vec(Ĥ)/n))_i⊙Ĥ_i, g = c·σ(W vec(Ĥ)/n), R = I.
    Channel {
        /// γ, of shape (n·d,).
        gain: Learned,
        /// V, of shape (r, n·d).
        down: Learned,
        /// U, of shape (n·d, r).
        up: Learned,
        /// W, of shape (n, n·d); `None` at a stack's end.
        write: Option<Learned>,
        /// The factor c of the write gates g, which is also their upper bound.
        magnitude: f64,
    },
    /// p_i = c for every stream, at a stack's end.
    Sum(f64),
}

impl Gates {
    /// The maximum number of streams in [`Gates::Permuted`]; 6 streams have 720 permutations.
    pub const MOST_PERMUTED: i64 = 6;

    /// Returns n!, the number of permutations of n streams.
    pub fn permutations(streams: i64) -> i64 {
        (1..=streams).product()
    }
}

/// The part of [`Gates::Each`] that depends on the input: s⊙tanh(W·LayerNorm(H_i)). s has one number for p and R, and
/// one for g.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dynamic {
    /// LayerNorm's γ, of shape (d,).
    pub gain: Learned,
    /// LayerNorm's β, of shape (d,).
    pub shift: Learned,
    /// W, of shape (n + 2, d).
    pub weight: Learned,
    /// s, of shape (2,).
    pub scale: Learned,
}

/// Attention over the outputs of earlier sublayers (docs/spec.md §2.22): x = Σ_i a_i v_i. v_0 is the embedding. Each
/// other v_i is the sum of drop(F(x)) over a block of sublayers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DepthAttention {
    /// How the weights a are computed; `None` if v_0 is the only tensor to read.
    pub weights: Option<DepthWeights>,
    /// True if drop(F(x)) begins a new v; false if it is added to the last v.
    pub begins_block: bool,
}

/// How the weights a are computed, with v̂ = v/√(mean v² + ε) and ε = 1e-6.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum DepthWeights {
    /// A query (d,) and a gain (d,): a = softmax_i⟨query, gain⊙v̂_i⟩.
    Plain(Learned, Learned),
    /// A query (d,): a = softmax_i(⟨query, v̂_i⟩/√d), and x = Σ_i a_i v̂_i. In self-attention there may be three
    /// queries (3, d), which read separate inputs of q, k and v.
    Normed(Learned),
}
