//! Families whose layers all hold keys and values per head: a table of how their classes fill in what a
//! file leaves out. Defaults are those of the transformers 5.23 config classes.

use super::{
    AttentionSpec, CacheSpec, ConfigError, Geometry, Source, context,
    fields::{Fields, MAX_COUNT, MAX_LEN},
    kinds::{self, Kind},
};

/// Where the width of a head comes from when `head_dim` is absent.
#[derive(Debug, Clone, Copy)]
pub(super) enum HeadDim {
    /// `hidden_size / num_attention_heads`, which must divide.
    Derived,
    /// The class says.
    Default(usize),
}

/// Where the KV heads come from when `num_key_value_heads` is absent. (Null always means as many as
/// query heads.)
#[derive(Debug, Clone, Copy)]
pub(super) enum KvHeads {
    /// The class's default is "as many as query heads".
    QueryHeads,
    /// The class's default is a number of one model size; a file without it is refused.
    Required,
    /// A list per layer, which the caller reads.
    Listed,
}

/// Which layers slide when there is no `layer_types`.
#[derive(Debug, Clone, Copy)]
pub(super) enum Window {
    /// None: the family knows no window.
    Never,
    /// All, when `sliding_window` (or the class's default) is a number.
    All(Option<usize>),
    /// Layers from `max_window_layers` on, when `use_sliding_window` is true.
    Switched { from_layer: usize },
    /// All, when `use_sliding_window` is true.
    SwitchedAll,
    /// Even layers below `max_window_layers`, when `use_sliding_window` is true.
    SwitchedEven,
    /// All but the last of every `interval` layers, the interval being under `key` or the default.
    AllButEvery { key: &'static str, interval: usize, window: usize },
    /// Layers from `max_window_layers` on, when `sliding_window` is a number.
    FromLayer { from_layer: usize, window: usize },
    /// Layers without RoPE, when `use_sliding_window` is true (SmolLM3).
    NoRope,
    /// All but the first of every four layers (CWM).
    AllButFirstOfFour { window: usize },
}

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plain {
    pub head_dim: HeadDim,
    pub kv_heads: KvHeads,
    pub window: Window,
    /// `max_position_embeddings`
    pub len: usize,
}

const fn plain(head_dim: HeadDim, kv_heads: KvHeads, window: Window, len: usize) -> Plain {
    Plain { head_dim, kv_heads, window, len }
}

use HeadDim::{Default as Fixed, Derived};
use KvHeads::{QueryHeads, Required};
use Window::{
    All, AllButEvery, AllButFirstOfFour, FromLayer, Never, NoRope, Switched, SwitchedAll, SwitchedEven,
};

const fn patterned(interval: usize, window: usize) -> Window {
    AllButEvery { key: "sliding_window_pattern", interval, window }
}

/// The families, by `model_type`.
pub(super) const FAMILIES: &[(&[&str], Plain)] = &[
    (
        &["llama", "arcee", "hyperclovax", "granite", "granitemoe", "granitemoeshared"],
        plain(Derived, QueryHeads, Never, 2048),
    ),
    (
        &["olmo", "olmo2", "hunyuan_v1_dense", "hunyuan_v1_moe", "diffllama"],
        plain(Derived, QueryHeads, Never, 2048),
    ),
    (&["olmoe", "flex_olmo", "nemotron"], plain(Derived, QueryHeads, Never, 4096)),
    (&["phi"], plain(Derived, QueryHeads, Never, 2048)),
    (&["persimmon"], plain(Derived, QueryHeads, Never, 16384)),
    (&["cohere", "jais2"], plain(Derived, QueryHeads, Never, 8192)),
    (&["apertus"], plain(Derived, QueryHeads, Never, 65536)),
    (&["gpt_neox"], plain(Derived, QueryHeads, Never, 2048)),
    (&["stablelm"], plain(Derived, Required, Never, 4096)),
    (&["bitnet"], plain(Derived, Required, Never, 2048)),
    (&["ernie4_5_moe", "glm4_moe"], plain(Derived, Required, Never, 131_072)),
    (&["ernie4_5", "glm", "glm4", "solar_open"], plain(Fixed(128), Required, Never, 131_072)),
    (&["internlm3"], plain(Fixed(128), Required, Never, 32768)),
    (&["helium"], plain(Fixed(128), Required, Never, 4096)),
    (&["seed_oss"], plain(Fixed(128), Required, Never, 524_288)),
    (&["gemma"], plain(Fixed(256), Required, Never, 8192)),
    (&["mistral"], plain(Derived, Required, All(Some(4096)), 131_072)),
    (&["ministral"], plain(Derived, Required, All(Some(4096)), 131_072)),
    (&["ministral3"], plain(Fixed(128), Required, All(None), 262_144)),
    (&["mixtral", "phimoe", "phi4_multimodal"], plain(Derived, Required, All(None), 131_072)),
    (&["phi3"], plain(Derived, QueryHeads, All(None), 4096)),
    (&["starcoder2"], plain(Derived, Required, All(None), 4096)),
    (&["qwen2"], plain(Derived, Required, Switched { from_layer: 28 }, 32768)),
    (
        &["qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"],
        plain(Derived, Required, Switched { from_layer: 80 }, 32768),
    ),
    (&["qwen2_moe"], plain(Derived, Required, SwitchedEven, 32768)),
    (&["qwen3"], plain(Fixed(128), Required, Switched { from_layer: 28 }, 32768)),
    (&["qwen3_moe"], plain(Derived, Required, SwitchedAll, 32768)),
    (&["qwen3_vl", "qwen3_vl_text"], plain(Fixed(128), Required, Never, 128_000)),
    (&["qwen3_vl_moe", "qwen3_vl_moe_text"], plain(Derived, Required, Never, 128_000)),
    (&["gemma2"], plain(Fixed(256), Required, patterned(2, 4096), 8192)),
    (&["vaultgemma"], plain(Fixed(256), Required, patterned(2, 4096), 8192)),
    (&["gpt_oss"], plain(Fixed(64), Required, patterned(2, 128), 131_072)),
    (&["cohere2"], plain(Derived, QueryHeads, patterned(4, 4096), 8192)),
    (&["exaone4", "exaone_moe"], plain(Derived, Required, patterned(4, 4096), 2048)),
    (&["olmo3"], plain(Derived, QueryHeads, patterned(4, 4096), 2048)),
    (
        &["afmoe"],
        plain(
            Fixed(128),
            QueryHeads,
            AllButEvery { key: "global_attn_every_n_layers", interval: 4, window: 1024 },
            16384,
        ),
    ),
    (&["cwm"], plain(Fixed(128), Required, AllButFirstOfFour { window: 8192 }, 131_072)),
    (&["dots1"], plain(Derived, Required, FromLayer { from_layer: 62, window: 4096 }, 2048)),
    (&["smollm3"], plain(Derived, Required, NoRope, 32768)),
    (&["minimax_m2"], plain(Fixed(128), Required, Never, 196_608)),
];

/// Heads of one kind of layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Heads {
    pub num_qo_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
}

