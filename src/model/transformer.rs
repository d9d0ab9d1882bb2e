//! The encoder-decoder Transformer, and the decoder-only language model.

use super::embedding::Embeddings;
use super::stack::{Stack, StackCache, StackMemory};
use super::{Builder, Context, Packed, Parameters, Ranges};
use crate::config::{Architecture, TransformerConfig};
use crate::error::{Error, Result};
use crate::residual::{self, Place, Sublayer};
use crate::{init, norm};
use tch::{Device, Kind, Tensor};

pub struct Transformer {
    pub config: TransformerConfig,
    pub parameters: Parameters,
    embeddings: Embeddings,
    encoder: Option<Stack>,
    decoder: Stack,
}

/// What decoding needs of the source: per decoder layer, keys and values of the encoder output.
pub struct Memory {
    keys_values: StackMemory,
    /// Sentence i is rows offsets[i]..offsets[i+1].
    pub offsets: Vec<i64>,
}

impl Transformer {
    /// A new model, its parameters drawn from libtorch's generator.
    pub fn new(config: &TransformerConfig, device: Device, kind: Kind) -> Result<Self> {
        Transformer::build(config, Builder::fresh(device, kind))
    }

    /// A model of parameters that exist already, under their canonical names.
    pub fn with_parameters(
        config: &TransformerConfig,
        tensors: &std::collections::HashMap<String, Tensor>,
    ) -> Result<Self> {
        Transformer::build(config, Builder::given(tensors))
    }

    fn build(config: &TransformerConfig, mut b: Builder) -> Result<Self> {
        config.validate()?;
        let scheme = residual::find(config.residual.as_str())?;
        let init = init::find(config.init.as_str())?;
        let with_encoder = config.architecture == Architecture::EncoderDecoder;
        let place = |stack, norm_name: &str| -> Result<Place> {
            Ok(Place {
                stack,
                encoder_layers: if with_encoder { config.encoder_layers } else { 0 },
                decoder_layers: config.decoder_layers,
                layer: 0,
                sublayer: Sublayer::SelfAttention,
                index: 0,
                sublayers: 0,
                d_model: config.d_model,
                d_ff: config.d_ff,
                norm: norm::find(norm_name)?,
                norm_eps: config.norm_eps,
            })
        };
        use Sublayer::{CrossAttention, FeedForward, SelfAttention};
        let embeddings = Embeddings::build(&mut b, config, init)?;
        let encoder = match with_encoder {
            true => {
                let place = place(residual::Stack::Encoder, config.encoder_norm())?;
                let kinds = [SelfAttention, FeedForward];
                Some(b.within("encoder", |b| Stack::build(b, &place, &kinds, config.heads, init, scheme))?)
            }
            false => None,
        };
        let place = place(residual::Stack::Decoder, config.decoder_norm())?;
        let kinds: &[Sublayer] =
            if with_encoder { &[SelfAttention, CrossAttention, FeedForward] } else { &[SelfAttention, FeedForward] };
        let decoder = b.within("decoder", |b| Stack::build(b, &place, kinds, config.heads, init, scheme))?;
        Ok(Transformer { config: config.clone(), parameters: b.finish()?, embeddings, encoder, decoder })
    }

    /// The decoder's output before the output projection, (target rows, d_model).
    pub fn features(&self, source: Option<&Packed>, target: &Packed, ctx: &Context) -> Result<Tensor> {
        let device = target.tokens.device();
        let own = Ranges::between(&target.offsets, &target.offsets, device)?;
        match (&self.encoder, source) {
            (Some(encoder), Some(source)) => {
                let x = self.embeddings.source(source, ctx)?;
                let among = Ranges::between(&source.offsets, &source.offsets, device)?;
                let memory = encoder.forward(x, &among, false, None, ctx)?;
                let across = Ranges::between(&target.offsets, &source.offsets, device)?;
                let x = self.embeddings.target(target, ctx)?;
                self.decoder.forward(x, &own, true, Some((&memory, &across)), ctx)
            }
            (None, None) => {
                let x = self.embeddings.target(target, ctx)?;
                self.decoder.forward(x, &own, true, None, ctx)
            }
            (Some(_), None) => Err(Error::invalid("an encoder-decoder model needs source sentences, got none")),
            (None, Some(_)) => Err(Error::invalid("a decoder-only model takes no source sentences, got some")),
        }
    }

    /// (target rows, V)
    pub fn logits(&self, features: &Tensor, kind: Kind) -> Result<Tensor> {
        self.embeddings.logits(features, kind)
    }

    /// The output projection's matrix (V, d_model) and bias.
    pub fn output(&self) -> Result<(Tensor, Option<&Tensor>)> {
        Ok((self.embeddings.output_weight()?, self.embeddings.output_bias()))
    }

    /// The encoder's part of decoding; none for a decoder-only model.
    pub fn encode(&self, source: &Packed, ctx: &Context) -> Result<Option<Memory>> {
        let Some(encoder) = &self.encoder else { return Ok(None) };
        let among = Ranges::between(&source.offsets, &source.offsets, source.tokens.device())?;
        let output = encoder.forward(self.embeddings.source(source, ctx)?, &among, false, None, ctx)?;
        Ok(Some(Memory { keys_values: self.decoder.memory(&output, ctx)?, offsets: source.offsets.clone() }))
    }

    /// Logits of the next token of every hypothesis, (slots, V). Slot i holds `tokens[i]` at `position` and reads
    /// sentence `sentences[i]` of the memory.
    pub fn step(
        &self,
        tokens: &[i64],
        position: i64,
        sentences: &[usize],
        memory: Option<&Memory>,
        cache: &mut StackCache,
        ctx: &Context,
    ) -> Result<Tensor> {
        let slots = tokens.len() as i64;
        let device = self.parameters.tensors()[0].device();
        let input = Packed::new(tokens, &vec![position; tokens.len()], (0..=slots).collect(), device)?;
        let x = self.embeddings.target(&input, ctx)?;
        let across = match memory {
            Some(memory) => {
                let rows: Vec<i64> = sentences
                    .iter()
                    .enumerate()
                    .flat_map(|(slot, &s)| {
                        [slot as i64, 1, memory.offsets[s], memory.offsets[s + 1] - memory.offsets[s]]
                    })
                    .collect();
                Some(Ranges::of(&rows, device)?)
            }
            None => None,
        };
        let memory = memory.zip(across.as_ref()).map(|(m, ranges)| (&m.keys_values, ranges));
        let h = self.decoder.step(x, cache, memory, ctx)?;
        self.logits(&h, ctx.kind)
    }
}
