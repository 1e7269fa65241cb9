//! Typed access to `config.json`.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::config::{AttentionSpec, ModelConfig};
use crate::error::LoadError;
use crate::model::rope::{Rope, RopeScaling};
use crate::model::spec::{DecoderSpec, LayerSpec};

/// Sizes are at most this, so that products of two do not overflow.
pub(crate) const MAX_SIZE: usize = 1 << 31;

/// A `config.json`. Fields are looked up in `text_config` where there is one; null is absent.
#[derive(Debug)]
pub(crate) struct HfConfig {
    pub(crate) path: PathBuf,
    pub(crate) root: Value,
    /// Heads and windows of each layer, dtype, context length.
    pub(crate) geometry: ModelConfig,
}

impl HfConfig {
    pub(crate) fn new(path: PathBuf, root: Value) -> Result<Self, LoadError> {
        let geometry = ModelConfig::from_hf_file(&path)
            .map_err(|source| LoadError::Geometry { path: path.clone(), source: Box::new(source) })?;
        Ok(HfConfig { path, root, geometry })
    }

    /// The part that describes the language model.
    pub(crate) fn text(&self) -> &Value {
        text_config(&self.root)
    }

    /// A field that is there and not null.
    pub(crate) fn get(&self, field: &str) -> Option<&Value> {
        self.text().get(field).filter(|value| !value.is_null())
    }

    pub(crate) fn error(&self, field: &str, reason: impl Into<String>) -> LoadError {
        LoadError::Config { path: self.path.clone(), field: field.into(), reason: reason.into() }
    }

    fn typed<'a, T>(
        &'a self,
        field: &str,
        kind: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, LoadError> {
        self.get(field)
            .map(|value| read(value).ok_or_else(|| self.error(field, format!("is {value}, expected {kind}"))))
            .transpose()
    }

    fn required<T>(&self, field: &str, value: Option<T>) -> Result<T, LoadError> {
        value.ok_or_else(|| self.error(field, "is missing"))
    }

