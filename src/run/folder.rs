//! The folder of a run: which files it has, how they are written and read, and the log.

use super::lock::Lock;
use super::PreparedData;
use crate::atomic::{self, fault};
use crate::config::resume::{changes, OptionChange};
use crate::config::{DataConfig, TrainingConfig, TransformerConfig};
use crate::data::{self, Bpe, Segmenter, Vocabulary};
use crate::error::{Error, Result};
use crate::model::{Transformer, UNK};
use crate::ownership::{
    self, checksums, is_a_runs_name, CHECKPOINTS, CHECKSUMS, CODES, CONFIG, LISTED, LOG, TARGET_TYPES, VOCABULARY,
};
use crate::train::checkpoint::{Best, Checkpoint, CheckpointStore, ResumePoint};
use crate::train::{self, Observer};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use tch::Tensor;

/// The maximum size of config.json in bytes, for writers and readers; equal to Python's `text.SMALL`.
pub(super) const CONFIG_BYTES: u64 = 4 << 20;
/// The maximum size in bytes of a run's other text files. A longer file is damaged or malicious.
const TEXT_BYTES: u64 = 4 << 30;

/// The behaviour of training if the output folder already holds a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Refuses a folder that holds a run.
    New,
    /// Continues the run in the folder.
    Resume {
        /// The checkpoint from which to continue: `best`, `last`, a checkpoint's name, or an update's number. `None`
        /// means the newest complete one.
        from: Option<String>,
    },
    /// Replaces the run in the folder.
    Overwrite,
}

impl Mode {
    /// Parses `new`, `resume` or `overwrite`. `from` is the checkpoint from which to resume; the other modes refuse it.
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

/// The options of a run, as config.json stores them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Configs {
    pub model: TransformerConfig,
    pub training: TrainingConfig,
    pub data: DataConfig,
}

impl Configs {
    /// Returns the options in `config`, which was read from the checkpoint at `path`. They may differ from `self`, the
    /// options in config.json, because a resume may change options.
    pub(super) fn of_checkpoint(&self, path: &Path, config: &Value) -> Result<Self> {
        // Parses the options of one part: the model, the training or the data.
        fn read<T: DeserializeOwned>(path: &Path, options: &Value) -> Result<T> {
            crate::config::from_json(&path.display().to_string(), &options.to_string())
        }
        Ok(Configs {
            model: read(path, &config["model"])?,
            training: read(path, &config["training"])?,
            // Checkpoints of earlier versions have no data options, so those of config.json are used.
            data: config.get("data").map_or(Ok(self.data.clone()), |data| read(path, data))?,
        })
    }

    /// Returns the options of the model, the training and the data.
    fn parts(&self) -> (&TransformerConfig, &TrainingConfig, &DataConfig) {
        (&self.model, &self.training, &self.data)
    }

    /// Returns the text of config.json.
    ///
    /// # Errors
    /// `Invalid` if the text is longer than readers accept.
    pub(super) fn to_text(&self) -> Result<String> {
        let text = serde_json::to_string_pretty(self).map_err(|e| Error::invalid(e.to_string()))? + "\n";
        match text.len() as u64 <= CONFIG_BYTES {
            true => Ok(text),
            false => Err(Error::invalid(format!(
                "{CONFIG} would have {} bytes, expected at most {CONFIG_BYTES}: a scheme or norm gives its initial values \
                 as long lists; give one number, or schemes.Normal, for each parameter",
                text.len()
            ))),
        }
    }
}

/// The contents that a new run's folder begins with.
pub(super) struct Beginning {
    configs: Configs,
    segmenter: Segmenter,
    vocabulary: Vocabulary,
    /// The target vocabulary, as a flag for each vocabulary entry; `None` if every entry is in it.
    mask: Option<Vec<bool>>,
}

impl Beginning {
    /// Builds the contents. Moves the segmenter out of `prepared`, because training no longer needs it; `Split` takes
    /// its place.
    pub(super) fn of(prepared: &mut PreparedData, training: &TrainingConfig, config: &DataConfig) -> Self {
        Beginning {
            configs: Configs { model: prepared.model.clone(), training: training.clone(), data: config.clone() },
            segmenter: std::mem::replace(&mut prepared.segmenter, Segmenter::Split),
            vocabulary: prepared.vocabulary.clone(),
            mask: prepared.mask.clone(),
        }
    }

