//! Overlapping windows over a stream of tokens. Each token is scored in exactly one window.

use super::vocabulary::EOS;

/// A row of tokens whose last `scored` tokens are scored. The others are context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Window {
    /// The token before the window, which is not predicted, then the tokens to predict, as in a segment of
    /// [`stream`](super::corpus::stream).
    pub row: Vec<u32>,
    /// The number of tokens at the end of the row that this window scores.
    pub scored: usize,
}

/// Returns windows that predict `length` tokens each; the last window may be shorter. Each begins `stride` (1 to
/// `length`) tokens after the window before.
///
/// A window scores the tokens that no earlier window has scored. So each token is scored exactly once, with at least
/// `length` − `stride` tokens of context, or with all of the text before the token. The text is preceded by EOS. If
/// `stride` = `length`, the windows are the segments of [`stream`](super::corpus::stream).
pub fn windows(tokens: &[u32], length: usize, stride: usize) -> Vec<Window> {
    let mut cut = Vec::with_capacity(tokens.len().div_ceil(stride.max(1)));
    let mut scored_before = 0;
    for begin in (0..tokens.len()).step_by(stride.max(1)) {
        let end = tokens.len().min(begin + length);
        let before = begin.checked_sub(1).map_or(EOS, |previous| tokens[previous]);
        cut.push(Window { row: [&[before], &tokens[begin..end]].concat(), scored: end - scored_before });
        scored_before = end;
        // Every token has been scored, so the windows that would follow score none.
        if end == tokens.len() {
            break;
        }
    }
    cut
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::corpus::stream;

    #[test]
    fn each_token_is_scored_once_with_enough_context() {
        for count in 0..40u32 {
            let tokens: Vec<u32> = (10..10 + count).collect();
            for (length, stride) in [(1, 1), (2, 1), (5, 2), (8, 8), (8, 3), (8, 1), (50, 7)] {
                let found = windows(&tokens, length, stride);
                let scored: Vec<u32> =
                    found.iter().flat_map(|w| w.row[w.row.len() - w.scored..].iter().copied()).collect();
                assert_eq!(scored, tokens, "{count} {length} {stride}");
                for (number, window) in found.iter().enumerate() {
                    let predicted = window.row.len() - 1;
                    assert!(predicted <= length && window.scored >= 1);
                    assert!(number == 0 || predicted - window.scored >= length - stride);
                }
            }
        }
    }

    #[test]
    fn windows_that_do_not_overlap_are_segments() {
        let tokens: Vec<u32> = (4..27).collect();
        let rows: Vec<Vec<u32>> = windows(&tokens, 5, 5).into_iter().map(|window| window.row).collect();
        assert_eq!(rows, stream(&tokens, 5));
        assert_eq!(windows(&[7, 8, 9], 2, 1)[1], Window { row: vec![7, 8, 9], scored: 1 });
    }
}
