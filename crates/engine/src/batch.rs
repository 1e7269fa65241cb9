//! What one step computes: data handed from the scheduler through the runner to the model.

use std::ops::Range;

/// How the rows of a segment read the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Prompt tokens. A row attends to the raw keys and values of its own aligned block of
    /// [`PREFILL_BLOCK`] tokens and to the packed rows of everything before that block.
    Prefill,
    /// Generated tokens (one, or several consecutive ones that are replayed or verified). A row
    /// attends to packed rows only, its own included.
    Decode,
}

/// Tokens of an aligned prefill block. What a prompt token sees raw and what it sees packed depends
/// on its position alone, so that however a prompt is cut into chunks the result is the same: chunks
/// start at multiples of this.
pub const PREFILL_BLOCK: usize = 256;

/// Consecutive rows of one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Rows of the step.
    pub rows: Range<usize>,
    /// How they attend.
    pub phase: Phase,
    /// One block table per page group: `block_tables[group][position / page_size]` is a page id, or
    /// -1 where the page was given back because it fell out of the window.
    pub block_tables: Vec<Vec<i32>>,
}

/// One step: rows of many sequences, flattened.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StepBatch {
    /// `[num_rows]`
    pub token_ids: Vec<u32>,
    /// `[num_rows]`, place of the token in its sequence.
    pub positions: Vec<u32>,
    /// In row order; together they cover all rows.
    pub segments: Vec<Segment>,
    /// `[num_groups][num_rows]`: `page_id * page_size + offset`, or -1 for "store nothing".
    pub slot_mapping: Vec<Vec<i64>>,
    /// Rows whose logits are wanted, ascending.
    pub logits_rows: Vec<u32>,
}
