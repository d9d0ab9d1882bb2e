//! Crash-safe writes: content goes to a temporary file, is flushed to the disk, and then the file is renamed.
//!
//! An unfinished file or folder is called `.NAME.tmp-PID` and lies beside its final place, so that [`clean`]
//! recognises the leftovers of a killed process. Every system call that changes the disk first passes
//! [`fault::point`], where tests inject failures. Files are opened without following links.

pub mod fault;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use flate2::Crc;

use crate::error::{Error, Result};

/// The number of bytes that one `write` call passes to the system. It is small in tests, so that their small files need
/// several calls, at each of which a failure can be injected.
const CHUNK: usize = if cfg!(test) { 256 } else { 4 << 20 };

/// The length and the CRC-32 (IEEE) of a file's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Digest {
    /// Length in bytes.
    pub bytes: u64,
    /// CRC-32 (IEEE, as in gzip).
    pub crc32: u32,
}

impl Digest {
    /// Computes the digest of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        let mut crc = Crc::new();
        crc.update(bytes);
        Digest { bytes: bytes.len() as u64, crc32: crc.sum() }
    }
}

/// A new file while it is written. Errors name `shown`, the file's final place.
pub struct Sink {
    file: File,
    shown: PathBuf,
    /// The bytes that are not yet written to the file, fewer than [`CHUNK`].
    buffer: Vec<u8>,
    /// The checksum of all bytes so far.
    crc: Crc,
    /// The number of all bytes so far.
    bytes: u64,
}

impl Sink {
    /// Creates the file `path`, which must not exist; errors name `shown` instead.
    fn create(path: &Path, shown: PathBuf) -> Result<Self> {
        let file = act("create", &shown, || File::options().write(true).create_new(true).open(path))?;
        Ok(Sink { file, shown, buffer: Vec::new(), crc: Crc::new(), bytes: 0 })
    }

    /// Appends `bytes`: writes whole chunks to the file, and keeps the rest in the buffer.
    pub fn put(&mut self, mut bytes: &[u8]) -> Result<()> {
        self.crc.update(bytes);
        self.bytes += bytes.len() as u64;
        while self.buffer.len() + bytes.len() >= CHUNK {
            // `head` fills the buffer up to one chunk.
            let (head, tail) = bytes.split_at(CHUNK - self.buffer.len());
            self.buffer.extend_from_slice(head);
            self.flush()?;
            bytes = tail;
        }
        self.buffer.extend_from_slice(bytes);
        Ok(())
    }

    /// Writes the buffer to the file.
    fn flush(&mut self) -> Result<()> {
        write(&mut self.file, &self.shown, &self.buffer)?;
        self.buffer.clear();
        Ok(())
    }

    /// Writes the rest, flushes the file to the disk, and returns the digest of all its bytes.
    fn finish(mut self) -> Result<Digest> {
        if !self.buffer.is_empty() {
            self.flush()?;
        }
        act("fsync", &self.shown, || self.file.sync_all())?;
        Ok(Digest { bytes: self.bytes, crc32: self.crc.sum() })
    }
}

/// A new directory under a temporary name; see [`write_directory`].
pub struct Directory<'a> {
    /// The temporary path.
    temporary: PathBuf,
    /// The final path, which errors name.
    target: &'a Path,
}

impl Directory<'_> {
    /// Creates the file `name` in the directory, lets `fill` write its content, and flushes it to the disk. Returns the
    /// digest of the content.
    pub fn file(&self, name: &str, fill: impl FnOnce(&mut Sink) -> Result<()>) -> Result<Digest> {
        let mut sink = Sink::create(&self.temporary.join(name), self.target.join(name))?;
        fill(&mut sink)?;
        sink.finish()
    }
}

