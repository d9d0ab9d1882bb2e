//! The mean of a run's checkpoints.

use super::folder::{read_configs, remove};
use crate::error::{Error, Result};
use crate::train::checkpoint::{self, Store};
use std::fs;
use std::path::{Path, PathBuf};

pub(super) fn average_path(folder: &Path) -> PathBuf {
    folder.join("checkpoints").join("average")
}

/// Averages checkpoints of a run (parameters and running statistics; counters of the newest), stored as `average`: those
/// of the given updates, or the last `count`.
pub fn average(folder: &Path, count: Option<usize>, updates: Option<Vec<u64>>) -> Result<PathBuf> {
    read_configs(folder)?;
    let store = Store::at(folder);
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
    // An earlier average goes when the new one is whole. A name that begins with a dot is cleaned up after a crash.
    let path = average_path(folder);
    let new = path.with_file_name(".average");
    remove(&new, |p| fs::remove_dir_all(p))?;
    checkpoint::save(&new, updates.into_iter().max().unwrap_or(0), &averaged)?;
    remove(&path, |p| fs::remove_dir_all(p))?;
    fs::rename(&new, &path).map_err(|e| Error::io("rename", &new, e))?;
    Ok(path)
}
