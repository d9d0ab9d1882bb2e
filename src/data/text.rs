//! Text files: one sentence a line, UTF-8, plain or gzip.
//!
//! A line ends at `\n` alone, so that line numbers agree with `wc -l`, `sed -n` and editors: U+0085, U+2028 and the
//! other characters that some readers also break at stay inside their sentence, where breaking would shift one side of
//! a parallel corpus against the other.

use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;

use crate::error::{Error, Result};

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// The lines of a UTF-8 text file without their ends (`\n` or `\r\n`); gzip is recognised by its first two bytes,
/// whatever the name.
///
/// Errors: a missing or empty file, a damaged gzip file, and invalid UTF-8 (with its line number, counted from 1).
pub fn read_lines(path: impl AsRef<Path>) -> Result<Vec<String>> {
    let path = path.as_ref();
    let bytes = read_bytes(path)?;
    if bytes.is_empty() {
        return Err(Error::invalid(format!(
            "{}: the file is empty; expected text in UTF-8 with one sentence a line",
            path.display()
        )));
    }
    let body = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
    let to_line = |(index, line): (usize, &[u8])| {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        match std::str::from_utf8(line) {
            Ok(line) => Ok(line.to_owned()),
            Err(error) => Err(Error::invalid(format!(
                "{}: line {}: byte {} (0x{:02x}) is not valid UTF-8; expected text in UTF-8, convert the file first \
                 (for example `iconv -f latin1 -t utf-8`)",
                path.display(),
                index + 1,
                error.valid_up_to() + 1,
                line[error.valid_up_to()],
            ))),
        }
    };
    body.split(|&byte| byte == b'\n').enumerate().map(to_line).collect()
}

/// The sentence pairs of two files whose lines correspond.
pub fn read_parallel(source: impl AsRef<Path>, target: impl AsRef<Path>) -> Result<Vec<(String, String)>> {
    let (source, target) = (source.as_ref(), target.as_ref());
    let (sources, targets) = (read_lines(source)?, read_lines(target)?);
    if sources.len() != targets.len() {
        return Err(Error::invalid(format!(
            "{} has {} lines and {} has {}; expected parallel files, in which line k of one \
             translates line k of the other",
            source.display(),
            sources.len(),
            target.display(),
            targets.len(),
        )));
    }
    Ok(sources.into_iter().zip(targets).collect())
}

/// Writes the lines, each ended by `\n`, so that `path` holds either its old content or all of the new, never a part.
///
/// The new file is written beside the old one, synced and renamed, and the folder synced. Something that is no regular
/// file, such as `/dev/stdout`, cannot be renamed over and is written straight.
pub fn write_lines_atomic<S: AsRef<str>>(path: impl AsRef<Path>, lines: impl IntoIterator<Item = S>) -> Result<()> {
    let path = path.as_ref();
    let failed = |error| Error::io("write", path, error);
    if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        let file = fs::OpenOptions::new().write(true).open(path).map_err(failed)?;
        return write_lines(&file, lines).map_err(failed);
    }
    let beside = beside(path)?;
    let written = File::create(&beside)
        .and_then(|file| {
            write_lines(&file, lines)?;
            file.sync_all()
        })
        .and_then(|()| fs::rename(&beside, path))
        .and_then(|()| File::open(parent(path))?.sync_all());
    written.map_err(|error| {
        // Best effort: the failure to report is the first one, and after a successful rename there is nothing left to
        // remove.
        let _ = fs::remove_file(&beside);
        failed(error)
    })
}

/// The words of a line: what white space separates by the definition of Python's `str.split()`, which fairseq and
/// sacrebleu use.
///
/// It is Unicode's White_Space and the four separators U+001C to U+001F, which Rust's `split_whitespace` leaves inside
/// words.
pub fn words(line: &str) -> impl Iterator<Item = &str> {
    let is_space = |c: char| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c);
    line.split(is_space).filter(|word| !word.is_empty())
}

fn read_bytes(path: &Path) -> Result<Vec<u8>> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(Error::invalid(format!(
                "{}: no such file; expected a text file in UTF-8, plain or gzip: check the path",
                path.display()
            )));
        }
        Err(_) if path.is_dir() => {
            return Err(Error::invalid(format!(
                "{}: a folder; expected a text file in UTF-8, plain or gzip",
                path.display()
            )));
        }
        Err(error) => return Err(Error::io("read", path, error)),
    };
    if !bytes.starts_with(&GZIP_MAGIC) {
        return Ok(bytes);
    }
    let mut text = Vec::new();
    // Several members may follow each other (`cat a.gz b.gz`, bgzip); the plain decoder would stop silently after the
    // first.
    match MultiGzDecoder::new(bytes.as_slice()).read_to_end(&mut text) {
        Ok(_) => Ok(text),
        Err(error) => Err(Error::invalid(format!(
            "{}: a damaged or incomplete gzip file ({error}); expected what `gzip -t` accepts: \
             fetch or compress it again",
            path.display()
        ))),
    }
}

