//! How many weights a model has, estimated from its config where no weights are at hand.
//!
//! Matrices are counted by the usual shapes of each kind of layer; norms, biases and small tables are
//! left out. Published sizes are met within a few per cent; a multimodal model's vision tower is not
//! counted.

use super::{
    CacheSpec, ConfigError, Source,
    fields::{Fields, MAX_WIDTH},
    kinds::{self, Kind},
};

/// An estimate of the weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ParameterEstimate {
    /// Weights of the language model.
    pub parameters: u64,
    /// Average bits of a weight: the file's `quantization_config`, else its dtype.
    pub bits: f32,
}

impl ParameterEstimate {
    /// Bytes of the weights.
    pub fn bytes(&self) -> u64 {
        (self.parameters as f64 * f64::from(self.bits) / 8.0) as u64
    }
}

/// Feed-forward blocks without a gate: two matrices and not three.
const UNGATED: [&str; 7] =
    ["phi", "gpt_neox", "starcoder2", "nemotron", "nemotron_h", "persimmon", "apertus"];
/// Classes whose `tie_word_embeddings` is true where the file does not say.
const TIED: [&str; 8] =
    ["gemma", "cohere", "lfm2", "zamba", "smollm3", "recurrent_gemma", "vaultgemma", "mamba"];

/// `None` where a field that most of the weights depend on is missing.
pub(super) fn estimate(
    source: &Source<'_>,
    outer: &Fields<'_>,
    layers: &[CacheSpec],
) -> Result<Option<ParameterEstimate>, ConfigError> {
    let fields = &source.fields;
    let (Some(hidden), Some(vocab)) =
        (fields.width("hidden_size")?, fields.integer("vocab_size", 1, 1 << 30)?)
    else {
        return Ok(None);
    };
    let Some(blocks) = feed_forward(source, hidden as f64, layers)? else { return Ok(None) };
    let tied_by_class = TIED.iter().any(|family| source.family.starts_with(family));
    let said = [fields, outer].into_iter().find_map(|fields| {
        ["tie_word_embeddings", "tie_embedding"]
            .into_iter()
            .find(|key| fields.value(key).is_some())
            .map(|key| (fields, key))
    });
    let tied = match said {
        Some((fields, key)) => fields.flag(key, false)?,
        None => tied_by_class,
    };
    let embeddings = hidden as f64 * vocab as f64 * if tied { 1.0 } else { 2.0 };
    let mut total = embeddings + blocks;
    let mut shared_attention = false;
    for layer in layers {
        // Zamba's attention is one block that all hybrid layers call.
        let once = source.family.starts_with("zamba") && layer.attention().is_some();
        if !(once && shared_attention) {
            total += attention(source, layer, hidden as f64)?;
            shared_attention |= once;
        }
        if layer.state().is_some() {
            total += recurrent(fields, hidden as f64)?;
        }
    }
    Ok(Some(ParameterEstimate { parameters: total as u64, bits: bits(source, outer)? }))
}

fn number(fields: &Fields<'_>, keys: &[&str]) -> Result<Option<f64>, ConfigError> {
    for key in keys {
        if let Some(number) = fields.integer(key, 0, MAX_WIDTH)? {
            return Ok(Some(number as f64));
        }
    }
    Ok(None)
}

/// Matrices of one layer's attention.
fn attention(source: &Source<'_>, layer: &CacheSpec, hidden: f64) -> Result<f64, ConfigError> {
    let fields = &source.fields;
    Ok(match layer {
        CacheSpec::Attention(spec) | CacheSpec::Hybrid(spec, _) => {
            let (heads, kv) = (spec.num_qo_heads as f64, spec.num_kv_heads as f64);
            let (key, value) = (spec.key_head_dim as f64, spec.value_head_dim as f64);
            let gate = if fields.flag("attn_output_gate", source.family.starts_with("qwen3_next"))? {
                2.0
            } else {
                1.0
            };
            let width = if source.family.starts_with("zamba") { 2.0 * hidden } else { hidden };
            width * (gate * heads * key + kv * (key + value)) + heads * value * hidden
        }
        CacheSpec::Latent { num_qo_heads, width, indexer_width, .. } => {
            let heads = *num_qo_heads as f64;
            let nope = number(fields, &["qk_nope_head_dim"])?.unwrap_or(128.0);
            let rope = number(fields, &["qk_rope_head_dim"])?.unwrap_or(0.0);
            let value = number(fields, &["v_head_dim"])?.unwrap_or(128.0);
            let rank = *width as f64 - rope;
            let query_rank = number(fields, &["q_lora_rank"])?.unwrap_or(0.0);
            let query = match query_rank > 0.0 {
                true => query_rank * (hidden + heads * (nope + rope)),
                false => hidden * heads * (nope + rope),
            };
            let index_heads = number(fields, &["index_n_heads"])?.unwrap_or(0.0);
            let indexer = *indexer_width as f64 * (query_rank * index_heads + hidden);
            query + hidden * *width as f64 + rank * heads * (nope + value) + heads * value * hidden + indexer
        }
        CacheSpec::Compressed(spec) => {
            let (heads, width) = (spec.num_qo_heads as f64, spec.width as f64);
            let query_rank = number(fields, &["q_lora_rank"])?.unwrap_or(hidden);
            let groups = number(fields, &["o_groups"])?.unwrap_or(1.0);
            let out_rank = number(fields, &["o_lora_rank"])?.unwrap_or(0.0);
            let compressor =
                if spec.ratio > 0 { 2.0 * hidden * (width + spec.indexer_width as f64) } else { 0.0 };
            query_rank * (hidden + heads * width)
                + hidden * width
                + out_rank * (heads * width + groups * hidden)
                + compressor
        }
        CacheSpec::Shared { .. } => hidden * hidden * 2.0,
        CacheSpec::Recurrent(_) | CacheSpec::None => 0.0,
    })
}

