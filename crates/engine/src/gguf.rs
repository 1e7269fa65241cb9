//! The key/value part of GGUF files, for those who read what the engine has no use for: tokenizers and
//! chat templates.

use std::{collections::HashMap, path::Path};

pub use crate::weights::gguf::Texts;
use crate::{
    error::LoadError,
    weights::gguf::{Gguf, Keep, Value},
};

/// Keys and values of a GGUF file, vocabulary included.
#[derive(Debug, Default)]
pub struct Metadata(HashMap<String, Value>);

/// A value that is not of the kind it should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("GGUF key {key} is {got}, expected {expected}")]
pub struct WrongType {
    /// Its name.
    pub key: String,
    /// Kind, in words.
    pub expected: &'static str,
    /// The value, shortened.
    pub got: String,
}

impl Metadata {
    /// Reads the metadata of a file whose list of tensors is sound, too.
    ///
    /// # Errors
    /// Files that cannot be read or are no sound GGUF files.
    pub fn read(path: &Path) -> Result<Self, LoadError> {
        Gguf::read(path, Keep::Vocabulary).map(|gguf| Metadata(gguf.metadata))
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, WrongType> {
        let Some(value) = self.0.get(key) else { return Ok(None) };
        let wrong = || WrongType { key: key.to_owned(), expected, got: value.to_string() };
        read(value).map(Some).ok_or_else(wrong)
    }

    /// A text.
    ///
    /// # Errors
    /// When the value is something else.
    pub fn text(&self, key: &str) -> Result<Option<&str>, WrongType> {
        self.typed(key, "a text", |value| match value {
            Value::String(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// True or false.
    ///
    /// # Errors
    /// When the value is something else.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, WrongType> {
        self.typed(key, "true or false", |value| match value {
            Value::Bool(flag) => Some(*flag),
            _ => None,
        })
    }

    /// A token id.
    ///
    /// # Errors
    /// When the value is something else.
    pub fn token_id(&self, key: &str) -> Result<Option<u32>, WrongType> {
        self.typed(key, "a token id", |value| match value {
            Value::Int(id) => u32::try_from(*id).ok(),
            _ => None,
        })
    }

    /// A list of texts.
    ///
    /// # Errors
    /// When the value is something else.
    pub fn texts(&self, key: &str) -> Result<Option<&Texts>, WrongType> {
        self.typed(key, "a list of texts", |value| match value {
            Value::Texts(texts) => Some(texts),
            _ => None,
        })
    }

    /// A list of numbers.
    ///
    /// # Errors
    /// When the value is something else.
    pub fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>, WrongType> {
        let number = |value: &Value| match value {
            Value::Int(number) => Some(*number as f64),
            Value::Float(number) => Some(*number),
            _ => None,
        };
        self.typed(key, "a list of numbers", |value| match value {
            Value::Numbers(numbers) => Some(numbers.clone()),
            Value::Array(values) => values.iter().map(number).collect(),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn push_text(out: &mut Vec<u8>, text: &[u8]) {
        out.extend((text.len() as u64).to_le_bytes());
        out.extend(text);
    }

    /// A file with one array of `values`, each of type `kind`.
    fn file_with_array(kind: u32, values: &[Vec<u8>]) -> std::path::PathBuf {
        let mut out = b"GGUF\x03\0\0\0".to_vec();
        out.extend([0u64, 1].map(u64::to_le_bytes).concat());
        push_text(&mut out, b"list");
        out.extend([9u32, kind].map(u32::to_le_bytes).concat());
        out.extend((values.len() as u64).to_le_bytes());
        out.extend(values.concat());
        let path = std::env::temp_dir().join(format!(
            "turboquant-metadata-{}-{kind}-{}.gguf",
            std::process::id(),
            values.len()
        ));
        std::fs::write(&path, out).unwrap();
        path
    }

    #[test]
    fn arrays_of_any_length_and_type_are_read() {
        type Encode = fn(i64) -> Vec<u8>;
        let kinds: [(u32, Encode); 10] = [
            (0, |n| (n as u8).to_le_bytes().to_vec()),
            (1, |n| (n as i8).to_le_bytes().to_vec()),
            (2, |n| (n as u16).to_le_bytes().to_vec()),
            (3, |n| (n as i16).to_le_bytes().to_vec()),
            (4, |n| (n as u32).to_le_bytes().to_vec()),
            (5, |n| (n as i32).to_le_bytes().to_vec()),
            (6, |n| (n as f32).to_le_bytes().to_vec()),
            (10, |n| (n as u64).to_le_bytes().to_vec()),
            (11, |n| n.to_le_bytes().to_vec()),
            (12, |n| (n as f64).to_le_bytes().to_vec()),
        ];
        for (kind, bytes) in kinds {
            for len in [0, 3, 5000] {
                let sign = if matches!(kind, 1 | 3 | 5 | 6 | 11 | 12) { -1 } else { 1 };
                let numbers: Vec<i64> = (0..len).map(|i| sign * (i % 100)).collect();
                let path = file_with_array(kind, &numbers.iter().map(|n| bytes(*n)).collect::<Vec<_>>());
                let read = Metadata::read(&path).unwrap().numbers("list").unwrap().unwrap();
                assert_eq!(read, numbers.iter().map(|n| *n as f64).collect::<Vec<_>>(), "{kind} {len}");
                std::fs::remove_file(path).unwrap();
            }
        }
    }

    #[test]
    fn texts_are_kept_one_behind_the_other() {
        let texts = ["", "a", "é€", "", "<s>"];
        let bytes: Vec<Vec<u8>> = texts
            .iter()
            .map(|text| {
                let mut out = Vec::new();
                push_text(&mut out, text.as_bytes());
                out
            })
            .collect();
        let path = file_with_array(8, &bytes);
        let metadata = Metadata::read(&path).unwrap();
        let read = metadata.texts("list").unwrap().unwrap();
        assert_eq!(read.iter().collect::<Vec<_>>(), texts);
        assert_eq!((0..5).map(|i| read.get(i).unwrap()).collect::<Vec<_>>(), texts);
        assert_eq!((read.len(), read.get(5)), (5, None));
        assert_eq!(*read, texts.into_iter().collect::<Texts>());
        assert_eq!(metadata.texts("other"), Ok(None));
        let error = metadata.numbers("list").unwrap_err().to_string();
        assert_eq!(error, "GGUF key list is a list of 5 texts, expected a list of numbers");
        std::fs::remove_file(path).unwrap();
    }
}
