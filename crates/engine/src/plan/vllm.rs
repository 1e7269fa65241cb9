//! What the same cache would take in vLLM's unified pages, to check a plan against a vLLM log.
//!
//! vLLM shares one pool among unlike layers. Attention pages of a hybrid are made as large as the
//! recurrent state: with `a` bytes per token and attention layer, and `A` the larger of the smallest
//! kernel block (16 tokens) and `--block-size`, the block has `A * ceil(state / (A * a))` tokens, and the
//! state is padded to the block's bytes. Where a layer is skipped (kept in the model's dtype), `a` is the
//! least common multiple of both rows. Dense models keep the block size and pay the sum of the layers.

use turboquant::{format::CacheDtype, layout::RowLayout};

use super::{PlanError, PlanOptions, rank};
use crate::config::{AttentionSpec, CacheSpec, CompressedSpec, ModelConfig, StateSpec};

/// Smallest block of vLLM's attention kernels.
const KERNEL_BLOCK: u64 = 16;

/// Pages as vLLM would size them.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct VllmPages {
    /// Model layers kept in the model's dtype: the boundary of dense models and the skip list.
    pub native_layers: Vec<usize>,
    /// The hybrid's common page; `None` for models without recurrent layers.
    pub unified: Option<UnifiedPage>,
    /// Tokens of a block: vLLM's `block_size`, its granularity of allocation and prefix reuse.
    pub block_tokens: u64,
    /// Bytes of one block over all attention layers.
    pub block_bytes: u64,
    /// Part of `block_bytes` that belongs to windowed layers, by window: those keep a window of blocks.
    #[serde(skip)]
    pub windowed_block_bytes: Vec<(usize, u64)>,
    /// Pages of recurrent layers that one sequence needs, padding included, in bytes.
    pub state_bytes: u64,
    /// Tokens of one step, which windowed layers hold beside the window.
    #[serde(skip)]
    pub max_num_batched_tokens: u64,
    /// Why vLLM would not start with this, where that is known.
    pub refusals: Vec<String>,
}

/// One page of a hybrid model.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct UnifiedPage {
    /// Bytes per token that the block is a multiple of.
    pub bytes_per_token: u64,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Bytes of a state.
    pub state_bytes: u64,
    /// What a state's page wastes.
    pub padding_bytes: u64,
    /// In per cent of the state, as vLLM logs it.
    pub padding_percent: f64,
    /// Tokens of a packed layer in a page.
    pub packed_tokens: u64,
    /// Tokens of a skipped layer in a page, where there is one.
    pub native_tokens: Option<u64>,
}

