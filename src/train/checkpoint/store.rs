//! The checkpoints of a run, and which of them is the best and which the last.

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
/// A checkpoint's name is `update-00001234`. If that update was saved before, and the run then went back to an
/// earlier checkpoint, the name is `update-00001234-2`, and so on. A checkpoint never changes once it has its name.
/// Its `state.json` has the number of this save in the run, and the name of the best checkpoint at that time. The
/// checkpoint with the highest number is the last one, and the best one is the checkpoint that it names. The links
/// `best` and `last` are for people and other programs. Nothing is lost if a crash, a copy of the folder or a file
/// system without links loses them.
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
    /// For each newer checkpoint that was skipped, the reason.
    pub passed: Vec<String>,
}

/// The checkpoint that is the best one after a save.
#[derive(Clone, Copy)]
pub enum Best<'a> {
    /// The saved checkpoint.
    This,
    /// The checkpoint with this name; with `None` the best one stays.
    Named(Option<&'a str>),
}

/// The update of a checkpoint, and the number of times that this update has been saved, from 1.
type Key = (u64, u32);

/// The records of the run's saves, one for each checkpoint that is not damaged.
type Savings = BTreeMap<Key, Saving>;

impl CheckpointStore {
    /// Opens the checkpoints of the run in `dir` for writing: creates the folder, removes unfinished files of killed
    /// processes, and creates missing links.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let store = CheckpointStore::at(dir);
        atomic::make_directory(&store.folder)?;
        atomic::clean(&store.folder, is_a_runs_name)?;
        store.update_links()?;
        Ok(store)
    }

    /// Opens the checkpoints of the run in `dir` for reading, without changing anything.
    pub fn at(dir: impl AsRef<Path>) -> Self {
        CheckpointStore { folder: dir.as_ref().join(CHECKPOINTS) }
    }

    /// Writes a checkpoint, which becomes the run's last one, and returns its name. `best` says which checkpoint is
    /// now the best: this one, or one by name. If no checkpoint has that name, the best one does not change.
    ///
    /// # Errors
    /// Errors if a file operation fails, for example on a full disk; the message names the operation and the file.
    /// Earlier checkpoints are unchanged. Nothing is left of the new checkpoint, or all of it if only the last flush or
    /// a link has failed.
    pub fn save(&self, update: u64, checkpoint: &Checkpoint, best: Best) -> Result<String> {
        // For tests that inject failures: a new operation begins here.
        fault::begin();
        let savings = self.savings()?;
        let name = self.free_name(update)?;
        let best = match best {
            Best::This => Some(name.clone()),
            Best::Named(best) => {
                let named = best.and_then(update_of).filter(|key| self.is_whole(*key));
                named.or_else(|| self.best(&savings)).map(name_of)
            }
        };
        let number = 1 + savings.values().map(|saving| saving.number).max().unwrap_or(0);
        let path = self.folder.join(&name);
        save_at(&path, update, checkpoint, Some(Saving { number, best })).map_err(|e| self.with_note(e))?;
        self.update_links().map_err(|e| self.with_note(e))?;
        Ok(name)
    }

    /// Returns the folder of the checkpoint `what`: `best`, `last`, `average`, a checkpoint's name, an update's
    /// number, or a path that [`load`](super::load) accepts.
    pub fn resolve(&self, what: &str) -> Result<PathBuf> {
        if NAMES.contains(&what) {
            return self.named(what).ok_or_else(|| self.missing(what));
        }
        let number = what.strip_prefix("update-").unwrap_or(what);
        // The second number is 0 if `what` is only an update's number. Then the latest save of the update is meant.
        let wanted = update_of(what).or_else(|| Some((number.parse().ok()?, 0)));
        match wanted {
            None if what == AVERAGE => directory(&self.folder.join(what)).map_err(|_| self.missing(what)),
            // A single word that is no existing path can only be a wrong name.
            None if what.starts_with("update-")
                || Path::new(what).components().count() == 1 && !Path::new(what).exists() =>
            {
                Err(self.missing(what))
            }
            None => directory(Path::new(what)),
            Some((update, saving)) => {
                let fits = |(saved_update, saved_number): &Key| {
                    *saved_update == update && (saving == 0 || *saved_number == saving)
                };
                let newest = self.entries()?.into_iter().rfind(|(key, _)| fits(key));
                let (_, folder) = newest.ok_or_else(|| self.missing(what))?;
                directory(&folder)
            }
        }
    }

    /// Returns the folder of the checkpoint that [`resolve`](Self::resolve) finds, and what `read` returns for it. If
    /// the checkpoint is pruned meanwhile, reads the one that `what` then names.
    pub fn read<T>(&self, what: &str, read: impl Fn(&Path) -> Result<T>) -> Result<(PathBuf, T)> {
        loop {
            let path = self.resolve(what)?;
            match read(&path) {
                Err(_) if self.resolve(what).is_ok_and(|now| now != path) => continue,
                result => return result.map(|value| (path, value)),
            }
        }
    }

    /// Returns the folder of the checkpoint `best` or `last`; `None` if there is no checkpoint.
    pub fn named(&self, name: &str) -> Option<PathBuf> {
        loop {
            let savings = self.savings().ok()?;
            // `NAMES[0]` is `best`.
            let key = if name == NAMES[0] { self.best(&savings) } else { self.newest_of(&savings) };
            let copy = self.folder.join(name);
            // A program that copied the run's folder may have copied a checkpoint in place of a link. If the
            // checkpoint itself is incomplete, such a copy is used instead.
            let is_copy = || is_runs(&copy) && !copy.is_symlink();
            let Some(key) = key.filter(|key| self.is_whole(*key) || !is_copy()) else {
                return real_folder(&copy);
            };
            match real_folder(&self.folder.join(name_of(key))) {
                // The checkpoint was pruned during this search, so the search begins again.
                None if self.savings().ok()? != savings => continue,
                found => return found,
            }
        }
    }

    /// Returns the checkpoint from which a run continues: the last one, or the newest complete one before it if the
    /// last one is missing or damaged; `None` if there is no checkpoint.
    ///
    /// # Errors
    /// Errors if no checkpoint is complete, or if the newest has a later format.
    pub fn newest(&self) -> Result<Option<ResumePoint>> {
        let mut passed = Vec::new();
        // The link leads to a checkpoint that is missing if, for example, the user has removed it.
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
        // A checkpoint with a damaged state has an unknown place in the order of saves, so it is a candidate, too.
        let is_before = move |(key, path): &(Key, PathBuf)| *key <= last || Manifest::read(path).is_err();
        Ok(self.entries()?.into_iter().rev().filter(is_before).map(|(_, path)| path))
    }

    /// Returns the folder and the options of the checkpoint `from`, by default of the newest one that can be read;
    /// `None` if there is none.
    pub fn options(&self, from: Option<&str>) -> Result<Option<(PathBuf, Value)>> {
        // Returns `None` for a checkpoint whose state or options cannot be read.
        let read = |path: PathBuf| Some((path.clone(), Manifest::read(&path).and_then(|m| m.config(&path)).ok()?));
        Ok(match from {
            Some(from) => self.resolve(from).ok().and_then(read),
            None => self.candidates()?.find_map(read),
        })
    }

    /// Returns the checkpoint of this run from which the user wants to continue: `best`, `last`, a checkpoint's name,
    /// or an update's number.
    pub fn chosen(&self, what: &str) -> Result<ResumePoint> {
        if Path::new(what).components().count() != 1 {
            return Err(self.missing(what));
        }
        let real_path = self.resolve(what)?;
        let leads_there = |path: &PathBuf| fs::canonicalize(path).is_ok_and(|real| real == real_path);
        // A checkpoint of another run is refused.
        let path = self.entries()?.into_values().find(leads_there).ok_or_else(|| self.missing(what))?;
        Ok(ResumePoint { checkpoint: load(&path)?, best: best_of(&path), path, passed: Vec::new() })
    }

    /// Returns the updates of which checkpoints exist, ascending.
    pub fn list(&self) -> Result<Vec<u64>> {
        let updates: BTreeSet<u64> = self.entries()?.into_keys().map(|(update, _)| update).collect();
        Ok(updates.into_iter().collect())
    }

    /// Returns the folder of the latest save of each of the `k` newest updates, newest first. Skips checkpoints with a
    /// higher update than the last one, which exist if the run went back to an earlier one.
    pub fn recent(&self, k: usize) -> Result<Vec<PathBuf>> {
        let last = self.last();
        let up_to_last = self.entries()?.into_iter().filter(|(key, _)| *key <= last);
        // Entries ascend, so the map keeps the latest save of each update.
        let newest: BTreeMap<u64, PathBuf> = up_to_last.map(|((update, _), path)| (update, path)).collect();
        Ok(newest.into_values().rev().take(k).collect())
    }

    /// Removes checkpoints, except the `keep_last` newest ones, the best and the last. Checkpoints with a higher
    /// update than the last one exist if the run went back to an earlier one. They are neither counted nor removed.
    pub fn prune(&self, keep_last: usize) -> Result<()> {
        // For tests that inject failures: a new operation begins here.
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

    /// Removes a checkpoint, which must be neither the best nor the last. Does nothing if no run wrote it.
    pub fn discard(&self, path: &Path) -> Result<()> {
        // For tests that inject failures: a new operation begins here.
        fault::begin();
        match is_runs(path) {
            true => atomic::remove_directory(path),
            false => Ok(()),
        }
    }

    /// Removes all files that a run has written here. Removes the folder, too, if it is then empty and not a link.
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

    /// Returns the key of the checkpoint that was saved last. If no checkpoint records a save, returns the largest
    /// possible key, so that no checkpoint counts as newer.
    fn last(&self) -> Key {
        let newest = self.savings().ok().and_then(|savings| self.newest_of(&savings));
        newest.unwrap_or((u64::MAX, u32::MAX))
    }

    /// Returns the key of the checkpoint that was saved last, the one with the highest number.
    fn newest_of(&self, savings: &Savings) -> Option<Key> {
        let newest = savings.iter().max_by_key(|(_, saving)| saving.number);
        newest.map(|(key, _)| *key)
    }

    /// Returns the key of the best checkpoint, from the newest record whose best checkpoint still exists.
    fn best(&self, savings: &Savings) -> Option<Key> {
        let mut newest: Vec<&Saving> = savings.values().collect();
        newest.sort_by_key(|saving| std::cmp::Reverse(saving.number));
        let mut names = newest.into_iter().filter_map(|saving| update_of(saving.best.as_deref()?));
        names.find(|key| self.is_whole(*key))
    }

    /// True if a checkpoint has its state, and weights of the right length.
    fn is_whole(&self, key: Key) -> bool {
        let path = self.folder.join(name_of(key));
        Manifest::read(&path).is_ok_and(|manifest| manifest.has_weights(&path))
    }

    /// Returns the key of the checkpoint of which the folder `copy` is a copy; `None` if it is no copy. The two are
    /// equal if their states are, because the state has the lengths and checksums of all other files.
    fn twin(&self, copy: &Path) -> Option<Key> {
        let state = |folder: &Path| atomic::read(&folder.join(STATE), STATE_BYTES).ok().flatten();
        let copied_state = is_runs(copy).then(|| state(copy)).flatten()?;
        let mut entries = self.entries().ok()?.into_iter();
        entries.find(|(_, path)| state(path).as_ref() == Some(&copied_state)).map(|(key, _)| key)
    }

    /// Frees the name of a link, `best` or `last`, that the folder `copy` has instead: a copy of a checkpoint. Removes
    /// the copy if the checkpoint itself can be read; otherwise gives the copy the checkpoint's name.
    fn move_copy(&self, copy: &Path) -> Result<()> {
        let rename = |from: &Path, to: &str| atomic::act("rename", from, || fs::rename(from, self.folder.join(to)));
        let update = Manifest::read(copy)?.update;
        match self.twin(copy) {
            Some(key) if load(self.folder.join(name_of(key))).is_ok() => atomic::remove_directory(copy),
            Some(key) => {
                // The damaged checkpoint is kept under another name.
                rename(&self.folder.join(name_of(key)), &self.free_name(update)?)?;
                rename(copy, &name_of(key))
            }
            // The folder is the only one with this checkpoint.
            None => rename(copy, &self.free_name(update)?),
        }
    }

    /// Returns the next unused name for a checkpoint of this update.
    fn free_name(&self, update: u64) -> Result<String> {
        let latest = self.entries()?.into_keys().rfind(|(saved, _)| *saved == update);
        Ok(name_of((update, latest.map_or(1, |(_, number)| number + 1))))
    }

    /// Returns the key of the checkpoint to which the link `name` leads; `None` if it is no link to a checkpoint.
    fn target(&self, name: &str) -> Option<Key> {
        update_of(fs::read_link(self.folder.join(name)).ok()?.to_str()?)
    }

    /// Sets the links `best` and `last` as the checkpoints' records say. Copies of checkpoints under these names are
    /// moved or removed before. On a file system without links, no link is made.
    fn update_links(&self) -> Result<()> {
        if self.savings()?.is_empty() {
            return Ok(());
        }
        for path in NAMES.map(|name| self.folder.join(name)) {
            let metadata = path.symlink_metadata();
            if metadata.is_ok() && !is_runs(&path) {
                return Err(Error::invalid(format!(
                    "{} is neither a run's link nor a checkpoint: move it away",
                    path.display()
                )));
            }
            if metadata.is_ok_and(|metadata| metadata.is_dir()) {
                self.move_copy(&path)?;
            }
        }
        let savings = self.savings()?;
        // `last` is set after `best`: a program that waits for `last` to change then finds `best` up to date.
        for (name, key) in [("best", self.best(&savings)), ("last", self.newest_of(&savings))] {
            let (Some(key), path) = (key, self.folder.join(name)) else { continue };
            if self.target(name) == Some(key) {
                continue;
            }
            match atomic::write_link(&path, &name_of(key)) {
                Err(Error::Io { source, .. }) if has_no_links(&source) => {}
                written => written?,
            }
        }
        Ok(())
    }

    /// Reads the records of all saves. Checkpoints whose `state.json` cannot be read are left out.
    fn savings(&self) -> Result<Savings> {
        let saving = |(key, path): (Key, PathBuf)| Some((key, Manifest::read(&path).ok()?.saving?));
        Ok(self.entries()?.into_iter().filter_map(saving).collect())
    }

    /// Returns the folders that have the name of a checkpoint, in the order of their updates.
    fn entries(&self) -> Result<BTreeMap<Key, PathBuf>> {
        let entries = match fs::read_dir(&self.folder) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
            read => read.map_err(|e| Error::io("read", &self.folder, e))?,
        };
        let mut checkpoints = BTreeMap::new();
        for entry in entries {
            let entry = entry.map_err(|e| Error::io("read", &self.folder, e))?;
            if let Some(key) = entry.file_name().to_str().and_then(update_of) {
                checkpoints.insert(key, entry.path());
            }
        }
        Ok(checkpoints)
    }

    /// Adds a note on the earlier checkpoints to the error of a failed write.
    fn with_note(&self, error: Error) -> Error {
        let Error::Io { act, path, source } = error else { return error };
        let kept = match self.entries().is_ok_and(|entries| !entries.is_empty()) {
            true => "the previous checkpoint is untouched",
            false => "no checkpoint had been saved yet",
        };
        Error::Io { act, path, source: io::Error::new(source.kind(), format!("{source}; {kept}")) }
    }

    /// Returns the error for a checkpoint `what` that does not exist. The message lists those that do.
    fn missing(&self, what: &str) -> Error {
        let mut names: Vec<String> = self.entries().unwrap_or_default().into_keys().map(name_of).collect();
        names.extend(NAMES.iter().filter(|name| self.named(name).is_some()).map(|name| name.to_string()));
        let names = if names.is_empty() { "no checkpoint".into() } else { names.join(", ") };
        Error::invalid(format!("there is no checkpoint {what:?}; {} has {names}", self.folder.display()))
    }
}

/// Returns the name of the best checkpoint, as recorded in the checkpoint at `path`.
fn best_of(path: &Path) -> Option<String> {
    Manifest::read(path).ok()?.saving?.best
}

/// Returns true for the errors of file systems that have no symbolic links: exFAT, and some SMB, FUSE and shared
/// ones.
fn has_no_links(error: &io::Error) -> bool {
    let codes = [libc::EPERM, libc::EOPNOTSUPP, libc::ENOTSUP, libc::ENOSYS, libc::EROFS, libc::EPROTO];
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

#[cfg(test)]
mod tests;
