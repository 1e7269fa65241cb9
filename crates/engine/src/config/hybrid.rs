//! Families with recurrent layers: which of their layers hold keys and values, and the state of the
//! others.

use super::{
    AttentionSpec, CacheSpec, ConfigError, Geometry, Source, StateSpec, context,
    dense::{HeadDim, Heads, KvHeads},
    fields::{Fields, MAX_COUNT, MAX_LEN, MAX_WIDTH},
    kinds::{self, Kind, num_layers},
    latent,
    state::{self, StateDtypes, StateShape},
};

/// What attention layers and recurrent layers of a model hold.
struct Parts {
    attention: CacheSpec,
    state: StateSpec,
}

impl Parts {
    fn layer(&self, kind: Kind) -> CacheSpec {
        match (kind, self.attention) {
            (Kind::Linear | Kind::Conv, _) => CacheSpec::Recurrent(self.state),
            (Kind::Hybrid, CacheSpec::Attention(attention)) => CacheSpec::Hybrid(attention, self.state),
            (Kind::Mlp, _) => CacheSpec::None,
            (_, attention) => attention,
        }
    }
}

/// Puts the parts in place.
fn assemble(
    source: &Source<'_>,
    kinds: &[Kind],
    attention: CacheSpec,
    shape: StateShape,
    default_len: usize,
) -> Result<Geometry, ConfigError> {
    let state = shape.spec(&source.fields, StateDtypes::of(&source.fields, source.dtype)?)?;
    let parts = Parts { attention, state };
    Ok(Geometry {
        layers: kinds.iter().map(|&kind| parts.layer(kind)).collect(),
        max_model_len: context::max_model_len(&source.fields, default_len, false)?,
        ..Geometry::default()
    })
}

fn full(heads: Heads) -> CacheSpec {
    CacheSpec::Attention(heads.spec(None))
}

/// `layer_types`, checked against what the family has.
fn types(source: &Source<'_>, layers: usize, allowed: &[Kind]) -> Result<Option<Vec<Kind>>, ConfigError> {
    kinds::layer_types(&source.fields, layers, &source.family, allowed)
}

const LINEAR_AND_FULL: [Kind; 2] = [Kind::Full, Kind::Linear];

/// Qwen3-Next, Qwen3.5 and 3.6: every fourth layer full, the others gated delta rule.
pub(super) fn qwen3_next(source: &Source<'_>) -> Result<Geometry, ConfigError> {
    let fields = &source.fields;
    let layers = num_layers(fields)?;
    let heads = Heads::read(fields, HeadDim::Default(256), KvHeads::Required)?;
    let kinds = match types(source, layers, &LINEAR_AND_FULL)? {
        Some(kinds) => kinds,
        None => {
            let interval = fields.integer("full_attention_interval", 1, MAX_COUNT)?;
            let interval = interval.unwrap_or_else(|| fields.default("full_attention_interval", 4));
            kinds::every(layers, interval, Kind::Linear, Kind::Full)
        }
    };
    let shape = state::delta_rule(
        fields.required_count("linear_num_key_heads")?,
        fields.required_count("linear_num_value_heads")?,
        fields.required_width("linear_key_head_dim")?,
        fields.required_width("linear_value_head_dim")?,
        fields.width_or(&["linear_conv_kernel_dim"], 4)?,
    );
    assemble(source, &kinds, full(heads), shape, 32768)
}

