//! Families whose layers differ in head shape or window, or read the keys and values of earlier layers:
//! Gemma 3, 3n and 4, Llama-4, MiMo-V2 and DeciLM.

use serde_json::Value;

use super::{
    AttentionSpec, CacheSpec, ConfigError, Geometry, Source, context,
    dense::{HeadDim, Heads, KvHeads, check_groups, rope_layers},
    fields::{Fields, MAX_COUNT, MAX_LAYERS, MAX_LEN},
    kinds::{self, Kind},
};

/// Published Gemma-3 text configs leave out all that equals their class: 8 query heads, 4 KV heads of
/// 256, every sixth layer full, 131,072 tokens.
pub(super) fn gemma3(source: &Source<'_>) -> Result<Geometry, ConfigError> {
    let fields = &source.fields;
    refuse_bidirectional(fields)?;
    let layers = kinds::num_layers(fields)?;
    let count = |key: &str, default: usize| -> Result<usize, ConfigError> {
        Ok(fields.count(key)?.unwrap_or_else(|| fields.default(key, default)))
    };
    let num_qo_heads = count("num_attention_heads", 8)?;
    let num_kv_heads = count("num_key_value_heads", 4)?;
    check_groups(fields, "num_key_value_heads", num_qo_heads, num_kv_heads)?;
    let head_dim = fields.width_or(&["head_dim"], 256)?;
    let heads = Heads { num_qo_heads, num_kv_heads, head_dim };
    let kinds = match windowed_types(source, layers)? {
        Some(kinds) => kinds,
        None => {
            let interval = match fields.integer("sliding_window_pattern", 1, MAX_COUNT)? {
                Some(interval) => Some(interval),
                None => fields.integer("_sliding_window_pattern", 1, MAX_COUNT)?,
            };
            let interval = interval.unwrap_or_else(|| fields.default("sliding_window_pattern", 6));
            kinds::every(layers, interval, Kind::Sliding, Kind::Full)
        }
    };
    let window = sliding_window(fields, &kinds, 4096)?;
    let layers =
        kinds.iter().map(|&kind| CacheSpec::Attention(heads.spec(window.filter(|_| kind == Kind::Sliding))));
    Ok(Geometry {
        layers: layers.collect(),
        max_model_len: context::max_model_len(fields, 131_072, true)?,
        ..Geometry::default()
    })
}

/// Gemma-3n: every fifth layer full; the last `num_kv_shared_layers` own nothing.
pub(super) fn gemma3n(source: &Source<'_>) -> Result<Geometry, ConfigError> {
    let fields = &source.fields;
    let layers = kinds::num_layers(fields)?;
    let heads = Heads::read(fields, HeadDim::Default(256), KvHeads::Required)?;
    let kinds = match windowed_types(source, layers)? {
        Some(kinds) => kinds,
        None => kinds::every(layers, 5, Kind::Sliding, Kind::Full),
    };
    let window = sliding_window(fields, &kinds, 512)?;
    let specs = kinds.iter().map(|&kind| heads.spec(window.filter(|_| kind == Kind::Sliding))).collect();
    let shared = fields.integer("num_kv_shared_layers", 0, MAX_LAYERS)?;
    let shared = shared.unwrap_or_else(|| fields.default("num_kv_shared_layers", 15));
    Ok(Geometry {
        layers: share(fields, &kinds, specs, shared)?,
        max_model_len: context::max_model_len(fields, 32768, false)?,
        ..Geometry::default()
    })
}

/// Gemma-4: full layers have `global_head_dim` and, when keys serve as values, other KV heads; both are
/// stored. The last layer is full whatever the list says.
pub(super) fn gemma4(source: &Source<'_>) -> Result<Geometry, ConfigError> {
    let fields = &source.fields;
    if fields.value("use_bidirectional_attention").is_some_and(|value| value == "all") {
        refuse_bidirectional(fields)?;
    }
    let layers = kinds::num_layers(fields)?;
    let local = Heads::read(fields, HeadDim::Default(256), KvHeads::Required)?;
    let mut kinds = match windowed_types(source, layers)? {
        Some(kinds) => kinds,
        None => kinds::every(layers, 6, Kind::Sliding, Kind::Full),
    };
    if kinds[layers - 1] != Kind::Full {
        fields.notice(format!(
            "layer {} is full whatever {} says: the last layer of Gemma-4 always is",
            layers - 1,
            fields.path("layer_types")
        ));
        kinds[layers - 1] = Kind::Full;
    }
    let window = sliding_window(fields, &kinds, 512)?;
    let per_layer = fields.object("per_layer_config")?;
    let mut global = local;
    if per_layer.is_none() {
        global.head_dim = fields.width_or(&["global_head_dim"], 512)?;
        if fields.flag("attention_k_eq_v", false)?
            && let Some(heads) = fields.count("num_global_key_value_heads")?
        {
            global.num_kv_heads = heads;
        }
        check_groups(fields, "num_global_key_value_heads", global.num_qo_heads, global.num_kv_heads)?;
    }
    let mut specs = Vec::with_capacity(layers);
    for (layer, &kind) in kinds.iter().enumerate() {
        let mut heads = if kind == Kind::Full { global } else { local };
        if let Some(own) = per_layer.as_ref().map(|all| all.object(&layer.to_string())).transpose()?.flatten()
        {
            heads.head_dim = own.width("head_dim")?.unwrap_or(heads.head_dim);
            heads.num_kv_heads = own.count("num_key_value_heads")?.unwrap_or(heads.num_kv_heads);
            check_groups(&own, "num_key_value_heads", heads.num_qo_heads, heads.num_kv_heads)?;
        }
        specs.push(heads.spec(window.filter(|_| kind == Kind::Sliding)));
    }
    let shared = fields.integer("num_kv_shared_layers", 0, MAX_LAYERS)?.unwrap_or(0);
    Ok(Geometry {
        layers: share(fields, &kinds, specs, shared)?,
        max_model_len: context::max_model_len(fields, 131_072, false)?,
        ..Geometry::default()
    })
}

