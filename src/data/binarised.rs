//! fairseq's binarised folders, as written by `fairseq-preprocess`: dictionaries (`dict.LANG.txt`) and splits of token
//! ids (`train.SRC-TGT.LANG.bin` with `.idx`; without languages `dict.txt`, `train.bin`, `train.idx`).
//!
//! The `.bin` file contains the ids of all sentences, one sentence after the other. Its index has one of two formats,
//! both little-endian:
//!
//! | `--dataset-impl` | index |
//! |---|---|
//! | `mmap` | `MMIDIDX\0\0`, version u64, number type u8, count u64; lengths i32 × count, starts in bytes i64 × count |
//! | `cached`, `lazy` | `TNTIDX\0\0`, version, number type, bytes of a number, count, count of dimensions (u64 each); where each sentence's dimensions begin i64 × (count + 1), starts in numbers i64 × (count + 1), dimensions i64 × count; the `.bin` holds id + 1 |
//!
//! The numbers in an index are checked against the sizes of the files before they are used, and before memory is
//! allocated for them.

use super::interrupt::Interrupt;
use super::vocabulary::{Vocabulary, EOS, UNK};
use crate::error::{Error, Result};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

/// A binarised folder, and the direction in which it is read.
pub struct Binarised {
    folder: PathBuf,
    pair: Option<Pair>,
}

/// A language pair, in the direction of translation.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Pair {
    /// The pair as written in the file names, `SRC-TGT`.
    named: String,
    source: String,
    target: String,
}

/// A side of the sentence pairs. In a folder with one language, both sides are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Source,
    Target,
}

impl Binarised {
    /// Opens a folder with one language (`fairseq-preprocess --only-source`).
    pub fn monolingual(folder: impl AsRef<Path>) -> Self {
        Binarised { folder: folder.as_ref().to_path_buf(), pair: None }
    }

    /// Opens a folder with two languages. By default, the direction is the one in the file names of `split`, such as
    /// "train". Errors unless the folder has exactly one pair with the given languages.
    pub fn parallel(
        folder: impl AsRef<Path>,
        split: &str,
        source_lang: Option<&str>,
        target_lang: Option<&str>,
    ) -> Result<Self> {
        let folder = folder.as_ref();
        let pairs = pairs(folder, split)?;
        let swapped = |pair: &Pair| Pair { source: pair.target.clone(), target: pair.source.clone(), ..pair.clone() };
        let matches_languages = |pair: &Pair| {
            source_lang.is_none_or(|lang| lang == pair.source) && target_lang.is_none_or(|lang| lang == pair.target)
        };
        let mut matching: Vec<Pair> = pairs.iter().filter(|pair| matches_languages(pair)).cloned().collect();
        // A pair may also be read in the direction opposite to its file names.
        if matching.is_empty() {
            matching = pairs.iter().map(swapped).filter(matches_languages).collect();
        }
        if matching.len() != 1 {
            let names: Vec<&str> = pairs.iter().map(|pair| pair.named.as_str()).collect();
            return Err(Error::invalid(format!(
                "{}: expected {split}.{}-{}.LANG.idx of one language pair, found {}; give source_lang and target_lang",
                folder.display(),
                source_lang.unwrap_or("SRC"),
                target_lang.unwrap_or("TGT"),
                if names.is_empty() { "none".into() } else { names.join(", ") },
            )));
        }
        Ok(Binarised { folder: folder.to_path_buf(), pair: matching.pop() })
    }

    /// Loads the dictionary of one side.
    pub fn dictionary(&self, side: Side) -> Result<Vocabulary> {
        Vocabulary::load(self.folder.join(match self.language(side) {
            Some(language) => format!("dict.{language}.txt"),
            None => "dict.txt".into(),
        }))
    }

    /// Loads the dictionary that both sides share. Errors if the two sides' dictionaries differ.
    pub fn joint_dictionary(&self) -> Result<Vocabulary> {
        let target = self.dictionary(Side::Target)?;
        if self.pair.is_some() && self.dictionary(Side::Source)? != target {
            return Err(Error::invalid(format!(
                "{}: two dictionaries; models here have one for both languages: preprocess with --joined-dictionary",
                self.folder.display()
            )));
        }
        Ok(target)
    }

