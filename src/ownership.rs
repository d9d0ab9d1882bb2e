//! Decides which files in a run's folder belong to the run. Code that removes, replaces or averages files calls
//! [`is_runs`] first.
//!
//! A file's name proves nothing, because a folder may hold a user's own `vocabulary.txt` or `checkpoints/best`. So
//! for each name that a run writes, there is a proof by the content:
//!
//! | name | proof |
//! |---|---|
//! | `config.json`, `vocabulary.txt`, `bpe.codes`, `target_types.txt`, `checksums.txt` | a valid checksums.txt has it |
//! | `log.jsonl` | one of its first lines is an event of a run, or it is empty |
//! | `curves.png` | the metadata text of the PNG names this package |
//! | `.lock` | it names the process that owns the lock, or is empty |
//! | `checkpoints/update-…`, `average` | a folder with this package's `state.json`, and only a checkpoint's files |
//! | `checkpoints/best`, `last` | a link to an `update-…`, or such a folder |
//!
//! Links are not followed in search of a proof, except `checkpoints` itself, which may lie on another disk.

pub mod checksums;

use crate::atomic;
use serde_json::Value;
use std::path::{Path, PathBuf};

pub const CONFIG: &str = "config.json";
pub const VOCABULARY: &str = "vocabulary.txt";
pub const CODES: &str = "bpe.codes";
pub const TARGET_TYPES: &str = "target_types.txt";
pub const CHECKSUMS: &str = "checksums.txt";
pub const LOG: &str = "log.jsonl";
pub const CURVES: &str = "curves.png";
/// The lock file of the process that writes to the run.
pub const LOCK: &str = ".lock";
pub const CHECKPOINTS: &str = "checkpoints";
/// The names of two special checkpoints; they are links if the file system supports links.
pub const NAMES: [&str; 2] = ["best", "last"];
/// The checkpoint with the mean of several checkpoints' weights, made on request.
pub const AVERAGE: &str = "average";
/// The name of a new [`AVERAGE`] until it is complete and replaces the old one.
pub const NEW_AVERAGE: &str = ".average";
/// The file that proves that a folder is a checkpoint.
pub const STATE: &str = "state.json";
/// All files in a checkpoint's folder.
const IN_CHECKPOINTS: [&str; 4] = ["model.safetensors", "optimizer.safetensors", CONFIG, STATE];
/// The value of `kind` in [`STATE`].
pub const KIND: &str = "normformer_rs checkpoint";

/// The files that [`CHECKSUMS`] may list; they determine a run's weights.
pub const LISTED: [&str; 4] = [CONFIG, VOCABULARY, CODES, TARGET_TYPES];
/// The maximum size of [`STATE`] that is read: its counters and settings take kilobytes, so a larger file is damaged.
pub const STATE_BYTES: u64 = 64 << 20;
/// The number of bytes at the start of a log, picture or lock that are searched for the proof.
const HEAD: usize = 4096;

/// True if a run wrote the file at `path`, which lies in the run's folder or its `checkpoints`; false if no file exists
/// there.
pub fn is_runs(path: &Path) -> bool {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return false };
    let folder = path.parent().unwrap_or(Path::new(""));
    match name {
        CHECKSUMS => !checksums::listed(folder).is_empty(),
        _ if LISTED.contains(&name) => is_file(path) && checksums::listed(folder).iter().any(|listed| listed == name),
        LOG => starts(path, |head| {
            let is_event = |line: &[u8]| serde_json::from_slice::<Value>(line).is_ok_and(|line| is_event(&line));
            // If the disk was full, the log may have only the first part of its first line.
            let is_cut = || !head.contains(&b'\n') && head.starts_with(b"{") && !checksums::listed(folder).is_empty();
            head.is_empty() || head.split(|byte| *byte == b'\n').any(is_event) || is_cut()
        }),
        CURVES => starts(path, |head| {
            const PACKAGE: &[u8] = b"normformer_rs";
            head.starts_with(b"\x89PNG") && head.windows(PACKAGE.len()).any(|text| text == PACKAGE)
        }),
        LOCK => starts(path, is_lock),
        _ if NAMES.contains(&name) => match path.read_link() {
            Ok(target) => target.to_str().is_some_and(|target| update_of(target).is_some()),
            Err(_) => is_checkpoint(path),
        },
        AVERAGE | NEW_AVERAGE => is_checkpoint(path),
        _ => update_of(name).is_some() && is_checkpoint(path),
    }
}

