//! Answers one after the other, with the time they take.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use turboquant_engine::{
    engine::{Engine, EngineHandle},
    request::Request,
    sampler::SamplingParams,
};

use crate::{
    answer::Answer,
    error::wrong_use,
    health,
    text::{detokenize::TokenBytes, stop::StopSet},
};

/// Sums over all answers so far.
#[derive(Debug, Clone, Default)]
pub(crate) struct Speed {
    /// Tokens of prompts.
    pub(crate) prompt_tokens: usize,
    /// Up to the first token of each answer.
    pub(crate) prefill: Duration,
    /// Tokens after the first of each answer.
    pub(crate) decoded_tokens: usize,
    /// From the first to the last token of each answer.
    pub(crate) decode: Duration,
    /// Most pages in use, per page group.
    pub(crate) peak_pages: Vec<usize>,
}

/// An engine with one client.
pub(crate) struct Generator {
    handle: EngineHandle,
    /// Ends with the generator.
    _engine: Engine,
    tokens: Arc<TokenBytes>,
    stops: StopSet,
    speed: Speed,
}

impl Generator {
    pub(crate) fn new(engine: Engine, tokens: Arc<TokenBytes>, stops: StopSet) -> Self {
        Self { handle: engine.handle(), _engine: engine, tokens, stops, speed: Speed::default() }
    }

    pub(crate) fn speed(&self) -> &Speed {
        &self.speed
    }

    /// What the cache could not store exactly so far, in sentences.
    pub(crate) fn warnings(&self) -> Vec<String> {
        health::warnings(&self.handle.stats().cache_health)
    }

    /// Hands the answer to `show` as it comes and returns the whole of it.
    pub(crate) fn generate(
        &mut self,
        prompt: Vec<u32>,
        params: SamplingParams,
        mut show: impl FnMut(&str) -> io::Result<()>,
    ) -> Result<String> {
        let prompt_tokens = prompt.len();
        let start = Instant::now();
        let events =
            self.handle.submit(Request { prompt, params }).map_err(|error| wrong_use(error.to_string()))?;
        let mut answer = Answer::new(events, Arc::clone(&self.tokens), self.stops.clone(), 0);
        let mut text = String::new();
        let mut times: Option<(Instant, Instant)> = None;
        while let Some(piece) = answer.blocking_next() {
            let piece = piece.context("the answer broke off")?;
            let now = Instant::now();
            times = Some(times.map_or((now, now), |(first, _)| (first, now)));
            self.note_pages();
            if !piece.text.is_empty() {
                show(&piece.text)?;
                text.push_str(&piece.text);
            }
        }
        if let Some((first, last)) = times {
            self.speed.prompt_tokens += prompt_tokens;
            self.speed.prefill += first - start;
            self.speed.decoded_tokens += answer.completion_tokens().saturating_sub(1);
            self.speed.decode += last - first;
        }
        Ok(text)
    }

    fn note_pages(&mut self) {
        let pages = self.handle.stats().pages;
        self.speed.peak_pages.resize(pages.len(), 0);
        for (peak, pool) in self.speed.peak_pages.iter_mut().zip(pages) {
            *peak = (*peak).max(pool.total - pool.free);
        }
    }
}
