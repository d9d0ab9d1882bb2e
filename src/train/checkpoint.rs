//! Checkpoints: each is one folder, which is complete or absent. Reading a checkpoint executes no code.
//!
//! | file | holds |
//! |---|---|
//! | `model.safetensors` | parameters and running statistics, by canonical name |
//! | `optimizer.safetensors` | moments and other state of the optimizer |
//! | `config.json` | the options of the model, its training and its data |
//! | `state.json` | format version, update, length and CRC-32 of the files above, the training state, its own CRC-32 |
//!
//! [`CheckpointStore`] manages a run's checkpoints. A checkpoint's folder gets its name when it is complete, and
//! never changes afterwards. Its `state.json` records which checkpoint was the best at that time, so a reader always
//! finds a complete checkpoint.

mod arrays;
mod average;
mod store;
mod tensors;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use flate2::Crc;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use arrays::{Array, Arrays, Bytes};
pub use average::average;
pub use safetensors::Dtype;
pub use store::{Best, CheckpointStore, ResumePoint};
pub use tensors::{load_parameters, to_array, to_arrays, to_tensor};

use crate::atomic::{self, Digest};
use crate::error::{Error, Result};
use crate::ownership::{KIND, NAMES, STATE, STATE_BYTES};

/// The format that this version writes; a checkpoint of a later format is refused.
pub const FORMAT_VERSION: u32 = 1;

/// The program that wrote a checkpoint, as its `state.json` names it.
const WRITER: &str = concat!("normformer_rs ", env!("CARGO_PKG_VERSION"));
const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const CONFIG: &str = "config.json";

/// Everything from which a run continues or a model is loaded.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Checkpoint {
    /// Parameters and running statistics, under their canonical names.
    pub model: Arrays,
    /// The optimizer's state, such as moments; empty in an averaged or converted checkpoint.
    pub optimizer: Arrays,
    /// The state of the run, such as its counters, position in the data and best score. JSON has no infinity and no
    /// NaN, so the state must not have them.
    pub state: Value,
    /// The options under the keys `model`, `training` and `data`.
    pub config: Value,
}

/// `state.json` without its last line, which is the CRC-32 of everything before it.
#[derive(Serialize, Deserialize)]
struct Manifest {
    kind: String,
    format_version: u32,
    written_by: String,
    update: u64,
    /// The record of this save; `None` outside a run's folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    saving: Option<Saving>,
    files: BTreeMap<String, Digest>,
    state: Value,
}

/// The record of one save of a run. All records together determine which checkpoint is `best` and which is `last`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Saving {
    /// The number of the save, from 1.
    number: u64,
    /// The name of the best checkpoint at the time of the save; `None` before the first evaluation.
    best: Option<String>,
}

/// Writes the checkpoint of update `update` to the folder `path`, which must not exist.
///
/// Errors if an array's data do not fill its shape, if `path` exists, or if a file operation fails. After an error
/// nothing is left at `path`, unless only the final flush of its parent folder has failed.
pub fn save(path: &Path, update: u64, checkpoint: &Checkpoint) -> Result<()> {
    save_at(path, update, checkpoint, None)
}

/// Writes a checkpoint's files. `state.json` is written last, because it has the checksums of the other files and of
/// itself.
fn save_at(path: &Path, update: u64, checkpoint: &Checkpoint, saving: Option<Saving>) -> Result<()> {
    arrays::check(&checkpoint.model)?;
    arrays::check(&checkpoint.optimizer)?;
    atomic::write_directory(path, |folder| {
        let config = json(&checkpoint.config)? + "\n";
        let digests = BTreeMap::from([
            (MODEL.into(), folder.file(MODEL, |sink| arrays::write(sink, &checkpoint.model))?),
            (OPTIMIZER.into(), folder.file(OPTIMIZER, |sink| arrays::write(sink, &checkpoint.optimizer))?),
            (CONFIG.into(), folder.file(CONFIG, |sink| sink.put(config.as_bytes()))?),
        ]);
        let manifest = Manifest {
            kind: KIND.into(),
            format_version: FORMAT_VERSION,
            written_by: WRITER.into(),
            update,
            saving,
            files: digests,
            state: checkpoint.state.clone(),
        };
        let text = json(&manifest)?;
        // The CRC-32 becomes the object's last entry: `last_line` writes it, and then the closing brace.
        let body = format!("{},\n", text.strip_suffix("\n}").unwrap_or(&text));
        folder.file(STATE, |sink| sink.put((body.clone() + &last_line(&body)).as_bytes()))?;
        Ok(())
    })
}