/// OLMo-Hybrid: as Qwen3-Next, with head counts and widths that derive from the attention's.
pub(super) fn olmo_hybrid(source: &Source<'_>) -> Result<Geometry, ConfigError> {
    let fields = &source.fields;
    let layers = num_layers(fields)?;
    let heads = Heads::read(fields, HeadDim::Derived, KvHeads::QueryHeads)?;
    let kinds = match types(source, layers, &LINEAR_AND_FULL)? {
        Some(kinds) => kinds,
        None => kinds::every(layers, 4, Kind::Linear, Kind::Full),
    };
    let key_heads = fields.count("linear_num_key_heads")?.unwrap_or(heads.num_qo_heads);
    let value_heads = fields.count("linear_num_value_heads")?.unwrap_or(heads.num_qo_heads);
    let key_dim = match fields.width("linear_key_head_dim")? {
        Some(width) => width,
        None => 3 * fields.required_width("hidden_size")? / (4 * key_heads),
    };
    let value_dim = fields.width("linear_value_head_dim")?.unwrap_or(2 * key_dim);
    let kernel = fields.width_or(&["linear_conv_kernel_dim"], 4)?;
    let shape = state::delta_rule(key_heads, value_heads, key_dim, value_dim, kernel);
    assemble(source, &kinds, full(heads), shape, 65536)
}

/// Kimi-Linear and Kimi-K3: MLA in the listed layers (counted from 1), delta attention in the others.
pub(super) fn kimi_linear(source: &Source<'_>) -> Result<Geometry, ConfigError> {
    let fields = &source.fields;
    let layers = num_layers(fields)?;
    let linear = fields.object("linear_attn_config")?;
    let listed = match &linear {
        Some(linear) => one_based(linear, layers)?,
        None => None,
    };
    let kinds = match types(source, layers, &LINEAR_AND_FULL)?.or(listed) {
        Some(kinds) => kinds,
        None => return Err(fields.missing("linear_attn_config.full_attn_layers")),
    };
    let inner = linear.as_ref().unwrap_or(fields);
    let names = if linear.is_some() {
        ["num_heads", "head_dim", "short_conv_kernel_size"]
    } else {
        ["linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"]
    };
    let heads = inner.required_count(names[0])?;
    let head_dim = inner.required_width(names[1])?;
    let shape = state::delta_rule(heads, heads, head_dim, head_dim, inner.width_or(&[names[2]], 4)?);
    assemble(source, &kinds, latent::spec(fields)?, shape, 1_048_576)
}

/// `full_attn_layers` and `kda_layers`, which together name every layer once.
fn one_based(linear: &Fields<'_>, layers: usize) -> Result<Option<Vec<Kind>>, ConfigError> {
    let key = "full_attn_layers";
    let Some(kinds) = kinds::indexed(linear, key, layers, 1, Kind::Full, Kind::Linear)? else {
        return Ok(None);
    };
    if let Some(others) = kinds::indexed(linear, "kda_layers", layers, 1, Kind::Linear, Kind::Full)?
        && others != kinds
    {
        let problem = "together with full_attn_layers it does not name every layer once".to_owned();
        return Err(linear.inconsistent("kda_layers", problem));
    }
    Ok(Some(kinds))
}

/// Ling and Ring hybrids: MLA in the last layer of every group, delta attention in the others.
pub(super) fn bailing_hybrid(source: &Source<'_>) -> Result<Geometry, ConfigError> {
    let fields = &source.fields;
    let layers = num_layers(fields)?;
    let kinds = match types(source, layers, &LINEAR_AND_FULL)? {
        Some(kinds) => kinds,
        None => {
            let group = fields.integer("layer_group_size", 1, MAX_COUNT)?;
            let group = group.unwrap_or_else(|| fields.default("layer_group_size", 6));
            kinds::every(layers, group, Kind::Linear, Kind::Full)
        }
    };
    let heads = fields.required_count("num_attention_heads")?;
    let head_dim = fields.width_or(&["head_dim"], 128)?;
    let shape =
        state::delta_rule(heads, heads, head_dim, head_dim, fields.width_or(&["short_conv_kernel_size"], 4)?);
    assemble(source, &kinds, latent::spec(fields)?, shape, 262_144)
}

