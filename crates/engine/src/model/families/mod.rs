//! From a family's own spelling of its hyper-parameters to a [`DecoderSpec`].

mod hf;
mod llama;

use std::collections::BTreeSet;
use std::path::Path;

use super::names::Names;
use super::spec::DecoderSpec;
use crate::config::{CacheSpec, ModelConfig};
use crate::error::LoadError;
use crate::weights::{WeightFiles, safetensors};
use hf::HfConfig;

/// All that the decoder is loaded from.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) spec: DecoderSpec,
    pub(crate) names: Names,
    pub(crate) files: WeightFiles,
    pub(crate) config: ModelConfig,
    pub(crate) eos_token_ids: BTreeSet<u32>,
}

/// Reads the hyper-parameters of a family.
type FromHf = fn(&HfConfig) -> Result<DecoderSpec, LoadError>;

/// By the `model_type` of `config.json`.
const HF_FAMILIES: &[(&str, FromHf)] =
    &[("llama", llama::from_hf), ("mistral", llama::from_hf), ("ministral", llama::from_hf)];

/// A folder with `config.json` and safetensors files.
pub(crate) fn from_folder(folder: &Path) -> Result<Source, LoadError> {
    let config = HfConfig::read(folder)?;
    let model_type = config.model_type()?;
    let Some((_, family)) = HF_FAMILIES.iter().find(|(name, _)| *name == model_type) else {
        return Err(LoadError::Architecture {
            path: config.path.clone(),
            found: model_type.into(),
            supported: HF_FAMILIES.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", "),
        });
    };
    let spec = family(&config)?;
    let files = safetensors::open(folder)?;
    Ok(Source {
        names: Names::Hf { prefix: "model.".into(), head_prefix: "", post_norms: spec.post_norms },
        config: ModelConfig::new(
            model_type,
            config.dtype()?,
            config.usize("max_position_embeddings")?,
            spec.layers.iter().map(|layer| CacheSpec::Attention(layer.attention)).collect(),
        ),
        eos_token_ids: BTreeSet::new(),
        spec,
        files,
    })
}