/// Projections of one recurrent layer, by the names of the fields that shape it.
fn recurrent(fields: &Fields<'_>, hidden: f64) -> Result<f64, ConfigError> {
    let linear = fields.object("linear_attn_config")?;
    if let Some(values) = number(fields, &["linear_num_value_heads"])? {
        let value = values * number(fields, &["linear_value_head_dim"])?.unwrap_or(0.0);
        let key = number(fields, &["linear_num_key_heads"])?.unwrap_or(0.0)
            * number(fields, &["linear_key_head_dim"])?.unwrap_or(0.0);
        return Ok(hidden * (2.0 * key + 3.0 * value));
    }
    let heads = match &linear {
        Some(linear) => number(linear, &["num_heads"])?,
        None => number(fields, &["linear_num_heads"])?,
    };
    if let Some(heads) = heads {
        let dim = match &linear {
            Some(linear) => number(linear, &["head_dim"])?,
            None => number(fields, &["linear_head_dim"])?,
        };
        let inner = heads * dim.unwrap_or(0.0);
        return Ok(4.0 * hidden * inner + 2.0 * dim.unwrap_or(0.0) * (hidden + inner));
    }
    if let Some(kernel) = number(fields, &["conv_L_cache"])? {
        return Ok(hidden * (4.0 * hidden + kernel));
    }
    let expand = number(fields, &["mamba_expand", "expand", "expansion_factor"])?;
    let heads = number(fields, &["mamba_num_heads", "mamba_n_heads"])?;
    let head_dim = number(fields, &["mamba_head_dim", "mamba_d_head"]).unwrap_or(None);
    let inner = number(fields, &["mamba_d_ssm"])?
        .or(heads.zip(head_dim).map(|(heads, dim)| heads * dim))
        .or(expand.map(|expand| expand * hidden));
    if let Some(inner) = inner {
        let state = number(fields, &["mamba_d_state", "ssm_state_size", "state_size"])?.unwrap_or(0.0);
        let groups = number(fields, &["n_groups", "mamba_n_groups", "mamba_ngroups"])?.unwrap_or(1.0);
        return Ok(hidden * (3.0 * inner + 2.0 * groups * state));
    }
    // Lightning attention: queries, keys, values, a gate and the output, each as wide as all heads.
    let heads = number(fields, &["num_attention_heads"])?.unwrap_or(0.0);
    let dim = number(fields, &["head_dim"])?.unwrap_or(0.0);
    Ok(5.0 * hidden * heads * dim)
}

