//! A lock that allows one writer at a time in a run's folder.

use crate::atomic::{self, act};
use crate::error::{Error, Result};
use crate::ownership::{checksums, is_a_runs_name, is_lock, LOCK};
use serde::{Deserialize, Serialize};
use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// The maximum number of retries when the folder vanishes while it is being locked. There is a maximum because the
/// working directory itself may have been removed.
const TRIES: u32 = 1000;

/// A lock on a folder: only this process writes there until the value is dropped. The system unlocks the file when a
/// process dies, so a dead process locks nobody out.
pub(super) struct Lock {
    /// The lock file, which stays open as long as the lock is held.
    file: File,
    path: PathBuf,
    /// The folders that were created for the lock, outermost first. Those that are still empty at the end are
    /// removed.
    made: Vec<PathBuf>,
    /// False on a file system that has no locks.
    pub is_exclusive: bool,
}

/// The process that holds a lock, as the lock file describes it.
#[derive(Serialize, Deserialize)]
struct Owner {
    pid: u32,
    host: String,
    /// The date and time, UTC.
    since: String,
}

impl Lock {
    /// Locks the folder. Creates the folder if it is missing, and removes what killed processes left unfinished
    /// there.
    ///
    /// # Errors
    /// Errors if another process has locked the folder (the message names its process id, host and start), or if the
    /// lock's name belongs to something else.
    pub(super) fn take(folder: &Path) -> Result<Self> {
        let path = folder.join(LOCK);
        let mut tries = 0;
        loop {
            let made = missing(folder);
            atomic::make_directory(folder)?;
            // The call does nothing itself: it lets a test inject a failure at this point.
            act("open", &path, || Ok(()))?;
            let file = match atomic::open(&path, File::options().read(true).write(true).create(true).truncate(false)) {
                // The previous owner has just removed the folder, because it had created the folder for its lock.
                Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound && tries < TRIES => {
                    tries += 1;
                    continue;
                }
                opened => opened?,
            };
            let is_exclusive = match file.try_lock() {
                Ok(()) => true,
                Err(TryLockError::WouldBlock) => return Err(in_use(folder, file)),
                Err(TryLockError::Error(e)) if has_no_locks(&e) => false,
                Err(TryLockError::Error(e)) => return Err(Error::io("lock", &path, e)),
            };
            // The previous owner may have removed the file between our open and our lock. Then the name belongs to
            // another file or to none.
            if !is_named(&file, &path) {
                if tries == TRIES {
                    let reason = io::Error::other("its name leads to another file each time it is opened");
                    return Err(Error::io("lock", &path, reason));
                }
                tries += 1;
                continue;
            }
            let mut head = Vec::new();
            // The text of a lock is shorter than 4096 bytes. A longer file is the user's, and need not be read whole.
            (&file).take(4096).read_to_end(&mut head).map_err(|e| Error::io("read", &path, e))?;
            if !is_lock(&head) {
                return Err(Error::invalid(format!(
                    "{} is not the lock of a run, which would write over it: choose another output",
                    path.display()
                )));
            }
            let owner = serde_json::to_string(&Owner::this()).map_err(|e| Error::invalid(e.to_string()))?;
            let mut lock = Lock { file, path, made, is_exclusive };
            let Lock { file, path, .. } = &mut lock;
            act("write", path, || {
                file.set_len(0)?;
                file.rewind()?;
                file.write_all(owner.as_bytes())
            })?;
            // Unfinished files are removed only if checksums prove that the folder is a run's.
            if !checksums::listed(folder).is_empty() {
                atomic::clean(folder, is_a_runs_name)?;
            }
            return Ok(lock);
        }
    }
}

impl Drop for Lock {
    /// Removes the lock file, and the folders that were created for it, innermost first, if they are empty.
    fn drop(&mut self) {
        // If the removal fails, a file or an empty folder stays, which does not stop the next run.
        let _ = fs::remove_file(&self.path);
        self.made.iter().rev().for_each(|folder| drop(fs::remove_dir(folder)));
    }
}

impl Owner {
    /// Describes this process, as the owner from now on.
    fn this() -> Self {
        // The clock may be set to a time before 1970.
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64);
        Owner { pid: std::process::id(), host: host(), since: utc(seconds) }
    }
}

/// Returns the error for a folder that another process has locked. `file` is the lock file, which describes the owner.
fn in_use(folder: &Path, mut file: File) -> Error {
    let mut text = String::new();
    let owner = file.read_to_string(&mut text).ok().and_then(|_| serde_json::from_str(&text).ok());
    let (who, how_to_stop) = match owner {
        Some(Owner { pid, host, since }) => {
            (format!("process {pid} on {host} since {since}"), format!("stop it there (`kill -INT {pid}`)"))
        }
        // The owner has not written its name yet, or its disk is full.
        None => ("another process".into(), "stop it".into()),
    };
    Error::invalid(format!(
        "{} is in use by {who}: wait for its end, {how_to_stop}, or choose another output",
        folder.display()
    ))
}

