//! The length penalties and limits of the two search rules.

use crate::config::SearchRule;

impl SearchRule {
    /// Returns the default exponent α of this rule's length penalty.
    pub fn alpha(self) -> f64 {
        match self {
            SearchRule::Google => 0.6,
            SearchRule::Fairseq => 1.0,
        }
    }

    /// Returns the length penalty lp, ((5 + len)/6)^α (Wu et al. 2016, eq 14) or len^α. `length` counts EOS.
    pub fn penalty(self, length: usize, alpha: f64) -> f64 {
        match self {
            SearchRule::Google => ((5 + length) as f64 / 6.0).powf(alpha),
            SearchRule::Fairseq => (length as f64).powf(alpha),
        }
    }

    /// Returns the maximum number of generated tokens, EOS included. `max_length` counts EOS under google's rule, not
    /// under fairseq's.
    pub fn limit(self, source_length: usize, max_length: Option<usize>) -> usize {
        match self {
            SearchRule::Google => max_length.unwrap_or(source_length + 50),
            SearchRule::Fairseq => max_length.unwrap_or(200).saturating_add(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_and_penalties() {
        assert_eq!([None, Some(7)].map(|most| SearchRule::Google.limit(12, most)), [62, 7]);
        assert_eq!([None, Some(7)].map(|most| SearchRule::Fairseq.limit(12, most)), [201, 8]);
        assert_eq!(SearchRule::Fairseq.limit(0, Some(usize::MAX)), usize::MAX);
        assert_eq!([1, 7].map(|length| SearchRule::Google.penalty(length, 0.5)), [1.0, 2f64.sqrt()]);
        assert_eq!([1, 9].map(|length| SearchRule::Fairseq.penalty(length, 0.5)), [1.0, 3.0]);
    }
}
