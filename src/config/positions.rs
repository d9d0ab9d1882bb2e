//! Checks of the position options and of sentence lengths.

use super::{AttentionName, Positions, TransformerConfig};
use crate::error::{Error, Result};
use crate::options::at_least_one;

/// The maximum number of tokens that a model can read at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Longest {
    pub tokens: i64,
    /// The reason for the limit, as the beginning of a sentence that ends with the number.
    pub why: &'static str,
}

impl TransformerConfig {
    /// Returns the maximum length of a sentence that the model can read or produce, including EOS or BOS; `None` if
    /// there is no limit.
    pub fn longest(&self) -> Option<Longest> {
        let (tokens, why) = match (self.attention, self.positions) {
            (AttentionName::Tensorized, _) => {
                (self.tensorized_segment, "the model's tensorized attention reads at most tensorized_segment")
            }
            (_, Positions::Learned) => (self.max_positions, "the model's learned positions are max_positions"),
            _ => return None,
        };
        Some(Longest { tokens, why })
    }

    /// Errors if a sentence is longer than the model can read; `lengths` are numbers of tokens.
    pub fn check_lengths(&self, lengths: &[i64]) -> Result<()> {
        let Some(Longest { tokens: most, why }) = self.longest() else { return Ok(()) };
        match lengths.iter().find(|len| **len > most) {
            Some(len) => Err(Error::invalid(format!(
                "{len} tokens in a row, and {why} = {most}: cut the text shorter (segment_length), or make that larger"
            ))),
            None => Ok(()),
        }
    }
}

/// Errors if a position option would do nothing, or if the attention cannot have these positions.
pub(super) fn check(config: &TransformerConfig) -> Result<()> {
    at_least_one("max_positions", config.max_positions)?;
    if !(config.rope_theta > 0.0 && config.rope_theta.is_finite()) {
        return Err(Error::invalid(format!("rope_theta must be greater than 0, got {}", config.rope_theta)));
    }
    let (default, positions) = (TransformerConfig::default(), config.positions);
    // Returns the error for an option that only the positions `owner` read.
    let unused = |option: &str, value: String, owner: Positions| {
        Err(Error::invalid(format!(
            "{option} = {value} would do nothing, as positions are {:?}: leave it out, or take positions {:?}",
            positions.name(),
            owner.name()
        )))
    };
    if config.max_positions != default.max_positions && positions != Positions::Learned {
        return unused("max_positions", config.max_positions.to_string(), Positions::Learned);
    }
    if config.rope_theta != default.rope_theta && positions != Positions::Rotary {
        return unused("rope_theta", config.rope_theta.to_string(), Positions::Rotary);
    }
    if positions == Positions::Rotary && config.attention == AttentionName::Tensorized {
        return Err(Error::invalid(
            "rotary positions turn the queries and keys of heads, and tensorized attention has no heads: choose other positions",
        ));
    }
    Ok(())
}

/// Errors if d_model is odd although sines and cosines each need half of a row, or if a head's width is odd although
/// rotary positions turn pairs of its numbers.
pub(super) fn check_sizes(config: &TransformerConfig) -> Result<()> {
    let has_sinusoids = matches!(config.positions, Positions::Twt | Positions::Fairseq);
    if config.d_model % 2 != 0 && (has_sinusoids || config.attention == AttentionName::Tensorized) {
        return Err(Error::invalid(format!(
            "d_model must be even (sine and cosine take half each), got {}",
            config.d_model
        )));
    }
    if config.positions == Positions::Rotary && config.d_model / config.heads % 2 != 0 {
        return Err(Error::invalid(format!(
            "rotary positions turn pairs of a head's numbers, and d_model/heads = {}/{} = {} is odd: choose other heads",
            config.d_model,
            config.heads,
            config.d_model / config.heads
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::config::{from_json, TransformerConfig};

    fn read(options: &str) -> crate::error::Result<TransformerConfig> {
        from_json("model", &format!(r#"{{"vocab_size": 10, {options}}}"#))
    }

    #[test]
    fn positions_and_heads_have_their_own_options() {
        let tensorized = r#""architecture": "decoder-only", "attention": "tensorized""#;
        for (options, part) in [
            (r#""rope_theta": 5"#.into(), r#"rope_theta = 5 would do nothing, as positions are "twt""#),
            (r#""positions": "rotary", "rope_theta": 0"#.into(), "rope_theta must be greater than 0"),
            (r#""positions": "rotary", "max_positions": 7"#.into(), r#"take positions "learned""#),
            (r#""positions": "learned", "max_positions": 0"#.into(), "max_positions must be at least 1"),
            (r#""positions": "rotary", "d_model": 12, "heads": 4"#.into(), "d_model/heads = 12/4 = 3 is odd"),
            (r#""d_model": 9, "heads": 3"#.into(), "d_model must be even"),
            (r#""heads": 4, "kv_heads": 3"#.into(), "kv_heads must divide heads = 4, got 3; it may be 1, 2, 4"),
            (format!(r#"{tensorized}, "positions": "rotary""#), "tensorized attention has no heads"),
            (format!(r#"{tensorized}, "kv_heads": 2"#), "kv_heads = 2 would do nothing"),
        ] {
            let said = read(&options).unwrap().validate().unwrap_err().to_string();
            assert!(said.contains(part), "{options}: {said}");
        }
        read(r#""positions": "none", "d_model": 9, "heads": 3"#).unwrap().validate().unwrap();
        let said = read(r#""activation": "swigul""#).unwrap_err().to_string();
        assert!(said.contains("did you mean \"swiglu\""), "{said}");
    }

    #[test]
    fn learned_positions_end() {
        let config =
            TransformerConfig { positions: crate::config::Positions::Learned, max_positions: 3, ..Default::default() };
        config.check_lengths(&[1, 3]).unwrap();
        let said = config.check_lengths(&[2, 4]).unwrap_err().to_string();
        assert!(
            said.starts_with("4 tokens in a row, and the model's learned positions are max_positions = 3"),
            "{said}"
        );
    }
}
