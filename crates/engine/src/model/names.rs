//! What tensors are called in HF folders and in GGUF files.

/// A tensor of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LayerTensor {
    AttentionNorm,
    Query,
    Key,
    Value,
    /// Query, key and value rows in one.
    Qkv,
    Output,
    QueryNorm,
    KeyNorm,
    PostAttentionNorm,
    MlpNorm,
    Gate,
    Up,
    /// Gate and up rows in one.
    GateUp,
    Down,
    PostMlpNorm,
}

/// A naming convention.
#[derive(Debug)]
pub(crate) enum Names {
    /// Of `transformers`.
    Hf {
        /// What stands before `embed_tokens`, dot included.
        prefix: String,
        /// What stands before `lm_head`.
        head_prefix: &'static str,
        /// Norms before and behind each block, as Gemma has them.
        post_norms: bool,
    },
    /// Of llama.cpp.
    Gguf {
        /// Rows of queries and keys are interleaved for RoPE on neighbours.
        interleaved_heads: bool,
    },
}

impl Names {
    pub(crate) fn embedding(&self) -> String {
        match self {
            Names::Hf { prefix, .. } => format!("{prefix}embed_tokens.weight"),
            Names::Gguf { .. } => "token_embd.weight".into(),
        }
    }

    pub(crate) fn final_norm(&self) -> String {
        match self {
            Names::Hf { prefix, .. } => format!("{prefix}norm.weight"),
            Names::Gguf { .. } => "output_norm.weight".into(),
        }
    }

    pub(crate) fn head(&self) -> String {
        match self {
            Names::Hf { head_prefix, .. } => format!("{head_prefix}lm_head.weight"),
            Names::Gguf { .. } => "output.weight".into(),
        }
    }

    pub(crate) fn interleaved_heads(&self) -> bool {
        matches!(self, Names::Gguf { interleaved_heads: true })
    }

    /// The layer that a tensor belongs to, whatever it is there.
    pub(crate) fn layer(&self, name: &str) -> Option<usize> {
        let rest = match self {
            Names::Hf { prefix, .. } => name.strip_prefix(prefix.as_str())?.strip_prefix("layers.")?,
            Names::Gguf { .. } => name.strip_prefix("blk.")?,
        };
        rest.split_once('.')?.0.parse().ok()
    }

    pub(crate) fn weight(&self, layer: usize, tensor: LayerTensor) -> String {
        format!("{}.weight", self.stem(layer, tensor))
    }

    pub(crate) fn bias(&self, layer: usize, tensor: LayerTensor) -> String {
        format!("{}.bias", self.stem(layer, tensor))
    }

    fn stem(&self, layer: usize, tensor: LayerTensor) -> String {
        use LayerTensor::*;
        match self {
            Names::Hf { prefix, post_norms, .. } => {
                let tensor = match tensor {
                    AttentionNorm => "input_layernorm",
                    Query => "self_attn.q_proj",
                    Key => "self_attn.k_proj",
                    Value => "self_attn.v_proj",
                    Qkv => "self_attn.qkv_proj",
                    Output => "self_attn.o_proj",
                    QueryNorm => "self_attn.q_norm",
                    KeyNorm => "self_attn.k_norm",
                    PostAttentionNorm => "post_attention_layernorm",
                    MlpNorm if *post_norms => "pre_feedforward_layernorm",
                    MlpNorm => "post_attention_layernorm",
                    Gate => "mlp.gate_proj",
                    Up => "mlp.up_proj",
                    GateUp => "mlp.gate_up_proj",
                    Down => "mlp.down_proj",
                    PostMlpNorm => "post_feedforward_layernorm",
                };
                format!("{prefix}layers.{layer}.{tensor}")
            }
            Names::Gguf { .. } => {
                let tensor = match tensor {
                    AttentionNorm => "attn_norm",
                    Query => "attn_q",
                    Key => "attn_k",
                    Value => "attn_v",
                    Qkv => "attn_qkv",
                    Output => "attn_output",
                    QueryNorm => "attn_q_norm",
                    KeyNorm => "attn_k_norm",
                    PostAttentionNorm => "post_attention_norm",
                    MlpNorm => "ffn_norm",
                    Gate => "ffn_gate",
                    Up | GateUp => "ffn_up",
                    Down => "ffn_down",
                    PostMlpNorm => "post_ffw_norm",
                };
                format!("blk.{layer}.{tensor}")
            }
        }
    }
}