/// True if a line of JSON is an event of a run. The key "event" alone is not enough, because other programs' logs may
/// have that key, too.
fn is_event(line: &Value) -> bool {
    match line["event"].as_str() {
        Some("started" | "updated" | "evaluated" | "saved") => line["update"].is_u64(),
        Some("message") => line["level"].is_string() && line["text"].is_string(),
        _ => false,
    }
}

/// True if a run wrote `head`, the first bytes of [`LOCK`]: the owner of the lock, or part of it after a crash.
pub fn is_lock(head: &[u8]) -> bool {
    const OWNER: &[u8] = b"{\"pid\":";
    OWNER.starts_with(head) || head.starts_with(OWNER)
}

/// True if runs write a file or checkpoint called `name` (except [`LOCK`]).
pub fn is_a_runs_name(name: &str) -> bool {
    LISTED.contains(&name)
        || NAMES.contains(&name)
        || [CHECKSUMS, LOG, CURVES, AVERAGE, NEW_AVERAGE].contains(&name)
        || update_of(name).is_some()
}

/// Returns each existing path in the run's folder whose name runs write (except [`LOCK`]), and true if a run wrote it.
pub fn found(folder: &Path) -> Vec<(PathBuf, bool)> {
    let files = LISTED.iter().chain(&[CHECKSUMS, LOG, CURVES]).map(|name| folder.join(name));
    let checkpoints = folder.join(CHECKPOINTS);
    // The two `flatten` skip a folder and entries that cannot be read.
    let mut inside: Vec<PathBuf> = std::fs::read_dir(&checkpoints)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_str().is_some_and(is_a_runs_name))
        .map(|entry| entry.path())
        .collect();
    inside.sort();
    let existing = files.chain(inside).filter(|path| path.symlink_metadata().is_ok());
    existing.map(|path| (path.clone(), is_runs(&path))).collect()
}

/// Parses a checkpoint's name into the pair (update, number of the save of this update, from 1); the inverse of
/// [`name_of`].
pub fn update_of(name: &str) -> Option<(u64, u32)> {
    let rest = name.strip_prefix("update-")?;
    let (update, saving) = rest.split_once('-').unwrap_or((rest, "1"));
    let key = (update.parse().ok()?, saving.parse().ok()?);
    // Other spellings of the same numbers, such as `update-1`, are no names of checkpoints.
    (name_of(key) == name).then_some(key)
}

/// Returns the name of the checkpoint that is the `saving`-th save (from 1) of `update`: `update-00001234`, or
/// `update-00001234-2` if that update was saved once before.
pub fn name_of((update, saving): (u64, u32)) -> String {
    if saving == 1 {
        format!("update-{update:08}")
    } else {
        format!("update-{update:08}-{saving}")
    }
}

/// True if the path is a folder (not a link) with this package's state, and with only the files of a checkpoint.
fn is_checkpoint(path: &Path) -> bool {
    let is_folder = path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir());
    let is_known = |entry: std::io::Result<std::fs::DirEntry>| {
        entry.is_ok_and(|entry| entry.file_name().to_str().is_some_and(|name| IN_CHECKPOINTS.contains(&name)))
    };
    let has_only_known_files = is_folder && std::fs::read_dir(path).is_ok_and(|mut entries| entries.all(is_known));
    let state = || atomic::read(&path.join(STATE), STATE_BYTES).ok().flatten();
    let has_kind = || serde_json::from_slice::<Value>(&state()?).ok().map(|state| state["kind"] == KIND);
    has_only_known_files && has_kind().unwrap_or(false)
}

/// True if the path is a file, not a link to one.
fn is_file(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|metadata| metadata.is_file())
}

