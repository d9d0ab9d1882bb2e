//! Text generation with a language model (docs/spec.md §4.17).
//!
//! The model reads a text through a window. The first window begins with the EOS before the text. When a window is
//! full, the next one begins half a window later. A new window is read in one pass, together with the new windows of
//! other prompts, and only once for all samples of a prompt. After that, every text advances by one token per step.

use super::sampling::Sampling;
use crate::config::{AttentionName, GenerationOptions};
use crate::data::random::{Purpose, Random};
use crate::error::{Error, Result};
use crate::host::host;
use crate::model::{Context, HostBatch, Packed, Sentences, StackCache, Transformer, BOS, EOS, PAD};
use std::collections::HashMap;
use tch::{Kind, Tensor};

/// The settings of text generation.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationConfig {
    pub sampling: Sampling,
    /// The maximum number of generated tokens, EOS included.
    pub max_length: usize,
    /// The number of generated EOS tokens after which a text ends; 0 means that EOS does not end a text.
    pub sentences: usize,
    /// The maximum number of tokens that the model reads at a time.
    pub context: usize,
    pub seed: u64,
}

impl GenerationConfig {
    /// Builds the settings from options. `context` is the window's length, unless the options set it.
    pub fn of(options: &GenerationOptions, context: i64) -> Result<Self> {
        Ok(GenerationConfig {
            sampling: Sampling::of(options)?,
            max_length: options.max_length as usize,
            sentences: options.sentences as usize,
            context: options.context.unwrap_or(context) as usize,
            seed: options.seed,
        })
    }

    /// Returns the number of tokens by which a window moves when it is full.
    fn stride(&self) -> usize {
        (self.context / 2).max(1)
    }

    /// Returns the start of the window for a text of `length` tokens, the EOS before the text included. It is the first
    /// multiple of the stride after which at most `context` tokens remain. With context 4, the stride is 2, and texts
    /// of 4, 5 and 7 tokens have windows from 0, 2 and 4 on.
    fn window(&self, length: usize) -> usize {
        length.saturating_sub(self.context).div_ceil(self.stride()) * self.stride()
    }
}

/// A prompt to be continued: its tokens, and the number that distinguishes several samples of one prompt.
#[derive(Clone, Debug)]
pub struct Prompt<'a> {
    pub tokens: &'a [i64],
    pub sample: u64,
}

/// The text generated for a prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Generation {
    /// The new tokens, EOS included.
    pub tokens: Vec<i64>,
    /// The sum of log p of the new tokens, at temperature 1 and without top-k and top-p.
    pub log_probability: f64,
    /// True if the new text has the requested number of EOS tokens.
    pub finished: bool,
}

/// A text during its generation.
struct PartialText {
    /// EOS, the prompt, and the new tokens.
    tokens: Vec<i64>,
    /// The start of the window in `tokens`.
    window: usize,
    /// The number of tokens of the window that are in the cache.
    position: usize,
    /// The source of the text's random draws.
    random: Random,
    /// The result so far.
    generation: Generation,
    /// The number of EOS tokens among the new tokens.
    eos_count: usize,
    /// True if the text has all its tokens.
    is_over: bool,
}

impl PartialText {
    /// Begins a text with EOS and the prompt's tokens. None of its tokens is in the cache yet.
    fn new(prompt: &Prompt, config: &GenerationConfig) -> Self {
        let tokens = [&[EOS], prompt.tokens].concat();
        PartialText {
            window: config.window(tokens.len()),
            position: 0,
            random: Random::new(config.seed, digest(prompt.tokens), prompt.sample, Purpose::NextToken),
            tokens,
            generation: Generation::default(),
            eos_count: 0,
            is_over: false,
        }
    }

