//! Tokenisation for BLEU by sacreBLEU's rules.

use std::borrow::Cow;

use crate::choice;
use crate::data::text::is_space;

choice! {
    /// A tokeniser of sacreBLEU, under sacreBLEU's name.
    pub enum Tokenize ("evaluation_tokenize") {
        /// Words are separated only by white space.
        None = "none",
        /// mteval-v13a's rules for European languages.
        Mteval13a = "13a",
        /// Each Chinese character is a word; the rest follows mteval-v13a.
        Chinese = "zh",
        /// Each character is a word.
        Characters = "char",
    }
}

impl Tokenize {
    /// Returns the line with white space between its words.
    pub fn apply(self, line: &str) -> Cow<'_, str> {
        match self {
            Tokenize::None => line.into(),
            Tokenize::Mteval13a => {
                let line = line.replace("<skipped>", "").replace("-\n", "").replace('\n', " ");
                let line = line.replace("&quot;", "\"").replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">");
                // Rules look at pairs of characters. Spaces at the ends let them apply to the first and last one, too.
                split_punctuation(&format!(" {line} ")).into()
            }
            Tokenize::Chinese => split_punctuation(&set_apart(line.trim_matches(is_space), is_chinese)).into(),
            Tokenize::Characters => set_apart(line, |_| true).into(),
        }
    }
}

/// Puts spaces around the characters for which `is_word` is true, so that each becomes a word.
fn set_apart(line: &str, is_word: impl Fn(char) -> bool) -> String {
    let mut spaced = String::with_capacity(line.len() + 2);
    for c in line.chars() {
        match is_word(c) {
            true => spaced.extend([' ', c, ' ']),
            false => spaced.push(c),
        }
    }
    spaced
}

/// Applies mteval-v13a's rules: symbols become words, and so do periods and commas outside numbers, and a dash after a
/// digit.
fn split_punctuation(line: &str) -> String {
    // The range of characters in mteval-v13a's rule for symbols includes the space.
    let is_symbol = |c: char| c.is_ascii_punctuation() && !matches!(c, '\'' | ',' | '-' | '.') || c == ' ';
    let is_point = |c: char| matches!(c, '.' | ',');
    let line = set_apart(line, is_symbol);
    // The rules are applied in this order: a point (or comma) that follows no digit, one before no digit, and a dash
    // after a digit.
    let line = replace_pairs(&line, |a, b| (!a.is_ascii_digit() && is_point(b)).then_some([a, ' ', b, ' ']));
    let line = replace_pairs(&line, |a, b| (is_point(a) && !b.is_ascii_digit()).then_some([' ', a, ' ', b]));
    replace_pairs(&line, |a, b| (a.is_ascii_digit() && b == '-').then_some([a, ' ', b, ' ']))
}

/// Replaces pairs of neighbouring characters from left to right, as a regular expression of two characters does: the
/// next pair begins after a replaced one. If `replace` returns `None`, the pair stays.
fn replace_pairs(line: &str, replace: impl Fn(char, char) -> Option<[char; 4]>) -> String {
    let mut replaced = String::with_capacity(2 * line.len());
    let mut rest = line.chars().peekable();
    while let Some(c) = rest.next() {
        match rest.peek().and_then(|&next| replace(c, next)) {
            Some(replacement) => {
                replaced.extend(replacement);
                rest.next(); // the pair's second character has been replaced, too
            }
            None => replaced.push(c),
        }
    }
    replaced
}

/// True for the characters that sacreBLEU treats as Chinese. Its range U+20000 to U+2A6D6 is written with 4-digit
/// escapes and compared as strings, so in effect it covers U+2001 to U+2A6D.
fn is_chinese(c: char) -> bool {
    matches!(c,
        '\u{2001}'..='\u{2a6d}' | '\u{2e80}'..='\u{2fdf}' | '\u{2ff0}'..='\u{303f}' | '\u{3100}'..='\u{312f}'
        | '\u{31a0}'..='\u{31bf}' | '\u{31c0}'..='\u{31ef}' | '\u{3200}'..='\u{4db5}' | '\u{4e00}'..='\u{9fbb}'
        | '\u{f900}'..='\u{fa2d}' | '\u{fa30}'..='\u{fa6a}' | '\u{fa70}'..='\u{fad9}' | '\u{fe10}'..='\u{fe1f}'
        | '\u{fe30}'..='\u{fe4f}' | '\u{ff00}'..='\u{ffef}')
}

/// True if a text has no spaces between its words: more than half of its letters belong to words that are too long for
/// their script.
pub fn lacks_spaces<'a>(words: impl IntoIterator<Item = &'a str>) -> bool {
    // `long_letters` counts letters of words that are too long, `all_letters` those of all words.
    let (mut long_letters, mut all_letters) = (0, 0);
    for word in words {
        // One limit for each letter whose script has no spaces between words.
        let limits: Vec<usize> = word.chars().filter_map(longest_word).collect();
        all_letters += word.chars().filter(|c| c.is_alphabetic()).count();
        // A word with more such letters than the script of the first one allows must be several words.
        if limits.first().is_some_and(|limit| limits.len() > *limit) {
            long_letters += limits.len();
        }
    }
    2 * long_letters > all_letters
}

/// Returns a length that few words of c's script exceed; `None` if that script has spaces between words.
fn longest_word(c: char) -> Option<usize> {
    match c {
        // Kana and Chinese characters.
        '\u{3040}'..='\u{30ff}' | '\u{3400}'..='\u{9fff}' | '\u{f900}'..='\u{faff}' | '\u{20000}'..='\u{3ffff}' => {
            Some(4)
        }
        // Thai, Lao, Tibetan, Myanmar and Khmer.
        '\u{e00}'..='\u{109f}' | '\u{1780}'..='\u{17ff}' => Some(12),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the line's words with one space between them.
    fn words(tokenize: Tokenize, line: &str) -> String {
        tokenize.apply(line).split(is_space).filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
    }

    /// The values are from sacreBLEU 2.6; tests/cli/test_scores.py compares random lines.
    #[test]
    fn words_are_those_of_sacrebleu() {
        let line = " 1,000.5 Men-at-arms, 5-6 &quot;x&quot; don't. ";
        assert_eq!(words(Tokenize::None, line), "1,000.5 Men-at-arms, 5-6 &quot;x&quot; don't.");
        assert_eq!(words(Tokenize::Mteval13a, line), "1,000.5 Men-at-arms , 5 - 6 \" x \" don't .");
        let line = "我有1,000元。AI\u{3000}x-y.";
        assert_eq!(words(Tokenize::Chinese, line), "我 有 1,000 元 。 AI x-y .");
        assert_eq!(words(Tokenize::Characters, line), "我 有 1 , 0 0 0 元 。 A I x - y .");
    }

    #[test]
    fn text_without_spaces_is_recognised_by_long_words() {
        let lacks = |text: &str| lacks_spaces(text.split(' '));
        assert!(lacks("他们在公园里踢足球。 两个孩子在玩"));
        assert!(lacks("เด็กสองคนกำลังเล่นฟุตบอลในสวน"));
        assert!(!lacks("他们 在 公园 里 踢 足球 。"));
        assert!(!lacks("เด็ก สอง คน กำลัง เล่น ฟุตบอล ใน สวน"));
        assert!(!lacks("Donaudampfschifffahrtsgesellschaft und 中华人民共和国"));
        assert!(!lacks(""));
    }
}
