//! u-μP (Blake et al. 2024): every matrix starts with std 1, and constant factors keep the numbers of activations near
//! 1 at every width and depth (docs/spec.md §3.7).
//!
//! The paper's library also scales backward passes by factors of their own. So its gradient of a parameter is a known
//! multiple of the true gradient, which this package computes. Adam cancels the multiple, except in ε; so ε is divided
//! by the multiple here.

use super::{Multipliers, ParameterRole, Part};

/// The std with which every matrix and table starts.
pub const STD: f64 = 1.0;

/// The sizes of a language model under u-μP, and its multipliers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UnitScaled {
    pub d_model: f64,
    pub d_ff: f64,
    pub d_head: f64,
    pub layers: f64,
    pub vocab_size: f64,
    /// The number of tokens over which attention averages.
    pub length: f64,
    /// α_attn-softmax, the factor of scores beside 1/d_head.
    pub attention: f64,
    /// α_ffn-act, the factor of the activation's input.
    pub activation: f64,
    /// α_res, the size of all branches' sum relative to the embedding's.
    pub residual: f64,
    /// α_res-attn-ratio, the size of attention's part of the sum relative to the feed-forwards'.
    pub attention_ratio: f64,
    /// α_loss-softmax, the factor of logits.
    pub loss: f64,
}

impl UnitScaled {
    /// Returns the factors of x and F(x), 1/√(1 + τ²) and τ/√(1 + τ²), in the stack's `number`-th sublayer, counted
    /// from 0. Even numbers are attention's, odd ones the feed-forwards'.
    pub fn gains(&self, number: i64) -> (f64, f64) {
        // The sizes of one branch of feed-forward and of attention, whose mean square is `residual` squared.
        let feed_forward = self.residual * (2.0 / (1.0 + self.attention_ratio.powi(2))).sqrt();
        let attention = self.attention_ratio * feed_forward;
        // The numbers of attention's and of feed-forwards' branches before this one.
        let [attentions, feed_forwards] = [(number + 1) / 2, number / 2].map(|count| count as f64);
        let branch = if number % 2 == 0 { attention } else { feed_forward };
        // τ is the size of this branch relative to the residual stream before it: the embedding, whose squared size is
        // the number of layers in these units, plus the branches so far.
        let stream_squared = self.layers + attentions * attention.powi(2) + feed_forwards * feed_forward.powi(2);
        let tau = branch / stream_squared.sqrt();
        let skip = (1.0 + tau.powi(2)).powf(-0.5);
        (skip, tau * skip)
    }

    /// Returns the factor of the product with a matrix of a layer.
    pub fn product(fan_in: i64) -> f64 {
        (fan_in as f64).powf(-0.5)
    }

    /// Returns the factor of the scores qᵀk.
    pub fn scores(&self) -> f64 {
        self.attention / self.d_head
    }

    /// Returns the factor of the heads' outputs. Flat attention weights average values; sharp ones copy one.
    pub fn heads(&self) -> f64 {
        // The interpolation and its constants are those of the paper's library.
        let flat = (self.length.ln() / self.length).sqrt();
        between(4.0 * self.d_head / self.attention.powi(2), flat, 1.0).recip()
    }

    /// Returns the factor of x·g·σ(αg), the gated activation.
    pub fn gated(&self) -> f64 {
        between(self.activation.powi(-2), 2.0, 2f64.sqrt())
    }

    /// Returns the multipliers of the parameter with this canonical name and shape.
    ///
    /// Weight decay is divided by the multiplier of the learning rate, because u-μP's decay does not depend on the
    /// rate. For batches of N tokens, set the option ε to the library's ε/√N to get the library's updates.
    pub fn multipliers(&self, name: &str, part: Part, shape: &[i64]) -> Multipliers {
        let fan_in = *shape.last().unwrap_or(&1) as f64;
        // The ratios of the library's gradients to the true ones, divided by √N for N tokens: at the logits, in the
        // residual stream, and in a sublayer.
        let at_logits = self.vocab_size / (self.vocab_size - 1.0).sqrt() / self.loss;
        let in_stream = at_logits * self.d_model / self.vocab_size.sqrt();
        let in_layer = |(sublayer, terms): (i64, f64)| {
            let (_, branch_gain) = self.gains(sublayer);
            in_stream * terms.sqrt() / branch_gain
        };
        let (lr, ratio) = match part.role {
            ParameterRole::Embedding if name.starts_with("output_projection") => (1.0, at_logits * self.d_model),
            ParameterRole::Embedding => (fan_in.powf(-0.5), in_stream * self.vocab_size.sqrt()),
            ParameterRole::HiddenMatrix => ((self.layers * fan_in).powf(-0.5), in_layer(self.sublayer_of(name))),
            ParameterRole::HiddenVector => (self.layers.powf(-0.5), in_layer(self.sublayer_of(name))),
            ParameterRole::End => (1.0, in_stream),
        };
        Multipliers { init: 1.0, lr, weight_decay: 1.0 / lr, eps: 1.0 / ratio }
    }

    /// Returns (sublayer, terms) of a layer's parameter. `sublayer` is the number of the parameter's sublayer in the
    /// stack. The library scales the parameter's gradient by √terms: d_model terms for attention's matrices, d_ff for
    /// the three of a feed-forward, and 1 for a norm.
    fn sublayer_of(&self, name: &str) -> (i64, f64) {
        // The name is `STACK.layers.LAYER.MODULE.…`. A layer has two sublayers: attention, then the feed-forward.
        let inside = name.split_once(".layers.").map_or("", |(_, inside)| inside);
        let (layer, module) = inside.split_once('.').unwrap_or(("0", inside));
        let attention = 2 * layer.parse::<i64>().unwrap_or(0);
        let module = module.split('.').next().unwrap_or("");
        match module {
            "self_attn" if inside.contains("norm") => (attention, 1.0),
            "self_attn" => (attention, self.d_model),
            _ if module.starts_with("linear") => (attention + 1, self.d_ff),
            // The norms of a layer: norm1 belongs to attention, norm2 to the feed-forward.
            _ => (attention + i64::from(module.ends_with('2')), 1.0),
        }
    }
}

/// Interpolates geometrically between `sharp` (flatness 0) and `flat` (flatness ∞).
fn between(flatness: f64, flat: f64, sharp: f64) -> f64 {
    let share = 1.0 / (1.0 + flatness);
    (share * sharp.ln() + (1.0 - share) * flat.ln()).exp()
}
