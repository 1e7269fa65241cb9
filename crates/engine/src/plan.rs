//! `ModelConfig` + limits + memory to [`Plan`]: which layer stores what, in how many pages.

use turboquant::format::RowFormat;

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
    /// Model layer indices, ascending.
    pub layers: Vec<usize>,
    /// Sum over the group's layers.
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
    /// Heads that are stored.
    pub num_kv_heads: usize,
    /// Width of a key.
    pub key_head_dim: usize,
    /// Width of a value.
    pub value_head_dim: usize,
    /// This layer's bytes per page.
    pub page_bytes: usize,
}

/// What one layer holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LayerPlan {
    /// Keys and values.
    pub paged: Option<PagedPlan>,
    /// Bytes of recurrent state per sequence.
    pub state_bytes: usize,
    /// Layer whose pages this one reads.
    pub owner: Option<usize>,
}

/// The cache, byte for byte.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Tokens of a page.
    pub page_size: usize,
    /// One entry per model layer.
    pub layers: Vec<LayerPlan>,
    /// Page groups.
    pub groups: Vec<GroupPlan>,
    /// Recurrent states of the pool (one per running sequence).
    pub num_states: usize,
}