/// Feed-forward blocks of all layers.
fn feed_forward(source: &Source<'_>, hidden: f64, layers: &[CacheSpec]) -> Result<Option<f64>, ConfigError> {
    let fields = &source.fields;
    let family = source.family.as_str();
    let matrices = if UNGATED.contains(&family) { 2.0 } else { 3.0 };
    let dense_width =
        number(fields, &["intermediate_size_mlp", "intermediate_size", "ffn_hidden_size", "block_ff_dim"])?;
    let experts = number(fields, &["num_experts", "n_routed_experts", "num_local_experts"])?
        .filter(|&experts| experts > 0.0);
    let expert_width = match number(fields, &["moe_intermediate_size", "intermediate_size"])? {
        Some(width) => Some(width),
        None => dense_width,
    };
    let expert_hidden = number(fields, &["routed_expert_hidden_size", "moe_latent_size"])?.unwrap_or(hidden);
    let shared = match number(
        fields,
        &[
            "moe_shared_expert_intermediate_size",
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
        ],
    )? {
        Some(width) => width,
        None => {
            number(fields, &["n_shared_experts", "num_shared_experts"])?.unwrap_or(0.0)
                * expert_width.unwrap_or(0.0)
        }
    };
    let mut dense_width = dense_width;
    if fields.flag("block_auto_adjust_ff_dim", false)? {
        // LFM2 publishes the width before it is cut to two thirds and rounded up.
        let multiple = number(fields, &["block_multiple_of"])?.unwrap_or(256.0).max(1.0);
        dense_width = dense_width.map(|width| (width * 2.0 / 3.0 / multiple).ceil() * multiple);
    }
    let dense = dense_width.map(|width| matrices * hidden * width);
    let sparse = experts.zip(expert_width).map(|(experts, width)| {
        let shared = if family == "llama4_text" || family == "llama4" { width } else { shared };
        matrices * (expert_hidden * experts * width + hidden * shared) + hidden * experts
    });
    let kinds =
        if family == "nemotron_h" { kinds::pattern(fields, "hybrid_override_pattern")? } else { None };
    if family == "nemotron_h" && kinds.is_none() {
        return Ok(None);
    }
    let mut total = 0.0;
    for layer in 0..layers.len() {
        let block = match &kinds {
            Some(kinds) if kinds[layer] != Kind::Mlp => continue,
            Some(_)
                if fields
                    .text("hybrid_override_pattern")?
                    .is_some_and(|text| text.as_bytes()[layer] == b'E') =>
            {
                sparse
            }
            Some(_) => dense,
            None if source.family.starts_with("zamba") => {
                if layers[layer].attention().is_some() && total == 0.0 { dense } else { Some(0.0) }
            }
            None if sparse.is_some() && is_sparse(fields, layer)? => sparse,
            None if family.starts_with("granitemoehybrid") || family == "granitemoehybrid" => {
                Some(matrices * hidden * shared)
            }
            None => dense.or(sparse),
        };
        let Some(block) = block else { return Ok(None) };
        // Gemma-4's experts stand beside a dense block.
        total += block;
        if fields.flag("enable_moe_block", false)? {
            total += dense.unwrap_or(0.0);
        }
    }
    Ok(Some(total))
}

/// Whether a layer of a mixture-of-experts model has experts.
fn is_sparse(fields: &Fields<'_>, layer: usize) -> Result<bool, ConfigError> {
    if let Some(dense) = fields.integer("first_k_dense_replace", 0, MAX_WIDTH)? {
        return Ok(layer >= dense);
    }
    if let Some(list) = fields.list("moe_layer_freq").ok().flatten() {
        return Ok(list.get(layer).and_then(serde_json::Value::as_u64) == Some(1));
    }
    if let (Some(period), Some(offset)) = (
        fields.integer("expert_layer_period", 1, MAX_WIDTH)?,
        fields.integer("expert_layer_offset", 0, MAX_WIDTH)?,
    ) {
        return Ok(layer % period == offset % period);
    }
    if let Some(step) = fields.integer("interleave_moe_layer_step", 1, MAX_WIDTH)? {
        return Ok((layer + 1).is_multiple_of(step));
    }
    let step = fields.integer("decoder_sparse_step", 1, MAX_WIDTH)?.unwrap_or(1);
    Ok((layer + 1).is_multiple_of(step))
}

/// Bits per weight that the file says.
fn bits(source: &Source<'_>, outer: &Fields<'_>) -> Result<f32, ConfigError> {
    let native = source.dtype.bytes() as f32 * 8.0;
    for fields in [&source.fields, outer] {
        let Some(quantization) = fields.object("quantization_config")? else { continue };
        let method = quantization.text("quant_method")?.unwrap_or("");
        // Four bits carry a scale per group: 32 weights share a byte in mxfp4, 16 in nvfp4.
        return Ok(match method {
            "fp8" => 8.0,
            "mxfp4" => 4.25,
            "awq" | "gptq" => quantization.integer("bits", 1, 16)?.map_or(native, |bits| bits as f32 + 0.25),
            "modelopt" => match quantization.text("quant_algo")? {
                Some("NVFP4") => 4.5,
                Some("FP8") => 8.0,
                _ => native,
            },
            "compressed-tensors" => compressed_bits(&quantization).unwrap_or(native),
            _ => native,
        });
    }
    Ok(native)
}

/// The bits of the first group of a compressed-tensors config, scales included.
fn compressed_bits(quantization: &Fields<'_>) -> Option<f32> {
    let groups = quantization.value("config_groups")?.as_object()?;
    let weights = &groups.values().next()?["weights"];
    let bits = weights["num_bits"].as_f64().filter(|bits| (1.0..=16.0).contains(bits))?;
    let group = weights["group_size"].as_f64().filter(|&size| size >= 8.0);
    Some(bits as f32 + group.map_or(0.0, |size| 8.0 / size as f32))
}
