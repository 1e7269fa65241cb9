//! `POST /v1/chat/completions`

use std::sync::Arc;

use axum::{
    Json,
    response::{IntoResponse, Response},
};

use super::{
    app::App,
    error::ApiError,
    openai::{
        AssistantMessage, ChatChoice, ChatChunkChoice, ChatLogprobs, ChatTokenLogprob, Delta, Envelope,
        TokenLogprob, Usage,
    },
    request::ChatRequest,
    stream::{self, Chunks},
};
use crate::{
    answer::{Answer, Piece, ScoredToken},
    text::detokenize::TokenBytes,
};

pub(crate) async fn handle(app: Arc<App>, body: Vec<u8>) -> Result<Response, ApiError> {
    let (request, prompt) = {
        let app = Arc::clone(&app);
        super::router::off_the_runtime(move || {
            let request = ChatRequest::parse(&body, &app.model)?;
            let rendered = app.text.render_chat(&request.messages, request.tools.as_ref());
            let rendered = rendered.ok_or_else(|| {
                ApiError::invalid("The model has no chat template; use /v1/completions instead.")
            })?;
            let rendered =
                rendered.map_err(|error| ApiError::invalid_param("messages", format!("{error:#}.")))?;
            let prompt = app.encode(&rendered, true)?;
            Ok((request, prompt))
        })
        .await?
    };
    app.check_answers(1, request.options.n)?;
    let answers = app.submit(std::slice::from_ref(&prompt), &request.options)?;
    let tokens = Arc::clone(app.text.tokens());
    if request.options.stream {
        let envelope = app.envelope("chatcmpl", "chat.completion.chunk");
        let chunks = ChatChunks { tokens };
        let include_usage = request.options.include_usage;
        return Ok(stream::respond(envelope, chunks, answers, prompt.len(), include_usage));
    }
    let done = answers.into_iter().enumerate().map(|(index, answer)| collect(index, answer, &tokens));
    let done = futures::future::try_join_all(done).await?;
    let mut envelope: Envelope<ChatChoice> = app.envelope("chatcmpl", "chat.completion");
    envelope.usage = Some(Usage::new(prompt.len(), done.iter().map(|(_, tokens)| *tokens)));
    envelope.choices = done.into_iter().map(|(choice, _)| choice).collect();
    Ok(Json(envelope).into_response())
}

/// The whole of an answer and its number of tokens.
async fn collect(
    index: usize,
    mut answer: Answer,
    tokens: &TokenBytes,
) -> Result<(ChatChoice, usize), ApiError> {
    let (mut content, mut scored, mut finish_reason) = (String::new(), Vec::new(), "stop");
    while let Some(piece) = answer.next().await {
        let piece = piece.map_err(|error| ApiError::generation(&error))?;
        content.push_str(&piece.text);
        scored.extend(piece.scored);
        finish_reason = piece.finish.unwrap_or(finish_reason);
    }
    let message = AssistantMessage { role: "assistant", content, refusal: None };
    let choice = ChatChoice { index, message, logprobs: logprobs(tokens, &scored), finish_reason };
    Ok((choice, answer.completion_tokens()))
}

fn logprobs(tokens: &TokenBytes, scored: &[ScoredToken]) -> Option<ChatLogprobs> {
    let content: Vec<ChatTokenLogprob> = scored
        .iter()
        .map(|token| ChatTokenLogprob {
            token: TokenLogprob::new(tokens, token.id, token.logprobs.chosen),
            top_logprobs: token
                .logprobs
                .top
                .iter()
                .map(|&(id, p)| TokenLogprob::new(tokens, id, p))
                .collect(),
        })
        .collect();
    (!content.is_empty()).then_some(ChatLogprobs { content })
}

struct ChatChunks {
    tokens: Arc<TokenBytes>,
}

impl Chunks for ChatChunks {
    type Choice = ChatChunkChoice;

    fn opening(&mut self, index: usize) -> Option<ChatChunkChoice> {
        let delta = Delta { role: Some("assistant"), content: Some(String::new()) };
        Some(ChatChunkChoice { index, delta, logprobs: None, finish_reason: None })
    }

    fn piece(&mut self, index: usize, piece: Piece) -> ChatChunkChoice {
        let scored: Vec<ScoredToken> = piece.scored.into_iter().collect();
        let content = (!piece.text.is_empty()).then_some(piece.text);
        ChatChunkChoice {
            index,
            delta: Delta { role: None, content },
            logprobs: logprobs(&self.tokens, &scored),
            finish_reason: piece.finish,
        }
    }
}