/// Writes arrays and text files for other programs to the folder `path`, which must not exist. The folder is not a
/// checkpoint.
pub fn write_arrays(path: &Path, arrays: &Arrays, texts: &BTreeMap<String, String>) -> Result<()> {
    arrays::check(arrays)?;
    atomic::write_directory(path, |folder| {
        folder.file(MODEL, |sink| arrays::write(sink, arrays))?;
        texts.iter().try_for_each(|(name, text)| folder.file(name, |sink| sink.put(text.as_bytes())).map(drop))
    })
}

/// Reads a checkpoint from its folder, a link to it, or a run's folder (its best one, or else its last).
///
/// # Errors
/// Errors if the checkpoint is missing (the message lists what exists), if the folder is not a checkpoint, if a file
/// is truncated or damaged (the message names the file and the lengths), or if the format is a later one. Lengths are
/// checked before memory is allocated.
pub fn load(path: impl AsRef<Path>) -> Result<Checkpoint> {
    read_resolved(path.as_ref(), |folder| {
        let manifest = Manifest::read(folder)?;
        Ok(Checkpoint {
            model: arrays::read(&folder.join(MODEL), manifest.digest(folder, MODEL)?)?,
            optimizer: arrays::read(&folder.join(OPTIMIZER), manifest.digest(folder, OPTIMIZER)?)?,
            config: manifest.config(folder)?,
            state: manifest.state,
        })
    })
}

/// Reads the state and the configuration of a checkpoint, in the same way as [`load`].
pub fn load_state(path: impl AsRef<Path>) -> Result<(Value, Value)> {
    read_resolved(path.as_ref(), |folder| {
        let manifest = Manifest::read(folder)?;
        let config = manifest.config(folder)?;
        Ok((manifest.state, config))
    })
}

/// Reads the arrays and the configuration of a model, in the same way as [`load`]. The optimizer's file may be
/// missing.
pub fn load_model(path: impl AsRef<Path>) -> Result<(Arrays, Value)> {
    read_resolved(path.as_ref(), |folder| {
        let manifest = Manifest::read(folder)?;
        Ok((arrays::read(&folder.join(MODEL), manifest.digest(folder, MODEL)?)?, manifest.config(folder)?))
    })
}

/// Returns true if a later version wrote the checkpoint. Then the checkpoint is not damaged, but this version cannot
/// read it.
fn is_of_later_format(folder: &Path) -> bool {
    let text = atomic::read(&folder.join(STATE), STATE_BYTES).ok().flatten();
    let value: Option<Value> = text.and_then(|text| serde_json::from_slice(&text).ok());
    let version = value.and_then(|value| value["format_version"].as_u64());
    version.is_some_and(|version| version > FORMAT_VERSION.into())
}

/// Reads the folder to which `path` leads. If reading fails because a link at `path` has changed meanwhile, reads
/// again.
fn read_resolved<T>(path: &Path, read: impl Fn(&Path) -> Result<T>) -> Result<T> {
    loop {
        let folder = directory(path)?;
        match read(&folder) {
            Err(_) if directory(path).is_ok_and(|now| now != folder) => continue,
            result => return result,
        }
    }
}