impl VllmPages {
    /// The pages of one rank.
    ///
    /// # Errors
    /// As [`super::Plan::build`]: unknown layers, ranks that divide nothing, row formats that do not
    /// exist.
    pub fn build(config: &ModelConfig, options: &PlanOptions) -> Result<Self, PlanError> {
        let native_layers = native_layers(config, options);
        let block = (options.page_size as u64).max(KERNEL_BLOCK);
        let mut shares = Vec::with_capacity(config.layers.len());
        for (layer, spec) in config.layers.iter().enumerate() {
            shares.push(rank::share(spec, options.tensor_parallel).map_err(|problem| {
                PlanError::TensorParallel { ranks: options.tensor_parallel, layer, problem }
            })?);
        }
        let auto = CacheDtype::Auto;
        let mut rows = Vec::new();
        for (layer, spec) in shares.iter().enumerate() {
            let dtype = if native_layers.contains(&layer) { auto } else { options.dtype };
            rows.push(match spec {
                CacheSpec::Attention(attention) | CacheSpec::Hybrid(attention, _) => Some(Row {
                    bytes: token_bytes(config, attention, dtype, layer)?,
                    native: token_bytes(config, attention, auto, layer)?,
                    skipped: native_layers.contains(&layer),
                    window: attention.window,
                }),
                CacheSpec::Latent { width, .. } | CacheSpec::Compressed(CompressedSpec { width, .. }) => {
                    let bytes = (*width * config.dtype.bytes()) as u64;
                    let window = match spec {
                        CacheSpec::Compressed(spec) => Some(spec.window),
                        _ => None,
                    };
                    Some(Row { bytes, native: bytes, skipped: false, window })
                }
                CacheSpec::Recurrent(_) | CacheSpec::Shared { .. } | CacheSpec::None => None,
            });
        }
        let states: Vec<u64> =
            shares.iter().filter_map(CacheSpec::state).map(|state| vllm_state_bytes(config, state)).collect();
        let unified = unify(&rows, states.iter().copied().max().unwrap_or(0), block)?;
        let block_tokens = unified.map_or(block, |page| page.packed_tokens);
        let attention_pages = rows.iter().flatten().count() as u64;
        let block_bytes = match unified {
            Some(page) => page.page_bytes.checked_mul(attention_pages),
            None => rows
                .iter()
                .flatten()
                .try_fold(0u64, |sum, row| sum.checked_add(row.bytes.checked_mul(block)?)),
        };
        let page_bytes = |row: &Row| match unified {
            Some(page) => Some(page.page_bytes),
            None => row.bytes.checked_mul(block),
        };
        let mut windowed_block_bytes: Vec<(usize, u64)> = Vec::new();
        for row in rows.iter().flatten() {
            let (Some(window), Some(bytes)) = (row.window, page_bytes(row)) else { continue };
            match windowed_block_bytes.iter_mut().find(|(known, _)| *known == window) {
                Some((_, sum)) => *sum = sum.saturating_add(bytes),
                None => windowed_block_bytes.push((window, bytes)),
            }
        }
        let state_page = unified.map_or(0, |page| page.page_bytes);
        Ok(VllmPages {
            refusals: refusals(config, options, &shares),
            native_layers,
            unified,
            block_tokens,
            block_bytes: block_bytes.ok_or(PlanError::TooLarge)?,
            windowed_block_bytes,
            max_num_batched_tokens: options.max_num_batched_tokens as u64,
            state_bytes: state_page.checked_mul(states.len() as u64).ok_or(PlanError::TooLarge)?,
        })
    }

    /// Bytes of the blocks that one sequence of `tokens` tokens holds at most. A windowed layer holds its
    /// window, a step of prompt and one block for the alignment. What vLLM pads when the pages of unlike
    /// layers are made equal is not in here, except for recurrent states.
    pub fn sequence_bytes(&self, tokens: u64) -> u64 {
        let blocks = |tokens: u64| tokens.div_ceil(self.block_tokens);
        let mut full_bytes = self.block_bytes;
        let mut bytes = self.state_bytes;
        for &(window, block_bytes) in &self.windowed_block_bytes {
            full_bytes = full_bytes.saturating_sub(block_bytes);
            let held = blocks((window as u64 - 1).saturating_add(self.max_num_batched_tokens)) + 1;
            bytes = bytes.saturating_add(blocks(tokens).min(held).saturating_mul(block_bytes));
        }
        bytes.saturating_add(blocks(tokens).saturating_mul(full_bytes))
    }
}

/// Where the config names no dtype for it, vLLM keeps the recurrent state in the model's, except that of
/// Kimi's delta attention.
fn vllm_state_bytes(config: &ModelConfig, state: &StateSpec) -> u64 {
    let model_dtype = !state.dtype_named && !config.model_type.starts_with("kimi");
    let recurrent =
        if model_dtype { state.recurrent_bytes / 4 * config.dtype.bytes() } else { state.recurrent_bytes };
    (state.conv_bytes + recurrent) as u64
}

/// Bytes per token of one layer: as asked for, and in the model's dtype.
#[derive(Debug, Clone, Copy)]
struct Row {
    bytes: u64,
    native: u64,
    skipped: bool,
    window: Option<usize>,
}

