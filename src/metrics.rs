//! Metrics of a corpus: BLEU, and the unigram entropy as a reference for a model's loss.

use std::collections::HashMap;
use std::fmt;

use crate::data::text::words;
use crate::error::{Error, Result};

mod tokenize;
pub use tokenize::{lacks_spaces, Tokenize};

/// The largest length n of the n-grams in BLEU.
const ORDERS: usize = 4;

/// Corpus BLEU by multi-bleu.perl's formula (Papineni et al. 2002): 100·BP·exp(¼ Σₙ ln pₙ). Over the whole corpus,
/// p_n is the number of clipped n-gram matches divided by the number of the hypotheses' n-grams, without smoothing,
/// so BLEU is 0 if any p_n is 0. BP is 1 if the hypotheses are at least as long as the references, else e^{1 −
/// ref_len/hyp_len}.
///
/// There is one reference per hypothesis, and case matters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bleu {
    /// The score, 0 to 100.
    pub bleu: f64,
    /// p₁ to p₄, in percent.
    pub precisions: [f64; ORDERS],
    /// BP, 0 to 1.
    pub brevity_penalty: f64,
    /// The ratio hyp_len / ref_len.
    pub ratio: f64,
    /// The number of words in the hypotheses.
    pub hyp_len: usize,
    /// The number of words in the references.
    pub ref_len: usize,
}

/// Computes BLEU with one reference per hypothesis, like `sacrebleu --smooth-method none` with the same `--tokenize`.
pub fn bleu<H: AsRef<str>, R: AsRef<str>>(hypotheses: &[H], references: &[R], tokenize: Tokenize) -> Result<Bleu> {
    bleu_of_words(hypotheses, references, |line| words(&tokenize.apply(line)).map(str::to_owned).collect())
}

/// Computes the BLEU of multi-bleu.perl. That script works on bytes: words end only at ASCII white space, and
/// `lowercase` (its option -lc) changes only ASCII letters.
pub fn multi_bleu<H: AsRef<str>, R: AsRef<str>>(hypotheses: &[H], references: &[R], lowercase: bool) -> Result<Bleu> {
    let is_space = |c| matches!(c, '\t'..='\r' | ' ');
    bleu_of_words(hypotheses, references, |line| {
        let words = line.split(is_space).filter(|word| !word.is_empty());
        words.map(|word| if lowercase { word.to_ascii_lowercase() } else { word.to_owned() }).collect()
    })
}

/// Computes BLEU; `split` splits a line into words. Errors unless there is one reference per hypothesis.
fn bleu_of_words<H: AsRef<str>, R: AsRef<str>>(
    hypotheses: &[H],
    references: &[R],
    split: impl Fn(&str) -> Vec<String>,
) -> Result<Bleu> {
    if hypotheses.len() != references.len() {
        return Err(Error::invalid(format!(
            "{} hypotheses and {} references; expected one reference for each hypothesis, in the same order",
            hypotheses.len(),
            references.len()
        )));
    }
    // The entry n − 1 of each array belongs to the n-grams.
    let (mut matches, mut totals) = ([0; ORDERS], [0; ORDERS]);
    let (mut hyp_len, mut ref_len) = (0, 0);
    for (hypothesis, reference) in hypotheses.iter().zip(references) {
        let (hypothesis, reference) = (split(hypothesis.as_ref()), split(reference.as_ref()));
        hyp_len += hypothesis.len();
        ref_len += reference.len();
        for n in 1..=ORDERS {
            let (counts, reference_counts) = (ngrams(&hypothesis, n), ngrams(&reference, n));
            // Matches are clipped: an n-gram counts at most as often as it occurs in the reference.
            let clipped = counts.iter().map(|(ngram, count)| count.min(reference_counts.get(ngram).unwrap_or(&0)));
            matches[n - 1] += clipped.sum::<usize>();
            totals[n - 1] += counts.values().sum::<usize>();
        }
    }
    let fraction = |part: usize, whole: usize| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
    let precisions: [f64; ORDERS] = std::array::from_fn(|n| fraction(matches[n], totals[n]));
    let brevity_penalty = match hyp_len {
        0 => 0.0,
        _ if hyp_len >= ref_len => 1.0,
        _ => (1.0 - ref_len as f64 / hyp_len as f64).exp(),
    };
    // ln 0 = −∞ and e^−∞ = 0, so BLEU is zero if one precision is zero.
    let mean_log = precisions.iter().map(|p| p.ln()).sum::<f64>() / ORDERS as f64;
    Ok(Bleu {
        bleu: 100.0 * brevity_penalty * mean_log.exp(),
        precisions: precisions.map(|p| 100.0 * p),
        brevity_penalty,
        ratio: fraction(hyp_len, ref_len),
        hyp_len,
        ref_len,
    })
}

/// Counts how often each n-gram occurs among the words.
fn ngrams(words: &[String], n: usize) -> HashMap<&[String], usize> {
    let mut counts = HashMap::new();
    for ngram in words.windows(n) {
        *counts.entry(ngram).or_default() += 1;
    }
    counts
}

impl fmt::Display for Bleu {
    /// Writes the line that multi-bleu.perl prints.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.ref_len == 0 {
            return f.write_str("BLEU = 0, 0/0/0/0 (BP=0, ratio=0, hyp_len=0, ref_len=0)");
        }
        let [p1, p2, p3, p4] = self.precisions;
        write!(
            f,
            "BLEU = {:.2}, {p1:.1}/{p2:.1}/{p3:.1}/{p4:.1} (BP={:.3}, ratio={:.3}, hyp_len={}, ref_len={})",
            self.bleu, self.brevity_penalty, self.ratio, self.hyp_len, self.ref_len
        )
    }
}

