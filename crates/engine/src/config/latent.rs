//! Families that store one vector per token for all heads: MLA, with and without a sparse indexer, and
//! DeepSeek-V4's compressed attention.

use turboquant::format::NativeDtype;

use super::{
    CacheSpec, CompressedSpec, ConfigError, Geometry, Source, context,
    fields::{Fields, MAX_COUNT, MAX_LEN, MAX_WIDTH},
    kinds::{self, Kind},
};

/// The latent of MLA: `kv_lora_rank` compressed elements and `qk_rope_head_dim` rotated ones. The
/// number of KV heads in the file is not that of the cache.
pub(super) fn spec(fields: &Fields<'_>) -> Result<CacheSpec, ConfigError> {
    Ok(CacheSpec::Latent {
        num_qo_heads: fields.required_count("num_attention_heads")?,
        width: fields.required_width("kv_lora_rank")? + rope_width(fields)?,
        indexer_width: 0,
    })
}

/// Zero where no part is rotated.
fn rope_width(fields: &Fields<'_>) -> Result<usize, ConfigError> {
    let key = "qk_rope_head_dim";
    fields.integer(key, 0, MAX_WIDTH)?.ok_or_else(|| fields.missing(key))
}

/// DeepSeek-V2/V3 and their kin: a latent in every layer.
pub(super) fn mla(source: &Source<'_>) -> Result<Geometry, ConfigError> {
    let fields = &source.fields;
    let layers = kinds::num_layers(fields)?;
    let default_len = match source.family.as_str() {
        "deepseek_v2" => 2048,
        "glm4_moe_lite" => 202_752,
        "minicpm3" => 32_768,
        "youtu" => 131_072,
        "mistral4" => 1_048_576,
        _ => 4096,
    };
    Ok(Geometry {
        layers: vec![spec(fields)?; layers],
        max_model_len: context::max_model_len(fields, default_len, false)?,
        ..Geometry::default()
    })
}

/// DeepSeek-V3.2 and GLM-5: MLA and, in layers that choose for themselves, a key of the indexer per
/// token.
pub(super) fn sparse_mla(source: &Source<'_>) -> Result<Geometry, ConfigError> {
    let fields = &source.fields;
    let layers = kinds::num_layers(fields)?;
    kinds::layer_types(fields, layers, &source.family, &[Kind::Indexed])?;
    let latent = spec(fields)?;
    let CacheSpec::Latent { num_qo_heads, width, .. } = latent else { return mla(source) };
    let indexer_width = fields.required_width("index_head_dim")?;
    let indexed = CacheSpec::Latent { num_qo_heads, width, indexer_width };
    let own = own_indexers(fields, layers)?;
    let default_len = if source.family == "glm_moe_dsa" { 202_752 } else { 163_840 };
    Ok(Geometry {
        layers: own.into_iter().map(|own| if own { indexed } else { latent }).collect(),
        max_model_len: context::max_model_len(fields, default_len, false)?,
        ..Geometry::default()
    })
}

/// Which layers have an indexer of their own; the others reuse the choice of an earlier one.
fn own_indexers(fields: &Fields<'_>, layers: usize) -> Result<Vec<bool>, ConfigError> {
    let words: Option<Vec<&str>> = match fields.texts("indexer_types")? {
        Some(words) => Some(words),
        None => fields.text("index_topk_pattern")?.map(|letters| {
            letters
                .chars()
                .map(|letter| match letter {
                    'F' => "full",
                    'S' => "shared",
                    _ => "?",
                })
                .collect()
        }),
    };
    if let Some(words) = words {
        let key = if fields.has("indexer_types") { "indexer_types" } else { "index_topk_pattern" };
        kinds::check_len(fields, key, words.len(), layers)?;
        return words[..layers]
            .iter()
            .enumerate()
            .map(|(layer, &word)| match word {
                "full" => Ok(true),
                "shared" => Ok(false),
                _ => Err(fields
                    .inconsistent(&format!("{key}[{layer}]"), "an indexer is full or shared".to_owned())),
            })
            .collect();
    }
    let every = fields.integer("index_topk_freq", 1, MAX_COUNT)?.unwrap_or(1);
    let offset = fields.integer("index_skip_topk_offset", 0, MAX_COUNT)?.unwrap_or(2);
    Ok((0..layers).map(|layer| (layer + 1).saturating_sub(offset).is_multiple_of(every)).collect())
}

