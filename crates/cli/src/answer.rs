//! One answer: the engine's events on one side, pieces of text on the other.

use std::sync::Arc;

use turboquant_engine::{
    engine::RequestStream,
    request::{Event, GenerationError},
    sampler::TokenLogprobs,
    sequence::FinishReason,
};

use crate::text::{detokenize::TokenBytes, stop::StopSet, stream::TextStream};

/// Why an answer ended: "stop" or "length", as the OpenAI API says it.
pub(crate) type FinishWord = &'static str;

/// A token of the answer with its log-probability and the likeliest others.
#[derive(Debug)]
pub(crate) struct ScoredToken {
    pub(crate) id: u32,
    pub(crate) logprobs: TokenLogprobs,
}

/// What one event of the engine adds to an answer.
#[derive(Debug, Default)]
pub(crate) struct Piece {
    /// Text that is certain by now; may be empty.
    pub(crate) text: String,
    /// If log-probabilities were asked for.
    pub(crate) scored: Option<ScoredToken>,
    /// Set in the last piece.
    pub(crate) finish: Option<FinishWord>,
}

impl Piece {
    /// Whether a client would learn nothing from it.
    pub(crate) fn is_empty(&self) -> bool {
        self.text.is_empty() && self.scored.is_none() && self.finish.is_none()
    }
}

/// An answer while it is generated. Dropping it aborts the generation.
pub(crate) struct Answer {
    /// `None` once the answer is complete.
    events: Option<RequestStream>,
    text: TextStream,
    completion_tokens: usize,
}

impl Answer {
    /// The answer ends at any of `stops` that comes after `min_tokens` tokens.
    pub(crate) fn new(
        events: RequestStream,
        tokens: Arc<TokenBytes>,
        stops: StopSet,
        min_tokens: usize,
    ) -> Self {
        Self { events: Some(events), text: TextStream::new(tokens, stops, min_tokens), completion_tokens: 0 }
    }

    /// Tokens generated so far, those of a stop string or stop token included.
    pub(crate) fn completion_tokens(&self) -> usize {
        self.completion_tokens
    }

    /// The next piece; `None` after the last.
    pub(crate) async fn next(&mut self) -> Option<Result<Piece, GenerationError>> {
        let event = self.events.as_mut()?.recv().await?;
        Some(self.piece(event))
    }

    /// As [`Answer::next`], outside of an async runtime.
    pub(crate) fn blocking_next(&mut self) -> Option<Result<Piece, GenerationError>> {
        let event = self.events.as_mut()?.blocking_recv()?;
        Some(self.piece(event))
    }

    fn piece(&mut self, event: Event) -> Result<Piece, GenerationError> {
        let mut piece = Piece::default();
        match event {
            Event::Token { id, logprobs } => {
                self.completion_tokens += 1;
                piece.scored = logprobs.map(|logprobs| ScoredToken { id, logprobs });
                if self.text.push(id, &mut piece.text) {
                    // The engine need not go on.
                    if let Some(events) = self.events.take() {
                        events.finish();
                    }
                    piece.finish = Some("stop");
                }
            }
            Event::Finished { reason, usage } => {
                self.events = None;
                self.completion_tokens = usage.completion_tokens;
                let stopped = self.text.finish(&mut piece.text);
                piece.finish = Some(match reason {
                    FinishReason::Length if !stopped => "length",
                    _ => "stop",
                });
            }
            Event::Failed(error) => {
                self.events = None;
                return Err(error);
            }
        }
        Ok(piece)
    }
}
