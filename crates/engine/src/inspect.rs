//! What a model's files say without loading it: geometry, bytes of the weights, biases on the keys.

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use crate::{
    config::{CacheSpec, ConfigError, ModelConfig, ParameterEstimate, gguf},
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
    /// Reads a folder with `config.json` (and safetensors files, where they are there), a `config.json`
    /// alone, or a GGUF file.
    ///
    /// # Errors
    /// A config or GGUF file that is refused. Safetensors that cannot be read are estimated, with a
    /// notice.
    pub fn read(path: &Path) -> Result<Self, InspectError> {
        let folder = path.is_dir();
        if !folder && (path.extension().is_some_and(|extension| extension == "gguf") || starts_as_gguf(path))
        {
            return Ok(Self::read_gguf(path)?);
        }
        if folder && !path.join("config.json").is_file() {
            return Err(LoadError::NotAModel { path: path.into() }.into());
        }
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

    fn read_gguf(path: &Path) -> Result<Self, LoadError> {
        let (config, files) = match gguf::short_convolution(path)? {
            Some(read) => read,
            None => crate::model::read_gguf(path)?,
        };
        let mut facts = Self::estimated(config);
        facts.weight_bytes = Some(files.tensors.values().map(|entry| entry.bytes).sum());
        facts.weight_source = WeightSource::Gguf { tensors: files.tensors.len() };
        facts.read_key_biases(&files, |name| name.ends_with("attn_k.bias"), "blk.");
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

/// Whether the file begins as GGUF files do, whatever its name.
fn starts_as_gguf(path: &Path) -> bool {
    let mut magic = [0; 4];
    File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && &magic == b"GGUF"
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

    /// A GGUF file of metadata and no tensors; values are u32, arrays of them, or strings.
    fn gguf(values: &[(&str, Metadata)]) -> Vec<u8> {
        let text = |out: &mut Vec<u8>, text: &str| {
            out.extend((text.len() as u64).to_le_bytes());
            out.extend(text.as_bytes());
        };
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend(0u64.to_le_bytes());
        out.extend((values.len() as u64).to_le_bytes());
        for (key, value) in values {
            text(&mut out, key);
            match value {
                Metadata::Number(number) => out.extend([4u32, *number].map(u32::to_le_bytes).concat()),
                Metadata::Text(value) => {
                    out.extend(8u32.to_le_bytes());
                    text(&mut out, value);
                }
                Metadata::List(list) => {
                    out.extend([9u32, 4].map(u32::to_le_bytes).concat());
                    out.extend((list.len() as u64).to_le_bytes());
                    out.extend(list.iter().flat_map(|number| number.to_le_bytes()));
                }
            }
        }
        out
    }

    enum Metadata {
        Number(u32),
        Text(&'static str),
        List(Vec<u32>),
    }

    #[test]
    fn a_short_convolution_gguf_says_what_its_config_says() {
        use Metadata::{List, Number, Text};
        let kv_heads = vec![0, 0, 8, 0, 0, 8, 0, 0, 8, 0, 8, 0, 8, 0, 8, 0];
        let values = |kv_heads| {
            vec![
                ("general.architecture", Text("lfm2")),
                ("lfm2.block_count", Number(16)),
                ("lfm2.context_length", Number(128_000)),
                ("lfm2.embedding_length", Number(2048)),
                ("lfm2.attention.head_count", Number(32)),
                ("lfm2.attention.head_count_kv", List(kv_heads)),
                ("lfm2.shortconv.l_cache", Number(3)),
            ]
        };
        let path = std::env::temp_dir().join(format!("turboquant-lfm2-{}.gguf", std::process::id()));
        std::fs::write(&path, gguf(&values(kv_heads.clone()))).unwrap();
        let facts = ModelFacts::read(&path).unwrap();
        let json = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/cases/lfm2-1.2b.json");
        let config = ModelFacts::read(&json).unwrap().config;
        assert_eq!(facts.config.layers, config.layers);
        assert_eq!(facts.config.max_model_len, config.max_model_len);
        assert_eq!(facts.weight_source, WeightSource::Gguf { tensors: 0 });
        std::fs::write(&path, gguf(&values(kv_heads[1..].to_vec()))).unwrap();
        let error = ModelFacts::read(&path).unwrap_err().to_string();
        assert!(error.contains("lfm2.attention.head_count_kv"), "{error}");
        std::fs::write(&path, gguf(&[("general.architecture", Text("t5"))])).unwrap();
        assert!(ModelFacts::read(&path).unwrap_err().to_string().contains("t5"));
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn the_largest_head_counts_and_nan_is_kept() {
        assert_eq!(largest_norm(&[3.0, 4.0, 0.0, 1.0], 2), 5.0);
        assert!(largest_norm(&[f32::NAN, 4.0, 0.0, 1.0], 2).is_nan());
        assert_eq!(largest_norm(&[], 2), 0.0);
    }
}