    /// Reads one side of a split as sentences, without the EOS at their end. `types` is the number of entries in the
    /// side's dictionary.
    ///
    /// A BOS or PAD, or an EOS inside a sentence, is read as UNK: text never yields these symbols ([`Vocabulary`]).
    pub fn sentences(
        &self,
        split: &str,
        side: Side,
        types: usize,
        check_interrupt: Interrupt,
    ) -> Result<Vec<Vec<u32>>> {
        let mut sentences = Vec::new();
        self.read(split, side, types, |ids| {
            let without_eos = ids.strip_suffix(&[EOS]).unwrap_or(ids);
            // Exactly BOS, PAD and EOS have ids below UNK.
            sentences.push(without_eos.iter().map(|&id| id.max(UNK)).collect());
            check_interrupt()
        })?;
        Ok(sentences)
    }

    /// Returns the language of a side; `None` for a folder with one language.
    fn language(&self, side: Side) -> Option<&str> {
        self.pair.as_ref().map(|pair| match side {
            Side::Source => pair.source.as_str(),
            Side::Target => pair.target.as_str(),
        })
    }

    /// Calls `visit` with the ids of each sentence in one side of a split, EOS included. Errors if an id is not below
    /// `types`, the number of entries in the dictionary.
    fn read(&self, split: &str, side: Side, types: usize, mut visit: impl FnMut(&[u32]) -> Result<()>) -> Result<()> {
        let name = match (&self.pair, self.language(side)) {
            (Some(pair), Some(language)) => format!("{split}.{}.{language}", pair.named),
            _ => split.to_string(),
        };
        let path = self.folder.join(format!("{name}.bin"));
        let index = Index::read(&self.folder.join(format!("{name}.idx")))?;
        let file = File::open(&path).map_err(|e| access_error("read", &path, e))?;
        let size = file.metadata().map_err(|e| Error::io("read", &path, e))?.len();
        if index.bytes() != Some(size) {
            return Err(Error::invalid(format!(
                "{}: its index wants {} numbers of {} bytes, and it has {size} bytes; it is damaged, or another index's",
                path.display(),
                index.numbers,
                index.kind.bytes
            )));
        }
        let (mut file, mut bytes, mut ids) = (BufReader::with_capacity(1 << 20, file), Vec::new(), Vec::new());
        for (sentence, &length) in index.lengths.iter().enumerate() {
            bytes.resize(length as usize * index.kind.bytes, 0);
            file.read_exact(&mut bytes).map_err(|e| Error::io("read", &path, e))?;
            ids.clear();
            for value in bytes.chunks_exact(index.kind.bytes).map(|b| integer(b, index.kind.is_signed)) {
                // If `value` is so small that the difference wraps around, `id` is large, and is refused as such.
                let id = value.wrapping_sub(index.first);
                if !(0..types as i64).contains(&id) {
                    return Err(Error::invalid(format!(
                        "{}: sentence {} holds the id {id}, and the dictionary has {types} types; it is damaged, or \
                         another dictionary's",
                        path.display(),
                        sentence + 1
                    )));
                }
                ids.push(id as u32);
            }
            visit(&ids)?;
        }
        Ok(())
    }
}

/// Returns the language pairs of the folder's files for this split.
fn pairs(folder: &Path, split: &str) -> Result<BTreeSet<Pair>> {
    let entries = fs::read_dir(folder).map_err(|e| access_error("list", folder, e))?;
    let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let pair = |name: String| {
        // A name is SPLIT.SRC-TGT.LANG.idx; `named` is SRC-TGT, and `language` is SRC or TGT.
        let (named, language) = name.strip_prefix(split)?.strip_prefix('.')?.strip_suffix(".idx")?.rsplit_once('.')?;
        let source_before = named.strip_suffix(language).and_then(|rest| rest.strip_suffix('-'));
        let target_behind = named.strip_prefix(language).and_then(|rest| rest.strip_prefix('-'));
        let language_is_source = target_behind.map(|target| (language, target));
        let language_is_target = source_before.map(|source| (source, language));
        let (source, target) = language_is_source.or(language_is_target)?;
        Some(Pair { named: named.into(), source: source.into(), target: target.into() })
    };
    Ok(names.filter_map(pair).collect())
}

