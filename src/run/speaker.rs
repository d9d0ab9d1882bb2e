//! Texts that a trained language model continues, from lines of text to text.

use super::folder::{read_configs, read_segmenter, read_vocabulary};
use super::prepare::within;
use super::translator::Translator;
use crate::config::GenerationOptions;
use crate::cpu::memory;
use crate::data::{self, listening, Between, Joiner};
use crate::error::Result;
use crate::model::EOS;
use crate::search::{generate, GenerationConfig, Prompt};
use std::path::Path;
use tch::Kind;

/// What follows a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Spoken {
    /// Prompt and text, one after the other, are the whole.
    pub text: String,
    /// Σ log p of the new tokens.
    pub log_probability: f64,
    /// New tokens, ends of sentence included.
    pub tokens: usize,
    /// It has as many ends of sentence as were asked for.
    pub finished: bool,
}

/// Told while texts grow: the prompt's number, the sample's, and the text that is new; none: the text is over.
pub type Said<'a> = &'a mut dyn FnMut(usize, usize, Option<&str>) -> Result<()>;

/// One text of a batch, while it grows.
struct Voice {
    prompt: usize,
    sample: usize,
    joiner: Joiner,
    text: String,
}

impl Translator {
    /// The ids of a text of lines: EOS ends each but the last.
    fn read_text(&self, text: &str, between: Between) -> Result<Vec<i64>> {
        let lines: Vec<String> = text.split('\n').map(str::to_owned).collect();
        let ids = within(self.encode(&lines, between)?, self.seen.as_deref());
        let ids: Vec<Vec<i64>> = ids.into_iter().map(|line| line.into_iter().map(i64::from).collect()).collect();
        Ok(ids.join(&EOS))
    }

    /// For each prompt `samples` texts that follow it. `batch_tokens`: most tokens of all windows of a batch.
    ///
    /// Errors: options that cannot be meant, a model with an encoder, what `said` and `between` return.
    pub fn speak(
        &self,
        prompts: &[String],
        options: &GenerationOptions,
        batch_tokens: usize,
        kind: Kind,
        said: Said,
        between: Between,
    ) -> Result<Vec<Vec<Spoken>>> {
        let config = GenerationConfig::of(options, self.data.segment_length)?;
        let between = &mut data::seldom(between);
        let read: Vec<Vec<i64>> =
            prompts.iter().map(|prompt| self.read_text(prompt, between)).collect::<Result<_>>()?;
        let samples = options.samples as usize;
        let bytes = size_of::<Spoken>() as u128 * prompts.len() as u128 * samples as u128;
        memory::room(bytes, || format!("{samples} texts of each of {} prompts (ask for fewer)", prompts.len()))?;
        let places: Vec<(usize, usize)> =
            (0..prompts.len()).flat_map(|prompt| (0..samples).map(move |sample| (prompt, sample))).collect();
        let mut found: Vec<Vec<Spoken>> = vec![Vec::new(); prompts.len()];
        for batch in places.chunks((batch_tokens / config.context).max(1)) {
            let given: Vec<Prompt> =
                batch.iter().map(|&(p, sample)| Prompt { tokens: &read[p], sample: sample as u64 }).collect();
            let mut voices: Vec<Voice> = batch
                .iter()
                .map(|&(prompt, sample)| {
                    let joiner = Joiner::after(&prompts[prompt]);
                    Voice { prompt, sample, joiner, text: String::new() }
                })
                .collect();
            let mut tell = |number: usize, token: i64, is_over: bool| -> Result<()> {
                let voice = &mut voices[number];
                let new = self.text_of(token, is_over, &mut voice.joiner);
                if !new.is_empty() {
                    said(voice.prompt, voice.sample, Some(&new))?;
                    voice.text.push_str(&new);
                }
                if is_over {
                    said(voice.prompt, voice.sample, None)?;
                }
                Ok(())
            };
            let allowed = self.seen.as_deref();
            let made = generate(&self.model, &given, allowed, &config, kind, &mut tell, between)?;
            for (voice, made) in voices.into_iter().zip(made) {
                let (tokens, finished) = (made.tokens.len(), made.finished);
                found[voice.prompt].push(Spoken {
                    text: voice.text,
                    log_probability: made.log_probability,
                    tokens,
                    finished,
                });
            }
        }
        Ok(found)
    }

    /// The text that a token adds; the last end of sentence adds none.
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

/// The ids of lines as the run in a folder reads them, without EOS.
pub fn encode(folder: &Path, lines: &[String], between: Between) -> Result<Vec<Vec<u32>>> {
    let segmenter = read_segmenter(folder, &read_configs(folder)?.data)?;
    let vocabulary = read_vocabulary(folder)?;
    let encode = |line: &String| vocabulary.encode(&segmenter.segment(line));
    listening(&mut data::seldom(between), lines, |lines| lines.map(encode).collect())
}
