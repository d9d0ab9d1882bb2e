//! Text generation: a trained language model continues prompts.

use super::folder::{read_configs, read_segmenter, read_vocabulary};
use super::prepare::within;
use super::translator::Translator;
use crate::config::GenerationOptions;
use crate::cpu::memory;
use crate::data::{self, interruptible, Interrupt, Joiner};
use crate::error::Result;
use crate::model::EOS;
use crate::search::{generate, GenerationConfig, Prompt};
use std::path::Path;
use tch::Kind;

/// The text generated for a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    /// The new text. The prompt followed by the new text is the whole text.
    pub text: String,
    /// The sum of log p of the new tokens.
    pub log_probability: f64,
    /// The number of new tokens, ends of sentence included.
    pub tokens: usize,
    /// True if the new text has the requested number of ends of sentence.
    pub finished: bool,
}

/// A function called for each new token with the prompt's index, the sample's index and the new text; the text is
/// `None` when a sample ends.
pub type OnToken<'a> = &'a mut dyn FnMut(usize, usize, Option<&str>) -> Result<()>;

/// One text of a batch during its generation.
struct TextStream {
    prompt: usize,
    sample: usize,
    joiner: Joiner,
    /// The text generated so far.
    text: String,
}

impl Translator {
    /// Returns the ids of a text that may have several lines. EOS follows each line except the last. Entries that the
    /// model never predicts become UNK.
    fn read_text(&self, text: &str, check_interrupt: Interrupt) -> Result<Vec<i64>> {
        let lines: Vec<String> = text.split('\n').map(str::to_owned).collect();
        let ids = within(self.encode(&lines, check_interrupt)?, self.seen.as_deref());
        let ids: Vec<Vec<i64>> = ids.into_iter().map(|line| line.into_iter().map(i64::from).collect()).collect();
        Ok(ids.join(&EOS))
    }

    /// Returns `options.samples` continuations of each prompt. `batch_tokens` is the maximum number of tokens in a
    /// batch's windows, and `kind` the type of matrix products.
    ///
    /// Errors if the options make no sense, if the model has an encoder, or if `on_token` or `check_interrupt`
    /// returns an error.
    pub fn complete(
        &self,
        prompts: &[String],
        options: &GenerationOptions,
        batch_tokens: usize,
        kind: Kind,
        on_token: OnToken,
        check_interrupt: Interrupt,
    ) -> Result<Vec<Vec<Completion>>> {
        let config = GenerationConfig::of(options, self.data.segment_length)?;
        let check_interrupt = &mut data::throttled(check_interrupt);
        let prompt_ids: Vec<Vec<i64>> =
            prompts.iter().map(|prompt| self.read_text(prompt, check_interrupt)).collect::<Result<_>>()?;
        let samples = options.samples as usize;
        // The call errors now if the completions, without their texts, would not fit into memory.
        let bytes = size_of::<Completion>() as u128 * prompts.len() as u128 * samples as u128;
        memory::room(bytes, || format!("{samples} texts of each of {} prompts (ask for fewer)", prompts.len()))?;
        // `texts` has the indices (prompt, sample) of each text to generate.
        let texts: Vec<(usize, usize)> =
            (0..prompts.len()).flat_map(|prompt| (0..samples).map(move |sample| (prompt, sample))).collect();
        let mut completions: Vec<Vec<Completion>> = vec![Vec::new(); prompts.len()];
        // A text's window has at most `context` tokens.
        for batch in texts.chunks((batch_tokens / config.context).max(1)) {
            let batch_prompts: Vec<Prompt> = batch
                .iter()
                .map(|&(prompt, sample)| Prompt { tokens: &prompt_ids[prompt], sample: sample as u64 })
                .collect();
            let mut streams: Vec<TextStream> = batch
                .iter()
                .map(|&(prompt, sample)| {
                    let joiner = Joiner::after(&prompts[prompt]);
                    TextStream { prompt, sample, joiner, text: String::new() }
                })
                .collect();
            // `generate` calls this function for each new token; `index` is the text's index in the batch.
            let mut take_token = |index: usize, token: i64, is_over: bool| -> Result<()> {
                let stream = &mut streams[index];
                let new = self.text_of(token, is_over, &mut stream.joiner);
                if !new.is_empty() {
                    on_token(stream.prompt, stream.sample, Some(&new))?;
                    stream.text.push_str(&new);
                }
                if is_over {
                    on_token(stream.prompt, stream.sample, None)?;
                }
                Ok(())
            };
            let allowed = self.seen.as_deref();
            let generated =
                generate(&self.model, &batch_prompts, allowed, &config, kind, &mut take_token, check_interrupt)?;
            for (stream, generated) in streams.into_iter().zip(generated) {
                completions[stream.prompt].push(Completion {
                    text: stream.text,
                    log_probability: generated.log_probability,
                    tokens: generated.tokens.len(),
                    finished: generated.finished,
                });
            }
        }
        Ok(completions)
    }

    /// Returns the text that a token adds to a sample. An EOS adds a line break, or nothing if it ends the sample,
    /// which is when `is_over` is true. `joiner` joins the sample's pieces to words.
    fn text_of(&self, token: i64, is_over: bool, joiner: &mut Joiner) -> String {
        match (token == EOS, is_over) {
            (true, true) => String::new(),
            (true, false) => {
                joiner.end();
                "\n".to_owned()
            }
            (false, _) => self.vocabulary.decode(&[token as u32]).iter().map(|piece| joiner.push(piece)).collect(),
        }
    }
}

/// Returns the ids of lines, without EOS, in the vocabulary of the run in this folder.
pub fn encode(folder: &Path, lines: &[String], check_interrupt: Interrupt) -> Result<Vec<Vec<u32>>> {
    let segmenter = read_segmenter(folder, &read_configs(folder)?.data)?;
    let vocabulary = read_vocabulary(folder)?;
    let encode = |line: &String| vocabulary.encode(&segmenter.segment(line));
    interruptible(&mut data::throttled(check_interrupt), lines, |lines| lines.map(encode).collect())
}