    /// Errors if the options are too long for config.json. To be called before any work is done.
    pub(super) fn check(model: &TransformerConfig, training: &TrainingConfig, data: &DataConfig) -> Result<()> {
        Configs { model: model.clone(), training: training.clone(), data: data.clone() }.to_text().map(drop)
    }

    /// Writes the contents into the folder, in place of an earlier run if `mode` is Overwrite. All checks that could
    /// refuse the run have been made before.
    pub(super) fn write(&self, output: &Path, mode: &Mode) -> Result<()> {
        // For tests that inject failures: a new operation begins here.
        fault::begin();
        // The user may have put something into the folder while the data were prepared.
        check_beginning(output, mode)?;
        if *mode == Mode::Overwrite {
            // The config is removed first. Without a config, a half-removed folder does not count as a run, so nobody
            // can resume it.
            atomic::remove_file(&output.join(CONFIG))?;
            CheckpointStore::at(output).clear()?;
        }
        let old_files =
            ownership::found(output).into_iter().filter(|(path, is_runs)| *is_runs && path.parent() == Some(output));
        // The checksums stay until `write` replaces them, because they prove that the folder is a run's.
        for (path, _) in old_files.filter(|(path, _)| !path.ends_with(CHECKSUMS)) {
            atomic::remove_file(&path)?;
        }
        write(output, &self.configs, &self.segmenter, &self.vocabulary, self.mask.as_deref())?;
        // A killed run may have left unfinished files. They are removed only now, because the checksums prove that the
        // folder is a run's.
        atomic::clean(output, is_a_runs_name)?;
        CheckpointStore::open(output).map(drop)
    }
}

/// Errors if a new run would overwrite files that no run wrote, or, without Overwrite, an earlier run. A run that was
/// stopped before it wrote its config has nothing to lose, so a new run may overwrite its files.
pub(super) fn check_beginning(output: &Path, mode: &Mode) -> Result<()> {
    let shown = output.display();
    check_checkpoints(output)?;
    // Pairs (path, true if a run wrote it).
    let existing = ownership::found(output);
    if *mode == Mode::New && existing.iter().any(|(path, is_runs)| *is_runs && path.ends_with(CONFIG)) {
        return Err(Error::invalid(format!(
            "{shown} already holds a run: --resume continues it, --overwrite starts anew, or choose another output"
        )));
    }
    if let Some((path, _)) = existing.iter().find(|(_, is_runs)| !is_runs) {
        let proof =
            if checksums::listed(output).is_empty() { ", and no whole checksums.txt says that a run did" } else { "" };
        return Err(Error::invalid(format!(
            "{shown} holds {}, which no run wrote{proof}: a run would write over it; choose another output, or move it away",
            path.strip_prefix(output).unwrap_or(path).display()
        )));
    }
    if *mode == Mode::Overwrite {
        return Ok(());
    }
    // True for the files that a run writes before its config.
    let precedes_config = |path: &Path| {
        path.file_name()
            .is_some_and(|name| name != CONFIG && (name == CHECKSUMS || LISTED.iter().any(|listed| name == *listed)))
    };
    match existing.iter().find(|(path, _)| !precedes_config(path)) {
        Some((path, _)) => Err(Error::invalid(format!(
            "{shown} holds {} of an earlier run, which a new one would write over: --overwrite removes it, or choose \
             another output",
            path.strip_prefix(output).unwrap_or(path).display()
        ))),
        None => Ok(()),
    }
}

/// Errors if `checkpoints` is not a folder, or if files of the user have the names of a run's links.
pub(super) fn check_checkpoints(output: &Path) -> Result<()> {
    let path = output.join(CHECKPOINTS);
    if path.symlink_metadata().is_ok() && std::fs::read_dir(&path).is_err() {
        return Err(Error::invalid(format!(
            "{} is no folder that can be read (a link to a disk that is not mounted?): mount the disk, or move it away",
            path.display()
        )));
    }
    let is_taken = |path: &PathBuf| path.symlink_metadata().is_ok() && !ownership::is_runs(path);
    match ownership::NAMES.map(|name| path.join(name)).iter().find(|path| is_taken(path)) {
        Some(taken) => Err(Error::invalid(format!(
            "{shown} holds {}, which no run wrote: a run would write over it; choose another output, or move it away",
            taken.strip_prefix(output).unwrap_or(taken).display(),
            shown = output.display()
        ))),
        None => Ok(()),
    }
}

