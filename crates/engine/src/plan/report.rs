//! A plan as data for people and programs: what `plan` prints, and its JSON (`docs/plan-schema.md`).

use serde::{Serialize, Serializer};
use turboquant::format::{CacheDtype, NativeDtype};

use super::{Budget, FormatReason, Lifetime, Plan, PlanError, PlanOptions, SideKind, VllmPages};
use crate::{
    config::{CacheSpec, ModelConfig},
    inspect::{ModelFacts, WeightSource},
};

/// One plan, with all that explains it. All sizes are of one rank and in bytes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The model.
    pub model: ModelReport,
    /// What was asked for.
    pub options: OptionsReport,
    /// The weights.
    pub weights: WeightsReport,
    /// One entry per model layer.
    pub layers: Vec<LayerReport>,
    /// Pools of pages.
    pub groups: Vec<GroupReport>,
    /// Recurrent states.
    pub states: StatesReport,
    /// What a token takes.
    pub bytes_per_token: RateReport,
    /// Of that, indexer keys and compressed vectors, which stay in the model's dtype.
    #[serde(serialize_with = "whole_where_it_is")]
    pub side_bytes_per_token: f64,
    /// The same in bf16 in every layer.
    pub bf16_bytes_per_token: RateReport,
    /// bf16 over this plan.
    pub ratio_to_bf16: RatioReport,
    /// What fits.
    pub capacity: CapacityReport,
    /// Notices, in sentences.
    pub notices: Vec<String>,
}

/// The model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelReport {
    /// As the user calls it.
    pub name: String,
    /// Family.
    pub model_type: String,
    /// `float32`, `float16` or `bfloat16`: that of `auto` rows.
    pub dtype: &'static str,
    /// Layers.
    pub num_layers: usize,
    /// Whether some layers are recurrent.
    pub hybrid: bool,
    /// Longest sequence the model was made for.
    pub max_model_len: usize,
    /// Whether the attention has learned sinks.
    pub learned_sinks: bool,
}

/// What was asked for.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OptionsReport {
    /// `--kv-cache-dtype`
    pub kv_cache_dtype: &'static str,
    /// `--kv-boundary-layers`, where given.
    pub kv_boundary_layers: Option<usize>,
    /// Layers of `--kv-cache-dtype-skip-layers`.
    pub skip_layers: Vec<usize>,
    /// Whether that list says `sliding_window`.
    pub skip_sliding_window: bool,
    /// `--page-size`
    pub page_size: usize,
    /// `--max-num-seqs`
    pub max_num_seqs: usize,
    /// `--max-num-batched-tokens`
    pub max_num_batched_tokens: usize,
    /// `--tensor-parallel-size`
    pub tensor_parallel_size: usize,
    /// Bytes that the cache may take, where memory was given.
    pub kv_memory_bytes: Option<u64>,
}

/// The weights.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WeightsReport {
    /// Of the whole model, where known.
    pub bytes: Option<u64>,
    /// A rank's even share.
    pub bytes_per_rank: Option<u64>,
    /// `safetensors`, `gguf`, `estimated` or `unknown`.
    pub source: &'static str,
    /// Tensors counted.
    pub tensors: Option<usize>,
    /// Parameters, where estimated.
    pub parameters: Option<u64>,
    /// Average bits of a weight, where estimated.
    pub bits_per_weight: Option<f32>,
}

/// One layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerReport {
    /// Index in the model.
    pub layer: usize,
    /// `full_attention`, `sliding_attention`, `chunked_attention`, `latent`, `compressed`, `recurrent`,
    /// `hybrid`, `shared` or `none`.
    pub kind: &'static str,
    /// Tokens of the window or chunk.
    pub window: Option<usize>,
    /// KV heads of a rank; 1 for a latent.
    pub num_kv_heads: Option<usize>,
    /// Width of a key, or of the latent.
    pub key_head_dim: Option<usize>,
    /// Width of a value; 0 for a latent.
    pub value_head_dim: Option<usize>,
    /// Rows in effect, by the name of the cache dtype.
    pub format: Option<&'static str>,
    /// `requested`, `boundary`, `skip_list`, `sliding_window`, `key_bias` or `latent`.
    pub reason: Option<&'static str>,
    /// Bytes of keys and values per token.
    pub bytes_per_token: Option<u64>,
    /// What is kept in pages besides.
    pub side: Vec<SideReport>,
    /// Index into `groups`.
    pub group: Option<usize>,
    /// Bytes of state per sequence.
    pub state_bytes: u64,
    /// Layer whose keys and values are read.
    pub owner: Option<usize>,
}

