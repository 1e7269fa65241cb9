//! Llama, and Mistral, which is Llama with a sliding window.

use super::hf::HfConfig;
use crate::config::AttentionSpec;
use crate::error::LoadError;
use crate::model::mlp::Activation;
use crate::model::spec::{DecoderSpec, LayerSpec};

pub(crate) fn from_hf(config: &HfConfig) -> Result<DecoderSpec, LoadError> {
    let heads = config.heads()?;
    let window = config.opt_usize("sliding_window")?;
    let layer_types = config.get("layer_types").and_then(|types| types.as_array());
    let layers = (0..config.usize("num_hidden_layers")?)
        .map(|layer| {
            let slides = match layer_types {
                Some(types) => types.get(layer).is_some_and(|kind| kind == "sliding_attention"),
                None => true,
            };
            LayerSpec { attention: AttentionSpec { window: window.filter(|_| slides), ..heads }, rope: 0 }
        })
        .collect();
    let attention_bias = config.opt_bool("attention_bias")?.unwrap_or(false);
    Ok(DecoderSpec {
        hidden_size: config.usize("hidden_size")?,
        intermediate_size: config.usize("intermediate_size")?,
        vocab_size: config.usize("vocab_size")?,
        norm_eps: config.opt_f64("rms_norm_eps")?.unwrap_or(1e-6) as f32,
        norm_minus_one: false,
        activation: Activation::Silu,
        embed_scale: None,
        tied: config.opt_bool("tie_word_embeddings")?.unwrap_or(false),
        qkv_bias: attention_bias,
        out_bias: attention_bias,
        mlp_bias: config.opt_bool("mlp_bias")?.unwrap_or(false),
        fused: false,
        qk_norm: false,
        post_norms: false,
        sm_scale: 1.0 / (heads.key_head_dim as f32).sqrt(),
        attention_soft_cap: None,
        logits_soft_cap: None,
        ropes: vec![config.rope(heads.key_head_dim, 10_000.0)?],
        layers,
    })
}
