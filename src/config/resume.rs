//! The effect of changing an option when a run resumes. The training loop follows this table, and the documentation
//! prints it.

use super::{Criterion, DataConfig, TrainingConfig, TransformerConfig};
use crate::error::{Error, Result};
use serde_json::{json, Map, Value};

/// The effect that a changed option has on the state of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The resume is refused.
    Refused,
    /// The run continues at another position in the epoch: after the same share of its sentences as before.
    Place,
    /// Adam's moments are converted to the new type.
    Moments,
    /// The validation loss measures something else, so its old scores are forgotten.
    Loss,
    /// BLEU measures something else, so its old scores are forgotten.
    Bleu,
    /// The best score is forgotten, because another criterion decides which checkpoint is the best.
    Best,
    /// The schedule forgets its scores.
    Scores,
    /// The schedule forgets its scores and by how much it has lowered the rate.
    Schedule,
}

use Effect::*;

impl Effect {
    /// Returns the words that the documentation prints.
    fn describe(self) -> &'static str {
        match self {
            Refused => "refused",
            Place => "taken; the place in the epoch is translated",
            Moments => "taken; Adam's moments are converted",
            Loss => "taken; scores by validation loss are forgotten",
            Bleu => "taken; scores by BLEU are forgotten",
            Best => "taken; the best score is forgotten",
            Scores => "taken; the schedule's scores are forgotten",
            Schedule => "taken; the schedule's scores and its lowered rate are forgotten",
        }
    }
}

/// How two values of an option are compared.
#[derive(Clone, Copy, PartialEq)]
enum Compared {
    ByValue,
    /// By the content of the file that the option names, because the same file may have moved.
    ByText,
}

/// For groups of options: how their values are compared, and the effects of a change. A group without effects may
/// change freely. The model's options are not listed, as a change of these is always refused.
const EFFECTS: &[(&[&str], Compared, &[Effect])] = &[
    (&["updates", "epochs", "patience", "min_lr"], Compared::ByValue, &[]),
    (&["accumulate"], Compared::ByValue, &[]),
    (&["max_tokens"], Compared::ByValue, &[Place]),
    (&["schedule"], Compared::ByValue, &[Schedule]),
    (&["lr", "lr_scale", "lr_multiplier", "warmup", "warmup_init_lr", "count_from_zero"], Compared::ByValue, &[]),
    (&["warmup_share", "lr_end", "decay_share"], Compared::ByValue, &[]),
    (&["lr_decay_rule"], Compared::ByValue, &[Scores]),
    (&["lr_decay_factor", "lr_decay_patience"], Compared::ByValue, &[]),
    (&["optimizer"], Compared::ByValue, &[Refused]),
    (&["muon_momentum", "muon_nesterov", "muon_scale", "muon_lr_multiplier"], Compared::ByValue, &[]),
    (&["muon_on_sphere", "normuon_beta2"], Compared::ByValue, &[]),
    (&["beta1", "beta2", "adam_eps", "adam_form"], Compared::ByValue, &[]),
    (&["weight_decay", "weight_decay_of", "unit_matrices", "clip_norm", "qk_clip"], Compared::ByValue, &[]),
    (&["label_smoothing", "smoothing"], Compared::ByValue, &[Loss]),
    (&["z_loss"], Compared::ByValue, &[]),
    (&["vocab_mask"], Compared::ByValue, &[Refused]),
    (&["word_dropout"], Compared::ByValue, &[]),
    (&["evaluate_every", "keep"], Compared::ByValue, &[]),
    (&["criterion"], Compared::ByValue, &[Best]),
    (&["log_layers", "log_statistics"], Compared::ByValue, &[]),
    (&["evaluation_beam", "evaluation_tokenize"], Compared::ByValue, &[Bleu]),
    (&["activation_checkpointing", "precision", "device", "cuda_graphs"], Compared::ByValue, &[]),
    (&["moments"], Compared::ByValue, &[Moments]),
    (&["seed"], Compared::ByValue, &[Place]),
    (&["train_source", "train_target"], Compared::ByText, &[Place]),
    (&["valid_source", "valid_target"], Compared::ByText, &[Loss, Bleu]),
    (&["data_bin", "source_lang", "target_lang", "skip_long"], Compared::ByText, &[Place, Loss, Bleu]),
    (&["bpe_operations"], Compared::ByValue, &[Refused]),
    (&["bpe_codes"], Compared::ByText, &[Refused]),
    // `bpe_operations` and `bpe_codes` above already show whether the segmentation has changed.
    (&["no_bpe"], Compared::ByText, &[]),
    (&["segment_length"], Compared::ByValue, &[Place, Loss]),
];

/// Returns the effect of changing each option, except the model's, for `_tables.json` and the documentation.
pub fn described() -> Value {
    let mut words_by_option = Map::new();
    for (options, compared, effects) in EFFECTS {
        let words: Vec<&str> = effects.iter().map(|effect| effect.describe()).collect();
        let mut words = match words.split_first() {
            None => "taken".to_string(),
            Some((first, rest)) => {
                // The word "taken" stands only once, at the beginning.
                let rest = rest.iter().map(|word| word.trim_start_matches("taken; "));
                std::iter::once(*first).chain(rest).collect::<Vec<_>>().join("; ")
            }
        };
        if *compared == Compared::ByText && !effects.is_empty() {
            words += " (where the text differs)";
        }
        words_by_option.extend(options.iter().map(|name| (name.to_string(), json!(words))));
    }
    Value::Object(words_by_option)
}

