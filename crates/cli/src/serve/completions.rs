//! `POST /v1/completions`

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    Json,
    response::{IntoResponse, Response},
};

use super::{
    app::App,
    error::ApiError,
    openai::{CompletionChoice, CompletionLogprobs, Envelope, TokenLogprob, Usage},
    request::CompletionRequest,
    stream::{self, Chunks},
    values::PromptInput,
};
use crate::{
    answer::{Answer, FinishWord, Piece, ScoredToken},
    text::detokenize::{TextPosition, TokenBytes},
};

pub(crate) async fn handle(app: Arc<App>, body: Vec<u8>) -> Result<Response, ApiError> {
    let (request, prompts) = {
        let app = Arc::clone(&app);
        super::router::off_the_runtime(move || {
            let request = CompletionRequest::parse(&body, &app.model)?;
            let prompts = request
                .prompts
                .iter()
                .map(|prompt| app.encode_prompt(prompt))
                .collect::<Result<Vec<_>, _>>()?;
            Ok((request, prompts))
        })
        .await?
    };
    app.check_answers(prompts.len(), request.options.n)?;
    let answers = app.submit(&prompts, &request.options)?;
    let tokens = app.text.tokens();
    let mut writers = Vec::new();
    for prompt in &request.prompts {
        let echo = request.echo.then(|| match prompt {
            PromptInput::Text(text) => text.clone(),
            PromptInput::Tokens(ids) => tokens.decode(ids),
        });
        let writer = ChoiceWriter { tokens: Arc::clone(tokens), echo, position: TextPosition::default() };
        writers.extend(std::iter::repeat_n(writer, request.options.n));
    }
    let prompt_tokens = prompts.iter().map(Vec::len).sum();
    let envelope = app.envelope("cmpl", "text_completion");
    if request.options.stream {
        let chunks = CompletionChunks { writers };
        return Ok(stream::respond(envelope, chunks, answers, prompt_tokens, request.options.include_usage));
    }
    let done = futures::future::try_join_all(
        answers.into_iter().zip(writers).map(|(answer, writer)| collect(answer, writer)),
    )
    .await?;
    let mut envelope: Envelope<CompletionChoice> = envelope;
    envelope.usage = Some(Usage::new(prompt_tokens, done.iter().map(|(_, tokens)| *tokens)));
    envelope.choices = done.into_iter().map(|(choice, _)| choice).collect();
    for (index, choice) in envelope.choices.iter_mut().enumerate() {
        choice.index = index;
    }
    Ok(Json(envelope).into_response())
}

/// The whole of an answer and its number of tokens.
async fn collect(
    mut answer: Answer,
    mut writer: ChoiceWriter,
) -> Result<(CompletionChoice, usize), ApiError> {
    let mut whole = writer.choice(String::new(), Vec::new(), None);
    let mut scored = Vec::new();
    whole.text = writer.echo.take().unwrap_or_default();
    while let Some(piece) = answer.next().await {
        let piece = piece.map_err(|error| ApiError::generation(&error))?;
        whole.text.push_str(&piece.text);
        scored.extend(piece.scored);
        whole.finish_reason = piece.finish;
    }
    whole.logprobs = writer.logprobs(&scored);
    Ok((whole, answer.completion_tokens()))
}

/// Writes choices of one answer.
#[derive(Clone)]
struct ChoiceWriter {
    tokens: Arc<TokenBytes>,
    /// The prompt, until it is written.
    echo: Option<String>,
    /// Of the next token.
    position: TextPosition,
}

impl ChoiceWriter {
    fn choice(
        &mut self,
        text: String,
        scored: Vec<ScoredToken>,
        finish_reason: Option<FinishWord>,
    ) -> CompletionChoice {
        CompletionChoice { index: 0, text, logprobs: self.logprobs(&scored), finish_reason }
    }

    fn logprobs(&mut self, scored: &[ScoredToken]) -> Option<CompletionLogprobs> {
        if scored.is_empty() {
            return None;
        }
        let mut lists = CompletionLogprobs::default();
        for token in scored {
            let chosen = TokenLogprob::new(&self.tokens, token.id, token.logprobs.chosen);
            let top = token.logprobs.top.iter().map(|&(id, logprob)| {
                let other = TokenLogprob::new(&self.tokens, id, logprob);
                (other.token, other.logprob)
            });
            // The chosen token is always among them, whether or not it is one of the likeliest.
            let chosen_too = [(chosen.token.clone(), chosen.logprob)];
            lists.top_logprobs.push(top.chain(chosen_too).collect::<BTreeMap<_, _>>());
            lists.text_offset.push(self.position.advance(self.tokens.visible(token.id)));
            lists.token_logprobs.push(chosen.logprob);
            lists.tokens.push(chosen.token);
        }
        Some(lists)
    }
}

struct CompletionChunks {
    writers: Vec<ChoiceWriter>,
}

impl Chunks for CompletionChunks {
    type Choice = CompletionChoice;

    fn opening(&mut self, index: usize) -> Option<CompletionChoice> {
        let writer = &mut self.writers[index];
        let text = writer.echo.take()?;
        Some(CompletionChoice { index, ..writer.choice(text, Vec::new(), None) })
    }

    fn piece(&mut self, index: usize, piece: Piece) -> CompletionChoice {
        let scored = piece.scored.into_iter().collect();
        CompletionChoice { index, ..self.writers[index].choice(piece.text, scored, piece.finish) }
    }
}
