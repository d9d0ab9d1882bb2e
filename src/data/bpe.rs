//! Byte pair encoding: applies merges to words (Sennrich et al. 2016), exactly as `subword-nmt apply-bpe` does.
//!
//! A word begins as its characters and an end-of-word mark `</w>`. The adjacent pair that comes first in the
//! list of merges is joined wherever it occurs, from left to right. This repeats until no adjacent pair is in the
//! list. Every piece except the last one of a word ends in `@@`.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use crate::data::text::read_lines;
use crate::error::{Error, Result};

/// The suffix of a piece whose word continues in the next piece.
pub const CONTINUED: &str = "@@";
pub(super) const WORD_END: &str = "</w>";

/// The maximum number of cached words: about 200 MB at about 200 bytes a word.
const CACHED_WORDS: usize = 1 << 20;

/// How the end-of-word mark is attached to a word before merging.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WordEnd {
    /// `</w>` is a symbol of its own after the last character, as in files of version 0.1 or without a header.
    OwnSymbol,
    /// `</w>` is part of the last character's symbol, as in files of version 0.2 and of fastBPE.
    OnLastCharacter,
}

/// An ordered list of merges, with a cache of segmented words.
#[derive(Debug)]
pub struct Bpe {
    word_end: WordEnd,
    merges: Vec<(String, String)>,
    /// Maps left half → right half → rank in the list. The maps are nested so that a look-up can borrow both halves.
    ranks: HashMap<String, HashMap<String, usize>>,
    /// The cache: the pieces of each word segmented so far.
    pieces: Mutex<HashMap<String, Vec<String>>>,
}

impl Bpe {
    /// Reads merges from a file in the format of subword-nmt (`#version: 0.2`, then `a b` on each line) or fastBPE
    /// (`a b count` on each line, no header).
    ///
    /// A file with two columns and no header is read as version 0.1, as in subword-nmt. A merge that is listed twice
    /// keeps its first rank.
    pub fn from_codes(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::from_lines(path, &read_lines(path, &mut || Ok(()))?)
    }

    /// Parses merges from the lines of a file. Error messages name the file as `path`.
    pub fn from_lines(path: &Path, lines: &[String]) -> Result<Self> {
        let wrong = |index: usize, what: &str| {
            Error::invalid(format!(
                "{}: line {}: {what}, got '{}'; expected the merges of subword-nmt \
                 ('#version: 0.2', then 'a b' a line) or of fastBPE ('a b count' a line)",
                path.display(),
                index + 1,
                lines[index],
            ))
        };
        let version = lines.first().and_then(|line| line.strip_prefix("#version:"));
        // The merges are on the lines `first..last`: behind the header, and up to the last line that is not empty.
        let first = usize::from(version.is_some());
        let last = lines.iter().rposition(|line| !line.is_empty()).map_or(0, |index| index + 1);
        if last <= first {
            return Err(Error::invalid(format!("{}: no merges; expected at least one line 'a b'", path.display())));
        }
        let columns = |index: usize| lines[index].trim_matches(['\r', ' ']).split(' ').collect::<Vec<_>>();
        let is_fastbpe = version.is_none() && columns(first).len() == 3;
        // Like subword-nmt, read version 0.2.0 as 0.2.
        let word_end = match version.map(|version| version.trim().trim_end_matches(".0")) {
            None if is_fastbpe => WordEnd::OnLastCharacter,
            None | Some("0.1") => WordEnd::OwnSymbol,
            Some("0.2") => WordEnd::OnLastCharacter,
            Some(_) => return Err(wrong(0, "expected version 0.1 or 0.2")),
        };
        let mut merges = Vec::with_capacity(last - first);
        for index in first..last {
            match columns(index)[..] {
                [left, right] if !is_fastbpe => merges.push((left.to_owned(), right.to_owned())),
                [left, right, count] if is_fastbpe && count.parse::<u64>().is_ok() => {
                    merges.push((left.to_owned(), right.to_owned()))
                }
                _ if is_fastbpe => return Err(wrong(index, "expected two symbols and a count")),
                _ => return Err(wrong(index, "expected two symbols")),
            }
        }
        Ok(Self::new(word_end, merges))
    }

    /// Builds a BPE from learned merges, which have the format of version 0.2.
    pub(super) fn from_merges(merges: Vec<(String, String)>) -> Self {
        Self::new(WordEnd::OnLastCharacter, merges)
    }

