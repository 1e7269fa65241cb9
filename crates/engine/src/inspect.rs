//! What a model's files say without loading it: geometry, bytes of the weights, biases on the keys.

use std::path::{Path, PathBuf};

use crate::{
    config::{CacheSpec, ConfigError, ModelConfig, ParameterEstimate},
    error::LoadError,
    weights::{WeightFiles, blocks::read_floats, safetensors},
};

/// Where the bytes of the weights are known from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum WeightSource {
    /// The headers of the model's safetensors files.
    Safetensors {
        /// Files.
        files: usize,
        /// Tensors.
        tensors: usize,
    },
    /// The tensor table of the GGUF file.
    Gguf {
        /// Tensors.
        tensors: usize,
    },
    /// No weights at hand: parameters counted from the config.
    Estimated(ParameterEstimate),
    /// Neither.
    Unknown,
}

/// A model, not loaded.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelFacts {
    /// Geometry.
    pub config: ModelConfig,
    /// Bytes of the weights as stored.
    pub weight_bytes: Option<u64>,
    /// Where they are known from.
    pub weight_source: WeightSource,
    /// Per layer, the largest norm over the KV heads of the bias on the keys; empty without weights.
    pub key_bias_norms: Vec<Option<f32>>,
    /// What a reader should know, in sentences.
    pub notices: Vec<String>,
}

/// Files that say nothing usable.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// The config.
    #[error("{path}: {source}")]
    Config {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<ConfigError>,
    },
    /// The weights.
    #[error(transparent)]
    Weights(#[from] LoadError),
}

impl ModelFacts {
    /// Reads a folder with `config.json` (and safetensors files, where they are there), or a
    /// `config.json` alone.
    ///
    /// # Errors
    /// A config that is refused. Weights that cannot be read are estimated, with a notice.
    pub fn read(path: &Path) -> Result<Self, InspectError> {
        let folder = path.is_dir();
        let config_path = if folder { path.join("config.json") } else { path.to_owned() };
        let config = ModelConfig::from_hf_file(&config_path)
            .map_err(|source| InspectError::Config { path: config_path, source: Box::new(source) })?;
        let mut facts = Self::estimated(config);
        if folder {
            match safetensors::open(path) {
                Ok(files) => facts.count(&files),
                Err(LoadError::NotAModel { .. }) => {}
                Err(error) => facts.notices.push(format!("the weights are estimated: {error}")),
            }
        }
        Ok(facts)
    }

    fn estimated(config: ModelConfig) -> Self {
        let weight_bytes = config.parameters.map(|estimate| estimate.bytes());
        let weight_source = config.parameters.map_or(WeightSource::Unknown, WeightSource::Estimated);
        ModelFacts { config, weight_bytes, weight_source, key_bias_norms: Vec::new(), notices: Vec::new() }
    }

    fn count(&mut self, files: &WeightFiles) {
        self.weight_bytes = Some(files.tensors.values().map(|entry| entry.bytes).sum());
        self.weight_source =
            WeightSource::Safetensors { files: files.files.len(), tensors: files.tensors.len() };
        let is_key_bias = |name: &str| name.ends_with("self_attn.k_proj.bias") && !name.contains("vis");
        self.read_key_biases(files, is_key_bias, "layers.");
    }

    /// Reads the tensors whose name `is_key_bias`; the layer's number follows `before`.
    fn read_key_biases(&mut self, files: &WeightFiles, is_key_bias: impl Fn(&str) -> bool, before: &str) {
        self.key_bias_norms = vec![None; self.config.layers.len()];
        for (name, entry) in files.tensors.iter().filter(|(name, _)| is_key_bias(name)) {
            let number = name.rsplit_once(before).and_then(|(_, rest)| rest.split_once('.'));
            let Some(layer) = number.and_then(|(number, _)| number.parse::<usize>().ok()) else { continue };
            let Some(attention) = self.config.layers.get(layer).and_then(CacheSpec::attention) else {
                continue;
            };
            let width = attention.key_head_dim;
            if entry.shape != [attention.num_kv_heads * width] {
                self.notices
                    .push(format!("{name} of shape {:?} is not read: not the layer's keys", entry.shape));
                continue;
            }
            match read_floats(files, name, entry) {
                Ok(bias) => self.key_bias_norms[layer] = Some(largest_norm(&bias, width)),
                Err(error) => self.notices.push(format!("a key bias is not checked: {error}")),
            }
        }
    }
}

/// The largest L2 norm of the heads of `bias`.
fn largest_norm(bias: &[f32], head_dim: usize) -> f32 {
    let norm = |head: &[f32]| head.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt() as f32;
    // A NaN must not be lost by the maximum.
    bias.chunks_exact(head_dim)
        .map(norm)
        .fold(0.0, |a, b| if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_head_counts_and_nan_is_kept() {
        assert_eq!(largest_norm(&[3.0, 4.0, 0.0, 1.0], 2), 5.0);
        assert!(largest_norm(&[f32::NAN, 4.0, 0.0, 1.0], 2).is_nan());
        assert_eq!(largest_norm(&[], 2), 0.0);
    }
}
