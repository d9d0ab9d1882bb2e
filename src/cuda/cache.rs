//! Compiled kernels on disk: one file per compiler, architecture, options and source.
//!
//! A file is its key, its length and checksum, then the binary; what does not match is compiled anew. The cache is only
//! ever a saving of time: where it cannot be read or written, that is all that is lost.

use super::{nvrtc, Program};
use crate::error::Result;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// The program's binary, from the disk where it has been compiled before; and its file, if there is a place for one.
pub fn compiled(program: &Program, options: &str, architecture: i32) -> Result<(Vec<u8>, Option<PathBuf>)> {
    let compiler = nvrtc::compiler()?;
    let (major, minor) = compiler.version();
    let source = program.files.concat();
    let key = format!("normformer_rs NVRTC {major}.{minor} sm_{architecture} {options}\n{source}");
    let path = folder().map(|f| f.join(format!("{:032x}.cubin", fingerprint(key.as_bytes()))));
    if let Some(binary) = path.as_deref().and_then(|p| read(p, &key)) {
        return Ok((binary, path));
    }
    let (binary, _) = compiler.compile(program.name, &source, options, architecture)?;
    if let Some(path) = &path {
        // Best effort.
        let _ = write(path, &key, &binary);
    }
    Ok((binary, path))
}

/// NORMFORMER_RS_CACHE, or normformer_rs in the user's cache folder; none where there is no home.
pub fn folder() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let user = || set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
    set("NORMFORMER_RS_CACHE").or_else(|| user().map(|folder| folder.join("normformer_rs")))
}

/// FNV-1a of 128 bits.
fn fingerprint(bytes: &[u8]) -> u128 {
    bytes.iter().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, |hash, byte| {
        (hash ^ u128::from(*byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
    })
}

fn header(key: &str, binary: &[u8]) -> Vec<u8> {
    let numbers = [key.len() as u128, binary.len() as u128, fingerprint(binary)];
    numbers.into_iter().flat_map(u128::to_le_bytes).chain(key.bytes()).collect()
}

fn read(path: &Path, key: &str) -> Option<Vec<u8>> {
    let file = std::fs::read(path).ok()?;
    let start = header(key, &[]).len();
    let binary = file.get(start..)?;
    (file[..start] == header(key, binary)).then(|| binary.to_vec())
}

/// Written aside and renamed: readers see a whole file or none, and the last of several writers wins.
fn write(path: &Path, key: &str, binary: &[u8]) -> std::io::Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let unique = format!("{}-{}.tmp", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let aside = path.with_extension(unique);
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let written = std::fs::write(&aside, [header(key, binary), binary.to_vec()].concat())
        .and_then(|()| std::fs::rename(&aside, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&aside);
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
    fn fingerprints_are_fnvs() {
        // The published value for "a".
        assert_eq!(fingerprint(b"a"), 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
    }
}
