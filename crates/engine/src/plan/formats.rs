//! Which rows each layer gets, and why.

use turboquant::format::{CacheDtype, KeyFormat, RowFormat};

use super::{FormatReason, PlanError, PlanOptions};
use crate::config::{CacheSpec, ModelConfig};

/// First and last layers that stay in `auto` unless the user says otherwise.
pub const DEFAULT_BOUNDARY_LAYERS: usize = 2;

/// The norm of a key bias (one head's) up to which keys are stored as `format`; `None` is no limit.
///
/// A constant bias of norm B on keys whose other part has unit variance takes `1 + B^2 / head_dim` times
/// the energy that codes resolve, and the attention's error grows by that factor. Measured at head_dim
/// 128 (mean KL divergence of the attention weights): 4-bit codes 0.0047 without a bias, 0.037 at a norm
/// of 32, 0.11 at 60, 5.3 at 600; 3-bit codes 0.017, 0.045 at 16, 0.38 at 60; e4m3 keys 0.0004, 0.039
/// at 224, 0.2 at 400. The limits keep it within 0.05: `sqrt(8 d)`, `sqrt(2 d)` and `sqrt(390 d)`, or
/// 32, 16 and 223 at head_dim 128. Ordinary layers of Qwen2.5-7B have 22 over their four heads
/// together; its layers 0 and 27, which ruin the answers, 605 and 921.
pub fn key_bias_limit(format: KeyFormat, head_dim: usize) -> Option<f32> {
    let per_element = match format {
        KeyFormat::Native(_) => return None,
        KeyFormat::Fp8 => 390.0,
        KeyFormat::LloydMax { bits: 4.. } => 8.0,
        KeyFormat::LloydMax { .. } => 2.0,
    };
    Some((per_element * head_dim as f32).sqrt())
}

/// Format and reason per layer (of those that store keys and values), and notices.
pub(super) struct Formats {
    pub layers: Vec<Option<(RowFormat, FormatReason)>>,
    pub notices: Vec<String>,
}

pub(super) fn choose(config: &ModelConfig, options: &PlanOptions) -> Result<Formats, PlanError> {
    let count = config.layers.len();
    if let Some(&layer) = options.skip_layers.layers.iter().find(|&&layer| layer >= count) {
        return Err(PlanError::NoSuchLayer { layer, last: count.saturating_sub(1) });
    }
    let auto = CacheDtype::Auto.row_format(config.dtype);
    let asked = options.dtype.row_format(config.dtype);
    let boundary = boundary_layers(config, options);
    let mut biased = Vec::new();
    let layers = config.layers.iter().enumerate().map(|(index, spec)| {
        let attention = match spec {
            CacheSpec::Attention(attention) | CacheSpec::Hybrid(attention, _) => attention,
            CacheSpec::Latent { .. } | CacheSpec::Compressed(_) => {
                let reason = if asked == auto { FormatReason::Requested } else { FormatReason::Latent };
                return Some((auto, reason));
            }
            CacheSpec::Recurrent(_) | CacheSpec::Shared { .. } | CacheSpec::None => return None,
        };
        if asked == auto {
            return Some((auto, FormatReason::Requested));
        }
        let bias = options.key_bias_norms.get(index).copied().flatten().unwrap_or(0.0);
        let bias_limit = key_bias_limit(asked.key, attention.key_head_dim);
        Some(if options.skip_layers.layers.contains(&index) {
            (auto, FormatReason::SkipList)
        } else if options.skip_layers.sliding_window && attention.window.is_some() {
            (auto, FormatReason::Window)
        } else if boundary.contains(&index) {
            (auto, FormatReason::Boundary)
        } else if bias_limit.is_some_and(|limit| bias > limit || bias.is_nan()) {
            biased.push((index, bias, bias_limit.unwrap_or(0.0)));
            (auto, FormatReason::KeyBias)
        } else {
            (asked, FormatReason::Requested)
        })
    });
    let layers: Vec<_> = layers.collect();
    let mut notices = if asked == auto { without_effect(options) } else { skip_notices(config, options) };
    for (layer, norm, limit) in biased {
        notices.push(format!(
            "layer {layer} stays in auto: its key bias has norm {norm:.0}, more than the {limit:.0} that \
             {} keys bear",
            options.dtype
        ));
    }
    if layers.iter().flatten().any(|&(_, reason)| reason == FormatReason::Latent) {
        notices.push(format!(
            "{} does not apply to latent or compressed vectors: those layers stay in auto",
            options.dtype
        ));
    }
    Ok(Formats { layers, notices })
}

/// The first and last KV layers; each side is capped at half of them.
fn boundary_layers(config: &ModelConfig, options: &PlanOptions) -> Vec<usize> {
    let turboquant = matches!(options.dtype, CacheDtype::TurboQuant(_));
    let default = if turboquant && !config.is_hybrid() { DEFAULT_BOUNDARY_LAYERS } else { 0 };
    let owners: Vec<usize> =
        (0..config.layers.len()).filter(|&layer| config.layers[layer].attention().is_some()).collect();
    let each = options.boundary_layers.unwrap_or(default).min(owners.len() / 2);
    owners[..each].iter().chain(&owners[owners.len() - each..]).copied().collect()
}

/// What says which layers stay in auto, where all of them are.
fn without_effect(options: &PlanOptions) -> Vec<String> {
    let skip = &options.skip_layers;
    let flags = [
        ("--kv-cache-dtype-skip-layers", skip.sliding_window || !skip.layers.is_empty()),
        ("--kv-boundary-layers", options.boundary_layers.is_some_and(|layers| layers > 0)),
    ];
    let given = flags.into_iter().filter(|&(_, given)| given);
    given.map(|(flag, _)| format!("{flag} has no effect: every layer is in auto")).collect()
}

fn skip_notices(config: &ModelConfig, options: &PlanOptions) -> Vec<String> {
    let mut notices: Vec<String> = options
        .skip_layers
        .layers
        .iter()
        .filter_map(|&layer| {
            let why = match config.layers[layer] {
                CacheSpec::Attention(_) | CacheSpec::Hybrid(..) => return None,
                CacheSpec::Latent { .. } | CacheSpec::Compressed(_) => "is in auto anyway".to_owned(),
                CacheSpec::Recurrent(_) => "is recurrent and holds no keys and values".to_owned(),
                CacheSpec::Shared { owner } => {
                    format!("reads the keys and values of layer {owner}; name that one")
                }
                CacheSpec::None => "holds no keys and values".to_owned(),
            };
            Some(format!("--kv-cache-dtype-skip-layers {layer} has no effect: layer {layer} {why}"))
        })
        .collect();
    let windowed = |spec: &CacheSpec| spec.attention().is_some_and(|attention| attention.window.is_some());
    if options.skip_layers.sliding_window && !config.layers.iter().any(windowed) {
        notices.push(
            "--kv-cache-dtype-skip-layers sliding_window has no effect: no layer has a sliding window"
                .to_owned(),
        );
    }
    notices
}
