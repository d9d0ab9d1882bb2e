//! A trained model that translates and evaluates text.

use super::folder::{read_configs, read_mask, read_segmenter, read_vocabulary, Configs};
use super::prepare::{limit, read, valid_batches, within};
use super::workers::{in_parallel, source_batches};
use crate::config::{differences, DataConfig, Longest, TrainingConfig, TransformerConfig};
use crate::cpu::{contention, pages, parallel};
use crate::data::vocabulary::EOS;
use crate::data::{
    self, interruptible, Binarised, Corpus, Interrupt, LongSentences, PackedIds, Segmenter, Side, Vocabulary,
};
use crate::error::{quoted, Error, Result};
use crate::model::{HostBatch, Packed, Transformer};
use crate::ownership::AVERAGE;
use crate::search::{Hypothesis, Search, SearchConfig};
use crate::train::checkpoint::CheckpointStore;
use crate::train::{self, load_parameters, smoothing, Objective};
use std::collections::BTreeMap;
use std::path::Path;
use tch::{no_grad, Device, Kind, Tensor};

/// A trained model with the segmentation and vocabulary of its text.
pub struct Translator {
    pub model: Transformer,
    pub(super) segmenter: Segmenter,
    pub(super) vocabulary: Vocabulary,
    /// The target vocabulary, as a flag for each vocabulary entry; `None` if every entry is in it.
    pub(super) seen: Option<Vec<bool>>,
    /// The flags of `seen` on the device.
    mask: Option<Tensor>,
    smoothing: crate::kernel::cross_entropy::Smoothing,
    pub(super) training: TrainingConfig,
    pub(super) data: DataConfig,
    device: Device,
    /// The measurement of threads' waits, which ends with this value.
    _watch: Option<contention::ContentionWatch>,
}

/// One of the best translations of a sentence.
#[derive(Clone, Debug)]
pub struct Translation {
    pub text: String,
    /// The score by which the search ranks hypotheses; higher is better.
    pub score: f64,
    /// True if the model ended the translation; false if the maximum length did.
    pub finished: bool,
}

/// Returns the options and tensors of a run's checkpoint. Names and shapes are checked against the options before a
/// model is built, so that forged options with thousands of layers cost nothing.
pub fn load_model(folder: &Path, checkpoint: &str) -> Result<(TransformerConfig, BTreeMap<String, Tensor>)> {
    let (path, (arrays, config)) =
        CheckpointStore::at(folder).read(checkpoint, |path| train::checkpoint::load_model(path))?;
    let options = config.get("model").unwrap_or(&config);
    let config: TransformerConfig = crate::config::from_json(&path.display().to_string(), &options.to_string())?;
    let tensors = load_parameters(&arrays, Device::Cpu)?;
    Transformer::with_parameters(&config, &tensors).map_err(|e| {
        Error::invalid(format!("{}: the weights are not those of its config.json: {e}", path.display()))
    })?;
    Ok((config, tensors))
}

impl Translator {
    /// Loads a model from a run's folder. `checkpoint` is `best`, `last`, `average`, an update's number, or a path.
    pub fn load(folder: &Path, checkpoint: &str, device: Device) -> Result<Self> {
        pages::keep_memory();
        let configs = read_configs(folder)?;
        let store = CheckpointStore::at(folder);
        if checkpoint == AVERAGE && store.resolve(checkpoint).is_err() {
            return Err(Error::invalid(format!(
                "{} has no averaged checkpoint: make one with `normformer-rs average --model {} --last 10`",
                folder.display(),
                quoted(&folder.display().to_string())
            )));
        }
        let (path, (arrays, config)) = store.read(checkpoint, |path| train::checkpoint::load_model(path))?;
        // Options of the training may differ between the checkpoint and the run, but not those of the model.
        let of_checkpoint = configs.of_checkpoint(&path, &config)?;
        if of_checkpoint.model != configs.model {
            return Err(Error::invalid(format!(
                "{} is of another model than the run {}: {}",
                path.display(),
                folder.display(),
                differences(&serde_json::json!(configs.model), &serde_json::json!(of_checkpoint.model))
            )));
        }
        let configs = of_checkpoint;
        let model = Transformer::with_parameters(&configs.model, &load_parameters(&arrays, device)?)?;
        let vocabulary = read_vocabulary(folder)?;
        if vocabulary.len() as i64 != configs.model.vocab_size {
            return Err(Error::invalid(format!(
                "{} has a vocabulary of {} types and a model of {}: its vocabulary.txt is damaged, or another run's",
                folder.display(),
                vocabulary.len(),
                configs.model.vocab_size
            )));
        }
        let seen = if configs.training.vocab_mask { Some(read_mask(folder, &vocabulary)?) } else { None };
        let entries = seen.as_ref().map_or(vocabulary.len(), |seen| seen.iter().filter(|is_seen| **is_seen).count());
        let mask = seen.as_ref().map(|m| Tensor::f_from_slice(m)?.f_to_device(device)).transpose()?;
        let smoothing = smoothing(&configs.training, entries);
        let segmenter = read_segmenter(folder, &configs.data)?;
        let Configs { training, data, .. } = configs;
        Ok(Translator {
            model,
            segmenter,
            vocabulary,
            seen,
            mask,
            smoothing,
            training,
            data,
            device,
            _watch: contention::watch(),
        })
    }

    /// Returns the ids of each line of a text. `check_interrupt` runs before each line.
    pub fn encode(&self, lines: &[String], check_interrupt: Interrupt) -> Result<Vec<Vec<u32>>> {
        let encode = |line: &String| self.vocabulary.encode(&self.segmenter.segment(line));
        interruptible(check_interrupt, lines, |lines| lines.map(encode).collect())
    }

