//! Options for the text generation of a language model.

use crate::error::{Error, Result};
use crate::options::{config, Field, FieldType};
use serde::{Deserialize, Serialize};

config! {
    /// Options for continuing a text with a language model (docs/spec.md §4.17).
    pub struct GenerationOptions {
        "generation" {
            /// Divide logits by this; smaller values are less random, and 0 always takes the most probable token.
            temperature: f64 = 1.0,
            /// Draw from the k most probable tokens (default: from all).
            top_k: Option<i64> = None,
            /// Draw from the fewest tokens that together have this probability (nucleus sampling); 1 draws from all.
            top_p: f64 = 1.0,
            /// Maximum number of generated tokens, ends of sentence included.
            max_length: i64 = 100,
            /// Stop after this many ends of sentence; 0 stops at max_length only.
            sentences: i64 = 1,
            /// Number of texts for each prompt.
            samples: i64 = 1,
            /// Maximum number of tokens that the model reads at a time (default: segment_length, as in training).
            context: Option<i64> = None,
            /// Seed of the draws. A text depends on the seed, the prompt and the sample's number, not on other prompts.
            seed: u64 = 1,
        }
    }
}

impl GenerationOptions {
    /// Errors if an option has a value that makes no sense.
    pub fn validate(&self) -> Result<()> {
        let refused = |message: String| Err(Error::invalid(message));
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return refused(format!(
                "temperature must be at least 0 (0: the most probable token), got {}",
                self.temperature
            ));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return refused(format!("top_p must lie in (0, 1] (1: all tokens), got {}", self.top_p));
        }
        // Each option, its value and the smallest value that makes sense.
        let counts = [("max_length", Some(self.max_length), 1), ("sentences", Some(self.sentences), 0)];
        let others = [("samples", Some(self.samples), 1), ("top_k", self.top_k, 1), ("context", self.context, 1)];
        for (name, value, least) in counts.into_iter().chain(others) {
            if let Some(value) = value.filter(|value| *value < least) {
                return refused(format!("{name} must be at least {least}, got {value}"));
            }
        }
        // These options matter only if tokens are drawn at random, and temperature 0 draws none.
        let narrowing = [("top_k", self.top_k.is_some()), ("top_p", self.top_p < 1.0), ("samples", self.samples > 1)];
        match narrowing.iter().find(|(_, is_given)| *is_given && self.temperature == 0.0) {
            Some((name, _)) => refused(format!(
                "temperature 0 takes the most probable token, so {name} would do nothing: leave it out, or raise the \
                 temperature"
            )),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::from_json;

    #[test]
    fn values_that_cannot_be_meant_are_refused() {
        for (options, part) in [
            (r#"{"temperature": -1}"#, "temperature must be at least 0"),
            (r#"{"top_p": 0}"#, "top_p must lie in (0, 1]"),
            (r#"{"top_p": 1.5}"#, "got 1.5"),
            (r#"{"top_k": 0}"#, "top_k must be at least 1, got 0"),
            (r#"{"max_length": 0}"#, "max_length must be at least 1"),
            (r#"{"sentences": -1}"#, "sentences must be at least 0"),
            (r#"{"samples": 0}"#, "samples must be at least 1"),
            (r#"{"context": 0}"#, "context must be at least 1"),
            (r#"{"temperature": 0, "top_k": 5}"#, "so top_k would do nothing"),
            (r#"{"temperature": 0, "top_p": 0.5}"#, "so top_p would do nothing"),
            (r#"{"temperature": 0, "samples": 2}"#, "so samples would do nothing"),
        ] {
            let e = from_json::<GenerationOptions>("generation", options).unwrap().validate().unwrap_err().to_string();
            assert!(e.contains(part), "{options}: {e}");
        }
        GenerationOptions::default().validate().unwrap();
    }
}
