//! `config.json` to [`ModelConfig`]: the geometry that decides the bytes of the cache.

use turboquant::format::NativeDtype;

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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateSpec {
    /// Convolution state.
    pub conv_bytes: usize,
    /// SSM / delta-rule / linear-attention state.
    pub recurrent_bytes: usize,
}

/// What one layer keeps between steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheSpec {
    /// Keys and values per token: full attention, or a sliding window.
    Attention(AttentionSpec),
    /// One latent vector per token, shared by all heads (MLA).
    Latent {
        /// Elements of the latent, RoPE part included.
        width: usize,
    },
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

/// The geometry of a model.
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
}