    /// Returns the ids of the source side of a binarised split. The split's folder may number pieces differently, so
    /// its ids are converted to this model's.
    pub fn read(&self, data: &Binarised, split: &str, check_interrupt: Interrupt) -> Result<Vec<Vec<u32>>> {
        let dictionary = data.dictionary(Side::Source)?;
        let sentences = data.sentences(split, Side::Source, dictionary.len(), check_interrupt)?;
        Ok(sentences.iter().map(|ids| self.vocabulary.encode(&dictionary.decode(ids))).collect())
    }

    /// Returns the best translations of each source sentence. A batch has at most `batch_tokens` padded tokens, or
    /// one sentence if that has more; `kind` is the type of matrix products. On the CPU each thread translates its own
    /// batches.
    pub fn translate(
        &self,
        source: Vec<Vec<u32>>,
        config: &SearchConfig,
        batch_tokens: usize,
        kind: Kind,
        check_interrupt: Interrupt,
    ) -> Result<Vec<Vec<Translation>>> {
        if !self.model.config.has_encoder() {
            return Err(Error::invalid("a language model does not translate"));
        }
        if source.is_empty() {
            return Ok(Vec::new());
        }
        self.check_lines(&source)?;
        let check_interrupt = &mut data::throttled(check_interrupt);
        let search = Search::new(&self.model, self.mask.as_ref(), config, kind)?;
        let threads = if self.device == Device::Cpu { parallel::threads() } else { 1 };
        let batches = source_batches(&source, batch_tokens, threads);
        let mut translations = vec![Vec::new(); source.len()];
        // Stores the translations of the batch with the number `batch`.
        let mut take = |batch: usize, batch_hypotheses: Vec<Vec<Hypothesis>>| {
            for (&sentence, hypotheses) in batches[batch].iter().zip(batch_hypotheses) {
                let translation = |h: &Hypothesis| Translation {
                    text: train::to_text(&h.tokens, &self.vocabulary),
                    score: h.score,
                    finished: !search.is_cut(h),
                };
                translations[sentence] = hypotheses.iter().map(translation).collect();
            }
        };
        // Packs the source sentences of the batch with this number.
        let packed = |batch: usize| {
            let rows = batches[batch].iter().map(|&sentence| source[sentence].iter().copied().chain([EOS]));
            let PackedIds { tokens, positions, offsets, .. } = PackedIds::from_rows(rows);
            Packed::new(&tokens, &positions, offsets)
        };
        match threads.min(batches.len()) {
            0 | 1 => {
                for batch in 0..batches.len() {
                    take(batch, search.run(&self.model, &packed(batch)?.to(self.device)?, check_interrupt)?);
                }
            }
            threads => {
                let run = |model: &Transformer, search: &Search, batch: usize, check_interrupt: Interrupt| {
                    search.run(model, &packed(batch)?, check_interrupt)
                };
                in_parallel(&self.model, &search, threads, batches.len(), &run, &mut take, check_interrupt)?;
            }
        }
        Ok(translations)
    }

    /// Returns the loss per token on the text in the files `source` and `target`. A language model has no source.
    /// `kind` is the type of matrix products.
    pub fn evaluate(
        &self,
        source: Option<&str>,
        target: &str,
        kind: Kind,
        mut check_interrupt: impl FnMut() -> Result<()>,
    ) -> Result<train::Score> {
        let has_source = self.model.config.has_encoder();
        if let (true, None) | (false, Some(_)) = (has_source, source) {
            let (has, needs) = if has_source { ("an encoder", "source") } else { ("no encoder", "no source") };
            return Err(Error::invalid(format!("the model has {has}: it is evaluated with {needs} text")));
        }
        let mut check_interrupt = data::throttled(&mut check_interrupt);
        let (source, target) = read(has_source, "evaluation", source, target, &mut check_interrupt)?;
        let target = within(self.encode(&target, &mut check_interrupt)?, self.seen.as_deref());
        let corpus = match has_source {
            // No sentence is too long for a batch here, because a batch holds at least one sentence. The second result,
            // which says which pairs are kept, is dropped: `Refuse` keeps all.
            true => Corpus::parallel(
                self.encode(&source, &mut check_interrupt)?,
                target,
                limit(usize::MAX, &self.model.config),
                LongSentences::Refuse,
            )?
            .0
            .starting_with(self.model.config.decoder_start.id()),
            false => Corpus::language_model(&target, self.data.segment_length as usize, usize::MAX)?,
        };
        let batches = valid_batches(&corpus, &self.training);
        no_grad(|| train::evaluate_loss(&self.model, &batches, &self.objective()?, kind, check_interrupt))
    }

    /// Errors if a source line is longer than the model reads; the message names the first such line.
    fn check_lines(&self, source: &[Vec<u32>]) -> Result<()> {
        let Some(Longest { tokens: most, why }) = self.model.config.longest() else { return Ok(()) };
        // The model also reads the EOS at the end of each line.
        let is_long = |ids: &&Vec<u32>| ids.len() as i64 + 1 > most;
        let Some(first) = source.iter().position(|ids| is_long(&ids)) else { return Ok(()) };
        Err(Error::invalid(format!(
            "line {} has {} tokens with the end of sentence, and {why} = {most}; {} of {} lines are too long: shorten or \
             remove them",
            first + 1,
            source[first].len() + 1,
            source.iter().filter(is_long).count(),
            source.len()
        )))
    }

    /// Returns the loss function with which the run was trained.
    pub(super) fn objective(&self) -> Result<Objective> {
        Objective::new(self.mask.as_ref().map(Tensor::shallow_clone), self.smoothing)
    }
}