    /// Draws the next token from its logits, (V), adds it to the text and returns its id.
    fn advance(&mut self, logits: &[f64], config: &GenerationConfig) -> i64 {
        let token = config.sampling.choose(logits, self.random.uniform());
        let id = token as i64;
        // log p = logit − log Σ exp(logit). The largest logit is subtracted first, so that exp does not overflow.
        let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = logits.iter().map(|logit| (logit - largest).exp()).sum();
        self.generation.log_probability += logits[token] - largest - total.ln();
        self.generation.tokens.push(id);
        self.tokens.push(id);
        self.eos_count += usize::from(id == EOS);
        self.generation.finished = config.sentences > 0 && self.eos_count == config.sentences;
        self.is_over = self.generation.finished || self.generation.tokens.len() == config.max_length;
        id
    }
}

/// Returns a hash of the ids (64-bit FNV-1a, with its offset and prime). It seeds a prompt's random numbers, so that
/// prompts differ in them.
fn digest(tokens: &[i64]) -> u64 {
    let bytes = tokens.iter().flat_map(|token| token.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// Continues texts with a decoder-only model.
///
/// `allowed` is true for tokens that may be generated; `None` means all. PAD and BOS are never generated. `kind` is
/// the type of matrix products. `on_token` is called for each new token, with the index of the text, the token, and
/// true if the text is over. `check_interrupt` runs at every step.
///
/// Errors if the model has an encoder, if the context is longer than tensorized attention reads, if logits are NaN,
/// or if `on_token` or `check_interrupt` returns an error.
pub fn generate(
    model: &Transformer,
    prompts: &[Prompt],
    allowed: Option<&[bool]>,
    config: &GenerationConfig,
    kind: Kind,
    on_token: &mut dyn FnMut(usize, i64, bool) -> Result<()>,
    check_interrupt: &mut dyn FnMut() -> Result<()>,
) -> Result<Vec<Generation>> {
    if model.config.has_encoder() {
        return Err(Error::invalid(
            "text is continued by a language model (architecture = \"decoder-only\"), and this model has an encoder: \
             translate with it",
        ));
    }
    model.config.check_lengths(&[config.context as i64])?;
    // Tensorized attention cannot decode token by token, so it cannot use a cache.
    let is_cached = model.config.attention != AttentionName::Tensorized;
    continue_texts(&mut Reader::new(model, kind, is_cached), prompts, allowed, config, on_token, check_interrupt)
}

/// Does the work of [`generate`], after its checks; `reader` runs the model.
fn continue_texts(
    reader: &mut Reader,
    prompts: &[Prompt],
    allowed: Option<&[bool]>,
    config: &GenerationConfig,
    on_token: &mut dyn FnMut(usize, i64, bool) -> Result<()>,
    check_interrupt: &mut dyn FnMut() -> Result<()>,
) -> Result<Vec<Generation>> {
    let mut texts: Vec<PartialText> = prompts.iter().map(|prompt| PartialText::new(prompt, config)).collect();
    tch::no_grad(|| {
        while let Some(next) = reader.next(&mut texts, config)? {
            for (number, mut logits) in next {
                forbid(&mut logits, allowed);
                refuse_nan(&logits, number, texts[number].generation.tokens.len())?;
                let token = texts[number].advance(&logits, config);
                on_token(number, token, texts[number].is_over)?;
            }
            check_interrupt()?;
        }
        Ok(texts.into_iter().map(|text| text.generation).collect())
    })
}

/// Sets the logits of PAD, BOS and all tokens that are not allowed to −∞.
fn forbid(logits: &mut [f64], allowed: Option<&[bool]>) {
    let never = |token: usize| [BOS, PAD].contains(&(token as i64)) || allowed.is_some_and(|allowed| !allowed[token]);
    logits.iter_mut().enumerate().filter(|(token, _)| never(*token)).for_each(|(_, logit)| *logit = f64::NEG_INFINITY);
}

/// Errors if a logit is NaN or +∞. `number` is the index of the text, and `generated` its number of new tokens.
fn refuse_nan(logits: &[f64], number: usize, generated: usize) -> Result<()> {
    match logits.iter().any(|logit| logit.is_nan() || *logit == f64::INFINITY) {
        false => Ok(()),
        true => Err(Error::invalid(format!(
            "the logits after {generated} generated tokens of text {number} (from 0) are not numbers (NaN): the weights \
             hold non-finite or huge values; use an earlier checkpoint, or f32 where this was a smaller type"
        ))),
    }
}

/// Runs the model on the texts' windows.
struct Reader<'a> {
    model: &'a Transformer,
    ctx: Context,
    /// True if keys and values are cached. Otherwise each window is read again at every step.
    is_cached: bool,
    cache: StackCache,
    /// The index of the text in each slot of the cache.
    slots: Vec<usize>,
}

/// The index of each text with the logits of its next token.
type Next = Vec<(usize, Vec<f64>)>;

impl<'a> Reader<'a> {
    /// Builds a reader with an empty cache. `kind` is the type of matrix products.
    fn new(model: &'a Transformer, kind: Kind, is_cached: bool) -> Self {
        let (cache, slots) = (StackCache::default(), Vec::new());
        Reader { model, ctx: Context::evaluation(kind), is_cached, cache, slots }
    }

    /// Runs one step: returns logits for every unfinished text, or `None` if all are finished.
    fn next(&mut self, texts: &mut [PartialText], config: &GenerationConfig) -> Result<Option<Next>> {
        let live: Vec<usize> = (0..texts.len()).filter(|&number| !texts[number].is_over).collect();
        if live.is_empty() {
            return Ok(None);
        }
        match self.is_cached {
            true => self.step(&live, texts, config).map(Some),
            false => self.read_whole_windows(&live, texts, config).map(Some),
        }
    }

    /// Runs one step with a cache: reads the last token of each old window, and all tokens of each new one. `live`
    /// holds the indices of the unfinished texts.
    fn step(&mut self, live: &[usize], texts: &mut [PartialText], config: &GenerationConfig) -> Result<Next> {
        for &number in live {
            let text = &mut texts[number];
            // A full window moves on, and the model reads the moved window from its start.
            if text.position == config.context {
                (text.window, text.position) = (text.window + config.stride(), 0);
            }
        }
        // Finished texts leave the cache, and so do texts whose window has moved.
        self.keep_slots(|number| !texts[number].is_over && texts[number].position > 0)?;
        let unread: Vec<usize> = live.iter().copied().filter(|&number| texts[number].position == 0).collect();
        let mut next = self.read_next_tokens(texts)?;
        next.extend(self.read_new_windows(&unread, texts)?);
        next.sort_by_key(|(number, _)| *number);
        Ok(next)
    }

    /// Drops the slots of the texts for whose index `stays` returns false.
    fn keep_slots(&mut self, stays: impl Fn(usize) -> bool) -> Result<()> {
        let kept: Vec<i64> = (0..self.slots.len()).filter(|&slot| stays(self.slots[slot])).map(|i| i as i64).collect();
        if kept.is_empty() {
            self.cache = StackCache::default();
        } else if kept.len() < self.slots.len() {
            self.cache.reorder(&Tensor::f_from_slice(&kept)?)?;
        }
        self.slots = kept.iter().map(|&slot| self.slots[slot as usize]).collect();
        Ok(())
    }

    /// Reads the latest token of the text in every slot. Returns the logits of each text's next token.
    fn read_next_tokens(&mut self, texts: &mut [PartialText]) -> Result<Next> {
        if self.slots.is_empty() {
            return Ok(Vec::new());
        }
        let first_unread = |&number: &usize| texts[number].tokens[texts[number].window + texts[number].position];
        let tokens: Vec<i64> = self.slots.iter().map(first_unread).collect();
        let positions: Vec<i64> = self.slots.iter().map(|&number| texts[number].position as i64).collect();
        // A model without an encoder reads no source sentences.
        let (no_sentences, no_memory): (&[usize], _) = (&[], None);
        let logits = self.model.step(&tokens, &positions, no_sentences, no_memory, &mut self.cache, &self.ctx)?;
        self.slots.iter().for_each(|&number| texts[number].position += 1);
        let all_rows: Vec<i64> = (0..tokens.len() as i64).collect();
        rows(&logits, &all_rows, &self.slots)
    }

    /// Reads the windows of the texts with the indices `unread` into new slots. Equal windows are read once. Returns
    /// the logits of each text's next token.
    fn read_new_windows(&mut self, unread: &[usize], texts: &mut [PartialText]) -> Result<Next> {
        if unread.is_empty() {
            return Ok(Vec::new());
        }
        // `windows` holds the distinct windows, and `indices` the index of each in this list. `index_of_text` holds the
        // index of each text's window.
        let (mut windows, mut indices): (Vec<&[i64]>, HashMap<&[i64], i64>) = (Vec::new(), HashMap::new());
        let mut index_of_text: Vec<i64> = Vec::with_capacity(unread.len());
        for &number in unread {
            let window = &texts[number].tokens[texts[number].window..];
            let index = *indices.entry(window).or_insert_with(|| {
                windows.push(window);
                windows.len() as i64 - 1
            });
            index_of_text.push(index);
        }
        // `begin` gives each window a new slot of the cache, and returns the logits of each window's next token.
        let logits = self.model.begin(&windows, &mut self.cache, &self.ctx)?;
        // Texts that share a window get copies of its slot.
        if windows.len() < unread.len() {
            let old_slots = self.slots.len() as i64;
            let order: Vec<i64> = (0..old_slots).chain(index_of_text.iter().map(|index| old_slots + index)).collect();
            self.cache.reorder(&Tensor::f_from_slice(&order)?)?;
        }
        let lengths: Vec<usize> = index_of_text.iter().map(|&index| windows[index as usize].len()).collect();
        unread.iter().zip(lengths).for_each(|(&number, length)| texts[number].position = length);
        self.slots.extend(unread);
        rows(&logits, &index_of_text, unread)
    }

    /// Reads the window of each unfinished text again from its start, without a cache. `live` holds these texts'
    /// indices.
    fn read_whole_windows(&self, live: &[usize], texts: &mut [PartialText], config: &GenerationConfig) -> Result<Next> {
        live.iter().for_each(|&number| texts[number].window = config.window(texts[number].tokens.len()));
        let windows: Vec<&[i64]> = live.iter().map(|&number| &texts[number].tokens[texts[number].window..]).collect();
        let packed = Packed::of(&windows)?;
        // The features have a row for each token. Only the last row of each window predicts a new token.
        let last_rows: Vec<i64> = packed.offsets[1..].iter().map(|end| end - 1).collect();
        let device = self.model.device();
        let read = Sentences::new(None, packed, device)?.to(device)?;
        let features = self.model.features(&read, &self.ctx)?;
        let features = features.f_index_select(0, &Tensor::f_from_slice(&last_rows)?.f_to_device(device)?)?;
        let logits = self.model.logits(&features, self.ctx.kind)?;
        let all_rows: Vec<i64> = (0..live.len() as i64).collect();
        rows(&logits, &all_rows, live)
    }
}

/// Returns the rows `chosen` of logits (slots, V) on the host, each with the index of its text: `numbers[i]` for row
/// `chosen[i]`.
fn rows(logits: &Tensor, chosen: &[i64], numbers: &[usize]) -> Result<Next> {
    if chosen.is_empty() {
        return Ok(Vec::new());
    }
    let vocab_size = logits.size()[1] as usize;
    let index = Tensor::f_from_slice(chosen)?.f_to_device(logits.device())?;
    let values: Vec<f64> = host("logits", &logits.f_index_select(0, &index)?)?;
    Ok(numbers.iter().copied().zip(values.chunks_exact(vocab_size).map(<[f64]>::to_vec)).collect())
}

#[cfg(test)]
mod tests;