/// Creates the directory `target`, which must not exist, with the files that `fill` writes. The files go into a
/// temporary directory, which is renamed at the end, so `target` appears complete or not at all.
pub fn write_directory(target: &Path, fill: impl FnOnce(&Directory) -> Result<()>) -> Result<()> {
    if target.symlink_metadata().is_ok() {
        return Err(Error::invalid(format!("{} exists already; choose another name", target.display())));
    }
    let temporary = temporary_path(target);
    remove_any(&temporary)?; // an earlier process of the same number may have left it
    let written = (|| {
        act("create", target, || fs::create_dir(&temporary))?;
        fill(&Directory { temporary: temporary.clone(), target })?;
        act("fsync", target, || sync_directory(&temporary))?;
        act("rename", target, || fs::rename(&temporary, target))
    })();
    finish(written, &temporary, target)
}

/// Writes `bytes` to the file `target`, which may exist. The new file replaces the old one by a rename, so a reader
/// finds either the whole old file or the whole new one.
pub fn write_file(target: &Path, bytes: &[u8]) -> Result<()> {
    let temporary = temporary_path(target);
    remove_any(&temporary)?; // an earlier process of the same number may have left it
    let written = (|| {
        let mut sink = Sink::create(&temporary, target.to_path_buf())?;
        sink.put(bytes)?;
        sink.finish()?;
        act("rename", target, || fs::rename(&temporary, target))
    })();
    finish(written, &temporary, target)
}

/// Appends `text` to `path`, and creates the file if it does not exist. Errors like [`open`].
pub fn append(path: &Path, text: &str) -> Result<()> {
    fault::point("open").map_err(|e| Error::io("open", path, e))?;
    let mut file = open(path, File::options().create(true).append(true))?;
    write(&mut file, path, text.as_bytes())
}

/// Opens a regular file with the options `how`. The call follows no link, and does not wait for the other end of a
/// pipe.
///
/// # Errors
/// `path` is a link, a device, a pipe or a folder (the message says which, and what to do), or the system refuses.
pub fn open(path: &Path, how: &mut OpenOptions) -> Result<File> {
    let opened = how.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path);
    let file = opened.map_err(|e| match path.symlink_metadata() {
        Ok(metadata) if !metadata.is_file() => not_regular(path, metadata.file_type()),
        _ => Error::io("open", path, e),
    })?;
    // The system may open a folder, a device or a pipe without an error, so the open file is checked too.
    let metadata = file.metadata().map_err(|e| Error::io("open", path, e))?;
    match metadata.is_file() {
        true => Ok(file),
        false => Err(not_regular(path, metadata.file_type())),
    }
}

/// Reads a regular file; returns `None` if there is no file. Errors like [`open`], and if the file has more than
/// `most` bytes.
pub fn read(path: &Path, most: u64) -> Result<Option<Vec<u8>>> {
    read_all(open(path, File::options().read(true)), path, most)
}

/// Reads a file like [`read`], but opens it with [`open_own`].
pub fn read_own(path: &Path, most: u64) -> Result<Option<Vec<u8>>> {
    read_all(open_own(path, File::options().read(true)), path, most)
}

