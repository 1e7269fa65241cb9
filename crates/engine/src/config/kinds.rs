//! Which kind each layer is: every spelling that published configs use, read into one list.

use super::{
    ConfigError,
    fields::{Fields, MAX_COUNT, MAX_LAYERS},
};

/// What a layer does with the past, before its geometry is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Attends to everything.
    Full,
    /// Attends to a sliding window.
    Sliding,
    /// Attends to its own chunk.
    Chunked,
    /// Attends sparsely, by an indexer's choice.
    Indexed,
    /// Compressed attention; the tokens of one compressed vector are `ratio`, 0 for the window alone.
    Compressed { ratio: usize },
    /// Mamba, delta rule, linear attention.
    Linear,
    /// Short convolution.
    Conv,
    /// Attention and a recurrent state in one layer.
    Hybrid,
    /// An MLP alone.
    Mlp,
}

/// The words of `layer_types` and `layers_block_type`, old and new.
fn kind_of(word: &str) -> Option<Kind> {
    Some(match word {
        "full_attention" | "attention" | "*" => Kind::Full,
        "sliding_attention" | "window_attention" | "local_attention" => Kind::Sliding,
        "chunked_attention" => Kind::Chunked,
        "indexed_attention" | "deepseek_sparse_attention" => Kind::Indexed,
        "linear_attention" | "mamba" | "mamba2" | "recurrent" | "M" => Kind::Linear,
        "conv" => Kind::Conv,
        "hybrid" => Kind::Hybrid,
        "moe" | "mlp" | "dense" | "sparse" | "E" | "-" => Kind::Mlp,
        _ => return None,
    })
}

/// The number of layers, from `num_hidden_layers`.
pub(super) fn num_layers(fields: &Fields<'_>) -> Result<usize, ConfigError> {
    fields.integer("num_hidden_layers", 1, MAX_LAYERS)?.ok_or_else(|| fields.missing("num_hidden_layers"))
}

/// A per-layer list under `key`, words checked against those that `family` has. It may be longer than
/// the model by its multi-token-prediction layers, which are not part of it.
pub(super) fn listed(
    fields: &Fields<'_>,
    key: &str,
    layers: usize,
    family: &str,
    allowed: &[Kind],
) -> Result<Option<Vec<Kind>>, ConfigError> {
    let Some(words) = fields.texts(key)? else { return Ok(None) };
    check_len(fields, key, words.len(), layers)?;
    let kinds = words[..layers].iter().enumerate().map(|(index, word)| {
        kind_of(word).filter(|kind| allowed.contains(kind)).ok_or_else(|| ConfigError::UnknownLayer {
            path: format!("{}[{index}]", fields.path(key)),
            got: word.chars().take(40).collect(),
            family: family.to_owned(),
            known: words_of(allowed),
        })
    });
    kinds.collect::<Result<_, _>>().map(Some)
}

/// `layer_types`, or its older name.
pub(super) fn layer_types(
    fields: &Fields<'_>,
    layers: usize,
    family: &str,
    allowed: &[Kind],
) -> Result<Option<Vec<Kind>>, ConfigError> {
    for key in ["layer_types", "layers_block_type"] {
        if let Some(kinds) = listed(fields, key, layers, family, allowed)? {
            return Ok(Some(kinds));
        }
    }
    Ok(None)
}

/// A pattern string such as `M-M*-E`, one letter a layer.
pub(super) fn pattern(fields: &Fields<'_>, key: &str) -> Result<Option<Vec<Kind>>, ConfigError> {
    let Some(letters) = fields.text(key)? else { return Ok(None) };
    let kinds = letters.chars().enumerate().map(|(index, letter)| match letter {
        'M' => Ok(Kind::Linear),
        '*' => Ok(Kind::Full),
        '-' | 'E' => Ok(Kind::Mlp),
        _ => Err(ConfigError::UnknownLayer {
            path: format!("{}[{index}]", fields.path(key)),
            got: letter.to_string(),
            family: "pattern".to_owned(),
            known: "M (Mamba), * (attention), - (MLP), E (experts)".to_owned(),
        }),
    });
    let kinds: Vec<Kind> = kinds.collect::<Result<_, _>>()?;
    if kinds.is_empty() || kinds.len() > MAX_LAYERS {
        return Err(fields.inconsistent(key, format!("{} layers; 1 to {MAX_LAYERS} are read", kinds.len())));
    }
    Ok(Some(kinds))
}

/// A list of layer indices under `key`, counted from `base`: those are `inside`, the others `outside`.
pub(super) fn indexed(
    fields: &Fields<'_>,
    key: &str,
    layers: usize,
    base: usize,
    inside: Kind,
    outside: Kind,
) -> Result<Option<Vec<Kind>>, ConfigError> {
    let Some(indices) = fields.integers(key, base, base + layers - 1)? else { return Ok(None) };
    let mut kinds = vec![outside; layers];
    for index in indices {
        kinds[index - base] = inside;
    }
    Ok(Some(kinds))
}

/// A list of 0 and 1 under `key`.
pub(super) fn switched(
    fields: &Fields<'_>,
    key: &str,
    layers: usize,
    zero: Kind,
    one: Kind,
) -> Result<Option<Vec<Kind>>, ConfigError> {
    let Some(bits) = fields.integers(key, 0, 1)? else { return Ok(None) };
    check_len(fields, key, bits.len(), layers)?;
    Ok(Some(bits[..layers].iter().map(|&bit| if bit == 1 { one } else { zero }).collect()))
}

/// The last layer of every `interval` is `last`, the others are `others`.
pub(super) fn every(layers: usize, interval: usize, others: Kind, last: Kind) -> Vec<Kind> {
    (1..=layers).map(|place| if place.is_multiple_of(interval) { last } else { others }).collect()
}

/// A list must have an entry per layer; further entries are those of multi-token-prediction layers.
pub(super) fn check_len(
    fields: &Fields<'_>,
    key: &str,
    len: usize,
    layers: usize,
) -> Result<(), ConfigError> {
    let mut prediction = 0;
    for key in ["num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"] {
        prediction = prediction.max(fields.integer(key, 0, MAX_COUNT)?.unwrap_or(0));
    }
    if (layers..=layers + prediction).contains(&len) {
        return Ok(());
    }
    Err(fields.inconsistent(key, format!("it has {len} entries, but num_hidden_layers is {layers}")))
}

fn words_of(allowed: &[Kind]) -> String {
    let words: Vec<&str> = allowed
        .iter()
        .map(|kind| match kind {
            Kind::Full => "full_attention",
            Kind::Sliding => "sliding_attention",
            Kind::Chunked => "chunked_attention",
            Kind::Indexed => "indexed_attention",
            Kind::Compressed { .. } => "a compressed attention",
            Kind::Linear => "linear_attention or mamba",
            Kind::Conv => "conv",
            Kind::Hybrid => "hybrid",
            Kind::Mlp => "mlp or moe",
        })
        .collect();
    words.join(", ")
}