/// Pages of a layer beside its keys and values.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SideReport {
    /// `indexer_keys`, `compressed_kv` or `compressed_indexer_keys`.
    pub kind: &'static str,
    /// Average over the tokens that share a row.
    #[serde(serialize_with = "whole_where_it_is")]
    pub bytes_per_token: f64,
    /// Index into `groups`.
    pub group: usize,
}

/// A pool of pages.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GroupReport {
    /// Tokens of the window; null lives as long as the sequence.
    pub window: Option<usize>,
    /// Tokens that a row stands for.
    pub tokens_per_row: usize,
    /// Model layers.
    pub layers: Vec<usize>,
    /// Of all its layers.
    pub page_bytes: u64,
    /// Pages.
    pub num_pages: usize,
    /// Pages times page bytes.
    pub bytes: u64,
}

/// Recurrent states.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StatesReport {
    /// Over all layers.
    pub bytes_per_sequence: u64,
    /// States in the pool.
    pub num_states: usize,
    /// Of the pool.
    pub bytes: u64,
}

/// Bytes that a token adds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RateReport {
    /// While the windows grow.
    #[serde(serialize_with = "whole_where_it_is")]
    pub inside_window: f64,
    /// Once they are full.
    #[serde(serialize_with = "whole_where_it_is")]
    pub beyond_window: f64,
}

/// How many times smaller than bf16.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RatioReport {
    /// Pages of a sequence while its windows grow; null where there are no pages.
    pub inside_window: Option<f64>,
    /// Pages of a sequence of `capacity.max_model_len` tokens.
    pub at_max_model_len: Option<f64>,
    /// The same with its recurrent states, which no format makes smaller.
    pub at_max_model_len_with_states: Option<f64>,
}

/// What fits.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CapacityReport {
    /// Longest sequence that is admitted.
    pub max_model_len: usize,
    /// Tokens over all sequences.
    pub tokens: u64,
    /// Sequences of `max_model_len` at once, `max_num_seqs` at most; with a fraction.
    pub sequences_at_max_model_len: f64,
    /// Bytes of one such sequence, states included.
    pub sequence_bytes: u64,
    /// Of all pools.
    pub total_bytes: u64,
    /// Of the memory given.
    pub unused_bytes: Option<u64>,
}

impl Report {
    /// Plans `facts` under `options`.
    ///
    /// # Errors
    /// As [`Plan::build`].
    pub fn build(name: &str, facts: &ModelFacts, options: &PlanOptions) -> Result<Self, PlanError> {
        let options = PlanOptions { key_bias_norms: facts.key_bias_norms.clone(), ..options.clone() };
        let config = &facts.config;
        let plan = Plan::build(config, &options)?;
        let bf16 = bf16_plan(config, &options)?;
        let len = plan.max_model_len;
        let states = plan.state_bytes_per_sequence();
        let (ours, theirs) = (plan.sequence_bytes(len) as f64, bf16.sequence_bytes(len) as f64);
        let with_states = |bytes: f64| bytes + states as f64;
        let mut notices = facts.notices.clone();
        notices.extend(plan.notices.iter().cloned());
        Ok(Report {
            model: ModelReport {
                name: name.to_owned(),
                model_type: config.model_type.clone(),
                dtype: dtype_name(config.dtype),
                num_layers: config.layers.len(),
                hybrid: config.is_hybrid(),
                max_model_len: config.max_model_len,
                learned_sinks: config.learned_sinks,
            },
            options: options_report(&options),
            weights: weights_report(facts, options.tensor_parallel),
            layers: (0..config.layers.len()).map(|layer| layer_report(config, &plan, layer)).collect(),
            groups: groups_report(&plan),
            states: StatesReport {
                bytes_per_sequence: states,
                num_states: plan.num_states,
                bytes: plan.num_states as u64 * states,
            },
            bytes_per_token: rate(&plan),
            side_bytes_per_token: SideKind::ALL.iter().map(|&kind| plan.side_bytes_per_token(kind)).sum(),
            bf16_bytes_per_token: rate(&bf16),
            ratio_to_bf16: RatioReport {
                inside_window: ratio(bf16.bytes_per_token().inside, plan.bytes_per_token().inside),
                at_max_model_len: ratio(theirs, ours),
                at_max_model_len_with_states: ratio(with_states(theirs), with_states(ours)),
            },
            capacity: capacity(&plan, &options),
            notices,
        })
    }

