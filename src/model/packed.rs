//! Packed sentences: only real tokens, one sentence directly after another.

use super::host_batch::HostBatch;
use super::PAD;
use crate::cpu::memory;
use crate::error::{Error, Result};
use crate::host::{has_memory, host};
use tch::{Device, Kind, Tensor};

/// The shape to which batches are padded, so that many batches share one CUDA graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PaddedShape {
    pub rows: i64,
    pub sentences: i64,
    /// The length of the longest sentence in tokens.
    pub longest: i64,
}

/// A batch of sentences without padding.
#[derive(Debug)]
pub struct Packed {
    /// Token ids, int64 (rows).
    pub tokens: Tensor,
    /// Each token's position in its sentence, from 0; int64 (rows).
    pub positions: Tensor,
    /// The largest position in the batch, plus one.
    pub end: i64,
    /// The offsets of the sentences: sentence i is rows offsets[i]..offsets[i+1].
    pub offsets: Vec<i64>,
    /// The number of tokens in each sentence that may be attended to: all tokens except the padding that
    /// [`with_padding`](Self::with_padding) adds.
    pub(super) lengths: Vec<i64>,
    /// 1 at real tokens and 0 at padding, (rows, 1); `None` if there is no padding.
    pub real: Option<Tensor>,
    /// True at the rows that belong to no sentence, bool (rows); `None` if there are no such rows.
    pub spare: Option<Tensor>,
    pub(super) padded_shape: Option<PaddedShape>,
}

impl Packed {
    /// Builds packed sentences on the host; [`to`](HostBatch::to) moves them to a device. Each token has its position
    /// in its sentence, and sentence i is rows `offsets[i]..offsets[i + 1]`.
    pub fn new(tokens: &[i64], positions: &[i64], offsets: Vec<i64>) -> Result<Self> {
        Ok(Packed {
            tokens: Tensor::f_from_slice(tokens)?,
            positions: Tensor::f_from_slice(positions)?,
            end: positions.iter().max().map_or(0, |last| last + 1),
            lengths: offsets.windows(2).map(|ends| ends[1] - ends[0]).collect(),
            offsets,
            real: None,
            spare: None,
            padded_shape: None,
        })
    }

    /// Returns the same sentences (on the host), followed by rows of [`PAD`] up to the padded shape. Errors if they do
    /// not fit this shape.
    pub fn filling(self, padded_shape: PaddedShape) -> Result<Self> {
        let (rows, longest) = (self.rows(), self.lengths.iter().copied().max().unwrap_or(0));
        if rows > padded_shape.rows
            || self.sentences() as i64 > padded_shape.sentences
            || longest > padded_shape.longest
        {
            let actual = PaddedShape { rows, sentences: self.sentences() as i64, longest };
            return Err(Error::invalid(format!("{actual:?} does not fit {padded_shape:?}")));
        }
        // Appends rows of `value` to an int64 tensor.
        let fill = |t: &Tensor, value: i64| {
            let filler = Tensor::f_full([padded_shape.rows - rows].as_slice(), value, (Kind::Int64, Device::Cpu))?;
            Tensor::f_cat(&[t, &filler], 0)
        };
        let spare = Tensor::f_arange(padded_shape.rows, (Kind::Int64, Device::Cpu))?.f_ge(rows)?;
        Ok(Packed {
            tokens: fill(&self.tokens, PAD)?,
            positions: fill(&self.positions, 0)?,
            end: padded_shape.longest,
            spare: Some(spare),
            padded_shape: Some(padded_shape),
            ..self
        })
    }

    /// Returns the same sentences on the host, each filled up with [`PAD`] to the length of the longest one. No token
    /// attends to the added rows.
    pub fn with_padding(&self) -> Result<Self> {
        let tokens: Vec<i64> = host("tokens", &self.tokens)?;
        let longest = self.lengths.iter().copied().max().unwrap_or(0) as usize;
        let rows: Vec<Vec<i64>> = self
            .offsets
            .windows(2)
            .map(|ends| {
                let mut row = tokens[ends[0] as usize..ends[1] as usize].to_vec();
                row.resize(longest, PAD);
                row
            })
            .collect();
        let padded = Packed::of(&rows.iter().map(Vec::as_slice).collect::<Vec<_>>())?;
        // `real` is 1 at real tokens and 0 at padding.
        let real: Vec<f32> =
            self.lengths.iter().flat_map(|len| (0..longest as i64).map(move |i| f32::from(i < *len))).collect();
        let real = Tensor::f_from_slice(&real)?;
        let spare = Some(real.f_eq(0.0)?);
        Ok(Packed { lengths: self.lengths.clone(), real: Some(real.f_unsqueeze(1)?), spare, ..padded })
    }