/// Llama-4: layers without RoPE see everything, the others their chunk of `attention_chunk_size`.
pub(super) fn llama4(source: &Source<'_>) -> Result<Geometry, ConfigError> {
    let fields = &source.fields;
    let layers = kinds::num_layers(fields)?;
    let heads = Heads::read(fields, HeadDim::Derived, KvHeads::Required)?;
    let allowed = [Kind::Full, Kind::Chunked];
    let kinds = match kinds::layer_types(fields, layers, &source.family, &allowed)? {
        Some(kinds) => kinds,
        None => {
            let rope = rope_layers(fields, layers)?;
            rope.iter().map(|&rotates| if rotates { Kind::Chunked } else { Kind::Full }).collect()
        }
    };
    let chunk = match fields.integer("attention_chunk_size", 1, MAX_LEN)? {
        Some(chunk) => Some(chunk),
        None if fields.has("attention_chunk_size") => None,
        None => Some(fields.default("attention_chunk_size", 8192)),
    };
    let layers =
        kinds.iter().map(|&kind| CacheSpec::Attention(heads.spec(chunk.filter(|_| kind == Kind::Chunked))));
    Ok(Geometry {
        layers: layers.collect(),
        max_model_len: context::max_model_len(fields, 131_072, false)?,
        chunked_windows: true,
        ..Geometry::default()
    })
}

/// MiMo-V2-Flash: keys of 192, values of 128; sliding layers have KV heads and widths of their own.
/// A query sees `sliding_window_size` earlier tokens and itself.
pub(super) fn mimo_v2(source: &Source<'_>) -> Result<Geometry, ConfigError> {
    let fields = &source.fields;
    let layers = kinds::num_layers(fields)?;
    let full = Heads::read(fields, HeadDim::Default(192), KvHeads::Required)?;
    let value_head_dim = fields.width_or(&["v_head_dim"], 128)?;
    let sliding = Heads {
        num_qo_heads: fields.count("swa_num_attention_heads")?.unwrap_or(full.num_qo_heads),
        num_kv_heads: fields.count("swa_num_key_value_heads")?.unwrap_or(full.num_kv_heads),
        head_dim: fields.width("swa_head_dim")?.unwrap_or(full.head_dim),
    };
    check_groups(fields, "swa_num_key_value_heads", sliding.num_qo_heads, sliding.num_kv_heads)?;
    let sliding_value_dim = fields.width("swa_v_head_dim")?.unwrap_or(value_head_dim);
    let kinds = match kinds::switched(fields, "hybrid_layer_pattern", layers, Kind::Full, Kind::Sliding)? {
        Some(kinds) => kinds,
        None => match windowed_types(source, layers)? {
            Some(kinds) => kinds,
            None => (0..layers)
                .map(
                    |layer| {
                        if layer == 0 || (layer + 1).is_multiple_of(6) { Kind::Full } else { Kind::Sliding }
                    },
                )
                .collect(),
        },
    };
    let window = match fields.integer("sliding_window_size", 1, MAX_LEN - 1)? {
        Some(earlier) => Some(earlier + 1),
        None => sliding_window(fields, &kinds, 129)?,
    };
    let layers = kinds.iter().map(|&kind| {
        CacheSpec::Attention(match kind {
            Kind::Sliding => AttentionSpec { value_head_dim: sliding_value_dim, ..sliding.spec(window) },
            _ => AttentionSpec { value_head_dim, ..full.spec(None) },
        })
    });
    Ok(Geometry {
        layers: layers.collect(),
        max_model_len: context::max_model_len(fields, 131_072, false)?,
        learned_sinks: fields.flag("add_swa_attention_sink_bias", true)?
            || fields.flag("add_full_attention_sink_bias", false)?,
        chunked_windows: false,
    })
}

