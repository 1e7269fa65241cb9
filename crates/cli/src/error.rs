//! Errors of the command line: which exit code, and one sentence on stderr.

use std::{fmt, io};

use turboquant_engine::{error::LoadError, inspect::InspectError};

/// The command was called wrongly: exit code 2.
#[derive(Debug)]
pub(crate) struct WrongUse(String);

impl fmt::Display for WrongUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongUse {}

/// An error for a wrong argument; `message` says what is wrong and what would be right.
pub(crate) fn wrong_use(message: impl Into<String>) -> anyhow::Error {
    WrongUse(message.into()).into()
}

/// An error of a model's files: what is whole and yet not for this program was the wrong thing to ask
/// for; what is damaged or missing is a failure.
pub(crate) fn refused(error: LoadError) -> anyhow::Error {
    match &error {
        LoadError::NotAModel { .. } | LoadError::Config { .. } | LoadError::Architecture { .. } => {
            wrong_use(error.to_string())
        }
        LoadError::Geometry { source, .. } if !source.is_damage() => wrong_use(error.to_string()),
        _ => error.into(),
    }
}

/// As [`refused`], of files that are looked at without being loaded.
pub(crate) fn refused_facts(error: InspectError) -> anyhow::Error {
    match error {
        InspectError::Weights(error) => refused(error),
        InspectError::Config { ref source, .. } if !source.is_damage() => wrong_use(error.to_string()),
        InspectError::Config { .. } => error.into(),
    }
}

/// The error and its causes, each said once: some errors have their cause in their own words.
pub(crate) fn sentence(error: &anyhow::Error) -> String {
    let mut sentence = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if sentence.is_empty() {
            sentence = cause;
        } else if !sentence.contains(&cause) {
            sentence = format!("{sentence}: {cause}");
        }
    }
    sentence
}

/// Exit code of a failed command: 2 for wrong use, 1 for failure. A reader that went away
/// (`turboquant ... | head`) is no failure.
pub(crate) fn exit_code(error: &anyhow::Error) -> u8 {
    if is_broken_pipe(error) {
        0
    } else if error.is::<WrongUse>() {
        2
    } else {
        1
    }
}

/// Whether the reader of our output has gone away.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn a_cause_is_said_once() {
        let error = anyhow!("it is no text").context("cannot read x: it is no text").context("no model");
        assert_eq!(sentence(&error), "no model: cannot read x: it is no text");
        assert_eq!(sentence(&anyhow!("b").context("a")), "a: b");
    }
}