/// MiniMax-Text-01 and M1: softmax attention where the list says 1, lightning attention elsewhere.
pub(super) fn minimax(source: &Source<'_>) -> Result<Geometry, ConfigError> {
    let fields = &source.fields;
    let layers = num_layers(fields)?;
    let heads = Heads::read(fields, HeadDim::Derived, KvHeads::Required)?;
    let kinds = match types(source, layers, &LINEAR_AND_FULL)? {
        Some(kinds) => Some(kinds),
        None => kinds::switched(fields, "attn_type_list", layers, Kind::Linear, Kind::Full)?,
    };
    // The class's default is not what any published model has.
    let kinds = kinds.ok_or_else(|| fields.missing("layer_types"))?;
    let shape = state::linear_attention(heads.num_qo_heads, heads.head_dim);
    assemble(source, &kinds, full(heads), shape, 131_072)
}

/// Jamba: Mamba-1, and attention in every `attn_layer_period`-th layer from `attn_layer_offset` on.
pub(super) fn jamba(source: &Source<'_>) -> Result<Geometry, ConfigError> {
    let fields = &source.fields;
    let layers = num_layers(fields)?;
    let heads = Heads::read(fields, HeadDim::Derived, KvHeads::Required)?;
    let kinds = match types(source, layers, &LINEAR_AND_FULL)? {
        Some(kinds) => kinds,
        None => {
            let (period, offset) = period_and_offset(fields, 8, 4)?;
            by(layers, |layer| if layer % period == offset { Kind::Full } else { Kind::Linear })
        }
    };
    assemble(source, &kinds, full(heads), mamba1_shape(fields)?, 262_144)
}

/// Zamba: Mamba-1, and a shared attention block before every sixth layer or so.
pub(super) fn zamba(source: &Source<'_>) -> Result<Geometry, ConfigError> {
    let fields = &source.fields;
    let layers = num_layers(fields)?;
    let kinds = match types(source, layers, &[Kind::Linear, Kind::Hybrid])? {
        Some(kinds) => kinds,
        None => {
            let (period, offset) = period_and_offset(fields, 6, 4)?;
            by(layers, |layer| match layer {
                2 => Kind::Hybrid,
                3.. if (layer - 3) % period == offset => Kind::Hybrid,
                _ => Kind::Linear,
            })
        }
    };
    assemble(source, &kinds, full(double_width_heads(fields)?), mamba1_shape(fields)?, 4096)
}

/// Zamba2: Mamba-2, and a shared attention block of twice the hidden size in the hybrid layers.
pub(super) fn zamba2(source: &Source<'_>) -> Result<Geometry, ConfigError> {
    let fields = &source.fields;
    let layers = num_layers(fields)?;
    let kinds = match types(source, layers, &[Kind::Linear, Kind::Hybrid])? {
        Some(kinds) => Some(kinds),
        None => kinds::indexed(fields, "hybrid_layer_ids", layers, 0, Kind::Hybrid, Kind::Linear)?,
    };
    let kinds = kinds.ok_or_else(|| fields.missing("layers_block_type"))?;
    let hidden = fields.required_width("hidden_size")?;
    let inner = hidden * fields.width_or(&["mamba_expand", "expansion_factor"], 2)?;
    let (heads, head_dim) = match (fields.count("n_mamba_heads")?, fields.width("mamba_headdim")?) {
        (Some(heads), _) => (heads, inner / heads),
        (None, Some(head_dim)) => (inner / head_dim, head_dim),
        (None, None) => (fields.default("n_mamba_heads", 8), inner / 8),
    };
    if heads == 0 || heads * head_dim != inner {
        return Err(
            fields.inconsistent("n_mamba_heads", format!("{inner} Mamba channels do not divide into heads"))
        );
    }
    let shape = state::mamba2(
        heads,
        head_dim,
        fields.width_or(&["mamba_ngroups"], 1)?,
        fields.width_or(&["mamba_d_state", "state_size"], 64)?,
        fields.width_or(&["mamba_d_conv", "conv_dimension"], 4)?,
    );
    assemble(source, &kinds, full(double_width_heads(fields)?), shape, 4096)
}