    /// Builds a BPE from listed merges. If a merge is listed twice, the second one is ignored.
    fn new(word_end: WordEnd, listed: Vec<(String, String)>) -> Self {
        let mut merges = Vec::with_capacity(listed.len());
        let mut ranks: HashMap<String, HashMap<String, usize>> = HashMap::new();
        for (left, right) in listed {
            let right_ranks = ranks.entry(left.clone()).or_default();
            if !right_ranks.contains_key(&right) {
                right_ranks.insert(right.clone(), merges.len());
                merges.push((left, right));
            }
        }
        Self { word_end, merges, ranks, pieces: Mutex::default() }
    }

    /// Returns the merges in the order in which they are applied.
    pub fn merges(&self) -> &[(String, String)] {
        &self.merges
    }

    /// Splits a line into pieces, like `subword-nmt apply-bpe`. Only spaces separate words; a tab is part of its
    /// word.
    pub fn segment(&self, line: &str) -> Vec<String> {
        // A thread that panics with the lock poisons it. `into_inner` ignores this: the cache is still valid, because
        // entries are only inserted whole.
        let mut pieces = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        let mut out = Vec::new();
        for word in spaced_words(line) {
            if let Some(known) = pieces.get(word) {
                out.extend_from_slice(known);
                continue;
            }
            let segmented = self.segment_word(word);
            out.extend_from_slice(&segmented);
            if pieces.len() < CACHED_WORDS {
                pieces.insert(word.to_owned(), segmented);
            }
        }
        out
    }

    /// Returns the merges in subword-nmt's format.
    pub fn to_text(&self) -> String {
        let version = match self.word_end {
            WordEnd::OwnSymbol => "#version: 0.1\n",
            WordEnd::OnLastCharacter => "#version: 0.2\n",
        };
        let merges = self.merges.iter().map(|(left, right)| format!("{left} {right}\n"));
        std::iter::once(version.to_owned()).chain(merges).collect()
    }

    /// Splits one word into pieces. A word of a single character has no merges.
    fn segment_word(&self, word: &str) -> Vec<String> {
        if word.chars().nth(1).is_none() {
            return vec![word.to_owned()];
        }
        // The end-of-word mark is not text: it is cut off the last symbol, and a symbol of the mark alone is dropped.
        let mut pieces: Vec<String> = self
            .symbols(&format!("{word}{WORD_END}"))
            .into_iter()
            .filter(|symbol| symbol.start < word.len())
            .map(|symbol| word[symbol.start..symbol.end.min(word.len())].to_owned())
            .collect();
        let continued = pieces.len().saturating_sub(1);
        pieces[..continued].iter_mut().for_each(|piece| piece.push_str(CONTINUED));
        pieces
    }

    /// Returns the byte ranges of a word's symbols after all merges. `marked` is the word followed by the end-of-word
    /// mark.
    ///
    /// Symbols form a linked list, and a queue has an entry for every adjacent pair that can be merged: its rank and
    /// the index of its left symbol. So a word of n characters takes O(n log n) time; removing symbols from an array
    /// would take O(n²).
    fn symbols(&self, marked: &str) -> Vec<Range<usize>> {
        let word = &marked[..marked.len() - WORD_END.len()];
        let mut ends: Vec<usize> = word.char_indices().map(|(start, c)| start + c.len_utf8()).collect();
        match self.word_end {
            WordEnd::OwnSymbol => ends.push(marked.len()),
            WordEnd::OnLastCharacter => ends.last_mut().into_iter().for_each(|end| *end = marked.len()),
        }
        let count = ends.len();
        // Each symbol starts where the one before it ends.
        let mut start = 0;
        let mut symbols: Vec<Range<usize>> =
            ends.into_iter().map(|end| std::mem::replace(&mut start, end)..end).collect();
        // The last symbol's `next` is `count`, which is no symbol. The first symbol's `previous` is the symbol itself.
        let mut next: Vec<usize> = (1..=count).collect();
        let mut previous: Vec<usize> = (0..count).map(|i| i.saturating_sub(1)).collect();
        // The rank of the pair whose left symbol has the index `left`; `None` if the pair is not in the list of merges.
        let rank = |symbols: &[Range<usize>], next: &[usize], left: usize| {
            let right = symbols.get(next[left])?.clone();
            self.ranks.get(&marked[symbols[left].clone()])?.get(&marked[right]).copied()
        };
        // `Reverse` makes the queue return the lowest rank first, and the leftmost pair of that rank.
        let entry = |symbols: &[Range<usize>], next: &[usize], left| Some(Reverse((rank(symbols, next, left)?, left)));
        let mut queue: BinaryHeap<_> = (0..count).filter_map(|left| entry(&symbols, &next, left)).collect();
        while let Some(&Reverse((lowest, _))) = queue.peek() {
            // All pairs with this rank are joined, from left to right, before any pair that these merges create.
            // `joined` has the indices of their left symbols.
            let mut joined = Vec::new();
            while let Some(&Reverse((_, left))) = queue.peek().filter(|Reverse((other, _))| *other == lowest) {
                queue.pop();
                // Skip an outdated entry: another merge has already changed one of its symbols.
                if symbols[left].is_empty() || rank(&symbols, &next, left) != Some(lowest) {
                    continue;
                }
                let right = next[left];
                symbols[left].end = symbols[right].end;
                // An empty range marks a symbol that is gone.
                symbols[right] = 0..0;
                next[left] = next[right];
                // Behind the last symbol there is none whose `previous` must change.
                if let Some(previous) = previous.get_mut(next[left]) {
                    *previous = left;
                }
                joined.push(left);
            }
            // A join changes the pair that ends with the joined symbol and the pair that begins with it.
            let changed = joined.iter().flat_map(|&left| [previous[left], left]);
            queue.extend(changed.filter_map(|left| entry(&symbols, &next, left)));
        }
        symbols.retain(|symbol| !symbol.is_empty());
        symbols
    }
}

