//! The vocabulary: pieces and their ids, in fairseq's order and file format (`dict.txt`).

use std::collections::HashMap;
use std::path::Path;

use super::text::read_lines;
use crate::error::{Error, Result};

/// Begin of sentence. fairseq reserves an id for BOS but hardly uses it: its decoder starts from [`EOS`].
pub const BOS: u32 = 0;
/// Padding, which fills up rows to equal lengths.
pub const PAD: u32 = 1;
/// End of sentence. In fairseq it is also the first token of the decoder's input.
pub const EOS: u32 = 2;
/// Unknown: every piece that is not in the vocabulary becomes this symbol.
pub const UNK: u32 = 3;

/// The spellings of the special symbols; the index is the id.
pub const SPECIALS: [&str; 4] = ["<s>", "<pad>", "</s>", "<unk>"];

/// The vocabulary of a model: pieces, their counts and ids. Ids 0 to 3 are [`SPECIALS`]. The other pieces follow by
/// falling count; pieces with equal counts are in code point order.
///
/// Text never yields a special symbol other than UNK: a piece that is spelt like one is not counted and is encoded as
/// UNK. (fairseq would encode it as the symbol. Then a sentence could end in the middle, or have a target that the
/// vocabulary mask forbids.) fairseq-preprocess adds entries until their number is a multiple of 8; this type does
/// not. If a loaded file has such entries (`madeupword0000 0`), they are ordinary pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vocabulary {
    /// The piece of each id.
    pieces: Vec<String>,
    /// The count of each id's piece; 0 for special symbols.
    counts: Vec<u64>,
    ids: HashMap<String, u32>,
}

impl Vocabulary {
    /// Builds the vocabulary of all pieces of a text. For a joint vocabulary, pass the pieces of both sides.
    pub fn build<'a>(pieces: impl IntoIterator<Item = &'a str>) -> Self {
        let mut counts: HashMap<&str, u64> = HashMap::new();
        for piece in pieces {
            *counts.entry(piece).or_default() += 1;
        }
        let mut counted: Vec<(&str, u64)> = counts.into_iter().filter(|(piece, _)| !is_special(piece)).collect();
        // In UTF-8, the order of bytes, by which Rust compares strings, is the order of code points.
        counted.sort_unstable_by(|(a, a_count), (b, b_count)| b_count.cmp(a_count).then_with(|| a.cmp(b)));
        let mut vocabulary = Self::with_specials();
        for (piece, count) in counted {
            vocabulary.push(piece, count);
        }
        vocabulary
    }

    /// Reads a file `dict.txt` in fairseq's format: a line `piece count` for each piece, in the order of ids, without
    /// the special symbols.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::from_lines(path, &read_lines(path, &mut || Ok(()))?)
    }

    /// Parses a dictionary from the lines of a file. Error messages name the file as `path`.
    pub fn from_lines(path: &Path, lines: &[String]) -> Result<Self> {
        let mut vocabulary = Self::with_specials();
        for (index, line) in lines.iter().enumerate() {
            let wrong = |what: String| Error::invalid(format!("{}: line {}: {what}", path.display(), index + 1));
            // The line is split at its last space, because a piece may contain white space itself.
            let (piece, count) = match line.rsplit_once(' ').map(|(piece, count)| (piece, count.parse())) {
                Some((piece, Ok(count))) if !piece.is_empty() => (piece, count),
                _ => {
                    return Err(wrong(format!(
                        "expected 'piece count' with a whole number for the count, got '{line}'"
                    )))
                }
            };
            if is_special(piece) {
                return Err(wrong(format!(
                    "'{piece}' is one of the symbols {SPECIALS:?} that come first by themselves; remove the line"
                )));
            }
            if let Some(&first) = vocabulary.ids.get(piece) {
                // Line 1 has the first id behind the special symbols, and each line adds one.
                let first = first as usize - SPECIALS.len() + 1;
                return Err(wrong(format!(
                    "the piece '{piece}' stands on line {first} already; expected each piece once"
                )));
            }
            vocabulary.push(piece, count);
        }
        Ok(vocabulary)
    }

    /// Returns the text of a `dict.txt` in fairseq's format: all pieces except the special symbols.
    pub fn to_text(&self) -> String {
        let lines = self.pieces.iter().zip(&self.counts).skip(SPECIALS.len());
        lines.map(|(piece, count)| format!("{piece} {count}\n")).collect()
    }

    /// Returns the number of ids, special symbols included.
    #[allow(clippy::len_without_is_empty, reason = "the special symbols are always there")]
    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Returns the ids of the pieces, without EOS. Pieces that are not in the vocabulary become UNK.
    pub fn encode<S: AsRef<str>>(&self, pieces: &[S]) -> Vec<u32> {
        pieces.iter().map(|piece| self.ids.get(piece.as_ref()).copied().unwrap_or(UNK)).collect()
    }

    /// Returns (id in `self`, id in `other`) for each piece that both vocabularies have; special symbols come first.
    pub fn shared_with(&self, other: &Vocabulary) -> Vec<(i64, i64)> {
        let specials = (0..SPECIALS.len() as i64).map(|id| (id, id));
        let pieces = self.pieces.iter().enumerate().skip(SPECIALS.len());
        let shared = pieces.filter_map(|(id, piece)| Some((id as i64, i64::from(*other.ids.get(piece)?))));
        specials.chain(shared).collect()
    }

    /// Returns the pieces with these ids, without BOS, PAD and EOS. UNK and ids beyond the vocabulary become `<unk>`.
    pub fn decode(&self, ids: &[u32]) -> Vec<&str> {
        self.decode_as(ids, SPECIALS[UNK as usize])
    }

    /// Returns the pieces with these ids, without BOS, PAD and EOS. UNK and ids beyond the vocabulary become `unknown`.
    pub fn decode_as<'a>(&'a self, ids: &[u32], unknown: &'a str) -> Vec<&'a str> {
        let piece = |&id: &u32| match id {
            BOS | PAD | EOS => None,
            UNK => Some(unknown),
            id => Some(self.pieces.get(id as usize).map_or(unknown, String::as_str)),
        };
        ids.iter().filter_map(piece).collect()
    }

    /// Builds the vocabulary of the special symbols. They are not in `ids`, so a piece that is spelt like one
    /// becomes UNK.
    fn with_specials() -> Self {
        Self { pieces: SPECIALS.map(str::to_owned).to_vec(), counts: vec![0; SPECIALS.len()], ids: HashMap::new() }
    }

    /// Appends a piece with the next id.
    fn push(&mut self, piece: &str, count: u64) {
        // The cast to u32 is lossless: 2^32 different pieces would need hundreds of gigabytes of memory.
        self.ids.insert(piece.to_owned(), self.pieces.len() as u32);
        self.pieces.push(piece.to_owned());
        self.counts.push(count);
    }
}