/// Returns the error for a failed access; `act` is the verb of what was tried, such as "read". The message for a
/// missing file says which files are expected.
fn access_error(act: &'static str, path: &Path, error: std::io::Error) -> Error {
    match error.kind() {
        ErrorKind::NotFound => {
            Error::invalid(format!("{}: not there; expected what fairseq-preprocess writes", path.display()))
        }
        _ => Error::io(act, path, error),
    }
}

/// The content of an index: the lengths of the sentences in the `.bin` file, and the format of the `.bin` file's ids.
#[derive(Debug, PartialEq)]
struct Index {
    kind: IdKind,
    /// The number that the `.bin` file stores for id 0.
    first: i64,
    /// The number of ids in each sentence, EOS included.
    lengths: Vec<i64>,
    /// The sum of the lengths.
    numbers: i64,
}

/// The integer type in which a `.bin` file stores ids.
#[derive(Clone, Copy, Debug, PartialEq)]
struct IdKind {
    bytes: usize,
    is_signed: bool,
}

/// fairseq's codes for integer types. Its codes 6 and 7 are floating-point types, which ids never have.
const KINDS: [(i64, IdKind); 8] = [
    (1, IdKind { bytes: 1, is_signed: false }),
    (2, IdKind { bytes: 1, is_signed: true }),
    (3, IdKind { bytes: 2, is_signed: true }),
    (4, IdKind { bytes: 4, is_signed: true }),
    (5, IdKind { bytes: 8, is_signed: true }),
    (8, IdKind { bytes: 2, is_signed: false }),
    (9, IdKind { bytes: 4, is_signed: false }),
    (10, IdKind { bytes: 8, is_signed: false }),
];
/// The bytes with which an index of the `mmap` format begins.
const MMAP: &[u8] = b"MMIDIDX\0\0";
/// The bytes with which an index of the `cached` and `lazy` formats begins.
const TORCHNET: &[u8] = b"TNTIDX\0\0";

impl Index {
    /// Reads an index file in either format.
    fn read(path: &Path) -> Result<Self> {
        let content = fs::read(path).map_err(|e| access_error("read", path, e))?;
        let parsed = match (content.strip_prefix(MMAP), content.strip_prefix(TORCHNET)) {
            (Some(body), _) => Index::mmap(body),
            (_, Some(body)) => Index::torchnet(body),
            _ => Err("not an index of fairseq's mmap, cached or lazy formats; preprocess again, without \
                      --dataset-impl"
                .into()),
        };
        parsed.map_err(|what| Error::invalid(format!("{}: {what}", path.display())))
    }

    /// Parses an index of the `mmap` format, whose starts are in bytes. `body` is the index after its first bytes,
    /// [`MMAP`].
    fn mmap(mut body: &[u8]) -> Result<Self, String> {
        // The fields have the order and the sizes in bytes that the table at the top of this file states.
        let (version, code) = (take_number(&mut body, 8)?, take_number(&mut body, 1)?);
        let kind = IdKind::find(version, code)?;
        let count = take_number(&mut body, 8)?;
        let (lengths, starts) = (take_numbers(&mut body, count, 4)?, take_numbers(&mut body, count, 8)?);
        // In this format, id 0 is stored as 0.
        let index = Index::of(kind, 0, lengths)?;
        // Starts are converted from bytes to numbers; one inside a number becomes `None`.
        let id_bytes = kind.bytes as i64;
        index.verified(body, starts.map(|start| (start % id_bytes == 0).then_some(start / id_bytes)))
    }

