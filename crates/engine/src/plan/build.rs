//! [`Plan::build`]: specs, formats and the split put together.

use turboquant::{
    format::{CacheDtype, RowFormat},
    layout::RowLayout,
};

use super::{
    FormatReason, GroupPlan, LayerPlan, Lifetime, PagedPlan, Plan, PlanError, PlanOptions, SideKind,
    SidePlan, formats, rank, split::Split,
};
use crate::config::{AttentionSpec, CacheSpec, CompressedSpec, ModelConfig};

/// Page sizes that the attention kernels take.
const PAGE_SIZES: [usize; 5] = [16, 32, 64, 128, 256];

impl Plan {
    /// The cache of one rank of `config` under `options`.
    ///
    /// # Errors
    /// Whatever [`PlanError`] lists: no number is bent to make a plan possible, except that a
    /// `max_model_len` which was not asked for shrinks to what fits (with a notice).
    pub fn build(config: &ModelConfig, options: &PlanOptions) -> Result<Plan, PlanError> {
        let max_model_len = check(config, options)?;
        let chosen = formats::choose(config, options)?;
        let mut pages = Pages::new(config, options);
        for (index, spec) in config.layers.iter().enumerate() {
            let spec = rank::share(spec, options.tensor_parallel).map_err(|problem| {
                PlanError::TensorParallel { ranks: options.tensor_parallel, layer: index, problem }
            })?;
            pages.add_layer(index, &spec, chosen.layers[index])?;
        }
        let Pages { layers, mut groups, .. } = pages;
        let state_bytes =
            layers.iter().try_fold(0u64, |sum, layer| sum.checked_add(layer.state_bytes as u64));
        let split = Split {
            groups: &groups,
            page_size: options.page_size,
            max_model_len,
            max_num_seqs: options.max_num_seqs,
            max_num_batched_tokens: options.max_num_batched_tokens,
            state_bytes: state_bytes.ok_or(PlanError::TooLarge)?,
        };
        let mut notices = config.notices.clone();
        notices.extend(chosen.notices);
        let total_pages = split.pages(options.budget)?;
        let max_model_len = admitted_len(&split, options, total_pages, &mut notices)?;
        let num_states = if split.state_bytes > 0 { options.max_num_seqs } else { 0 };
        let counts: Vec<u64> = groups.iter().map(|group| split.group_pages(group, total_pages)).collect();
        for (group, count) in groups.iter_mut().zip(counts) {
            group.num_pages = usize::try_from(count).map_err(|_| PlanError::TooLarge)?;
        }
        Ok(Plan {
            page_size: options.page_size,
            layers,
            groups,
            num_states,
            num_tokens: total_pages.saturating_mul(options.page_size as u64),
            max_model_len,
            max_num_seqs: options.max_num_seqs,
            notices,
        })
    }
}

/// The longest sequence asked for, or the model's.
fn check(config: &ModelConfig, options: &PlanOptions) -> Result<usize, PlanError> {
    for (name, value) in [
        ("--max-num-seqs", options.max_num_seqs),
        ("--max-num-batched-tokens", options.max_num_batched_tokens),
        ("--tensor-parallel-size", options.tensor_parallel),
        ("--max-model-len", options.max_model_len.unwrap_or(1)),
        ("the model's context length", config.max_model_len),
        ("the number of layers", config.layers.len()),
    ] {
        if value == 0 {
            return Err(PlanError::Zero(name));
        }
    }
    if !PAGE_SIZES.contains(&options.page_size) {
        return Err(PlanError::PageSize(options.page_size));
    }
    match options.max_model_len {
        Some(asked) if asked > config.max_model_len => {
            Err(PlanError::MaxModelLen { asked, limit: config.max_model_len })
        }
        asked => Ok(asked.unwrap_or(config.max_model_len)),
    }
}