/// Returns the target vocabulary V_t, the ids that the model may predict: those that occur in training targets, EOS
/// and UNK, but never PAD and BOS.
///
/// The result has a flag for each of the `len` ids. Ids of `targets` that are not below `len` count as UNK.
pub fn seen_mask<'a>(len: usize, targets: impl IntoIterator<Item = &'a [u32]>) -> Vec<bool> {
    let mut seen = vec![false; len];
    let mut set = |id: u32, value: bool| {
        if let Some(flag) = seen.get_mut(id as usize) {
            *flag = value;
        }
    };
    targets.into_iter().flatten().for_each(|&id| set(id, true));
    for (id, value) in [(BOS, false), (PAD, false), (EOS, true), (UNK, true)] {
        set(id, value);
    }
    seen
}

/// True if the piece is spelt like a special symbol.
fn is_special(piece: &str) -> bool {
    SPECIALS.contains(&piece)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Loads a vocabulary from a temporary file with this text.
    fn load(text: &str) -> Result<Vocabulary> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("dict.txt");
        std::fs::write(&path, text).unwrap();
        Vocabulary::load(path)
    }

    #[test]
    fn pieces_are_ordered_by_count_then_code_point() {
        // UTF-16 order would put U+1F600 (a surrogate pair) before U+FF01; Python and fairseq compare code points.
        let vocabulary = Vocabulary::build("b \u{1f600} \u{ff01} a c c </s> B \u{e4} <pad>".split(' '));
        assert_eq!(vocabulary.pieces[4..], ["c", "B", "a", "b", "\u{e4}", "\u{ff01}", "\u{1f600}"]);
        assert_eq!(vocabulary.counts[4..6], [2, 1]);
        assert_eq!((vocabulary.len(), &vocabulary.pieces[..4]), (11, &SPECIALS.map(str::to_owned)[..]));
    }

    #[test]
    fn encoding_and_decoding() {
        let vocabulary = Vocabulary::build(["ja", "ja", "ne@@", "in"]);
        let ids = vocabulary.encode(&["ne@@", "in", "ja", "oh", "</s>", "<pad>"]);
        assert_eq!(ids, [6, 5, 4, UNK, UNK, UNK]);
        assert_eq!(vocabulary.decode(&[BOS, 6, 5, PAD, UNK, 4, 99, EOS]), ["ne@@", "in", "<unk>", "ja", "<unk>"]);
    }

    #[test]
    fn a_saved_vocabulary_loads_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("dict.txt");
        let vocabulary = Vocabulary::build("a\u{a0}b a\u{a0}b \t x\u{2028} c c c".split(' '));
        std::fs::write(&path, vocabulary.to_text()).unwrap();
        assert_eq!(vocabulary.to_text(), "c 3\na\u{a0}b 2\n\t 1\nx\u{2028} 1\n");
        let loaded = Vocabulary::load(&path).unwrap();
        assert_eq!(loaded, vocabulary);
        // A file's order is kept, even if counts are not sorted.
        assert_eq!(
            load("rare 1\noften 9\nmadeupword0000 0\n").unwrap().encode(&["rare", "often", "madeupword0000"]),
            [4, 5, 6]
        );
        assert_eq!(load("of course 3\n").unwrap().encode(&["of course"]), [4]);
    }

    #[test]
    fn malformed_files_are_named_by_line() {
        let message = |text: &str| load(text).unwrap_err().to_string();
        for wrong in ["b", "b x", "b -1", " 3", "", "b 1 #fairseq:overwrite"] {
            let error = message(&format!("a 1\n{wrong}\n"));
            assert!(
                error.contains(&format!(
                    "line 2: expected 'piece count' with a whole number for the count, got '{wrong}'"
                )),
                "{error}"
            );
        }
        let twice = message("a 1\nb 1\na 3\n");
        assert!(twice.contains("line 3: the piece 'a' stands on line 1 already"), "{twice}");
        let special = message("</s> 1\n");
        assert!(special.contains("line 1: '</s>' is one of the symbols"), "{special}");
    }

    #[test]
    fn the_mask_allows_training_targets_eos_and_unk() {
        let targets: [&[u32]; 3] = [&[5, 7], &[], &[7, BOS, PAD, 99]];
        assert_eq!(seen_mask(8, targets), [false, false, true, true, false, true, false, true]);
    }
}
