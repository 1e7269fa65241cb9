//! One sequence, step by step and without threads: for tools that measure.

use std::ops::Range;

use crate::{
    batch::{LogitsOf, PREFILL_BLOCK, Phase, StepBatch},
    cache::pages::{OutOfPages, SequencePages},
    error::EngineError,
    model::LoadedModel,
    runner::{Logits, Runner, StepModel},
};

/// A sequence that the caller extends, by prefill or on the decode path.
#[derive(Debug)]
pub struct Session<M = LoadedModel> {
    runner: Runner<M>,
    pages: SequencePages,
    num_tokens: usize,
    max_num_batched_tokens: usize,
}

/// Tokens that a session cannot append.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// Nothing to compute.
    #[error("there are no tokens to compute")]
    NoTokens,
    /// A prefill that would not begin at a block.
    #[error(
        "a prefill must begin at a multiple of {PREFILL_BLOCK} tokens, {num_tokens} are in the cache; \
         score further tokens instead"
    )]
    Unaligned {
        /// Tokens in the cache.
        num_tokens: usize,
    },
    /// The cache is full.
    #[error(transparent)]
    OutOfPages(#[from] OutOfPages),
    /// The model failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

impl<M: StepModel> Session<M> {
    /// An empty sequence. A prefill runs in chunks of `max_num_batched_tokens`, cut to whole
    /// prefill blocks and at least one.
    pub fn new(runner: Runner<M>, max_num_batched_tokens: usize) -> Self {
        let pages = runner.pools().sequence();
        Self { runner, pages, num_tokens: 0, max_num_batched_tokens }
    }

    /// Tokens in the cache.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// Model and cache.
    pub fn runner(&self) -> &Runner<M> {
        &self.runner
    }

    /// Forgets the sequence; its pages are free again.
    pub fn clear(&mut self) {
        self.pages.clear();
        self.num_tokens = 0;
    }

    /// Appends prompt tokens and returns the logits of the last one, `[1, vocab_size]`.
    ///
    /// # Errors
    /// When the sequence does not end at a prefill block, the cache is full, or the model fails.
    pub fn prefill(&mut self, token_ids: &[u32]) -> Result<Logits, SessionError> {
        if !self.num_tokens.is_multiple_of(PREFILL_BLOCK) {
            return Err(SessionError::Unaligned { num_tokens: self.num_tokens });
        }
        let chunk = (self.max_num_batched_tokens / PREFILL_BLOCK).max(1) * PREFILL_BLOCK;
        let mut last = Err(SessionError::NoTokens);
        for start in (0..token_ids.len()).step_by(chunk) {
            let range = start..(start + chunk).min(token_ids.len());
            let logits = if range.end == token_ids.len() { LogitsOf::Last } else { LogitsOf::Nothing };
            last = Ok(self.step(token_ids, range, Phase::Prefill, logits)?);
        }
        last
    }

    /// Appends given tokens on the decode path, all in one step, and returns the logits of each,
    /// `[token_ids.len(), vocab_size]`: row `i` predicts the token after `token_ids[i]`.
    ///
    /// Equal to as many calls with one token, bit for bit.
    ///
    /// # Errors
    /// When the cache is full, or the model fails.
    pub fn score(&mut self, token_ids: &[u32]) -> Result<Logits, SessionError> {
        if token_ids.is_empty() {
            return Err(SessionError::NoTokens);
        }
        self.step(token_ids, 0..token_ids.len(), Phase::Decode, LogitsOf::All)
    }

    fn step(
        &mut self,
        token_ids: &[u32],
        range: Range<usize>,
        phase: Phase,
        logits: LogitsOf,
    ) -> Result<Logits, SessionError> {
        let end = self.num_tokens + range.len();
        self.pages.reserve(end)?;
        let mut batch = StepBatch::default();
        batch.push(&token_ids[range], self.num_tokens, phase, &self.pages, logits);
        let logits = self.runner.run(&batch)?;
        self.num_tokens = end;
        self.pages.release_outside_window(end);
        Ok(logits)
    }
}
