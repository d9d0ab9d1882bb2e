//! A run's checkpoints.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::{directory, is_of_later_format, load, save, Checkpoint};
use crate::atomic::{self, fault};
use crate::error::{self, Error, Result};

/// The mean of some, made on request.
pub const AVERAGE: &str = "average";

/// The links; each is relative and moves by rename.
const LINKS: [&str; 2] = ["best", "last"];

/// The folder `checkpoints/` of a run.
///
/// A checkpoint is `update-00001234` (or `update-00001234-2`, … where that update was saved before: after a resume from
/// an earlier one). It never changes once it has that name; `best` and `last` are links to one each.
#[derive(Clone, Debug)]
pub struct CheckpointStore {
    folder: PathBuf,
}

/// A checkpoint that a run goes on from.
pub struct Found {
    pub path: PathBuf,
    pub checkpoint: Checkpoint,
    /// Why newer ones were passed over.
    pub passed: Vec<String>,
}

/// Update, and which saving of it, from 1.
type Key = (u64, u32);

impl CheckpointStore {
    /// The checkpoints of the run in `dir`, to be written: the folder is made, and what killed processes left
    /// unfinished in it is removed.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let store = CheckpointStore::at(dir);
        atomic::make_directory(&store.folder)?;
        atomic::clean(&store.folder)?;
        Ok(store)
    }

    /// The checkpoints of the run in `dir`, to be read: nothing is touched.
    pub fn at(dir: impl AsRef<Path>) -> Self {
        CheckpointStore { folder: dir.as_ref().join("checkpoints") }
    }

    /// Writes a checkpoint and returns its folder; no link moves.
    ///
    /// # Errors
    /// A full disk or another refusal of the system: the message names act and file. What was saved before is as it was,
    /// and of the new one nothing stays (or, if only the last flush failed, all of it).
    pub fn save(&self, update: u64, checkpoint: &Checkpoint) -> Result<PathBuf> {
        fault::begin();
        let saved = self.entries()?.into_keys().rfind(|key| key.0 == update);
        let path = self.folder.join(name((update, saved.map_or(1, |key| key.1 + 1))));
        save(&path, update, checkpoint).map_err(|e| self.untouched(e))?;
        Ok(path)
    }

    /// Moves the link `best` or `last` to the checkpoint of `update`.
    pub fn point(&self, link: &str, update: u64) -> Result<()> {
        fault::begin();
        if !LINKS.contains(&link) {
            return Err(error::unknown("link", link, LINKS));
        }
        let found = self.entries()?.into_keys().rfind(|key| key.0 == update);
        let key = found.ok_or_else(|| self.missing(&update.to_string()))?;
        atomic::write_link(&self.folder.join(link), &name(key)).map_err(|e| self.untouched(e))
    }

    /// The folder of a checkpoint: `best`, `last`, its name, its update's number, or a path as [`load`](super::load)
    /// takes it.
    pub fn resolve(&self, what: &str) -> Result<PathBuf> {
        if LINKS.contains(&what) {
            let link = self.folder.join(what);
            return directory(&link).map_err(|e| if link.is_symlink() { e } else { self.missing(what) });
        }
        let number = what.strip_prefix("update-").unwrap_or(what);
        let wanted = parse(what).or_else(|| Some((number.parse().ok()?, 0)));
        match wanted {
            None if what.starts_with("update-")
                || Path::new(what).components().count() == 1 && !Path::new(what).exists() =>
            {
                Err(self.missing(what))
            }
            None => directory(Path::new(what)),
            Some((update, saving)) => {
                let fits = |key: &Key| key.0 == update && (saving == 0 || key.1 == saving);
                let found = self.entries()?.into_iter().rfind(|(key, _)| fits(key));
                directory(&found.ok_or_else(|| self.missing(what))?.1)
            }
        }
    }

    /// The checkpoint that a run goes on from: `last`, or the newest where the run was killed before that link was made.
    /// Where it is missing or damaged, the newest whole one before it; none where there is no checkpoint.
    ///
    /// # Errors
    /// None is whole, or the newest is of a later format.
    pub fn newest(&self) -> Result<Option<Found>> {
        let last = self.last();
        let mut passed = Vec::new();
        if self.folder.join("last").is_symlink() && !self.entries()?.contains_key(&last) {
            passed.push(format!("{} is missing, and last leads to it", self.folder.join(name(last)).display()));
        }
        for (_, path) in self.entries()?.into_iter().rev().filter(|(key, _)| *key <= last) {
            match load(&path) {
                Ok(checkpoint) => return Ok(Some(Found { path, checkpoint, passed })),
                Err(error) if is_of_later_format(&path) => return Err(error),
                Err(error) => passed.push(error.to_string()),
            }
        }
        match passed.is_empty() {
            true => Ok(None),
            false => Err(Error::invalid(format!(
                "no checkpoint up to the last can be read: {}; restore one from a copy, choose a later one with \
                 --from-checkpoint, or start again with --overwrite",
                passed.join("; ")
            ))),
        }
    }

    /// A checkpoint of this run to go on from: `best`, `last`, its name, or its update's number.
    pub fn chosen(&self, what: &str) -> Result<Found> {
        if Path::new(what).components().count() != 1 {
            return Err(self.missing(what));
        }
        let path = self.resolve(what)?;
        let own = self.entries()?.into_values().find(|own| fs::canonicalize(own).is_ok_and(|own| own == path));
        let path = own.ok_or_else(|| self.missing(what))?;
        Ok(Found { checkpoint: load(&path)?, path, passed: Vec::new() })
    }

    /// The updates that are saved, ascending.
    pub fn list(&self) -> Result<Vec<u64>> {
        let updates: BTreeSet<u64> = self.entries()?.into_keys().map(|key| key.0).collect();
        Ok(updates.into_iter().collect())
    }

    /// The `k` newest checkpoints up to the one that `last` points to, newest first.
    pub fn recent(&self, k: usize) -> Result<Vec<PathBuf>> {
        let last = self.last();
        let newest: BTreeMap<u64, PathBuf> =
            self.entries()?.into_iter().filter(|(key, _)| *key <= last).map(|(key, path)| (key.0, path)).collect();
        Ok(newest.into_values().rev().take(k).collect())
    }

    /// Removes all up to `last` but the `keep_last` newest and those that `best` and `last` point to. What lies after
    /// `last`, because the run went back to an earlier checkpoint, is neither counted nor removed.
    pub fn prune(&self, keep_last: usize) -> Result<()> {
        fault::begin();
        let last = self.last();
        let linked = LINKS.map(|link| fs::read_link(self.folder.join(link)).map(|to| self.folder.join(to)).ok());
        let recent = self.recent(keep_last)?;
        for (key, path) in self.entries()? {
            if key <= last && !recent.contains(&path) && !linked.contains(&Some(path.clone())) {
                atomic::remove_directory(&path)?;
            }
        }
        Ok(())
    }

    /// Removes a checkpoint that no link points to.
    pub fn discard(&self, path: &Path) -> Result<()> {
        fault::begin();
        atomic::remove_directory(path)
    }

    /// Removes what runs write, and the folder if nothing else is in it.
    pub fn clear(&self) -> Result<()> {
        if !self.folder.is_dir() {
            return Ok(());
        }
        atomic::clean(&self.folder)?;
        for path in self.entries()?.into_values() {
            atomic::remove_directory(&path)?;
        }
        for name in LINKS.iter().chain(&[AVERAGE]) {
            atomic::remove_any(&self.folder.join(name))?;
        }
        match fs::remove_dir(&self.folder) {
            Err(e) if e.kind() != io::ErrorKind::DirectoryNotEmpty => Err(Error::io("remove", &self.folder, e)),
            _ => Ok(()),
        }
    }

    /// Where `last` points; without that link, after everything.
    fn last(&self) -> Key {
        let to = fs::read_link(self.folder.join("last")).ok();
        to.and_then(|to| parse(to.to_str()?)).unwrap_or((u64::MAX, u32::MAX))
    }

    fn entries(&self) -> Result<BTreeMap<Key, PathBuf>> {
        let entries = match fs::read_dir(&self.folder) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
            read => read.map_err(|e| Error::io("read", &self.folder, e))?,
        };
        let mut found = BTreeMap::new();
        for entry in entries {
            let entry = entry.map_err(|e| Error::io("read", &self.folder, e))?;
            if let Some(key) = entry.file_name().to_str().and_then(parse) {
                found.insert(key, entry.path());
            }
        }
        Ok(found)
    }

    /// What a failed write means for the run.
    fn untouched(&self, error: Error) -> Error {
        let Error::Io { act, path, source } = error else { return error };
        let kept = match self.entries().is_ok_and(|entries| !entries.is_empty()) {
            true => "the previous checkpoint is untouched",
            false => "no checkpoint had been saved yet",
        };
        Error::Io { act, path, source: io::Error::new(source.kind(), format!("{source}; {kept}")) }
    }

    fn missing(&self, what: &str) -> Error {
        let mut has: Vec<String> = self.entries().unwrap_or_default().into_keys().map(name).collect();
        has.extend(LINKS.iter().filter(|link| self.folder.join(link).exists()).map(|link| link.to_string()));
        let has = if has.is_empty() { "no checkpoint".into() } else { has.join(", ") };
        Error::invalid(format!("there is no checkpoint {what:?}; {} has {has}", self.folder.display()))
    }
}

fn name((update, saving): Key) -> String {
    if saving == 1 {
        format!("update-{update:08}")
    } else {
        format!("update-{update:08}-{saving}")
    }
}

/// The inverse of [`name`]; `None` for all else.
fn parse(text: &str) -> Option<Key> {
    let rest = text.strip_prefix("update-")?;
    let (update, saving) = rest.split_once('-').unwrap_or((rest, "1"));
    let key = (update.parse().ok()?, saving.parse().ok()?);
    (name(key) == text).then_some(key)
}

#[cfg(test)]
mod tests;
