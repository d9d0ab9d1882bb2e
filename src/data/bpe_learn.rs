//! Learning of BPE merges: the most frequent adjacent pair first (Sennrich et al. 2016).
//!
//! The symbols of all distinct words are in one array, and each symbol is linked to its neighbours in the word. Every
//! pair has a list of its places, which are indices in the array. The time of a merge is proportional to the number of
//! its pair's places. So learning is linear in the size of the corpus, even if words are long.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};

use super::bpe::{spaced_words, Bpe, WORD_END};
use super::interrupt::{interruptible, throttled, Interrupt};
use crate::error::{Error, Result};

/// The smallest count of a pair that is merged, the same as subword-nmt's default.
const LEAST_PAIR_COUNT: i64 = 2;

impl Bpe {
    /// Learns at most `operations` merges from lines whose words are separated by spaces. Stops earlier if no pair
    /// occurs twice.
    ///
    /// The same lines always yield the same merges. Among pairs with the same count, the pair whose symbols are older
    /// is merged first; initial symbols are in alphabetical order, as in the trainer of the `tokenizers` library. For a
    /// joint BPE, pass the lines of both languages.
    pub fn learn<'a>(
        lines: impl IntoIterator<Item = &'a str>,
        operations: usize,
        check_interrupt: Interrupt,
    ) -> Result<Self> {
        if operations == 0 {
            return Err(Error::invalid("0 BPE operations; expected at least 1, or no BPE at all (--no-bpe)"));
        }
        // Checks are rare now, so that one for each line and merge costs little.
        let mut check_interrupt = throttled(check_interrupt);
        let mut number_of_lines = 0;
        // A sorted map is used because the order of a hash map would change the result.
        let mut words: BTreeMap<&str, i64> = BTreeMap::new();
        interruptible(&mut check_interrupt, lines, |lines| {
            for line in lines {
                number_of_lines += 1;
                learnable_words(line).for_each(|word| *words.entry(word).or_default() += 1);
            }
        })?;
        let merges = Learner::new(&words, &mut check_interrupt)?.learn(operations, &mut check_interrupt)?;
        if merges.is_empty() {
            return Err(Error::invalid(format!(
                "no pair of characters occurs twice in the {number_of_lines} lines to learn BPE from; expected more \
                 text, or no BPE at all (--no-bpe)"
            )));
        }
        Ok(Self::from_merges(merges))
    }
}

/// Returns the words of a line from which merges are learned. Words that contain a carriage return are left out,
/// because it would split their merges into two lines of the file.
fn learnable_words(line: &str) -> impl Iterator<Item = &str> {
    spaced_words(line).filter(|word| !word.contains('\r'))
}

/// The number of a symbol, by age: the initial symbols in alphabetical order, then each merged one.
type Id = u32;
type IdPair = (Id, Id);

/// The id at a place whose symbol has been merged into its left neighbour.
const GONE: Id = Id::MAX;
/// The place before the beginning or after the end of a word.
const NOWHERE: u32 = u32::MAX;

/// The state of learning: the symbols of all distinct words, as linked lists in one array, and the pairs to merge.
struct Learner {
    /// The text of each symbol, at the index of its id.
    spelled: Vec<String>,
    /// The id of the symbol with this text.
    ids: HashMap<String, Id>,
    /// The symbols of all words, each at the place of its first character.
    symbols: Vec<Id>,
    /// For each place in `symbols`, the place of the next symbol in the word.
    next: Vec<u32>,
    /// For each place in `symbols`, the place of the previous symbol in the word.
    previous: Vec<u32>,
    /// For each place in `symbols`, the index of the word that it belongs to.
    words: Vec<u32>,
    /// The frequency of each word.
    frequencies: Vec<i64>,
    /// The current count of each pair.
    counts: HashMap<IdPair, i64>,
    /// The places of the left symbols of each pair. The list may have outdated places, where the pair no longer occurs.
    places: HashMap<IdPair, Vec<u32>>,
    /// Pairs ordered by count, then by age, each with an index into [`Learner::entry_words`]. An outdated count is
    /// corrected when its entry is popped.
    queue: BinaryHeap<(i64, Reverse<IdPair>, Reverse<usize>)>,
    /// For each entry of the queue, the words in which its pair was found, in ascending order. If another merge
    /// creates the pair again, the pair is queued a second time. Each entry is merged only in its own words, as in
    /// the trainer of the `tokenizers` library (tests/data/test_bpe.py).
    entry_words: Vec<Vec<u32>>,
}

