//! Text files: one sentence on each line, in UTF-8, plain or gzip.
//!
//! A line ends only at `\n`, so that line numbers agree with `wc -l`, `sed -n` and editors. Some readers also break
//! lines at U+0085, U+2028 and other characters. Here these characters stay inside their sentence, because a break
//! would shift one side of a parallel corpus against the other.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use flate2::read::MultiGzDecoder;

use super::interrupt::{interruptible, Interrupt};
use crate::error::{quoted, Error, Result};

/// The number of bytes between two interrupt checks.
const CHUNK: usize = 1 << 20;
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];
/// Compressed formats that are refused: the name, the position of the magic bytes, these bytes, and a command that
/// unpacks the file.
const PACKED: [(&str, usize, &[u8], &str); 15] = [
    ("an xz", 0, b"\xfd7zXZ\0", "xz -dc"),
    ("an lzma", 0, b"]\0\0", "xz -dc"),
    ("a bzip2", 4, b"1AY&SY", "bzip2 -dc"),
    ("a bzip2", 4, b"\x17rE8P\x90", "bzip2 -dc"),
    ("a zip", 0, b"PK\x03\x04", "unzip -p"),
    ("a zip", 0, b"PK\x05\x06", "unzip -p"),
    ("a zstd", 0, b"\x28\xb5\x2f\xfd", "zstd -dc"),
    ("an lz4", 0, b"\x04\x22\x4d\x18", "lz4 -dc"),
    ("an lzip", 0, b"LZIP\x01", "lzip -dc"),
    ("a 7z", 0, b"7z\xbc\xaf\x27\x1c", "7z x -so"),
    ("a rar", 0, b"Rar!\x1a\x07", "unrar p -inul"),
    ("a compress", 0, b"\x1f\x9d", "gzip -dc"),
    ("a tar", 257, b"ustar\0", "tar -xOf"),
    ("a tar", 257, b"ustar  \0", "tar -xOf"),
    // One level of gzip is unpacked, so these bytes appear only if the file was packed twice.
    ("a gzip", 0, &GZIP_MAGIC, "gzip -dc"),
];
/// The extensions of files that contain records instead of plain text, as in python/normformer_rs/text.py.
const RECORDS: [&str; 7] = ["jsonl", "ndjson", "json", "csv", "tsv", "parquet", "arrow"];
/// The byte order mark U+FEFF in UTF-8, which some editors write at the beginning of a file.
const MARK: &[u8] = b"\xef\xbb\xbf";
const UTF_16_MARKS: [&[u8]; 2] = [b"\xff\xfe", b"\xfe\xff"];

/// Reads the lines of a UTF-8 text file, without their ends (`\n` or `\r\n`). A gzip file is recognised by its first
/// two bytes, whatever its name. A byte order mark at the beginning is skipped.
///
/// Errors if the file is missing, empty, a file of records, damaged gzip, in another compressed format, or UTF-16.
/// Also errors if memory does not suffice, if text is not valid UTF-8 (the message has the line number, from 1), or
/// if `check_interrupt` returns an error.
pub fn read_lines(path: impl AsRef<Path>, check_interrupt: Interrupt) -> Result<Vec<String>> {
    let path = path.as_ref();
    // A compressed file of records, such as `corpus.jsonl.gz`, is a file of records, too.
    let unpacked = if path.extension().is_some_and(|end| end == "gz") { path.with_extension("") } else { path.into() };
    let extension = unpacked.extension().and_then(|end| end.to_str()).unwrap_or_default().to_lowercase();
    if RECORDS.contains(&extension.as_str()) {
        return Err(Error::invalid(format!(
            "{}: .{extension} files hold records; expected text with one sentence a line: make one of a field first \
             (`normformer-rs text {} --field NAME --output FILE`), or rename the file if it is plain text",
            path.display(),
            quoted(&path.to_string_lossy())
        )));
    }
    let bytes = read_bytes(path, check_interrupt)?;
    if let Some((name, _, _, unpack)) =
        PACKED.iter().find(|(_, position, magic, _)| bytes[bytes.len().min(*position)..].starts_with(magic))
    {
        return Err(Error::invalid(format!(
            "{}: {name} file; expected text in UTF-8, plain or gzip: unpack it first (`{unpack}`)",
            path.display()
        )));
    }
    if UTF_16_MARKS.iter().any(|mark| bytes.starts_with(mark)) {
        return Err(Error::invalid(format!(
            "{}: its byte order mark says UTF-16; expected text in UTF-8, convert the file first (for example `iconv -f \
             utf-16 -t utf-8`)",
            path.display()
        )));
    }
    lines_of(path, bytes.strip_prefix(MARK).unwrap_or(&bytes), check_interrupt)
}