/// Writes the text files of a run, and before them the checksums that prove they belong to the run. `mask` is the
/// target vocabulary; `None` if every vocabulary entry is in it.
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
        // The special entries, up to UNK, are left out: `read_mask` adds those that a model may predict.
        let ids: Vec<u32> = (0..mask.len() as u32).filter(|id| mask[*id as usize] && *id > UNK as u32).collect();
        texts.push((TARGET_TYPES, vocabulary.decode(&ids).iter().map(|piece| format!("{piece}\n")).collect()));
    }
    // The config is written last: a folder counts as a run if it has a config.
    texts.push((CONFIG, configs.to_text()?));
    atomic::write_file(&output.join(CHECKSUMS), checksums::text(&texts).as_bytes())?;
    texts.iter().try_for_each(|(name, text)| atomic::write_file(&output.join(name), text.as_bytes()))
}

/// Writes a model that was trained elsewhere as a run with one checkpoint. Its text must already be split into the
/// pieces of the file `dictionary`, which determines the size of the vocabulary. `mask` is the target vocabulary.
pub fn save_model(
    output: &Path,
    model: &TransformerConfig,
    training: &TrainingConfig,
    dictionary: &Path,
    mask: Option<&[bool]>,
    parameters: &BTreeMap<String, Tensor>,
) -> Result<()> {
    // A folder with checksums but no config is left of an earlier call that was stopped, so this call may begin again.
    let is_begun = !checksums::listed(output).is_empty() && !output.join(CONFIG).exists();
    if output.exists() && !is_begun {
        return Err(Error::invalid(format!("{} exists already; give a new folder", output.display())));
    }
    let _lock = Lock::take(output)?;
    check_beginning(output, &Mode::New)?;
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
    let config = serde_json::json!({ "model": model, "training": training, "data": data });
    let configs = Configs { model, training: training.clone(), data };
    write(output, &configs, &Segmenter::Split, &vocabulary, mask)?;
    let checkpoint = Checkpoint { model: train::to_arrays(&built.parameters)?, config, ..Default::default() };
    CheckpointStore::open(output)?.save(0, &checkpoint, Best::This).map(drop)
}

/// The state from which a run continues.
pub(super) struct ResumeState {
    pub segmenter: Segmenter,
    pub vocabulary: Vocabulary,
    /// The checkpoint from which the run continues; `None` if the run was stopped before it saved one.
    pub resume_point: Option<ResumePoint>,
    /// The options that differ from the checkpoint's.
    pub changes: Vec<OptionChange>,
}

/// Reads a run's folder. Errors if the options do not fit the run's model, segment text in another way, or ask for a
/// target vocabulary that the run does not have. `from` is the checkpoint, by default the newest complete one.
pub(super) fn resume(
    model: &TransformerConfig,
    training: &TrainingConfig,
    data: &DataConfig,
    output: &Path,
    from: Option<&str>,
) -> Result<ResumeState> {
    let stored = read_configs(output)?;
    let vocabulary = read_vocabulary(output)?;
    let segmenter = read_segmenter(output, &stored.data)?;
    let store = CheckpointStore::at(output);
    let resume_point = match from {
        Some(from) => Some(store.chosen(from)?),
        None => store.newest()?,
    };
    // The checkpoint's options count, because an earlier resume may have trained with others than config.json's.
    let before = match &resume_point {
        Some(point) => stored.of_checkpoint(&point.path, &point.checkpoint.config)?,
        None => stored,
    };
    // The options do not have the size of the vocabulary, so the run's is filled in.
    let wanted = TransformerConfig { vocab_size: vocabulary.len() as i64, ..model.clone() };
    let changes = changes(before.parts(), (&wanted, training, data))
        .map_err(|e| Error::invalid(format!("{} {e}", output.display())))?;
    check_codes(output, data, &segmenter)?;
    if resume_point.is_none() && has_saved(output)? {
        return Err(Error::invalid(format!(
            "{} holds no checkpoint, and {LOG} says that the run has saved some: restore the folder from a copy, or start \
             again with --overwrite",
            output.join(CHECKPOINTS).display()
        )));
    }
    Ok(ResumeState { segmenter, vocabulary, resume_point, changes })
}