impl Learner {
    /// Splits the words, given with their counts, into initial symbols, and queues all adjacent pairs.
    fn new(words: &BTreeMap<&str, i64>, check_interrupt: Interrupt) -> Result<Self> {
        let mut symbols = BTreeSet::new();
        interruptible(check_interrupt, words.keys(), |words| {
            for (index, word, character) in words.flat_map(|word| word.char_indices().map(move |(i, c)| (i, word, c))) {
                // A word's last character also makes a symbol with the end-of-word mark.
                symbols.insert(character.to_string());
                if index + character.len_utf8() == word.len() {
                    symbols.insert(format!("{character}{WORD_END}"));
                }
            }
        })?;
        let spelled: Vec<String> = symbols.into_iter().collect();
        let ids = spelled.iter().enumerate().map(|(id, symbol)| (symbol.clone(), id as Id)).collect();
        let mut learner = Learner {
            spelled,
            ids,
            symbols: Vec::new(),
            next: Vec::new(),
            previous: Vec::new(),
            words: Vec::new(),
            frequencies: Vec::new(),
            counts: HashMap::new(),
            places: HashMap::new(),
            queue: BinaryHeap::new(),
            entry_words: Vec::new(),
        };
        interruptible(check_interrupt, words, |words| words.for_each(|(word, count)| learner.add(word, *count)))?;
        if learner.symbols.len() >= NOWHERE as usize {
            return Err(Error::invalid("more than 4 billion characters in different words; expected text with spaces"));
        }
        let word_at = |place: &u32| learner.words[*place as usize];
        let pairs: Vec<(IdPair, Vec<u32>)> =
            learner.places.iter().map(|(pair, places)| (*pair, places.iter().map(word_at).collect())).collect();
        pairs.into_iter().for_each(|(pair, words)| learner.enqueue(pair, words));
        Ok(learner)
    }

    /// Adds a word that occurs `count` times: one place for each character, and the counts of all adjacent pairs.
    fn add(&mut self, word: &str, count: i64) {
        let first = self.symbols.len();
        for (index, character) in word.char_indices() {
            let is_last = index + character.len_utf8() == word.len();
            let symbol = format!("{character}{}", if is_last { WORD_END } else { "" });
            let place = self.symbols.len();
            self.symbols.push(self.ids[&symbol]);
            self.words.push(self.frequencies.len() as u32);
            self.previous.push(if index == 0 { NOWHERE } else { place as u32 - 1 });
            self.next.push(if is_last { NOWHERE } else { place as u32 + 1 });
        }
        self.frequencies.push(count);
        // A pair's place is that of its left symbol.
        for place in first + 1..self.symbols.len() {
            self.count(place as u32 - 1, (self.symbols[place - 1], self.symbols[place]), count);
        }
    }

    /// Adds `weight`, the frequency of the word, to a pair's count and records the pair's place. A negative weight
    /// removes an occurrence; its place stays in the list, and [`Learner::merge`] skips it.
    fn count(&mut self, place: u32, pair: IdPair, weight: i64) {
        *self.counts.entry(pair).or_default() += weight;
        if weight > 0 {
            self.places.entry(pair).or_default().push(place);
        }
    }

    /// Queues a pair for the given words, whose indices are in ascending order.
    fn enqueue(&mut self, pair: IdPair, mut words: Vec<u32>) {
        words.dedup();
        self.queue.push((self.counts[&pair], Reverse(pair), Reverse(self.entry_words.len())));
        self.entry_words.push(words);
    }

    /// Merges until there are `operations` new symbols, or until no pair occurs often enough.
    fn learn(mut self, operations: usize, check_interrupt: Interrupt) -> Result<Vec<(String, String)>> {
        let most_symbols = self.spelled.len().saturating_add(operations);
        let mut merged = Vec::new();
        while self.spelled.len() < most_symbols {
            check_interrupt()?;
            let Some((count, Reverse(pair), Reverse(entry))) = self.queue.pop() else { break };
            let current_count = self.counts[&pair];
            // If the popped entry had an outdated count, it is queued again with the current one.
            if count != current_count {
                self.queue.push((current_count, Reverse(pair), Reverse(entry)));
                continue;
            }
            if count < LEAST_PAIR_COUNT {
                break;
            }
            merged.push(pair);
            let words = std::mem::take(&mut self.entry_words[entry]);
            let is_in_words = |place: &u32| words.binary_search(&self.words[*place as usize]).is_ok();
            // Places in other words are kept for another queue entry of the same pair.
            let (places, others): (Vec<u32>, Vec<u32>) =
                self.places.remove(&pair).unwrap_or_default().into_iter().partition(is_in_words);
            if !others.is_empty() {
                self.places.insert(pair, others);
            }
            self.merge(pair, places);
        }
        // A pair that was merged twice is listed only at its last merge.
        let last: HashMap<IdPair, usize> = merged.iter().enumerate().map(|(rank, pair)| (*pair, rank)).collect();
        let kept = merged.iter().enumerate().filter(|(rank, pair)| last[*pair] == *rank).map(|(_, pair)| pair);
        let spelled = |id: Id| self.spelled[id as usize].clone();
        // A merge whose result equals an existing symbol adds no symbol to the count above, so the list may be longer
        // than `operations`.
        Ok(kept.take(operations).map(|&(left, right)| (spelled(left), spelled(right))).collect())
    }

