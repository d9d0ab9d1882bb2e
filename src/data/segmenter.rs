//! Segmentation of lines into pieces, and joining of pieces into lines.

use super::bpe::{Bpe, CONTINUED};
use super::text::words;

/// A way to split a line of text into pieces of the vocabulary.
#[derive(Debug)]
pub enum Segmenter {
    /// Words are split by BPE merges.
    Bpe(Bpe),
    /// White space separates pieces, because the text has already been split into pieces.
    Split,
}

impl Segmenter {
    /// Splits a line into pieces.
    pub fn segment(&self, line: &str) -> Vec<String> {
        match self {
            Self::Bpe(bpe) => bpe.segment(line),
            Self::Split => words(line).map(str::to_owned).collect(),
        }
    }
}

/// Joins pieces into words separated by single spaces.
pub fn join<S: AsRef<str>>(pieces: &[S]) -> String {
    let line = pieces.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(" ");
    join_line(&line)
}

/// Joins the pieces in a line into words, like subword-nmt's `sed -r 's/(@@ )|(@@ ?$)//g'`.
pub fn join_line(line: &str) -> String {
    let mut joined = line.replace("@@ ", "");
    // An `@@` at the end is removed only if the line already ended with it before joining: "a@@@@ " becomes "a@@",
    // whose `@@` is text.
    if line.ends_with(CONTINUED) {
        joined.truncate(joined.len() - CONTINUED.len());
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected values were printed by GNU sed with the expression above.
    #[test]
    fn joins_as_sed_does() {
        for (line, joined) in [
            ("viel@@ er b\u{fc}@@ sche .", "vieler b\u{fc}sche ."),
            ("an end@@", "an end"),
            ("an end@@ ", "an end"),
            ("@@", ""),
            ("@@ @@", ""),
            ("a@@@@ ", "a@@"),
            ("a@@@@", "a@@"),
            ("@@@ b", "@b"),
            ("a @@b", "a @@b"),
            ("", ""),
        ] {
            assert_eq!(join_line(line), joined, "{line:?}");
        }
    }

    #[test]
    fn split_text_passes_and_joins_again() {
        let pieces = Segmenter::Split.segment(" viel@@ er\tb\u{fc}@@ sche  . ");
        assert_eq!(pieces, ["viel@@", "er", "b\u{fc}@@", "sche", "."]);
        assert_eq!(join(&pieces), "vieler b\u{fc}sche .");
    }

    #[test]
    fn merging_and_joining_are_inverse() {
        let line = "ein kleines m\u{e4}dchen klettert in ein spielhaus";
        let segmenter = Segmenter::Bpe(Bpe::learn([line], 5, &mut || Ok(())).unwrap());
        let pieces = segmenter.segment(line);
        assert!(pieces.len() > line.split(' ').count());
        assert_eq!(join(&pieces), line);
    }
}