/// Heads of an attention over the hidden state and the embedding side by side.
fn double_width_heads(fields: &Fields<'_>) -> Result<Heads, ConfigError> {
    let num_qo_heads = fields.required_count("num_attention_heads")?;
    let num_kv_heads = fields.count("num_key_value_heads")?.unwrap_or(num_qo_heads);
    super::dense::check_groups(fields, "num_key_value_heads", num_qo_heads, num_kv_heads)?;
    let head_dim = match fields.width("attention_head_dim")? {
        Some(width) => width,
        None => {
            let double = 2 * fields.required_width("hidden_size")?;
            if !double.is_multiple_of(num_qo_heads) {
                let problem = format!(
                    "it is missing, and twice the hidden_size, {double}, is no multiple of num_attention_heads {num_qo_heads}"
                );
                return Err(fields.inconsistent("attention_head_dim", problem));
            }
            double / num_qo_heads
        }
    };
    Ok(Heads { num_qo_heads, num_kv_heads, head_dim })
}

/// Bamba: Mamba-2, and attention in `attn_layer_indices`.
pub(super) fn bamba(source: &Source<'_>) -> Result<Geometry, ConfigError> {
    let fields = &source.fields;
    let layers = num_layers(fields)?;
    let heads = Heads::read(fields, HeadDim::Derived, KvHeads::Required)?;
    let kinds = match types(source, layers, &LINEAR_AND_FULL)? {
        Some(kinds) => Some(kinds),
        None => kinds::indexed(fields, "attn_layer_indices", layers, 0, Kind::Full, Kind::Linear)?,
    };
    let kinds = kinds.unwrap_or_else(|| {
        fields.notice(format!(
            "{} is missing: no layer attends, as its class has it",
            fields.path("attn_layer_indices")
        ));
        vec![Kind::Linear; layers]
    });
    assemble(source, &kinds, full(heads), mamba2_shape(fields, None)?, 262_144)
}

/// Granite 4 hybrids: Mamba-2 or attention by `layer_types`.
pub(super) fn granite_hybrid(source: &Source<'_>) -> Result<Geometry, ConfigError> {
    let fields = &source.fields;
    let layers = num_layers(fields)?;
    let heads = Heads::read(fields, HeadDim::Derived, KvHeads::QueryHeads)?;
    let kinds = types(source, layers, &LINEAR_AND_FULL)?.ok_or_else(|| fields.missing("layer_types"))?;
    assemble(source, &kinds, full(heads), mamba2_shape(fields, None)?, 2048)
}

/// Falcon-H1: attention and Mamba-2 side by side in every layer.
pub(super) fn falcon_h1(source: &Source<'_>) -> Result<Geometry, ConfigError> {
    let fields = &source.fields;
    let layers = num_layers(fields)?;
    let heads = Heads::read(fields, HeadDim::Derived, KvHeads::Required)?;
    let inner = fields.width("mamba_d_ssm")?;
    assemble(source, &vec![Kind::Hybrid; layers], full(heads), mamba2_shape(fields, inner)?, 8192)
}

/// Nemotron-H: one letter or word per layer; the number of layers is that of the list.
pub(super) fn nemotron_h(source: &Source<'_>) -> Result<Geometry, ConfigError> {
    let fields = &source.fields;
    let allowed = [Kind::Full, Kind::Linear, Kind::Mlp];
    let listed =
        ["layer_types", "layers_block_type"].into_iter().find_map(|key| fields.list(key).transpose());
    let kinds = match (listed.transpose()?, kinds::pattern(fields, "hybrid_override_pattern")?) {
        (Some(list), _) => {
            let layers = fields.integer("num_hidden_layers", 1, list.len().max(1))?.unwrap_or(list.len());
            types(source, layers, &allowed)?
        }
        (None, Some(kinds)) => {
            let layers =
                fields.integer("num_hidden_layers", 1, super::fields::MAX_LAYERS)?.unwrap_or(kinds.len());
            kinds::check_len(fields, "hybrid_override_pattern", kinds.len(), layers)?;
            Some(kinds[..layers].to_vec())
        }
        (None, None) => None,
    };
    let kinds =
        kinds.filter(|kinds| !kinds.is_empty()).ok_or_else(|| fields.missing("hybrid_override_pattern"))?;
    let mut heads = Heads::read(fields, HeadDim::Default(128), KvHeads::Required)?;
    if let Some(width) = fields.width("attention_head_dim")? {
        heads.head_dim = width;
    }
    let shape = state::mamba2(
        fields.required_count("mamba_num_heads")?,
        fields.required_width("mamba_head_dim")?,
        fields.width_or(&["n_groups", "mamba_n_groups"], 8)?,
        fields.width_or(&["ssm_state_size", "mamba_d_state"], 128)?,
        fields.width_or(&["conv_kernel", "mamba_d_conv"], 4)?,
    );
    assemble(source, &kinds, full(heads), shape, 4096)
}

