//! Preparation of a run's text: turns text files, or fairseq's binarised folder, into sentences of ids.

use crate::config::{Criterion, DataConfig, Longest, Positions, ScheduleName, TrainingConfig, TransformerConfig};
use crate::data::text::words;
use crate::data::{
    self, interruptible, Batch, Binarised, Bpe, Corpus, Digests, Interrupt, Limit, LongSentences, Segmenter, Side,
    Vocabulary,
};
use crate::error::{Error, Result};
use crate::metrics::{lacks_spaces, Tokenize};
use crate::model::UNK;
use crate::train::UNKNOWN_MEANT;

/// The text of a run after reading, segmenting and encoding.
pub struct PreparedData {
    pub model: TransformerConfig,
    pub(super) segmenter: Segmenter,
    pub vocabulary: Vocabulary,
    pub(super) train: Corpus,
    pub(super) valid: Corpus,
    /// The validation targets as text; empty if BLEU is not computed.
    pub(super) references: Vec<String>,
    /// The target vocabulary, as a flag for each vocabulary entry; `None` if every entry is in it.
    pub(super) mask: Option<Vec<bool>>,
    /// The maximum number of tokens in a sentence; only translation models check it.
    pub(super) limit: Limit,
    /// The number of sentence pairs that were left out because they are too long.
    pub skipped: usize,
    pub(super) digests: Digests,
    pub(super) warnings: Vec<String>,
}

/// Reads everything that a run needs, and writes nothing. `check_interrupt` runs throughout.
pub fn prepare(
    model: &TransformerConfig,
    training: &TrainingConfig,
    config: &DataConfig,
    check_interrupt: Interrupt,
) -> Result<PreparedData> {
    prepare_with(model, training, config, None, check_interrupt)
}

/// Prepares the text of a run. `known` is the segmentation and vocabulary of the run to be resumed, if there is one.
pub(super) fn prepare_with(
    model: &TransformerConfig,
    training: &TrainingConfig,
    config: &DataConfig,
    known: Option<(Segmenter, Vocabulary)>,
    check_interrupt: Interrupt,
) -> Result<PreparedData> {
    let check_interrupt = &mut data::throttled(check_interrupt);
    training.validate()?;
    config.validate()?;
    let has_source = model.has_encoder();
    if !has_source {
        model.check_lengths(&[config.segment_length])?;
    }
    // A resumed run has its segmentation and vocabulary.
    let is_new = known.is_none();
    // Field 0 of `train` and `valid` has the source sentences, field 1 the target sentences.
    let TextAsIds { segmenter, vocabulary, train, valid, mut references } = match &config.data_bin {
        Some(folder) => binarised(folder, has_source, config, known, check_interrupt)?,
        None => files(has_source, config, known, check_interrupt)?,
    };
    if train.1.iter().all(Vec::is_empty) {
        return Err(Error::invalid(format!(
            "the training text holds no words: all {} target lines are blank; check the file",
            train.1.len()
        )));
    }
    let mask = training.vocab_mask.then(|| data::seen_mask(vocabulary.len(), train.1.iter().map(Vec::as_slice)));
    // The digests are computed before long sentences are left out, so that another max_tokens does not count as
    // another training text.
    let mut digest = |sides: &Sides<Vec<u32>>| data::digest(sides.0.iter().chain(&sides.1), check_interrupt);
    let mut digests = Digests { train: digest(&train)?, valid: digest(&valid)? };
    let valid_target = within(valid.1, mask.as_deref());
    let long = if config.skip_long { LongSentences::Skip } else { LongSentences::Refuse };
    let max_tokens = training.max_tokens as usize;
    let limit = limit(max_tokens, model);
    let (train, skipped, valid) = if has_source {
        let (train, kept_in_train) = Corpus::parallel(train.0, train.1, limit, long)?;
        let skipped = kept_in_train.len() - train.len();
        let (valid, kept_in_valid) = Corpus::parallel(valid.0, valid_target, limit, long).map_err(|e| match e {
            Error::Invalid(text) => Error::Invalid(format!("held-out text: {text}")),
            other => other,
        })?;
        if valid.is_empty() {
            return Err(Error::invalid(format!(
                "none of the {} held-out sentences fits into {} of {} {}: raise it",
                kept_in_valid.len(),
                limit.what,
                limit.flag,
                limit.tokens
            )));
        }
        data::retain(&mut references, &kept_in_valid);
        if references.len() < kept_in_valid.len() {
            // A score over fewer sentences is not comparable, so the validation text gets another digest.
            digests.valid = valid.digest(check_interrupt)?;
        }
        let start = model.decoder_start.id();
        (train.starting_with(start), skipped, valid.starting_with(start))
    } else {
        let segment_length = config.segment_length as usize;
        let train = Corpus::language_model(&train.1, segment_length, max_tokens)?;
        // No sentence is too long here, because the stream is cut into segments.
        (train, 0, Corpus::language_model(&valid_target, segment_length, max_tokens)?)
    };
    let model = TransformerConfig { vocab_size: vocabulary.len() as i64, ..model.clone() };
    model.validate()?;
    training.check_with(&model)?;
    let mut warnings = Vec::new();
    if let (true, Segmenter::Bpe(bpe), Some(asked)) = (is_new, &segmenter, config.bpe_operations) {
        let learned = bpe.merges().len();
        if learned < asked as usize {
            warnings.push(format!(
                "learned {learned} merges of the {asked} of bpe_operations: no other pair of pieces occurs twice in the \
                 training text"
            ));
        }
    }
    if training.evaluation_beam == 0 {
        references.clear();
    }
    warnings.extend(check_bleu(&references, training)?);
    Ok(PreparedData { model, segmenter, vocabulary, train, valid, references, mask, limit, skipped, digests, warnings })
}

