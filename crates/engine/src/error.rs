//! What can go wrong between a model path and its logits.

use std::path::PathBuf;

/// A model that cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file system said no.
    #[error("cannot read {path}: {source}")]
    Io {
        /// File or folder.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// Neither a GGUF file nor a folder of a model.
    #[error(
        "{path} is not a model: expected a .gguf file, or a folder with config.json and .safetensors files"
    )]
    NotAModel {
        /// As given.
        path: PathBuf,
    },
    /// The bytes break the rules of their format.
    #[error("{path} is damaged: {reason}")]
    Malformed {
        /// File.
        path: PathBuf,
        /// What is wrong, tensor named where there is one.
        reason: String,
    },
    /// A hyper-parameter is missing, of the wrong type, or has a value that is not supported.
    #[error("{path}: {field} {reason}")]
    Config {
        /// File.
        path: PathBuf,
        /// JSON field or GGUF key.
        field: String,
        /// What was found and what is expected.
        reason: String,
    },
    /// The geometry of the cache cannot be read from `config.json`.
    #[error("{path}: {source}")]
    Geometry {
        /// File.
        path: PathBuf,
        /// Field and reason.
        source: Box<crate::config::ConfigError>,
    },
    /// No forward pass for this family.
    #[error("{path}: architecture `{found}` is not supported; supported are {supported}")]
    Architecture {
        /// File.
        path: PathBuf,
        /// `model_type` or `general.architecture`.
        found: String,
        /// Names of the same kind, comma separated.
        supported: String,
    },
    /// The shards of a model folder do not belong together.
    #[error("{path}: {reason}")]
    Shards {
        /// Folder or index file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A tensor that the architecture needs is nowhere.
    #[error("{path}: tensor {tensor} is missing")]
    MissingTensor {
        /// File, or folder of the shards.
        path: PathBuf,
        /// Its name.
        tensor: String,
    },
    /// The files have more layers than the hyper-parameters say.
    #[error(
        "{path}: tensor {tensor} is of a layer beyond the {num_layers} of the configuration; configuration and \
         weights are not of the same model"
    )]
    SurplusLayer {
        /// File.
        path: PathBuf,
        /// The first one.
        tensor: String,
        /// By the configuration.
        num_layers: usize,
    },
    /// A tensor has another shape than the hyper-parameters say.
    #[error("{path}: tensor {tensor} has shape {got:?}, the configuration says {expected:?}")]
    Shape {
        /// File.
        path: PathBuf,
        /// Its name.
        tensor: String,
        /// In the file, rows first.
        got: Vec<usize>,
        /// By the configuration, rows first.
        expected: Vec<usize>,
    },
    /// A tensor of a type that no product is written for.
    #[error("{path}: tensor {tensor} has type {got}; supported are {supported}")]
    Dtype {
        /// File.
        path: PathBuf,
        /// Its name.
        tensor: String,
        /// In the file.
        got: String,
        /// Comma separated.
        supported: &'static str,
    },
}

/// A step that cannot be computed.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The model could not be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A tensor operation failed.
    #[error("tensor operation failed: {0}")]
    Tensor(#[from] candle_core::Error),
    /// A token id outside of the vocabulary.
    #[error("token id {id} is outside of the vocabulary of {vocab_size}")]
    TokenId {
        /// As given.
        id: u32,
        /// Ids are below this.
        vocab_size: usize,
    },
    /// Attention over the cache refused its input.
    #[error("attention of layer {layer}: {source}")]
    Attention {
        /// Model layer.
        layer: usize,
        /// What it refused.
        source: turboquant::attention::AttentionError,
    },
    /// Nobody wants the step's results any more.
    #[error("the step was given up: nobody waits for its results")]
    Abandoned,
    /// The parts of a step do not fit together.
    #[error("inconsistent step: {0}")]
    Batch(String),
}
