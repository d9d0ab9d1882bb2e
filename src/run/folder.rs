//! The folder of a run: what it holds, how it begins, how it is read again, and its log.

use super::Prepared;
use crate::config::{differences, DataConfig, TrainingConfig, TransformerConfig};
use crate::data::{self, Bpe, Segmenter, Vocabulary};
use crate::error::{Error, Result};
use crate::model::{Transformer, UNK};
use crate::train::checkpoint::{self, Checkpoint, Store};
use crate::train::{self, Observer};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use tch::Tensor;

pub(super) const CONFIG: &str = "config.json";
pub(super) const VOCABULARY: &str = "vocabulary.txt";
pub(super) const CODES: &str = "bpe.codes";
pub(super) const TARGET_TYPES: &str = "target_types.txt";
pub(super) const LOG: &str = "log.jsonl";
const CHECKPOINTS: &str = "checkpoints";
/// A run's files beside its config.
const FILES: [&str; 4] = [VOCABULARY, CODES, TARGET_TYPES, LOG];

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
pub(super) struct Configs {
    pub model: TransformerConfig,
    pub training: TrainingConfig,
    pub data: DataConfig,
}

/// What a run's folder begins with.
pub(super) struct Beginning {
    configs: Configs,
    segmenter: Segmenter,
    vocabulary: Vocabulary,
    mask: Option<Vec<bool>>,
}

impl Beginning {
    /// Takes the segmenter, which training has no more use for.
    pub(super) fn of(prepared: &mut Prepared, training: &TrainingConfig, config: &DataConfig) -> Self {
        Beginning {
            configs: Configs { model: prepared.model.clone(), training: training.clone(), data: config.clone() },
            segmenter: std::mem::replace(&mut prepared.segmenter, Segmenter::Split),
            vocabulary: prepared.vocabulary.clone(),
            mask: prepared.mask.clone(),
        }
    }

    /// Makes the folder, in place of an earlier run if that is wanted; all that could refuse to run has been asked before.
    pub(super) fn write(&self, output: &Path, mode: Mode) -> Result<()> {
        if mode == Mode::Overwrite {
            // Only what a run writes; anything else in the folder is the user's. The config last: with it, a folder that
            // was left half removed still holds a run.
            Store::at(output).clear()?;
            for name in FILES.iter().chain(&["curves.png", CONFIG]) {
                remove(&output.join(name), |p| fs::remove_file(p))?;
            }
        }
        write(output, &self.configs, &self.segmenter, &self.vocabulary, self.mask.as_deref())?;
        Store::open(output).map(drop)
    }
}

/// Refuses a folder whose config is not a run's.
pub(super) fn check_overwritten(output: &Path) -> Result<()> {
    let path = output.join(CONFIG);
    let text = match fs::read(&path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        read => read.map_err(|e| Error::io("read", &path, e))?,
    };
    let found: Option<serde_json::Value> = serde_json::from_slice(&text).ok();
    match found.is_some_and(|v| ["model", "training", "data"].iter().all(|part| v[part].is_object())) {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "{} was not written by a run, so --overwrite leaves it alone: choose another output",
            path.display()
        ))),
    }
}

/// Refuses a folder where a new run would write over what is there.
pub(super) fn check_new(output: &Path) -> Result<()> {
    let shown = output.display();
    if output.join(CONFIG).exists() {
        return Err(Error::invalid(format!(
            "{shown} already holds a run: --resume continues it, --overwrite starts anew, or choose another output"
        )));
    }
    match FILES.iter().chain(&[CHECKPOINTS]).find(|name| output.join(name).exists()) {
        Some(name) => Err(Error::invalid(format!(
            "{shown} holds {name}, which a run would write over: choose another output (if it was left by an earlier run, \
             --overwrite removes it)"
        ))),
        None => Ok(()),
    }
}