/// Errors if the options name other merges than those of `own`, the run's segmenter. If the file `bpe_codes` no longer
/// exists, the run's own copy is used without a check.
fn check_codes(output: &Path, data: &DataConfig, own: &Segmenter) -> Result<()> {
    let refuse = |what: &str| {
        Err(Error::invalid(format!(
            "{} was trained on other text: {what}; resume with the same options",
            output.display()
        )))
    };
    match (&data.bpe_codes, own) {
        (Some(codes), Segmenter::Split) => refuse(&format!("it has no merges, and bpe_codes is {codes}")),
        (Some(codes), Segmenter::Bpe(own))
            if Path::new(codes).exists() && own.to_text() != Bpe::from_codes(codes)?.to_text() =>
        {
            refuse(&format!("the merges of bpe_codes {codes} are not those of its {CODES}"))
        }
        (None, Segmenter::Bpe(_)) if data.bpe_operations.is_none() => refuse("it has merges, and now none are named"),
        _ => Ok(()),
    }
}

/// Returns the options stored in a run's checkpoint `from`, by default the newest one; null if none can be read.
pub fn options(output: &Path, from: Option<&str>) -> Result<Value> {
    Ok(CheckpointStore::at(output).options(from)?.map_or(Value::Null, |(_, options)| options))
}

/// Returns true if the log says that a checkpoint has been saved.
fn has_saved(output: &Path) -> Result<bool> {
    let path = output.join(LOG);
    let Some(text) = atomic::read(&path, TEXT_BYTES)? else { return Ok(false) };
    let mut lines = text.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok());
    Ok(lines.any(|line: Value| line["event"] == "saved"))
}

/// Returns the options of the run, after checking that its files are undamaged.
pub(super) fn read_configs(output: &Path) -> Result<Configs> {
    let path = output.join(CONFIG);
    let Some(text) = atomic::read(&path, CONFIG_BYTES)? else {
        return Err(Error::invalid(format!(
            "{} holds no model: expected the output folder of a training run, with its {CONFIG}",
            output.display()
        )));
    };
    checksums::check(output)?;
    let text = String::from_utf8(text).map_err(|e| Error::invalid(format!("{}: {e}", path.display())))?;
    crate::config::from_json(&path.display().to_string(), &text)
}

/// Reads one of the run's text files, and returns its path and content. Symbolic links are not followed, because the
/// folder may belong to another user.
fn read_own(output: &Path, name: &str) -> Result<(PathBuf, Vec<u8>)> {
    let path = output.join(name);
    let missing = || Error::io("read", &path, std::io::ErrorKind::NotFound.into());
    // `atomic::read` returns `None` for a file that does not exist.
    let bytes = atomic::read(&path, TEXT_BYTES)?.ok_or_else(missing)?;
    Ok((path, bytes))
}

/// Returns the path and the lines of one of the run's text files.
fn lines_of(output: &Path, name: &str) -> Result<(PathBuf, Vec<String>)> {
    let (path, bytes) = read_own(output, name)?;
    let lines = data::lines_of(&path, &bytes, &mut || Ok(()))?;
    Ok((path, lines))
}

/// Returns the run's vocabulary.
pub(super) fn read_vocabulary(output: &Path) -> Result<Vocabulary> {
    let (path, lines) = lines_of(output, VOCABULARY)?;
    Vocabulary::from_lines(&path, &lines)
}

/// Errors if a file in a run's folder is damaged. A folder without a run is accepted.
pub fn check(output: &Path) -> Result<()> {
    match output.join(CONFIG).exists() {
        true => checksums::check(output),
        false => Ok(()),
    }
}

