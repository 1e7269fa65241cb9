//! JSON as Python's `json.dumps(value, ensure_ascii=False)` writes it: a space after `,` and `:`.

use std::io::{Result, Write};

use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// Writes `value`; with `indent`, over several lines.
pub(crate) fn to_python_json(value: &impl Serialize, indent: Option<usize>) -> serde_json::Result<String> {
    let mut out = Vec::new();
    match indent {
        Some(width) => {
            let spaces = " ".repeat(width.min(16));
            let formatter = PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut Serializer::with_formatter(&mut out, formatter))?;
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut out, OneLine))?,
    }
    Ok(String::from_utf8_lossy(&out).into_owned())
}

struct OneLine;

impl Formatter for OneLine {
    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> Result<()> {
        writer.write_all(b": ")
    }
}