/// Returns the words of a line. Only spaces separate words; line ends are removed.
pub(super) fn spaced_words(line: &str) -> impl Iterator<Item = &str> {
    line.trim_matches(['\r', '\n', ' ']).split(' ').filter(|word| !word.is_empty())
}

#[cfg(test)]
pub(super) mod testing {
    /// Returns a linear congruential generator of random numbers, with Knuth's constants. Each number is below the
    /// argument of its call. The upper bits of the state are used, because its lowest ones have short periods.
    pub fn numbers(mut state: u64) -> impl FnMut(usize) -> usize {
        move |n| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % n
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MERGES: &str = "l o\nlo w</w>\no w\ne r</w>\na a\naa a\naa aa\ne s\nes t</w>\nl o\n\u{fc} n\n@ @\n\
        \u{1f600} \u{1f600}</w>\na </w>\naa </w>\n";

    /// Reads merges from a temporary file with this content.
    fn bpe(codes: &str) -> Result<Bpe> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("codes");
        std::fs::write(&path, codes).unwrap();
        Bpe::from_codes(path)
    }

    /// The expected values are from subword-nmt 0.3.8's `BPE.segment` with the same header and MERGES.
    #[test]
    fn segments_like_subword_nmt() {
        for (header, frozen) in [("#version: 0.2\n", FROZEN_02), ("", FROZEN_01)] {
            let bpe = bpe(&format!("{header}{MERGES}")).unwrap();
            for (line, pieces) in LINES.iter().zip(frozen) {
                // The second call takes the result from the cache.
                assert_eq!(bpe.segment(line).join(" "), *pieces, "{line:?} with header {header:?}");
                assert_eq!(bpe.segment(line).join(" "), *pieces, "{line:?} from the cache");
            }
        }
    }

    const LINES: &[&str] = &[
        "low lower lowest",
        "  low   er ",
        "",
        "   ",
        "x",
        "\u{fc} \u{fc}n \u{fc}nx",
        "lo@@ west @@ @@@ @",
        "aa aaa aaaa aaaaa aaaaaa",
        "\u{1f600}\u{1f600} \u{1f600}\u{1f600}\u{1f600} e\u{301}st",
        "low\tlow low\u{a0}er",
        "a</w> est</w> </w>",
        "low\r",
        "b\u{2028}low \u{85}",
    ];
    const FROZEN_02: &[&str] = &[
        "low lo@@ w@@ er lo@@ w@@ est",
        "low er",
        "",
        "",
        "x",
        "\u{fc} \u{fc}@@ n \u{fc}n@@ x",
        "lo@@ @@@ @ w@@ est @@@ @ @@@@ @ @",
        "a@@ a aa@@ a aaa@@ a aaaa@@ a aa@@ aaa@@ a",
        "\u{1f600}\u{1f600} \u{1f600}@@ \u{1f600}\u{1f600} e@@ \u{301}@@ s@@ t",
        "lo@@ w@@ \t@@ low lo@@ w@@ \u{a0}@@ er",
        "a@@ <@@ /@@ w@@ > es@@ t@@ <@@ /@@ w@@ > <@@ /@@ w@@ >",
        "low",
        "b@@ \u{2028}@@ low \u{85}",
    ];
    const FROZEN_01: &[&str] = &[
        "lo@@ w lo@@ w@@ e@@ r lo@@ w@@ es@@ t",
        "lo@@ w e@@ r",
        "",
        "",
        "x",
        "\u{fc} \u{fc}n \u{fc}n@@ x",
        "lo@@ @@ w@@ es@@ t @@ @@@@ @ @",
        "aa aaa aaaa aa@@ aaa aaaa@@ aa",
        "\u{1f600}@@ \u{1f600} \u{1f600}@@ \u{1f600}@@ \u{1f600} e@@ \u{301}@@ s@@ t",
        "lo@@ w@@ \t@@ lo@@ w lo@@ w@@ \u{a0}@@ e@@ r",
        "a@@ <@@ /@@ w@@ > es@@ t@@ <@@ /@@ w@@ > <@@ /@@ w@@ >",
        "lo@@ w",
        "b@@ \u{2028}@@ lo@@ w \u{85}",
    ];

