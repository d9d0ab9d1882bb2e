//! The place of a declaration in a model, and the facts about the model that declarations may use.

use super::declared::NormAt;
use crate::choice;
use crate::options::Options;
use crate::parametrisation::Scaled;

choice! {
    /// The stack to which a layer belongs.
    #[derive(Hash, PartialOrd, Ord)]
    pub enum StackName ("stack") { Encoder = "encoder", Decoder = "decoder" }
}

impl StackName {
    /// Returns the stacks that a model has.
    pub fn of(model: &ModelShape) -> &'static [StackName] {
        match model.has_encoder {
            true => &[StackName::Encoder, StackName::Decoder],
            false => &[StackName::Decoder],
        }
    }

    /// Returns the sublayers that each layer of this stack has.
    pub fn sublayers(self, model: &ModelShape) -> &'static [Sublayer] {
        use Sublayer::{CrossAttention, FeedForward, SelfAttention};
        match self {
            StackName::Decoder if model.has_encoder => &[SelfAttention, CrossAttention, FeedForward],
            _ => &[SelfAttention, FeedForward],
        }
    }
}

choice! {
    pub enum Sublayer ("sublayer") {
        SelfAttention = "self-attention",
        CrossAttention = "cross-attention",
        FeedForward = "feed-forward",
    }
}

impl Sublayer {
    /// Returns the path of an attention module in torch.nn; empty for a feed-forward, whose linear layers belong to
    /// the layer itself.
    pub fn path(self) -> &'static str {
        match self {
            Sublayer::SelfAttention => "self_attn.",
            Sublayer::CrossAttention => "multihead_attn.",
            Sublayer::FeedForward => "",
        }
    }
}

choice! {
    /// The activation between a feed-forward's matrices (docs/spec.md §4.3).
    pub enum Activation ("activation") {
        Relu = "relu",
        Gelu = "gelu",
        Silu = "silu",
        /// relu, squared.
        Relu2 = "relu2",
        /// silu(W₁x)⊙W₃x, with a third matrix W₃.
        SwiGlu = "swiglu",
        /// gelu(W₁x)⊙W₃x, with a third matrix W₃.
        GeGlu = "geglu",
    }
}

impl Activation {
    /// True if the feed-forward has a third matrix, the gate's.
    pub fn is_gated(self) -> bool {
        matches!(self, Activation::SwiGlu | Activation::GeGlu)
    }
}

choice! {
    /// The gate of the heads' outputs (docs/spec.md §4.3).
    pub enum OutputGate ("output_gate") {
        /// One number per head.
        Head = "head",
        /// One number per element of a head's output.
        Element = "element",
    }
}

choice! {
    /// The rows that a norm on queries or keys normalises: each head separately, or all heads joined.
    pub enum NormOver ("qk_norm_over") { Head = "head", AllHeads = "all-heads" }
}
choice! {
    /// The norm on each head's values.
    pub enum ValueNorm ("v_norm") { Weighted = "weighted", Unweighted = "unweighted" }
}

/// The norms on queries and keys (docs/spec.md §2.1).
#[derive(Clone, Copy, Debug)]
pub struct QkNorm {
    pub over: NormOver,
    /// True if the norms follow the rotation of queries and keys in self-attention.
    pub after_rotation: bool,
    pub is_weighted: bool,
    /// The factor by which normed queries and keys are multiplied.
    pub scale: f64,
}