/// Returns the checkpoint's own folder, for a path to a checkpoint, to a run's link `best` or `last`, or to a run.
fn directory(path: &Path) -> Result<PathBuf> {
    let real = real_folder(path).or_else(|| {
        // A run's link may be missing. Then the records of the run's saves say where it would lead.
        let name = path.file_name()?.to_str()?;
        let run = path.parent()?.parent()?;
        NAMES.contains(&name).then(|| CheckpointStore::at(run).named(name)).flatten()
    });
    // If `path` is a run's folder, its best checkpoint is meant, or else its last: the order of `NAMES`.
    let of_a_run = || NAMES.iter().find_map(|name| CheckpointStore::at(path).named(name));
    let real = real.or_else(of_a_run);
    let shown = path.display();
    real.ok_or_else(|| match fs::metadata(path) {
        Ok(m) if m.is_dir() => {
            Error::invalid(format!("{shown} is not a checkpoint: expected {STATE} in it, found {}", names_in(path)))
        }
        Ok(_) => Error::invalid(format!("{shown} is a file; expected a checkpoint's folder, with {STATE} in it")),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
            Error::invalid(format!("there is no checkpoint {shown}; {} holds {}", parent.display(), names_in(parent)))
        }
        Err(e) => Error::io("read", path, e),
    })
}

/// Returns the real folder of the checkpoint at `place`, after following links; `None` if there is no checkpoint.
/// Resolving a link takes several system calls. If the link changes between two calls and its old target is pruned, the
/// function tries again.
fn real_folder(place: &Path) -> Option<PathBuf> {
    loop {
        let link = fs::read_link(place).ok();
        match fs::canonicalize(place) {
            Ok(folder) if folder.join(STATE).symlink_metadata().is_ok() => return Some(folder),
            Ok(_) | Err(_) if fs::read_link(place).ok() != link => continue,
            Ok(_) | Err(_) => return None,
        }
    }
}

/// Lists the names in a folder, at most 20, for an error message. Hidden files are left out.
fn names_in(folder: &Path) -> String {
    let Ok(entries) = fs::read_dir(folder) else { return "nothing: there is no such folder".into() };
    let names = entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> = names.filter(|n| !n.starts_with('.')).collect();
    names.sort();
    match names.len() {
        0 => "nothing".into(),
        n if n > 20 => format!("{}, … ({n} in all)", names[..20].join(", ")),
        _ => names.join(", "),
    }
}

impl Manifest {
    /// Reads a checkpoint's `state.json`. Errors if the file is damaged, of another kind or of a later format.
    fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(STATE);
        let missing = || Error::io("read", &path, io::ErrorKind::NotFound.into());
        let text = match atomic::read(&path, STATE_BYTES) {
            // `Invalid` means that the file is longer than any state, or no regular file.
            Err(Error::Invalid(why)) => return Err(damaged(&path, why)),
            read => read?.ok_or_else(missing)?,
        };
        let value: Value = serde_json::from_slice(&text)
            .map_err(|e| damaged(&path, format!("{} bytes found are not whole JSON ({e})", text.len())))?;
        if value["kind"] != KIND {
            let found = &value["kind"];
            return Err(Error::invalid(format!("{} is no {KIND}: its kind is {found}", folder.display())));
        }
        // The version is checked first, because everything else may differ in a later format.
        if let Some(version) = value["format_version"].as_u64().filter(|&v| v > FORMAT_VERSION.into()) {
            let writer = value["written_by"].as_str().unwrap_or("a later normformer_rs");
            return Err(Error::invalid(format!(
                "{} is in checkpoint format {version}, written by {writer}; this is {WRITER}, which reads formats up to \
                 {FORMAT_VERSION}: upgrade normformer_rs to read it",
                folder.display()
            )));
        }
        // The last entry of the object is the CRC-32 of everything before its line, which begins behind a newline.
        const CRC_KEY: &[u8] = b"\"crc32\": ";
        let newline = text
            .windows(CRC_KEY.len())
            .rposition(|window| window == CRC_KEY)
            .and_then(|key| text[..key].iter().rposition(|&byte| byte == b'\n'));
        let (body, last) = text.split_at(newline.map_or(0, |newline| newline + 1));
        if last != last_line(body).as_bytes() {
            return Err(damaged(&path, "its CRC-32 is not the one in its last line".into()));
        }
        serde_json::from_value(value).map_err(|e| damaged(&path, e.to_string()))
    }

    /// True if the file of the weights has the length that the manifest lists; the file is not read.
    fn has_weights(&self, folder: &Path) -> bool {
        let length = folder.join(MODEL).symlink_metadata().ok().map(|metadata| metadata.len());
        length.is_some() && length == self.files.get(MODEL).map(|digest| digest.bytes)
    }

    /// Returns the length and the CRC-32 that the manifest lists for the file `name`.
    fn digest(&self, folder: &Path, name: &str) -> Result<Digest> {
        let missing = || damaged(&folder.join(STATE), format!("it does not list {name}"));
        self.files.get(name).copied().ok_or_else(missing)
    }

    /// Reads the options in the checkpoint's `config.json`, after checking the file's length and CRC-32.
    fn config(&self, folder: &Path) -> Result<Value> {
        let path = folder.join(CONFIG);
        let mut file = CheckedFile::open(&path, self.digest(folder, CONFIG)?)?;
        let text = file.take(file.expected.bytes)?;
        file.finish()?;
        serde_json::from_slice(&text).map_err(|e| damaged(&path, e.to_string()))
    }
}