fn write(
    output: &Path,
    configs: &Configs,
    segmenter: &Segmenter,
    vocabulary: &Vocabulary,
    mask: Option<&[bool]>,
) -> Result<()> {
    fs::create_dir_all(output).map_err(|e| Error::io("create the folder", output, e))?;
    vocabulary.save(output.join(VOCABULARY))?;
    if let Segmenter::Bpe(bpe) = segmenter {
        bpe.save(output.join(CODES))?;
    }
    if let Some(mask) = mask {
        let ids: Vec<u32> = (0..mask.len() as u32).filter(|id| mask[*id as usize] && *id > UNK as u32).collect();
        data::write_lines_atomic(output.join(TARGET_TYPES), vocabulary.decode(&ids))?;
    }
    let text = serde_json::to_string_pretty(configs).map_err(|e| Error::invalid(e.to_string()))?;
    // Last: a folder with a config holds a run.
    data::write_lines_atomic(output.join(CONFIG), [text])
}

/// Writes a model that was trained elsewhere as a run with one checkpoint. Its text is split already, into the pieces of
/// the file `dictionary`, which says how many types there are; `mask` is its target vocabulary.
pub fn save_model(
    output: &Path,
    model: &TransformerConfig,
    training: &TrainingConfig,
    dictionary: &Path,
    mask: Option<&[bool]>,
    parameters: &HashMap<String, Tensor>,
) -> Result<()> {
    if output.exists() {
        return Err(Error::invalid(format!("{} exists already; give a new folder", output.display())));
    }
    let vocabulary = Vocabulary::load(dictionary)?;
    if let Some(mask) = mask.filter(|mask| mask.len() != vocabulary.len()) {
        return Err(Error::invalid(format!(
            "{} has {} types and the model's target vocabulary {}: it is another model's",
            dictionary.display(),
            vocabulary.len(),
            mask.len()
        )));
    }
    let model = TransformerConfig { vocab_size: vocabulary.len() as i64, ..model.clone() };
    let built = Transformer::with_parameters(&model, parameters)?;
    let data = DataConfig { no_bpe: true, ..Default::default() };
    let config = serde_json::json!({ "model": model, "training": training });
    let configs = Configs { model, training: training.clone(), data };
    write(output, &configs, &Segmenter::Split, &vocabulary, mask)?;
    let checkpoint = Checkpoint { model: train::to_arrays(&built.parameters)?, config, ..Default::default() };
    let store = Store::open(output)?;
    store.save(0, &checkpoint)?;
    ["best", "last"].iter().try_for_each(|link| store.point(link, 0))
}

pub(super) type Resumed = (Segmenter, Vocabulary, Option<Checkpoint>);

/// What a run folder holds; no checkpoint where the run was stopped before its first. What is asked for must be the
/// run's model, cut text as it does, and have a target vocabulary if it has one.
pub(super) fn resume(
    model: &TransformerConfig,
    training: &TrainingConfig,
    data: &DataConfig,
    output: &Path,
) -> Result<Resumed> {
    let configs = read_configs(output)?;
    let vocabulary = Vocabulary::load(output.join(VOCABULARY))?;
    let wanted = TransformerConfig { vocab_size: vocabulary.len() as i64, ..model.clone() };
    let json = |config: &TransformerConfig| serde_json::to_value(config).map_err(|e| Error::invalid(e.to_string()));
    let of_text = |training: &TrainingConfig, data: &DataConfig| {
        let (operations, codes) = (data.bpe_operations, data.bpe_codes.is_some());
        serde_json::json!({"vocab_mask": training.vocab_mask, "bpe_operations": operations, "bpe_codes": codes})
    };
    for (what, differences) in [
        ("trained with another model", differences(&json(&configs.model)?, &json(&wanted)?)),
        ("trained on other text", differences(&of_text(&configs.training, &configs.data), &of_text(training, data))),
    ] {
        if !differences.is_empty() {
            return Err(Error::invalid(format!(
                "{} was {what}: {differences}; resume with the same options",
                output.display()
            )));
        }
    }
    let checkpoint = Store::open(output)?.to_resume()?.map(checkpoint::load).transpose()?;
    Ok((read_segmenter(output, &configs.data)?, vocabulary, checkpoint))
}

