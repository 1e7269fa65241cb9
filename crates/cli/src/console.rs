//! Words to the user beside the answer.

use std::{fmt::Display, io::Write};

/// Writes a line to stderr. Where nobody reads it, nothing is lost (`eprintln!` would panic).
pub(crate) fn say(text: impl Display) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Writes to stderr without ending the line.
pub(crate) fn prompt(text: &str) {
    let mut stderr = std::io::stderr();
    let _ = write!(stderr, "{text}").and_then(|()| stderr.flush());
}
