//! The longest sequence a model was made for.

use super::{
    ConfigError,
    fields::{Fields, MAX_LEN},
};

/// Names under which the length stands, most usual first.
const LENGTH_KEYS: [&str; 6] = [
    "max_position_embeddings",
    "model_max_length",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
];

/// `max_position_embeddings` times the RoPE factor where the published length is the unscaled one.
///
/// The length is scaled only when the scaling's original length equals it or is not given: most files
/// publish the scaled length already. `already_scaled` families are never scaled (Gemma 3).
pub(super) fn max_model_len(
    fields: &Fields<'_>,
    default: usize,
    already_scaled: bool,
) -> Result<usize, ConfigError> {
    let len = published_len(fields)?.unwrap_or_else(|| fields.default(LENGTH_KEYS[0], default));
    if already_scaled {
        return Ok(len);
    }
    let Some(scaling) = rope_scaling(fields)? else { return Ok(len) };
    let kind = match scaling.text("rope_type")? {
        Some(kind) => Some(kind),
        None => scaling.text("type")?,
    };
    let Some(factor) = scaling.number("factor")? else { return Ok(len) };
    // These stretch nothing, or name the stretched length as max_position_embeddings by definition.
    if matches!(kind, None | Some("default" | "mrope" | "su" | "longrope" | "llama3" | "proportional")) {
        return Ok(len);
    }
    let original = match scaling.integer("original_max_position_embeddings", 1, MAX_LEN)? {
        Some(original) => Some(original),
        None => fields.integer("original_max_position_embeddings", 1, MAX_LEN)?,
    };
    if original.is_some_and(|original| original != len) {
        return Ok(len);
    }
    let scaled = len as f64 * factor;
    if factor < 1.0 || scaled > MAX_LEN as f64 {
        return Err(ConfigError::OutOfRange {
            path: scaling.path("factor"),
            got: factor.to_string(),
            expected: format!("a factor of at least 1 that keeps {len} tokens within {MAX_LEN}"),
        });
    }
    Ok(scaled as usize)
}

/// The length under the first of its names that stands there.
pub(super) fn published_len(fields: &Fields<'_>) -> Result<Option<usize>, ConfigError> {
    for key in LENGTH_KEYS {
        if let Some(len) = fields.integer(key, 1, MAX_LEN)? {
            return Ok(Some(len));
        }
    }
    Ok(None)
}

/// `rope_scaling`, or `rope_parameters` as newer files spell it; of parameters per kind of layer those
/// of the full-attention layers.
fn rope_scaling<'a>(fields: &Fields<'a>) -> Result<Option<Fields<'a>>, ConfigError> {
    for key in ["rope_scaling", "rope_parameters"] {
        if let Some(scaling) = fields.object(key)? {
            return Ok(match scaling.object("full_attention")? {
                Some(full) => Some(full),
                None => Some(scaling),
            });
        }
    }
    Ok(None)
}
