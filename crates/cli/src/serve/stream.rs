//! Answers as server-sent events.

use std::convert::Infallible;

use axum::response::{
    IntoResponse, Response,
    sse::{Event, KeepAlive, Sse},
};
use futures::{StreamExt, stream};
use serde::Serialize;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::{
    error::ApiError,
    openai::{Envelope, Usage},
};
use crate::answer::{Answer, Piece};

/// How an endpoint writes its choices.
pub(crate) trait Chunks: Send + 'static {
    type Choice: Serialize + Send + Sync;
    /// A choice before the first piece of answer `index`.
    fn opening(&mut self, index: usize) -> Option<Self::Choice>;
    /// The choice that carries `piece`.
    fn piece(&mut self, index: usize, piece: Piece) -> Self::Choice;
}

/// The response that sends the pieces of all answers as they come. When the client goes away the
/// answers are dropped, which aborts them.
pub(crate) fn respond<C: Chunks>(
    envelope: Envelope<C::Choice>,
    chunks: C,
    answers: Vec<Answer>,
    prompt_tokens: usize,
    include_usage: bool,
) -> Response {
    let (sender, receiver) = mpsc::channel(16);
    tokio::spawn(async move {
        // An error here means that nobody listens any more.
        let mut events = Events { sender, envelope };
        let _ = events.send_all(chunks, answers, prompt_tokens, include_usage).await;
    });
    let events = ReceiverStream::new(receiver).map(|data| Ok::<_, Infallible>(Event::default().data(data)));
    Sse::new(events).keep_alive(KeepAlive::default()).into_response()
}

/// The client has gone.
struct Gone;

/// The events of one response.
struct Events<Choice> {
    sender: mpsc::Sender<String>,
    envelope: Envelope<Choice>,
}

impl<Choice: Serialize> Events<Choice> {
    /// Openings, pieces of all answers as they come, usage if asked for, `[DONE]`.
    async fn send_all(
        &mut self,
        mut chunks: impl Chunks<Choice = Choice>,
        answers: Vec<Answer>,
        prompt_tokens: usize,
        include_usage: bool,
    ) -> Result<(), Gone> {
        let mut completion_tokens = vec![0; answers.len()];
        for index in 0..answers.len() {
            if let Some(choice) = chunks.opening(index) {
                self.send_choice(choice).await?;
            }
        }
        let mut pieces = stream::select_all(answers.into_iter().enumerate().map(|(index, answer)| {
            let pieces = stream::unfold(answer, move |mut answer| async move {
                let piece = answer.next().await?;
                Some(((index, piece, answer.completion_tokens()), answer))
            });
            pieces.boxed()
        }));
        loop {
            let next = tokio::select! {
                () = self.sender.closed() => return Err(Gone),
                next = pieces.next() => next,
            };
            match next {
                None => break,
                Some((index, Ok(piece), tokens)) => {
                    completion_tokens[index] = tokens;
                    if !piece.is_empty() {
                        let choice = chunks.piece(index, piece);
                        self.send_choice(choice).await?;
                    }
                }
                Some((_, Err(error), _)) => {
                    self.send(&ApiError::generation(&error).into_envelope()).await?;
                    return self.send_text("[DONE]".to_owned()).await;
                }
            }
        }
        if include_usage {
            self.envelope.usage = Some(Usage::new(prompt_tokens, completion_tokens));
            self.send_envelope().await?;
        }
        self.send_text("[DONE]".to_owned()).await
    }

    async fn send_choice(&mut self, choice: Choice) -> Result<(), Gone> {
        self.envelope.choices = vec![choice];
        self.send_envelope().await?;
        self.envelope.choices.clear();
        Ok(())
    }

    async fn send_envelope(&self) -> Result<(), Gone> {
        self.send(&self.envelope).await
    }

    async fn send(&self, data: &impl Serialize) -> Result<(), Gone> {
        // Strings, numbers and lists of them always become JSON.
        let text = serde_json::to_string(data).map_err(|_| Gone)?;
        self.send_text(text).await
    }

    async fn send_text(&self, text: String) -> Result<(), Gone> {
        self.sender.send(text).await.map_err(|_| Gone)
    }
}