    /// Parses an index of the `cached` and `lazy` formats, whose starts are in numbers. `body` is the index after its
    /// first bytes, [`TORCHNET`].
    fn torchnet(mut body: &[u8]) -> Result<Self, String> {
        // The fields have the order and the sizes in bytes that the table at the top of this file states.
        let (version, code) = (take_number(&mut body, 8)?, take_number(&mut body, 8)?);
        let kind = IdKind::find(version, code)?;
        let bytes = take_number(&mut body, 8)?;
        let (count, dimensions) = (take_number(&mut body, 8)?, take_number(&mut body, 8)?);
        if bytes != kind.bytes as i64 || dimensions != count {
            return Err(format!(
                "{count} sentences of {dimensions} dimensions, {bytes} bytes a number; expected one dimension each, of \
                 {} bytes: it is damaged",
                kind.bytes
            ));
        }
        // Both columns of starts have one more entry, the end of the last sentence. A count so large that the sum wraps
        // around becomes negative, and is refused below.
        let with_end = count.wrapping_add(1);
        let (dimension_starts, starts) = (take_numbers(&mut body, with_end, 8)?, take_numbers(&mut body, with_end, 8)?);
        // In this format, id 0 is stored as 1.
        let index = Index::of(kind, 1, take_numbers(&mut body, count, 8)?)?;
        // Each sentence has one dimension, its length.
        if !dimension_starts.eq(0..with_end) {
            return Err("its sentences have other than one dimension; it is damaged".into());
        }
        index.verified(body, starts.map(Some))
    }

    /// Builds the index from the lengths of the sentences; `first` is the number stored for id 0. Errors if a length is
    /// negative or the sum overflows.
    fn of(kind: IdKind, first: i64, lengths: impl Iterator<Item = i64>) -> Result<Self, String> {
        let lengths: Vec<i64> = lengths.collect();
        if lengths.iter().any(|length| *length < 0) {
            return Err("a length below 0; it is damaged".into());
        }
        let numbers = lengths.iter().try_fold(0i64, |sum, length| sum.checked_add(*length));
        Ok(Index { kind, first, numbers: numbers.ok_or("lengths beyond all bounds; it is damaged")?, lengths })
    }

    /// Returns the index if no bytes are left in `rest` and `starts` agree with the lengths. Starts are counted in
    /// numbers; a start inside a number is `None`. `starts` may have one more entry, the end of the last sentence.
    fn verified(self, rest: &[u8], mut starts: impl Iterator<Item = Option<i64>>) -> Result<Self, String> {
        let mut expected_start = 0;
        let is_consistent = self.lengths.iter().all(|length| {
            let is_expected = starts.next() == Some(Some(expected_start));
            expected_start += length;
            is_expected
        });
        // A start that is left must be the end of the last sentence.
        if !is_consistent || starts.any(|end| end != Some(expected_start)) {
            return Err("lengths and positions contradict each other; it is damaged".into());
        }
        match rest.len() {
            0 => Ok(self),
            n => Err(format!("{n} bytes more than its {} sentences need; it is damaged", self.lengths.len())),
        }
    }

    /// Returns the expected size of the `.bin` file in bytes.
    fn bytes(&self) -> Option<u64> {
        (self.numbers as u64).checked_mul(self.kind.bytes as u64)
    }
}

impl IdKind {
    /// Returns the integer type with this code of fairseq. Errors if the index has a version other than 1.
    fn find(version: i64, code: i64) -> Result<Self, String> {
        let entry = KINDS.iter().find(|(known, _)| *known == code && version == 1);
        entry.map(|(_, kind)| *kind).ok_or_else(|| {
            format!("version {version}, number type {code}; expected version 1 of integers: newer, or damaged")
        })
    }
}

/// Takes the next number, of `bytes` bytes, from the front of `body`.
fn take_number(body: &mut &[u8], bytes: usize) -> Result<i64, String> {
    take_numbers(body, 1, bytes)?.next().ok_or_else(|| "it is damaged".into())
}

