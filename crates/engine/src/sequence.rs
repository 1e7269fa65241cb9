//! One request on its way: its tokens, how many of them are in the cache, and its pages.

use std::ops::Range;

use crate::{
    batch::{PREFILL_BLOCK, Phase},
    cache::pages::SequencePages,
    sampler::Sampler,
};

/// Number of a request, in order of arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub u64);

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was sampled.
    Stop {
        /// Which one.
        token: u32,
    },
    /// `max_tokens` were generated.
    Length,
}

/// Tokens, cache state and sampling state of one request.
#[derive(Debug)]
pub struct Sequence {
    id: SequenceId,
    /// Prompt, then output.
    tokens: Vec<u32>,
    prompt_len: usize,
    max_tokens: usize,
    /// Tokens whose keys and values are in the cache.
    num_computed_tokens: usize,
    /// Pages of the computed tokens and of those that the current step computes.
    pub(crate) pages: SequencePages,
    sampler: Sampler,
}

impl Sequence {
    /// A sequence of which nothing is computed. `max_tokens` new tokens end it.
    pub fn new(
        id: SequenceId,
        prompt: Vec<u32>,
        max_tokens: usize,
        sampler: Sampler,
        pages: SequencePages,
    ) -> Self {
        let prompt_len = prompt.len();
        Self { id, tokens: prompt, prompt_len, max_tokens, num_computed_tokens: 0, pages, sampler }
    }

    /// Its number.
    pub fn id(&self) -> SequenceId {
        self.id
    }

    /// Prompt, then output.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens of the prompt.
    pub fn prompt_len(&self) -> usize {
        self.prompt_len
    }

    /// Its block tables.
    pub fn pages(&self) -> &SequencePages {
        &self.pages
    }

    /// Generated tokens.
    pub fn output_len(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Tokens whose keys and values are in the cache.
    pub fn num_computed_tokens(&self) -> usize {
        self.num_computed_tokens
    }

    /// Tokens that are known and not computed yet.
    pub fn num_pending(&self) -> usize {
        self.tokens.len() - self.num_computed_tokens
    }

    /// Whether one row continues it: everything but the newest token is computed.
    pub fn is_decoding(&self) -> bool {
        self.num_pending() == 1 && self.num_computed_tokens >= self.prompt_len
    }

    /// How the next rows attend.
    pub fn phase(&self) -> Phase {
        if self.num_computed_tokens < self.prompt_len { Phase::Prefill } else { Phase::Decode }
    }

    /// The longest chunk of at most `limit` tokens that may be computed next.
    ///
    /// A prefill chunk ends at a multiple of [`PREFILL_BLOCK`] or with the prompt; generated tokens
    /// that are computed again may be cut anywhere.
    pub fn next_chunk(&self, limit: usize) -> Range<usize> {
        let start = self.num_computed_tokens;
        let limit = start.saturating_add(limit);
        let end = match self.phase() {
            Phase::Decode => self.tokens.len().min(limit),
            Phase::Prefill if self.prompt_len <= limit => self.prompt_len,
            Phase::Prefill => limit / PREFILL_BLOCK * PREFILL_BLOCK,
        };
        start..end.max(start)
    }

    /// Rows of the shortest chunk that makes progress, unless the prompt ends before.
    pub fn least_chunk(&self) -> usize {
        match self.phase() {
            Phase::Prefill => PREFILL_BLOCK,
            Phase::Decode => 1,
        }
    }

    /// Notes that the tokens `..end` are in the cache, and gives back pages that no later query
    /// sees.
    pub fn set_computed(&mut self, end: usize) {
        self.num_computed_tokens = end;
        self.pages.release_outside_window(end);
    }

    /// Gives all pages back; every token must be computed again.
    pub fn preempt(&mut self) {
        self.pages.clear();
        self.num_computed_tokens = 0;
    }

    /// The state its tokens are sampled with.
    pub fn sampler_mut(&mut self) -> &mut Sampler {
        &mut self.sampler
    }

    /// Appends a sampled token, unless it ends the sequence.
    pub fn append(&mut self, token: u32) -> Option<FinishReason> {
        if self.sampler.is_stop_token(token) {
            return Some(FinishReason::Stop { token });
        }
        self.tokens.push(token);
        (self.output_len() >= self.max_tokens).then_some(FinishReason::Length)
    }
}
