//! From a family's own spelling of its hyper-parameters to a [`DecoderSpec`].

mod gemma;
mod gguf;
mod hf;
mod llama;
mod phi;
mod qwen;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::path::Path;

use turboquant::format::NativeDtype;

use super::names::Names;
use super::spec::DecoderSpec;
use crate::config::{CacheSpec, ModelConfig};
use crate::error::LoadError;
use crate::weights::{WeightFiles, layer_order, safetensors};
use gguf::GgufConfig;
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

impl Source {
    /// Refuses files with more layers than the hyper-parameters say: what would be computed without
    /// them is another model. (Layers for predicting several tokens at once, which some families put
    /// behind the last one, are in none of the families here.)
    fn without_surplus(self) -> Result<Self, LoadError> {
        let num_layers = self.spec.layers.len();
        let surplus = self
            .files
            .tensors
            .iter()
            .filter(|(name, _)| self.names.layer(name).is_some_and(|layer| layer >= num_layers));
        match surplus.min_by_key(|&(name, _)| layer_order(name)) {
            None => Ok(self),
            Some((tensor, entry)) => Err(LoadError::SurplusLayer {
                path: self.files.file_path(entry).into(),
                tensor: tensor.clone(),
                num_layers,
            }),
        }
    }
}

/// Reads the hyper-parameters of a family.
type FromHf = fn(&HfConfig) -> Result<DecoderSpec, LoadError>;
type FromGguf = fn(&GgufConfig) -> Result<DecoderSpec, LoadError>;

/// By the `model_type` of `config.json`.
const HF_FAMILIES: &[(&str, FromHf)] = &[
    ("llama", llama::from_hf),
    ("mistral", llama::from_hf),
    ("ministral", llama::from_hf),
    ("qwen2", qwen::qwen2_from_hf),
    ("qwen3", qwen::qwen3_from_hf),
    ("gemma2", gemma::gemma2_from_hf),
    ("gemma3", gemma::gemma3_from_hf),
    ("gemma3_text", gemma::gemma3_from_hf),
    ("phi3", phi::from_hf),
];

/// By the `general.architecture` of GGUF files.
const GGUF_FAMILIES: &[(&str, FromGguf)] = &[
    ("llama", llama::from_gguf),
    ("qwen2", qwen::qwen2_from_gguf),
    ("qwen3", qwen::qwen3_from_gguf),
    ("gemma2", gemma::gemma2_from_gguf),
    ("gemma3", gemma::gemma3_from_gguf),
    ("phi3", phi::from_gguf),
];

/// The family of that name.
fn find<F: Copy>(families: &[(&str, F)], found: &str, path: &Path) -> Result<F, LoadError> {
    families.iter().find(|(name, _)| *name == found).map(|(_, family)| *family).ok_or_else(|| {
        LoadError::Architecture {
            path: path.into(),
            found: found.into(),
            supported: families.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", "),
        }
    })
}

/// A folder with `config.json` and safetensors files.
pub(crate) fn from_folder(folder: &Path) -> Result<Source, LoadError> {
    let path = folder.join("config.json");
    if !path.is_file() {
        return Err(LoadError::NotAModel { path: folder.into() });
    }
    let root = hf::read_json(&path)?;
    let family = find(HF_FAMILIES, hf::model_type(&root), &path)?;
    let config = HfConfig::new(path, root)?;
    let spec = family(&config)?;
    let files = safetensors::open(folder)?;
    let names = hf_names(&files, spec.post_norms);
    if spec.tied && files.contains(&names.head()) {
        tracing::warn!(
            "{}: the embeddings are tied by {}, {} is not read",
            folder.display(),
            config.path.display(),
            names.head()
        );
    }
    let generation_path = folder.join("generation_config.json");
    let generation = if generation_path.is_file() { Some(hf::read_json(&generation_path)?) } else { None };
    let eos_token_ids = super::eos_token_ids(&config.root, generation.as_ref());
    Source { spec, names, files, eos_token_ids, config: config.geometry }.without_surplus()
}

/// Text models, and text models inside of multimodal ones in both of their spellings.
fn hf_names(files: &WeightFiles, post_norms: bool) -> Names {
    let prefixes = [
        ("model.", ""),
        ("model.language_model.", ""),
        ("language_model.model.", "language_model."),
        ("", ""),
    ];
    let (prefix, head_prefix) = prefixes
        .into_iter()
        .find(|(prefix, _)| files.contains(&format!("{prefix}embed_tokens.weight")))
        .unwrap_or(prefixes[0]);
    Names::Hf { prefix: prefix.into(), head_prefix, post_norms }
}

/// A GGUF file.
pub(crate) fn from_gguf(path: &Path) -> Result<Source, LoadError> {
    let config = GgufConfig::read(path)?;
    let family = find(GGUF_FAMILIES, &config.architecture, path)?;
    let spec = family(&config)?;
    let source = Source {
        names: Names::Gguf { interleaved_heads: config.architecture == "llama" },
        config: ModelConfig::new(
            config.architecture.clone(),
            NativeDtype::F16,
            config.max_model_len()?,
            spec.layers.iter().map(|layer| CacheSpec::Attention(layer.attention)).collect(),
        ),
        eos_token_ids: config.eos_token_ids(),
        spec,
        files: config.files,
    };
    source.without_surplus()
}
