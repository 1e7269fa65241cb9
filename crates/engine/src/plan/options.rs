//! What the user asks of a plan, and why a plan can be refused.

use std::{collections::BTreeSet, str::FromStr};

use turboquant::format::CacheDtype;

/// `--kv-cache-dtype-skip-layers`, parsed once.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SkipLayers {
    /// Model layer indices.
    pub layers: BTreeSet<usize>,
    /// The word `sliding_window`: every windowed layer.
    pub sliding_window: bool,
}

/// An entry that is neither a layer number nor `sliding_window`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no entry of a skip list; use layer numbers such as 0,1,31 or the word sliding_window")]
pub struct BadSkipLayer(pub String);

impl FromStr for SkipLayers {
    type Err = BadSkipLayer;
    /// Entries between commas or spaces.
    fn from_str(list: &str) -> Result<Self, Self::Err> {
        let mut skip = SkipLayers::default();
        for entry in list.split([',', ' ']).filter(|entry| !entry.is_empty()) {
            if entry == "sliding_window" {
                skip.sliding_window = true;
            } else {
                skip.layers.insert(entry.parse().map_err(|_| BadSkipLayer(entry.to_owned()))?);
            }
        }
        Ok(skip)
    }
}

/// How large the cache may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Budget {
    /// Bytes for pages and states together.
    Memory(u64),
    /// Room for so many tokens over all sequences, however many bytes that takes.
    Tokens(usize),
}

/// What the user asks for.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanOptions {
    /// `--kv-cache-dtype`
    pub dtype: CacheDtype,
    /// `--kv-boundary-layers`: so many first and last KV layers stay in `auto`. `None` is the
    /// default: 2 for TurboQuant rows of a model without recurrent layers, else 0.
    pub boundary_layers: Option<usize>,
    /// `--kv-cache-dtype-skip-layers`
    pub skip_layers: SkipLayers,
    /// Tokens of a page.
    pub page_size: usize,
    /// Size of the cache.
    pub budget: Budget,
    /// `--max-model-len`; `None` is the model's, or what fits if that is less.
    pub max_model_len: Option<usize>,
    /// `--max-num-seqs`
    pub max_num_seqs: usize,
    /// `--max-num-batched-tokens`: prompt tokens of one step, which window pools must hold beside
    /// the windows.
    pub max_num_batched_tokens: usize,
    /// `--tensor-parallel-size`: the plan is that of one rank.
    pub tensor_parallel: usize,
    /// Norm of the key projection's bias per layer, the largest over the KV heads; `None` where a layer
    /// has no bias, empty where the weights are not at hand.
    pub key_bias_norms: Vec<Option<f32>>,
}

impl Default for PlanOptions {
    /// One sequence of at most 4096 tokens in `auto`.
    fn default() -> Self {
        PlanOptions {
            dtype: CacheDtype::Auto,
            boundary_layers: None,
            skip_layers: SkipLayers::default(),
            page_size: 16,
            budget: Budget::Tokens(4096),
            max_model_len: None,
            max_num_seqs: 1,
            max_num_batched_tokens: 512,
            tensor_parallel: 1,
            key_bias_norms: Vec::new(),
        }
    }
}

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// A count that must be positive is 0.
    #[error("{0} is 0; it must be at least 1")]
    Zero(&'static str),
    /// Pages are tiles of the attention kernels and divide a prefill block.
    #[error("a page of {0} tokens is not supported; use 16, 32, 64, 128 or 256")]
    PageSize(usize),
    /// More than the model was made for.
    #[error("--max-model-len {asked} is more than the {limit} tokens the model was made for")]
    MaxModelLen {
        /// Asked for.
        asked: usize,
        /// From the config.
        limit: usize,
    },
    /// A layer number out of range.
    #[error("--kv-cache-dtype-skip-layers names layer {layer}, but the model has layers 0 to {last}")]
    NoSuchLayer {
        /// Named.
        layer: usize,
        /// Highest index.
        last: usize,
    },
    /// The row format does not exist at this width.
    #[error("layer {layer}: no {dtype} rows: {reason}")]
    HeadDim {
        /// Model layer.
        layer: usize,
        /// Rows that the layer would have.
        dtype: CacheDtype,
        /// The codec's own words.
        reason: String,
    },
    /// A layer of the config holds something that cannot be stored.
    #[error("layer {layer}: {problem}")]
    Layer {
        /// Model layer.
        layer: usize,
        /// What is wrong.
        problem: String,
    },
    /// The ranks do not divide the heads.
    #[error("--tensor-parallel-size {ranks} does not fit layer {layer}: {problem}")]
    TensorParallel {
        /// Asked for.
        ranks: usize,
        /// Model layer.
        layer: usize,
        /// Which count, and why.
        problem: String,
    },
    /// A product left 64 bits.
    #[error(
        "the cache of this model would take more bytes than 64 bits count; a number in the config is wrong"
    )]
    TooLarge,
    /// States alone are too much.
    #[error(
        "the recurrent states of {seqs} sequences take {needed} B, but the cache may take {available} B; \
         lower --max-num-seqs to {fit} or less"
    )]
    States {
        /// `--max-num-seqs`
        seqs: usize,
        /// All states.
        needed: u64,
        /// The budget.
        available: u64,
        /// Sequences whose states and one page each fit.
        fit: u64,
    },
    /// Not one page.
    #[error("not one page of {page_size} tokens fits: {needed} B needed, {available} B given")]
    NoPage {
        /// Tokens.
        page_size: usize,
        /// With states.
        needed: u64,
        /// The budget.
        available: u64,
    },
    /// One sequence of the length asked for does not fit.
    #[error(
        "one sequence of {max_model_len} tokens needs {needed} B of cache with --max-num-seqs {seqs}, but \
         {available} B are given; the longest that fits has {longest} tokens"
    )]
    DoesNotFit {
        /// `--max-model-len`
        max_model_len: usize,
        /// `--max-num-seqs`
        seqs: usize,
        /// For it.
        needed: u64,
        /// The budget.
        available: u64,
        /// That fits.
        longest: usize,
    },
}