    /// The pages of vLLM for the same model and options.
    ///
    /// # Errors
    /// As [`VllmPages::build`].
    pub fn vllm(facts: &ModelFacts, options: &PlanOptions) -> Result<VllmPages, PlanError> {
        VllmPages::build(&facts.config, options)
    }
}

/// A rate is a fraction only where rows stand for several tokens; else it is written as an integer.
fn whole_where_it_is<S: Serializer>(bytes: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    if bytes.fract() == 0.0 {
        serializer.serialize_u64(*bytes as u64)
    } else {
        serializer.serialize_f64(*bytes)
    }
}

/// The same model in bf16 throughout.
fn bf16_plan(config: &ModelConfig, options: &PlanOptions) -> Result<Plan, PlanError> {
    let config = ModelConfig { dtype: NativeDtype::Bf16, ..config.clone() };
    let options = PlanOptions {
        dtype: CacheDtype::Auto,
        budget: Budget::Tokens(options.page_size),
        max_model_len: None,
        ..options.clone()
    };
    Plan::build(&config, &options)
}

fn ratio(theirs: f64, ours: f64) -> Option<f64> {
    (ours > 0.0).then(|| theirs / ours)
}

fn rate(plan: &Plan) -> RateReport {
    let bytes = plan.bytes_per_token();
    RateReport { inside_window: bytes.inside, beyond_window: bytes.beyond }
}

fn dtype_name(dtype: NativeDtype) -> &'static str {
    match dtype {
        NativeDtype::F32 => "float32",
        NativeDtype::F16 => "float16",
        NativeDtype::Bf16 => "bfloat16",
    }
}

fn options_report(options: &PlanOptions) -> OptionsReport {
    OptionsReport {
        kv_cache_dtype: options.dtype.name(),
        kv_boundary_layers: options.boundary_layers,
        skip_layers: options.skip_layers.layers.iter().copied().collect(),
        skip_sliding_window: options.skip_layers.sliding_window,
        page_size: options.page_size,
        max_num_seqs: options.max_num_seqs,
        max_num_batched_tokens: options.max_num_batched_tokens,
        tensor_parallel_size: options.tensor_parallel,
        kv_memory_bytes: match options.budget {
            Budget::Memory(bytes) => Some(bytes),
            Budget::Tokens(_) => None,
        },
    }
}

fn weights_report(facts: &ModelFacts, ranks: usize) -> WeightsReport {
    let (source, tensors, estimate) = match facts.weight_source {
        WeightSource::Safetensors { tensors, .. } => ("safetensors", Some(tensors), None),
        WeightSource::Gguf { tensors } => ("gguf", Some(tensors), None),
        WeightSource::Estimated(estimate) => ("estimated", None, Some(estimate)),
        WeightSource::Unknown => ("unknown", None, None),
    };
    WeightsReport {
        bytes: facts.weight_bytes,
        bytes_per_rank: facts.weight_bytes.map(|bytes| bytes.div_ceil(ranks as u64)),
        source,
        tensors,
        parameters: estimate.map(|estimate| estimate.parameters),
        bits_per_weight: estimate.map(|estimate| estimate.bits),
    }
}

