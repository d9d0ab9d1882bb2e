//! A run: from text files and three configurations to a folder with everything that translating needs.
//!
//! ```text
//! DIR/config.json   the configurations        DIR/log.jsonl      what happened, one JSON object a line
//! DIR/vocabulary.txt  (fairseq's dict.txt)    DIR/checkpoints/   best, last and the last k
//! DIR/bpe.codes       (subword-nmt's)                       DIR/target_types.txt  the types of the target vocabulary
//! ```

use crate::config::{Architecture, DataConfig, TrainingConfig, TransformerConfig};
use crate::data::{
    self, Batch, BatchStream, Bpe, Corpus, LongSentences, Prefetch, Segmenter, StreamConfig, Vocabulary,
};
use crate::error::{Error, Result};
use crate::metrics::unigram_entropy;
use crate::model::{Transformer, UNK};
use crate::search::{search, SearchConfig};
use crate::train::checkpoint::{self, Checkpoint, Store};
use crate::train::{self, load_parameters, smoothing, Objective, Observer, Parts, Progress, Trainer, Validation};
use serde::{Deserialize, Serialize};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tch::{no_grad, Device, Kind, Tensor};

const CONFIG: &str = "config.json";
const VOCABULARY: &str = "vocabulary.txt";
const CODES: &str = "bpe.codes";
const TARGET_TYPES: &str = "target_types.txt";
const LOG: &str = "log.jsonl";

/// What to do with an output folder that holds a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    New,
    Resume,
    Overwrite,
}