/// A file of the expected length whose CRC-32 is computed while it is read.
struct CheckedFile<'a> {
    path: &'a Path,
    file: File,
    expected: Digest,
    crc: Crc,
}

impl<'a> CheckedFile<'a> {
    /// Opens a file. Errors if its length is not the expected one.
    fn open(path: &'a Path, expected: Digest) -> Result<Self> {
        let file = atomic::open(path, File::options().read(true)).map_err(|e| match e {
            Error::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                let folder = path.parent().unwrap_or(Path::new("."));
                Error::invalid(format!("{} is missing; its folder holds {}", path.display(), names_in(folder)))
            }
            other => other,
        })?;
        let found = file.metadata().map_err(|e| Error::io("read", path, e))?.len();
        if found != expected.bytes {
            return Err(damaged(path, format!("expected {} bytes, found {found}", expected.bytes)));
        }
        Ok(CheckedFile { path, file, expected, crc: Crc::new() })
    }

    /// Reads the next `bytes` bytes, and adds them to the CRC-32. The caller must have checked that the file has as
    /// many left.
    fn take(&mut self, bytes: u64) -> Result<Vec<u8>> {
        let mut data = vec![0; usize::try_from(bytes).map_err(|e| damaged(self.path, e.to_string()))?];
        self.file.read_exact(&mut data).map_err(|e| Error::io("read", self.path, e))?;
        self.crc.update(&data);
        Ok(data)
    }

    /// Errors if the bytes that were read do not have the expected CRC-32.
    fn finish(self) -> Result<()> {
        let (found, expected) = (self.crc.sum(), self.expected.crc32);
        if found != expected {
            return Err(damaged(self.path, format!("expected CRC-32 {expected:08x}, found {found:08x}")));
        }
        Ok(())
    }
}

/// Returns the error for a damaged file of a checkpoint.
fn damaged(path: &Path, why: String) -> Error {
    Error::invalid(format!(
        "{} is damaged: {why}; use another checkpoint (--checkpoint, or --from-checkpoint with --resume)",
        path.display()
    ))
}

/// Returns a value as indented JSON.
fn json(value: &impl Serialize) -> Result<String> {
    serde_json::to_string_pretty(value).map_err(|e| Error::invalid(format!("the state cannot be written as JSON: {e}")))
}

/// Returns the end of `state.json` after `body`: the line with the CRC-32 of `body`, and the closing brace.
fn last_line(body: impl AsRef<[u8]>) -> String {
    let mut crc = Crc::new();
    crc.update(body.as_ref());
    format!("  \"crc32\": \"{:08x}\"\n}}\n", crc.sum())
}

#[cfg(test)]
pub(super) mod testing;
#[cfg(test)]
mod tests;