fn layer_report(config: &ModelConfig, plan: &Plan, layer: usize) -> LayerReport {
    let (spec, planned) = (&config.layers[layer], &plan.layers[layer]);
    let paged = planned.paged;
    let window = match spec {
        CacheSpec::Compressed(spec) => Some(spec.window),
        _ => spec.attention().and_then(|attention| attention.window),
    };
    let kind = match spec {
        CacheSpec::Attention(attention) if attention.window.is_none() => "full_attention",
        CacheSpec::Attention(_) if config.chunked_windows => "chunked_attention",
        CacheSpec::Attention(_) => "sliding_attention",
        CacheSpec::Latent { .. } => "latent",
        CacheSpec::Compressed(_) => "compressed",
        CacheSpec::Recurrent(_) => "recurrent",
        CacheSpec::Hybrid(..) => "hybrid",
        CacheSpec::Shared { .. } => "shared",
        CacheSpec::None => "none",
    };
    let name = |format| {
        CacheDtype::ALL
            .into_iter()
            .find(|dtype| dtype.row_format(config.dtype) == format)
            .map(CacheDtype::name)
    };
    LayerReport {
        layer,
        kind,
        window,
        num_kv_heads: paged.map(|paged| paged.num_kv_heads),
        key_head_dim: paged.map(|paged| paged.key_head_dim),
        value_head_dim: paged.map(|paged| paged.value_head_dim),
        format: paged.and_then(|paged| name(paged.format)),
        reason: paged.map(|paged| reason_name(paged.reason)),
        bytes_per_token: paged.map(|paged| (paged.page_bytes / plan.page_size) as u64),
        side: planned
            .side
            .iter()
            .map(|side| SideReport {
                kind: side_name(side.kind),
                bytes_per_token: side.page_bytes as f64
                    / (plan.page_size * plan.groups[side.group].tokens_per_row) as f64,
                group: side.group,
            })
            .collect(),
        group: paged.map(|paged| paged.group),
        state_bytes: planned.state_bytes as u64,
        owner: planned.owner,
    }
}

fn reason_name(reason: FormatReason) -> &'static str {
    match reason {
        FormatReason::Requested => "requested",
        FormatReason::Boundary => "boundary",
        FormatReason::SkipList => "skip_list",
        FormatReason::Window => "sliding_window",
        FormatReason::KeyBias => "key_bias",
        FormatReason::Latent => "latent",
    }
}

fn side_name(kind: SideKind) -> &'static str {
    match kind {
        SideKind::IndexerKeys => "indexer_keys",
        SideKind::CompressedKv => "compressed_kv",
        SideKind::CompressedIndexerKeys => "compressed_indexer_keys",
    }
}

fn groups_report(plan: &Plan) -> Vec<GroupReport> {
    let report = |group: &super::GroupPlan| GroupReport {
        window: match group.lifetime {
            Lifetime::Full => None,
            Lifetime::Window(window) => Some(window),
        },
        tokens_per_row: group.tokens_per_row,
        layers: group.layers.clone(),
        page_bytes: group.page_bytes as u64,
        num_pages: group.num_pages,
        bytes: group.page_bytes as u64 * group.num_pages as u64,
    };
    plan.groups.iter().map(report).collect()
}

fn capacity(plan: &Plan, options: &PlanOptions) -> CapacityReport {
    let len = plan.max_model_len as u64;
    let page = plan.page_size as u64;
    let whole = plan.num_tokens as f64 / (len.div_ceil(page) * page) as f64;
    let total_bytes = plan.total_bytes();
    CapacityReport {
        max_model_len: plan.max_model_len,
        tokens: plan.num_tokens,
        sequences_at_max_model_len: whole.min(plan.max_num_seqs as f64),
        sequence_bytes: plan.sequence_bytes(plan.max_model_len) + plan.state_bytes_per_sequence(),
        total_bytes,
        unused_bytes: match options.budget {
            Budget::Memory(bytes) => Some(bytes.saturating_sub(total_bytes)),
            Budget::Tokens(_) => None,
        },
    }
}
