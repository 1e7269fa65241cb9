//! What the handlers share, and how a checked request becomes answers.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use turboquant_engine::{
    engine::EngineHandle,
    request::{Request, RequestError},
};

use super::{error::ApiError, openai::Envelope, request::Options, values::PromptInput};
use crate::{answer::Answer, text::TextModel};

/// The served model.
pub(crate) struct App {
    pub(crate) engine: EngineHandle,
    pub(crate) text: TextModel,
    /// Name of the model in the API.
    pub(crate) model: String,
    /// When the server started, in Unix seconds.
    pub(crate) created: u64,
    pub(crate) max_body_size: u64,
    requests: AtomicU64,
}

impl App {
    pub(crate) fn new(engine: EngineHandle, text: TextModel, model: String, max_body_size: u64) -> Self {
        Self { engine, text, model, created: unix_seconds(), max_body_size, requests: AtomicU64::new(0) }
    }

    /// Longest prompt and answer together.
    pub(crate) fn max_model_len(&self) -> usize {
        let limits = self.engine.limits();
        // The last token of an answer is never stored.
        limits.max_model_len.min(limits.cache_tokens.saturating_add(1))
    }

    /// Token ids of a text. One that is too long for certain is refused before it is tokenised.
    pub(crate) fn encode(&self, text: &str, rendered: bool) -> Result<Vec<u32>, ApiError> {
        let fewest = self.text.fewest_tokens(text);
        let longest = self.max_model_len();
        if fewest > longest {
            return Err(ApiError::context_length(
                longest,
                &format!("the prompt has at least {fewest} tokens"),
            ));
        }
        let ids = if rendered { self.text.encode_rendered(text) } else { self.text.encode(text) };
        ids.map_err(|error| ApiError::invalid(format!("{error:#}.")))
    }

    /// Token ids of a completion's prompt.
    pub(crate) fn encode_prompt(&self, prompt: &PromptInput) -> Result<Vec<u32>, ApiError> {
        match prompt {
            PromptInput::Text(text) => self.encode(text, false),
            PromptInput::Tokens(ids) if ids.len() > self.max_model_len() => Err(ApiError::context_length(
                self.max_model_len(),
                &format!("the prompt has {} tokens", ids.len()),
            )),
            PromptInput::Tokens(ids) => Ok(ids.clone()),
        }
    }

    /// Refuses what would find no room even in an empty queue.
    pub(crate) fn check_answers(&self, num_prompts: usize, n: usize) -> Result<(), ApiError> {
        let answers = num_prompts.saturating_mul(n);
        let most = self.engine.max_requests();
        if answers <= most {
            return Ok(());
        }
        let message =
            format!("The request asks for {answers} answers at once, this server takes {most} at most.");
        Err(ApiError::invalid_param(if n == 1 { "prompt" } else { "n" }, message))
    }

    /// Queues `options.n` answers to each prompt, those to a prompt one after the other; all of them or none.
    pub(crate) fn submit(&self, prompts: &[Vec<u32>], options: &Options) -> Result<Vec<Answer>, ApiError> {
        let answers_to = |prompt| (0..options.n as u64).map(move |index| (prompt, index));
        let requests = prompts.iter().flat_map(answers_to).map(|(prompt, index): (&Vec<u32>, u64)| {
            let mut params = options.params.clone();
            params.seed = params.seed.map(|seed| seed.wrapping_add(index));
            Request { prompt: prompt.clone(), params }
        });
        let requests = requests.collect();
        let streams = self.engine.submit_all(requests).map_err(|error| self.refused(error))?;
        let answer = |events| {
            let tokens = Arc::clone(self.text.tokens());
            Answer::new(events, tokens, options.stops.clone(), options.params.min_tokens)
        };
        Ok(streams.into_iter().map(answer).collect())
    }

    fn refused(&self, error: RequestError) -> ApiError {
        match error {
            RequestError::ContextLength { prompt_tokens, max_tokens, .. }
            | RequestError::CacheTooSmall { prompt_tokens, max_tokens, .. } => ApiError::context_length(
                self.max_model_len(),
                &format!("{prompt_tokens} tokens of prompt and {max_tokens} of answer were asked for"),
            ),
            RequestError::Param(error) => ApiError::invalid_param(error.field, format!("{error}.")),
            RequestError::EmptyPrompt | RequestError::TokenId { .. } => {
                ApiError::invalid_param("prompt", format!("{error}."))
            }
            RequestError::QueueFull { .. } => ApiError::queue_full(format!("{error}.")),
            RequestError::Stopped(_) => ApiError::unavailable(format!("{error}.")),
        }
    }

    /// An envelope without choices; `kind` is the beginning of its id.
    pub(crate) fn envelope<Choice>(&self, kind: &str, object: &'static str) -> Envelope<Choice> {
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        Envelope {
            id: format!("{kind}-{:x}-{number:x}", self.created),
            object,
            created: unix_seconds(),
            model: self.model.clone(),
            choices: Vec::new(),
            usage: None,
        }
    }
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