fn token_bytes(
    config: &ModelConfig,
    spec: &AttentionSpec,
    dtype: CacheDtype,
    layer: usize,
) -> Result<u64, PlanError> {
    let rows = RowLayout::new(dtype.row_format(config.dtype), spec.key_head_dim, spec.value_head_dim)
        .map_err(|error| PlanError::HeadDim { layer, dtype, reason: error.to_string() })?;
    Ok((spec.num_kv_heads * rows.slot_bytes) as u64)
}

/// The common page of packed, skipped and recurrent layers. vLLM prices all attention layers as the
/// first packed one.
fn unify(rows: &[Option<Row>], state_bytes: u64, block: u64) -> Result<Option<UnifiedPage>, PlanError> {
    let attention = || rows.iter().flatten();
    let Some(first) = attention().find(|row| !row.skipped).or_else(|| attention().next()) else {
        return Ok(None);
    };
    if state_bytes == 0 {
        return Ok(None);
    }
    let skipped = attention().any(|row| row.skipped && first.bytes != row.bytes);
    let bytes_per_token =
        if skipped { lcm(first.bytes, first.native).ok_or(PlanError::TooLarge)? } else { first.bytes };
    let unit = block.checked_mul(bytes_per_token).ok_or(PlanError::TooLarge)?;
    let page_bytes = unit.checked_mul(state_bytes.div_ceil(unit)).ok_or(PlanError::TooLarge)?;
    let padding_bytes = page_bytes - state_bytes;
    Ok(Some(UnifiedPage {
        bytes_per_token,
        page_bytes,
        state_bytes,
        padding_bytes,
        padding_percent: 100.0 * padding_bytes as f64 / state_bytes as f64,
        packed_tokens: page_bytes / first.bytes,
        native_tokens: skipped.then(|| page_bytes / first.native),
    }))
}

/// Two model layers at each end of a dense model under a TurboQuant preset, and the skip list.
fn native_layers(config: &ModelConfig, options: &PlanOptions) -> Vec<usize> {
    let count = config.layers.len();
    let turboquant = matches!(options.dtype, CacheDtype::TurboQuant(_));
    let each = if turboquant && !config.is_hybrid() { 2.min(count / 2) } else { 0 };
    let windowed = |layer: usize| config.layers[layer].attention().is_some_and(|spec| spec.window.is_some());
    (0..count)
        .filter(|&layer| {
            layer < each
                || layer >= count - each
                || options.skip_layers.layers.contains(&layer)
                || (options.skip_layers.sliding_window && windowed(layer))
        })
        .collect()
}

/// What vLLM 0.33 does not run with a TurboQuant dtype.
fn refusals(config: &ModelConfig, options: &PlanOptions, shares: &[CacheSpec]) -> Vec<String> {
    let CacheDtype::TurboQuant(preset) = options.dtype else { return Vec::new() };
    let mut refusals = Vec::new();
    let latent = |spec: &CacheSpec| matches!(spec, CacheSpec::Latent { .. } | CacheSpec::Compressed(_));
    if shares.iter().any(latent) {
        refusals.push("no MLA backend takes a TurboQuant dtype".to_owned());
    }
    let attention: Vec<&AttentionSpec> = shares.iter().filter_map(CacheSpec::attention).collect();
    if attention.iter().any(|spec| spec.window.is_some()) && !options.skip_layers.sliding_window {
        refusals.push(
            "sliding-window layers are refused; --kv-cache-dtype-skip-layers sliding_window keeps them native"
                .to_owned(),
        );
    }
    let rotated = preset != turboquant::format::Preset::K8V4;
    if let Some(spec) = attention.iter().find(|spec| rotated && !spec.key_head_dim.is_power_of_two()) {
        refusals.push(format!(
            "head_dim {} is no power of two: the rotation fails at the first step",
            spec.key_head_dim
        ));
    }
    if attention.iter().any(|spec| spec.key_head_dim != spec.value_head_dim) {
        refusals.push("values as wide as keys are assumed; this model's differ".to_owned());
    }
    if config.is_hybrid() && attention.is_empty() {
        refusals.push("no attention layer is found".to_owned());
    }
    refusals
}

fn lcm(a: u64, b: u64) -> Option<u64> {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x.max(1)).checked_mul(b)
}
