//! `ModelConfig` + limits + memory to [`Plan`]: which layer stores what, in how many pages.

mod account;
mod build;
mod formats;
mod options;
mod rank;
pub mod report;
mod split;
mod vllm;

use turboquant::format::RowFormat;

pub use account::TokenBytes;
pub use formats::{DEFAULT_BOUNDARY_LAYERS, key_bias_limit};
pub use options::{BadSkipLayer, Budget, PlanError, PlanOptions, SkipLayers};
pub use vllm::{UnifiedPage, VllmPages};

/// How long the tokens of a page group live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lifetime {
    /// As long as the sequence.
    Full,
    /// Until this many newer tokens exist.
    Window(usize),
}

/// Layers of one lifetime: they share a block table and a pool of pages. Each layer has a slab of
/// its own; one page id indexes them all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupPlan {
    /// Shared by all layers of the group.
    pub lifetime: Lifetime,
    /// Tokens that one row stands for: 1, except in groups of compressed vectors. A page holds
    /// `page_size` rows.
    pub tokens_per_row: usize,
    /// Model layer indices, ascending.
    pub layers: Vec<usize>,
    /// Sum over the slabs of the group: its layers' keys and values, and what they keep beside them.
    pub page_bytes: usize,
    /// Pages of the pool.
    pub num_pages: usize,
}

/// Why a layer has the format it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FormatReason {
    /// As asked for.
    Requested,
    /// First or last `--kv-boundary-layers` attention layers.
    Boundary,
    /// Named in `--kv-cache-dtype-skip-layers`.
    SkipList,
    /// The key bias of the layer would eat the code range.
    KeyBias,
    /// A windowed layer, and the skip list says `sliding_window`.
    Window,
    /// TurboQuant rows do not apply to a latent.
    Latent,
}

/// Pages of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PagedPlan {
    /// Index into [`Plan::groups`].
    pub group: usize,
    /// Rows in effect.
    pub format: RowFormat,
    /// Why.
    pub reason: FormatReason,
    /// Heads that a rank stores; 1 for a latent.
    pub num_kv_heads: usize,
    /// Width of a key, or of the latent.
    pub key_head_dim: usize,
    /// Width of a value; 0 for a latent, which is key and value at once.
    pub value_head_dim: usize,
    /// This layer's bytes per page.
    pub page_bytes: usize,
}

/// What a layer keeps in pages beside its keys and values, always in the model's dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SideKind {
    /// Keys of the sparse-attention indexer, one per token.
    IndexerKeys,
    /// Compressed keys/values of DeepSeek-V4.
    CompressedKv,
    /// Indexer keys of the compressed vectors.
    CompressedIndexerKeys,
}

impl SideKind {
    /// Every kind.
    pub const ALL: [SideKind; 3] =
        [SideKind::IndexerKeys, SideKind::CompressedKv, SideKind::CompressedIndexerKeys];
}

/// Further pages of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SidePlan {
    /// What they hold.
    pub kind: SideKind,
    /// Index into [`Plan::groups`].
    pub group: usize,
    /// Elements of a row.
    pub width: usize,
    /// Bytes per page.
    pub page_bytes: usize,
}

/// What one layer holds.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LayerPlan {
    /// Keys and values.
    pub paged: Option<PagedPlan>,
    /// Slabs beside them; empty in most models.
    pub side: Vec<SidePlan>,
    /// Bytes of recurrent state per sequence.
    pub state_bytes: usize,
    /// Layer whose pages this one reads.
    pub owner: Option<usize>,
}

/// The cache of one rank, byte for byte.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// Tokens of a page.
    pub page_size: usize,
    /// One entry per model layer.
    pub layers: Vec<LayerPlan>,
    /// Page groups.
    pub groups: Vec<GroupPlan>,
    /// Recurrent states of the pool (one per running sequence); 0 where no layer has one.
    pub num_states: usize,
    /// Tokens that fit over all sequences, when they fill their pages.
    pub num_tokens: u64,
    /// Longest sequence that is admitted.
    pub max_model_len: usize,
    /// Sequences that run at once.
    pub max_num_seqs: usize,
    /// What a reader should know, in sentences.
    pub notices: Vec<String>,
}

/// One contiguous allocation of the cache: pages of one layer, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slab {
    /// Model layer.
    pub layer: usize,
    /// `None` for keys and values (or the latent), else what is kept beside them.
    pub side: Option<SideKind>,
    /// Index into [`Plan::groups`].
    pub group: usize,
    /// Bytes of a page.
    pub page_bytes: usize,
}

#[cfg(test)]
mod tests;
