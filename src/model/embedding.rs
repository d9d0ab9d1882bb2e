//! Word embeddings with positions, and the output projection, which may share their table.

use super::linear::linear;
use super::positions::PositionEmbedding;
use super::softcap::Softcap;
use super::{times, Builder, Context, Packed, PAD};
use crate::config::{Ties, TransformerConfig};
use crate::error::Result;
use crate::init::{self, Fill, Table};
use crate::norm::fix_norm;
use crate::operator;
use crate::parametrisation::SumsOver;
use tch::{Kind, Tensor};

/// The tables of word embeddings: one, two or three, depending on `tie_embeddings`.
pub struct Embeddings {
    source: Option<Tensor>,
    target: Tensor,
    output: Tensor,
    output_bias: Option<Tensor>,
    /// The parameter s (V) and √d: the logits are multiplied by √d·s.
    logit_scale: Option<(Tensor, f64)>,
    /// True if the output projection is an embedding table. Then FixNorm applies to it, too.
    tied: bool,
    fixnorm: bool,
    softcap: Option<Softcap>,
    /// The factor of word embeddings: √d at the width of the parametrisation's base model, or 1.
    scale: f64,
    /// The factor α_in, by which the sum of words and positions is multiplied.
    alpha: f64,
    source_positions: PositionEmbedding,
    target_positions: PositionEmbedding,
}

impl Embeddings {
    /// Declares the tables of embeddings and positions and the output projection, as the configuration asks.
    pub fn build(b: &mut Builder, config: &TransformerConfig, init: &init::Init) -> Result<Self> {
        let (v, d) = (config.vocab_size, config.d_model);
        let (has_source, scaled) = (config.has_encoder(), config.scaled());
        let table = |b: &mut Builder, table: Table| {
            b.within(table.name(), |b| b.parameter("weight", &[v, d], &first_values(table, config, init)))
        };
        let (source, target) = match config.tie_embeddings {
            Ties::All => {
                let shared = table(b, Table::Shared)?;
                (Some(shared.shallow_clone()), shared)
            }
            _ => {
                let source = if has_source { Some(table(b, Table::Source)?) } else { None };
                (source, table(b, Table::Target)?)
            }
        };
        let source_positions = match has_source {
            true => PositionEmbedding::build(b, config, init, Table::Source)?,
            false => PositionEmbedding::Nothing,
        };
        let target_positions = PositionEmbedding::build(b, config, init, Table::Target)?;
        let output = match config.tie_embeddings {
            Ties::None => b.within("output_projection", |b| {
                b.parameter("weight", &[v, d], &init.output_matrix(&config.outline(), v, &config.options))
            })?,
            _ => target.shallow_clone(),
        };
        let output_bias = match config.output_bias {
            true => Some(b.within("output_projection", |b| b.parameter("bias", &[v], &Fill::Constant(0.0)))?),
            false => None,
        };
        let scaled_logits = |b: &mut Builder| -> Result<(Tensor, f64)> {
            let root = (d as f64).sqrt();
            let first = Fill::Constant(root.recip()); // so the factor √d·s begins at 1
            Ok((b.within("output_projection", |b| b.own("scale", &[v], &first, SumsOver::Nothing))?, root))
        };
        let logit_scale = if config.logit_scale { Some(scaled_logits(b)?) } else { None };
        Ok(Embeddings {
            source: source.filter(|_| has_source), // a shared table serves no source in a decoder-only model
            target,
            output,
            output_bias,
            logit_scale,
            tied: config.tie_embeddings != Ties::None,
            fixnorm: config.fixnorm,
            softcap: config.logit_softcap.map(Softcap),
            scale: if config.scale_embeddings { (scaled.base_width as f64).sqrt() } else { 1.0 },
            alpha: scaled.input,
            source_positions,
            target_positions,
        })
    }

    /// Returns drop(α_in(√d·W[token] + position)) of source tokens, (rows, d), in the parameters' type; d under the
    /// root is the base model's width. A model without a source table uses the target's.
    pub fn source(&self, input: &Packed, ctx: &Context) -> Result<Tensor> {
        self.embed(self.source.as_ref().unwrap_or(&self.target), &self.source_positions, input, ctx)
    }

    /// Returns drop(α_in(√d·W[token] + position)) of target tokens, (rows, d), as [`source`](Self::source) does.
    pub fn target(&self, input: &Packed, ctx: &Context) -> Result<Tensor> {
        self.embed(&self.target, &self.target_positions, input, ctx)
    }

    /// Embeds the tokens with one side's table and positions, then applies dropout.
    fn embed(&self, table: &Tensor, positions: &PositionEmbedding, input: &Packed, ctx: &Context) -> Result<Tensor> {
        let (padding_id, scale_grad_by_freq, sparse) = (-1, false, false); // −1: no id counts as padding
        let mut words = Tensor::f_embedding(table, &input.tokens, padding_id, scale_grad_by_freq, sparse)?;
        if self.fixnorm {
            words = fix_norm::fix_norm(&words)?;
        }
        let words = times(words, self.scale)?;
        let x = match positions.rows(input, words.kind())? {
            Some(positions) => words.f_add(&positions)?,
            None => words,
        };
        let x = times(x, self.alpha)?; // α_in, a factor of the parametrisation
        operator::dropout(x, ctx.rates.embedding, ctx.seed.as_ref(), ctx.dropout_site())
    }

    /// Returns the matrix of the output projection, (V, d): FixNorm is applied if the matrix is an embedding table,
    /// and each row is multiplied by √d·s if logits have such factors.
    pub fn output_weight(&self) -> Result<Tensor> {
        let weight = match self.fixnorm && self.tied {
            true => fix_norm::fix_norm(&self.output)?,
            false => self.output.shallow_clone(),
        };
        match &self.logit_scale {
            Some((s, root)) => Ok(weight.f_mul(&s.f_mul_scalar(*root)?.f_unsqueeze(-1)?)?),
            None => Ok(weight),
        }
    }

    /// Returns the softcap that limits the logits, if there is one.
    pub fn softcap(&self) -> Option<Softcap> {
        self.softcap
    }

    /// Returns the bias of the output projection, (V), if there is one.
    pub fn output_bias(&self) -> Option<&Tensor> {
        self.output_bias.as_ref()
    }

    /// Returns logits, (rows, V), from h (rows, d), the decoder's output. `kind` is the type of matrix products. The
    /// logits are capped if there is a softcap.
    pub fn logits(&self, h: &Tensor, kind: Kind) -> Result<Tensor> {
        let logits = linear(h, &self.output_weight()?, self.output_bias.as_ref(), kind, None)?;
        match self.softcap {
            Some(cap) => cap.of(&logits),
            None => Ok(logits),
        }
    }
}

/// Returns the initialisation of a table of word embeddings.
pub fn first_values(table: Table, config: &TransformerConfig, init: &init::Init) -> Fill {
    match config.fixnorm {
        // FixNorm divides each row by its length. The gradient of a zero row would be 1e12, so padding's row starts
        // like any other.
        true => Fill::Uniform { bound: fix_norm::INIT_BOUND },
        false => Fill::WithZeroRow(PAD, Box::new(init.table(table, &config.outline(), &config.options))),
    }
}