    /// Segments one word by the definition: joins the first pair of the list wherever it occurs, until no pair
    /// is in the list.
    fn joined_in_place(bpe: &Bpe, word: &str) -> Vec<String> {
        let mut symbols: Vec<String> = word.chars().map(String::from).collect();
        match bpe.word_end {
            WordEnd::OwnSymbol => symbols.push(WORD_END.into()),
            WordEnd::OnLastCharacter => symbols.last_mut().unwrap().push_str(WORD_END),
        }
        let rank = |pair: &[String]| bpe.ranks.get(&pair[0])?.get(&pair[1]).copied();
        while let Some(lowest) = symbols.windows(2).filter_map(rank).min() {
            let (left, right) = &bpe.merges[lowest];
            let mut i = 0;
            while i + 1 < symbols.len() {
                if symbols[i] == *left && symbols[i + 1] == *right {
                    let right = symbols.remove(i + 1);
                    symbols[i].push_str(&right);
                }
                i += 1;
            }
        }
        symbols
    }

    #[test]
    fn the_linked_list_merges_like_an_array() {
        // `below(n)` is a random number below n.
        let mut below = testing::numbers(7);
        for round in 0..300 {
            // The pairs are in random order, so a merge may come before the merges that create its halves.
            let mut known: Vec<String> = ["a", "b", "c", "a</w>", "b</w>", "</w>"].map(String::from).to_vec();
            let mut merges: Vec<(String, String)> = (0..12)
                .map(|_| {
                    let pair = (known[below(known.len())].clone(), known[below(known.len())].clone());
                    known.push(format!("{}{}", pair.0, pair.1));
                    pair
                })
                .collect();
            (0..merges.len()).for_each(|i| merges.swap(i, below(12)));
            let word_end = if round % 2 == 0 { WordEnd::OwnSymbol } else { WordEnd::OnLastCharacter };
            let bpe = Bpe::new(word_end, merges);
            for _ in 0..20 {
                let word: String = (0..2 + below(20)).map(|_| ["a", "b", "c"][below(3)]).collect();
                let marked = format!("{word}{WORD_END}");
                let symbols: Vec<&str> = bpe.symbols(&marked).into_iter().map(|symbol| &marked[symbol]).collect();
                assert_eq!(symbols, joined_in_place(&bpe, &word), "{word} by {:?}", bpe.merges);
            }
        }
    }

    #[test]
    fn fastbpe_codes_have_counts_and_merge_like_version_02() {
        let with_counts: String = MERGES.lines().map(|line| format!("{line} 17\n")).collect();
        let (fast, plain) = (bpe(&with_counts).unwrap(), bpe(&format!("#version: 0.2\n{MERGES}")).unwrap());
        assert_eq!(fast.merges(), plain.merges());
        assert_eq!(fast.segment("low aaa"), plain.segment("low aaa"));
    }

    #[test]
    fn saved_codes_read_back_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("codes");
        for header in ["", "#version: 0.1\n", "#version: 0.2\n", "#version: 0.2.0\r\n"] {
            let first = bpe(&format!("{header}{MERGES}\n\n")).unwrap();
            std::fs::write(&path, first.to_text()).unwrap();
            let second = Bpe::from_codes(&path).unwrap();
            assert_eq!((first.word_end, &first.merges), (second.word_end, &second.merges));
        }
    }

    #[test]
    fn malformed_codes_are_named_by_line() {
        let message = |codes: &str| bpe(codes).unwrap_err().to_string();
        assert!(message("#version: 0.3\na b\n").contains("line 1: expected version 0.1 or 0.2"));
        assert!(message("#version: 0.2\na b\na b c\n").contains("line 3: expected two symbols, got 'a b c'"));
        assert!(message("#version: 0.2\na b\n\nc d\n").contains("line 3: expected two symbols, got ''"));
        assert!(message("a b 3\na b x\n").contains("line 2: expected two symbols and a count"));
        assert!(message("#version: 0.2\n\n").contains("no merges"));
    }
}
