//! Transformer decoders: files to hyper-parameters and weights, token ids to logits.
//!
//! The forward pass knows nothing of pages: it hands queries, keys and values of a layer to an
//! [`AttentionBackend`] and gets the weighted values back.

mod attention;
mod decoder;
mod families;
mod mlp;
mod names;
mod norm;
mod rope;
mod rows;
mod spec;

use std::collections::BTreeSet;
use std::path::Path;

use candle_core::{Device, Tensor};

use crate::batch::StepBatch;
use crate::config::ModelConfig;
use crate::error::{EngineError, LoadError};
use crate::weights::{Loader, WeightFiles, WeightSummary};
use decoder::Decoder;

/// How one layer attends.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerAttention {
    /// Query heads.
    pub num_qo_heads: usize,
    /// Key/value heads.
    pub num_kv_heads: usize,
    /// Width of queries and keys.
    pub key_head_dim: usize,
    /// Width of values.
    pub value_head_dim: usize,
    /// Factor on the scores.
    pub sm_scale: f32,
    /// Tokens a query sees, itself included; `None` is all before it.
    pub window: Option<usize>,
    /// Scores become `soft_cap * tanh(score / soft_cap)`.
    pub soft_cap: Option<f32>,
    /// `[num_qo_heads]`, logits that take part in the softmax and have no value.
    pub sinks: Option<Vec<f32>>,
}

/// Keeps the keys and values of a sequence and attends to them. One per step: it knows which rows
/// belong to which sequence and at which positions.
pub trait AttentionBackend {
    /// Stores `k` and `v` of `layer` and returns what `q` makes of the cache, causally.
    ///
    /// All f32, after norms and RoPE: `q [rows, num_qo_heads, key_head_dim]`,
    /// `k [rows, num_kv_heads, key_head_dim]`, `v [rows, num_kv_heads, value_head_dim]`; the result is
    /// `[rows, num_qo_heads, value_head_dim]`.
    ///
    /// # Errors
    /// Whatever the backend cannot do; the step ends with it.
    fn attend(
        &mut self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        params: &LayerAttention,
    ) -> Result<Tensor, EngineError>;
}

/// Geometry and tensor directory of a GGUF file.
pub(crate) fn read_gguf(path: &Path) -> Result<(ModelConfig, WeightFiles), LoadError> {
    let source = families::from_gguf(path)?;
    Ok((source.config, source.files))
}

/// A model in memory.
#[derive(Debug)]
pub struct LoadedModel {
    /// Geometry of the cache.
    pub config: ModelConfig,
    /// Token ids are below this.
    pub vocab_size: usize,
    /// Ids that end a generation, from the model's files; a tokenizer may know more.
    pub eos_token_ids: BTreeSet<u32>,
    /// What the weights take in memory.
    pub weights: WeightSummary,
    /// Per layer, the largest L2 norm over the KV heads of the bias on the keys; `None` where keys have
    /// no bias. A large bias eats the code range of quantised keys.
    pub key_bias_norms: Vec<Option<f32>>,
    decoder: Decoder,
}

/// A model whose hyper-parameters and list of tensors are read, and whose weights are not.
#[derive(Debug)]
pub struct OpenedModel(families::Source);

impl OpenedModel {
    /// Opens a GGUF file, or a folder with `config.json` and safetensors files.
    ///
    /// # Errors
    /// Files that are damaged, incomplete, or of an architecture that is not supported.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let source = if path.is_dir() { families::from_folder(path) } else { families::from_gguf(path) };
        source.map(OpenedModel)
    }

    /// Reads the weights.
    ///
    /// # Errors
    /// Tensors that are missing, or not what the hyper-parameters say.
    pub fn load(self) -> Result<LoadedModel, LoadError> {
        let source = self.0;
        let mut loader = Loader::new(&source.files);
        let decoder = Decoder::load(&mut loader, &source)?;
        let unused = loader.unused();
        if let Some(first) = unused.first() {
            let (path, count) = (source.files.path.display(), unused.len());
            tracing::warn!(
                "{path}: {count} tensors of the file are no part of the model as configured, such as {first}"
            );
        }
        let weights = loader.summary;
        tracing::info!(
            "{}: {} bytes of weights, {:?}",
            source.files.path.display(),
            weights.bytes,
            weights.by_dtype
        );
        Ok(LoadedModel {
            vocab_size: source.spec.vocab_size,
            eos_token_ids: source.eos_token_ids,
            weights,
            key_bias_norms: decoder.key_bias_norms(),
            config: source.config,
            decoder,
        })
    }
}

impl LoadedModel {
    /// Opens and loads a model.
    ///
    /// # Errors
    /// As [`OpenedModel::open`] and [`OpenedModel::load`].
    pub fn load(path: &Path) -> Result<Self, LoadError> {
        OpenedModel::open(path)?.load()
    }

    /// Computes one step: logits `[logits_rows.len(), vocab_size]`, f32.
    ///
    /// A row's logits depend on its own token and position and on what `attention` returns for
    /// it, never on the other rows.
    ///
    /// # Errors
    /// Token ids outside of the vocabulary, a batch whose parts do not fit together, and what
    /// `attention` reports.
    pub fn forward(
        &self,
        batch: &StepBatch,
        attention: &mut dyn AttentionBackend,
    ) -> Result<Tensor, EngineError> {
        let rows = batch.token_ids.len();
        if batch.positions.len() != rows {
            return Err(EngineError::Batch(format!(
                "{rows} token ids and {} positions",
                batch.positions.len()
            )));
        }
        if let Some(row) = batch.logits_rows.iter().find(|row| **row as usize >= rows) {
            return Err(EngineError::Batch(format!("logits of row {row} are wanted, there are {rows} rows")));
        }
        if let Some(id) = batch.token_ids.iter().find(|id| **id as usize >= self.vocab_size) {
            return Err(EngineError::TokenId { id: *id, vocab_size: self.vocab_size });
        }
        if rows == 0 {
            return Ok(Tensor::zeros((0, self.vocab_size), candle_core::DType::F32, &Device::Cpu)?);
        }
        self.decoder.forward(batch, attention)
    }
}

/// The ids that end a generation: the union of what `config.json` (its text part included) and
/// `generation_config.json` say. A number, a list, or nothing; negative numbers are nothing.
pub fn eos_token_ids(
    config: &serde_json::Value,
    generation_config: Option<&serde_json::Value>,
) -> BTreeSet<u32> {
    [Some(config), config.get("text_config"), generation_config]
        .into_iter()
        .flatten()
        .filter_map(|json| json.get("eos_token_id"))
        .flat_map(|ids| ids.as_array().cloned().unwrap_or_else(|| vec![ids.clone()]))
        .filter_map(|id| u32::try_from(id.as_u64()?).ok())
        .collect()
}