/// LFM2: short convolutions, and attention in the listed layers; without a list every layer attends.
pub(super) fn lfm2(source: &Source<'_>) -> Result<Geometry, ConfigError> {
    let fields = &source.fields;
    let layers = num_layers(fields)?;
    let heads = Heads::read(fields, HeadDim::Derived, KvHeads::Required)?;
    let kinds = match types(source, layers, &[Kind::Full, Kind::Conv])? {
        Some(kinds) => Some(kinds),
        None => kinds::indexed(fields, "full_attn_idxs", layers, 0, Kind::Full, Kind::Conv)?,
    };
    let kinds = kinds.unwrap_or_else(|| {
        fields.notice(format!(
            "{} is missing: every layer attends, as its class has it",
            fields.path("layer_types")
        ));
        vec![Kind::Full; layers]
    });
    let channels = fields.required_width("hidden_size")?;
    let shape = state::channels(channels, fields.width_or(&["conv_L_cache"], 3)?);
    assemble(source, &kinds, full(heads), shape, 128_000)
}

/// RecurrentGemma: `block_types` repeated; attention sees a window.
pub(super) fn recurrent_gemma(source: &Source<'_>) -> Result<Geometry, ConfigError> {
    let fields = &source.fields;
    let layers = num_layers(fields)?;
    let heads = Heads::read(fields, HeadDim::Derived, KvHeads::QueryHeads)?;
    let cycle = match fields.texts("block_types")? {
        Some(words) if !words.is_empty() => words,
        _ => {
            fields.default("block_types", "recurrent, recurrent, attention");
            vec!["recurrent", "recurrent", "attention"]
        }
    };
    let cycle_len = cycle.len();
    let kinds = cycle.into_iter().enumerate().map(|(index, word)| match word {
        "recurrent" => Ok(Kind::Linear),
        "attention" => Ok(Kind::Sliding),
        _ => Err(ConfigError::UnknownLayer {
            path: format!("{}[{index}]", fields.path("block_types")),
            got: word.chars().take(40).collect(),
            family: source.family.clone(),
            known: "recurrent, attention".to_owned(),
        }),
    });
    let cycle: Vec<Kind> = kinds.collect::<Result<_, _>>()?;
    let window = fields.integer("attention_window_size", 1, MAX_LEN)?;
    let window = window.unwrap_or_else(|| fields.default("attention_window_size", 2048));
    let attention = AttentionSpec { window: Some(window), ..heads.spec(None) };
    let width = match fields.width("lru_width")? {
        Some(width) => width,
        None => fields.required_width("hidden_size")?,
    };
    let shape =
        StateShape { recurrent: width, ..state::channels(width, fields.width_or(&["conv1d_width"], 4)?) };
    let kinds = by(layers, |layer| cycle[layer % cycle_len]);
    assemble(source, &kinds, CacheSpec::Attention(attention), shape, 8192)
}

