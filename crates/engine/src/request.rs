//! What a client asks for, what it gets back, and why it is refused.

use crate::{
    cache::pages::OutOfPages,
    sampler::{BadLogits, InvalidParam, SamplingParams, TokenLogprobs},
    sequence::FinishReason,
};

/// A prompt and how to go on from it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Request {
    /// Token ids of the prompt.
    pub prompt: Vec<u32>,
    /// How to choose the tokens that follow.
    pub params: SamplingParams,
}

/// Lengths that an engine admits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Token ids are below this.
    pub vocab_size: usize,
    /// Longest prompt and output together.
    pub max_model_len: usize,
    /// Tokens that the cache holds of a single sequence. The last token of an output is never
    /// stored.
    pub cache_tokens: usize,
}

/// A request that cannot be run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// Nothing to go on from.
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    /// A token id outside of the vocabulary.
    #[error("token {index} of the prompt is {got}, must be below the vocabulary's {vocab_size}")]
    TokenId {
        /// Place in the prompt.
        index: usize,
        /// As given.
        got: u32,
        /// Ids are below this.
        vocab_size: usize,
    },
    /// A sampling parameter out of range.
    #[error(transparent)]
    Param(#[from] InvalidParam),
    /// Longer than the model's context.
    #[error(
        "the maximum context length is {max_model_len} tokens, but {prompt_tokens} tokens of prompt and \
         {max_tokens} of output were asked for; shorten the prompt or lower max_tokens"
    )]
    ContextLength {
        /// Length of the prompt.
        prompt_tokens: usize,
        /// As asked, or 1 where nothing was asked.
        max_tokens: usize,
        /// Both together at most.
        max_model_len: usize,
    },
    /// Longer than all pages of the cache.
    #[error(
        "the KV cache holds {cache_tokens} tokens, but {prompt_tokens} tokens of prompt and \
         {max_tokens} of output were asked for; lower max_tokens or give the cache more memory"
    )]
    CacheTooSmall {
        /// Length of the prompt.
        prompt_tokens: usize,
        /// As asked, or 1 where nothing was asked.
        max_tokens: usize,
        /// Of one sequence that has the cache for itself.
        cache_tokens: usize,
    },
    /// As many requests run and wait as may.
    #[error("{max_requests} requests run or wait already, and no more are taken; try again later")]
    QueueFull {
        /// Requests that may run and wait together.
        max_requests: usize,
    },
    /// The engine has come to an end.
    #[error("the engine has stopped: {0}")]
    Stopped(String),
}

impl Limits {
    /// Checks a request and returns how many tokens it may generate.
    ///
    /// # Errors
    /// See [`RequestError`].
    pub fn check(&self, request: &Request) -> Result<usize, RequestError> {
        let Limits { vocab_size, max_model_len, cache_tokens } = *self;
        request.params.validate(vocab_size)?;
        let prompt_tokens = request.prompt.len();
        if prompt_tokens == 0 {
            return Err(RequestError::EmptyPrompt);
        }
        let unknown = request.prompt.iter().position(|&id| id as usize >= vocab_size);
        if let Some(index) = unknown {
            return Err(RequestError::TokenId { index, got: request.prompt[index], vocab_size });
        }
        let max_tokens = request.params.max_tokens.unwrap_or(request.params.min_tokens.max(1));
        if prompt_tokens.saturating_add(max_tokens) > max_model_len {
            return Err(RequestError::ContextLength { prompt_tokens, max_tokens, max_model_len });
        }
        if prompt_tokens + max_tokens - 1 > cache_tokens {
            return Err(RequestError::CacheTooSmall { prompt_tokens, max_tokens, cache_tokens });
        }
        let all = (max_model_len - prompt_tokens).min(cache_tokens - (prompt_tokens - 1));
        Ok(request.params.max_tokens.unwrap_or(all))
    }
}

/// Tokens of a finished request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Length of the prompt.
    pub prompt_tokens: usize,
    /// Tokens that were generated, a stop token included.
    pub completion_tokens: usize,
}

/// Why a running request ended early.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum GenerationError {
    /// The cache is full although nothing else runs.
    #[error("the request needs more of the KV cache than there is: {0}")]
    OutOfPages(#[from] OutOfPages),
    /// The model's output is unusable.
    #[error(transparent)]
    BadLogits(#[from] BadLogits),
    /// The model could not compute a step.
    #[error("the model failed: {0}")]
    Step(String),
    /// The engine ended while the request waited or ran.
    #[error("the engine has stopped: {0}")]
    Stopped(String),
}

/// What happens to a request, in order. `Finished` or `Failed` is the last event.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A token of the answer. A stop token is none.
    Token {
        /// Its id.
        id: u32,
        /// If they were asked for.
        logprobs: Option<TokenLogprobs>,
    },
    /// The answer is complete.
    Finished {
        /// Why.
        reason: FinishReason,
        /// Tokens in and out.
        usage: Usage,
    },
    /// There will be no more.
    Failed(GenerationError),
}