    pub(crate) fn opt_usize(&self, field: &str) -> Result<Option<usize>, LoadError> {
        self.typed(field, "a positive whole number of at most 2^31", |value| {
            value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| (1..=MAX_SIZE).contains(n))
        })
    }

    pub(crate) fn usize(&self, field: &str) -> Result<usize, LoadError> {
        let value = self.opt_usize(field)?;
        self.required(field, value)
    }

    pub(crate) fn opt_f64(&self, field: &str) -> Result<Option<f64>, LoadError> {
        self.typed(field, "a positive number", |value| value.as_f64().filter(|x| *x > 0.0))
    }

    pub(crate) fn flag(&self, field: &str) -> Result<bool, LoadError> {
        Ok(self.typed(field, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    /// The activation, which must be one of `names`.
    pub(crate) fn activation(&self, field: &str, names: &[&str]) -> Result<(), LoadError> {
        match self.typed(field, "a string", Value::as_str)? {
            Some(other) if !names.contains(&other) => {
                Err(self.error(field, format!("is {other}, supported is {}", names.join(" or "))))
            }
            _ => Ok(()),
        }
    }

    /// A decoder without special features, rotated alike in all layers.
    pub(crate) fn plain(&self, default_eps: f64, rope: Rope) -> Result<DecoderSpec, LoadError> {
        let layers =
            self.attention()?.into_iter().map(|attention| LayerSpec { attention, rope: 0 }).collect();
        Ok(DecoderSpec {
            tied: tied(&self.root, false),
            ..DecoderSpec::plain(
                self.usize("hidden_size")?,
                self.usize("intermediate_size")?,
                self.usize("vocab_size")?,
                self.opt_f64("rms_norm_eps")?.unwrap_or(default_eps) as f32,
                vec![rope],
                layers,
            )
        })
    }

    fn attention(&self) -> Result<Vec<AttentionSpec>, LoadError> {
        (self.geometry.layers.iter())
            .map(|layer| {
                layer.attention().copied().ok_or_else(|| {
                    self.error("layer_types", "has layers without keys and values, which this family has not")
                })
            })
            .collect()
    }

    /// Width of a key, the same in all layers of the supported families.
    pub(crate) fn head_dim(&self) -> Result<usize, LoadError> {
        let first = self.attention()?.first().map(|attention| attention.key_head_dim);
        self.required("num_hidden_layers", first)
    }

    /// Which layers slide, where it matters beyond the window itself. Without `layer_types`, all but
    /// every `pattern`th.
    pub(crate) fn slides(&self, pattern: usize) -> Vec<bool> {
        let types = self.get("layer_types").and_then(Value::as_array);
        (0..self.geometry.layers.len())
            .map(|layer| match types {
                Some(types) => types.get(layer).is_some_and(|kind| kind == "sliding_attention"),
                None => (layer + 1) % pattern != 0,
            })
            .collect()
    }

    /// The rotation of all layers. transformers' own rotation without scaling knows
    /// `partial_rotary_factor` in some families only.
    pub(crate) fn rope(&self, default_theta: f64, partial: bool) -> Result<Rope, LoadError> {
        let empty = Value::Null;
        let parameters = self.get("rope_parameters").or_else(|| self.get("rope_scaling")).unwrap_or(&empty);
        let theta = self.opt_f64("rope_theta")?.unwrap_or(default_theta);
        self.rope_of(parameters, theta, partial)
    }

    /// The rotation that `parameters` describe.
    pub(crate) fn rope_of(
        &self,
        parameters: &Value,
        default_theta: f64,
        partial: bool,
    ) -> Result<Rope, LoadError> {
        let field = "rope_parameters";
        // Wrong parameters would rotate by a default without a word.
        match parameters {
            Value::Null => {}
            Value::Object(entries) if !entries.values().any(Value::is_object) => {}
            Value::Object(_) => {
                return Err(self.error(field, "differs by kind of layer, which this family does not know"));
            }
            other => return Err(self.error(field, format!("is {other}, expected an object"))),
        }
        let opt = |name: &str| match parameters.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => value.as_f64().filter(|x| *x > 0.0).map(Some).ok_or_else(|| {
                self.error(&format!("{field}.{name}"), format!("is {value}, expected a positive number"))
            }),
        };
        let required =
            |name: &str| opt(name)?.ok_or_else(|| self.error(&format!("{field}.{name}"), "is missing"));
        let kind = match parameters.get("rope_type").or_else(|| parameters.get("type")) {
            None | Some(Value::Null) => "default",
            Some(Value::String(kind)) => kind,
            Some(other) => return Err(self.error(field, format!("has the type {other}, expected a string"))),
        };
        let max_len = || self.usize("max_position_embeddings").map(|len| len as f64);
        let original_max_len = || match self.opt_usize("original_max_position_embeddings")? {
            Some(len) => Ok(len as f64),
            None => match opt("original_max_position_embeddings")? {
                Some(len) => Ok(len),
                None => max_len(),
            },
        };
        let scaling = match kind {
            "default" => RopeScaling::None,
            "linear" => RopeScaling::Linear { factor: required("factor")? },
            "llama3" => RopeScaling::Llama3 {
                factor: required("factor")?,
                low_freq_factor: required("low_freq_factor")?,
                high_freq_factor: required("high_freq_factor")?,
                original_max_len: original_max_len()?,
            },
            "yarn" => {
                let original_max_len = original_max_len()?;
                let factor = match opt("factor")? {
                    Some(factor) => factor,
                    None => max_len()? / original_max_len,
                };
                let mscale = |by: f64| if factor <= 1.0 { 1.0 } else { 0.1 * by * factor.ln() + 1.0 };
                let attention_factor =
                    match (opt("attention_factor")?, opt("mscale")?, opt("mscale_all_dim")?) {
                        (Some(given), ..) => given,
                        (None, Some(one), Some(all)) => mscale(one) / mscale(all),
                        _ => mscale(1.0),
                    };
                RopeScaling::Yarn {
                    factor,
                    beta_fast: opt("beta_fast")?.unwrap_or(32.0),
                    beta_slow: opt("beta_slow")?.unwrap_or(1.0),
                    original_max_len,
                    attention_factor,
                    truncate: parameters.get("truncate").and_then(Value::as_bool).unwrap_or(true),
                }
            }
            "dynamic" | "longrope" | "su" => {
                return Err(self.error(
                    field,
                    format!(
                        "has type {kind}, whose frequencies change with the length of the sequence: keys that are already cached would be wrong; supported are default, linear, llama3, yarn"
                    ),
                ));
            }
            other => {
                return Err(self.error(
                    field,
                    format!("has the unknown type {other}; supported are default, linear, llama3, yarn"),
                ));
            }
        };
        let theta = opt("rope_theta")?.unwrap_or(default_theta);
        let head_dim = self.head_dim()?;
        let partial = if partial || kind != "default" {
            opt("partial_rotary_factor")?.or(self.opt_f64("partial_rotary_factor")?).unwrap_or(1.0)
        } else {
            1.0
        };
        let rotary_dim = (head_dim as f64 * partial) as usize;
        if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) || rotary_dim > head_dim {
            return Err(self.error(
                "partial_rotary_factor",
                format!(
                    "turns {rotary_dim} of {head_dim} elements of a head, which is not an even part of it"
                ),
            ));
        }
        Ok(Rope::new(theta, rotary_dim, &scaling))
    }
}

/// The language model's part of a `config.json`.
pub(crate) fn text_config(root: &Value) -> &Value {
    match root.get("text_config") {
        Some(text) if text.is_object() => text,
        _ => root,
    }
}

/// Of the language model, or else of the whole; empty where there is none.
pub(crate) fn model_type(root: &Value) -> &str {
    [text_config(root), root].iter().find_map(|config| config.get("model_type")?.as_str()).unwrap_or_default()
}

/// Whether the output head is the embedding matrix: the language model's own flag, or else that of the
/// whole, or else the family's default.
pub(crate) fn tied(root: &Value, default: bool) -> bool {
    [text_config(root), root]
        .iter()
        .flat_map(|config| ["tie_word_embeddings", "tie_embedding"].map(|field| config.get(field)))
        .find_map(|flag| flag?.as_bool())
        .unwrap_or(default)
}

/// Reads a JSON file.
pub(crate) fn read_json(path: &Path) -> Result<Value, LoadError> {
    let text = std::fs::read_to_string(path).map_err(|source| LoadError::Io { path: path.into(), source })?;
    crate::config::parse_json(&text)
        .map_err(|error| LoadError::Malformed { path: path.into(), reason: error.to_string() })
}
