//! Typed access to the metadata of GGUF files.

use std::path::Path;

use super::hf::MAX_SIZE;
use crate::config::AttentionSpec;
use crate::error::LoadError;
use crate::model::rope::{Rope, RopeScaling};
use crate::model::spec::{DecoderSpec, LayerSpec};
use crate::weights::WeightFiles;
use crate::weights::blocks::read_floats;
use crate::weights::gguf::{Gguf, Value};

/// More than any model has; they bound what is allocated before the weights are seen.
const MAX_LAYERS: usize = 4096;
const MAX_HEAD_DIM: usize = 8192;

/// Factors of the frequencies, which Llama 3.1 files carry as a tensor.
pub(crate) const ROPE_FREQS: &str = "rope_freqs.weight";

/// A GGUF file; keys are looked up under the architecture's name.
#[derive(Debug)]
pub(crate) struct GgufConfig {
    pub(crate) architecture: String,
    metadata: std::collections::HashMap<String, Value>,
    pub(crate) files: WeightFiles,
}

impl GgufConfig {
    pub(crate) fn read(path: &Path) -> Result<Self, LoadError> {
        let Gguf { metadata, files } = Gguf::open(path)?;
        let missing = |field: &str, reason: &str| LoadError::Config {
            path: path.into(),
            field: field.into(),
            reason: reason.into(),
        };
        let architecture = match metadata.get("general.architecture") {
            Some(Value::String(architecture)) => architecture.clone(),
            _ => return Err(missing("general.architecture", "is missing")),
        };
        if let Some(Value::Int(count @ 2..)) = metadata.get("split.count") {
            return Err(missing(
                "split.count",
                &format!(
                    "is {count}: the model is split over several files; merge them with `llama-gguf-split --merge`"
                ),
            ));
        }
        Ok(GgufConfig { architecture, metadata, files })
    }

