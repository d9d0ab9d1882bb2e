//! The folder of a run: what it holds, how it begins, how it is read again, and its log.

use super::checksums::{self, CHECKSUMS};
use super::lock::Lock;
use super::Prepared;
use crate::atomic::{self, fault};
use crate::config::{differences, DataConfig, TrainingConfig, TransformerConfig};
use crate::data::{self, Bpe, Segmenter, Vocabulary};
use crate::error::{Error, Result};
use crate::model::{Transformer, UNK};
use crate::train::checkpoint::{Checkpoint, CheckpointStore, Found};
use crate::train::{self, Observer};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    New,
    Resume {
        /// The checkpoint to go on from: best, last, its name, or its update's number; none: the newest whole one.
        from: Option<String>,
    },
    Overwrite,
}

impl Mode {
    pub fn parse(word: &str, from: Option<String>) -> Result<Self> {
        match (word, from) {
            ("resume", from) => Ok(Mode::Resume { from }),
            ("new" | "overwrite", Some(from)) => Err(Error::invalid(format!(
                "from_checkpoint = {from:?} is where a run goes on: give resume, too, or leave it out"
            ))),
            ("new", None) => Ok(Mode::New),
            ("overwrite", None) => Ok(Mode::Overwrite),
            (other, _) => Err(crate::error::unknown("mode", other, ["new", "resume", "overwrite"])),
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

    /// Fills the folder, in place of an earlier run if that is wanted; all that could refuse to run has been asked before.
    pub(super) fn write(&self, output: &Path, mode: &Mode) -> Result<()> {
        fault::begin();
        if *mode == Mode::Overwrite {
            // Only what a run writes; anything else in the folder is the user's. The config first: without it, a folder
            // that was left half removed is no run that could be resumed.
            atomic::remove_file(&output.join(CONFIG))?;
            CheckpointStore::at(output).clear()?;
            atomic::remove_file(&output.join("curves.png"))?;
        } else {
            // The user may have put something there while the data were prepared.
            check_new(output)?;
        }
        write(output, &self.configs, &self.segmenter, &self.vocabulary, self.mask.as_deref())?;
        CheckpointStore::open(output).map(drop)
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

/// Refuses a folder where a new run would write over what is there. A run that was stopped while it began is no obstacle:
/// it has nothing to lose.
pub(super) fn check_new(output: &Path) -> Result<()> {
    let shown = output.display();
    if output.join(CONFIG).exists() {
        return Err(Error::invalid(format!(
            "{shown} already holds a run: --resume continues it, --overwrite starts anew, or choose another output"
        )));
    }
    let begun = checksums::listed(output);
    let is_there = |name: &&&str| output.join(name).exists() && !begun.iter().any(|begun| begun == *name);
    match FILES.iter().chain(&[CHECKSUMS, CHECKPOINTS]).find(is_there) {
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
    let mut texts = vec![(VOCABULARY, vocabulary.to_text())];
    if let Segmenter::Bpe(bpe) = segmenter {
        texts.push((CODES, bpe.to_text()));
    }
    if let Some(mask) = mask {
        let ids: Vec<u32> = (0..mask.len() as u32).filter(|id| mask[*id as usize] && *id > UNK as u32).collect();
        texts.push((TARGET_TYPES, vocabulary.decode(&ids).iter().map(|piece| format!("{piece}\n")).collect()));
    }
    let text = serde_json::to_string_pretty(configs).map_err(|e| Error::invalid(e.to_string()))?;
    // Last: a folder with a config holds a run.
    texts.push((CONFIG, text + "\n"));
    FILES.iter().try_for_each(|name| atomic::remove_file(&output.join(name)))?;
    atomic::write_file(&output.join(CHECKSUMS), checksums::text(&texts).as_bytes())?;
    texts.iter().try_for_each(|(name, text)| atomic::write_file(&output.join(name), text.as_bytes()))
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
    let is_begun = !checksums::listed(output).is_empty() && !output.join(CONFIG).exists();
    if output.exists() && !is_begun {
        return Err(Error::invalid(format!("{} exists already; give a new folder", output.display())));
    }
    let _lock = Lock::take(output)?;
    check_new(output)?;
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
    let store = CheckpointStore::open(output)?;
    store.save(0, &checkpoint)?;
    ["best", "last"].iter().try_for_each(|link| store.point(link, 0))
}

/// What a run goes on with.
pub(super) struct Resumed {
    pub segmenter: Segmenter,
    pub vocabulary: Vocabulary,
    /// None where the run was stopped before it had saved one.
    pub found: Option<Found>,
}

/// What a run folder holds. What is asked for must be the run's model, cut text as it does, and have a target vocabulary
/// if it has one. `from`: the checkpoint, where not the newest whole one.
pub(super) fn resume(
    model: &TransformerConfig,
    training: &TrainingConfig,
    data: &DataConfig,
    output: &Path,
    from: Option<&str>,
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
    let store = CheckpointStore::at(output);
    let found = match from {
        Some(from) => Some(store.chosen(from)?),
        None => store.newest()?,
    };
    if found.is_none() && has_saved(output)? {
        return Err(Error::invalid(format!(
            "{} holds no checkpoint, and {LOG} says that the run has saved some: restore the folder from a copy, or start \
             again with --overwrite",
            output.join(CHECKPOINTS).display()
        )));
    }
    Ok(Resumed { segmenter: read_segmenter(output, &configs.data)?, vocabulary, found })
}

/// Whether the log tells of a checkpoint. Earlier versions do not log that, but save after an evaluation before they log
/// another update or the end. A warning after it may come from a run that found no checkpoint.
fn has_saved(output: &Path) -> Result<bool> {
    let path = output.join(LOG);
    let text = match fs::read(&path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        read => read.map_err(|e| Error::io("read the log", &path, e))?,
    };
    let lines = text.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok());
    let mut is_evaluated = false;
    Ok(lines.into_iter().any(|line: serde_json::Value| {
        let before = std::mem::replace(&mut is_evaluated, line["event"] == "evaluated");
        line["event"] == "saved" || before && (line["event"] == "updated" || line["level"] == "info")
    }))
}

/// The run's options, once its files are known to be whole.
pub(super) fn read_configs(output: &Path) -> Result<Configs> {
    let path = output.join(CONFIG);
    if !path.exists() {
        return Err(Error::invalid(format!(
            "{} holds no model: expected the output folder of a training run, with its {CONFIG}",
            output.display()
        )));
    }
    checksums::check(output)?;
    let text = fs::read_to_string(&path).map_err(|e| Error::io("read", &path, e))?;
    crate::config::from_json(&path.display().to_string(), &text)
}

/// Refuses a run's folder whose files are damaged; a folder without a run is left to others.
pub fn check(output: &Path) -> Result<()> {
    match output.join(CONFIG).exists() {
        true => checksums::check(output),
        false => Ok(()),
    }
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
        self.file.as_deref().map_or(Ok(()), |path| atomic::append(path, text))
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
    fn saved(&mut self, v: &train::Saved) -> Result<()> {
        self.write("saved", v)?;
        self.observer.saved(v)
    }
    fn between(&mut self) -> Result<()> {
        self.observer.between()
    }
    fn message(&mut self, level: &str, text: &str) -> Result<()> {
        self.write("message", &serde_json::json!({ "level": level, "text": text }))?;
        self.observer.message(level, text)
    }
}