/// Splits the text of a file into lines, like [`read_lines`], but does not skip a byte order mark. Error messages name
/// the file as `path`.
pub fn lines_of(path: &Path, bytes: &[u8], check_interrupt: Interrupt) -> Result<Vec<String>> {
    if bytes.is_empty() {
        return Err(Error::invalid(format!(
            "{}: the file is empty; expected text in UTF-8 with one sentence a line",
            path.display()
        )));
    }
    // A newline at the end of the file begins no further line.
    let body = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    let to_line = |(index, line): (usize, &[u8])| {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        match std::str::from_utf8(line) {
            Ok(line) => {
                // Without `try_reserve_exact`, a lack of memory would abort the process.
                let mut owned = String::new();
                owned.try_reserve_exact(line.len()).map_err(|_| too_large(path, bytes.len()))?;
                owned.push_str(line);
                Ok(owned)
            }
            Err(error) => Err(Error::invalid(format!(
                "{}: line {}: byte {} (0x{:02x}) is not valid UTF-8; expected text in UTF-8, {}",
                path.display(),
                index + 1,
                error.valid_up_to() + 1,
                line[error.valid_up_to()],
                match bytes.contains(&0) {
                    true => "and this file holds zero bytes: it is packed, binary or UTF-16",
                    false => "convert the file first (for example `iconv -f latin1 -t utf-8`)",
                }
            ))),
        }
    };
    // The outer result has the error of an interrupt, which `?` returns. The inner result is that of the conversion.
    interruptible(check_interrupt, body.split(|&byte| byte == b'\n').enumerate(), |lines| lines.map(to_line).collect())?
}

/// Reads sentence pairs from two files whose lines correspond.
pub fn read_parallel(
    source: impl AsRef<Path>,
    target: impl AsRef<Path>,
    check_interrupt: Interrupt,
) -> Result<Vec<(String, String)>> {
    let (source, target) = (source.as_ref(), target.as_ref());
    let (sources, targets) = (read_lines(source, check_interrupt)?, read_lines(target, check_interrupt)?);
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

/// Iterates over the words of a line, split like Python's `str.split()`, which fairseq and sacrebleu use.
///
/// White space is Unicode's White_Space, and the four separators U+001C to U+001F. Rust's `split_whitespace` would
/// leave these four inside words.
pub fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(is_space).filter(|word| !word.is_empty())
}

/// True if the character is white space as [`words`] defines it.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Reads a file, and unpacks it if it is gzip.
fn read_bytes(path: &Path, check_interrupt: Interrupt) -> Result<Vec<u8>> {
    let refused = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => Error::invalid(format!(
            "{}: no such file; expected a text file in UTF-8, plain or gzip: check the path",
            path.display()
        )),
        _ if path.is_dir() => {
            Error::invalid(format!("{}: a folder; expected a text file in UTF-8, plain or gzip", path.display()))
        }
        _ => Error::io("read", path, error),
    };
    let bytes = read_whole(path, File::open(path).map_err(refused)?, refused, check_interrupt)?;
    if !bytes.starts_with(&GZIP_MAGIC) {
        return Ok(bytes);
    }
    // A file may have several gzip members (`cat a.gz b.gz`, bgzip). The plain decoder would stop after the first one
    // without an error.
    let damaged = |error: io::Error| {
        Error::invalid(format!(
            "{}: a damaged or incomplete gzip file ({error}); expected what `gzip -t` accepts: \
             fetch or compress it again",
            path.display()
        ))
    };
    read_whole(path, MultiGzDecoder::new(bytes.as_slice()), damaged, check_interrupt)
}

/// Reads all bytes from `from`, and calls `check_interrupt` after each chunk. `refused` converts an error of reading;
/// `path` is for the error about too little memory.
fn read_whole(
    path: &Path,
    mut from: impl Read,
    refused: impl Fn(io::Error) -> Error,
    check_interrupt: Interrupt,
) -> Result<Vec<u8>> {
    let mut text = Vec::new();
    loop {
        match from.by_ref().take(CHUNK as u64).read_to_end(&mut text) {
            Ok(0) => return Ok(text),
            Ok(_) => check_interrupt()?,
            Err(error) if error.kind() == io::ErrorKind::OutOfMemory => return Err(too_large(path, text.len())),
            Err(error) => return Err(refused(error)),
        }
    }
}

