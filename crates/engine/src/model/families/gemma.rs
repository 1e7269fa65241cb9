//! Gemma 2 (soft caps) and Gemma 3 (norms on queries and keys, two RoPE bases). Both have norms before
//! and behind each block, scaled embeddings, and windows on most layers.

use serde_json::Value;

use super::gguf::GgufConfig;
use super::hf::{HfConfig, tied};
use crate::error::LoadError;
use crate::model::mlp::Activation;
use crate::model::rope::{Rope, RopeScaling};
use crate::model::spec::DecoderSpec;

/// Every how many layers one is full.
const GEMMA2_PATTERN: usize = 2;
const GEMMA3_PATTERN: usize = 6;
/// Of layers that slide.
const GEMMA3_LOCAL_THETA: f64 = 10_000.0;

pub(crate) fn gemma2_from_hf(config: &HfConfig) -> Result<DecoderSpec, LoadError> {
    let spec = config.plain(1e-6, config.rope(10_000.0, false)?)?;
    Ok(DecoderSpec {
        attention_soft_cap: soft_cap(config, "attn_logit_softcapping", Some(50.0))?,
        logits_soft_cap: soft_cap(config, "final_logit_softcapping", Some(30.0))?,
        ..gemma_from_hf(config, spec)?
    })
}

pub(crate) fn gemma3_from_hf(config: &HfConfig) -> Result<DecoderSpec, LoadError> {
    let parameters = config.get("rope_parameters");
    let (full, sliding) = match parameters.filter(|p| p.get("full_attention").is_some()) {
        Some(nested) => {
            let of = |kind: &str| nested.get(kind).cloned().unwrap_or(Value::Null);
            (of("full_attention"), of("sliding_attention"))
        }
        // Before transformers 5: the scaling is that of the full layers.
        None => {
            let scaling = parameters.or_else(|| config.get("rope_scaling")).cloned();
            (scaling.unwrap_or(Value::Null), Value::Null)
        }
    };
    let theta = config.opt_f64("rope_theta")?.unwrap_or(1_000_000.0);
    let local_theta = config.opt_f64("rope_local_base_freq")?.unwrap_or(GEMMA3_LOCAL_THETA);
    let pattern = match config.opt_usize("sliding_window_pattern")? {
        Some(pattern) => pattern,
        None => config.opt_usize("_sliding_window_pattern")?.unwrap_or(GEMMA3_PATTERN),
    };
    let mut spec = config.plain(1e-6, config.rope_of(&full, theta, false)?)?;
    spec.ropes.push(config.rope_of(&sliding, local_theta, false)?);
    for (layer, slides) in spec.layers.iter_mut().zip(config.slides(pattern)) {
        layer.rope = usize::from(slides);
    }
    Ok(DecoderSpec {
        qk_norm: true,
        attention_soft_cap: soft_cap(config, "attn_logit_softcapping", None)?,
        logits_soft_cap: soft_cap(config, "final_logit_softcapping", None)?,
        ..gemma_from_hf(config, spec)?
    })
}

fn gemma_from_hf(config: &HfConfig, spec: DecoderSpec) -> Result<DecoderSpec, LoadError> {
    config.activation("hidden_activation", &["gelu_pytorch_tanh"])?;
    if config.flag("use_bidirectional_attention")? {
        return Err(config.error("use_bidirectional_attention", "is true, only causal models are supported"));
    }
    let attention_bias = config.flag("attention_bias")?;
    let scalar = config.opt_f64("query_pre_attn_scalar")?.unwrap_or(256.0);
    Ok(DecoderSpec {
        tied: tied(&config.root, true),
        norm_minus_one: true,
        sm_scale: (1.0 / scalar.sqrt()) as f32,
        qkv_bias: attention_bias,
        out_bias: attention_bias,
        ..gemma(spec)
    })
}

/// null switches it off.
fn soft_cap(config: &HfConfig, field: &str, default: Option<f64>) -> Result<Option<f32>, LoadError> {
    let cap = match config.text().get(field) {
        Some(Value::Null) => None,
        _ => config.opt_f64(field)?.or(default),
    };
    Ok(cap.map(|cap| cap as f32))
}

/// What both have in whatever file.
fn gemma(spec: DecoderSpec) -> DecoderSpec {
    DecoderSpec {
        activation: Activation::GeluTanh,
        embed_scale: Some((spec.hidden_size as f32).sqrt()),
        post_norms: true,
        ..spec
    }
}

/// The converter has added the one to the norm weights.
pub(crate) fn gemma2_from_gguf(config: &GgufConfig) -> Result<DecoderSpec, LoadError> {
    let mut spec = config.plain(config.rope(10_000.0)?)?;
    let window = config.opt_usize("attention.sliding_window")?.unwrap_or(4096);
    for (layer, slides) in spec.layers.iter_mut().zip(config.slides(GEMMA2_PATTERN)?) {
        layer.attention.window = slides.then_some(window);
    }
    Ok(DecoderSpec {
        sm_scale: scale_from_gguf(&spec, 46),
        attention_soft_cap: config.soft_cap("attn_logit_softcapping", Some(50.0))?,
        logits_soft_cap: config.soft_cap("final_logit_softcapping", Some(30.0))?,
        ..gemma(spec)
    })
}

pub(crate) fn gemma3_from_gguf(config: &GgufConfig) -> Result<DecoderSpec, LoadError> {
    let mut spec = config.plain(config.rope(1_000_000.0)?)?;
    let local_theta = config.opt_f64("rope.freq_base_swa")?.unwrap_or(GEMMA3_LOCAL_THETA);
    spec.ropes.push(Rope::new(local_theta, config.rotary_dim()?, &RopeScaling::None));
    if let Some(window) = config.opt_usize("attention.sliding_window")? {
        for (layer, slides) in spec.layers.iter_mut().zip(config.slides(GEMMA3_PATTERN)?) {
            layer.attention.window = slides.then_some(window);
            layer.rope = usize::from(slides);
        }
    }
    Ok(DecoderSpec {
        sm_scale: scale_from_gguf(&spec, 62),
        qk_norm: true,
        logits_soft_cap: config.soft_cap("final_logit_softcapping", None)?,
        ..gemma(spec)
    })
}

/// GGUF files do not carry `query_pre_attn_scalar`; it differs from the head width in the 27B models
/// only, which are known by their number of layers.
fn scale_from_gguf(spec: &DecoderSpec, layers_of_27b: usize) -> f32 {
    match spec.layers.first() {
        Some(layer) if spec.layers.len() == layers_of_27b => {
            1.0 / ((spec.hidden_size / layer.attention.num_qo_heads) as f32).sqrt()
        }
        _ => spec.sm_scale,
    }
}