/// True if the file can be opened without following links, and `proves` is true for its first [`HEAD`] bytes.
fn starts(path: &Path, proves: impl FnOnce(&[u8]) -> bool) -> bool {
    use std::io::Read;
    let Ok(file) = atomic::open(path, std::fs::File::options().read(true)) else { return false };
    let mut head = Vec::new();
    file.take(HEAD as u64).read_to_end(&mut head).is_ok() && proves(&head)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;
    use std::fs;
    use std::os::unix::fs::symlink;

    /// Each name is tried with somebody else's content and with a run's content.
    #[test]
    fn a_name_alone_proves_nothing() {
        let dir = Scratch::new("ownership");
        let at = |name: &str| dir.0.join(name);
        let checkpoints = at(CHECKPOINTS);
        fs::create_dir(&checkpoints).unwrap();
        let proven = || {
            let names = found(&dir.0).into_iter().filter(|(_, is_runs)| *is_runs);
            names.map(|(path, _)| path.file_name().unwrap().to_str().unwrap().to_string()).collect::<Vec<_>>()
        };
        let files = LISTED.iter().chain(&[CHECKSUMS, CURVES]);
        files.for_each(|name| fs::write(at(name), "{\"model\": {}, \"training\": {}, \"data\": {}}").unwrap());
        fs::write(at(LOG), "{\"event\": \"request finished\", \"level\": \"info\"}\n").unwrap();
        fs::write(at(LOCK), "poetry").unwrap();
        for name in ["best", "last", "average", "update-00000001", "update-00000002-2"] {
            fs::create_dir(checkpoints.join(name)).unwrap();
            fs::write(checkpoints.join(name).join(STATE), "{\"kind\": \"somebody's\"}").unwrap();
        }
        assert_eq!(proven(), [""; 0]);
        assert_eq!(found(&dir.0).len(), 12);
        assert!(!is_runs(&at(LOCK)));

        let listed = [(CONFIG, "{}".to_string()), (VOCABULARY, "a 1\n".to_string())];
        fs::write(at(CHECKSUMS), checksums::text(&listed)).unwrap();
        fs::write(at(LOG), "{\"event\": \"started\", \"update\": 0}\n").unwrap();
        fs::write(at(CURVES), b"\x89PNG\r\n\x1a\n....tEXtSoftware\0normformer_rs 0.1").unwrap();
        fs::write(at(LOCK), "{\"pid\":3,\"host\":\"h\"").unwrap();
        for name in ["average", "update-00000001"] {
            fs::write(checkpoints.join(name).join(STATE), format!("{{\"kind\": \"{KIND}\"}}")).unwrap();
        }
        fs::remove_dir_all(checkpoints.join("best")).unwrap();
        symlink("update-00000001", checkpoints.join("best")).unwrap();
        for (log, is_ours) in [
            ("{\"ev\n{\"event\": \"started\", \"update\": 0}\n", true),
            ("{\"device\":", true),
            ("text", false),
            ("", true),
        ] {
            fs::write(at(LOG), log).unwrap();
            assert_eq!(is_runs(&at(LOG)), is_ours, "{log}");
        }
        let expected = [CONFIG, VOCABULARY, CHECKSUMS, LOG, CURVES, "average", "best", "update-00000001"];
        assert_eq!(proven(), expected);
        assert!(is_runs(&at(LOCK)));
        // Removing the checkpoint would remove a file that the user put into its folder.
        fs::write(checkpoints.join("update-00000001/out.txt"), "mine").unwrap();
        assert!(!is_runs(&checkpoints.join("update-00000001")));
    }

    #[test]
    fn no_link_is_followed_to_a_proof() {
        let (run, other) = (Scratch::new("ownership-run"), Scratch::new("ownership-other"));
        let listed = [(CONFIG, "{}".to_string())];
        fs::write(run.0.join(CHECKSUMS), checksums::text(&listed)).unwrap();
        fs::write(run.0.join(CONFIG), "{}").unwrap();
        fs::write(run.0.join(LOG), "").unwrap();
        fs::create_dir_all(run.0.join("checkpoints/update-00000001")).unwrap();
        fs::write(run.0.join("checkpoints/update-00000001").join(STATE), format!("{{\"kind\": \"{KIND}\"}}")).unwrap();
        assert!(found(&run.0).iter().all(|(_, is_runs)| *is_runs));
        for name in [CONFIG, CHECKSUMS, LOG] {
            symlink(run.0.join(name), other.0.join(name)).unwrap();
        }
        fs::create_dir(other.0.join(CHECKPOINTS)).unwrap();
        for name in ["update-00000001", "best"] {
            symlink(run.0.join("checkpoints/update-00000001"), other.0.join(CHECKPOINTS).join(name)).unwrap();
        }
        assert_eq!(found(&other.0).len(), 5);
        assert!(found(&other.0).iter().all(|(_, is_runs)| !is_runs), "{:?}", found(&other.0));
        // The checkpoints may lie on another disk.
        fs::remove_dir_all(other.0.join(CHECKPOINTS)).unwrap();
        symlink(run.0.join(CHECKPOINTS), other.0.join(CHECKPOINTS)).unwrap();
        assert!(found(&other.0).iter().any(|(path, is_runs)| path.ends_with("update-00000001") && *is_runs));
    }

    #[test]
    fn names_of_checkpoints() {
        for key in [(0, 1), (12, 1), (12, 2), (123_456_789, 7)] {
            assert_eq!(update_of(&name_of(key)), Some(key));
        }
        for strange in ["update-1", "update-00000001-1", "update-0000000x", "best", "update-00000001-02"] {
            assert_eq!(update_of(strange), None, "{strange}");
        }
    }
}