pub(super) fn read_configs(output: &Path) -> Result<Configs> {
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

/// How the run cuts text: by the merges that it keeps, if its options say so.
pub(super) fn read_segmenter(output: &Path, data: &DataConfig) -> Result<Segmenter> {
    match data.bpe_operations.is_some() || data.bpe_codes.is_some() {
        true => Ok(Segmenter::Bpe(Bpe::from_codes(output.join(CODES))?)),
        false => Ok(Segmenter::Split),
    }
}

/// The target vocabulary of a run, a flag for each type; none where it is the vocabulary.
pub fn target_vocabulary(output: &Path) -> Result<Option<Vec<bool>>> {
    match read_configs(output)?.training.vocab_mask {
        true => read_mask(output, &Vocabulary::load(output.join(VOCABULARY))?).map(Some),
        false => Ok(None),
    }
}

/// Its types, EOS and UNK.
pub(super) fn read_mask(output: &Path, vocabulary: &Vocabulary) -> Result<Vec<bool>> {
    let path = output.join(TARGET_TYPES);
    let text = fs::read_to_string(&path).map_err(|e| Error::io("read", &path, e))?;
    // Not as lines of text: a piece may end in a carriage return, and there may be none.
    let types: Vec<&str> = text.split_terminator('\n').collect();
    Ok(data::seen_mask(vocabulary.len(), [vocabulary.encode(&types).as_slice()]))
}

pub(super) fn remove(path: &Path, act: impl Fn(&Path) -> std::io::Result<()>) -> Result<()> {
    match act(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", path, e)),
        _ => Ok(()),
    }
}

fn last_byte(path: &Path) -> std::io::Result<Option<u8>> {
    let mut file = File::open(path)?;
    if file.metadata()?.len() == 0 {
        return Ok(None);
    }
    let mut last = [0];
    file.seek(SeekFrom::End(-1))?;
    file.read_exact(&mut last)?;
    Ok(Some(last[0]))
}

/// Appends every event to the run's log, then passes it on.
pub(super) struct Log<'a> {
    /// None: another rank writes it.
    file: Option<PathBuf>,
    observer: &'a mut dyn Observer,
}

impl<'a> Log<'a> {
    /// To the end of the file. A line that a full disk or a crash cut short stays a line of its own.
    pub(super) fn append(file: Option<PathBuf>, observer: &'a mut dyn Observer) -> Result<Self> {
        let log = Log { file, observer };
        if let Some(path) = log.file.as_ref().filter(|path| path.exists()) {
            if last_byte(path).map_err(|e| Error::io("read the log", path, e))?.is_some_and(|last| last != b'\n') {
                log.put("\n")?;
            }
        }
        Ok(log)
    }

    fn put(&self, text: &str) -> Result<()> {
        let Some(path) = &self.file else { return Ok(()) };
        let mut file =
            OpenOptions::new().create(true).append(true).open(path).map_err(|e| Error::io("open the log", path, e))?;
        file.write_all(text.as_bytes()).map_err(|e| Error::io("write the log", path, e))
    }

    fn write(&self, event: &str, value: &impl Serialize) -> Result<()> {
        let mut value = serde_json::to_value(value).map_err(|e| Error::invalid(e.to_string()))?;
        if let Some(object) = value.as_object_mut() {
            object.insert("event".into(), event.into());
        }
        self.put(&format!("{value}\n"))
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
    fn evaluating(&mut self) -> Result<()> {
        self.observer.evaluating()
    }
    fn message(&mut self, level: &str, text: &str) -> Result<()> {
        self.write("message", &serde_json::json!({ "level": level, "text": text }))?;
        self.observer.message(level, text)
    }
}