/// Returns the run's segmenter. It has the merges stored in the folder if the options ask for merges.
pub(super) fn read_segmenter(output: &Path, data: &DataConfig) -> Result<Segmenter> {
    match data.bpe_operations.is_some() || data.bpe_codes.is_some() {
        true => {
            let (path, lines) = lines_of(output, CODES)?;
            Ok(Segmenter::Bpe(Bpe::from_lines(&path, &lines)?))
        }
        false => Ok(Segmenter::Split),
    }
}

/// Returns a run's target vocabulary as a flag for each vocabulary entry; `None` if every entry is in it.
pub fn target_vocabulary(output: &Path) -> Result<Option<Vec<bool>>> {
    match read_configs(output)?.training.vocab_mask {
        true => read_mask(output, &read_vocabulary(output)?).map(Some),
        false => Ok(None),
    }
}

/// Returns the run's target vocabulary as a mask: its target pieces, EOS and UNK are true.
pub(super) fn read_mask(output: &Path, vocabulary: &Vocabulary) -> Result<Vec<bool>> {
    let (path, bytes) = read_own(output, TARGET_TYPES)?;
    let text = String::from_utf8(bytes).map_err(|e| Error::invalid(format!("{}: {e}", path.display())))?;
    // The text is split at `\n` only, because a piece may end in a carriage return. The text may be empty.
    let types: Vec<&str> = text.split_terminator('\n').collect();
    Ok(data::seen_mask(vocabulary.len(), [vocabulary.encode(&types).as_slice()]))
}

/// Returns the last byte of a file; `None` if the file is empty.
fn last_byte(path: &Path) -> Result<Option<u8>> {
    let mut file = atomic::open(path, File::options().read(true))?;
    let mut last = [0];
    // The closure collects the I/O errors, which all get the same message.
    let mut read = || {
        if file.metadata()?.len() == 0 {
            return Ok(None);
        }
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
        Ok(Some(last[0]))
    };
    read().map_err(|e| Error::io("read the log", path, e))
}

/// An observer that appends every event to the run's log, and then passes it on to another observer.
pub(super) struct Log<'a> {
    /// The log file; `None` if this rank does not write it.
    file: Option<PathBuf>,
    observer: &'a mut dyn Observer,
}

impl<'a> Log<'a> {
    /// Opens the log, to append at the end of the file. If a full disk or a crash has cut the last line short, the
    /// next event begins on a new line.
    pub(super) fn append(file: Option<PathBuf>, observer: &'a mut dyn Observer) -> Result<Self> {
        let log = Log { file, observer };
        if let Some(path) = log.file.as_ref().filter(|path| path.symlink_metadata().is_ok()) {
            if last_byte(path)?.is_some_and(|last| last != b'\n') {
                log.put("\n")?;
            }
        }
        Ok(log)
    }

    /// Appends the text to the log; does nothing if another rank writes the log.
    fn put(&self, text: &str) -> Result<()> {
        self.file.as_deref().map_or(Ok(()), |path| atomic::append(path, text))
    }

    /// Appends one event to the log, as a JSON object on a line.
    fn write(&self, event: &str, value: &impl Serialize) -> Result<()> {
        let mut value = serde_json::to_value(value).map_err(|e| Error::invalid(e.to_string()))?;
        if let Some(object) = value.as_object_mut() {
            object.insert("event".into(), event.into());
        }
        self.put(&format!("{value}\n"))
    }
}

impl Observer for Log<'_> {
    fn started(&mut self, event: &train::Started) -> Result<()> {
        self.write("started", event)?;
        self.observer.started(event)
    }
    fn updated(&mut self, event: &train::Update) -> Result<()> {
        self.write("updated", event)?;
        self.observer.updated(event)
    }
    fn evaluated(&mut self, event: &train::Evaluation) -> Result<()> {
        self.write("evaluated", event)?;
        self.observer.evaluated(event)
    }
    fn saved(&mut self, event: &train::Saved) -> Result<()> {
        self.write("saved", event)?;
        self.observer.saved(event)
    }
    fn check_interrupt(&mut self) -> Result<()> {
        self.observer.check_interrupt()
    }
    fn message(&mut self, level: &str, text: &str) -> Result<()> {
        self.write("message", &serde_json::json!({ "level": level, "text": text }))?;
        self.observer.message(level, text)
    }
}
