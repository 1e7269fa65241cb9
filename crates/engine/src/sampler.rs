//! Logits to a token: penalties, temperature, truncation, one random state per request.
//!
//! The order of the steps and their meaning follow vLLM's: log-probabilities are those of the raw
//! logits; then bias, `min_tokens`, penalties; then arg-max, or temperature, min-p, top-k, top-p
//! and a draw. Everything depends on the request alone, never on the rest of the batch.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, HashSet},
    sync::Arc,
};

use rand::{RngExt, SeedableRng, rngs::StdRng};

/// Below this temperature sampling is arg-max, as in vLLM.
pub const GREEDY_BELOW: f32 = 1e-5;

/// Most alternatives per token that a request may ask for.
pub const MAX_LOGPROBS: usize = 20;

/// How the tokens of one request are chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Most tokens to generate; `None` is all that fit.
    pub max_tokens: Option<usize>,
    /// Stop tokens are not sampled before this many tokens.
    pub min_tokens: usize,
    /// 0 is arg-max.
    pub temperature: f32,
    /// Keeps the `top_k` likeliest tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the smallest set of likeliest tokens that has this probability; 1 keeps all.
    pub top_p: f32,
    /// Drops tokens less likely than this fraction of the likeliest; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen in prompt or output; 1 is off.
    pub repetition_penalty: f32,
    /// Taken from the logits of tokens seen in the output; 0 is off.
    pub presence_penalty: f32,
    /// Taken from the logits of tokens of the output once per occurrence; 0 is off.
    pub frequency_penalty: f32,
    /// Start of the random state; `None` draws one.
    pub seed: Option<u64>,
    /// Tokens that end the text, besides the model's own. Answers to one request share them.
    pub stop_token_ids: Arc<[u32]>,
    /// Whether to run on past the model's own end-of-sequence tokens.
    pub ignore_eos: bool,
    /// Added to the logits of these tokens.
    pub logit_bias: Arc<[(u32, f32)]>,
    /// How many likeliest tokens to report beside the chosen one; `None` reports nothing.
    pub logprobs: Option<usize>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            max_tokens: None,
            min_tokens: 0,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: None,
            stop_token_ids: Arc::default(),
            ignore_eos: false,
            logit_bias: Arc::default(),
            logprobs: None,
        }
    }
}

/// A sampling parameter outside its range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {got}, must be {allowed}")]
pub struct InvalidParam {
    /// Name of the field of [`SamplingParams`].
    pub field: &'static str,
    /// The value given.
    pub got: String,
    /// The range allowed, in words.
    pub allowed: String,
}

impl SamplingParams {
    /// Checks every field against its range.
    ///
    /// # Errors
    /// Names the first field that is out of range.
    pub fn validate(&self, vocab_size: usize) -> Result<(), InvalidParam> {
        fn check(
            ok: bool,
            field: &'static str,
            got: impl ToString,
            allowed: &str,
        ) -> Result<(), InvalidParam> {
            if ok {
                return Ok(());
            }
            Err(InvalidParam { field, got: got.to_string(), allowed: allowed.to_owned() })
        }
        let finite = |x: f32| x.is_finite();
        let penalty = |x: f32| (-2.0..=2.0).contains(&x);
        let max_tokens = self.max_tokens.unwrap_or(usize::MAX);
        check(max_tokens > 0, "max_tokens", max_tokens, "at least 1")?;
        check(self.min_tokens <= max_tokens, "min_tokens", self.min_tokens, "at most max_tokens")?;
        check(
            finite(self.temperature) && self.temperature >= 0.0,
            "temperature",
            self.temperature,
            "at least 0",
        )?;
        check(self.top_p > 0.0 && self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1")?;
        check((0.0..=1.0).contains(&self.min_p), "min_p", self.min_p, "from 0 to 1")?;
        let repetition = self.repetition_penalty;
        check(finite(repetition) && repetition > 0.0, "repetition_penalty", repetition, "above 0")?;
        check(penalty(self.presence_penalty), "presence_penalty", self.presence_penalty, "from -2 to 2")?;
        check(penalty(self.frequency_penalty), "frequency_penalty", self.frequency_penalty, "from -2 to 2")?;
        let ids = format!("token ids below {vocab_size}");
        for &id in &*self.stop_token_ids {
            check((id as usize) < vocab_size, "stop_token_ids", id, &ids)?;
        }
        for &(id, bias) in &*self.logit_bias {
            check((id as usize) < vocab_size, "logit_bias", id, &ids)?;
            check((-100.0..=100.0).contains(&bias), "logit_bias", bias, "from -100 to 100")?;
        }
        let logprobs = self.logprobs.unwrap_or(0);
        check(logprobs <= MAX_LOGPROBS, "logprobs", logprobs, &format!("from 0 to {MAX_LOGPROBS}"))
    }
}

/// Log-probabilities of one position, natural, of the raw logits.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// Of the token that was chosen.
    pub chosen: f32,
    /// The likeliest tokens, likeliest first.
    pub top: Vec<(u32, f32)>,
}