/// Returns the folders on the path to `folder` that do not exist, outermost first.
fn missing(folder: &Path) -> Vec<PathBuf> {
    let mut missing: Vec<PathBuf> = folder
        .ancestors()
        .take_while(|folder| !folder.as_os_str().is_empty() && !folder.exists())
        .map(Path::to_path_buf)
        .collect();
    missing.reverse();
    missing
}

/// True if `path` still leads to this open file, with the same device and inode, and not to another one.
fn is_named(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(own), Ok(named)) => (own.dev(), own.ino()) == (named.dev(), named.ino()),
        _ => false,
    }
}

/// Returns true for the errors of file systems that are mounted without locks, such as some network file systems.
fn has_no_locks(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Unsupported || error.raw_os_error() == Some(libc::ENOLCK)
}

/// Returns the name of this machine.
fn host() -> String {
    let mut name = [0u8; 256];
    // SAFETY: the pointer leads to as many writable bytes as `name.len()` says.
    let status = unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len()) };
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    match status {
        0 => String::from_utf8_lossy(&name[..end]).into_owned(),
        _ => "an unknown host".into(),
    }
}

/// Formats seconds since 1970 as `2026-11-23 12:55:01 UTC`.
fn utc(seconds: i64) -> String {
    // SAFETY: a `tm` holds integers and a pointer that nobody reads, and zeros are valid for all of them.
    let mut date: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers lead to live local variables. The call fails only for years past 2³¹, and then leaves
    // zeros.
    unsafe { libc::gmtime_r(&seconds, &mut date) };
    let (year, month) = (1900 + date.tm_year, 1 + date.tm_mon);
    let (day, hour, minute, second) = (date.tm_mday, date.tm_hour, date.tm_min, date.tm_sec);
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ownership::CHECKSUMS;

    #[test]
    fn a_folder_has_one_writer_and_is_free_again() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("runs/one");
        let lock = Lock::take(&run).unwrap();
        let refused = Lock::take(&run).err().unwrap().to_string();
        let pid = std::process::id();
        assert!(refused.contains(&format!("in use by process {pid} on {} since 2", host())), "{refused}");
        drop(lock);
        assert!(!folder.path().join("runs").exists(), "folders that were made for the lock");
        let lock = Lock::take(&run).unwrap();
        fs::write(run.join("config.json"), "{}").unwrap();
        drop(lock);
        let names: Vec<_> = fs::read_dir(&run).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["config.json"]);
    }

    #[test]
    fn a_dead_owners_file_is_taken_over_and_its_leftovers_go() {
        let folder = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        fs::write(folder.path().join(LOCK), "{\"pid\": 1, \"host\": \"elsewhere\"").unwrap();
        fs::write(folder.path().join(format!(".vocabulary.txt.tmp-{}", child.id())), "half").unwrap();
        drop(Lock::take(folder.path()).unwrap());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing says yet that it is a run's");
        let files = [("vocabulary.txt", String::new())];
        fs::write(folder.path().join(CHECKSUMS), checksums::text(&files)).unwrap();
        let lock = Lock::take(folder.path()).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
        drop(lock);
        assert!(folder.path().exists(), "it was there before");
    }

    #[test]
    fn threads_that_come_and_go_exclude_each_other() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let inside = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|threads| {
            for _ in 0..4 {
                threads.spawn(|| {
                    let mut turns = 0;
                    while turns < 50 {
                        let Ok(_lock) = Lock::take(&run) else { continue };
                        assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                        inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                        turns += 1;
                    }
                });
            }
        });
    }

    #[test]
    fn another_programs_lock_and_a_link_stay_as_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let (path, target) = (folder.path().join(LOCK), folder.path().join("mine"));
        fs::write(&target, "mine").unwrap();
        fs::write(&path, "somebody's").unwrap();
        let said = Lock::take(folder.path()).err().unwrap().to_string();
        assert!(said.contains("is not the lock of a run"), "{said}");
        assert_eq!(fs::read(&path).unwrap(), b"somebody's");
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&target, &path).unwrap();
        let said = Lock::take(folder.path()).err().unwrap().to_string();
        assert!(said.contains("is a symbolic link"), "{said}");
        assert_eq!(fs::read(&target).unwrap(), b"mine");
    }

    #[test]
    fn dates_are_the_calendars() {
        for (seconds, date) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_827_696, "2000-02-29 12:34:56 UTC"),
            (1_735_689_599, "2024-12-31 23:59:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
        ] {
            assert_eq!(utc(seconds), date);
        }
    }
}