impl Heads {
    /// `num_attention_heads`, `num_key_value_heads` and `head_dim` by the family's rules.
    pub(super) fn read(
        fields: &Fields<'_>,
        head_dim: HeadDim,
        kv_heads: KvHeads,
    ) -> Result<Self, ConfigError> {
        let num_qo_heads = fields.required_count("num_attention_heads")?;
        let num_kv_heads = match kv_heads {
            KvHeads::Listed => num_qo_heads,
            KvHeads::QueryHeads | KvHeads::Required => match fields.count("num_key_value_heads")? {
                Some(heads) => heads,
                None if matches!(kv_heads, KvHeads::Required) && !fields.has("num_key_value_heads") => {
                    return Err(fields.missing("num_key_value_heads"));
                }
                None => num_qo_heads,
            },
        };
        check_groups(fields, "num_key_value_heads", num_qo_heads, num_kv_heads)?;
        let head_dim = match (fields.width("head_dim")?, head_dim) {
            (Some(width), _) => width,
            (None, HeadDim::Default(width)) => fields.default("head_dim", width),
            (None, HeadDim::Derived) => derived_head_dim(fields, num_qo_heads)?,
        };
        Ok(Heads { num_qo_heads, num_kv_heads, head_dim })
    }

    /// Keys and values of the same width.
    pub(super) fn spec(self, window: Option<usize>) -> AttentionSpec {
        AttentionSpec {
            num_qo_heads: self.num_qo_heads,
            num_kv_heads: self.num_kv_heads,
            key_head_dim: self.head_dim,
            value_head_dim: self.head_dim,
            window,
        }
    }
}

