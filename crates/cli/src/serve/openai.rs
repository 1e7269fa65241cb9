//! The wire format: requests as clients send them, responses as they expect them.
//!
//! Every field of an object in a request may be missing or null; unknown ones are ignored.

use std::collections::BTreeMap;

use minijinja::Value as JinjaValue;
use serde::{Deserialize, Serialize};

use super::values::Content;
use crate::text::detokenize::TokenBytes;

#[derive(Debug, Deserialize)]
pub(crate) struct StreamOptions {
    pub(crate) include_usage: Option<bool>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ResponseFormat {
    #[serde(rename = "type")]
    pub(crate) kind: Option<String>,
}

/// One message of a chat.
#[derive(Debug, Deserialize)]
pub(crate) struct ChatMessage {
    pub(crate) role: Option<String>,
    pub(crate) content: Option<Content>,
    pub(crate) name: Option<String>,
    pub(crate) tool_calls: Option<Vec<JinjaValue>>,
    pub(crate) tool_call_id: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ContentPart {
    #[serde(rename = "type")]
    pub(crate) kind: Option<String>,
    pub(crate) text: Option<String>,
}

/// Tokens of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: usize,
    pub(crate) completion_tokens: usize,
    pub(crate) total_tokens: usize,
}

impl Usage {
    /// Each prompt counts once, however many answers it has.
    pub(crate) fn new(prompt_tokens: usize, answers: impl IntoIterator<Item = usize>) -> Self {
        let completion_tokens = answers.into_iter().sum();
        Self { prompt_tokens, completion_tokens, total_tokens: prompt_tokens + completion_tokens }
    }
}

/// A response, or one event of a streamed one.
#[derive(Debug, Serialize)]
pub(crate) struct Envelope<Choice> {
    pub(crate) id: String,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) choices: Vec<Choice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<Usage>,
}

/// A choice of `/v1/completions`, streamed or not.
#[derive(Debug, Serialize)]
pub(crate) struct CompletionChoice {
    pub(crate) index: usize,
    pub(crate) text: String,
    pub(crate) logprobs: Option<CompletionLogprobs>,
    pub(crate) finish_reason: Option<&'static str>,
}

/// Log-probabilities of `/v1/completions`: parallel lists, one entry per token.
#[derive(Debug, Default, Serialize)]
pub(crate) struct CompletionLogprobs {
    pub(crate) tokens: Vec<String>,
    pub(crate) token_logprobs: Vec<f32>,
    pub(crate) top_logprobs: Vec<BTreeMap<String, f32>>,
    pub(crate) text_offset: Vec<usize>,
}

/// A choice of `/v1/chat/completions`, whole.
#[derive(Debug, Serialize)]
pub(crate) struct ChatChoice {
    pub(crate) index: usize,
    pub(crate) message: AssistantMessage,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: &'static str,
}

#[derive(Debug, Serialize)]
pub(crate) struct AssistantMessage {
    pub(crate) role: &'static str,
    pub(crate) content: String,
    pub(crate) refusal: Option<String>,
}

/// A choice of `/v1/chat/completions`, streamed.
#[derive(Debug, Serialize)]
pub(crate) struct ChatChunkChoice {
    pub(crate) index: usize,
    pub(crate) delta: Delta,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: Option<&'static str>,
}

#[derive(Debug, Default, Serialize)]
pub(crate) struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<String>,
}

/// Log-probabilities of `/v1/chat/completions`.
#[derive(Debug, Default, Serialize)]
pub(crate) struct ChatLogprobs {
    pub(crate) content: Vec<ChatTokenLogprob>,
}

#[derive(Debug, Serialize)]
pub(crate) struct ChatTokenLogprob {
    #[serde(flatten)]
    pub(crate) token: TokenLogprob,
    pub(crate) top_logprobs: Vec<TokenLogprob>,
}

/// A token with its bytes, which need not be whole characters.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct TokenLogprob {
    pub(crate) token: String,
    pub(crate) logprob: f32,
    pub(crate) bytes: Vec<u8>,
}

impl TokenLogprob {
    /// JSON has no infinity; the API's word for "never" is -9999.
    pub(crate) fn new(tokens: &TokenBytes, id: u32, logprob: f32) -> Self {
        let bytes = tokens.bytes(id).to_vec();
        let token = match std::str::from_utf8(&bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => {
                format!("bytes:{}", bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect::<String>())
            }
        };
        Self { token, logprob: logprob.max(-9999.0), bytes }
    }
}

/// `GET /v1/models`
#[derive(Debug, Serialize)]
pub(crate) struct ModelList {
    pub(crate) object: &'static str,
    pub(crate) data: Vec<ModelObject>,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct ModelObject {
    pub(crate) id: String,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) owned_by: &'static str,
    /// As vLLM has it.
    pub(crate) max_model_len: usize,
}
