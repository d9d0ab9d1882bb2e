//! The length and CRC-32 of the files that determine a run's weights, in `checksums.txt` beside them.
//!
//! A run writes checksums.txt before all other files. So a folder that has it but no config.json belongs to a run that
//! was stopped at its start.

use super::{CHECKSUMS, LISTED};
use crate::atomic::{self, Digest};
use crate::error::{Error, Result};
use std::path::Path;

/// The maximum size of [`CHECKSUMS`], in bytes. Its five lines have a few hundred bytes, so a larger file is damaged.
const MOST: u64 = 64 << 10;
/// The text in the last line, which has the CRC-32 of the other lines.
const OF_ITSELF: &str = "of the lines above";

/// Returns the text of [`CHECKSUMS`] for files given as (name, text): a line `CRC-32 bytes name` for each file, then
/// the CRC-32 of these lines.
pub fn text(files: &[(&str, String)]) -> String {
    let line = |(name, text): &(&str, String)| {
        let Digest { bytes, crc32 } = Digest::of(text.as_bytes());
        format!("{crc32:08x} {bytes} {name}\n")
    };
    let lines: String = files.iter().map(line).collect();
    format!("{lines}{:08x} {OF_ITSELF}\n", Digest::of(lines.as_bytes()).crc32)
}

/// Compares a run's files with its checksums; without checksums nothing is compared.
///
/// # Errors
/// A file is missing or damaged: the message names it and says what to do.
pub fn check(folder: &Path) -> Result<()> {
    for (name, expected) in read(folder)?.unwrap_or_default() {
        let path = folder.join(&name);
        // A file longer than listed is damaged, so no more than the listed length is read.
        let found = match atomic::read(&path, expected.bytes) {
            Ok(Some(bytes)) => Digest::of(&bytes),
            Ok(None) => return Err(damaged(&path, "it is missing".into())),
            Err(Error::Invalid(why)) => return Err(damaged(&path, why)),
            Err(other) => return Err(other),
        };
        if found != expected {
            let describe = |digest: Digest| format!("{} bytes with CRC-32 {:08x}", digest.bytes, digest.crc32);
            return Err(damaged(&path, format!("expected {}, found {}", describe(expected), describe(found))));
        }
    }
    Ok(())
}

/// Returns the names that [`CHECKSUMS`] lists, and its own; empty if it is missing or damaged.
pub fn listed(folder: &Path) -> Vec<String> {
    match read(folder) {
        Ok(Some(files)) => files.into_iter().map(|(name, _)| name).chain([CHECKSUMS.to_string()]).collect(),
        _ => Vec::new(),
    }
}

/// Reads and checks [`CHECKSUMS`]. Returns the name and the expected digest of each listed file; `None` if there is no
/// checksums.txt.
fn read(folder: &Path) -> Result<Option<Vec<(String, Digest)>>> {
    let path = folder.join(CHECKSUMS);
    let Some(bytes) = atomic::read(&path, MOST)? else { return Ok(None) };
    let text = String::from_utf8(bytes).map_err(|e| damaged(&path, e.to_string()))?;
    // The last line begins after the last line end but one.
    let last_begin = text.strip_suffix('\n').and_then(|text| text.rfind('\n')).map_or(0, |line_end| line_end + 1);
    let (lines, last) = text.split_at(last_begin);
    if last != format!("{:08x} {OF_ITSELF}\n", Digest::of(lines.as_bytes()).crc32) {
        return Err(damaged(&path, "its last line is not the CRC-32 of the others".into()));
    }
    let parse = |line: &str| {
        let (crc32, rest) = line.split_once(' ')?;
        let (bytes, name) = rest.split_once(' ')?;
        Some((name.to_string(), Digest { bytes: bytes.parse().ok()?, crc32: u32::from_str_radix(crc32, 16).ok()? }))
    };
    let files: Option<Vec<_>> = lines.lines().map(parse).collect();
    let files = files.ok_or_else(|| damaged(&path, "expected lines of CRC-32, length and name".into()))?;
    match files.iter().find(|(name, _)| !LISTED.contains(&name.as_str())) {
        Some((name, _)) => Err(damaged(&path, format!("it lists {name:?}; a run lists only {}", LISTED.join(", ")))),
        None => Ok(Some(files)),
    }
}

/// Returns an error that says that the file is damaged, why, and what to do.
fn damaged(path: &Path, why: String) -> Error {
    // If the checksums are damaged, nothing proves that the folder belongs to a run, so --overwrite would refuse it.
    let fix = if path.ends_with(CHECKSUMS) { "choose another output" } else { "start again with --overwrite" };
    Error::invalid(format!(
        "{} is damaged: {why}; restore it from a copy, or {fix} (if you changed it on purpose, delete {CHECKSUMS}: then \
         nothing is compared)",
        path.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn names_that_no_run_writes_are_refused_unread() {
        for name in ["/dev/zero", "/etc/passwd", "../vocabulary.txt", "log.jsonl", ""] {
            let folder = tempfile::tempdir().unwrap();
            fs::write(folder.path().join(CHECKSUMS), text(&[(name, String::new())])).unwrap();
            let message = check(folder.path()).unwrap_err().to_string();
            assert!(message.contains(&format!("it lists {name:?}; a run lists only config.json")), "{message}");
            assert!(listed(folder.path()).is_empty());
        }
    }

    #[test]
    fn every_flipped_bit_is_found_and_the_file_named() {
        let folder = tempfile::tempdir().unwrap();
        let files = [("vocabulary.txt", "a 3\nb 1\n".to_string()), ("config.json", "{}".to_string())];
        let all = [(CHECKSUMS, text(&files))].into_iter().chain(files.clone()).collect::<Vec<_>>();
        for (name, text) in &all {
            fs::write(folder.path().join(name), text).unwrap();
        }
        check(folder.path()).unwrap();
        assert_eq!(listed(folder.path()), ["vocabulary.txt", "config.json", CHECKSUMS]);
        for (name, text) in &all {
            let path = folder.path().join(name);
            for bit in 0..8 * text.len() {
                let mut bytes = text.clone().into_bytes();
                bytes[bit / 8] ^= 1 << (bit % 8);
                fs::write(&path, bytes).unwrap();
                let message = check(folder.path()).unwrap_err().to_string();
                assert!(message.starts_with(&format!("{} is damaged: ", path.display())), "{message}");
            }
            fs::write(&path, text).unwrap();
        }
        fs::remove_file(folder.path().join("config.json")).unwrap();
        assert!(check(folder.path()).unwrap_err().to_string().contains("config.json is damaged: it is missing"));
        fs::remove_file(folder.path().join(CHECKSUMS)).unwrap();
        check(folder.path()).unwrap();
    }
}
