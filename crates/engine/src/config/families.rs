//! From `model_type` to the reader of the family.

use std::cell::RefCell;

use serde_json::Value;
use turboquant::format::NativeDtype;

use super::{
    CacheSpec, ConfigError, ModelConfig, dense,
    fields::{Fields, short},
    hybrid, latent, mixed, parameters,
};

/// A config as its family's reader gets it: the text model's fields.
pub(super) struct Source<'a> {
    pub fields: Fields<'a>,
    /// `model_type`
    pub family: String,
    pub dtype: NativeDtype,
}

/// What a family's reader makes of it.
#[derive(Default)]
pub(super) struct Geometry {
    pub layers: Vec<CacheSpec>,
    pub max_model_len: usize,
    pub chunked_windows: bool,
    pub learned_sinks: bool,
}

type Reader = fn(&Source<'_>) -> Result<Geometry, ConfigError>;

/// Families that are more than a row of [`dense::FAMILIES`].
const READERS: &[(&[&str], Reader)] = &[
    (&["gemma3", "gemma3_text"], mixed::gemma3),
    (&["gemma3n", "gemma3n_text"], mixed::gemma3n),
    (&["gemma4", "gemma4_text"], mixed::gemma4),
    (&["llama4", "llama4_text"], mixed::llama4),
    (&["mimo_v2_flash", "mimo_v2"], mixed::mimo_v2),
    (&["deci", "decilm", "nemotron-nas"], mixed::deci),
    (
        &["deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "minicpm3", "youtu", "mistral4"],
        latent::mla,
    ),
    (&["deepseek_v32", "glm_moe_dsa"], latent::sparse_mla),
    (&["deepseek_v4"], latent::deepseek_v4),
    (&["qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"], hybrid::qwen3_next),
    (&["olmo_hybrid"], hybrid::olmo_hybrid),
    (&["kimi_linear", "kimi_k3"], hybrid::kimi_linear),
    (&["bailing_hybrid"], hybrid::bailing_hybrid),
    (&["minimax", "minimax_m1", "minimax_text_01"], hybrid::minimax),
    (&["jamba"], hybrid::jamba),
    (&["zamba"], hybrid::zamba),
    (&["zamba2"], hybrid::zamba2),
    (&["bamba"], hybrid::bamba),
    (&["granitemoehybrid"], hybrid::granite_hybrid),
    (&["falcon_h1"], hybrid::falcon_h1),
    (&["nemotron_h"], hybrid::nemotron_h),
    (&["lfm2", "lfm2_vl", "lfm2_moe"], hybrid::lfm2),
    (&["recurrent_gemma"], hybrid::recurrent_gemma),
    (&["mamba", "falcon_mamba"], hybrid::mamba),
    (&["mamba2"], hybrid::mamba2),
];

/// Families of files whose `model_type` is absent or not known.
const ARCHITECTURES: &[(&str, &str)] = &[
    ("LlamaForCausalLM", "llama"),
    ("MistralForCausalLM", "mistral"),
    ("MixtralForCausalLM", "mixtral"),
    ("Qwen2ForCausalLM", "qwen2"),
    ("Qwen2MoeForCausalLM", "qwen2_moe"),
    ("Qwen3ForCausalLM", "qwen3"),
    ("Qwen3MoeForCausalLM", "qwen3_moe"),
    ("Qwen3NextForCausalLM", "qwen3_next"),
    ("PhiForCausalLM", "phi"),
    ("Phi3ForCausalLM", "phi3"),
    ("GemmaForCausalLM", "gemma"),
    ("Gemma2ForCausalLM", "gemma2"),
    ("Gemma3ForCausalLM", "gemma3_text"),
    ("GptOssForCausalLM", "gpt_oss"),
    ("DeepseekV2ForCausalLM", "deepseek_v2"),
    ("DeepseekV3ForCausalLM", "deepseek_v3"),
    ("DeepseekV32ForCausalLM", "deepseek_v32"),
    ("DeepseekV4ForCausalLM", "deepseek_v4"),
    ("DeciLMForCausalLM", "deci"),
    ("MiniMaxM1ForCausalLM", "minimax_m1"),
    ("MiniMaxText01ForCausalLM", "minimax_text_01"),
    ("MiniMaxM2ForCausalLM", "minimax_m2"),
    ("NemotronHForCausalLM", "nemotron_h"),
    ("JambaForCausalLM", "jamba"),
    ("BambaForCausalLM", "bamba"),
    ("Lfm2ForCausalLM", "lfm2"),
];

/// Every `model_type` that is read, sorted.
pub fn known_model_types() -> Vec<&'static str> {
    let dense = dense::FAMILIES.iter().flat_map(|(names, _)| names.iter());
    let mut names: Vec<&str> =
        dense.chain(READERS.iter().flat_map(|(names, _)| names.iter())).copied().collect();
    names.sort_unstable();
    names
}

fn is_known(name: &str) -> bool {
    let listed = |names: &[&str]| names.contains(&name);
    dense::FAMILIES.iter().any(|(names, _)| listed(names)) || READERS.iter().any(|(names, _)| listed(names))
}

/// Reads the root object of a config.
pub(super) fn read(root: &Value) -> Result<ModelConfig, ConfigError> {
    let Value::Object(map) = root else {
        return Err(ConfigError::WrongType {
            path: "the config".to_owned(),
            expected: "an object".to_owned(),
            got: short(root),
        });
    };
    let notices = RefCell::new(Vec::new());
    let outer = Fields::root(map, &notices);
    let fields = text_model(&outer)?;
    let family = family(&fields, &outer)?;
    let dtype = dtype(&fields, &outer)?;
    let source = Source { fields, family, dtype };
    let row = dense::FAMILIES.iter().find(|(names, _)| names.contains(&source.family.as_str()));
    let reader = READERS.iter().find(|(names, _)| names.contains(&source.family.as_str()));
    let mut geometry = match (row, reader) {
        (Some((_, row)), _) => dense::read(&source, row)?,
        (None, Some((_, reader))) => reader(&source)?,
        (None, None) => return Err(unknown(&source.fields, &outer)),
    };
    drop_idle_windows(&mut geometry, &source.fields);
    let parameters = parameters::estimate(&source, &outer, &geometry.layers)?;
    let Source { fields, family, .. } = source;
    drop(fields);
    drop(outer);
    Ok(ModelConfig {
        model_type: family,
        dtype,
        max_model_len: geometry.max_model_len,
        layers: geometry.layers,
        chunked_windows: geometry.chunked_windows,
        learned_sinks: geometry.learned_sinks,
        parameters,
        notices: notices.into_inner(),
    })
}

/// The language model's part of a multimodal config, else the whole.
fn text_model<'a>(outer: &Fields<'a>) -> Result<Fields<'a>, ConfigError> {
    for key in ["text_config", "llm_config", "language_config"] {
        if let Some(inner) = outer.object(key)? {
            return Ok(inner);
        }
    }
    Ok(outer.clone())
}