/// The shape of a model, as far as the tables of norms, schemes and initialisations need it.
#[derive(Clone, Copy, Debug)]
pub struct ModelShape<'a> {
    pub d_model: i64,
    pub d_ff: i64,
    pub heads: i64,
    /// The number of heads of keys and values; several query heads may share one.
    pub kv_heads: i64,
    pub activation: Activation,
    /// True if linear layers have biases. A scheme without biases overrides this.
    pub has_biases: bool,
    /// True if word embeddings are multiplied by √d.
    pub scales_embeddings: bool,
    /// True if there is an encoder; otherwise the model is only a decoder.
    pub has_encoder: bool,
    pub encoder_layers: i64,
    pub decoder_layers: i64,
    pub encoder_norm: &'a str,
    pub decoder_norm: &'a str,
    /// The norms on queries and keys that are added to the scheme's own.
    pub qk_norm: Option<QkNorm>,
    pub v_norm: Option<ValueNorm>,
    /// The length L of `qk_l2norm`: queries and keys are scaled to length 1, and scores get a learned factor that
    /// begins at log₂(L² − L). `None` turns both off.
    pub qk_l2norm: Option<i64>,
    /// The sizes of tensorized attention; `None` for multi-head attention.
    pub tensorized: Option<TensorizedSizes>,
    /// The gate on the outputs of the heads; `None` if there is none.
    pub output_gate: Option<OutputGate>,
    /// True if each head's softmax has a sink: one more logit, which belongs to no key.
    pub sinks: bool,
    /// The softcap c: scores s become c·tanh(s/c).
    pub score_softcap: Option<f64>,
    /// The size of the vocabulary, if layers add value embeddings to their values; otherwise `None`.
    pub value_embeddings: Option<i64>,
    /// True if each embedding gets a share of the previous token's embedding.
    pub smear: bool,
    /// The model's parametrisation.
    pub scaled: Scaled,
}

impl ModelShape<'_> {
    /// A small model, for callers that do not depend on the sizes.
    pub const SMALL: ModelShape<'static> = ModelShape {
        d_model: 2,
        d_ff: 2,
        heads: 1,
        kv_heads: 1,
        activation: Activation::Relu,
        has_biases: true,
        scales_embeddings: true,
        has_encoder: true,
        encoder_layers: 1,
        decoder_layers: 1,
        encoder_norm: "layernorm",
        decoder_norm: "layernorm",
        qk_norm: None,
        v_norm: None,
        qk_l2norm: None,
        tensorized: None,
        output_gate: None,
        sinks: false,
        score_softcap: None,
        value_embeddings: None,
        smear: false,
        scaled: Scaled::standard(2),
    };
}

/// The sizes of tensorized attention.
#[derive(Clone, Copy, Debug)]
pub struct TensorizedSizes {
    pub rank: i64,
    /// The maximum number of tokens that tensorized attention reads at a time.
    pub segment: i64,
}

/// The place of a declaration in a model: a sublayer in a layer of a stack.
#[derive(Clone, Copy, Debug)]
pub struct LayerContext<'a> {
    pub model: ModelShape<'a>,
    /// The values of options in the model's configuration.
    pub options: &'a Options,
    pub stack: StackName,
    /// The layer's index in its stack, from 0.
    pub layer: i64,
    pub sublayer: Sublayer,
    /// The sublayer's index in its layer, from 0.
    pub index: i64,
    /// The number of sublayers in a layer of this stack.
    pub sublayers: i64,
    /// The kinds of this layer's sublayers, in order.
    pub kinds: &'a [Sublayer],
}

impl<'a> LayerContext<'a> {
    /// Returns the place of the first sublayer in layer `layer`, counted from 0, of a stack.
    pub fn new(model: ModelShape<'a>, options: &'a Options, stack: StackName, layer: i64) -> Self {
        let kinds = stack.sublayers(&model);
        LayerContext {
            model,
            options,
            stack,
            layer,
            sublayer: kinds[0],
            index: 0,
            sublayers: kinds.len() as i64,
            kinds,
        }
    }

    /// Returns the place of the first sublayer in a layer whose sublayers are `kinds`, such as a block of another
    /// library's model; `None` if `kinds` is empty.
    pub fn of_block(self, kinds: &'a [Sublayer]) -> Option<Self> {
        Some(LayerContext { sublayer: *kinds.first()?, index: 0, sublayers: kinds.len() as i64, kinds, ..self })
    }