    /// `key` without the architecture's name.
    fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.get(&format!("{}.{key}", self.architecture))
    }

    pub(crate) fn error(&self, key: &str, reason: impl Into<String>) -> LoadError {
        LoadError::Config {
            path: self.files.path.clone(),
            field: format!("{}.{key}", self.architecture),
            reason: reason.into(),
        }
    }

    pub(crate) fn opt_usize(&self, key: &str) -> Result<Option<usize>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Int(n)) if (1..=MAX_SIZE as i128).contains(n) => Ok(Some(*n as usize)),
            Some(other) => {
                Err(self.error(key, format!("is {other}, expected a positive whole number of at most 2^31")))
            }
        }
    }

    pub(crate) fn usize(&self, key: &str) -> Result<usize, LoadError> {
        self.opt_usize(key)?.ok_or_else(|| self.error(key, "is missing"))
    }

    pub(crate) fn opt_f64(&self, key: &str) -> Result<Option<f64>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Float(x)) if x.is_finite() && *x > 0.0 => Ok(Some(*x)),
            Some(other) => Err(self.error(key, format!("is {other}, expected a positive number"))),
        }
    }

    /// A number that 0 switches off.
    fn opt_f64_or_off(&self, key: &str) -> Result<Option<f64>, LoadError> {
        match self.get(key) {
            Some(Value::Float(0.0)) => Ok(None),
            _ => self.opt_f64(key),
        }
    }

    /// A soft cap: 0 switches it off, without the key it is `default`.
    pub(crate) fn soft_cap(&self, key: &str, default: Option<f32>) -> Result<Option<f32>, LoadError> {
        match self.get(key) {
            None => Ok(default),
            Some(_) => Ok(self.opt_f64_or_off(key)?.map(|cap| cap as f32)),
        }
    }

    /// `usize` with an upper bound.
    fn usize_up_to(&self, key: &str, max: usize) -> Result<Option<usize>, LoadError> {
        let value = self.opt_usize(key)?;
        match value {
            Some(n) if n > max => Err(self.error(key, format!("is {n}; no model has more than {max}"))),
            _ => Ok(value),
        }
    }

    fn layers(&self) -> Result<usize, LoadError> {
        let key = "block_count";
        self.usize_up_to(key, MAX_LAYERS)?.ok_or_else(|| self.error(key, "is missing"))
    }

    /// One number per layer, given as such or as one for all.
    fn per_layer(&self, key: &str, layers: usize) -> Result<Option<Vec<usize>>, LoadError> {
        let whole = |value: &Value| match value {
            Value::Int(n) => usize::try_from(*n).ok().filter(|n| *n <= MAX_SIZE),
            _ => None,
        };
        let values = match self.get(key) {
            None => return Ok(None),
            Some(Value::Array(values)) if values.len() == layers => {
                values.iter().map(whole).collect::<Option<Vec<_>>>()
            }
            Some(value) => whole(value).map(|value| vec![value; layers]),
        };
        let problem = || format!("must be a whole number or a list of {layers} of them");
        values.map(Some).ok_or_else(|| self.error(key, problem()))
    }

    /// Ids that end a generation.
    pub(crate) fn eos_token_ids(&self) -> std::collections::BTreeSet<u32> {
        ["eos_token_id", "eot_token_id", "eom_token_id"]
            .iter()
            .filter_map(|key| match self.metadata.get(&format!("tokenizer.ggml.{key}")) {
                Some(Value::Int(id)) => u32::try_from(*id).ok(),
                _ => None,
            })
            .collect()
    }

    /// A decoder without special features, rotated alike in all layers.
    pub(crate) fn plain(&self, rope: Rope) -> Result<DecoderSpec, LoadError> {
        if let Some(experts) = self.opt_usize("expert_count").unwrap_or(None) {
            return Err(
                self.error("expert_count", format!("is {experts}: mixtures of experts are not supported"))
            );
        }
        let layers =
            self.attention()?.into_iter().map(|attention| LayerSpec { attention, rope: 0 }).collect();
        let vocab_size = (self.files.tensors.get("token_embd.weight"))
            .and_then(|entry| entry.shape.first().copied())
            .ok_or_else(|| LoadError::MissingTensor {
                path: self.files.path.clone(),
                tensor: "token_embd.weight".into(),
            })?;
        let eps = self.opt_f64("attention.layer_norm_rms_epsilon")?;
        Ok(DecoderSpec {
            tied: !self.files.contains("output.weight"),
            ..DecoderSpec::plain(
                self.usize("embedding_length")?,
                self.usize("feed_forward_length")?,
                vocab_size,
                eps.ok_or_else(|| self.error("attention.layer_norm_rms_epsilon", "is missing"))? as f32,
                vec![rope],
                layers,
            )
        })
    }

    /// Heads of every layer; windows are left to the family.
    fn attention(&self) -> Result<Vec<AttentionSpec>, LoadError> {
        let layers = self.layers()?;
        let missing = || self.error("attention.head_count", "is missing");
        let heads = self.per_layer("attention.head_count", layers)?.ok_or_else(missing)?;
        let kv_heads = self.per_layer("attention.head_count_kv", layers)?.unwrap_or_else(|| heads.clone());
        let key_head_dim = self.key_head_dim()?;
        let value_head_dim =
            self.usize_up_to("attention.value_length", MAX_HEAD_DIM)?.unwrap_or(key_head_dim);
        heads
            .into_iter()
            .zip(kv_heads)
            .enumerate()
            .map(|(layer, (num_qo_heads, num_kv_heads))| {
                if num_kv_heads == 0 || !num_qo_heads.is_multiple_of(num_kv_heads) {
                    return Err(self.error(
                        "attention.head_count_kv",
                        format!("is {num_kv_heads} in layer {layer}, which does not divide its {num_qo_heads} query heads"),
                    ));
                }
                Ok(AttentionSpec { num_qo_heads, num_kv_heads, key_head_dim, value_head_dim, window: None })
            })
            .collect()
    }

    fn key_head_dim(&self) -> Result<usize, LoadError> {
        if let Some(key_length) = self.usize_up_to("attention.key_length", MAX_HEAD_DIM)? {
            return Ok(key_length);
        }
        let hidden_size = self.usize("embedding_length")?;
        let heads = self.per_layer("attention.head_count", 1)?.unwrap_or_default();
        match heads.first() {
            Some(heads) if *heads > 0 && hidden_size.is_multiple_of(*heads) => {
                let head_dim = hidden_size / heads;
                match head_dim {
                    1..=MAX_HEAD_DIM => Ok(head_dim),
                    _ => Err(self.error("attention.head_count", format!("makes heads {head_dim} wide"))),
                }
            }
            _ => Err(self.error(
                "attention.key_length",
                format!("is missing, and embedding_length {hidden_size} is not a multiple of head_count"),
            )),
        }
    }

    /// Elements of a head that turn.
    pub(crate) fn rotary_dim(&self) -> Result<usize, LoadError> {
        let head_dim = self.key_head_dim()?;
        let rotary_dim = self.opt_usize("rope.dimension_count")?.unwrap_or(head_dim);
        if rotary_dim > head_dim || !rotary_dim.is_multiple_of(2) {
            return Err(self.error(
                "rope.dimension_count",
                format!("is {rotary_dim}, expected an even number up to the head width {head_dim}"),
            ));
        }
        Ok(rotary_dim)
    }

    /// Which layers slide: by the file's pattern, or else all but every `pattern`th.
    pub(crate) fn slides(&self, pattern: usize) -> Result<Vec<bool>, LoadError> {
        let key = "attention.sliding_window_pattern";
        let layers = self.layers()?;
        if let Some(Value::Array(values)) = self.get(key) {
            let flags: Option<Vec<bool>> = values
                .iter()
                .map(|value| if let Value::Bool(flag) = value { Some(*flag) } else { None })
                .collect();
            return flags
                .filter(|flags| flags.len() == layers)
                .ok_or_else(|| self.error(key, format!("is not a list of {layers} booleans")));
        }
        let pattern = self.opt_usize(key)?.unwrap_or(pattern);
        Ok((0..layers).map(|layer| (layer + 1) % pattern != 0).collect())
    }

    /// The rotation of all layers.
    pub(crate) fn rope(&self, default_theta: f64) -> Result<Rope, LoadError> {
        let theta = self.opt_f64("rope.freq_base")?.unwrap_or(default_theta);
        let rotary_dim = self.rotary_dim()?;
        let factor = match self.opt_f64_or_off("rope.scaling.factor")? {
            Some(factor) => Some(factor),
            None => self.opt_f64_or_off("rope.scale_linear")?,
        };
        let factor = factor.filter(|factor| *factor != 1.0);
        let scaling = match (self.get("rope.scaling.type"), factor) {
            (Some(Value::String(kind)), Some(factor)) if kind == "yarn" => self.yarn(factor)?,
            (None, Some(factor)) => RopeScaling::Linear { factor },
            (Some(Value::String(kind)), Some(factor)) if kind == "linear" => RopeScaling::Linear { factor },
            (Some(Value::String(kind)), _) if !matches!(kind.as_str(), "none" | "linear" | "yarn") => {
                return Err(self
                    .error("rope.scaling.type", format!("is {kind}; supported are none, linear and yarn")));
            }
            _ => RopeScaling::None,
        };
        if self.files.contains(ROPE_FREQS) {
            if scaling != RopeScaling::None {
                return Err(
                    self.error("rope.scaling.type", format!("is given, and so is tensor {ROPE_FREQS}"))
                );
            }
            let entry = self.files.entry(ROPE_FREQS, &[rotary_dim / 2])?;
            let factors = read_floats(&self.files, ROPE_FREQS, entry)?;
            return Ok(Rope::new(theta, rotary_dim, &RopeScaling::PerFrequency(factors)));
        }
        Ok(Rope::new(theta, rotary_dim, &scaling))
    }

    fn yarn(&self, factor: f64) -> Result<RopeScaling, LoadError> {
        let number = |key: &str, default: f64| Ok::<_, LoadError>(self.opt_f64(key)?.unwrap_or(default));
        for (key, only) in [("rope.scaling.yarn_log_multiplier", 0.0), ("rope.scaling.yarn_ext_factor", 1.0)]
        {
            if number(key, only)? != only {
                return Err(self.error(key, format!("is not {only}, which is not supported")));
            }
        }
        let original_max_len = match self.opt_usize("rope.scaling.original_context_length")? {
            Some(len) => len,
            None => self.usize("context_length")?,
        };
        Ok(RopeScaling::Yarn {
            factor,
            beta_fast: number("rope.scaling.yarn_beta_fast", 32.0)?,
            beta_slow: number("rope.scaling.yarn_beta_slow", 1.0)?,
            original_max_len: original_max_len as f64,
            attention_factor: number("rope.scaling.attn_factor", 1.0)? * (0.1 * factor.ln() + 1.0),
            truncate: true,
        })
    }

    /// Longest sequence the model was made for. The file's length includes the scaling, unless it is
    /// the very length that yarn starts from.
    pub(crate) fn max_model_len(&self) -> Result<usize, LoadError> {
        let len = self.usize("context_length")?;
        let original = self.opt_usize("rope.scaling.original_context_length")?;
        match (self.opt_f64_or_off("rope.scaling.factor")?, original) {
            (Some(factor), Some(original)) if original == len && factor > 1.0 => {
                Ok((len as f64 * factor) as usize)
            }
            _ => Ok(len),
        }
    }
}
