//! What one step computes: data handed from the scheduler through the runner to the model.

use std::ops::Range;

use crate::cache::pages::SequencePages;

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

/// Which rows of a segment the caller wants logits of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitsOf {
    /// None of them: more tokens of the sequence follow.
    Nothing,
    /// The last row, to sample the next token from.
    Last,
    /// Every row, to score given tokens.
    All,
}

impl StepBatch {
    /// Appends a segment: `token_ids` at positions `start..` of one sequence, which owns pages for
    /// them.
    pub fn push(
        &mut self,
        token_ids: &[u32],
        start: usize,
        phase: Phase,
        pages: &SequencePages,
        logits: LogitsOf,
    ) {
        let rows = self.token_ids.len()..self.token_ids.len() + token_ids.len();
        let positions = start..start + token_ids.len();
        self.token_ids.extend_from_slice(token_ids);
        // Positions stay below the model's longest sequence, row numbers below the token budget.
        self.positions.extend(positions.clone().map(|position| position as u32));
        self.slot_mapping.resize(pages.num_groups(), Vec::new());
        for (group, slots) in self.slot_mapping.iter_mut().enumerate() {
            slots.extend(positions.clone().map(|position| pages.slot(group, position)));
        }
        match logits {
            LogitsOf::Nothing => {}
            LogitsOf::Last => self.logits_rows.extend(rows.clone().next_back().map(|row| row as u32)),
            LogitsOf::All => self.logits_rows.extend(rows.clone().map(|row| row as u32)),
        }
        self.segments.push(Segment { rows, phase, block_tables: pages.block_tables() });
    }

    /// Rows of the step.
    pub fn num_rows(&self) -> usize {
        self.token_ids.len()
    }
}
