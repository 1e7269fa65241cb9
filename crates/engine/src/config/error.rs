//! Why a `config.json` is refused.

/// A config that cannot be read. Paths are those of the file, such as
/// `text_config.num_key_value_heads`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read at all.
    #[error("cannot be read: {0}")]
    Io(String),
    /// Larger than any config.
    #[error("the config has {got} B; a config.json of more than {limit} B is not read")]
    TooLarge {
        /// Bytes.
        got: u64,
        /// Bytes.
        limit: u64,
    },
    /// Not JSON, even with `Infinity` and `NaN` allowed.
    #[error("the config is not JSON: {0}")]
    Json(String),
    /// A field of another kind.
    #[error("{path} must be {expected}, but is {got}")]
    WrongType {
        /// Field.
        path: String,
        /// Kind, in words.
        expected: String,
        /// What stands there, shortened.
        got: String,
    },
    /// A number outside what any model has.
    #[error("{path} is {got}; {expected} is needed")]
    OutOfRange {
        /// Field.
        path: String,
        /// The number.
        got: String,
        /// The range, in words.
        expected: String,
    },
    /// A field that decides bytes is absent or null and has no default.
    #[error("{path} is missing; it decides {decides}")]
    Missing {
        /// Field.
        path: String,
        /// What depends on it.
        decides: &'static str,
    },
    /// Two fields contradict each other, or one cannot be derived from the others.
    #[error("{path}: {problem}")]
    Inconsistent {
        /// Field.
        path: String,
        /// Which fields, and how.
        problem: String,
    },
    /// A word in a list of layers.
    #[error("{path} is '{got}'; a {family} layer is one of {known}")]
    UnknownLayer {
        /// Element, such as `layer_types[3]`.
        path: String,
        /// The word.
        got: String,
        /// `model_type`
        family: String,
        /// Words that are known.
        known: String,
    },
    /// No family of this name.
    #[error(
        "{path} is {got} and architectures is {architectures}: no family of decoders is known under these names; \
         looked for model_type (also in text_config, llm_config and language_config), then for architectures, \
         among {known}"
    )]
    UnknownFamily {
        /// Where the model type stands.
        path: String,
        /// Model type, quoted, or "absent".
        got: String,
        /// Likewise.
        architectures: String,
        /// Names.
        known: String,
    },
}

impl ConfigError {
    /// Whether the file itself is at fault, not what a sound one says.
    pub fn is_damage(&self) -> bool {
        matches!(self, ConfigError::Io(_) | ConfigError::TooLarge { .. } | ConfigError::Json(_))
    }
}
