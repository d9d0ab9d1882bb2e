//! Validation: the loss per token on the validation set, and BLEU of its translations.

use super::loss::{Objective, Workspace};
use super::micro_batch::Input;
use crate::data::vocabulary::SPECIALS;
use crate::data::{self, Batch, Vocabulary};
use crate::error::Result;
use crate::metrics::{self, Tokenize};
use crate::model::{Context, Transformer, PAD, UNK};
use crate::search::{search, SearchConfig};
use tch::{no_grad, Kind, Tensor};

/// The validation set.
pub struct Validation {
    pub batches: Vec<Batch>,
    /// The target text of each sentence, with pieces joined to words; empty if BLEU is not computed.
    pub references: Vec<String>,
    /// The tokeniser for BLEU.
    pub tokenize: Tokenize,
}

/// The spelling of UNK in the text of a reference that was read as ids. As in fairseq, it matches no word of the
/// model's output: UNK in that is spelt [`UNKNOWN_SAID`], and no text contains this character.
pub const UNKNOWN_MEANT: &str = "\u{fffe}";
/// The spelling of UNK in the text of the model's output. No word of a reference matches it, not even a literal
/// `<unk>`.
const UNKNOWN_SAID: &str = "\u{ffff}";

/// The losses per target token, in nats.
#[derive(Clone, Copy, Debug, Default)]
pub struct Score {
    /// The loss with label smoothing.
    pub loss: f64,
    /// The loss without label smoothing.
    pub nll: f64,
    pub tokens: usize,
}

impl Score {
    /// Returns exp(nll).
    pub fn perplexity(&self) -> f64 {
        self.nll.exp()
    }
}

/// Returns the model's loss per target token over the batches, ignoring PAD targets. `kind` is the type of matrix
/// products; `check_interrupt` runs between two batches.
pub fn evaluate_loss(
    model: &Transformer,
    batches: &[Batch],
    objective: &Objective,
    kind: Kind,
    mut check_interrupt: impl FnMut() -> Result<()>,
) -> Result<Score> {
    no_grad(|| {
        let mut workspace = Workspace::default();
        let (mut loss, mut nll, mut tokens) = (0.0, 0.0, 0);
        for batch in batches {
            let input = Input::new(batch, model.device())?;
            let features = model.features(&input.read, &Context::evaluation(kind))?;
            let sums = objective.forward(model, &features, &input.output, kind, &mut workspace)?;
            loss += sums.loss.f_double_value(&[])?;
            nll += sums.nll.f_double_value(&[])?;
            tokens += batch.target_output.iter().filter(|token| **token != PAD).count();
            check_interrupt()?;
        }
        let per_token = 1.0 / tokens.max(1) as f64;
        Ok(Score { loss: loss * per_token, nll: nll * per_token, tokens })
    })
}

/// Returns BLEU of the model's translations of the validation sources, with pieces joined to words. `check_interrupt`
/// runs at each step of a search. `mask` is the target vocabulary.
pub fn evaluate_bleu(
    model: &Transformer,
    Validation { batches, references, tokenize }: &Validation,
    vocabulary: &Vocabulary,
    mask: Option<&Tensor>,
    config: &SearchConfig,
    kind: Kind,
    mut check_interrupt: impl FnMut() -> Result<()>,
) -> Result<f64> {
    let mut hypotheses = vec![String::new(); references.len()];
    for batch in batches {
        // Only models with a source translate.
        let Some(source) = Input::new(batch, model.device())?.read.source else { continue };
        let translations = search(model, &source, mask, config, kind, &mut check_interrupt)?;
        for (sentence, ranked) in batch.sentences.iter().zip(translations) {
            if let Some(best) = ranked.first() {
                hypotheses[*sentence] = joined(&best.tokens, vocabulary, UNKNOWN_SAID);
            }
        }
    }
    Ok(metrics::bleu(&hypotheses, references, *tokenize)?.bleu)
}

/// Returns the text of token ids, with pieces joined to words.
pub fn to_text(tokens: &[i64], vocabulary: &Vocabulary) -> String {
    joined(tokens, vocabulary, SPECIALS[UNK as usize])
}

/// Returns the text of token ids, with pieces joined to words and UNK spelt as `unknown`.
fn joined(tokens: &[i64], vocabulary: &Vocabulary, unknown: &str) -> String {
    let ids: Vec<u32> = tokens.iter().map(|t| *t as u32).collect();
    data::join(&vocabulary.decode_as(&ids, unknown))
}