/// Takes the next `count` numbers, of `bytes` bytes each, from the front of `body`.
fn take_numbers<'a>(
    body: &mut &'a [u8],
    count: i64,
    bytes: usize,
) -> Result<impl Iterator<Item = i64> + use<'a>, String> {
    let size = usize::try_from(count).ok().and_then(|count| count.checked_mul(bytes));
    let (numbers, rest) = size
        .and_then(|size| body.split_at_checked(size))
        .ok_or_else(|| format!("{} bytes are left where {count} × {bytes} are due; it is damaged", body.len()))?;
    *body = rest;
    // All numbers of an index are read as signed. Unsigned fields are small, unless they are damaged and refused.
    Ok(numbers.chunks_exact(bytes).map(|bytes| integer(bytes, true)))
}

/// Converts at most eight little-endian bytes to an integer. An unsigned number too large for i64 becomes negative, and
/// every caller rejects negative numbers.
fn integer(bytes: &[u8], is_signed: bool) -> i64 {
    // Sign extension: the bytes above those of a negative number are all ones.
    let is_negative = is_signed && bytes.last().is_some_and(|byte| byte & 0x80 != 0);
    let mut wide = [if is_negative { 0xff } else { 0 }; 8];
    wide[..bytes.len()].copy_from_slice(bytes);
    i64::from_le_bytes(wide)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SENTENCES: [&[u32]; 3] = [&[4, 0, 5, EOS], &[EOS], &[6, EOS, 4]];

    /// Returns the index and the `.bin` file of `SENTENCES` in the `mmap` format, with ids of type u16 (code 8).
    fn mmap() -> (Vec<u8>, Vec<u8>) {
        let tokens = SENTENCES.concat().iter().flat_map(|id| (*id as u16).to_le_bytes()).collect();
        let mut index = [MMAP, &1u64.to_le_bytes(), &[8], &3u64.to_le_bytes()].concat();
        index.extend([4i32, 1, 3].iter().flat_map(|length| length.to_le_bytes()));
        index.extend([0i64, 8, 10].iter().flat_map(|start| start.to_le_bytes()));
        (index, tokens)
    }

    /// Returns the index and the `.bin` file of `SENTENCES` in the `cached` format, with ids of type i32 (code 4).
    fn torchnet() -> (Vec<u8>, Vec<u8>) {
        let tokens = SENTENCES.concat().iter().flat_map(|id| (*id as i32 + 1).to_le_bytes()).collect();
        // Version, code, bytes of an id, two counts; where dimensions begin; starts in numbers; dimensions.
        let numbers = [1i64, 4, 4, 3, 3, 0, 1, 2, 3, 0, 4, 5, 8, 4, 1, 3];
        ([TORCHNET, &numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>()].concat(), tokens)
    }

    /// Creates a temporary folder with these files (name, content).
    fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in files {
            fs::write(folder.path().join(name), content).unwrap();
        }
        folder
    }

    /// Reads the sentences of a folder with this index and this `.bin` file; the dictionary has `types` entries.
    fn read(index: &[u8], tokens: &[u8], types: usize) -> Result<Vec<Vec<u32>>> {
        let folder = folder(&[("train.idx", index), ("train.bin", tokens)]);
        Binarised::monolingual(folder.path()).sentences("train", Side::Target, types, &mut || Ok(()))
    }

    /// Returns the error's message, or an empty text for a success.
    fn message<T>(result: Result<T>) -> String {
        result.err().map(|e| e.to_string()).unwrap_or_default()
    }

    #[test]
    fn both_formats_hold_the_same_sentences() {
        for (index, tokens) in [mmap(), torchnet()] {
            // BOS, and an EOS inside a sentence, are read as UNK.
            assert_eq!(read(&index, &tokens, 7).unwrap(), [vec![4, UNK, 5], vec![], vec![6, UNK, 4]]);
        }
    }

    #[test]
    fn a_damaged_index_is_an_error_and_allocates_nothing() {
        // Overwrites the bytes of an index at `at` with `new`, and expects an error that contains `what`.
        let check = |what: &str, (index, tokens): (Vec<u8>, Vec<u8>), at: usize, new: &[u8]| {
            let mut index = index;
            index.splice(at..(at + new.len()).min(index.len()), new.iter().copied());
            let error = message(read(&index, &tokens, 7));
            assert!(error.contains(what), "{what}: {error}");
        };
        // In the index of `mmap`, the version begins at byte 9, the code at 17, the count at 18, the lengths at 26 and
        // the starts at 38.
        check("not an index", mmap(), 0, b"X");
        check("version 2", mmap(), 9, &[2]);
        check("number type 77", mmap(), 17, &[77]);
        check("are due", mmap(), 18, &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f]);
        check("are due", mmap(), 18, &[0xff; 8]);
        check("below 0", mmap(), 29, &[0x80]);
        check("contradict", mmap(), 26, &[5]);
        check("contradict", mmap(), 38, &[1]);
        check("bytes more", mmap(), 62, &[0; 8]);
        // In the index of `torchnet`, five numbers begin at byte 8: version, code, bytes of an id, and two counts.
        // Columns of 4, 4 and 3 numbers begin at 48, 80 and 112.
        check("version 2", torchnet(), 8, &[2]);
        check("8 bytes a number", torchnet(), 24, &[8]);
        check("of 2 dimensions", torchnet(), 40, &[2]);
        check("other than one dimension", torchnet(), 56, &[2]);
        check("beyond all bounds", torchnet(), 120, &i64::MAX.to_le_bytes());
        check("contradict", torchnet(), 104, &[9]);
        for (index, tokens) in [mmap(), torchnet()] {
            assert!(message(read(&index[..index.len() - 1], &tokens, 7)).contains("are due"));
            assert!(message(read(&index, &tokens[1..], 7)).contains("another index's"));
            let foreign = message(read(&index, &tokens, 6));
            assert!(foreign.contains("sentence 3 holds the id 6, and the dictionary has 6 types"), "{foreign}");
        }
        let empty = folder(&[]);
        let missing = message(Binarised::monolingual(empty.path()).sentences("train", Side::Target, 7, &mut || Ok(())));
        assert!(missing.contains("train.idx: not there"), "{missing}");
    }

    #[test]
    fn languages_come_from_file_names_or_arguments() {
        let names = ["train.de-en.de.idx", "train.de-en.en.idx", "test.de-en.de.idx", "train1.de-fr.de.idx"];
        let directory = folder(&names.map(|name| (name, b"".as_slice())));
        let direction = |split, source, target| {
            Binarised::parallel(directory.path(), split, source, target).map(|binarised| {
                binarised.pair.map(|pair| format!("{}: {} → {}", pair.named, pair.source, pair.target))
            })
        };
        let expect = |read: Result<Option<String>>, wanted: &str| assert_eq!(read.unwrap().unwrap(), wanted);
        expect(direction("train", None, None), "de-en: de → en");
        expect(direction("train", Some("en"), None), "de-en: en → de");
        expect(direction("train", Some("en"), Some("de")), "de-en: en → de");
        expect(direction("test", None, Some("en")), "de-en: de → en");
        let none = message(direction("train", Some("fr"), None));
        assert!(none.contains("train.fr-TGT.LANG.idx of one language pair, found de-en;"), "{none}");
        fs::write(directory.path().join("train.de-fr.fr.idx"), b"").unwrap();
        let two = message(direction("train", None, None));
        assert!(two.contains("found de-en, de-fr;"), "{two}");
        expect(direction("train", None, Some("fr")), "de-fr: de → fr");
        let nowhere = message(Binarised::parallel("/no/such/folder", "train", None, None));
        assert!(nowhere.contains("/no/such/folder: not there"), "{nowhere}");
    }

    #[test]
    fn dictionaries_must_be_joint() {
        let (index, tokens) = mmap();
        let files: [(&str, &[u8]); 4] = [
            ("train.de-en.de.idx", &index),
            ("train.de-en.de.bin", &tokens),
            ("dict.de.txt", b"a 3\nb 2\nc 1\nd 0\n"),
            ("dict.en.txt", b"a 3\n"),
        ];
        let directory = folder(&files);
        let binarised = Binarised::parallel(directory.path(), "train", Some("en"), Some("de")).unwrap();
        assert!(message(binarised.joint_dictionary()).contains("--joined-dictionary"));
    }
}