/// Returns the unigram entropy −Σ_v f_v ln f_v of a list of tokens in nats, where f_v is the share of vocabulary
/// entry v. This is the loss per token of a model that has learned only the frequencies. Returns 0 for an empty list.
pub fn unigram_entropy<T: Copy + Ord>(tokens: impl IntoIterator<Item = T>) -> f64 {
    let mut sorted: Vec<T> = tokens.into_iter().collect();
    sorted.sort_unstable();
    let total = sorted.len() as f64;
    // After the sort, equal tokens form one run. A run adds −f ln f, where f is its share of all tokens.
    let surprise = |run: &[T]| run.len() as f64 / total * (total / run.len() as f64).ln();
    sorted.chunk_by(|left, right| left == right).map(surprise).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bleu_by_hand() {
        // For "a b c d e" against "a b c x d e" the n-gram matches are 5/5, 3/4, 1/3, 0/2; the second pair adds 5/5,
        // 4/4, 3/3, 2/2.
        let hypotheses = ["a b c d e", "v w x y z"];
        let score = bleu(&hypotheses, &["a b c x d e", "v w x y z"], Tokenize::None).unwrap();
        let expected = [100.0, 700.0 / 8.0, 400.0 / 6.0, 50.0];
        assert!(score.precisions.iter().zip(expected).all(|(p, q)| (p - q).abs() < 1e-12), "{score:?}");
        let bleu_by_hand = 100.0 * (1.0f64 - 11.0 / 10.0).exp() * (1.0f64 * 0.875 * 4.0 / 6.0 * 0.5).powf(0.25);
        assert!((score.bleu - bleu_by_hand).abs() < 1e-12);
        assert_eq!(
            score.to_string(),
            "BLEU = 66.50, 100.0/87.5/66.7/50.0 (BP=0.905, ratio=0.909, hyp_len=10, ref_len=11)"
        );
    }

    #[test]
    fn matches_are_clipped_and_long_hypotheses_have_no_penalty() {
        let score = bleu(&["the the the the the the the"], &["the cat is on the mat"], Tokenize::None).unwrap();
        assert!((score.precisions[0] - 200.0 / 7.0).abs() < 1e-12, "{score:?}");
        assert_eq!((score.brevity_penalty, score.bleu), (1.0, 0.0));
    }

    #[test]
    fn degenerate_corpora_score_zero() {
        for (hypotheses, references) in [(vec![], vec![]), (vec![""], vec!["a b"]), (vec!["a b c"], vec!["a b c"])] {
            assert_eq!(bleu(&hypotheses, &references, Tokenize::None).unwrap().bleu, 0.0);
        }
        assert_eq!(
            bleu(&[""], &["a"], Tokenize::None).unwrap().to_string(),
            "BLEU = 0.00, 0.0/0.0/0.0/0.0 (BP=0.000, ratio=0.000, hyp_len=0, ref_len=1)"
        );
        let uneven = bleu(&["a"], &["a", "b"], Tokenize::None).unwrap_err().to_string();
        assert!(uneven.contains("1 hypotheses and 2 references"), "{uneven}");
    }

    /// The numbers are from `sacrebleu --tokenize none --smooth-method none`.
    #[test]
    fn equals_sacrebleu() {
        let hypotheses = [
            "ein mann f\u{e4}hrt mit dem rad .",
            "zwei hunde spielen im schnee .",
            "eine frau",
            "kinder\u{a0}lachen , laut und lange .",
        ];
        let references = [
            "ein mann f\u{e4}hrt auf dem rad durch die stadt .",
            "zwei hunde spielen im schnee .",
            "eine frau liest ein buch .",
            "kinder lachen laut und lange .",
        ];
        let score = bleu(&hypotheses, &references, Tokenize::None).unwrap();
        assert!((score.bleu - 44.74916320164619).abs() < 1e-9, "{score:?}");
    }

    #[test]
    fn multi_bleu_works_on_bytes() {
        let line =
            |hypothesis, reference, lowercase| multi_bleu(&[hypothesis], &[reference], lowercase).unwrap().to_string();
        let split =
            line("it costs 10\u{a0}000 euros\u{85}in\u{b}the town", "it costs 10\u{a0}000 euros\u{85}in a town", false);
        // The matches are 5, 3, 2 and 1 out of the 6, 5, 4 and 3 n-grams of length 1 to 4: (5/6·3/5·2/4·1/3)^¼.
        assert_eq!(split, "BLEU = 53.73, 83.3/60.0/50.0/33.3 (BP=1.000, ratio=1.000, hyp_len=6, ref_len=6)");
        let lowered = line("\u{dc}BER DEN \u{c4}rger", "\u{dc}ber den \u{e4}rger", true);
        assert_eq!(lowered, "BLEU = 0.00, 66.7/50.0/0.0/0.0 (BP=1.000, ratio=1.000, hyp_len=3, ref_len=3)");
        assert_eq!(line("a", "", false), "BLEU = 0, 0/0/0/0 (BP=0, ratio=0, hyp_len=0, ref_len=0)");
    }

    #[test]
    fn unigram_entropy_by_hand() {
        assert!((unigram_entropy([7, 8, 7, 8]) - 2.0f64.ln()).abs() < 1e-15);
        assert!(
            (unigram_entropy(["a", "b", "a", "a"]) - (0.75 * (4.0f64 / 3.0).ln() + 0.25 * 4.0f64.ln())).abs() < 1e-15
        );
        assert_eq!((unigram_entropy([5u32; 9]), unigram_entropy([0u32; 0])), (0.0, 0.0));
    }
}