impl Mode {
    pub fn parse(word: &str) -> Result<Self> {
        match word {
            "new" => Ok(Mode::New),
            "resume" => Ok(Mode::Resume),
            "overwrite" => Ok(Mode::Overwrite),
            other => Err(crate::error::unknown("mode", other, ["new", "resume", "overwrite"])),
        }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Configs {
    model: TransformerConfig,
    training: TrainingConfig,
    data: DataConfig,
}

/// The text of a run, read, cut and numbered.
pub struct Prepared {
    pub model: TransformerConfig,
    segmenter: Segmenter,
    pub vocabulary: Vocabulary,
    train: Corpus,
    valid: Corpus,
    references: Vec<String>,
    mask: Option<Vec<bool>>,
    pub skipped: usize,
}

/// Reads everything a run needs; touches no output.
pub fn prepare(model: &TransformerConfig, training: &TrainingConfig, config: &DataConfig) -> Result<Prepared> {
    prepare_with(model, training, config, None)
}

/// `known`: the segmentation and vocabulary of the run that is resumed.
fn prepare_with(
    model: &TransformerConfig,
    training: &TrainingConfig,
    config: &DataConfig,
    known: Option<(Segmenter, Vocabulary)>,
) -> Result<Prepared> {
    training.validate()?;
    let sided = model.architecture == Architecture::EncoderDecoder;
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
        (train_corpus, skipped, valid_corpus, references)
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
fn within(mut targets: Vec<Vec<u32>>, mask: Option<&[bool]>) -> Vec<Vec<u32>> {
    if let Some(mask) = mask {
        for id in targets.iter_mut().flatten().filter(|id| !mask[**id as usize]) {
            *id = UNK as u32;
        }
    }
    targets
}

/// (source lines, target lines); no source lines for language modelling.
fn read(sided: bool, what: &str, source: Option<&str>, target: &str) -> Result<(Vec<String>, Vec<String>)> {
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

/// The device of that name: cpu, cuda, cuda:N.
pub fn device(name: &str) -> Result<Device> {
    let wanted = match name {
        "cpu" => return Ok(Device::Cpu),
        "cuda" => 0,
        other => match other.strip_prefix("cuda:").and_then(|n| n.parse::<usize>().ok()) {
            Some(n) => n,
            None => return Err(crate::error::unknown("device", other, ["cpu", "cuda", "cuda:0"])),
        },
    };
    let found = tch::Cuda::device_count().max(0) as usize;
    if wanted >= found {
        return Err(Error::invalid(format!(
            "device {name} is not there: this machine has {found} CUDA devices; use cpu"
        )));
    }
    Ok(Device::Cuda(wanted))
}

/// Number of parameters and bytes of a run, without training.
pub fn dry_run(model: &TransformerConfig, training: &TrainingConfig, data: &DataConfig) -> Result<serde_json::Value> {
    let prepared = prepare(model, training, data)?;
    let built = Transformer::new(&prepared.model, Device::Cpu, Kind::Float)?;
    let n = built.parameters.numel();
    let most = training.max_tokens as usize;
    // Activations kept for the backward pass, f32 units a row: about 16 d + 2 d_ff a layer and side; one block of logits.
    let (d, f) = (model.d_model as usize, model.d_ff as usize);
    let encoder = if model.architecture == Architecture::EncoderDecoder { model.encoder_layers as usize } else { 0 };
    let layers = encoder + model.decoder_layers as usize;
    let activations = most * layers * (16 * d + 2 * f) * 4 + 1024 * prepared.model.vocab_size as usize * 4;
    Ok(serde_json::json!({
        "parameters": n,
        "parameter_bytes": n * 4,
        "training_bytes": n * 4 * 4 + activations,
        "vocabulary": prepared.vocabulary.len(),
        "sentences": prepared.train.len(),
        "skipped": prepared.skipped,
    }))
}

/// Trains; `output` then holds all that [`Translator`] needs.
pub fn train(
    model: &TransformerConfig,
    training: &TrainingConfig,
    config: &DataConfig,
    output: &Path,
    mode: Mode,
    observer: &mut dyn Observer,
) -> Result<()> {
    keep_memory();
    let device = device(&training.device)?;
    let holds_run = output.join(CONFIG).exists();
    match mode {
        Mode::New if holds_run => {
            return Err(Error::invalid(format!(
                "{} already holds a run: --resume continues it, --overwrite starts anew, or choose another output",
                output.display()
            )))
        }
        Mode::Resume if !holds_run => {
            return Err(Error::invalid(format!(
                "{} holds no run to resume: leave out --resume to start one",
                output.display()
            )))
        }
        _ => {}
    }
    let resumed = match mode {
        Mode::Resume => Some(resume(model, output)?),
        _ => None,
    };
    let (known, from) = match resumed {
        Some((segmenter, vocabulary, checkpoint)) => (Some((segmenter, vocabulary)), checkpoint),
        None => (None, None),
    };
    let prepared = prepare_with(model, training, config, known)?;
    if mode != Mode::Resume {
        start_folder(output, mode, &prepared, training, config)?;
    }
    let mut log = Log { file: output.join(LOG), observer };
    if prepared.skipped > 0 {
        let (skipped, all) = (prepared.skipped, prepared.skipped + prepared.train.len());
        let text = format!("left out {skipped} of {all} sentences: longer than max_tokens {}", training.max_tokens);
        log.message("warning", &text)?;
    }
    let mut trainer = trainer(prepared, training, output, device, from)?;
    trainer.fit(&mut log)
}

type Resumed = (Segmenter, Vocabulary, Option<Checkpoint>);

/// What a run folder holds; no checkpoint where the run was stopped before its first.
fn resume(model: &TransformerConfig, output: &Path) -> Result<Resumed> {
    let configs = read_configs(output)?;
    let vocabulary = Vocabulary::load(output.join(VOCABULARY))?;
    let wanted = TransformerConfig { vocab_size: vocabulary.len() as i64, ..model.clone() };
    if configs.model != wanted {
        let (old, new) = (serde_json::to_value(&configs.model), serde_json::to_value(&wanted));
        let (Ok(serde_json::Value::Object(old)), Ok(serde_json::Value::Object(new))) = (old, new) else {
            return Err(Error::invalid("the run's model differs from the one asked for"));
        };
        let differences: Vec<String> = old
            .iter()
            .filter(|(k, v)| new.get(*k) != Some(v))
            .map(|(k, v)| format!("{k} was {v}, now {}", new[k]))
            .collect();
        return Err(Error::invalid(format!(
            "{} was trained with another model: {}; resume with the same options",
            output.display(),
            differences.join("; ")
        )));
    }
    let store = Store::open(output)?;
    let checkpoint = match store.list()?.is_empty() {
        true => None,
        false => Some(checkpoint::load(store.resolve("last")?)?),
    };
    Ok((read_segmenter(output)?, vocabulary, checkpoint))
}

fn read_configs(output: &Path) -> Result<Configs> {
    let path = output.join(CONFIG);
    let text = fs::read_to_string(&path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => Error::invalid(format!(
            "{} holds no model: expected the output folder of a training run, with its {CONFIG}",
            output.display()
        )),
        _ => Error::io("read", &path, e),
    })?;
    crate::config::from_json(&path.display().to_string(), &text)
}

fn read_segmenter(output: &Path) -> Result<Segmenter> {
    let codes = output.join(CODES);
    Ok(if codes.exists() { Segmenter::Bpe(Bpe::from_codes(codes)?) } else { Segmenter::Split })
}

fn start_folder(
    output: &Path,
    mode: Mode,
    prepared: &Prepared,
    training: &TrainingConfig,
    config: &DataConfig,
) -> Result<()> {
    if mode == Mode::Overwrite {
        // Only what a run writes; anything else in the folder is the user's.
        for name in [CONFIG, VOCABULARY, CODES, TARGET_TYPES, LOG, "curves.png"] {
            remove(&output.join(name), |p| fs::remove_file(p))?;
        }
        remove(&output.join("checkpoints"), |p| fs::remove_dir_all(p))?;
    }
    fs::create_dir_all(output).map_err(|e| Error::io("create the folder", output, e))?;
    prepared.vocabulary.save(output.join(VOCABULARY))?;
    if let Segmenter::Bpe(bpe) = &prepared.segmenter {
        bpe.save(output.join(CODES))?;
    }
    if let Some(mask) = &prepared.mask {
        let ids: Vec<u32> = (0..mask.len() as u32).filter(|id| mask[*id as usize] && *id > UNK as u32).collect();
        data::write_lines_atomic(output.join(TARGET_TYPES), prepared.vocabulary.decode(&ids))?;
    }
    let configs = Configs { model: prepared.model.clone(), training: training.clone(), data: config.clone() };
    let text = serde_json::to_string_pretty(&configs).map_err(|e| Error::invalid(e.to_string()))?;
    // Last: a folder with a config holds a run.
    data::write_lines_atomic(output.join(CONFIG), [text])
}

/// The target vocabulary of a run: its types, EOS and UNK.
fn read_mask(output: &Path, vocabulary: &Vocabulary) -> Result<Vec<bool>> {
    let types = data::read_lines(output.join(TARGET_TYPES))?;
    Ok(data::seen_mask(vocabulary.len(), [vocabulary.encode(&types).as_slice()]))
}

fn remove(path: &Path, act: impl Fn(&Path) -> std::io::Result<()>) -> Result<()> {
    match act(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", path, e)),
        _ => Ok(()),
    }
}

fn trainer(
    prepared: Prepared,
    training: &TrainingConfig,
    output: &Path,
    device: Device,
    from: Option<Checkpoint>,
) -> Result<Trainer> {
    let Prepared { model, vocabulary, train, valid, references, mask, .. } = prepared;
    let from = match from {
        Some(checkpoint) => {
            let progress: Progress = serde_json::from_value(checkpoint.state.clone())
                .map_err(|e| Error::invalid(format!("the checkpoint's state cannot be read: {e}")))?;
            Some((progress, checkpoint))
        }
        None => None,
    };
    tch::manual_seed(training.seed as i64);
    let model = match &from {
        Some((_, checkpoint)) => Transformer::to_train(&model, &load_parameters(&checkpoint.model, device)?)?,
        None => Transformer::new(&model, device, Kind::Float)?,
    };
    let valid_count = mask.as_ref().map_or(vocabulary.len(), |m| m.iter().filter(|v| **v).count());
    let mask = mask.map(|m| Tensor::f_from_slice(&m)?.f_to_device(device)).transpose()?;
    let entropy = unigram_entropy(train.target.iter().flat_map(|row| row.iter().copied().chain([2])));
    let batches = valid_batches(&valid, training);
    let stream_config = StreamConfig {
        max_tokens: training.max_tokens as usize,
        seed: training.seed,
        word_dropout: training.word_dropout,
    };
    let cursor = from.as_ref().map(|(p, _)| p.cursor).unwrap_or_default();
    let stream = BatchStream::new(Arc::new(train), stream_config, cursor)?;
    let parts = Parts {
        model,
        config: training.clone(),
        objective: Objective { mask, smoothing: smoothing(training, valid_count) },
        vocabulary,
        validation: Validation { batches, references },
        store: Store::open(output)?,
        unigram_entropy: entropy,
        batches_per_epoch: stream.batches_per_epoch(),
        device,
    };
    Trainer::new(parts, Prefetch::new(stream)?, from.as_ref().map(|(p, c)| (p.clone(), c)))
}

fn valid_batches(valid: &Corpus, training: &TrainingConfig) -> Vec<Batch> {
    let plan = data::plan(&valid.lengths(), training.max_tokens as usize, 0, 0);
    plan.iter().map(|sentences| data::collate(valid, sentences)).collect()
}

/// Asks glibc to keep freed memory: activations of the same sizes come and go with every update, and fresh pages cost
/// more than the arithmetic on them. NORMFORMER_RS_ALLOCATOR=system leaves the allocator as it is.
fn keep_memory() {
    if std::env::var("NORMFORMER_RS_ALLOCATOR").is_ok_and(|v| v == "system") {
        return;
    }
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt takes two integers and may be called at any time.
    unsafe {
        libc::mallopt(libc::M_MMAP_MAX, 0);
        libc::mallopt(libc::M_TRIM_THRESHOLD, libc::c_int::MAX);
        libc::mallopt(libc::M_TOP_PAD, 64 << 20);
    }
}

/// Appends every event to the run's log, then passes it on.
struct Log<'a> {
    file: PathBuf,
    observer: &'a mut dyn Observer,
}

impl Log<'_> {
    fn write(&self, event: &str, value: &impl Serialize) -> Result<()> {
        let mut value = serde_json::to_value(value).map_err(|e| Error::invalid(e.to_string()))?;
        if let Some(object) = value.as_object_mut() {
            object.insert("event".into(), event.into());
        }
        let mut file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.file)
            .map_err(|e| Error::io("open the log", &self.file, e))?;
        file.write_all(format!("{value}\n").as_bytes()).map_err(|e| Error::io("write the log", &self.file, e))
    }
}