/// DeciLM and Nemotron-NAS: `block_configs` names per layer how many query heads share a KV head, or
/// that the attention is gone; the older DeciLM lists the KV heads.
pub(super) fn deci(source: &Source<'_>) -> Result<Geometry, ConfigError> {
    let fields = &source.fields;
    let layers = kinds::num_layers(fields)?;
    let num_qo_heads = fields.required_count("num_attention_heads")?;
    let mut per_layer = Vec::with_capacity(layers);
    if let Some(blocks) = fields.list("block_configs")? {
        kinds::check_len(fields, "block_configs", blocks.len(), layers)?;
        for (layer, block) in blocks[..layers].iter().enumerate() {
            per_layer.push(block_kv_heads(fields, layer, block, num_qo_heads)?);
        }
    } else if let Some(heads) = fields.integers("num_key_value_heads_per_layer", 0, MAX_COUNT)? {
        kinds::check_len(fields, "num_key_value_heads_per_layer", heads.len(), layers)?;
        per_layer.extend(heads[..layers].iter().map(|&heads| (heads > 0).then_some(heads)));
    } else {
        return Err(fields.missing("block_configs"));
    }
    let uniform = Heads::read(fields, HeadDim::Derived, KvHeads::QueryHeads)?;
    let mut specs = Vec::with_capacity(layers);
    for heads in per_layer {
        specs.push(match heads {
            None => CacheSpec::None,
            Some(num_kv_heads) => {
                check_groups(fields, "block_configs", num_qo_heads, num_kv_heads)?;
                CacheSpec::Attention(Heads { num_kv_heads, ..uniform }.spec(None))
            }
        });
    }
    Ok(Geometry {
        layers: specs,
        max_model_len: context::max_model_len(fields, 131_072, false)?,
        ..Geometry::default()
    })
}

fn block_kv_heads(
    fields: &Fields<'_>,
    layer: usize,
    block: &Value,
    num_qo_heads: usize,
) -> Result<Option<usize>, ConfigError> {
    let attention = &block["attention"];
    let off = |key: &str| attention[key].as_bool() == Some(true);
    if off("no_op") || off("replace_with_linear") {
        return Ok(None);
    }
    let path = format!("block_configs[{layer}].attention.n_heads_in_group");
    match attention["n_heads_in_group"].as_u64() {
        Some(group) if group > 0 && (num_qo_heads as u64).is_multiple_of(group) => {
            Ok(Some(num_qo_heads / group as usize))
        }
        Some(group) => {
            Err(fields
                .inconsistent(&path, format!("{group} does not divide num_attention_heads {num_qo_heads}")))
        }
        None => Err(fields.missing(&path)),
    }
}

fn windowed_types(source: &Source<'_>, layers: usize) -> Result<Option<Vec<Kind>>, ConfigError> {
    kinds::layer_types(&source.fields, layers, &source.family, &[Kind::Full, Kind::Sliding])
}

/// The window, where some layer slides.
fn sliding_window(fields: &Fields<'_>, kinds: &[Kind], default: usize) -> Result<Option<usize>, ConfigError> {
    if !kinds.contains(&Kind::Sliding) {
        return Ok(None);
    }
    match fields.integer("sliding_window", 1, MAX_LEN)? {
        Some(window) => Ok(Some(window)),
        None if fields.has("sliding_window") => Err(fields.missing("sliding_window")),
        None => Ok(Some(fields.default("sliding_window", default))),
    }
}

fn refuse_bidirectional(fields: &Fields<'_>) -> Result<(), ConfigError> {
    let key = "use_bidirectional_attention";
    match fields.value(key) {
        None | Some(Value::Bool(false)) => Ok(()),
        Some(_) => {
            Err(fields
                .inconsistent(key, "an encoder that attends in both directions has no KV cache".to_owned()))
        }
    }
}

/// The last `shared` layers read the last earlier layer of their kind that owns keys and values.
fn share(
    fields: &Fields<'_>,
    kinds: &[Kind],
    specs: Vec<AttentionSpec>,
    shared: usize,
) -> Result<Vec<CacheSpec>, ConfigError> {
    let key = "num_kv_shared_layers";
    if shared >= kinds.len() && shared > 0 {
        return Err(fields.inconsistent(key, format!("{shared} of {} layers leave no owner", kinds.len())));
    }
    let owners = kinds.len() - shared;
    let mut layers = Vec::with_capacity(kinds.len());
    for (layer, spec) in specs.into_iter().enumerate() {
        layers.push(if layer < owners {
            CacheSpec::Attention(spec)
        } else {
            let owner = kinds[..owners].iter().rposition(|&kind| kind == kinds[layer]);
            let owner = owner.ok_or_else(|| {
                fields
                    .inconsistent(key, format!("no earlier layer of its kind owns what layer {layer} reads"))
            })?;
            CacheSpec::Shared { owner }
        });
    }
    Ok(layers)
}
