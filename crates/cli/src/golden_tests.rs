//! Tokenizer, model and cache together, on real models against transformers.

use serde::Deserialize;
use turboquant_engine::{
    plan::{Budget, PlanOptions},
    session::Session,
};

use crate::{
    args::{ModelArgs, PagingArgs},
    setup::{self, Loaded},
};

#[derive(Deserialize)]
struct Golden {
    answers: Vec<Answer>,
    scored: Scored,
}

#[derive(Deserialize)]
struct Answer {
    messages: Option<Vec<minijinja::Value>>,
    prompt: String,
    prompt_ids: Vec<u32>,
    greedy_ids: Vec<u32>,
    gap_to_second: Vec<f32>,
}

#[derive(Deserialize)]
struct Scored {
    ids: Vec<u32>,
    /// Of the tokens from the second on.
    token_logprobs: Vec<f64>,
}

/// transformers computes in f32; here activations are rounded to 16 bits for each product, and keys and
/// values to f16. Where its best logit is less than this ahead, another token may win.
const NEAR_TIE: f32 = 0.02;

fn load(model: &str) -> Loaded {
    let paging = PagingArgs { max_model_len: None, page_size: 16 };
    let args = ModelArgs { model: model.to_owned(), paging, threads: None };
    setup::load(&args).unwrap()
}

fn session(loaded: &Loaded) -> Session {
    let options = PlanOptions {
        budget: Budget::Tokens(1024),
        max_model_len: Some(1024),
        ..loaded.default_plan_options(16)
    };
    Session::new(loaded.runner(&loaded.plan(&options).unwrap()).unwrap(), 512)
}

fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap();
    best.0 as u32
}

fn log_prob(logits: &[f32], token: u32) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - max).exp()).sum();
    f64::from(logits[token as usize]) - max - sum.ln()
}

fn check(model: &str, golden: &str) {
    let golden: Golden = serde_json::from_str(golden).unwrap();
    let loaded = load(model);
    let mut session = session(&loaded);
    let mut compared = 0;
    for answer in &golden.answers {
        let ids = match &answer.messages {
            Some(messages) => {
                let prompt = loaded.text.render_chat(messages, None).unwrap().unwrap();
                assert_eq!(prompt, answer.prompt);
                loaded.text.encode_rendered(&prompt).unwrap()
            }
            None => loaded.text.encode(&answer.prompt).unwrap(),
        };
        assert_eq!(ids, answer.prompt_ids, "{:?}", answer.prompt);

        // Forced along transformers' answer, so that one near tie does not spoil the rest.
        session.clear();
        let mut chosen = vec![argmax(session.prefill(&ids).unwrap().row(0))];
        let forced = &answer.greedy_ids[..answer.greedy_ids.len() - 1];
        chosen.extend(session.score(forced).unwrap().rows().map(argmax));
        for ((got, expected), gap) in chosen.iter().zip(&answer.greedy_ids).zip(&answer.gap_to_second) {
            assert!(got == expected || *gap < NEAR_TIE, "{got} instead of {expected}, {gap} ahead");
            compared += usize::from(*gap >= NEAR_TIE);
        }
    }
    assert!(compared > 40, "only {compared} tokens are no near ties");

    // The second half of the text, token by token on the decode path.
    session.clear();
    let ids = &golden.scored.ids;
    let half = ids.len() / 2;
    session.prefill(&ids[..half]).unwrap();
    let logits = session.score(&ids[half..ids.len() - 1]).unwrap();
    let ours: Vec<f64> =
        logits.rows().zip(&ids[half + 1..]).map(|(row, &token)| log_prob(row, token)).collect();
    let theirs = &golden.scored.token_logprobs[half..];
    assert_eq!(ours.len(), theirs.len());
    let perplexity = |log_probs: &[f64]| (-log_probs.iter().sum::<f64>() / log_probs.len() as f64).exp();
    let (ours, theirs) = (perplexity(&ours), perplexity(theirs));
    println!("{model}: perplexity {ours:.4}, transformers {theirs:.4}");
    assert!((ours / theirs - 1.0).abs() < 0.001, "perplexity {ours} against {theirs}");
}

#[test]
#[ignore = "needs the model smollm2 (93 MB)"]
fn smollm2_agrees_with_transformers() {
    check("smollm2", include_str!("../testdata/smollm2_golden.json"));
}

#[test]
#[ignore = "needs the model gemma3-270m (238 MB, its own licence)"]
fn gemma3_270m_agrees_with_transformers() {
    check("gemma3-270m", include_str!("../testdata/gemma3_golden.json"));
}