/// Returns a warning if BLEU measures nothing with these references: BLEU compares sequences of up to four words.
///
/// Returns an error instead of a warning if the run's criterion or schedule uses BLEU.
fn check_bleu(references: &[String], training: &TrainingConfig) -> Result<Option<String>> {
    let tokenize = training.evaluation_tokenize;
    let lines: Vec<_> = references.iter().map(|line| tokenize.apply(line)).collect();
    let why = if lines.is_empty() {
        return Ok(None);
    } else if lacks_spaces(lines.iter().flat_map(|line| words(line))) {
        "no spaces stand between the words of the validation targets"
    } else if lines.iter().all(|line| words(line).nth(3).is_none()) {
        "no validation target has four words"
    } else {
        return Ok(None);
    };
    let splits_at_spaces = matches!(tokenize, Tokenize::None | Tokenize::Mteval13a);
    let advice =
        if splits_at_spaces { ": count characters, evaluation_tokenize = \"char\" (Chinese: \"zh\")" } else { "" };
    let warning = format!("BLEU measures nothing here, since {why}{advice}");
    let consequence = if training.criterion == Criterion::Bleu {
        "criterion = \"bleu\" chooses the best checkpoint"
    } else if matches!(training.schedule, ScheduleName::ValDecay | ScheduleName::NoWarmup) {
        "the schedule lowers the learning rate"
    } else {
        return Ok(Some(warning));
    };
    Err(Error::invalid(format!("{warning}; {consequence} by it")))
}

/// Returns the maximum length of a sentence, which must fit into a batch of `max_tokens` tokens and into the model.
pub(super) fn limit(max_tokens: usize, model: &TransformerConfig) -> Limit {
    // The option that error messages advise to raise: it sets the model's longest sentence.
    let flag = if model.positions == Positions::Learned { "--max-positions" } else { "--tensorized-segment" };
    let of_model =
        |longest: Longest| Limit { tokens: longest.tokens as usize, what: "the model's table of positions", flag };
    Limit::batch(max_tokens).and(model.longest().map(of_model))
}

/// The source sentences and the target sentences. In language modelling there are no source sentences.
type Sides<T> = (Vec<T>, Vec<T>);

/// The text of a run as ids of vocabulary entries.
struct TextAsIds {
    segmenter: Segmenter,
    vocabulary: Vocabulary,
    train: Sides<Vec<u32>>,
    valid: Sides<Vec<u32>>,
    /// The validation targets as text, with pieces joined to words; empty in language modelling.
    references: Vec<String>,
}

/// Reads the run's text files, and turns their sentences into ids. `known` is the segmentation and vocabulary of the
/// run to be resumed; with `None`, both come from the options and the training text.
fn files(
    has_source: bool,
    config: &DataConfig,
    known: Option<(Segmenter, Vocabulary)>,
    check_interrupt: Interrupt,
) -> Result<TextAsIds> {
    // Field 0 of each pair is the source side, field 1 the target side.
    let train = read(has_source, "train", config.train_source.as_deref(), &config.train_target, check_interrupt)?;
    let valid = read(has_source, "valid", config.valid_source.as_deref(), &config.valid_target, check_interrupt)?;
    let (segmenter, vocabulary) = match known {
        Some((segmenter, vocabulary)) => (segmenter, Some(vocabulary)),
        None => (segmenter(config, &train, check_interrupt)?, None),
    };
    let mut split = |lines: &[String]| -> Result<Vec<Vec<String>>> {
        interruptible(check_interrupt, lines, |lines| lines.map(|line| segmenter.segment(line)).collect())
    };
    let train_pieces = (split(&train.0)?, split(&train.1)?);
    let valid_pieces = (split(&valid.0)?, split(&valid.1)?);
    let vocabulary = match vocabulary {
        Some(vocabulary) => vocabulary,
        None => interruptible(check_interrupt, train_pieces.0.iter().chain(&train_pieces.1), |lines| {
            Vocabulary::build(lines.flatten().map(String::as_str))
        })?,
    };
    let mut ids = |lines: &[Vec<String>]| -> Result<Vec<Vec<u32>>> {
        interruptible(check_interrupt, lines, |lines| lines.map(|line| vocabulary.encode(line)).collect())
    };
    let train_ids = (ids(&train_pieces.0)?, ids(&train_pieces.1)?);
    let valid_ids = (ids(&valid_pieces.0)?, ids(&valid_pieces.1)?);
    let references = match (has_source, &segmenter) {
        (false, _) => Vec::new(),
        (true, Segmenter::Split) => valid.1.iter().map(|line| data::join_line(line)).collect(),
        (true, Segmenter::Bpe(_)) => valid.1,
    };
    Ok(TextAsIds { segmenter, vocabulary, train: train_ids, valid: valid_ids, references })
}