/// Every KV head serves the same number of query heads.
pub(super) fn check_groups(
    fields: &Fields<'_>,
    key: &str,
    query: usize,
    kv: usize,
) -> Result<(), ConfigError> {
    if query.is_multiple_of(kv) {
        return Ok(());
    }
    Err(fields.inconsistent(key, format!("{kv} KV heads do not divide num_attention_heads {query}")))
}

fn derived_head_dim(fields: &Fields<'_>, heads: usize) -> Result<usize, ConfigError> {
    let hidden = fields.required_width("hidden_size")?;
    if hidden.is_multiple_of(heads) {
        return Ok(hidden / heads);
    }
    let problem = format!(
        "it is missing and cannot be derived: hidden_size {hidden} is no multiple of num_attention_heads {heads}"
    );
    Err(fields.inconsistent("head_dim", problem))
}

/// A dense model of one head shape.
pub(super) fn read(source: &Source<'_>, row: &Plain) -> Result<Geometry, ConfigError> {
    let fields = &source.fields;
    let layers = kinds::num_layers(fields)?;
    let listed = kv_heads_per_layer(fields, layers)?;
    let kv_heads = if listed.is_some() { KvHeads::Listed } else { row.kv_heads };
    let heads = Heads::read(fields, row.head_dim, kv_heads)?;
    let allowed = [Kind::Full, Kind::Sliding];
    let (kinds, window) = match kinds::layer_types(fields, layers, &source.family, &allowed)? {
        Some(kinds) => {
            let slides = kinds.contains(&Kind::Sliding);
            let window = if slides { Some(listed_window(fields, row.window)?) } else { None };
            (kinds, window)
        }
        None => unlisted(fields, layers, row.window)?,
    };
    let mut specs = Vec::with_capacity(layers);
    for (layer, kind) in kinds.iter().enumerate() {
        let spec = heads.spec(window.filter(|_| *kind == Kind::Sliding));
        specs.push(match &listed {
            None => CacheSpec::Attention(spec),
            Some(listed) if listed[layer] == 0 => CacheSpec::None,
            Some(listed) => {
                check_groups(fields, "num_key_value_heads", spec.num_qo_heads, listed[layer])?;
                CacheSpec::Attention(AttentionSpec { num_kv_heads: listed[layer], ..spec })
            }
        });
    }
    Ok(Geometry {
        layers: specs,
        max_model_len: context::max_model_len(fields, row.len, false)?,
        learned_sinks: source.family == "gpt_oss",
        chunked_windows: false,
    })
}

/// `num_key_value_heads` as a list, 0 where a layer does not attend.
fn kv_heads_per_layer(fields: &Fields<'_>, layers: usize) -> Result<Option<Vec<usize>>, ConfigError> {
    let key = "num_key_value_heads";
    if !fields.value(key).is_some_and(serde_json::Value::is_array) {
        return Ok(None);
    }
    let heads = fields.integers(key, 0, MAX_COUNT)?;
    if let Some(heads) = &heads {
        kinds::check_len(fields, key, heads.len(), layers)?;
    }
    Ok(heads)
}

