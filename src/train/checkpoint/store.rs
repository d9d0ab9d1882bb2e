//! The store of a run's checkpoints.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::{directory, is_of_later_format, load, real_folder, save_at, Checkpoint, Manifest, Saving};
use serde_json::Value;

use crate::atomic::{self, fault};
use crate::error::{Error, Result};
use crate::ownership::{
    is_a_runs_name, is_runs, name_of, update_of, AVERAGE, CHECKPOINTS, NAMES, NEW_AVERAGE, STATE, STATE_BYTES,
};

/// The folder `checkpoints/` of a run.
///
/// A checkpoint is called `update-00001234` (or `update-00001234-2`, … if that update was saved before, after a resume
/// from an earlier one). It never changes once it has that name. Its `state.json` counts the run's savings and names
/// the best checkpoint at that time. The checkpoint with the highest count is the last one, and its record of the best
/// is valid. The links `best` and `last` are for people and other programs; nothing is lost if a stop, a copy or a file
/// system has removed them.
#[derive(Clone, Debug)]
pub struct CheckpointStore {
    folder: PathBuf,
}

/// A checkpoint from which a run continues.
pub struct ResumePoint {
    pub path: PathBuf,
    pub checkpoint: Checkpoint,
    /// The name of the best checkpoint when this one was saved; `None` if there was none.
    pub best: Option<String>,
    /// The reasons why newer checkpoints were skipped.
    pub passed: Vec<String>,
}

/// The best checkpoint after a saving.
#[derive(Clone, Copy)]
pub enum Best<'a> {
    This,
    Named(Option<&'a str>),
}

/// The update, and the count of its savings, from 1.
type Key = (u64, u32);

/// The savings that the checkpoints record; damaged ones do not.
type Savings = BTreeMap<Key, Saving>;

