//! Where in a model something is declared.

use super::declared::NormAt;
use crate::choice;
use crate::options::Options;
use crate::parametrisation::Scaled;

choice! {
    /// Which stack a layer belongs to.
    #[derive(Hash, PartialOrd, Ord)]
    pub enum StackName ("stack") { Encoder = "encoder", Decoder = "decoder" }
}

impl StackName {
    /// The stacks of a model.
    pub fn of(model: &ModelShape) -> &'static [StackName] {
        match model.has_encoder {
            true => &[StackName::Encoder, StackName::Decoder],
            false => &[StackName::Decoder],
        }
    }

    /// The sublayers of its layers.
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
    /// torch.nn's name of an attention; a feed-forward's linears stand in the layer itself.
    pub fn path(self) -> &'static str {
        match self {
            Sublayer::SelfAttention => "self_attn.",
            Sublayer::CrossAttention => "multihead_attn.",
            Sublayer::FeedForward => "",
        }
    }
}

choice! {
    /// What a feed-forward has between its matrices (docs/spec.md §4.3).
    pub enum Activation ("activation") {
        Relu = "relu",
        Gelu = "gelu",
        Silu = "silu",
        /// silu, times a third matrix's product.
        SwiGlu = "swiglu",
        /// gelu, times a third matrix's product.
        GeGlu = "geglu",
    }
}

impl Activation {
    /// There is a third matrix.
    pub fn is_gated(self) -> bool {
        matches!(self, Activation::SwiGlu | Activation::GeGlu)
    }
}

choice! {
    /// What the heads' outputs are multiplied by (docs/spec.md §4.3).
    pub enum OutputGate ("output_gate") {
        /// One number a head.
        Head = "head",
        /// One for each of a head's numbers.
        Element = "element",
    }
}

choice! {
    /// Rows of a norm on queries or keys.
    pub enum NormOver ("qk_norm_over") { Head = "head", AllHeads = "all-heads" }
}
choice! {
    /// A norm on each head's values.
    pub enum ValueNorm ("v_norm") { Weighted = "weighted", Unweighted = "unweighted" }
}

/// Norms on queries and keys (docs/spec.md §2.1).
#[derive(Clone, Copy, Debug)]
pub struct QkNorm {
    pub over: NormOver,
    /// They stand after the rotation of self-attention's queries and keys.
    pub after_rotation: bool,
    pub is_weighted: bool,
    /// Of what is normed.
    pub scale: f64,
}

/// A model's form, as far as tables ask for it.
#[derive(Clone, Copy, Debug)]
pub struct ModelShape<'a> {
    pub d_model: i64,
    pub d_ff: i64,
    pub heads: i64,
    /// Heads of keys and values; several heads of queries share one.
    pub kv_heads: i64,
    pub activation: Activation,
    /// Linear layers have biases, if the scheme wants them too.
    pub has_biases: bool,
    /// Embeddings are multiplied by √d.
    pub scales_embeddings: bool,
    /// A model without one has a decoder alone.
    pub has_encoder: bool,
    pub encoder_layers: i64,
    pub decoder_layers: i64,
    pub encoder_norm: &'a str,
    pub decoder_norm: &'a str,
    /// Norms on queries and keys beside the scheme's.
    pub qk_norm: Option<QkNorm>,
    pub v_norm: Option<ValueNorm>,
    /// L of queries and keys of length 1, with a learned factor for their products.
    pub qk_l2norm: Option<i64>,
    /// None: attention has heads.
    pub tensorized: Option<TensorizedSizes>,
    /// None: heads' outputs go to the output projection as they are.
    pub output_gate: Option<OutputGate>,
    /// Each head has a logit in its softmax beside those of the keys.
    pub sinks: bool,
    /// c of scores s that become c·tanh(s/c).
    pub score_softcap: Option<f64>,
    /// What the parametrisation multiplies.
    pub scaled: Scaled,
}

impl ModelShape<'_> {
    /// A small model, for what does not depend on it.
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
        scaled: Scaled::standard(2),
    };
}

/// Of tensorized attention.
#[derive(Clone, Copy, Debug)]
pub struct TensorizedSizes {
    pub rank: i64,
    /// The most tokens that it reads at a time.
    pub segment: i64,
}

