//! From text files to numbered sentences.

use crate::config::{DataConfig, TrainingConfig, TransformerConfig};
use crate::data::{self, Batch, Bpe, Corpus, LongSentences, Segmenter, Vocabulary};
use crate::error::{Error, Result};
use crate::model::UNK;

/// The text of a run, read, cut and numbered.
pub struct Prepared {
    pub model: TransformerConfig,
    pub(super) segmenter: Segmenter,
    pub vocabulary: Vocabulary,
    pub(super) train: Corpus,
    pub(super) valid: Corpus,
    pub(super) references: Vec<String>,
    pub(super) mask: Option<Vec<bool>>,
    pub skipped: usize,
}

/// Reads everything a run needs; touches no output.
pub fn prepare(model: &TransformerConfig, training: &TrainingConfig, config: &DataConfig) -> Result<Prepared> {
    prepare_with(model, training, config, None)
}

/// `known`: the segmentation and vocabulary of the run that is resumed.
pub(super) fn prepare_with(
    model: &TransformerConfig,
    training: &TrainingConfig,
    config: &DataConfig,
    known: Option<(Segmenter, Vocabulary)>,
) -> Result<Prepared> {
    training.validate()?;
    let sided = model.has_encoder();
    let train = read(sided, "train", config.train_source.as_deref(), &config.train_target)?;
    let valid = read(sided, "valid", config.valid_source.as_deref(), &config.valid_target)?;
    let (segmenter, vocabulary) = match known {
        Some((segmenter, vocabulary)) => (segmenter, Some(vocabulary)),
        None => (segmenter(config, &train)?, None),
    };
    let cut = |lines: &[String]| -> Vec<Vec<String>> { lines.iter().map(|l| segmenter.segment(l)).collect() };
    let (train_source, train_target) = (cut(&train.0), cut(&train.1));
    let vocabulary = vocabulary
        .unwrap_or_else(|| Vocabulary::build(train_source.iter().chain(&train_target).flatten().map(String::as_str)));
    let ids = |lines: &[Vec<String>]| -> Vec<Vec<u32>> { lines.iter().map(|l| vocabulary.encode(l)).collect() };
    let train_target = ids(&train_target);
    let mask = training.vocab_mask.then(|| data::seen_mask(vocabulary.len(), train_target.iter().map(Vec::as_slice)));
    let valid_target = within(ids(&cut(&valid.1)), mask.as_deref());
    let long = if config.skip_long { LongSentences::Skip } else { LongSentences::Refuse };
    let most = training.max_tokens as usize;
    let (train_corpus, skipped, valid_corpus, references) = if sided {
        let (train_corpus, skipped) = Corpus::parallel(ids(&train_source), train_target, most, long)?;
        let (valid_corpus, _) = Corpus::parallel(ids(&cut(&valid.0)), valid_target, most, LongSentences::Refuse)?;
        let references = match &segmenter {
            Segmenter::Split => valid.1.iter().map(|l| data::join_line(l)).collect(),
            Segmenter::Bpe(_) => valid.1.clone(),
        };
        let start = model.decoder_start.id();
        (train_corpus.starting_with(start), skipped, valid_corpus.starting_with(start), references)
    } else {
        let segment = config.segment_length as usize;
        let train_corpus = Corpus::language_model(&train_target, segment, most)?;
        (train_corpus, 0, Corpus::language_model(&valid_target, segment, most)?, Vec::new())
    };
    let model = TransformerConfig { vocab_size: vocabulary.len() as i64, ..model.clone() };
    model.validate()?;
    let (train, valid) = (train_corpus, valid_corpus);
    Ok(Prepared { model, segmenter, vocabulary, train, valid, references, mask, skipped })
}

/// Held-out targets as the model can say them: types that training's targets never show are UNK.
pub(super) fn within(mut targets: Vec<Vec<u32>>, mask: Option<&[bool]>) -> Vec<Vec<u32>> {
    if let Some(mask) = mask {
        for id in targets.iter_mut().flatten().filter(|id| !mask[**id as usize]) {
            *id = UNK as u32;
        }
    }
    targets
}

/// (source lines, target lines); no source lines for language modelling.
pub(super) fn read(sided: bool, what: &str, source: Option<&str>, target: &str) -> Result<(Vec<String>, Vec<String>)> {
    if target.is_empty() {
        return Err(Error::invalid(format!("{what}_target is missing: give a text file, one sentence a line")));
    }
    match (sided, source) {
        (true, Some(source)) => Ok(data::read_parallel(source, target)?.into_iter().unzip()),
        (true, None) => Err(Error::invalid(format!(
            "{what}_source is missing: an encoder-decoder model needs source and target files (a language model is \
             architecture = \"decoder-only\")"
        ))),
        (false, None) => Ok((Vec::new(), data::read_lines(target)?)),
        (false, Some(source)) => Err(Error::invalid(format!(
            "{what}_source is {source}, but a decoder-only model reads no source: leave it out"
        ))),
    }
}

fn segmenter(config: &DataConfig, train: &(Vec<String>, Vec<String>)) -> Result<Segmenter> {
    match (config.bpe_operations, &config.bpe_codes, config.no_bpe) {
        (Some(n), None, false) if n >= 1 => {
            Ok(Segmenter::Bpe(Bpe::learn(train.0.iter().chain(&train.1).map(String::as_str), n as usize)?))
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

pub(super) fn valid_batches(valid: &Corpus, training: &TrainingConfig) -> Vec<Batch> {
    let plan = data::plan(&valid.lengths(), training.max_tokens as usize, 0, 0);
    plan.iter().map(|sentences| data::collate(valid, sentences)).collect()
}