/// Mamba and Falcon-Mamba: no attention at all.
pub(super) fn mamba(source: &Source<'_>) -> Result<Geometry, ConfigError> {
    let fields = &source.fields;
    let inner = match fields.width("intermediate_size")? {
        Some(inner) => inner,
        None => fields.required_width("hidden_size")? * fields.width_or(&["expand"], 2)?,
    };
    let shape =
        state::mamba1(inner, fields.width_or(&["state_size"], 16)?, fields.width_or(&["conv_kernel"], 4)?);
    pure(source, shape)
}

/// Mamba-2: no attention at all.
pub(super) fn mamba2(source: &Source<'_>) -> Result<Geometry, ConfigError> {
    let fields = &source.fields;
    let head_dim = fields.width_or(&["head_dim"], 64)?;
    let inner = fields.required_width("hidden_size")? * fields.width_or(&["expand"], 2)?;
    let heads = fields.count("num_heads")?.unwrap_or(inner / head_dim);
    let shape = state::mamba2(
        heads.max(1),
        head_dim,
        fields.width_or(&["n_groups"], 8)?,
        fields.width_or(&["state_size"], 128)?,
        fields.width_or(&["conv_kernel"], 4)?,
    );
    pure(source, shape)
}

/// A state in every layer; without positions, any length will do.
fn pure(source: &Source<'_>, shape: StateShape) -> Result<Geometry, ConfigError> {
    let fields = &source.fields;
    let state = shape.spec(fields, StateDtypes::of(fields, source.dtype)?)?;
    Ok(Geometry {
        layers: vec![CacheSpec::Recurrent(state); num_layers(fields)?],
        max_model_len: context::published_len(fields)?.unwrap_or(MAX_LEN),
        ..Geometry::default()
    })
}

fn by(layers: usize, kind: impl Fn(usize) -> Kind) -> Vec<Kind> {
    (0..layers).map(kind).collect()
}

fn period_and_offset(
    fields: &Fields<'_>,
    period: usize,
    offset: usize,
) -> Result<(usize, usize), ConfigError> {
    let key = "attn_layer_period";
    let period = fields.integer(key, 1, MAX_COUNT)?.unwrap_or_else(|| fields.default(key, period));
    let key = "attn_layer_offset";
    let offset = fields.integer(key, 0, MAX_COUNT)?.unwrap_or_else(|| fields.default(key, offset));
    if offset >= period {
        return Err(fields.inconsistent(key, format!("{offset} is not below attn_layer_period {period}")));
    }
    Ok((period, offset))
}

/// Mamba-1 with the `mamba_*` names.
fn mamba1_shape(fields: &Fields<'_>) -> Result<StateShape, ConfigError> {
    let inner = fields.required_width("hidden_size")? * fields.width_or(&["mamba_expand"], 2)?;
    Ok(state::mamba1(inner, fields.width_or(&["mamba_d_state"], 16)?, fields.width_or(&["mamba_d_conv"], 4)?))
}

/// Mamba-2 with the `mamba_*` names; `inner` channels, or `mamba_expand` times the hidden size.
fn mamba2_shape(fields: &Fields<'_>, inner: Option<usize>) -> Result<StateShape, ConfigError> {
    let inner = match inner {
        Some(inner) => inner,
        None => fields.required_width("hidden_size")? * fields.width_or(&["mamba_expand"], 2)?,
    };
    let heads = fields.required_count("mamba_n_heads")?;
    let head_dim = match fields.value("mamba_d_head") {
        Some(serde_json::Value::String(word)) if word == "auto" => inner / heads,
        None => inner / heads,
        Some(_) => fields.integer("mamba_d_head", 1, MAX_WIDTH)?.unwrap_or(0),
    };
    if heads.saturating_mul(head_dim) != inner {
        let problem = format!("{heads} heads of {head_dim} are not the {inner} Mamba channels");
        return Err(fields.inconsistent("mamba_d_head", problem));
    }
    Ok(state::mamba2(
        heads,
        head_dim,
        fields.width_or(&["mamba_n_groups"], 1)?,
        fields.required_width("mamba_d_state")?,
        fields.width_or(&["mamba_d_conv"], 4)?,
    ))
}