/// Reads the ids in a folder that fairseq has binarised. `known` is the segmentation and vocabulary of the run to be
/// resumed, if there is one.
fn binarised(
    folder: &str,
    has_source: bool,
    config: &DataConfig,
    known: Option<(Segmenter, Vocabulary)>,
    check_interrupt: Interrupt,
) -> Result<TextAsIds> {
    let data_bin = match has_source {
        true => Binarised::parallel(folder, "train", config.source_lang.as_deref(), config.target_lang.as_deref())?,
        false => Binarised::monolingual(folder),
    };
    let vocabulary = data_bin.joint_dictionary()?;
    if known.is_some_and(|(_, old)| old != vocabulary) {
        return Err(Error::invalid(format!(
            "{folder} has another dictionary than when the run began: resume with the folder it began with"
        )));
    }
    let mut sentences = |split, side| data_bin.sentences(split, side, vocabulary.len(), check_interrupt);
    let mut read = |split| -> Result<Sides<Vec<u32>>> {
        let source = if has_source { sentences(split, Side::Source)? } else { Vec::new() };
        Ok((source, sentences(split, Side::Target)?))
    };
    let (train, valid) = (read("train")?, read("valid")?);
    let references = match has_source {
        true => valid.1.iter().map(|ids| data::join(&vocabulary.decode_as(ids, UNKNOWN_MEANT))).collect(),
        false => Vec::new(),
    };
    Ok(TextAsIds { segmenter: Segmenter::Split, vocabulary, train, valid, references })
}

/// Returns the targets with UNK in place of vocabulary entries for which `mask` is false: the model never predicts
/// these. Without a mask, returns the targets as they are.
pub(super) fn within(mut targets: Vec<Vec<u32>>, mask: Option<&[bool]>) -> Vec<Vec<u32>> {
    if let Some(mask) = mask {
        for id in targets.iter_mut().flatten().filter(|id| !mask[**id as usize]) {
            *id = UNK as u32;
        }
    }
    targets
}

/// Reads the source lines and the target lines; the source lines are empty in language modelling. `what` is the
/// beginning of the options' names in error messages, such as `train`.
pub(super) fn read(
    has_source: bool,
    what: &str,
    source: Option<&str>,
    target: &str,
    check_interrupt: Interrupt,
) -> Result<Sides<String>> {
    if target.is_empty() {
        return Err(Error::invalid(format!("{what}_target is missing: give a text file, one sentence a line")));
    }
    match (has_source, source) {
        (true, Some(source)) => Ok(data::read_parallel(source, target, check_interrupt)?.into_iter().unzip()),
        (true, None) => Err(Error::invalid(format!(
            "{what}_source is missing: an encoder-decoder model needs source and target files (a language model is \
             architecture = \"decoder-only\")"
        ))),
        (false, None) => Ok((Vec::new(), data::read_lines(target, check_interrupt)?)),
        (false, Some(source)) => Err(Error::invalid(format!(
            "{what}_source is {source}, but a decoder-only model reads no source: leave it out"
        ))),
    }
}

/// Returns the segmenter that the options ask for. Errors unless exactly one of the three options is given.
fn segmenter(config: &DataConfig, train: &Sides<String>, check_interrupt: Interrupt) -> Result<Segmenter> {
    match (config.bpe_operations, &config.bpe_codes, config.no_bpe) {
        (Some(n), None, false) if n >= 1 => {
            let lines = train.0.iter().chain(&train.1).map(String::as_str);
            Ok(Segmenter::Bpe(Bpe::learn(lines, n as usize, check_interrupt)?))
        }
        (Some(n), None, false) => Err(Error::invalid(format!("bpe_operations must be at least 1, got {n}"))),
        (None, Some(codes), false) => Ok(Segmenter::Bpe(Bpe::from_codes(codes)?)),
        (None, None, true) => Ok(Segmenter::Split),
        (None, None, false) => Err(Error::invalid(
            "how is text cut into pieces? Give one of bpe_operations (learn merges), bpe_codes (a file of merges), or \
             no_bpe (the text is split already)",
        )),
        _ => Err(Error::invalid("bpe_operations, bpe_codes and no_bpe exclude each other: give one of them")),
    }
}

/// Returns the batches of the validation set, which are the same in every evaluation.
pub(super) fn valid_batches(valid: &Corpus, training: &TrainingConfig) -> Vec<Batch> {
    // Seed and epoch are constants, so the plan never changes.
    let (seed, epoch) = (0, 0);
    let plan = data::plan(&valid.lengths(), training.max_tokens as usize, seed, epoch);
    plan.iter().map(|sentences| data::collate(valid, sentences)).collect()
}
