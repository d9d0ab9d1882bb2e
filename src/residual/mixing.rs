//! Sublayers that read x from several tensors and write F(x) to several, with weights that depend on these tensors.

use super::declared::Learned;
use serde::{Deserialize, Serialize};

/// How a sublayer reads x and writes F(x); after the last layer, how the stack's output is read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mixing {
    Hyper(HyperConnection),
    Depth(DepthAttention),
}

/// A manifold-constrained hyper-connection (docs/spec.md §2.23) of n streams H, each as wide as x and all x at the start.
///
/// m = φ vec(H)/√(mean H² + ε) has a part for each of the weights, and `scale` and `bias` have, too:
/// reading, x = Σ_i (σ(s₀m₀ + b₀) + ε)_i H_i; writing, H⁺_j = (2σ(s₁m₁ + b₁))_j drop(F(x)) + Σ_i R_ij H_i,
/// R = sinkhorn(s₂m₂ + b₂).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HyperConnection {
    /// n.
    pub streams: i64,
    /// How often R's columns are normalised.
    pub iterations: i64,
    /// φ: (n + n + n², n·d), and (n, n·d) where nothing is written.
    pub weight: Learned,
    /// s: (3,), or (1,).
    pub scale: Learned,
    /// b, of as many numbers as φ has rows.
    pub bias: Learned,
}

/// Attention over the outputs of earlier sublayers (docs/spec.md §2.22): x = Σ_i a_i v_i with
/// a = softmax_i⟨query, gain⊙v_i/√(mean v_i² + ε)⟩. v_0 is the embedding, each other v_i the sum of drop(F(x)) over a block
/// of sublayers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DepthAttention {
    /// (query, gain), each (d,); none: nothing but v_0 is there to be read.
    pub weights: Option<(Learned, Learned)>,
    /// drop(F(x)) begins a new v; else it is added to the last.
    pub begins_block: bool,
}
