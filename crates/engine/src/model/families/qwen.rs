//! Qwen2 (biases on queries, keys and values) and Qwen3 (norms on queries and keys instead).

use super::gguf::GgufConfig;
use super::hf::HfConfig;
use crate::error::LoadError;
use crate::model::spec::DecoderSpec;

pub(crate) fn qwen2_from_hf(config: &HfConfig) -> Result<DecoderSpec, LoadError> {
    config.activation("hidden_act", &["silu"])?;
    Ok(DecoderSpec { qkv_bias: true, ..config.plain(1e-6, config.rope(10_000.0, false)?)? })
}

pub(crate) fn qwen3_from_hf(config: &HfConfig) -> Result<DecoderSpec, LoadError> {
    config.activation("hidden_act", &["silu"])?;
    let attention_bias = config.flag("attention_bias")?;
    Ok(DecoderSpec {
        qkv_bias: attention_bias,
        out_bias: attention_bias,
        qk_norm: true,
        ..config.plain(1e-6, config.rope(10_000.0, false)?)?
    })
}

pub(crate) fn qwen2_from_gguf(config: &GgufConfig) -> Result<DecoderSpec, LoadError> {
    Ok(DecoderSpec { qkv_bias: true, ..config.plain(config.rope(10_000.0)?)? })
}

pub(crate) fn qwen3_from_gguf(config: &GgufConfig) -> Result<DecoderSpec, LoadError> {
    Ok(DecoderSpec { qk_norm: true, ..config.plain(config.rope(10_000.0)?)? })
}
