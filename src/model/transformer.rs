//! The Transformer: an encoder and a decoder, or a language model with a decoder alone.

use super::embedding::Embeddings;
use super::host_batch::HostBatch;
use super::positions::Rotary;
use super::softcap::Softcap;
use super::stack::{Stack, StackCache, StackMemory};
use super::{times, Builder, Context, Packed, Parameters, Ranges, Reads, Sentences};
use crate::config::TransformerConfig;
use crate::error::{Error, Result};
use crate::init;
use crate::residual;
use tch::{Device, Kind, Tensor};

pub struct Transformer {
    pub config: TransformerConfig,
    pub parameters: Parameters,
    embeddings: Embeddings,
    rotary: Option<Rotary>,
    encoder: Option<Stack>,
    decoder: Stack,
}

/// The part of decoding that depends on the source: the keys and values of the encoder output in each decoder layer.
pub struct Memory {
    keys_values: StackMemory,
    /// The offsets of the sentences: sentence i is rows offsets[i]..offsets[i+1].
    pub offsets: Vec<i64>,
}

impl Transformer {
    /// Builds a new model whose parameters are initialised from `seed`.
    pub fn new(config: &TransformerConfig, seed: u64, device: Device, kind: Kind) -> Result<Self> {
        Transformer::build(config, Builder::fresh(seed, device, kind))
    }

    /// Builds a model from existing parameters, under their canonical names.
    pub fn with_parameters(
        config: &TransformerConfig,
        tensors: &std::collections::BTreeMap<String, Tensor>,
    ) -> Result<Self> {
        Transformer::build(config, Builder::given(tensors))
    }

    /// Builds a model to be trained from existing parameters, which become leaves that require gradients.
    pub fn to_train(config: &TransformerConfig, tensors: &std::collections::BTreeMap<String, Tensor>) -> Result<Self> {
        Transformer::build(config, Builder::given_to_train(tensors))
    }

    /// Builds the model; `b` creates its parameters or looks them up.
    fn build(config: &TransformerConfig, b: Builder) -> Result<Self> {
        config.validate()?;
        let mut b = b.scaled(config.scaled());
        let schemes = config.schemes();
        let init = init::find(config.init())?;
        let embeddings = Embeddings::build(&mut b, config, init)?;
        let mut build_stack =
            |name: &str, stack| b.within(name, |b| Stack::build(b, &config.place(stack, 0), init, schemes));
        let encoder = config.has_encoder().then(|| build_stack("encoder", residual::StackName::Encoder)).transpose()?;
        let decoder = build_stack("decoder", residual::StackName::Decoder)?;
        let (config, parameters, rotary) = (config.clone(), b.finish()?, Rotary::of(config));
        Ok(Transformer { config, parameters, embeddings, rotary, encoder, decoder })
    }

    /// Sets the number of the coming update, counted from 1.
    pub fn set_update(&self, update: i64) -> Result<()> {
        self.parameters.set_update(update)
    }

    /// True if the scheme needs [`profile`](Self::profile) before the first update.
    pub fn is_profiled(&self) -> bool {
        self.config.schemes().is_profiled()
    }

    /// Sets the gains that the scheme measures on one training batch, padding included. No norm's statistics are
    /// updated.
    pub fn profile(&self, batch: &Sentences, ctx: Context) -> Result<()> {
        if [Some(&batch.target), batch.source.as_ref()].into_iter().flatten().any(Packed::is_empty) {
            return Err(Error::invalid(
                "gains cannot be taken from a batch of which a side holds no token but padding",
            ));
        }
        let device = self.device();
        let source = batch.source.as_ref().map(Packed::with_padding).transpose()?;
        let padded = Sentences::new(source, batch.target.with_padding()?, device)?.to(device)?;
        // A profiling pass sets the gains while it runs; its output is not needed.
        tch::no_grad(|| self.features(&padded, &ctx.profiling()).map(drop))
    }

    /// Returns the input of the output projection: the decoder's output, (target rows, d_model), times the factor
    /// that the parametrisation sets.
    pub fn features(&self, batch: &Sentences, ctx: &Context) -> Result<Tensor> {
        times(self.decoded(batch, ctx)?, self.config.scaled().logits())
    }

    /// Returns the decoder's output, (target rows, d_model). Encodes the source first, if the model has an encoder.
    fn decoded(&self, batch: &Sentences, ctx: &Context) -> Result<Tensor> {
        let Sentences { source, target, own, across } = batch;
        self.config.check_lengths(&target.lengths)?;
        let on_target = self.over(target, ctx)?;
        let causal = true; // in the decoder; the encoder's tokens attend to all others
        match (&self.encoder, source.as_ref().zip(across.as_ref())) {
            (Some(encoder), Some((source, [within_source, to_source]))) => {
                self.config.check_lengths(&source.lengths)?;
                let x = self.embeddings.source(source, ctx)?;
                let memory = encoder.forward(x, within_source, !causal, None, &self.over(source, ctx)?)?;
                let x = self.embeddings.target(target, ctx)?;
                self.decoder.forward(x, own, causal, Some((&memory, to_source)), &on_target)
            }
            (None, None) => {
                let x = self.embeddings.target(target, ctx)?;
                self.decoder.forward(x, own, causal, None, &on_target)
            }
            (Some(_), None) => Err(Error::invalid("an encoder-decoder model needs source sentences, got none")),
            (None, Some(_)) => Err(Error::invalid("a decoder-only model takes no source sentences, got some")),
        }
    }

