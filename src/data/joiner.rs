//! Joins pieces into text one by one, as a model generates them.

use super::bpe::CONTINUED;

/// Joins pieces that arrive one by one. At any time, the texts returned so far add up to [`join`](super::join) of the
/// pieces so far.
#[derive(Debug, Clone)]
pub struct Joiner {
    /// True if a space must come before the next piece.
    spaced: bool,
}

impl Joiner {
    /// Starts after `text`, which the pieces continue. A space comes before the first piece, unless `text` is empty or
    /// ends in white space or `@@`.
    pub fn after(text: &str) -> Self {
        let last = text.chars().next_back();
        Joiner { spaced: last.is_some_and(|c| !c.is_whitespace()) && !text.ends_with(CONTINUED) }
    }

    /// Returns the text that this piece adds: the piece without `@@`, after a space if it begins a word.
    pub fn push(&mut self, piece: &str) -> String {
        let (text, is_word_over) = match piece.strip_suffix(CONTINUED) {
            Some(text) => (text, false),
            None => (piece, true),
        };
        let space = if self.spaced { " " } else { "" };
        self.spaced = is_word_over;
        format!("{space}{text}")
    }

    /// Ends a line: no space comes before the next piece, which begins a new line.
    pub fn end(&mut self) {
        self.spaced = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::join;

    #[test]
    fn texts_of_pieces_add_up_to_the_joined_line() {
        let lines =
            ["viel@@ er b\u{fc}@@ sche .", "an end@@", "@@ @@", "a@@@@ b", "@@@ b", "a @@ b", "a @@", "\u{e4}", ""];
        for line in lines {
            let pieces: Vec<&str> = line.split(' ').filter(|piece| !piece.is_empty()).collect();
            let mut joiner = Joiner::after("");
            let mut text = String::new();
            for end in 1..=pieces.len() {
                text += &joiner.push(pieces[end - 1]);
                assert_eq!(text, join(&pieces[..end]), "{line:?}");
            }
        }
    }

    #[test]
    fn pieces_continue_a_text() {
        let first = |text: &str| Joiner::after(text).push("or");
        assert_eq!([first("to be"), first("to be "), first("be\n"), first("vi@@")], [" or", "or", "or", "or"]);
        let mut joiner = Joiner::after("to");
        assert_eq!([joiner.push("b@@"), joiner.push("e")], [" b", "e"]);
        joiner.end();
        assert_eq!(joiner.push("or"), "or");
    }
}