/// Reads the opened file, which `path` names in errors; returns `None` if it did not exist. Errors if it has more than
/// `most` bytes.
fn read_all(opened: Result<File>, path: &Path, most: u64) -> Result<Option<Vec<u8>>> {
    let file = match opened {
        Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let mut bytes = Vec::new();
    // One byte more than allowed shows that the file is too long.
    file.take(most.saturating_add(1)).read_to_end(&mut bytes).map_err(|e| Error::io("read", path, e))?;
    match bytes.len() as u64 > most {
        true => Err(Error::invalid(format!("{}: expected at most {most} bytes, found more", path.display()))),
        false => Ok(Some(bytes)),
    }
}

/// Opens a regular file with the options `how`. The file must belong to this user, and nobody else may write it. If the
/// call creates the file, it gets mode 0600.
///
/// # Errors
/// Errors like [`open`], and if the file has another owner or is writable by its group or others.
pub fn open_own(path: &Path, how: &mut OpenOptions) -> Result<File> {
    let file = open(path, how.mode(0o600))?;
    let metadata = file.metadata().map_err(|e| Error::io("open", path, e))?;
    check_own(path, &metadata).map(|()| file)
}

/// Errors if `path` is a link, belongs to another user, or is writable by its group or others.
pub fn check_own_directory(path: &Path) -> Result<()> {
    let metadata = path.symlink_metadata().map_err(|e| Error::io("open", path, e))?;
    match metadata.is_dir() {
        true => check_own(path, &metadata),
        false => Err(Error::invalid(format!("{} is a link or a file; expected a folder", path.display()))),
    }
}

/// Errors if the file or folder `path`, which has this metadata, belongs to another user, or if others may write it.
fn check_own(path: &Path, metadata: &fs::Metadata) -> Result<()> {
    // SAFETY: geteuid takes no arguments and cannot fail.
    let user = unsafe { libc::geteuid() };
    let (owner, mode) = (metadata.uid(), metadata.mode() & 0o7777);
    let path = path.display();
    // 0o022 are the write permissions of the group and of others. The first case whose condition holds decides.
    match () {
        () if owner != user => Err(Error::invalid(format!("{path} belongs to user {owner}, and this is user {user}"))),
        () if mode & 0o022 != 0 => {
            Err(Error::invalid(format!("{path} can be written by other users (mode {mode:o}): chmod go-w {path}")))
        }
        () => Ok(()),
    }
}

/// Builds the error for a path that is no regular file; it says what the path is, and what to do.
fn not_regular(path: &Path, kind: fs::FileType) -> Error {
    use std::os::unix::fs::FileTypeExt;
    let what = match kind {
        f if f.is_symlink() => "a symbolic link, which is not followed",
        f if f.is_dir() => "a folder",
        f if f.is_fifo() => "a pipe",
        _ => "a device or a socket",
    };
    Error::invalid(format!(
        "{} is {what}; expected a regular file: put the file itself there, or choose another folder",
        path.display()
    ))
}

/// Writes all bytes; an error names the file `shown`. A test may inject an error here, or a short write of half of the
/// bytes.
fn write(file: &mut File, shown: &Path, bytes: &[u8]) -> Result<()> {
    act("write", shown, || file.write_all(bytes)).inspect_err(|_| {
        if fault::is_short() {
            // Leave half of the data, as a full disk would. An error of this write is ignored, because the caller
            // already gets the injected one.
            let _ = file.write_all(&bytes[..bytes.len() / 2]);
        }
    })
}

/// Removes the file `path`, if it exists.
pub fn remove_file(path: &Path) -> Result<()> {
    match act("remove", path, || fs::remove_file(path)) {
        Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Makes `link` a symbolic link to `destination`. If there is an old link, a reader finds either the old destination or
/// the new one.
pub fn write_link(link: &Path, destination: &str) -> Result<()> {
    if link.symlink_metadata().is_ok_and(|m| !m.is_symlink()) {
        return Err(Error::invalid(format!("{} is not a symbolic link; move it away", link.display())));
    }
    let temporary = temporary_path(link);
    remove_any(&temporary)?; // an earlier process of the same number may have left it
    let written = (|| {
        act("create", link, || std::os::unix::fs::symlink(destination, &temporary))?;
        act("rename", link, || fs::rename(&temporary, link))
    })();
    finish(written, &temporary, link)
}

/// Removes a directory. It is renamed before its files are removed, so a reader finds it either whole or not at all.
pub fn remove_directory(path: &Path) -> Result<()> {
    let temporary = temporary_path(path);
    remove_any(&temporary)?; // an earlier process of the same number may have left it
    act("rename", path, || fs::rename(path, &temporary))?;
    act("fsync the folder of", path, || sync_directory(parent(path)))?;
    act("remove", path, || fs::remove_dir_all(&temporary))
}

/// Creates `path` and its missing parent folders, and flushes their names to the disk.
pub fn make_directory(path: &Path) -> Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    make_directory(parent(path))?;
    match act("create", path, || fs::create_dir(path)) {
        Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        created => created,
    }?;
    act("fsync the folder of", path, || sync_directory(parent(path)))
}

/// Removes the unfinished files and folders that killed processes left in `folder`, if `is_ours` is true for the final
/// name. Leftovers of this process are removed too; those of another living process stay.
pub fn clean(folder: &Path, is_ours: impl Fn(&str) -> bool) -> Result<()> {
    let entries = fs::read_dir(folder).map_err(|e| Error::io("read", folder, e))?;
    for entry in entries {
        let entry = entry.map_err(|e| Error::io("read", folder, e))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_leftover = |(target, pid): (&str, u32)| is_ours(target) && (pid == std::process::id() || !alive(pid));
        if unfinished(&name).is_some_and(is_leftover) {
            remove_any(&entry.path())?;
        }
    }
    Ok(())
}

/// Parses the name of an unfinished file, `.NAME.tmp-PID`, into NAME and PID.
fn unfinished(name: &str) -> Option<(&str, u32)> {
    let (target, pid) = name.strip_prefix('.')?.rsplit_once(".tmp-")?;
    Some((target, pid.parse().ok()?))
}

/// Ends a write to `target`, whose result is `written`. After success it flushes the new name to the disk; after an
/// error it removes the unfinished file `temporary`.
fn finish(written: Result<()>, temporary: &Path, target: &Path) -> Result<()> {
    if let Err(error) = written {
        // Report the write's error and not the removal's. If the removal fails, `clean` removes the file at the next
        // start.
        let _ = remove_any(temporary);
        return Err(error);
    }
    act("fsync the folder of", target, || sync_directory(parent(target)))
}

/// Runs one system call on `path`; an error names the path and the call, `name`. A test may have planned a failure at
/// this call, which is then returned instead.
pub fn act<T>(name: &'static str, path: &Path, run: impl FnOnce() -> io::Result<T>) -> Result<T> {
    fault::point(name).and_then(|()| run()).map_err(|e| Error::io(name, path, e))
}

/// Returns the path of the temporary file beside `target`.
fn temporary_path(target: &Path) -> PathBuf {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    target.with_file_name(format!(".{name}.tmp-{}", std::process::id()))
}

/// Returns the folder of `path`; "." for a bare name.
fn parent(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Flushes the names in a directory to the disk.
fn sync_directory(path: &Path) -> io::Result<()> {
    match File::open(path)?.sync_all() {
        // Some network and FUSE file systems cannot flush a directory and return EINVAL, which is ignored.
        Err(e) if e.kind() == io::ErrorKind::InvalidInput => Ok(()),
        synced => synced,
    }
}

/// Removes a file, a link or a directory with its content, if it exists.
pub fn remove_any(path: &Path) -> Result<()> {
    // The metadata are those of a link itself, so that a link to a directory is removed and not the directory.
    let removed = match path.symlink_metadata() {
        Ok(m) if m.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(e) => Err(e),
    };
    match removed {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io("remove", path, e)),
        _ => Ok(()),
    }
}

/// True if a process with this number exists.
fn alive(pid: u32) -> bool {
    // For kill(2), 0 and negative numbers mean groups of processes, so they are not the number of a process.
    let Some(pid) = i32::try_from(pid).ok().filter(|&pid| pid > 0) else { return false };
    // SAFETY: kill takes no pointer, and signal 0 only asks whether the process exists.
    let result = unsafe { libc::kill(pid, 0) };
    // EPERM: the process exists, but belongs to another user.
    result == 0 || io::Error::last_os_error().raw_os_error() == Some(libc::EPERM)
}

#[cfg(test)]
mod tests {
    use super::fault::{arm, Fault};
    use super::*;
    use crate::testing::Scratch;

    #[test]
    fn a_file_is_the_old_or_the_new_whatever_act_fails() {
        let dir = Scratch::new("files-write");
        let file = dir.0.join("f");
        let (old, new) = (vec![1; 600], vec![2; 900]);
        write_file(&file, &old).unwrap();
        let armed = arm(Fault::Count);
        write_file(&file, &new).unwrap();
        let points = armed.passed();
        drop(armed);
        assert_eq!(points, 8, "create, four writes of at most 256 bytes, fsync, rename, fsync");
        for k in 1..=points {
            write_file(&file, &old).unwrap();
            let armed = arm(Fault::Enospc(k));
            let error = write_file(&file, &new).unwrap_err();
            drop(armed);
            assert!(
                matches!(&error, Error::Io { source, path, .. }
                if source.kind() == io::ErrorKind::StorageFull && *path == file.display().to_string()),
                "{error}"
            );
            assert_eq!(fs::read(&file).unwrap(), if k == points { &new[..] } else { &old[..] }, "place {k}");
            assert_eq!(fs::read_dir(&dir.0).unwrap().count(), 1, "place {k} left something");
        }
    }

    #[test]
    fn the_digest_is_that_of_the_bytes_whatever_the_pieces() {
        let dir = Scratch::new("files-digest");
        let bytes: Vec<u8> = (0..2000u32).map(|i| (i * 7) as u8).collect();
        let mut crc = Crc::new();
        crc.update(&bytes);
        for piece in [1, 255, 256, 257, 512, 2000] {
            let target = dir.0.join(piece.to_string());
            let fill = |sink: &mut Sink| bytes.chunks(piece).try_for_each(|b| sink.put(b));
            let mut digest = None;
            write_directory(&target, |d| d.file("f", fill).map(|got| digest = Some(got))).unwrap();
            assert_eq!(digest, Some(Digest { bytes: 2000, crc32: crc.sum() }));
            assert_eq!(fs::read(target.join("f")).unwrap(), bytes);
        }
    }

    #[test]
    fn only_what_dead_processes_left_is_cleaned() {
        let dir = Scratch::new("files-clean");
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let parent = std::os::unix::process::parent_id();
        let dead = child.id();
        let names = [
            format!(".dead.tmp-{dead}"),
            format!(".living.tmp-{parent}"),
            "dead.tmp-".into(),
            ".x.tmp-y".into(),
            format!("{dead}.part"),
        ];
        for name in &names {
            make_directory(&dir.0.join(name).join("inner")).unwrap();
        }
        make_directory(&dir.0.join(format!(".other.tmp-{dead}"))).unwrap();
        clean(&dir.0, |name| name != "other").unwrap();
        let left: Vec<bool> = names.iter().map(|n| dir.0.join(n).exists()).collect();
        assert_eq!(left, [false, true, true, true, true]);
        assert!(dir.0.join(format!(".other.tmp-{dead}")).exists(), "another program's");
    }

    #[test]
    fn only_regular_files_are_opened_and_nothing_waits() {
        let dir = Scratch::new("files-regular");
        let path_of = |name: &str| dir.0.join(name);
        fs::write(path_of("file"), "text").unwrap();
        std::os::unix::fs::symlink("file", path_of("link")).unwrap();
        std::os::unix::fs::symlink("nowhere", path_of("broken")).unwrap();
        let pipe = std::ffi::CString::new(path_of("pipe").to_str().unwrap()).unwrap();
        // SAFETY: the pointer is to a NUL-terminated string.
        assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
        fs::create_dir(path_of("folder")).unwrap();
        for (name, what) in
            [("link", "symbolic link"), ("broken", "symbolic link"), ("pipe", "a pipe"), ("folder", "a folder")]
        {
            for error in [read(&path_of(name), 9).unwrap_err(), append(&path_of(name), "more").unwrap_err()] {
                assert!(error.to_string().contains(what), "{name}: {error}");
            }
        }
        assert!(read(Path::new("/dev/zero"), 9).unwrap_err().to_string().contains("a device"));
        assert_eq!(read(&path_of("file"), 4).unwrap().unwrap(), b"text");
        assert!(read(&path_of("file"), 3).unwrap_err().to_string().contains("at most 3 bytes"));
        assert_eq!(read(&path_of("none"), 3).unwrap(), None);
        assert!(!path_of("nowhere").exists(), "nothing was written through a link");
    }

    #[test]
    fn only_ones_own_files_are_trusted() {
        use std::os::unix::fs::{chown, symlink, PermissionsExt};
        let dir = Scratch::new("files-own");
        let path_of = |name: &str| dir.0.join(name);
        let allow = |name: &str, mode| fs::set_permissions(path_of(name), fs::Permissions::from_mode(mode)).unwrap();
        drop(open_own(&path_of("file"), File::options().append(true).create(true)).unwrap());
        assert_eq!(path_of("file").metadata().unwrap().mode() & 0o777, 0o600);
        fs::create_dir(path_of("folder")).unwrap();
        symlink("file", path_of("link")).unwrap();
        symlink("folder", path_of("link of a folder")).unwrap();
        for mode in [0o700, 0o755] {
            allow("folder", mode);
            allow("file", mode & 0o644);
            check_own_directory(&path_of("folder")).unwrap();
            assert_eq!(read_own(&path_of("file"), 9).unwrap().unwrap(), b"");
        }
        let refusals =
            || [read_own(&path_of("file"), 9).unwrap_err(), check_own_directory(&path_of("folder")).unwrap_err()];
        for mode in [0o775, 0o707, 0o777] {
            allow("folder", mode);
            allow("file", mode & 0o666);
            for error in refusals() {
                assert!(error.to_string().contains("can be written by other users"), "{mode:o}: {error}");
            }
        }
        allow("folder", 0o700);
        allow("file", 0o600);
        if ["file", "folder"].iter().all(|name| chown(path_of(name), Some(12345), None).is_ok()) {
            for error in refusals() {
                assert!(error.to_string().contains("belongs to user 12345"), "{error}");
            }
        }
        assert!(read_own(&path_of("link"), 9).unwrap_err().to_string().contains("symbolic link"));
        for name in ["link of a folder", "file"] {
            assert!(
                check_own_directory(&path_of(name)).unwrap_err().to_string().contains("expected a folder"),
                "{name}"
            );
        }
        assert_eq!(read_own(&path_of("none"), 9).unwrap(), None);
    }

    #[test]
    fn a_short_write_leaves_half_and_the_old_file() {
        let dir = Scratch::new("files-short");
        let file = dir.0.join("f");
        write_file(&file, b"old").unwrap();
        // The second place is the write; the first creates or opens the file.
        let armed = arm(Fault::Short(2));
        let error = write_file(&file, b"newer").unwrap_err();
        append(&dir.0.join("log"), "abcd").unwrap();
        drop(armed);
        assert!(error.to_string().contains("Input/output error"), "{error}");
        assert_eq!(fs::read(&file).unwrap(), b"old");
        let armed = arm(Fault::Short(2));
        append(&dir.0.join("log"), "efgh").unwrap_err();
        drop(armed);
        assert_eq!(fs::read(dir.0.join("log")).unwrap(), b"abcdef");
    }

    #[test]
    fn a_link_moves_and_a_folder_in_its_place_is_refused() {
        let dir = Scratch::new("files-link");
        let link = dir.0.join("last");
        write_link(&link, "a").unwrap();
        write_link(&link, "b").unwrap();
        assert_eq!(fs::read_link(&link).unwrap(), Path::new("b"));
        fs::remove_file(&link).unwrap();
        fs::create_dir(&link).unwrap();
        assert!(write_link(&link, "c").unwrap_err().to_string().contains("is not a symbolic link"));
        assert!(link.is_dir());
    }
}