impl Observer for Log<'_> {
    fn started(&mut self, v: &train::Started) -> Result<()> {
        self.write("started", v)?;
        self.observer.started(v)
    }
    fn updated(&mut self, v: &train::Update) -> Result<()> {
        self.write("updated", v)?;
        self.observer.updated(v)
    }
    fn evaluated(&mut self, v: &train::Evaluation) -> Result<()> {
        self.write("evaluated", v)?;
        self.observer.evaluated(v)
    }
    fn message(&mut self, level: &str, text: &str) -> Result<()> {
        self.write("message", &serde_json::json!({ "level": level, "text": text }))?;
        self.observer.message(level, text)
    }
}

/// A trained model with its text processing.
pub struct Translator {
    pub model: Transformer,
    segmenter: Segmenter,
    vocabulary: Vocabulary,
    /// The target vocabulary.
    seen: Option<Vec<bool>>,
    mask: Option<Tensor>,
    smoothing: crate::kernel::cross_entropy::Smoothing,
    training: TrainingConfig,
    data: DataConfig,
    device: Device,
}

impl Translator {
    /// Of a run's folder; `checkpoint` is best, last, average, an update's number, or a path.
    pub fn load(folder: &Path, checkpoint: &str, device: Device) -> Result<Self> {
        keep_memory();
        let configs = read_configs(folder)?;
        let path = match checkpoint {
            "average" if average_path(folder).exists() => average_path(folder),
            "average" => {
                return Err(Error::invalid(format!(
                    "{} has no averaged checkpoint: make one with `normformer-rs average --model {0} --last 10`",
                    folder.display()
                )))
            }
            other => Store::at(folder).resolve(other)?,
        };
        let (arrays, _) = checkpoint::load_model(path)?;
        let model = Transformer::with_parameters(&configs.model, &load_parameters(&arrays, device)?)?;
        let vocabulary = Vocabulary::load(folder.join(VOCABULARY))?;
        let seen = if configs.training.vocab_mask { Some(read_mask(folder, &vocabulary)?) } else { None };
        let valid = seen.as_ref().map_or(vocabulary.len(), |m| m.iter().filter(|v| **v).count());
        let mask = seen.as_ref().map(|m| Tensor::f_from_slice(m)?.f_to_device(device)).transpose()?;
        let smoothing = smoothing(&configs.training, valid);
        let segmenter = read_segmenter(folder)?;
        let Configs { training, data, .. } = configs;
        Ok(Translator { model, segmenter, vocabulary, seen, mask, smoothing, training, data, device })
    }

