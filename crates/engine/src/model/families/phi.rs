//! Phi-3: Llama with fused projections, rotated in part.

use super::gguf::GgufConfig;
use super::hf::HfConfig;
use crate::error::LoadError;
use crate::model::spec::DecoderSpec;

pub(crate) fn from_hf(config: &HfConfig) -> Result<DecoderSpec, LoadError> {
    config.activation("hidden_act", &["silu"])?;
    Ok(DecoderSpec { fused: true, ..config.plain(1e-5, config.rope(10_000.0, true)?)? })
}

pub(crate) fn from_gguf(config: &GgufConfig) -> Result<DecoderSpec, LoadError> {
    if config.files.contains("rope_factors_long.weight") {
        return Err(config.error(
            "rope.scaling.type",
            "is longrope, whose frequencies change with the length of the sequence: keys that are already cached would be wrong",
        ));
    }
    Ok(DecoderSpec { fused: true, ..config.plain(config.rope(10_000.0)?)? })
}