/// DeepSeek-V4: every layer keeps the vectors of its window; most also one compressed vector per 4 or
/// 128 tokens, those of 4 with an indexer.
pub(super) fn deepseek_v4(source: &Source<'_>) -> Result<Geometry, ConfigError> {
    let fields = &source.fields;
    let layers = kinds::num_layers(fields)?;
    let num_qo_heads = fields.required_count("num_attention_heads")?;
    let width = fields.required_width("head_dim")?;
    let index_width = fields.required_width("index_head_dim")?;
    let window =
        fields.integer("sliding_window", 1, MAX_LEN)?.ok_or_else(|| fields.missing("sliding_window"))?;
    let (sparse, heavy) = compress_rates(fields)?;
    let kinds = match compress_ratios(fields, layers, sparse, heavy)? {
        Some(kinds) => kinds,
        None => compressed_types(source, layers, sparse, heavy)?,
    };
    let specs = kinds.into_iter().map(|kind| {
        let ratio = match kind {
            Kind::Compressed { ratio } => ratio,
            _ => 0,
        };
        let indexer_width = if ratio == sparse { index_width } else { 0 };
        let state_bytes = compressor_state(ratio, ratio == sparse, width, indexer_width, source.dtype);
        CacheSpec::Compressed(CompressedSpec {
            num_qo_heads,
            width,
            window,
            ratio,
            indexer_width,
            state_bytes,
        })
    });
    Ok(Geometry {
        layers: specs.collect(),
        max_model_len: context::max_model_len(fields, 1_048_576, false)?,
        ..Geometry::default()
    })
}

/// Tokens per compressed vector of the sparse and of the heavily compressed layers.
fn compress_rates(fields: &Fields<'_>) -> Result<(usize, usize), ConfigError> {
    let (mut sparse, mut heavy) = (4, 128);
    if let Some(rates) = fields.object("compress_rates")? {
        sparse = rates.integer("compressed_sparse_attention", 1, MAX_COUNT)?.unwrap_or(sparse);
        heavy = rates.integer("heavily_compressed_attention", 1, MAX_COUNT)?.unwrap_or(heavy);
    }
    sparse = fields.integer("compress_rate_csa", 1, MAX_COUNT)?.unwrap_or(sparse);
    heavy = fields.integer("compress_rate_hca", 1, MAX_COUNT)?.unwrap_or(heavy);
    if sparse == heavy {
        return Err(
            fields.inconsistent("compress_rates", format!("both kinds of layer compress {sparse} tokens"))
        );
    }
    Ok((sparse, heavy))
}

fn compress_ratios(
    fields: &Fields<'_>,
    layers: usize,
    sparse: usize,
    heavy: usize,
) -> Result<Option<Vec<Kind>>, ConfigError> {
    let key = "compress_ratios";
    if fields.value("layer_types").is_some() {
        return Ok(None);
    }
    let Some(ratios) = fields.integers(key, 0, MAX_COUNT)? else { return Ok(None) };
    kinds::check_len(fields, key, ratios.len(), layers)?;
    let kinds = ratios[..layers].iter().enumerate().map(|(layer, &ratio)| {
        if ratio == 0 || ratio == sparse || ratio == heavy {
            Ok(Kind::Compressed { ratio })
        } else {
            let problem = format!("a layer compresses 0, {sparse} or {heavy} tokens, not {ratio}");
            Err(fields.inconsistent(&format!("{key}[{layer}]"), problem))
        }
    });
    kinds.collect::<Result<_, _>>().map(Some)
}

fn compressed_types(
    source: &Source<'_>,
    layers: usize,
    sparse: usize,
    heavy: usize,
) -> Result<Vec<Kind>, ConfigError> {
    let fields = &source.fields;
    let key = "layer_types";
    let Some(words) = fields.texts(key)? else { return Err(fields.missing("compress_ratios")) };
    kinds::check_len(fields, key, words.len(), layers)?;
    words[..layers]
        .iter()
        .enumerate()
        .map(|(layer, &word)| match word {
            "sliding_attention" => Ok(Kind::Compressed { ratio: 0 }),
            "compressed_sparse_attention" => Ok(Kind::Compressed { ratio: sparse }),
            "heavily_compressed_attention" => Ok(Kind::Compressed { ratio: heavy }),
            _ => Err(ConfigError::UnknownLayer {
                path: format!("{}[{layer}]", fields.path(key)),
                got: word.chars().take(40).collect(),
                family: source.family.clone(),
                known: "sliding_attention, compressed_sparse_attention, heavily_compressed_attention"
                    .to_owned(),
            }),
        })
        .collect()
}

/// What waits for the next compressed vector: up to `ratio - 1` tokens' projections and gates. The
/// sparse kind projects twice the width and keeps the first half of the last full window besides, for
/// the vector and for the indexer's key.
fn compressor_state(
    ratio: usize,
    overlapping: bool,
    width: usize,
    indexer_width: usize,
    dtype: NativeDtype,
) -> usize {
    if ratio == 0 {
        return 0;
    }
    let elements = if overlapping {
        2 * ((ratio - 1) * 2 + ratio) * (width + indexer_width)
    } else {
        2 * (ratio - 1) * width
    };
    elements * dtype.bytes()
}
