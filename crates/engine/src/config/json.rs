//! JSON as published configs hold it: with bare `Infinity`, `-Infinity` and `NaN`.

use serde_json::Value;

use super::ConfigError;

/// Config files are some kilobytes; what is larger is something else.
pub(super) const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Parses a model's JSON file. A bare `Infinity`, `-Infinity` or `NaN`, which Python writes, becomes the
/// string of that name, so that a field that holds one is refused where a number is needed, and does no
/// harm elsewhere.
///
/// # Errors
/// Text that is no JSON, or more than 16 MiB of it.
pub fn parse(text: &str) -> Result<Value, ConfigError> {
    if text.len() as u64 > MAX_CONFIG_BYTES {
        return Err(ConfigError::TooLarge { got: text.len() as u64, limit: MAX_CONFIG_BYTES });
    }
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    serde_json::from_str(&quote_non_finite(text)).map_err(|error| ConfigError::Json(error.to_string()))
}

fn quote_non_finite(text: &str) -> String {
    const WORDS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];
    let mut out = String::with_capacity(text.len() + 16);
    let mut rest = text;
    loop {
        let Some(at) = rest.find(['"', '-', 'I', 'N']) else {
            out.push_str(rest);
            return out;
        };
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        if rest.starts_with('"') {
            let end = string_end(rest);
            out.push_str(&rest[..end]);
            rest = &rest[end..];
        } else if let Some(word) = WORDS.into_iter().find(|word| rest.starts_with(word)) {
            out.push('"');
            out.push_str(word);
            out.push('"');
            rest = &rest[word.len()..];
        } else {
            out.push_str(&rest[..1]);
            rest = &rest[1..];
        }
    }
}

/// Length of the string literal that `text` starts with, quotes included.
fn string_end(text: &str) -> usize {
    let mut escaped = false;
    for (index, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return index + 1,
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn non_finite_numbers_become_strings_and_strings_stay() {
        let text =
            r#"{"a": [0.0, Infinity, -Infinity, NaN, -1], "b": "Infinity \" NaN", "NaN": {"Infinity":NaN}}"#;
        let value = parse(text).unwrap();
        assert_eq!(value["a"], serde_json::json!([0.0, "Infinity", "-Infinity", "NaN", -1]));
        assert_eq!(value["b"], "Infinity \" NaN");
        assert_eq!(value["NaN"]["Infinity"], "NaN");
    }

    #[test]
    fn what_is_no_json_is_refused_with_its_place() {
        for text in ["", "{", "{\"a\": Infinit}", "\"open", "{\"a\": 1,}", "\\", "NaNN", "-"] {
            assert!(matches!(parse(text), Err(ConfigError::Json(_))), "{text}");
        }
        assert!(parse("{\"a\"\n:}").unwrap_err().to_string().contains("line 2"));
        let deep = "[".repeat(100_000);
        assert!(matches!(parse(&deep), Err(ConfigError::Json(_))));
    }
}
