//! `config.json` to [`ModelConfig`]: the geometry that decides the bytes of the cache.

mod context;
mod dense;
mod error;
mod families;
mod fields;
pub(crate) mod gguf;
mod hybrid;
mod json;
mod kinds;
mod latent;
mod mixed;
mod parameters;
mod state;

use std::path::Path;

use turboquant::format::NativeDtype;

pub use error::ConfigError;
pub use families::known_model_types;
use families::{Geometry, Source};
pub use json::parse as parse_json;
pub use parameters::ParameterEstimate;

/// Keys and values of one attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionSpec {
    /// Query heads.
    pub num_qo_heads: usize,
    /// Key/value heads.
    pub num_kv_heads: usize,
    /// Width of a key.
    pub key_head_dim: usize,
    /// Width of a value.
    pub value_head_dim: usize,
    /// Tokens a query sees, itself included; `None` is all of them.
    pub window: Option<usize>,
}

/// Fixed-size state of one recurrent layer and sequence, in bytes.
///
/// Tensor parallelism divides it by heads; the convolution's share that belongs to groups (the B and
/// C of Mamba-2) is replicated once there are more ranks than groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateSpec {
    /// Convolution state.
    pub conv_bytes: usize,
    /// SSM / delta-rule / linear-attention state.
    pub recurrent_bytes: usize,
    /// The number of ranks must divide this.
    pub num_heads: usize,
    /// Part of `conv_bytes` that is divided by groups and not by heads.
    pub grouped_conv_bytes: usize,
    /// Groups of that part; 1 where there is none.
    pub num_groups: usize,
    /// The config names the dtype of the recurrent state; else it is f32.
    pub dtype_named: bool,
}

/// One vector per token that is key and value at once, kept for a window, and one compressed vector
/// per `ratio` tokens kept for good (DeepSeek-V4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompressedSpec {
    /// Query heads that read it.
    pub num_qo_heads: usize,
    /// Elements of a vector, compressed or not.
    pub width: usize,
    /// Tokens whose own vector is kept.
    pub window: usize,
    /// Tokens of one compressed vector; 0 where the layer has the window only.
    pub ratio: usize,
    /// Elements of the indexer's key per compressed vector; 0 where there is no indexer.
    pub indexer_width: usize,
    /// Bytes per sequence of what waits for the next compressed vector.
    pub state_bytes: usize,
}

/// What one layer keeps between steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheSpec {
    /// Keys and values per token: full attention, or a sliding window.
    Attention(AttentionSpec),
    /// One latent vector per token, shared by all heads (MLA).
    Latent {
        /// Query heads that read it.
        num_qo_heads: usize,
        /// Elements of the latent, RoPE part included.
        width: usize,
        /// Elements of the sparse-attention indexer's key per token; 0 where there is none.
        indexer_width: usize,
    },
    /// Compressed attention.
    Compressed(CompressedSpec),
    /// A state per sequence.
    Recurrent(StateSpec),
    /// Keys and values per token and a state per sequence (Falcon-H1, Zamba2's hybrid layers).
    Hybrid(AttentionSpec, StateSpec),
    /// Reads the keys and values of layer `owner`.
    Shared {
        /// A lower layer index.
        owner: usize,
    },
    /// Nothing (MLP-only layers).
    None,
}

impl CacheSpec {
    /// The keys and values per head that the layer stores, where it does.
    pub fn attention(&self) -> Option<&AttentionSpec> {
        match self {
            CacheSpec::Attention(spec) | CacheSpec::Hybrid(spec, _) => Some(spec),
            _ => None,
        }
    }

    /// The state per sequence, where there is one.
    pub fn state(&self) -> Option<&StateSpec> {
        match self {
            CacheSpec::Recurrent(spec) | CacheSpec::Hybrid(_, spec) => Some(spec),
            _ => None,
        }
    }
}

/// The geometry of a model. Made by [`ModelConfig::new`] (from GGUF metadata, say) or read from a
/// `config.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// `model_type` of the (text) config.
    pub model_type: String,
    /// Dtype of `auto` rows.
    pub dtype: NativeDtype,
    /// Longest sequence the model was made for, RoPE scaling included.
    pub max_model_len: usize,
    /// One entry per layer.
    pub layers: Vec<CacheSpec>,
    /// The windows are aligned chunks (Llama-4): a query sees the tokens of its own chunk. A window
    /// of the same length holds no fewer tokens.
    pub chunked_windows: bool,
    /// Some layers have learned attention sinks among their weights.
    pub learned_sinks: bool,
    /// An estimate of the weights; `None` where the config does not say enough.
    pub parameters: Option<ParameterEstimate>,
    /// What a reader of the plan should know, in sentences.
    pub notices: Vec<String>,
}

impl ModelConfig {
    /// A model without chunks, sinks and notices.
    pub fn new(
        model_type: impl Into<String>,
        dtype: NativeDtype,
        max_model_len: usize,
        layers: Vec<CacheSpec>,
    ) -> Self {
        ModelConfig {
            model_type: model_type.into(),
            dtype,
            max_model_len,
            layers,
            chunked_windows: false,
            learned_sinks: false,
            parameters: None,
            notices: Vec::new(),
        }
    }

    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    /// A field that decides bytes and can neither be read nor derived, with its path; a family that is
    /// not known, with what was looked for.
    pub fn from_hf(json: &str) -> Result<Self, ConfigError> {
        families::read(&json::parse(json)?)
    }

    /// Reads a `config.json`.
    ///
    /// # Errors
    /// As [`ModelConfig::from_hf`], and when the file cannot be read.
    pub fn from_hf_file(path: &Path) -> Result<Self, ConfigError> {
        let io = |error: std::io::Error| ConfigError::Io(error.to_string());
        let size = std::fs::metadata(path).map_err(io)?.len();
        if size > json::MAX_CONFIG_BYTES {
            return Err(ConfigError::TooLarge { got: size, limit: json::MAX_CONFIG_BYTES });
        }
        let bytes = std::fs::read(path).map_err(io)?;
        let text = String::from_utf8(bytes).map_err(|error| ConfigError::Json(error.to_string()))?;
        Self::from_hf(&text)
    }

    /// Whether some layer keeps a recurrent state.
    pub fn is_hybrid(&self) -> bool {
        self.layers.iter().any(|layer| layer.state().is_some())
    }
}
