//! Perplexity of long text with a sliding window (docs/spec.md §4.13).

use super::prepare::{valid_batches, within};
use super::translator::Translator;
use crate::data::text::words;
use crate::data::vocabulary::{BOS, EOS};
use crate::data::{self, windows, Corpus, Interrupt, Segmenter, Window};
use crate::error::{Error, Result};
use crate::model::PAD;
use crate::train::{self, Score};
use std::borrow::Cow;
use tch::Kind;

/// The scores of a language model on a text.
#[derive(Clone, Copy, Debug)]
pub struct WindowScore {
    /// The score per token. A token is a piece or the end of a line.
    pub score: Score,
    /// The number of words separated by white space, plus one for the end of each line.
    pub words: usize,
    /// The number of characters, plus one for the end of each line.
    pub characters: usize,
    pub lines: usize,
}

impl WindowScore {
    /// Returns exp of the text's NLL per word.
    pub fn word_perplexity(&self) -> f64 {
        (self.nats() / self.words.max(1) as f64).exp()
    }

    /// Returns the text's NLL per character, in bits.
    pub fn bits_per_character(&self) -> f64 {
        self.nats() / self.characters.max(1) as f64 / std::f64::consts::LN_2
    }

    /// Returns the NLL of the whole text, in nats.
    fn nats(&self) -> f64 {
        self.score.nll * self.score.tokens as f64
    }
}

impl Translator {
    /// Computes the loss of the text in the file `text`, in windows that predict `window` tokens (default:
    /// segment_length). Each window begins `stride` tokens after the one before (default: half the window). `kind` is
    /// the type of matrix products.
    ///
    /// Errors if the model has an encoder, if the stride is not in 1 ..= window, or if the window is longer than the
    /// model reads.
    pub fn evaluate_windows(
        &self,
        text: &str,
        window: Option<i64>,
        stride: Option<i64>,
        kind: Kind,
        check_interrupt: Interrupt,
    ) -> Result<WindowScore> {
        if self.model.config.has_encoder() {
            return Err(Error::invalid(
                "a sliding window reads the text of a language model, and this model has an encoder: leave window and \
                 stride out",
            ));
        }
        let window = window.unwrap_or(self.data.segment_length);
        if window < 1 {
            return Err(Error::invalid(format!("window must be at least 1, got {window}")));
        }
        let stride = stride.unwrap_or((window / 2).max(1));
        if !(1..=window).contains(&stride) {
            return Err(Error::invalid(format!(
                "stride must lie between 1 and the window, {window} (a longer one would leave tokens out); got {stride}"
            )));
        }
        self.model.config.check_lengths(&[window])?;
        let check_interrupt = &mut data::throttled(check_interrupt);
        let lines = data::read_lines(text, check_interrupt)?;
        let (mut word_count, mut characters) = (0, 0);
        for line in &lines {
            let line = self.joined(line);
            word_count += words(&line).count() + 1;
            characters += line.chars().count() + 1;
        }
        let ids = within(self.encode(&lines, check_interrupt)?, self.seen.as_deref());
        let tokens: Vec<u32> = ids.iter().flat_map(|line| line.iter().copied().chain([EOS])).collect();
        // The whole text is one stream of tokens, in which EOS ends each line.
        let text_windows = windows(&tokens, window as usize, stride as usize);
        let batches = batches(text_windows, |corpus| valid_batches(corpus, &self.training));
        let score = train::evaluate_loss(&self.model, &batches, &self.objective()?, kind, check_interrupt)?;
        Ok(WindowScore { score, words: word_count, characters, lines: lines.len() })
    }

    /// Returns a line of the run's text as words. If that text is already split into pieces, joins these.
    fn joined<'a>(&self, line: &'a str) -> Cow<'a, str> {
        match self.segmenter {
            Segmenter::Split => data::join_line(line).into(),
            Segmenter::Bpe(_) => line.into(),
        }
    }
}

/// Returns the windows in batches. `plan` returns the batches of a corpus, here that of the windows' rows. Targets that
/// are not scored, because an earlier window scores them, become PAD.
fn batches(windows: Vec<Window>, plan: impl Fn(&Corpus) -> Vec<data::Batch>) -> Vec<data::Batch> {
    let (rows, scored): (Vec<Vec<u32>>, Vec<usize>) =
        windows.into_iter().map(|window| (window.row, window.scored)).unzip();
    // A language model's corpus does not use `start`.
    let mut batches = plan(&Corpus { source: None, target: rows, start: BOS });
    for batch in &mut batches {
        for (window, bounds) in batch.sentences.iter().zip(batch.target_input.offsets.windows(2)) {
            // The window's rows are begin..end; only its last `scored[*window]` targets count.
            let (begin, end) = (bounds[0] as usize, bounds[1] as usize);
            batch.target_output[begin..end - scored[*window]].fill(PAD);
        }
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::TransformerConfig;
    use crate::kernel::cross_entropy::Smoothing;
    use crate::model::{Context, Packed, Sentences, Transformer};
    use crate::train::Objective;
    use tch::Device;

    /// The losses are compared with passes over one window per token, which ends with the token.
    #[test]
    fn losses_are_those_of_each_tokens_window() {
        let architecture = crate::config::Architecture::DecoderOnly;
        let (d_model, d_ff, heads, decoder_layers) = (16, 24, 2, 2);
        let config = TransformerConfig {
            architecture,
            vocab_size: 23,
            d_model,
            d_ff,
            heads,
            decoder_layers,
            ..Default::default()
        };
        tch::manual_seed(3);
        let model = Transformer::new(&config, 4, Device::Cpu, Kind::Double).unwrap();
        let objective = Objective::new(None, Smoothing::fairseq(0.0, 23)).unwrap();
        let tokens: Vec<u32> = (0..61u32).map(|i| if i % 9 == 8 { EOS } else { 4 + i * 7919 % 19 }).collect();
        // The NLL of one token, from the row of the window that scores it, cut off before that token.
        let nll = |token: usize, length: usize, stride: usize| {
            // Windows begin at multiples of `stride`. The first one that reaches the token scores it.
            let begin = (token + 1).saturating_sub(length).div_ceil(stride) * stride;
            let before = if begin == 0 { EOS } else { tokens[begin - 1] };
            let row: Vec<i64> = [&[before], &tokens[begin..token]].concat().into_iter().map(i64::from).collect();
            let read = Sentences::new(None, Packed::of(&[&row]).unwrap(), Device::Cpu).unwrap();
            let features = model.features(&read, &Context::evaluation(Kind::Double)).unwrap();
            let logits = model.logits(&features, Kind::Double).unwrap().select(0, -1);
            -logits.log_softmax(-1, Kind::Double).double_value(&[i64::from(tokens[token])])
        };
        for (length, stride, most) in [(8, 3, 50), (8, 8, 50), (10, 1, 9), (100, 50, 50), (1, 1, 7)] {
            let plan = |corpus: &Corpus| {
                let plan = data::plan(&corpus.lengths(), most, 0, 0);
                plan.iter().map(|rows| data::collate(corpus, rows)).collect()
            };
            let batches = batches(windows(&tokens, length, stride), plan);
            let found = tch::no_grad(|| train::evaluate_loss(&model, &batches, &objective, Kind::Double, || Ok(())));
            let found = found.unwrap();
            let total: f64 = (0..tokens.len()).map(|token| nll(token, length, stride)).sum();
            let wanted = total / tokens.len() as f64;
            assert_eq!(found.tokens, tokens.len());
            assert!((found.nll - wanted).abs() < 1e-9, "{length} {stride}: {} {wanted}", found.nll);
        }
    }
}
