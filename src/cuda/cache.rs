//! A cache of compiled kernels on disk, with one file per compiler, architecture, options and source.
//!
//! A file holds its key, its length and checksum, then the binary. If these do not match, the kernel is compiled
//! again. The cache only saves time: if it cannot be read or written, everything still works.
//!
//! The GPU runs these files. So a folder or file is used only if it belongs to this user, is not a link, and is not
//! writable by other users. Otherwise it is left alone, and a warning on standard error gives the reason, once.

use super::{nvrtc, Program};
use crate::atomic;
use crate::error::{Error, Result};
use std::collections::HashSet;
use std::fs::{DirBuilder, File};
use std::io::Write as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// The maximum size in bytes of a file in the cache; a longer one is damaged or malicious.
pub const BYTES: u64 = 64 << 20;

/// Returns the program's binary for a compute capability such as 90, read from the disk if it was compiled before. The
/// second part is the binary's file; `None` if there is no trusted cache folder.
pub fn compiled(program: &Program, options: &str, architecture: i32) -> Result<(Vec<u8>, Option<PathBuf>)> {
    let compiler = nvrtc::compiler()?;
    let (major, minor) = compiler.version();
    let source = program.files.concat();
    let key = format!("normformer_rs NVRTC {major}.{minor} sm_{architecture} {options}\n{source}");
    let folder = configured_folder().and_then(|f| trusted(make(&f)).map(|()| f));
    let path = folder.map(|f| f.join(format!("{:032x}.cubin", fingerprint(key.as_bytes()))));
    if let Some(binary) = path.as_deref().and_then(|p| read(p, &key)) {
        return Ok((binary, path));
    }
    let (binary, _messages) = compiler.compile(program.name, &source, options, architecture)?;
    if let Some(path) = &path {
        // The write is best effort: without the file, the next process compiles again.
        let _ = write(path, &key, &binary);
    }
    Ok((binary, path))
}

/// Returns the cache folder, if there is one and it is trusted.
pub fn folder() -> Option<PathBuf> {
    configured_folder().filter(|folder| trusted(atomic::check_own_directory(folder)).is_some())
}

/// Returns the result of `checked`, a check of a folder or file, or `None` if the check failed. If the file exists but
/// is not trusted, writes a warning with the reason to standard error, once for each reason.
pub fn trusted<T>(checked: Result<T>) -> Option<T> {
    static WARNED: Mutex<Option<HashSet<String>>> = Mutex::new(None);
    match checked {
        Ok(result) => Some(result),
        // If nothing exists there, or it cannot be read, no warning is needed.
        Err(Error::Io { .. }) => None,
        Err(why) => {
            let why = why.to_string();
            let mut warned = WARNED.lock().unwrap_or_else(PoisonError::into_inner);
            if warned.get_or_insert_default().insert(why.clone()) {
                // The warning is best effort: standard error may be closed.
                let _ = writeln!(
                    std::io::stderr(),
                    "warning: normformer_rs does not trust its cache of CUDA kernels: {why} \
                     (NORMFORMER_RS_CACHE=FOLDER selects another folder)"
                );
            }
            None
        }
    }
}

/// Returns NORMFORMER_RS_CACHE or, if that is not set, normformer_rs in the user's cache folder; `None` without a
/// home folder.
fn configured_folder() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let user_cache = || variable("XDG_CACHE_HOME").or_else(|| variable("HOME").map(|home| home.join(".cache")));
    variable("NORMFORMER_RS_CACHE").or_else(|| user_cache().map(|folder| folder.join("normformer_rs")))
}

/// Creates the folder, with access only for its user, if it does not exist. Errors if it cannot be created or is not
/// trusted, like [`atomic::check_own_directory`].
fn make(folder: &Path) -> Result<()> {
    // If the folder cannot be created, the check below returns the error.
    let _ = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    atomic::check_own_directory(folder)
}