/// Where in the model something is declared.
#[derive(Clone, Copy, Debug)]
pub struct LayerContext<'a> {
    pub model: ModelShape<'a>,
    /// What the model's configuration says of the tables' options.
    pub options: &'a Options,
    pub stack: StackName,
    /// 0-based.
    pub layer: i64,
    pub sublayer: Sublayer,
    /// The sublayer's 0-based number within its layer.
    pub index: i64,
    /// Sublayers in a layer of this stack.
    pub sublayers: i64,
    /// They.
    pub kinds: &'a [Sublayer],
}

impl<'a> LayerContext<'a> {
    /// The first sublayer of a layer.
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

    /// The first sublayer of a layer that holds others: a block of another library's model. None: no such block is
    /// empty.
    pub fn of_block(self, kinds: &'a [Sublayer]) -> Option<Self> {
        Some(LayerContext { sublayer: *kinds.first()?, index: 0, sublayers: kinds.len() as i64, kinds, ..self })
    }

    /// Every sublayer of this layer.
    pub fn each(self) -> impl Iterator<Item = LayerContext<'a>> {
        let numbered = self.kinds.iter().enumerate();
        numbered.map(move |(index, &sublayer)| LayerContext { index: index as i64, sublayer, ..self })
    }

    /// Layers of the encoder, N; 0 in a decoder-only model.
    pub fn encoder_layers(&self) -> i64 {
        if self.model.has_encoder {
            self.model.encoder_layers
        } else {
            0
        }
    }

    /// Layers of the decoder, M.
    pub fn decoder_layers(&self) -> i64 {
        self.model.decoder_layers
    }

    /// Layers of this stack, L.
    pub fn layers(&self) -> i64 {
        match self.stack {
            StackName::Encoder => self.encoder_layers(),
            StackName::Decoder => self.decoder_layers(),
        }
    }

    /// Additions to the residual stream of this stack.
    pub fn additions(&self) -> i64 {
        self.layers() * self.sublayers
    }

    /// What a constant of this stack is made of: a scheme's three formulas, one for each kind of stack. The depth of a
    /// single stack counts its additions by two.
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

    /// The sublayer's 0-based number within its stack.
    pub fn number(&self) -> i64 {
        self.layer * self.sublayers + self.index
    }

    /// The stack's last sublayer.
    pub fn is_last(&self) -> bool {
        self.layer + 1 == self.layers() && self.index + 1 == self.sublayers
    }

    /// The stack's norm.
    pub fn norm_name(&self) -> &'a str {
        match self.stack {
            StackName::Encoder => self.model.encoder_norm,
            StackName::Decoder => self.model.decoder_norm,
        }
    }

    /// `stem` with the sublayer's number: torch.nn's norm1, norm2, …
    pub fn numbered(&self, stem: &str) -> String {
        format!("{stem}{}", self.index + 1)
    }

    /// The sublayer's own norm in a scheme that ends with another.
    pub fn norm(&self) -> NormAt {
        let (name, width) = (self.numbered("norm"), self.model.d_model);
        NormAt { name, width, last: false, ends_stack: false, start: 1.0, is_weighted: true }
    }

    /// The sublayer's own norm in a scheme whose last norm is the last sublayer's.
    pub fn closing_norm(&self) -> NormAt {
        NormAt { last: self.is_last(), ..self.norm() }
    }

    /// The norm after the last layer.
    pub fn end_norm(&self) -> NormAt {
        NormAt { name: "norm".into(), last: true, ends_stack: true, ..self.norm() }
    }

    /// The name of a part of the sublayer.
    pub fn path_of(&self, name: &str) -> String {
        format!("{}{name}", self.sublayer.path())
    }

    /// A norm of an attention's queries, keys or values: `name` over rows of that width.
    pub fn projected_norm(&self, name: &str, width: i64) -> NormAt {
        NormAt { name: self.path_of(name), width, ..self.norm() }
    }

    /// Numbers in a head.
    pub fn d_head(&self) -> i64 {
        self.model.d_model / self.model.heads.max(1)
    }

    /// Numbers in a row of keys, or of values.
    pub fn kv_width(&self) -> i64 {
        match self.model.kv_heads == self.model.heads {
            true => self.model.d_model,
            false => self.model.kv_heads * self.d_head(),
        }
    }
}
