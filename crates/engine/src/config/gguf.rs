//! Geometry of GGUF files that the engine does not run but the planner should know.

use std::path::Path;

use turboquant::format::NativeDtype;

use super::{
    AttentionSpec, CacheSpec, ModelConfig, StateSpec,
    fields::{MAX_COUNT, MAX_LAYERS, MAX_LEN, MAX_WIDTH},
};
use crate::{
    error::LoadError,
    weights::{
        WeightFiles,
        gguf::{Gguf, Value},
    },
};

/// LFM2: a list of KV heads per layer, 0 where the layer is a short convolution. `None` for other
/// architectures.
pub(crate) fn short_convolution(path: &Path) -> Result<Option<(ModelConfig, WeightFiles)>, LoadError> {
    let gguf = Gguf::open(path)?;
    let architecture = match gguf.metadata.get("general.architecture") {
        Some(Value::String(name)) if matches!(name.as_str(), "lfm2" | "lfm2moe") => name.clone(),
        _ => return Ok(None),
    };
    let keys = Keys { path, gguf: &gguf, architecture: &architecture };
    let layers = keys.integer("block_count", MAX_LAYERS)?;
    let hidden = keys.integer("embedding_length", MAX_WIDTH)?;
    let heads = keys.integer("attention.head_count", MAX_COUNT)?;
    if !hidden.is_multiple_of(heads) {
        return Err(keys.error("embedding_length", format!("{hidden} is no multiple of the {heads} heads")));
    }
    let kernel = keys.integer("shortconv.l_cache", MAX_COUNT)?;
    let state = StateSpec {
        conv_bytes: hidden * (kernel - 1) * NativeDtype::F16.bytes(),
        recurrent_bytes: 0,
        num_heads: hidden,
        grouped_conv_bytes: 0,
        num_groups: 1,
        dtype_named: false,
    };
    let attention = |num_kv_heads| AttentionSpec {
        num_qo_heads: heads,
        num_kv_heads,
        key_head_dim: hidden / heads,
        value_head_dim: hidden / heads,
        window: None,
    };
    let specs =
        keys.list("attention.head_count_kv", layers)?.into_iter().map(|num_kv_heads| match num_kv_heads {
            0 => CacheSpec::Recurrent(state),
            _ => CacheSpec::Attention(attention(num_kv_heads)),
        });
    let config = ModelConfig::new(
        architecture.clone(),
        NativeDtype::F16,
        keys.integer("context_length", MAX_LEN)?,
        specs.collect(),
    );
    Ok(Some((config, gguf.files)))
}

/// Metadata under the architecture's name.
struct Keys<'a> {
    path: &'a Path,
    gguf: &'a Gguf,
    architecture: &'a str,
}

impl Keys<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.gguf.metadata.get(&format!("{}.{key}", self.architecture))
    }

    fn error(&self, key: &str, reason: String) -> LoadError {
        LoadError::Config { path: self.path.into(), field: format!("{}.{key}", self.architecture), reason }
    }

    fn integer(&self, key: &str, max: usize) -> Result<usize, LoadError> {
        match self.get(key) {
            Some(Value::Int(number)) if (1..=max as i128).contains(number) => Ok(*number as usize),
            Some(other) => Err(self.error(key, format!("is {other}, expected an integer from 1 to {max}"))),
            None => Err(self.error(key, "is missing".to_owned())),
        }
    }

    /// One integer per layer.
    fn list(&self, key: &str, layers: usize) -> Result<Vec<usize>, LoadError> {
        let expected = || self.error(key, format!("is not a list of {layers} head counts"));
        match self.get(key) {
            Some(Value::Array(list)) if list.len() == layers => list
                .iter()
                .map(|value| match value {
                    Value::Int(number) if (0..=MAX_COUNT as i128).contains(number) => Ok(*number as usize),
                    _ => Err(expected()),
                })
                .collect(),
            _ => Err(expected()),
        }
    }
}