/// Computes the 128-bit FNV-1a hash, which is used as a checksum and as a file name. The two constants are the hash's
/// offset basis and its prime.
fn fingerprint(bytes: &[u8]) -> u128 {
    bytes.iter().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, |hash, byte| {
        (hash ^ u128::from(*byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
    })
}

/// Returns the beginning of a cache file: the lengths of key and binary, the binary's checksum, and the key. The binary
/// follows.
fn header(key: &str, binary: &[u8]) -> Vec<u8> {
    let numbers = [key.len() as u128, binary.len() as u128, fingerprint(binary)];
    numbers.into_iter().flat_map(u128::to_le_bytes).chain(key.bytes()).collect()
}

/// Returns the cached binary with this key, or `None` if the file is not trusted or does not match its header.
fn read(path: &Path, key: &str) -> Option<Vec<u8>> {
    // The first `?` ends a read that is not trusted, the second one a read of a file that does not exist.
    let file = trusted(atomic::read_own(path, BYTES))??;
    // A header's length does not depend on the binary.
    let start = header(key, &[]).len();
    let binary = file.get(start..)?;
    (file[..start] == header(key, binary)).then(|| binary.to_vec())
}

/// Writes the cache file `path`. A temporary file is written and renamed, so that readers see a whole file or none. If
/// several processes write it, the last one wins.
fn write(path: &Path, key: &str, binary: &[u8]) -> Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0); // the number of this process's next temporary file
    let unique = format!("{}-{}.tmp", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let temporary = path.with_extension(unique);
    let written = atomic::open_own(&temporary, File::options().write(true).create_new(true)).and_then(|mut file| {
        let whole = [header(key, binary), binary.to_vec()].concat();
        atomic::act("write", path, || file.write_all(&whole).and_then(|()| std::fs::rename(&temporary, path)))
    });
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/a.cubin");
        assert_eq!(read(&path, "key"), None);
        make(path.parent().unwrap()).unwrap();
        write(&path, "key", b"binary").unwrap();
        assert_eq!(read(&path, "key").as_deref(), Some(&b"binary"[..]));
        assert_eq!(read(&path, "other"), None);
        let whole = std::fs::read(&path).unwrap();
        for i in 0..whole.len() {
            std::fs::write(&path, &whole[..i]).unwrap();
            assert_eq!(read(&path, "key"), None, "cut at {i}");
            let mut bad = whole.clone();
            bad[i] ^= 1;
            std::fs::write(&path, &bad).unwrap();
            assert_eq!(read(&path, "key"), None, "a bit of byte {i}");
        }
        assert_eq!(std::fs::read_dir(folder.path().join("deep")).unwrap().count(), 1, "nothing is left aside");
    }

    #[test]
    fn the_folder_and_its_files_are_their_users_alone() {
        use std::os::unix::fs::{symlink, PermissionsExt};
        let temporary = tempfile::tempdir().unwrap();
        let folder = temporary.path().join("cache");
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        let allow = |path: &Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
        make(&folder).unwrap();
        let path = folder.join("a.cubin");
        write(&path, "key", b"binary").unwrap();
        assert_eq!((mode(&folder), mode(&path)), (0o700, 0o600));
        allow(&path, 0o666);
        assert_eq!(read(&path, "key"), None, "others may have written it");
        write(&path, "key", b"binary").unwrap();
        assert_eq!(read(&path, "key").as_deref(), Some(&b"binary"[..]), "a new file takes its place");
        std::fs::rename(&path, folder.join("elsewhere")).unwrap();
        symlink("elsewhere", &path).unwrap();
        assert_eq!(read(&path, "key"), None, "a link");
        symlink("cache", temporary.path().join("link")).unwrap();
        assert!(trusted(make(&temporary.path().join("link"))).is_none());
        allow(&folder, 0o777);
        assert!(trusted(make(&folder)).is_none() && make(&folder).unwrap_err().to_string().contains("chmod go-w"));
    }

    #[test]
    fn fingerprints_are_fnvs() {
        // This is the published hash of "a".
        assert_eq!(fingerprint(b"a"), 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
    }
}