/// A token and what it scored.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    /// The chosen token.
    pub token: u32,
    /// If the request asked for them.
    pub logprobs: Option<TokenLogprobs>,
}

/// Logits that no token can be chosen from.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum BadLogits {
    /// The model computed something that is no number.
    #[error("the model's logit of token {token} is {value}; generation of this request cannot go on")]
    NotFinite {
        /// Index of the first one.
        token: usize,
        /// NaN or infinity.
        value: f32,
    },
    /// Every token is excluded.
    #[error("every token is excluded by the model or by logit_bias and min_tokens")]
    NothingLeft,
}

/// Parameters, random state and token counts of one request.
#[derive(Debug)]
pub struct Sampler {
    params: SamplingParams,
    rng: StdRng,
    /// The model's own tokens that end the text, unless ignored.
    eos_token_ids: Vec<u32>,
    /// Only filled when a repetition penalty asks for it.
    prompt_tokens: HashSet<u32>,
    output_counts: BTreeMap<u32, u32>,
    num_output: usize,
}

impl Sampler {
    /// The state before the first token. `params` are valid for the model's vocabulary.
    pub fn new(params: SamplingParams, prompt: &[u32], eos_token_ids: &[u32]) -> Self {
        let rng = params.seed.map_or_else(rand::make_rng, StdRng::seed_from_u64);
        let eos_token_ids = if params.ignore_eos { Vec::new() } else { eos_token_ids.to_vec() };
        let penalised = params.repetition_penalty != 1.0;
        let prompt_tokens = if penalised { prompt.iter().copied().collect() } else { HashSet::new() };
        Self { params, rng, eos_token_ids, prompt_tokens, output_counts: BTreeMap::new(), num_output: 0 }
    }

    /// The parameters.
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// Whether `token` ends the text.
    pub fn is_stop_token(&self, token: u32) -> bool {
        self.stop_tokens().any(|&stop| stop == token)
    }

    fn stop_tokens(&self) -> impl Iterator<Item = &u32> {
        self.params.stop_token_ids.iter().chain(&self.eos_token_ids)
    }

    /// Tokens chosen so far.
    pub fn num_output(&self) -> usize {
        self.num_output
    }

    /// Chooses the next token from `logits` (`[vocab_size]`), which are overwritten.
    ///
    /// # Errors
    /// NaN or +inf among the logits, or no token left to choose; the state is then unchanged.
    pub fn sample(&mut self, logits: &mut [f32]) -> Result<Sampled, BadLogits> {
        if let Some(token) = logits.iter().position(|x| x.is_nan() || *x == f32::INFINITY) {
            return Err(BadLogits::NotFinite { token, value: logits[token] });
        }
        let raw = self.params.logprobs.map(|top| RawLogprobs::new(logits, top));
        // The chosen token's raw logit is read before the logits are changed for good.
        let unchanged = raw.as_ref().map(|_| logits.to_vec());
        self.adjust(logits);
        let token = if self.params.temperature < GREEDY_BELOW { argmax(logits) } else { self.draw(logits) };
        let token = token.ok_or(BadLogits::NothingLeft)?;
        *self.output_counts.entry(token).or_insert(0) += 1;
        self.num_output += 1;
        let logprobs = raw.zip(unchanged).map(|(raw, logits)| TokenLogprobs {
            chosen: (f64::from(logits[token as usize]) - raw.log_sum) as f32,
            top: raw.top,
        });
        Ok(Sampled { token, logprobs })
    }

    /// Bias, `min_tokens` and penalties, in place.
    fn adjust(&self, logits: &mut [f32]) {
        let params = &self.params;
        for &(token, bias) in &*params.logit_bias {
            if let Some(x) = logits.get_mut(token as usize) {
                *x += bias;
            }
        }
        if self.num_output < params.min_tokens {
            for &token in self.stop_tokens() {
                if let Some(x) = logits.get_mut(token as usize) {
                    *x = f32::NEG_INFINITY;
                }
            }
        }
        if params.repetition_penalty != 1.0 {
            let output = self.output_counts.keys().filter(|token| !self.prompt_tokens.contains(token));
            for &token in self.prompt_tokens.iter().chain(output) {
                if let Some(x) = logits.get_mut(token as usize) {
                    let factor = params.repetition_penalty;
                    let scaled = if *x > 0.0 { *x / factor } else { *x * factor };
                    *x = scaled.min(f32::MAX);
                }
            }
        }
        if params.frequency_penalty != 0.0 || params.presence_penalty != 0.0 {
            for (&token, &count) in &self.output_counts {
                if let Some(x) = logits.get_mut(token as usize) {
                    *x -= params.frequency_penalty * count as f32;
                    *x -= params.presence_penalty;
                }
            }
        }
    }

