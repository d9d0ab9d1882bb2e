//! The crate's error type. Its messages are written for users.

mod raised;

pub use raised::Raised;
use std::path::Path;

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Wrong input or configuration. The message names the expected value, the given value, and the remedy.
    #[error("{0}")]
    Invalid(String),
    /// The operating system refused an operation on a file.
    #[error("{act} {path}: {source}")]
    Io {
        act: &'static str,
        path: String,
        #[source]
        source: std::io::Error,
    },
    /// An error of libtorch.
    #[error("{0}")]
    Torch(String),
    /// An exception of Python code that libtorch called, such as a user's norm, a hook, or a tensor subclass.
    #[error("{0}")]
    Raised(Raised),
    /// The request has no meaning, or is not implemented.
    #[error("{0}")]
    NotImplemented(String),
    /// The loss or the gradient stopped being finite; the message names the update and the last good checkpoint.
    #[error("{0}")]
    Diverged(String),
    /// The user asked to stop (Ctrl-C). Everything is saved, and the message says how to resume.
    #[error("{0}")]
    Interrupted(String),
}

impl Error {
    /// Returns the error of a wrong input or configuration.
    pub fn invalid(message: impl Into<String>) -> Self {
        Error::Invalid(message.into())
    }

    /// Converts the latest error of libtorch on this thread, with the text `text`. If a Python exception caused it, the
    /// result keeps that exception.
    pub fn of_torch(text: &str) -> Self {
        match Raised::take(text) {
            Some(raised) => Error::Raised(raised),
            None => Error::Torch(without_stack(text).to_string()),
        }
    }

    /// Returns the error of a failed operation on the file `path`; `act` is the operation as a verb, such as "open".
    pub fn io(act: &'static str, path: impl AsRef<Path>, source: std::io::Error) -> Self {
        Error::Io { act, path: path.as_ref().display().to_string(), source }
    }
}

/// Escapes control characters except line ends and tabs: text from a file must not move a terminal's cursor or set its
/// title.
pub fn printable(text: &str) -> String {
    let is_printable = |c: char| !c.is_control() || c == '\n' || c == '\t';
    let escaped = |c: char| if is_printable(c) { c.to_string() } else { c.escape_default().to_string() };
    text.chars().map(escaped).collect()
}

/// Quotes a word for a shell, if needed, for commands in messages.
pub fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "@%_+=:,./-".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.into(),
        false => format!("'{}'", word.replace('\'', "'\"'\"'")),
    }
}

/// Returns libtorch's message without the C++ stack trace that it appends.
pub fn without_stack(text: &str) -> &str {
    // The trace begins with one of these texts; without either, the whole message is returned.
    let starts = ["\nException raised from", "\nframe #0:"].iter().filter_map(|first_words| text.find(first_words));
    text[..starts.min().unwrap_or(text.len())].trim_end()
}

impl From<tch::TchError> for Error {
    fn from(e: tch::TchError) -> Self {
        match e {
            tch::TchError::Torch(text) => Error::of_torch(&text),
            other => Error::Torch(without_stack(&other.to_string()).to_string()),
        }
    }
}

/// Builds the error of a word `got` that is none of `choices`: `unknown norm "scalnorm" (did you mean "scalenorm"?);
/// expected one of layernorm, …`.
pub fn unknown<'a>(what: &str, got: &str, choices: impl IntoIterator<Item = &'a str>) -> Error {
    let choices: Vec<&str> = choices.into_iter().collect();
    // The closest choice is suggested only if few letters differ.
    let closest =
        choices.iter().min_by_key(|c| distance(c, got)).filter(|c| distance(c, got) <= 1 + got.chars().count() / 4);
    let hint = closest.map_or(String::new(), |c| format!(" (did you mean {c:?}?)"));
    Error::Invalid(format!("unknown {what} {got:?}{hint}; expected one of {}", choices.join(", ")))
}

/// Returns the Levenshtein distance of a and b: the least number of inserted, deleted and replaced characters.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    // After i characters of a, row[j] is their distance from the first j characters of b.
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0]; // the old row[j], before it is overwritten
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let substitute = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = substitute.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(printable("a\u{1b}[31m\u{7}\u{9b}\r\n\tü€"), "a\\u{1b}[31m\\u{7}\\u{9b}\\r\n\tü€");
    }

    /// The expected results are those of Python's shlex.quote.
    #[test]
    fn words_of_commands_are_quoted() {
        let quoted = ["runs/a_1", "k 2", "it's", "$HOME", "", "\u{e4}"].map(quoted);
        assert_eq!(quoted, ["runs/a_1", "'k 2'", "'it'\"'\"'s'", "'$HOME'", "''", "'\u{e4}'"]);
    }

    #[test]
    fn an_unknown_name_lists_the_closest_and_the_choices() {
        let e = unknown("norm", "scalnorm", ["layernorm", "scalenorm"]).to_string();
        assert_eq!(e, "unknown norm \"scalnorm\" (did you mean \"scalenorm\"?); expected one of layernorm, scalenorm");
        assert!(!unknown("norm", "x", ["layernorm", "scalenorm"]).to_string().contains("mean"));
    }
}