    /// Joins a pair at the given places, from left to right.
    fn merge(&mut self, (left, right): IdPair, mut places: Vec<u32>) {
        let text = format!("{}{}", self.spelled[left as usize], self.spelled[right as usize]);
        // The joined text may be that of an existing symbol, which then has its id already.
        let joined = *self.ids.entry(text.clone()).or_insert(self.spelled.len() as Id);
        if joined as usize == self.spelled.len() {
            self.spelled.push(text);
        }
        places.sort_unstable();
        places.dedup();
        // The pairs that this merge creates, each with the indices of the words in which it creates them.
        let mut created: BTreeMap<IdPair, Vec<u32>> = BTreeMap::new();
        for place in places {
            let left_place = place as usize;
            let right_place = self.next[left_place];
            // The pair may no longer be at this place, because another merge has changed its symbols.
            if self.symbols[left_place] != left || right_place == NOWHERE || self.symbols[right_place as usize] != right
            {
                continue;
            }
            // `before` and `after` are the places of the neighbours of the pair in its word.
            let (before, after) = (self.previous[left_place], self.next[right_place as usize]);
            let word = self.words[left_place];
            let weight = self.frequencies[word as usize];
            self.symbols[left_place] = joined;
            self.symbols[right_place as usize] = GONE;
            self.next[left_place] = after;
            if before != NOWHERE {
                let neighbour = self.symbols[before as usize];
                self.count(before, (neighbour, left), -weight);
                self.count(before, (neighbour, joined), weight);
                created.entry((neighbour, joined)).or_default().push(word);
            }
            if after != NOWHERE {
                self.previous[after as usize] = place;
                let neighbour = self.symbols[after as usize];
                self.count(place, (right, neighbour), -weight);
                self.count(place, (joined, neighbour), weight);
                created.entry((joined, neighbour)).or_default().push(word);
            }
        }
        for (pair, words) in created {
            // In a word like "aaaab", a later join of this merge may have removed a pair that an earlier one created.
            match self.counts[&pair] > 0 {
                true => self.enqueue(pair, words),
                false => drop(self.places.remove(&pair)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::bpe::testing::numbers;

    /// Learns merges without interrupts.
    fn learn<'a>(lines: impl IntoIterator<Item = &'a str>, operations: usize) -> Result<Bpe> {
        Bpe::learn(lines, operations, &mut || Ok(()))
    }

    /// The `tokenizers` library takes a minute for a word of this length.
    #[test]
    fn a_long_word_is_learned_and_segmented_in_linear_time() {
        // `below(n)` is a random number below n.
        let mut below = numbers(3);
        let word: String = (0..160_000).map(|_| (b'a' + below(20) as u8) as char).collect();
        let start = std::time::Instant::now();
        let bpe = learn([word.as_str()], 8000).unwrap();
        assert!(bpe.merges().len() > 7000, "{}", bpe.merges().len());
        let pieces = bpe.segment(&word);
        assert!(start.elapsed().as_secs() < 20);
        assert_eq!(crate::data::join(&pieces), word);
        assert!(pieces.len() < 80_000, "{}", pieces.len());
    }

    #[test]
    fn an_interrupt_stops_learning() {
        let lines = std::iter::repeat_n("ab cd abc", 100_000_000);
        let stopped = Bpe::learn(lines, 5, &mut || Err(Error::Interrupted("stop".into()))).unwrap_err();
        assert!(matches!(stopped, Error::Interrupted(_)), "{stopped}");
    }

    /// Returns the merges, each as `left right`.
    fn pairs(bpe: &Bpe) -> Vec<String> {
        bpe.merges().iter().map(|(left, right)| format!("{left} {right}")).collect()
    }

    #[test]
    fn the_most_frequent_pair_comes_first() {
        // The counts are l-o 5, o-w</w> 3, o-w 2, w-e 2 and e-r</w> 2. After the merge "lo" they are lo-w</w> 3 and
        // lo-w 2.
        let bpe = learn(["low low low", " lower  lower "], 3).unwrap();
        assert_eq!(pairs(&bpe)[..2], ["l o", "lo w</w>"]);
        assert_eq!(bpe.merges().len(), 3);
        assert_eq!(bpe.segment("low lot"), ["low", "lo@@", "t"]);
    }

    #[test]
    fn learning_ends_when_no_pair_occurs_twice() {
        let bpe = learn(["ab ab cd"], 100).unwrap();
        assert_eq!(pairs(&bpe), ["a b</w>"]);
    }

    #[test]
    fn ties_are_broken_deterministically() {
        let lines: Vec<String> =
            (0..400u32).map(|i| format!("{:x} {:o}", i.wrapping_mul(2_654_435_761), i * 77)).collect();
        let again = || pairs(&learn(lines.iter().map(String::as_str), 200).unwrap());
        let first = again();
        for _ in 0..5 {
            assert_eq!(again(), first);
        }
    }

    #[test]
    fn nothing_to_learn_is_an_error() {
        assert!(learn(["a b c", "de"], 10).unwrap_err().to_string().contains("no pair of characters occurs twice"));
        assert!(learn(["aa aa"], 0).unwrap_err().to_string().contains("at least 1"));
    }
}
