//! Llama, and Mistral, which is Llama with a sliding window.

use super::gguf::GgufConfig;
use super::hf::HfConfig;
use crate::error::LoadError;
use crate::model::spec::DecoderSpec;

pub(crate) fn from_hf(config: &HfConfig) -> Result<DecoderSpec, LoadError> {
    config.activation("hidden_act", &["silu"])?;
    let attention_bias = config.flag("attention_bias")?;
    Ok(DecoderSpec {
        qkv_bias: attention_bias,
        out_bias: attention_bias,
        mlp_bias: config.flag("mlp_bias")?,
        ..config.plain(1e-6, config.rope(10_000.0, false)?)?
    })
}

/// Biases are there if the file has them.
pub(crate) fn from_gguf(config: &GgufConfig) -> Result<DecoderSpec, LoadError> {
    let window = config.opt_usize("attention.sliding_window")?;
    let mut spec = config.plain(config.rope(10_000.0)?)?;
    spec.layers.iter_mut().for_each(|layer| layer.attention.window = window);
    Ok(DecoderSpec {
        qkv_bias: config.files.contains("blk.0.attn_q.bias"),
        out_bias: config.files.contains("blk.0.attn_output.bias"),
        mlp_bias: config.files.contains("blk.0.ffn_gate.bias"),
        ..spec
    })
}
