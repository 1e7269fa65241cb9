//! Reading fields of a config: every refusal names the field's path, every default leaves a notice.

use std::cell::RefCell;

use serde_json::{Map, Value};

use super::ConfigError;

/// Most layers that a config may have.
pub(super) const MAX_LAYERS: usize = 4096;
/// Most heads, groups or repetitions.
pub(super) const MAX_COUNT: usize = 1 << 16;
/// Widest vector.
pub(super) const MAX_WIDTH: usize = 1 << 20;
/// Longest sequence.
pub(super) const MAX_LEN: usize = 1 << 31;

/// One object of the config.
#[derive(Clone)]
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    prefix: String,
    notices: &'a RefCell<Vec<String>>,
}

impl<'a> Fields<'a> {
    pub(super) fn root(map: &'a Map<String, Value>, notices: &'a RefCell<Vec<String>>) -> Self {
        Fields { map, prefix: String::new(), notices }
    }

    pub(super) fn path(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    pub(super) fn notice(&self, notice: String) {
        self.notices.borrow_mut().push(notice);
    }

    /// The value; null counts as absent.
    pub(super) fn value(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Whether the key stands there, null or not.
    pub(super) fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    pub(super) fn object(&self, key: &str) -> Result<Option<Fields<'a>>, ConfigError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Object(map)) => {
                Ok(Some(Fields { map, prefix: format!("{}{key}.", self.prefix), notices: self.notices }))
            }
            Some(other) => Err(wrong_type(self.path(key), "an object", other)),
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong_type(self.path(key), "a string", other)),
        }
    }

    pub(super) fn flag(&self, key: &str, default: bool) -> Result<bool, ConfigError> {
        match self.value(key) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(wrong_type(self.path(key), "true or false", other)),
        }
    }

    /// A finite number.
    pub(super) fn number(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        match self.value(key) {
            None => Ok(None),
            Some(value) => match value.as_f64() {
                Some(number) if number.is_finite() => Ok(Some(number)),
                _ => Err(wrong_type(self.path(key), "a finite number", value)),
            },
        }
    }

    /// An integer from `min` to `max`.
    pub(super) fn integer(&self, key: &str, min: usize, max: usize) -> Result<Option<usize>, ConfigError> {
        self.value(key).map(|value| integer(|| self.path(key), value, min, max)).transpose()
    }

    /// A positive count of heads and the like.
    pub(super) fn count(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        self.integer(key, 1, MAX_COUNT)
    }

    /// A positive width.
    pub(super) fn width(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        self.integer(key, 1, MAX_WIDTH)
    }

    pub(super) fn required_count(&self, key: &str) -> Result<usize, ConfigError> {
        self.count(key)?.ok_or_else(|| self.missing(key))
    }

    pub(super) fn required_width(&self, key: &str) -> Result<usize, ConfigError> {
        self.width(key)?.ok_or_else(|| self.missing(key))
    }

    /// A width under the first of several names that stands there.
    pub(super) fn any_width(&self, keys: &[&str]) -> Result<Option<usize>, ConfigError> {
        for key in keys {
            if let Some(width) = self.width(key)? {
                return Ok(Some(width));
            }
        }
        Ok(None)
    }

    /// As [`Fields::any_width`], with the class's default, which leaves a notice.
    pub(super) fn width_or(&self, keys: &[&str], default: usize) -> Result<usize, ConfigError> {
        Ok(match self.any_width(keys)? {
            Some(width) => width,
            None => self.default(keys[0], default),
        })
    }

    /// Notes that the class's default of a missing field is taken.
    pub(super) fn default<T: std::fmt::Display>(&self, key: &str, default: T) -> T {
        self.notice(format!("{} is missing: {default}, the default of its class, is taken", self.path(key)));
        default
    }

    pub(super) fn list(&self, key: &str) -> Result<Option<&'a [Value]>, ConfigError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(other) => Err(wrong_type(self.path(key), "a list", other)),
        }
    }

    /// A list of integers from `min` to `max`.
    pub(super) fn integers(
        &self,
        key: &str,
        min: usize,
        max: usize,
    ) -> Result<Option<Vec<usize>>, ConfigError> {
        let Some(list) = self.list(key)? else { return Ok(None) };
        let at = |index: usize| move || format!("{}[{index}]", self.path(key));
        let items = list.iter().enumerate().map(|(index, value)| integer(at(index), value, min, max));
        items.collect::<Result<_, _>>().map(Some)
    }

    /// A list of strings.
    pub(super) fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, ConfigError> {
        let Some(list) = self.list(key)? else { return Ok(None) };
        let items = list.iter().enumerate().map(|(index, value)| {
            value
                .as_str()
                .ok_or_else(|| wrong_type(format!("{}[{index}]", self.path(key)), "a string", value))
        });
        items.collect::<Result<_, _>>().map(Some)
    }

    pub(super) fn missing(&self, key: &str) -> ConfigError {
        ConfigError::Missing { path: self.path(key), decides: "how many bytes the cache takes" }
    }

    pub(super) fn inconsistent(&self, key: &str, problem: String) -> ConfigError {
        ConfigError::Inconsistent { path: self.path(key), problem }
    }
}

/// An integer; `2.0` is one.
fn integer(path: impl Fn() -> String, value: &Value, min: usize, max: usize) -> Result<usize, ConfigError> {
    let Some(number) = value.as_f64() else { return Err(wrong_type(path(), "an integer", value)) };
    let exact = value.as_u64().or_else(|| {
        // Exact below 2^53; above, the range check refuses.
        (number.fract() == 0.0 && (0.0..9e15).contains(&number)).then_some(number as u64)
    });
    match exact {
        Some(exact) if (min as u64..=max as u64).contains(&exact) => Ok(exact as usize),
        None if number.fract() != 0.0 => Err(wrong_type(path(), "an integer", value)),
        _ => Err(ConfigError::OutOfRange {
            path: path(),
            got: short(value),
            expected: format!("an integer from {min} to {max}"),
        }),
    }
}

fn wrong_type(path: String, expected: &str, got: &Value) -> ConfigError {
    ConfigError::WrongType { path, expected: expected.to_owned(), got: short(got) }
}

/// A value in few characters, for a message.
pub(super) fn short(value: &Value) -> String {
    match value {
        Value::Array(list) => format!("a list of {}", list.len()),
        Value::Object(map) => format!("an object of {} fields", map.len()),
        other => {
            let text = other.to_string();
            if text.chars().count() <= 40 {
                text
            } else {
                text.chars().take(37).chain("...".chars()).collect()
            }
        }
    }
}