    /// Packs sentences of token ids on the host; the positions in each sentence count from 0.
    pub fn of(sentences: &[&[i64]]) -> Result<Self> {
        let tokens = sentences.concat();
        let positions: Vec<i64> = sentences.iter().flat_map(|sentence| 0..sentence.len() as i64).collect();
        let mut offsets = vec![0];
        let mut end = 0;
        for sentence in sentences {
            end += sentence.len() as i64;
            offsets.push(end);
        }
        Packed::new(&tokens, &positions, offsets)
    }

    /// Packs a padded batch (B, T) of token ids on the host: keeps every token except [`PAD`], wherever padding is.
    /// Error messages call the batch `name`.
    pub fn from_padded(name: &str, padded: &Tensor, vocab_size: i64) -> Result<Self> {
        if has_memory(padded) {
            // An expanded tensor has more elements than its memory holds, so the copy's size is checked first. The
            // copy is stored about four times: as `ids` and `rows` here, then as tokens and positions.
            let bytes = 4 * size_of::<i64>() as u128 * padded.numel() as u128;
            memory::room(bytes, || format!("{name} of shape {:?} (give fewer or shorter rows)", padded.size()))?;
        }
        let ids: Vec<i64> = host(name, padded)?;
        if padded.kind() != Kind::Int64 || padded.dim() != 2 {
            return Err(Error::invalid(format!(
                "{name} must be an int64 tensor (batch, length) of token ids, got {:?} {:?}",
                padded.kind(),
                padded.size()
            )));
        }
        let (sentences, length) = padded.size2()?;
        let rows: Vec<Vec<i64>> = (0..sentences)
            .map(|i| {
                let row = &ids[(i * length) as usize..((i + 1) * length) as usize];
                row.iter().copied().filter(|token| *token != PAD).collect()
            })
            .collect();
        if let Some(bad) = rows.iter().flatten().find(|t| !(0..vocab_size).contains(*t)) {
            return Err(Error::invalid(format!("{name} holds token {bad}, but the vocabulary has {vocab_size} types")));
        }
        Packed::of(&rows.iter().map(Vec::as_slice).collect::<Vec<_>>())
    }

    /// Puts rows (rows, width) back at the places of their tokens in `padded`, the batch (B, T) of token ids that
    /// [`from_padded`](Self::from_padded) has read. Returns (B, T, width), with zeros at padding.
    pub fn unpack(&self, rows: &Tensor, padded: &Tensor) -> Result<Tensor> {
        let width = rows.size()[1];
        let is_real = padded.f_to_device(rows.device())?.f_ne(PAD)?;
        let places = is_real.f_reshape([-1i64].as_slice())?.f_nonzero()?.f_squeeze_dim(1)?; // indices in the flat batch
        let out = Tensor::f_zeros([padded.numel() as i64, width].as_slice(), (rows.kind(), rows.device()))?;
        let (batch, length) = padded.size2()?;
        Ok(out.f_index_copy(0, &places, rows)?.f_reshape([batch, length, width].as_slice())?)
    }

    /// Returns the number of rows that belong to sentences.
    pub fn rows(&self) -> i64 {
        *self.offsets.last().unwrap_or(&0)
    }

    /// True if no token is real.
    pub fn is_empty(&self) -> bool {
        self.lengths.iter().all(|n| *n == 0)
    }

    /// Returns the number of sentences.
    pub fn sentences(&self) -> usize {
        self.offsets.len() - 1
    }
}

impl HostBatch for Packed {
    /// Returns the tensors that move to a device; the offsets and lengths stay on the host.
    fn tensors(&mut self) -> Vec<&mut Tensor> {
        let Packed { tokens, positions, real, spare, .. } = self;
        [tokens, positions].into_iter().chain(real).chain(spare).collect()
    }
}
