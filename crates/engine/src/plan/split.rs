//! How the memory is split between the pools.
//!
//! The groups of full lifetime decide how many tokens fit; every other pool is made as large as it can
//! ever be needed beside them, so that it never runs out first. A sequence holds in a window group no
//! more pages than in a full one, and no more than its window touches, so for `P` full pages and `S`
//! sequences `min(P, S * window_pages + prefill_pages)` is enough. States are one per sequence.

use super::{Budget, GroupPlan, Lifetime, PlanError};

/// Block tables hold 32-bit page ids.
const MAX_PAGES: u64 = i32::MAX as u64;

/// Pages that `window` consecutive tokens touch at most, wherever they start.
pub(super) fn window_pages(window: usize, page_size: usize) -> u64 {
    (window.max(1) as u64 - 1).div_ceil(page_size as u64) + 1
}

/// What the split depends on.
pub(super) struct Split<'a> {
    pub groups: &'a [GroupPlan],
    pub page_size: usize,
    pub max_model_len: usize,
    pub max_num_seqs: usize,
    pub max_num_batched_tokens: usize,
    /// Bytes of one sequence's states over all layers.
    pub state_bytes: u64,
}

impl Split<'_> {
    /// Pages of `group` beside `pages` pages of full lifetime.
    pub(super) fn group_pages(&self, group: &GroupPlan, pages: u64) -> u64 {
        let seqs = self.max_num_seqs as u64;
        match group.lifetime {
            Lifetime::Full if group.tokens_per_row <= 1 => pages,
            // Each sequence ends in a page of its own, which may be almost empty.
            Lifetime::Full => {
                let per_row = group.tokens_per_row as u64;
                (pages + seqs.saturating_mul(per_row - 1)) / per_row
            }
            Lifetime::Window(window) => {
                let held = window_pages(window.min(self.max_model_len), self.page_size);
                let prefill = self.max_num_batched_tokens.div_ceil(self.page_size) as u64;
                pages.min(seqs.saturating_mul(held).saturating_add(prefill))
            }
        }
    }

    /// Bytes of all pools beside `pages` pages of full lifetime, states included; `None` past 64 bits.
    pub(super) fn bytes(&self, pages: u64) -> Option<u64> {
        let states = self.state_bytes.checked_mul(self.max_num_seqs as u64)?;
        self.groups.iter().try_fold(states, |sum, group| {
            sum.checked_add(self.group_pages(group, pages).checked_mul(group.page_bytes as u64)?)
        })
    }

    /// Pages of one sequence of `tokens` tokens.
    pub(super) fn sequence_pages(&self, tokens: usize) -> u64 {
        tokens.div_ceil(self.page_size).max(1) as u64
    }

    /// Pages of full lifetime. Where no group is of full lifetime, more than all sequences can hold at
    /// full length are never asked for.
    pub(super) fn pages(&self, budget: Budget) -> Result<u64, PlanError> {
        let unbounded = self.groups.iter().any(|group| group.lifetime == Lifetime::Full);
        let all = self.sequence_pages(self.max_model_len).saturating_mul(self.max_num_seqs as u64);
        let most = if unbounded { MAX_PAGES } else { all.min(MAX_PAGES) };
        let available = match budget {
            Budget::Tokens(tokens) => {
                let pages = self.sequence_pages(tokens).min(most);
                return self.bytes(pages).map(|_| pages).ok_or(PlanError::TooLarge);
            }
            Budget::Memory(bytes) => bytes,
        };
        self.check_states(available)?;
        let fits = |pages| self.bytes(pages).is_some_and(|bytes| bytes <= available);
        if !fits(1) {
            let needed = self.bytes(1).ok_or(PlanError::TooLarge)?;
            return Err(PlanError::NoPage { page_size: self.page_size, needed, available });
        }
        let (mut low, mut high) = (1, most);
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if fits(middle) { low = middle } else { high = middle - 1 }
        }
        Ok(low)
    }

    fn check_states(&self, available: u64) -> Result<(), PlanError> {
        let seqs = self.max_num_seqs;
        let needed = self.state_bytes.checked_mul(seqs as u64).ok_or(PlanError::TooLarge)?;
        if needed <= available {
            return Ok(());
        }
        // Sequences that fit with one page each, roughly: every group's page counted once a sequence.
        let one = self
            .groups
            .iter()
            .fold(self.state_bytes, |sum, group| sum.saturating_add(group.page_bytes as u64));
        Err(PlanError::States { seqs, needed, available, fit: available / one.max(1) })
    }
}