fn write_lines<S: AsRef<str>>(file: &File, lines: impl IntoIterator<Item = S>) -> io::Result<()> {
    let mut out = BufWriter::new(file);
    for line in lines {
        out.write_all(line.as_ref().as_bytes())?;
        out.write_all(b"\n")?;
    }
    out.flush()
}

/// A hidden name in the same folder (a rename does not cross file systems), one per process.
fn beside(path: &Path) -> Result<PathBuf> {
    let Some(name) = path.file_name() else {
        return Err(Error::invalid(format!(
            "'{}' names no file; expected the path of a file to write",
            path.display()
        )));
    };
    Ok(path.with_file_name(format!(".{}.{}.part", name.to_string_lossy(), std::process::id())))
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn message<T: std::fmt::Debug>(result: Result<T>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn lines_end_at_newline_alone() {
        let text = file("a\u{85}b\u{2028}c\rd\r\n\n e \u{0b}\nlast".as_bytes());
        assert_eq!(read_lines(text.path()).unwrap(), ["a\u{85}b\u{2028}c\rd", "", " e \u{0b}", "last"]);
        assert_eq!(read_lines(file(b"\n").path()).unwrap(), [""]);
    }

    #[test]
    fn gzip_is_known_by_its_bytes_and_read_through_all_members() {
        let two = [gzip(b"one\n"), gzip("zw\u{f6}i\n".as_bytes())].concat();
        assert_eq!(read_lines(file(&two).path()).unwrap(), ["one", "zw\u{f6}i"]);
        let cut = message(read_lines(file(&two[..two.len() - 6]).path()));
        assert!(cut.contains("damaged or incomplete gzip"), "{cut}");
        let empty = message(read_lines(file(&gzip(b"")).path()));
        assert!(empty.contains("empty"), "{empty}");
    }

    #[test]
    fn bad_files_are_named_with_the_reason() {
        let latin1 = message(read_lines(file(b"fine\nm\xe4nner\n").path()));
        assert!(latin1.contains("line 2: byte 2 (0xe4) is not valid UTF-8"), "{latin1}");
        let missing = message(read_lines("/no/such/file.en"));
        assert!(missing.contains("/no/such/file.en: no such file"), "{missing}");
        let folder = message(read_lines(tempfile::tempdir().unwrap().path()));
        assert!(folder.contains("a folder"), "{folder}");
        let empty = message(read_lines(file(b"").path()));
        assert!(empty.contains("the file is empty"), "{empty}");
    }

    #[test]
    fn parallel_files_must_have_as_many_lines() {
        let (two, three) = (file(b"a\nb\n"), file(b"x\ny\nz\n"));
        let uneven = message(read_parallel(two.path(), three.path()));
        assert!(uneven.contains("has 2 lines") && uneven.contains("has 3"), "{uneven}");
        let pairs = read_parallel(two.path(), two.path()).unwrap();
        assert_eq!(pairs, [("a".into(), "a".into()), ("b".into(), "b".into())]);
    }

    #[test]
    fn writing_replaces_whole_files_and_leaves_nothing_beside() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.txt");
        for lines in [vec!["long", "old", "text"], vec!["new"]] {
            write_lines_atomic(&path, &lines).unwrap();
            assert_eq!(read_lines(&path).unwrap(), lines);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let nowhere = message(write_lines_atomic(folder.path().join("no/out.txt"), ["x"]));
        assert!(nowhere.starts_with("write ") && nowhere.contains("no/out.txt"), "{nowhere}");
        write_lines_atomic("/dev/null", ["x"]).unwrap();
        // The rename fails: while the lines were written, a folder took the name.
        let taken = folder.path().join("taken");
        let lines = (0..2).map(|line| {
            let _ = fs::create_dir(&taken);
            line.to_string()
        });
        assert!(message(write_lines_atomic(&taken, lines)).starts_with("write "));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn words_split_where_python_splits() {
        let line = " a\u{a0}b\tc\u{1c}d\u{3000}e\u{200b}f  ";
        assert_eq!(words(line).collect::<Vec<_>>(), ["a", "b", "c", "d", "e\u{200b}f"]);
    }
}
