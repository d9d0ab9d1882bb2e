//! Learning merges: the most frequent pair of neighbours first (Sennrich et al. 2016), by the `tokenizers` crate's
//! trainer.

use std::collections::BTreeSet;

use tokenizers::models::bpe::{BpeTrainer, BPE};
use tokenizers::{AddedToken, Trainer};

use super::bpe::{spaced_words, Bpe, WORD_END};
use crate::error::{Error, Result};

/// A pair seen once is no pattern: subword-nmt's default too.
const LEAST_PAIR_COUNT: u64 = 2;

impl Bpe {
    /// Learns at most `operations` merges from lines of words separated by spaces; fewer where no pair occurs twice any
    /// more.
    ///
    /// The same lines give the same merges. For a joint BPE pass the lines of both languages.
    pub fn learn<'a>(lines: impl IntoIterator<Item = &'a str>, operations: usize) -> Result<Self> {
        if operations == 0 {
            return Err(Error::invalid("0 BPE operations; expected at least 1, or no BPE at all (--no-bpe)"));
        }
        let lines: Vec<&str> = lines.into_iter().collect();
        let initial = initial_symbols(&lines);
        let first_merge = initial.len();
        // The trainer numbers word-final symbols in the order of a hash map with random keys and breaks ties of
        // frequency by these numbers. Given as special tokens, all first symbols have their numbers beforehand and two
        // runs agree.
        let numbered = initial.into_iter().map(|symbol| AddedToken::from(symbol, true)).collect();
        let mut trainer = BpeTrainer::builder()
            .show_progress(false)
            .special_tokens(numbered)
            .vocab_size(first_merge.saturating_add(operations))
            .min_frequency(LEAST_PAIR_COUNT)
            .end_of_word_suffix(WORD_END.to_owned())
            .build();
        let mut model = BPE::default();
        trainer
            .feed(lines.iter(), |line| Ok(learnable_words(line).map(str::to_owned).collect()))
            .and_then(|()| trainer.train(&mut model))
            .map_err(|error| Error::invalid(format!("learning BPE failed: {error}")))?;
        let mut merges = merges_of(&model)?;
        // The trainer counts new symbols; a merge that spells an old one anew is free for it, and would exceed what was
        // asked for.
        merges.truncate(operations);
        if merges.is_empty() {
            return Err(Error::invalid(format!(
                "no pair of characters occurs twice in the {} lines to learn BPE from; expected more \
                 text, or no BPE at all (--no-bpe)",
                lines.len()
            )));
        }
        Ok(Self::from_merges(merges))
    }
}

/// The words that merges are learned from. A word with a carriage return inside would write merges that no reader takes
/// for one line.
fn learnable_words(line: &str) -> impl Iterator<Item = &str> {
    spaced_words(line).filter(|word| !word.contains('\r'))
}

/// Every symbol a word can start from: its characters, and its last one with the end-of-word mark; in alphabetical
/// order.
fn initial_symbols(lines: &[&str]) -> BTreeSet<String> {
    let mut symbols = BTreeSet::new();
    for word in lines.iter().flat_map(|line| learnable_words(line)) {
        for (index, character) in word.char_indices() {
            // The trainer wants each character without the mark as well.
            symbols.insert(character.to_string());
            if index + character.len_utf8() == word.len() {
                symbols.insert(format!("{character}{WORD_END}"));
            }
        }
    }
    symbols
}

/// The model's merges in order. Its fields are private: its JSON form is the public way to them.
fn merges_of(model: &BPE) -> Result<Vec<(String, String)>> {
    let unreadable = |error| Error::invalid(format!("the merges of the `tokenizers` crate cannot be read: {error}"));
    let mut json = serde_json::to_value(model).map_err(unreadable)?;
    serde_json::from_value(json["merges"].take()).map_err(unreadable)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(bpe: &Bpe) -> Vec<String> {
        bpe.merges().iter().map(|(left, right)| format!("{left} {right}")).collect()
    }

    #[test]
    fn the_most_frequent_pair_comes_first() {
        // l-o 5, o-w</w> 3, o-w 2, w-e 2, e-r</w> 2; after "lo": lo-w</w> 3, lo-w 2.
        let bpe = Bpe::learn(["low low low", " lower  lower "], 3).unwrap();
        assert_eq!(pairs(&bpe)[..2], ["l o", "lo w</w>"]);
        assert_eq!(bpe.merges().len(), 3);
        assert_eq!(bpe.segment("low lot"), ["low", "lo@@", "t"]);
    }

    #[test]
    fn learning_ends_where_no_pair_occurs_twice() {
        let bpe = Bpe::learn(["ab ab cd"], 100).unwrap();
        assert_eq!(pairs(&bpe), ["a b</w>"]);
    }

    #[test]
    fn ties_are_broken_the_same_way_every_time() {
        let lines: Vec<String> =
            (0..400u32).map(|i| format!("{:x} {:o}", i.wrapping_mul(2_654_435_761), i * 77)).collect();
        let learn = || pairs(&Bpe::learn(lines.iter().map(String::as_str), 200).unwrap());
        let first = learn();
        for _ in 0..5 {
            assert_eq!(learn(), first);
        }
    }

    #[test]
    fn nothing_to_learn_is_an_error() {
        assert!(Bpe::learn(["a b c", "de"], 10)
            .unwrap_err()
            .to_string()
            .contains("no pair of characters occurs twice"));
        assert!(Bpe::learn(["aa aa"], 0).unwrap_err().to_string().contains("at least 1"));
    }
}