/// Returns the error for a text that does not fit into memory, of which `bytes` bytes have been read.
fn too_large(path: &Path, bytes: usize) -> Error {
    Error::invalid(format!(
        "{}: its text does not fit into memory (no room after {bytes} bytes of it): give a smaller file, or more memory",
        path.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// Reads lines without interrupts.
    fn read_lines(path: impl AsRef<Path>) -> Result<Vec<String>> {
        super::read_lines(path, &mut || Ok(()))
    }

    /// Reads sentence pairs without interrupts.
    fn read_parallel(source: &Path, target: &Path) -> Result<Vec<(String, String)>> {
        super::read_parallel(source, target, &mut || Ok(()))
    }

    /// Creates a temporary file with this content.
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
    fn lines_end_only_at_newlines() {
        let text = file("a\u{85}b\u{2028}c\rd\r\n\n e \u{0b}\nlast".as_bytes());
        assert_eq!(read_lines(text.path()).unwrap(), ["a\u{85}b\u{2028}c\rd", "", " e \u{0b}", "last"]);
        assert_eq!(read_lines(file(b"\n").path()).unwrap(), [""]);
    }

    #[test]
    fn gzip_is_recognised_by_its_bytes_and_all_members_are_read() {
        let two = [gzip(b"one\n"), gzip("zw\u{f6}i\n".as_bytes())].concat();
        assert_eq!(read_lines(file(&two).path()).unwrap(), ["one", "zw\u{f6}i"]);
        let cut = message(read_lines(file(&two[..two.len() - 6]).path()));
        assert!(cut.contains("damaged or incomplete gzip"), "{cut}");
        let empty = message(read_lines(file(&gzip(b"")).path()));
        assert!(empty.contains("empty"), "{empty}");
    }

    #[test]
    fn a_byte_order_mark_is_skipped() {
        let marked = [MARK, b"a\n\xef\xbb\xbfb\n"].concat();
        for bytes in [marked.clone(), gzip(&marked)] {
            assert_eq!(read_lines(file(&bytes).path()).unwrap(), ["a", "\u{feff}b"]);
        }
        assert!(message(read_lines(file(MARK).path())).contains("the file is empty"));
        for mark in UTF_16_MARKS {
            let error = message(read_lines(file(&[mark, b"a\0"].concat()).path()));
            assert!(error.contains("byte order mark says UTF-16"), "{error}");
        }
    }

    #[test]
    fn bad_files_are_named_with_the_reason() {
        let latin1 = message(read_lines(file(b"fine\nm\xe4nner\n").path()));
        assert!(latin1.contains("line 2: byte 2 (0xe4) is not valid UTF-8"), "{latin1}");
        let binary = message(read_lines(file(b"fine\nm\xe4\0nner\n").path()));
        assert!(binary.contains("line 2: byte 2") && !binary.contains("iconv"), "{binary}");
        let missing = message(read_lines("/no/such/file.en"));
        assert!(missing.contains("/no/such/file.en: no such file"), "{missing}");
        let folder = message(read_lines(tempfile::tempdir().unwrap().path()));
        assert!(folder.contains("a folder"), "{folder}");
        let empty = message(read_lines(file(b"").path()));
        assert!(empty.contains("the file is empty"), "{empty}");
    }

    #[test]
    fn packed_files_are_named_with_the_command_that_unpacks_them() {
        for (name, position, magic, unpack) in PACKED {
            let bytes = [vec![b'a'; position].as_slice(), magic, b"\xff\n"].concat();
            // Gzip itself is unpacked, so the test packs these bytes into a gzip file.
            let error = message(read_lines(file(&gzip(&bytes)).path()));
            assert!(error.contains(&format!("{name} file; ")) && error.contains(unpack), "{name}: {error}");
        }
        for text in ["PK", "BZh91AY", "LZIP", "ustar"] {
            assert_eq!(read_lines(file(text.as_bytes()).path()).unwrap(), [text]);
        }
    }

    #[test]
    fn too_little_memory_is_not_damage() {
        struct Bomb;
        impl Read for Bomb {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::ErrorKind::OutOfMemory.into())
            }
        }
        let damaged = |_| Error::invalid("damaged");
        let error = message(read_whole(Path::new("bomb.gz"), Bomb, damaged, &mut || Ok(())));
        assert!(error.contains("bomb.gz: its text does not fit into memory"), "{error}");
    }

    #[test]
    fn an_interrupt_stops_reading() {
        let text = file(&vec![b'\n'; 3 * CHUNK]);
        for allowed_checks in 0..5 {
            let mut left = allowed_checks;
            let stopped = super::read_lines(text.path(), &mut || match left {
                0 => Err(Error::Interrupted("stop".into())),
                _ => {
                    left -= 1;
                    Ok(())
                }
            });
            assert!(matches!(stopped, Err(Error::Interrupted(_))), "after {allowed_checks}");
        }
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
    fn words_split_where_python_splits() {
        let line = " a\u{a0}b\tc\u{1c}d\u{3000}e\u{200b}f  ";
        assert_eq!(words(line).collect::<Vec<_>>(), ["a", "b", "c", "d", "e\u{200b}f"]);
    }
}
