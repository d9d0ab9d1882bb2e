//! Averaging of a run's checkpoints.

use super::folder::read_configs;
use super::lock::Lock;
use crate::atomic;
use crate::data::{self, Interrupt};
use crate::error::{Error, Result};
use crate::ownership::{is_runs, AVERAGE, CHECKPOINTS, NEW_AVERAGE};
use crate::train::checkpoint::{self, CheckpointStore};
use std::fs;
use std::path::{Path, PathBuf};

/// Returns the checkpoints of the last evaluations, newest first, up to the first gap: pruning may have removed
/// checkpoints between an old best one and the newer ones. Skips checkpoints that were saved because the user stopped
/// the run.
fn evaluated(store: &CheckpointStore) -> Result<Vec<PathBuf>> {
    // `newer` is the number of evaluations in the checkpoint of the previous iteration, if there was one. It is
    // `Some(None)` if that checkpoint does not state the number.
    let (mut paths, mut newer) = (Vec::new(), None::<Option<u64>>);
    // `usize::MAX` asks for all checkpoints.
    for path in store.recent(usize::MAX)? {
        let (state, _) = checkpoint::load_state(&path)?;
        if state["is_pause"] == true {
            continue;
        }
        let evaluation = state["evaluations"].as_u64();
        // Without a gap, this checkpoint has one evaluation less than the newer one.
        let is_adjacent = newer.is_none_or(|newer| evaluation.is_some() && evaluation.map(|n| n + 1) == newer);
        if !is_adjacent {
            break;
        }
        newer = Some(evaluation);
        paths.push(path);
    }
    Ok(paths)
}

/// Averages a run's checkpoints, either those of the given updates or the last `count`, and saves the result as the
/// checkpoint `average`, whose path it returns. Parameters and running statistics are averaged; counters are copied
/// from the newest checkpoint. `check_interrupt` runs before a checkpoint is read.
pub fn average(
    folder: &Path,
    count: Option<usize>,
    updates: Option<Vec<u64>>,
    check_interrupt: Interrupt,
) -> Result<PathBuf> {
    read_configs(folder)?;
    let _lock = Lock::take(folder)?;
    // The average is written to `new`, and moved to `path` when it is complete.
    let [path, new] = [AVERAGE, NEW_AVERAGE].map(|name| folder.join(CHECKPOINTS).join(name));
    let is_taken = |path: &&&PathBuf| path.symlink_metadata().is_ok() && !is_runs(path);
    if let Some(taken) = [&path, &new].iter().find(is_taken) {
        return Err(Error::invalid(format!(
            "{} was not written by `average`, which would replace it: move it away",
            taken.display()
        )));
    }
    let store = CheckpointStore::at(folder);
    let paths = match (count, updates) {
        (None, Some(updates)) => updates.iter().map(|u| store.resolve(&u.to_string())).collect::<Result<Vec<_>>>()?,
        (Some(n), None) => {
            let mut available = evaluated(&store)?;
            if !(1..=available.len()).contains(&n) {
                return Err(Error::invalid(format!(
                    "{} holds the checkpoints of the last {} evaluations, cannot average {n}; training keeps as many as \
                     `keep` says",
                    folder.display(),
                    available.len()
                )));
            }
            available.truncate(n);
            available
        }
        _ => return Err(Error::invalid("give either how many of the last checkpoints to average, or their updates")),
    };
    let averaged = checkpoint::average(&paths, &mut data::throttled(check_interrupt))?;
    // The earlier average is removed only when the new one is complete.
    remove(&new)?;
    checkpoint::save(&new, averaged.state["update"].as_u64().unwrap_or(0), &averaged)?;
    remove(&path)?;
    atomic::act("rename", &new, || fs::rename(&new, &path))?;
    Ok(path)
}

/// Removes a folder, if it exists, completely or not at all. The rest of a half-removed folder would not be recognised
/// as a run's, so no later run would remove it.
fn remove(path: &Path) -> Result<()> {
    match path.symlink_metadata().is_ok() {
        true => atomic::remove_directory(path),
        false => Ok(()),
    }
}