    /// Iterates over the places of all sublayers in this layer.
    pub fn each(self) -> impl Iterator<Item = LayerContext<'a>> {
        let numbered = self.kinds.iter().enumerate();
        numbered.map(move |(index, &sublayer)| LayerContext { index: index as i64, sublayer, ..self })
    }

    /// Returns N, the number of layers in the encoder; 0 in a decoder-only model.
    pub fn encoder_layers(&self) -> i64 {
        if self.model.has_encoder {
            self.model.encoder_layers
        } else {
            0
        }
    }

    /// Returns M, the number of layers in the decoder.
    pub fn decoder_layers(&self) -> i64 {
        self.model.decoder_layers
    }

    /// Returns L, the number of layers in this stack.
    pub fn layers(&self) -> i64 {
        match self.stack {
            StackName::Encoder => self.encoder_layers(),
            StackName::Decoder => self.decoder_layers(),
        }
    }

    /// Returns the number of additions to this stack's residual stream.
    pub fn additions(&self) -> i64 {
        self.layers() * self.sublayers
    }

    /// Computes a constant of this stack. `encoder` and `decoder` are formulas of N and M, the numbers of layers in the
    /// encoder and in the decoder. `alone` is the formula for a decoder-only model; its argument, the depth, is half
    /// the stack's number of additions.
    pub fn constant(
        &self,
        encoder: impl Fn(f64, f64) -> f64,
        decoder: impl Fn(f64, f64) -> f64,
        alone: impl Fn(f64) -> f64,
    ) -> f64 {
        let (n, m) = (self.encoder_layers() as f64, self.decoder_layers() as f64);
        match self.stack {
            StackName::Encoder => encoder(n, m),
            StackName::Decoder if self.model.has_encoder => decoder(n, m),
            StackName::Decoder => alone(self.additions() as f64 / 2.0),
        }
    }

    /// Returns the sublayer's index in its stack, from 0.
    pub fn number(&self) -> i64 {
        self.layer * self.sublayers + self.index
    }

    /// True for the stack's last sublayer.
    pub fn is_last(&self) -> bool {
        self.layer + 1 == self.layers() && self.index + 1 == self.sublayers
    }

    /// Returns the name of the stack's norm.
    pub fn norm_name(&self) -> &'a str {
        match self.stack {
            StackName::Encoder => self.model.encoder_norm,
            StackName::Decoder => self.model.decoder_norm,
        }
    }

    /// Returns `stem` and the number of the sublayer in its layer, from 1, as in torch.nn's norm1, norm2, …
    pub fn numbered(&self, stem: &str) -> String {
        format!("{stem}{}", self.index + 1)
    }

    /// Returns the norm of this sublayer, for a scheme that has another norm after the last layer.
    pub fn norm(&self) -> NormAt {
        let (name, width) = (self.numbered("norm"), self.model.d_model);
        NormAt { name, width, last: false, ends_stack: false, start: 1.0, is_weighted: true }
    }

    /// Returns the norm of this sublayer, for a scheme in which the last sublayer's norm is the stack's last.
    pub fn closing_norm(&self) -> NormAt {
        NormAt { last: self.is_last(), ..self.norm() }
    }

    /// Returns the norm after the last layer.
    pub fn end_norm(&self) -> NormAt {
        NormAt { name: "norm".into(), last: true, ends_stack: true, ..self.norm() }
    }

    /// Returns the name of a part of this sublayer, with the path of its attention module.
    pub fn path_of(&self, name: &str) -> String {
        format!("{}{name}", self.sublayer.path())
    }

    /// Returns a norm on the queries, keys or values of an attention, for rows of this width.
    pub fn projected_norm(&self, name: &str, width: i64) -> NormAt {
        NormAt { name: self.path_of(name), width, ..self.norm() }
    }

    /// Returns the width of a head.
    pub fn d_head(&self) -> i64 {
        self.model.d_model / self.model.heads.max(1)
    }

    /// Returns the width of a row of keys, or of values.
    pub fn kv_width(&self) -> i64 {
        match self.model.kv_heads == self.model.heads {
            true => self.model.d_model,
            false => self.model.kv_heads * self.d_head(),
        }
    }
}