/// The window of layers that `layer_types` calls sliding.
fn listed_window(fields: &Fields<'_>, rule: Window) -> Result<usize, ConfigError> {
    if let Some(window) = fields.integer("sliding_window", 1, MAX_LEN)? {
        return Ok(window);
    }
    match rule {
        All(Some(window))
        | AllButEvery { window, .. }
        | FromLayer { window, .. }
        | AllButFirstOfFour { window }
            if !fields.has("sliding_window") =>
        {
            Ok(fields.default("sliding_window", window))
        }
        _ => Err(fields.missing("sliding_window")),
    }
}

/// Kinds and window by the family's rule.
fn unlisted(
    fields: &Fields<'_>,
    layers: usize,
    rule: Window,
) -> Result<(Vec<Kind>, Option<usize>), ConfigError> {
    let window = |default: Option<usize>| -> Result<Option<usize>, ConfigError> {
        Ok(match fields.integer("sliding_window", 1, MAX_LEN)? {
            Some(window) => Some(window),
            None if fields.has("sliding_window") => None,
            None => default.map(|window| fields.default("sliding_window", window)),
        })
    };
    let switched = || -> Result<Option<usize>, ConfigError> {
        if fields.flag("use_sliding_window", false)? { window(Some(4096)) } else { Ok(None) }
    };
    let from_layer = |default: usize| -> Result<usize, ConfigError> {
        let from = fields.integer("max_window_layers", 0, MAX_COUNT)?;
        Ok(from.unwrap_or_else(|| fields.default("max_window_layers", default)))
    };
    let by = |slides: &dyn Fn(usize) -> bool| -> Vec<Kind> {
        (0..layers).map(|layer| if slides(layer) { Kind::Sliding } else { Kind::Full }).collect()
    };
    Ok(match rule {
        Never => (by(&|_| false), None),
        All(default) => {
            let window = window(default)?;
            (by(&|_| window.is_some()), window)
        }
        SwitchedAll => {
            let window = switched()?;
            (by(&|_| window.is_some()), window)
        }
        Switched { from_layer: default } => match switched()? {
            Some(window) => {
                let from = from_layer(default)?;
                (by(&|layer| layer >= from), Some(window))
            }
            None => (by(&|_| false), None),
        },
        SwitchedEven => match switched()? {
            Some(window) => {
                let below = from_layer(28)?;
                (by(&|layer| layer.is_multiple_of(2) && layer < below), Some(window))
            }
            None => (by(&|_| false), None),
        },
        FromLayer { from_layer: default, window: width } => match window(Some(width))? {
            Some(window) => {
                let from = from_layer(default)?;
                (by(&|layer| layer >= from), Some(window))
            }
            None => (by(&|_| false), None),
        },
        AllButEvery { key, interval, window: width } => match window(Some(width))? {
            Some(window) => {
                let interval = fields.integer(key, 1, MAX_COUNT)?.unwrap_or(interval);
                (kinds::every(layers, interval, Kind::Sliding, Kind::Full), Some(window))
            }
            None => (by(&|_| false), None),
        },
        AllButFirstOfFour { window: width } => {
            let window = window(Some(width))?;
            (by(&|layer| window.is_some() && !layer.is_multiple_of(4)), window)
        }
        NoRope => {
            let window = if fields.flag("use_sliding_window", false)? { window(None)? } else { None };
            let rope = rope_layers(fields, layers)?;
            (by(&|layer| window.is_some() && !rope[layer]), window)
        }
    })
}

/// Which layers rotate: `no_rope_layers` (1 where they do), or all but the last of every
/// `no_rope_layer_interval`. An empty list counts as none.
pub(super) fn rope_layers(fields: &Fields<'_>, layers: usize) -> Result<Vec<bool>, ConfigError> {
    if let Some(bits) = fields.integers("no_rope_layers", 0, 1)?
        && !bits.is_empty()
    {
        kinds::check_len(fields, "no_rope_layers", bits.len(), layers)?;
        return Ok(bits[..layers].iter().map(|&bit| bit == 1).collect());
    }
    let interval = fields.integer("no_rope_layer_interval", 1, MAX_COUNT)?.unwrap_or(4);
    Ok((1..=layers).map(|place| !place.is_multiple_of(interval)).collect())
}