/// `max_model_len`, or what fits where the user named none.
fn admitted_len(
    split: &Split<'_>,
    options: &PlanOptions,
    pages: u64,
    notices: &mut Vec<String>,
) -> Result<usize, PlanError> {
    let wanted = split.max_model_len;
    let needed_pages = split.sequence_pages(wanted);
    if needed_pages <= pages {
        return Ok(wanted);
    }
    let longest = usize::try_from(pages).unwrap_or(usize::MAX).saturating_mul(split.page_size).min(wanted);
    match (options.max_model_len, options.budget) {
        (Some(max_model_len), super::Budget::Memory(available)) => Err(PlanError::DoesNotFit {
            max_model_len,
            seqs: split.max_num_seqs,
            needed: split.bytes(needed_pages).ok_or(PlanError::TooLarge)?,
            available,
            longest,
        }),
        _ => {
            notices.push(format!("--max-model-len is {longest}: of the model's {wanted} tokens no more fit"));
            Ok(longest)
        }
    }
}

/// Layers and groups while they are collected.
struct Pages<'a> {
    config: &'a ModelConfig,
    dtype: CacheDtype,
    page_size: usize,
    layers: Vec<LayerPlan>,
    groups: Vec<GroupPlan>,
}

impl<'a> Pages<'a> {
    fn new(config: &'a ModelConfig, options: &PlanOptions) -> Self {
        Pages {
            config,
            dtype: options.dtype,
            page_size: options.page_size,
            layers: Vec::with_capacity(config.layers.len()),
            groups: Vec::new(),
        }
    }

    fn add_layer(
        &mut self,
        index: usize,
        spec: &CacheSpec,
        chosen: Option<(RowFormat, FormatReason)>,
    ) -> Result<(), PlanError> {
        let mut layer = LayerPlan::default();
        match (spec, chosen) {
            (CacheSpec::Attention(attention), Some(chosen)) => {
                layer.paged = Some(self.attention(index, attention, chosen)?);
            }
            (CacheSpec::Hybrid(attention, state), Some(chosen)) => {
                layer.paged = Some(self.attention(index, attention, chosen)?);
                layer.state_bytes = sum(state.conv_bytes, state.recurrent_bytes)?;
            }
            (CacheSpec::Latent { width, indexer_width, .. }, Some(chosen)) => {
                layer.paged = Some(self.vector(index, *width, Lifetime::Full, chosen)?);
                if *indexer_width > 0 {
                    let kind = SideKind::IndexerKeys;
                    layer.side.push(self.side(index, kind, *indexer_width, 1)?);
                }
            }
            (CacheSpec::Compressed(spec), Some(chosen)) => {
                self.compressed(index, spec, chosen, &mut layer)?
            }
            (CacheSpec::Recurrent(state), _) => {
                layer.state_bytes = sum(state.conv_bytes, state.recurrent_bytes)?;
            }
            (CacheSpec::Shared { owner }, _) => {
                if self.layers.get(*owner).is_none_or(|owner| owner.paged.is_none()) {
                    let problem = format!("it shares the keys and values of layer {owner}, which has none");
                    return Err(PlanError::Layer { layer: index, problem });
                }
                layer.owner = Some(*owner);
            }
            (CacheSpec::None, _) => {}
            (_, None) => {
                return Err(PlanError::Layer { layer: index, problem: "it has no row format".to_owned() });
            }
        }
        self.layers.push(layer);
        Ok(())
    }