impl CheckpointStore {
    /// Opens the checkpoints of the run in `dir` for writing: creates the folder, removes what killed processes left
    /// unfinished in it, and creates missing links.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let store = CheckpointStore::at(dir);
        atomic::make_directory(&store.folder)?;
        atomic::clean(&store.folder, is_a_runs_name)?;
        store.link()?;
        Ok(store)
    }

    /// Opens the checkpoints of the run in `dir` for reading: nothing is changed.
    pub fn at(dir: impl AsRef<Path>) -> Self {
        CheckpointStore { folder: dir.as_ref().join(CHECKPOINTS) }
    }

    /// Writes a checkpoint, which becomes the run's last, and returns its name. `best` is the best checkpoint's name,
    /// or this checkpoint; if no such checkpoint exists, the store's best stays.
    ///
    /// # Errors
    /// The disk is full, or the system refuses for another reason: the message names the operation and the file.
    /// Earlier checkpoints are unchanged, and nothing of the new one stays (or all of it, if only the last flush or a
    /// link failed).
    pub fn save(&self, update: u64, checkpoint: &Checkpoint, best: Best) -> Result<String> {
        fault::begin();
        let savings = self.savings()?;
        let name = self.free_name(update)?;
        let best = match best {
            Best::This => Some(name.clone()),
            Best::Named(best) => {
                let there = best.and_then(update_of).filter(|key| self.is_whole(*key));
                there.or_else(|| self.best(&savings)).map(name_of)
            }
        };
        let number = 1 + savings.values().map(|saving| saving.number).max().unwrap_or(0);
        let path = self.folder.join(&name);
        save_at(&path, update, checkpoint, Some(Saving { number, best })).map_err(|e| self.untouched(e))?;
        self.link().map_err(|e| self.untouched(e))?;
        Ok(name)
    }

    /// Returns the folder of a checkpoint: `best`, `last`, `average`, its name, its update's number, or a path that
    /// [`load`](super::load) accepts.
    pub fn resolve(&self, what: &str) -> Result<PathBuf> {
        if NAMES.contains(&what) {
            return self.named(what).ok_or_else(|| self.missing(what));
        }
        let number = what.strip_prefix("update-").unwrap_or(what);
        let wanted = update_of(what).or_else(|| Some((number.parse().ok()?, 0)));
        match wanted {
            None if what == AVERAGE => directory(&self.folder.join(what)).map_err(|_| self.missing(what)),
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

    /// Returns the folder of the checkpoint that [`resolve`](Self::resolve) finds, and the result of `read` on it. If
    /// it was pruned meanwhile, reads the one that took its place.
    pub fn read<T>(&self, what: &str, read: impl Fn(&Path) -> Result<T>) -> Result<(PathBuf, T)> {
        loop {
            let path = self.resolve(what)?;
            match read(&path) {
                Err(_) if self.resolve(what).is_ok_and(|now| now != path) => continue,
                done => return done.map(|done| (path, done)),
            }
        }
    }

    /// Returns the folder of `best` or `last`; `None` if there is no checkpoint.
    pub fn named(&self, name: &str) -> Option<PathBuf> {
        loop {
            let savings = self.savings().ok()?;
            let key = if name == NAMES[0] { self.best(&savings) } else { self.newest_of(&savings) };
            let copy = self.folder.join(name);
            // If a copy of the run's folder has followed links, a whole copy replaces a checkpoint that is not whole.
            let Some(key) = key.filter(|key| self.is_whole(*key) || !is_runs(&copy) || copy.is_symlink()) else {
                return real_folder(&copy);
            };
            match real_folder(&self.folder.join(name_of(key))) {
                // The checkpoint was pruned during this search, so a newer one exists.
                None if self.savings().ok()? != savings => continue,
                found => return found,
            }
        }
    }

    /// Returns the checkpoint from which a run continues: the last one or, if that is missing or damaged, the newest
    /// complete one before it; `None` if there is no checkpoint.
    ///
    /// # Errors
    /// No checkpoint is complete, or the newest is of a later format.
    pub fn newest(&self) -> Result<Option<ResumePoint>> {
        let mut passed = Vec::new();
        let link = self.target("last");
        if let Some(link) = link.filter(|link| !self.folder.join(name_of(*link)).exists()) {
            passed.push(format!("{} is missing, and last leads to it", self.folder.join(name_of(link)).display()));
        }
        for path in self.candidates()? {
            match load(&path) {
                Ok(checkpoint) => return Ok(Some(ResumePoint { best: best_of(&path), path, checkpoint, passed })),
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

    /// Returns the checkpoints from which a run may continue, newest first.
    fn candidates(&self) -> Result<impl Iterator<Item = PathBuf>> {
        let last = self.last();
        // The saving of a checkpoint with a damaged state is unknown, so it is included, whatever its update.
        let is_before = move |(key, path): &(Key, PathBuf)| *key <= last || Manifest::read(path).is_err();
        Ok(self.entries()?.into_iter().rev().filter(is_before).map(|(_, path)| path))
    }

    /// Returns the options of the checkpoint `from`, or of the newest one that can be read, and the checkpoint's
    /// folder.
    pub fn options(&self, from: Option<&str>) -> Result<Option<(PathBuf, Value)>> {
        let read = |path: PathBuf| Some((path.clone(), Manifest::read(&path).and_then(|m| m.config(&path)).ok()?));
        Ok(match from {
            Some(from) => self.resolve(from).ok().and_then(read),
            None => self.candidates()?.find_map(read),
        })
    }

    /// Returns a checkpoint of this run from which to continue: `best`, `last`, its name, or its update's number.
    pub fn chosen(&self, what: &str) -> Result<ResumePoint> {
        if Path::new(what).components().count() != 1 {
            return Err(self.missing(what));
        }
        let path = self.resolve(what)?;
        let own = self.entries()?.into_values().find(|own| fs::canonicalize(own).is_ok_and(|own| own == path));
        let path = own.ok_or_else(|| self.missing(what))?;
        Ok(ResumePoint { checkpoint: load(&path)?, best: best_of(&path), path, passed: Vec::new() })
    }

    /// Returns the saved updates, ascending.
    pub fn list(&self) -> Result<Vec<u64>> {
        let updates: BTreeSet<u64> = self.entries()?.into_keys().map(|key| key.0).collect();
        Ok(updates.into_iter().collect())
    }

    /// Returns the `k` newest checkpoints up to the last, newest first.
    pub fn recent(&self, k: usize) -> Result<Vec<PathBuf>> {
        let last = self.last();
        let newest: BTreeMap<u64, PathBuf> =
            self.entries()?.into_iter().filter(|(key, _)| *key <= last).map(|(key, path)| (key.0, path)).collect();
        Ok(newest.into_values().rev().take(k).collect())
    }

    /// Removes all checkpoints up to the last except the `keep_last` newest, the best and the last. Checkpoints after
    /// the last, which exist if the run went back to an earlier one, are neither counted nor removed.
    pub fn prune(&self, keep_last: usize) -> Result<()> {
        fault::begin();
        let (last, best) = (self.last(), self.best(&self.savings()?));
        let recent = self.recent(keep_last)?;
        for (key, path) in self.entries()? {
            if key < last && Some(key) != best && !recent.contains(&path) && is_runs(&path) {
                atomic::remove_directory(&path)?;
            }
        }
        Ok(())
    }

    /// Removes a checkpoint that is neither the best nor the last.
    pub fn discard(&self, path: &Path) -> Result<()> {
        fault::begin();
        match is_runs(path) {
            true => atomic::remove_directory(path),
            false => Ok(()),
        }
    }

    /// Removes what a run has written, and the folder if it is no link and otherwise empty.
    pub fn clear(&self) -> Result<()> {
        if !self.folder.is_dir() {
            return Ok(());
        }
        atomic::clean(&self.folder, is_a_runs_name)?;
        let names = NAMES.iter().chain(&[AVERAGE, NEW_AVERAGE]).map(|name| self.folder.join(name));
        for path in self.entries()?.into_values().chain(names).filter(|path| is_runs(path)) {
            match path.is_symlink() {
                true => atomic::remove_file(&path)?,
                false => atomic::remove_directory(&path)?,
            }
        }
        if self.folder.is_symlink() {
            return Ok(());
        }
        match fs::remove_dir(&self.folder) {
            Err(e) if e.kind() != io::ErrorKind::DirectoryNotEmpty => Err(Error::io("remove", &self.folder, e)),
            _ => Ok(()),
        }
    }

    /// Returns the last checkpoint's key, or the maximum key if none is known.
    fn last(&self) -> Key {
        let newest = self.savings().ok().and_then(|savings| self.newest_of(&savings));
        newest.unwrap_or((u64::MAX, u32::MAX))
    }

    /// Returns the checkpoint that was saved last.
    fn newest_of(&self, savings: &Savings) -> Option<Key> {
        let newest = savings.iter().max_by_key(|(_, saving)| saving.number);
        newest.map(|(key, _)| *key)
    }

    /// Returns the best checkpoint, as recorded by the newest checkpoint whose record names an existing one.
    fn best(&self, savings: &Savings) -> Option<Key> {
        let mut newest: Vec<&Saving> = savings.values().collect();
        newest.sort_by_key(|saving| std::cmp::Reverse(saving.number));
        let mut names = newest.into_iter().filter_map(|saving| update_of(saving.best.as_deref()?));
        names.find(|key| self.is_whole(*key))
    }

    /// True if a checkpoint has its state and weights of the right length.
    fn is_whole(&self, key: Key) -> bool {
        let path = self.folder.join(name_of(key));
        Manifest::read(&path).is_ok_and(|manifest| manifest.has_weights(&path))
    }

    /// Returns the checkpoint of which a folder is a copy, by its state, which has the lengths and checksums of all
    /// other files.
    fn twin(&self, copy: &Path) -> Option<Key> {
        let state = |folder: &Path| atomic::read(&folder.join(STATE), STATE_BYTES).ok().flatten();
        let own = is_runs(copy).then(|| state(copy)).flatten()?;
        self.entries().ok()?.into_iter().find(|(_, path)| state(path).as_ref() == Some(&own)).map(|(key, _)| key)
    }

    /// Resolves a copy of a checkpoint in a link's place: removes it if the checkpoint itself is whole, otherwise moves
    /// it to the checkpoint's name.
    fn settle(&self, copy: &Path) -> Result<()> {
        let rename = |from: &Path, to: &str| atomic::act("rename", from, || fs::rename(from, self.folder.join(to)));
        let update = Manifest::read(copy)?.update;
        match self.twin(copy) {
            Some(key) if load(self.folder.join(name_of(key))).is_ok() => atomic::remove_directory(copy),
            Some(key) => {
                rename(&self.folder.join(name_of(key)), &self.free_name(update)?)?;
                rename(copy, &name_of(key))
            }
            None => rename(copy, &self.free_name(update)?),
        }
    }

    /// Returns the name for a further checkpoint of an update.
    fn free_name(&self, update: u64) -> Result<String> {
        let before = self.entries()?.into_keys().rfind(|key| key.0 == update);
        Ok(name_of((update, before.map_or(1, |key| key.1 + 1))))
    }

    /// Returns the target of a link.
    fn target(&self, name: &str) -> Option<Key> {
        update_of(fs::read_link(self.folder.join(name)).ok()?.to_str()?)
    }

    /// Updates the links from the checkpoints' records, and replaces copies that a copy of the run's folder has made of
    /// them. File systems without links get none.
    fn link(&self) -> Result<()> {
        if self.savings()?.is_empty() {
            return Ok(());
        }
        for path in NAMES.map(|name| self.folder.join(name)) {
            let found = path.symlink_metadata();
            if found.is_ok() && !is_runs(&path) {
                return Err(Error::invalid(format!(
                    "{} is neither a run's link nor a checkpoint: move it away",
                    path.display()
                )));
            }
            if found.is_ok_and(|found| found.is_dir()) {
                self.settle(&path)?;
            }
        }
        let savings = self.savings()?;
        // `last` comes after `best`, so that programs that watch it find both.
        for (name, key) in [("best", self.best(&savings)), ("last", self.newest_of(&savings))] {
            let (Some(key), path) = (key, self.folder.join(name)) else { continue };
            if self.target(name) == Some(key) {
                continue;
            }
            match atomic::write_link(&path, &name_of(key)) {
                Err(Error::Io { source, .. }) if has_no_links(&source) => {}
                made => made?,
            }
        }
        Ok(())
    }

    fn savings(&self) -> Result<Savings> {
        let saving = |(key, path): (Key, PathBuf)| Some((key, Manifest::read(&path).ok()?.saving?));
        Ok(self.entries()?.into_iter().filter_map(saving).collect())
    }

    fn entries(&self) -> Result<BTreeMap<Key, PathBuf>> {
        let entries = match fs::read_dir(&self.folder) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
            read => read.map_err(|e| Error::io("read", &self.folder, e))?,
        };
        let mut found = BTreeMap::new();
        for entry in entries {
            let entry = entry.map_err(|e| Error::io("read", &self.folder, e))?;
            if let Some(key) = entry.file_name().to_str().and_then(update_of) {
                found.insert(key, entry.path());
            }
        }
        Ok(found)
    }

    /// Adds to a failed write's error what it means for the run.
    fn untouched(&self, error: Error) -> Error {
        let Error::Io { act, path, source } = error else { return error };
        let kept = match self.entries().is_ok_and(|entries| !entries.is_empty()) {
            true => "the previous checkpoint is untouched",
            false => "no checkpoint had been saved yet",
        };
        Error::Io { act, path, source: io::Error::new(source.kind(), format!("{source}; {kept}")) }
    }

    fn missing(&self, what: &str) -> Error {
        let mut has: Vec<String> = self.entries().unwrap_or_default().into_keys().map(name_of).collect();
        has.extend(NAMES.iter().filter(|name| self.named(name).is_some()).map(|name| name.to_string()));
        let has = if has.is_empty() { "no checkpoint".into() } else { has.join(", ") };
        Error::invalid(format!("there is no checkpoint {what:?}; {} has {has}", self.folder.display()))
    }
}

/// Returns the best checkpoint that a checkpoint records.
fn best_of(path: &Path) -> Option<String> {
    Manifest::read(path).ok()?.saving?.best
}

/// True for the errors of file systems without symbolic links: exFAT, some SMB, FUSE and shared ones.
fn has_no_links(error: &io::Error) -> bool {
    let codes = [libc::EPERM, libc::EOPNOTSUPP, libc::ENOTSUP, libc::ENOSYS, libc::EROFS, libc::EPROTO];
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

#[cfg(test)]
mod tests;