    /// Temperature, min-p, top-k, top-p, and one draw. `None` when nothing is left.
    fn draw(&mut self, logits: &mut [f32]) -> Option<u32> {
        let params = &self.params;
        let max = logits[argmax(logits)? as usize];
        // Relative to the likeliest token: its weight is 1.
        for x in logits.iter_mut() {
            let weight = ((*x - max) / params.temperature).exp();
            *x = if weight < params.min_p { 0.0 } else { weight };
        }
        let uniform: f64 = self.rng.random();
        if params.top_k == 0 && params.top_p >= 1.0 {
            let target = uniform * sum(logits.iter().copied());
            return pick(logits.iter().copied().enumerate(), target);
        }
        let ids = likeliest(logits, params.top_k, params.top_p);
        let kept = || ids.iter().map(|&id| logits[id as usize]);
        pick(ids.iter().map(|&id| id as usize).zip(kept()), uniform * sum(kept()))
    }
}

fn sum(weights: impl Iterator<Item = f32>) -> f64 {
    weights.map(f64::from).sum()
}

/// The `top_k` heaviest ids (all if 0), of these as many as it takes to reach the share `top_p` of
/// their weight; heaviest first.
fn likeliest(weights: &[f32], top_k: usize, top_p: f32) -> Vec<u32> {
    let share = f64::from(top_p.min(1.0));
    let all = sum(weights.iter().copied());
    let mut ids: Vec<u32> = Vec::new();
    // Mostly a few tokens have all the weight: look at the light ones only if they are needed.
    for floor in [1e-3, 1e-6, f32::MIN_POSITIVE] {
        ids.clear();
        ids.extend((0..weights.len() as u32).filter(|&id| weights[id as usize] >= floor));
        let weight = || sum(ids.iter().map(|&id| weights[id as usize]));
        let enough = if top_k > 0 { ids.len() >= top_k } else { weight() >= share * all };
        if enough {
            break;
        }
    }
    if top_k > 0 && top_k < ids.len() {
        ids.select_nth_unstable_by(top_k, |a, b| by_weight(weights, *a, *b));
        ids.truncate(top_k);
    }
    ids.sort_unstable_by(|a, b| by_weight(weights, *a, *b));
    if top_p < 1.0 {
        let total = if top_k > 0 { sum(ids.iter().map(|&id| weights[id as usize])) } else { all };
        let mut before = 0.0;
        let kept = ids.iter().take_while(|&&id| {
            let keep = before < share * total;
            before += f64::from(weights[id as usize]);
            keep
        });
        let kept = kept.count();
        ids.truncate(kept);
    }
    ids
}

/// Heavier first, then the lower id: the same order on every run.
fn by_weight(weights: &[f32], a: u32, b: u32) -> Ordering {
    weights[b as usize].total_cmp(&weights[a as usize]).then(a.cmp(&b))
}

/// The first token whose running sum of weights exceeds `target`; the last one with any weight
/// where rounding leaves none.
fn pick(weights: impl Iterator<Item = (usize, f32)>, target: f64) -> Option<u32> {
    let (mut sum, mut last) = (0.0, None);
    for (id, weight) in weights.filter(|(_, weight)| *weight > 0.0) {
        sum += f64::from(weight);
        last = Some(id as u32);
        if sum > target {
            break;
        }
    }
    last
}

/// Index of the largest logit, the lowest of equal ones; `None` when all are -inf.
pub fn argmax(logits: &[f32]) -> Option<u32> {
    let (mut best, mut at) = (f32::NEG_INFINITY, None);
    for (token, &x) in logits.iter().enumerate() {
        if x > best {
            (best, at) = (x, Some(token as u32));
        }
    }
    at
}

/// Normaliser and likeliest tokens of raw logits.
struct RawLogprobs {
    log_sum: f64,
    top: Vec<(u32, f32)>,
}

impl RawLogprobs {
    fn new(logits: &[f32], num_top: usize) -> Self {
        let max = argmax(logits).map_or(0.0, |token| f64::from(logits[token as usize]));
        let log_sum = max + logits.iter().map(|&x| (f64::from(x) - max).exp()).sum::<f64>().ln();
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        let num_top = num_top.min(ids.len());
        if num_top < ids.len() {
            ids.select_nth_unstable_by(num_top, |a, b| by_weight(logits, *a, *b));
            ids.truncate(num_top);
        }
        ids.sort_unstable_by(|a, b| by_weight(logits, *a, *b));
        let logprob = |id: u32| (f64::from(logits[id as usize]) - log_sum) as f32;
        Self { log_sum, top: ids.into_iter().map(|id| (id, logprob(id))).collect() }
    }
}

#[cfg(test)]
mod tests;