/// An option whose value has changed.
#[derive(Debug)]
pub struct OptionChange {
    pub effects: &'static [Effect],
    /// The words about the change in messages, such as "label_smoothing was 0.1, now 0.5".
    pub said: String,
}

/// Returns the options that differ between two sets. Options that are compared by their files' contents are left out.
///
/// # Errors
/// Returns `Invalid` if a change is refused; the message names all options with refused changes.
pub fn changes(
    before: (&TransformerConfig, &TrainingConfig, &DataConfig),
    now: (&TransformerConfig, &TrainingConfig, &DataConfig),
) -> Result<Vec<OptionChange>> {
    // Runs a conversion to JSON, and converts its error to this crate's.
    let checked =
        |to_value: &dyn Fn() -> serde_json::Result<Value>| to_value().map_err(|e| Error::invalid(e.to_string()));
    let ((old_model, ..), (new_model, ..)) = (before, now);
    let [old_model, new_model] =
        [checked(&|| serde_json::to_value(old_model))?, checked(&|| serde_json::to_value(new_model))?];
    let model = super::differences(&old_model, &new_model);
    if !model.is_empty() {
        return Err(Error::invalid(format!("was trained with another model: {model}; resume with the same options")));
    }
    let options_of =
        |(_, training, data): (&TransformerConfig, &TrainingConfig, &DataConfig)| -> Result<Map<String, Value>> {
            let parts = [checked(&|| serde_json::to_value(training))?, checked(&|| serde_json::to_value(data))?];
            Ok(parts.into_iter().filter_map(|part| part.as_object().cloned()).flatten().collect())
        };
    let (before, now) = (options_of(before)?, options_of(now)?);
    let by_value = EFFECTS.iter().filter(|(_, compared, _)| *compared == Compared::ByValue);
    let changes: Vec<OptionChange> = by_value
        .flat_map(|(options, _, effects)| options.iter().map(move |name| (*name, *effects)))
        .filter(|(name, _)| before.get(*name) != now.get(*name))
        .map(|(name, effects)| OptionChange {
            // The schedule's scores are losses if the beam is 0, otherwise BLEU. So a change from or to 0 makes the old
            // scores incomparable.
            effects: match name == "evaluation_beam" && (before[name] == 0 || now[name] == 0) {
                true => &[Bleu, Scores],
                false => effects,
            },
            said: format!("{name} was {}, now {}", before[name], now[name]),
        })
        .collect();
    let refused: Vec<&str> =
        changes.iter().filter(|change| change.effects.contains(&Refused)).map(|change| change.said.as_str()).collect();
    match refused.is_empty() {
        true => Ok(changes),
        false => Err(Error::invalid(format!(
            "was trained on other text: {}; resume with the same options",
            refused.join("; ")
        ))),
    }
}

/// Returns the change that describes a new validation set.
pub fn other_validation() -> OptionChange {
    OptionChange { effects: &[Loss, Bleu], said: "the validation text is not the one of the run so far".into() }
}

/// True if the best score is not comparable with scores after the change.
pub fn forgets_best(change: &OptionChange, criterion: Criterion) -> bool {
    let own_effect = match criterion {
        Criterion::Loss => Loss,
        Criterion::Bleu => Bleu,
    };
    change.effects.contains(&Best) || change.effects.contains(&own_effect)
}

/// True if the schedule must forget its scores, because the change gives scores another meaning or the schedule another
/// rule. `has_bleu` is true if the schedule uses BLEU.
pub fn forgets_scores(change: &OptionChange, has_bleu: bool) -> bool {
    let own_effect = if has_bleu { Bleu } else { Loss };
    [own_effect, Scores, Schedule].iter().any(|effect| change.effects.contains(effect))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_each_option_of_a_run_once() {
        let mut named: Vec<&str> = EFFECTS.iter().flat_map(|(options, ..)| options.iter().copied()).collect();
        let fields = [TrainingConfig::fields(), DataConfig::fields()].concat();
        let mut known: Vec<&str> = fields.iter().map(|field| field.name).collect();
        named.sort_unstable();
        known.sort_unstable();
        assert_eq!(named, known);
    }

    #[test]
    fn changes_name_what_is_refused() {
        let (model, training, data) = Default::default();
        let wider = TransformerConfig { d_model: 96, ..TransformerConfig::default() };
        let error = changes((&model, &training, &data), (&wider, &training, &data)).unwrap_err().to_string();
        assert!(error.contains("d_model was 512, now 96"), "{error}");
        let smoothed = TrainingConfig { label_smoothing: 0.5, ..Default::default() };
        let found = changes((&model, &training, &data), (&model, &smoothed, &data)).unwrap();
        assert_eq!(found.len(), 1);
        assert!(forgets_best(&found[0], Criterion::Loss) && !forgets_best(&found[0], Criterion::Bleu));
        let beams = [0, 1, 4].map(|beam| TrainingConfig { evaluation_beam: beam, ..Default::default() });
        for (old, new, has_bleu, forgets) in
            [(1, 0, false, true), (0, 1, true, true), (2, 1, true, true), (2, 1, false, false)]
        {
            let found = changes((&model, &beams[old], &data), (&model, &beams[new], &data)).unwrap();
            assert_eq!(forgets_scores(&found[0], has_bleu), forgets, "{old} to {new}");
        }
        let merges = DataConfig { bpe_operations: Some(3), ..Default::default() };
        let error = changes((&model, &training, &data), (&model, &training, &merges)).unwrap_err().to_string();
        assert!(error.contains("bpe_operations was null, now 3"), "{error}");
    }
}