/// The text model's `model_type`, else the outer one, else the family of the architecture.
fn family(fields: &Fields<'_>, outer: &Fields<'_>) -> Result<String, ConfigError> {
    for fields in [fields, outer] {
        if let Some(name) = fields.text("model_type")?
            && is_known(name)
        {
            return Ok(name.to_owned());
        }
    }
    for fields in [fields, outer] {
        for architecture in fields.texts("architectures")?.unwrap_or_default() {
            if let Some((_, family)) = ARCHITECTURES.iter().find(|(name, _)| *name == architecture) {
                return Ok((*family).to_owned());
            }
        }
    }
    Err(unknown(fields, outer))
}

fn unknown(fields: &Fields<'_>, outer: &Fields<'_>) -> ConfigError {
    let says = |key: &str| {
        let value = fields.value(key).or_else(|| outer.value(key));
        value.map_or("absent".to_owned(), |value| match value {
            Value::Array(list) if list.len() == 1 => short(&list[0]),
            other => short(other),
        })
    };
    ConfigError::UnknownFamily {
        path: fields.path("model_type"),
        got: says("model_type"),
        architectures: says("architectures"),
        known: known_model_types().join(", "),
    }
}

/// `dtype` or `torch_dtype`, of the text model or of the whole; bf16 where none stands there.
fn dtype(fields: &Fields<'_>, outer: &Fields<'_>) -> Result<NativeDtype, ConfigError> {
    for fields in [fields, outer] {
        for key in ["dtype", "torch_dtype"] {
            if let Some(name) = fields.text(key)? {
                return match name.strip_prefix("torch.").unwrap_or(name) {
                    "bfloat16" | "auto" => Ok(NativeDtype::Bf16),
                    "float16" | "half" => Ok(NativeDtype::F16),
                    "float32" | "float" => Ok(NativeDtype::F32),
                    other => {
                        let problem =
                            format!("'{other}' is no dtype of a cache; use bfloat16, float16 or float32");
                        Err(fields.inconsistent(key, problem))
                    }
                };
            }
        }
    }
    fields.notice("the config names no dtype: auto rows are bf16".to_owned());
    Ok(NativeDtype::Bf16)
}

/// A window longer than any sequence is none.
fn drop_idle_windows(geometry: &mut Geometry, fields: &Fields<'_>) {
    let mut idle = None;
    for layer in &mut geometry.layers {
        if let CacheSpec::Attention(spec) | CacheSpec::Hybrid(spec, _) = layer
            && spec.window.is_some_and(|window| window > geometry.max_model_len)
        {
            idle = spec.window.take();
        }
    }
    if let Some(window) = idle {
        fields.notice(format!(
            "a window of {window} tokens is longer than the context of {}: those layers are full",
            geometry.max_model_len
        ));
    }
}
