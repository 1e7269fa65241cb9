//! Typed access to `config.json`.

use std::path::{Path, PathBuf};

use serde_json::Value;
use turboquant::format::NativeDtype;

use crate::config::AttentionSpec;
use crate::error::LoadError;
use crate::model::rope::{Rope, RopeScaling};

/// A `config.json`. Fields are looked up in `text_config` where there is one; null is absent.
#[derive(Debug)]
pub(crate) struct HfConfig {
    pub(crate) path: PathBuf,
    root: Value,
}

impl HfConfig {
    pub(crate) fn read(folder: &Path) -> Result<Self, LoadError> {
        let path = folder.join("config.json");
        if !path.is_file() {
            return Err(LoadError::NotAModel { path: folder.into() });
        }
        let text =
            std::fs::read_to_string(&path).map_err(|source| LoadError::Io { path: path.clone(), source })?;
        let root = serde_json::from_str(&text)
            .map_err(|error| LoadError::Malformed { path: path.clone(), reason: error.to_string() })?;
        Ok(HfConfig { path, root })
    }

    /// The part that describes the language model.
    fn text(&self) -> &Value {
        match self.root.get("text_config") {
            Some(text) if text.is_object() => text,
            _ => &self.root,
        }
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
        self.typed(field, "a positive whole number", |value| {
            value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0)
        })
    }

    pub(crate) fn usize(&self, field: &str) -> Result<usize, LoadError> {
        let value = self.opt_usize(field)?;
        self.required(field, value)
    }

    pub(crate) fn opt_f64(&self, field: &str) -> Result<Option<f64>, LoadError> {
        self.typed(field, "a number", Value::as_f64)
    }

    pub(crate) fn opt_bool(&self, field: &str) -> Result<Option<bool>, LoadError> {
        self.typed(field, "true or false", Value::as_bool)
    }

    pub(crate) fn opt_str(&self, field: &str) -> Result<Option<&str>, LoadError> {
        self.typed(field, "a string", Value::as_str)
    }

    pub(crate) fn model_type(&self) -> Result<&str, LoadError> {
        let model_type = self.opt_str("model_type")?;
        self.required("model_type", model_type)
    }

    /// Of the weights as published: `dtype`, or `torch_dtype` before transformers 5.
    pub(crate) fn dtype(&self) -> Result<NativeDtype, LoadError> {
        let field = if self.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
        match self.opt_str(field)? {
            Some("float32") => Ok(NativeDtype::F32),
            Some("float16") => Ok(NativeDtype::F16),
            Some("bfloat16") | None => Ok(NativeDtype::Bf16),
            Some(other) => {
                Err(self.error(field, format!("is {other}, expected float32, float16 or bfloat16")))
            }
        }
    }

    /// Heads of every layer; windows are left to the family.
    pub(crate) fn heads(&self) -> Result<AttentionSpec, LoadError> {
        let num_qo_heads = self.usize("num_attention_heads")?;
        let num_kv_heads = self.opt_usize("num_key_value_heads")?.unwrap_or(num_qo_heads);
        if !num_qo_heads.is_multiple_of(num_kv_heads) {
            return Err(self.error(
                "num_key_value_heads",
                format!("is {num_kv_heads}, which does not divide num_attention_heads {num_qo_heads}"),
            ));
        }
        let head_dim = match self.opt_usize("head_dim")? {
            Some(head_dim) => head_dim,
            None => {
                let hidden = self.usize("hidden_size")?;
                if !hidden.is_multiple_of(num_qo_heads) {
                    return Err(self.error(
                        "head_dim",
                        format!("is missing, and hidden_size {hidden} is not a multiple of num_attention_heads {num_qo_heads}"),
                    ));
                }
                hidden / num_qo_heads
            }
        };
        Ok(AttentionSpec {
            num_qo_heads,
            num_kv_heads,
            key_head_dim: head_dim,
            value_head_dim: head_dim,
            window: None,
        })
    }

    /// The rotation; `default_theta` is the class default.
    pub(crate) fn rope(&self, head_dim: usize, default_theta: f64) -> Result<Rope, LoadError> {
        let parameters = self.get("rope_parameters").or_else(|| self.get("rope_scaling"));
        let number = |field: &str| parameters.and_then(|p| p.get(field)).and_then(Value::as_f64);
        let theta = match number("rope_theta") {
            Some(theta) => theta,
            None => self.opt_f64("rope_theta")?.unwrap_or(default_theta),
        };
        Ok(Rope::new(theta, head_dim, &RopeScaling::None))
    }
}