    /// The best translations of each line, as (text, score).
    pub fn translate(
        &self,
        lines: &[String],
        config: &SearchConfig,
        batch_tokens: usize,
        kind: Kind,
        mut between: impl FnMut(usize) -> Result<()>,
    ) -> Result<Vec<Vec<(String, f64)>>> {
        let ids: Vec<Vec<u32>> = lines.iter().map(|l| self.vocabulary.encode(&self.segmenter.segment(l))).collect();
        let lengths: Vec<(usize, usize)> = ids.iter().map(|row| (row.len() + 1, 0)).collect();
        let corpus = Corpus { source: Some(ids), target: vec![Vec::new(); lines.len()] };
        let mut found = vec![Vec::new(); lines.len()];
        let mut done = 0;
        for sentences in data::plan(&lengths, batch_tokens, 0, 0) {
            let batch = data::collate(&corpus, &sentences);
            let source = train::Input::new(&batch, self.device)?.source;
            let source = source.ok_or_else(|| Error::invalid("a language model does not translate"))?;
            for (&sentence, hypotheses) in
                sentences.iter().zip(search(&self.model, &source, self.mask.as_ref(), config, kind)?)
            {
                found[sentence] =
                    hypotheses.iter().map(|h| (train::to_text(&h.tokens, &self.vocabulary), h.score)).collect();
            }
            done += sentences.len();
            between(done)?;
        }
        Ok(found)
    }