    /// Returns the context of a pass over the rows of one side, encoder or decoder, with the rotations of its
    /// positions.
    fn over(&self, side: &Packed, ctx: &Context) -> Result<Context> {
        let rotation = self.rotary.as_ref().map(|rotary| rotary.rotation(side, ctx.kind)).transpose()?;
        Ok(ctx.over(side).turning(rotation).unit_scaled(self.config.scaled().unit.is_some()))
    }

    /// Returns the device of the model's parameters.
    pub fn device(&self) -> Device {
        self.parameters.tensors()[0].device()
    }

    /// Returns the logits, (target rows, V), from the output of [`features`](Self::features). `kind` is the type of
    /// matrix products.
    pub fn logits(&self, features: &Tensor, kind: Kind) -> Result<Tensor> {
        self.embeddings.logits(features, kind)
    }

    /// Returns the softcap that limits the logits, if there is one.
    pub fn softcap(&self) -> Option<Softcap> {
        self.embeddings.softcap()
    }

    /// Returns the output projection's matrix (V, d_model) and bias.
    pub fn output(&self) -> Result<(Tensor, Option<&Tensor>)> {
        Ok((self.embeddings.output_weight()?, self.embeddings.output_bias()))
    }

    /// Encodes the source and returns the part of decoding that depends on it; `None` for a decoder-only model.
    pub fn encode(&self, source: &Packed, ctx: &Context) -> Result<Option<Memory>> {
        let Some(encoder) = &self.encoder else { return Ok(None) };
        self.config.check_lengths(&source.lengths)?;
        let within_source = Ranges::between(source, source, self.device())?.to(self.device())?;
        let (on_source, causal) = (self.over(source, ctx)?, false);
        let output = encoder.forward(self.embeddings.source(source, ctx)?, &within_source, causal, None, &on_source)?;
        Ok(Some(Memory { keys_values: self.decoder.memory(&output, ctx)?, offsets: source.offsets.clone() }))
    }

    /// Returns the logits of the token after each of these texts, (texts, V). One pass reads all texts; each becomes
    /// a new slot of the cache, after the existing ones.
    ///
    /// Errors if the model has an encoder or tensorized attention, or if a text is longer than the model reads.
    pub fn begin(&self, texts: &[&[i64]], cache: &mut StackCache, ctx: &Context) -> Result<Tensor> {
        let device = self.device();
        let batch = Sentences::new(None, Packed::of(texts)?, device)?.to(device)?;
        self.config.check_lengths(&batch.target.lengths)?;
        let (offsets, ctx) = (&batch.target.offsets, &self.over(&batch.target, ctx)?);
        let x = self.embeddings.target(&batch.target, ctx)?;
        let h = self.decoder.begin(x, &batch.own, offsets, cache, ctx)?;
        let last_rows: Vec<i64> = offsets[1..].iter().map(|end| end - 1).collect(); // of each text
        let h = h.f_index_select(0, &Tensor::f_from_slice(&last_rows)?.f_to_device(device)?)?;
        self.logits(&times(h, self.config.scaled().logits())?, ctx.kind)
    }

    /// Returns the logits of the next token in every slot, (slots, V). Slot i gets the token `tokens[i]` at position
    /// `positions[i]`, and reads sentence `sentences[i]` of the memory.
    pub fn step(
        &self,
        tokens: &[i64],
        positions: &[i64],
        sentences: &[usize],
        memory: Option<&Memory>,
        cache: &mut StackCache,
        ctx: &Context,
    ) -> Result<Tensor> {
        let h = self.step_features(tokens, positions, sentences, memory, cache, ctx)?;
        self.logits(&h, ctx.kind)
    }

    /// Returns the input of the output projection in one step of decoding, (slots, d_model). The arguments are those of
    /// [`step`](Self::step).
    pub fn step_features(
        &self,
        tokens: &[i64],
        positions: &[i64],
        sentences: &[usize],
        memory: Option<&Memory>,
        cache: &mut StackCache,
        ctx: &Context,
    ) -> Result<Tensor> {
        self.config.check_lengths(&positions.iter().map(|position| position + 1).collect::<Vec<_>>())?;
        let slots = tokens.len() as i64;
        let device = self.device();
        let offsets = (0..=slots).collect(); // each token is packed as a sentence of its own
        let input = Packed::new(tokens, positions, offsets)?.to(device)?;
        let (x, ctx) = (self.embeddings.target(&input, ctx)?, &self.over(&input, ctx)?);
        // Each slot reads the rows of its source sentence.
        let source_rows = memory.map(|memory| {
            let rows_of = |&sentence: &usize| memory.offsets[sentence]..memory.offsets[sentence + 1];
            Reads::ranges(sentences.iter().map(rows_of))
        });
        let memory = memory.zip(source_rows.as_ref()).map(|(memory, reads)| (&memory.keys_values, reads));
        times(self.decoder.step(x, cache, memory, ctx)?, self.config.scaled().logits())
    }
}