    fn attention(
        &mut self,
        layer: usize,
        spec: &AttentionSpec,
        (format, reason): (RowFormat, FormatReason),
    ) -> Result<PagedPlan, PlanError> {
        if spec.num_kv_heads == 0 || spec.window == Some(0) {
            let problem =
                format!("{} KV heads and a window of {:?} hold nothing", spec.num_kv_heads, spec.window);
            return Err(PlanError::Layer { layer, problem });
        }
        let rows = RowLayout::new(format, spec.key_head_dim, spec.value_head_dim).map_err(|error| {
            let auto = CacheDtype::Auto.row_format(self.config.dtype);
            PlanError::HeadDim {
                layer,
                dtype: if format == auto { CacheDtype::Auto } else { self.dtype },
                reason: error.to_string(),
            }
        })?;
        let page_bytes = product([self.page_size, spec.num_kv_heads, rows.slot_bytes])?;
        // A window longer than any sequence is none.
        let lifetime = match spec.window {
            Some(window) if window <= self.config.max_model_len => Lifetime::Window(window),
            _ => Lifetime::Full,
        };
        Ok(PagedPlan {
            group: self.group(layer, lifetime, 1, page_bytes)?,
            format,
            reason,
            num_kv_heads: spec.num_kv_heads,
            key_head_dim: spec.key_head_dim,
            value_head_dim: spec.value_head_dim,
            page_bytes,
        })
    }

    /// A vector that is key and value at once, always in the model's dtype.
    fn vector(
        &mut self,
        layer: usize,
        width: usize,
        lifetime: Lifetime,
        (format, reason): (RowFormat, FormatReason),
    ) -> Result<PagedPlan, PlanError> {
        if width == 0 {
            return Err(PlanError::Layer { layer, problem: "its latent has no elements".to_owned() });
        }
        let page_bytes = product([self.page_size, width, self.config.dtype.bytes()])?;
        Ok(PagedPlan {
            group: self.group(layer, lifetime, 1, page_bytes)?,
            format,
            reason,
            num_kv_heads: 1,
            key_head_dim: width,
            value_head_dim: 0,
            page_bytes,
        })
    }

    fn compressed(
        &mut self,
        index: usize,
        spec: &CompressedSpec,
        chosen: (RowFormat, FormatReason),
        layer: &mut LayerPlan,
    ) -> Result<(), PlanError> {
        layer.paged = Some(self.vector(index, spec.width, Lifetime::Window(spec.window), chosen)?);
        layer.state_bytes = spec.state_bytes;
        if spec.ratio > 0 {
            layer.side.push(self.side(index, SideKind::CompressedKv, spec.width, spec.ratio)?);
            if spec.indexer_width > 0 {
                let kind = SideKind::CompressedIndexerKeys;
                layer.side.push(self.side(index, kind, spec.indexer_width, spec.ratio)?);
            }
        }
        Ok(())
    }

    fn side(
        &mut self,
        layer: usize,
        kind: SideKind,
        width: usize,
        tokens_per_row: usize,
    ) -> Result<SidePlan, PlanError> {
        let page_bytes = product([self.page_size, width, self.config.dtype.bytes()])?;
        Ok(SidePlan {
            kind,
            group: self.group(layer, Lifetime::Full, tokens_per_row, page_bytes)?,
            width,
            page_bytes,
        })
    }

    /// Adds a slab to the group of its lifetime.
    fn group(
        &mut self,
        layer: usize,
        lifetime: Lifetime,
        tokens_per_row: usize,
        page_bytes: usize,
    ) -> Result<usize, PlanError> {
        let same = |group: &GroupPlan| group.lifetime == lifetime && group.tokens_per_row == tokens_per_row;
        let index = match self.groups.iter().position(same) {
            Some(index) => index,
            None => {
                self.groups.push(GroupPlan {
                    lifetime,
                    tokens_per_row,
                    layers: Vec::new(),
                    page_bytes: 0,
                    num_pages: 0,
                });
                self.groups.len() - 1
            }
        };
        let group = &mut self.groups[index];
        group.page_bytes = sum(group.page_bytes, page_bytes)?;
        if group.layers.last() != Some(&layer) {
            group.layers.push(layer);
        }
        Ok(index)
    }
}

fn sum(a: usize, b: usize) -> Result<usize, PlanError> {
    a.checked_add(b).ok_or(PlanError::TooLarge)
}

fn product<const N: usize>(factors: [usize; N]) -> Result<usize, PlanError> {
    factors.iter().try_fold(1usize, |product, &factor| product.checked_mul(factor)).ok_or(PlanError::TooLarge)
}