    /// Loss per token of other text.
    pub fn evaluate(&self, source: Option<&str>, target: &str, kind: Kind) -> Result<train::Score> {
        let sided = self.model.config.architecture == Architecture::EncoderDecoder;
        let (source, target) = read(sided, "evaluation", source, target)?;
        let ids = |lines: &[String]| -> Vec<Vec<u32>> {
            lines.iter().map(|l| self.vocabulary.encode(&self.segmenter.segment(l))).collect()
        };
        let most = self.training.max_tokens as usize;
        let target = within(ids(&target), self.seen.as_deref());
        let corpus = match sided {
            true => Corpus::parallel(ids(&source), target, most, LongSentences::Refuse)?.0,
            false => Corpus::language_model(&target, self.data.segment_length as usize, most)?,
        };
        let objective = Objective { mask: self.mask.as_ref().map(Tensor::shallow_clone), smoothing: self.smoothing };
        no_grad(|| train::evaluate_loss(&self.model, &valid_batches(&corpus, &self.training), &objective, kind))
    }
}

fn average_path(folder: &Path) -> PathBuf {
    folder.join("checkpoints").join("average")
}

/// Averages checkpoints of a run (parameters and running statistics; counters of the newest), stored as `average`: those
/// of the given updates, or the last `count`.
pub fn average(folder: &Path, count: Option<usize>, updates: Option<Vec<u64>>) -> Result<PathBuf> {
    let store = Store::open(folder)?;
    let there = store.list()?;
    let updates = match (count, updates) {
        (None, Some(updates)) => updates,
        (Some(n), None) if (1..=there.len()).contains(&n) => there[there.len() - n..].to_vec(),
        (Some(n), None) => {
            return Err(Error::invalid(format!(
                "{} holds {} checkpoints, cannot average the last {n}; training keeps as many as `keep` says",
                folder.display(),
                there.len()
            )))
        }
        _ => return Err(Error::invalid("give either how many of the last checkpoints to average, or their updates")),
    };
    let paths = updates.iter().map(|u| store.resolve(&u.to_string())).collect::<Result<Vec<_>>>()?;
    let averaged = checkpoint::average(&paths)?;
    let path = average_path(folder);
    remove(&path, |p| fs::remove_dir_all(p))?;
    checkpoint::save(&path, updates.into_iter().max().unwrap_or(0), &averaged)?;
    Ok(path)
}
