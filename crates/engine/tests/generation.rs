//! Whole engine on tiny random models: against transformers' logits, and against itself under other
//! cuts, other company and preemption.
#![expect(clippy::unwrap_used, reason = "a test may")]

mod dense;

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, OnceLock},
};

use candle_core::{DType, Device};
use dense::DenseAttention;
use turboquant::format::{CacheDtype, Preset};
use turboquant_engine::{
    batch::{Phase, Segment, StepBatch},
    engine::{Engine, EngineConfig, EngineHandle, RequestStream},
    model::LoadedModel,
    plan::{Budget, Plan, PlanOptions},
    request::{Event, Request},
    runner::Runner,
    sampler::{SamplingParams, argmax},
    session::{Session, SessionError},
};

/// Full attention; windows only; both kinds; norms on heads; soft caps; both kinds and norms.
const MODELS: [&str; 6] = ["llama", "mistral", "ministral", "qwen3", "gemma2", "gemma3_text"];

/// As in `model/tiny.rs`.
const MAX_ERROR: f32 = 3e-5;

fn tiny(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/tiny").join(name)
}

fn model(name: &'static str) -> Arc<LoadedModel> {
    static MODELS: OnceLock<Mutex<HashMap<&'static str, Arc<LoadedModel>>>> = OnceLock::new();
    let mut models = MODELS.get_or_init(Mutex::default).lock().unwrap();
    models.entry(name).or_insert_with(|| Arc::new(LoadedModel::load(&tiny(name)).unwrap())).clone()
}

struct Cache {
    dtype: CacheDtype,
    tokens: usize,
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
}

impl Cache {
    fn roomy(dtype: CacheDtype) -> Self {
        Cache { dtype, tokens: 6000, max_num_seqs: 8, max_num_batched_tokens: 1024 }
    }

    fn plan(&self, model: &LoadedModel) -> Plan {
        let options = PlanOptions {
            dtype: self.dtype,
            boundary_layers: Some(0),
            budget: Budget::Tokens(self.tokens),
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            ..PlanOptions::default()
        };
        Plan::build(&model.config, &options).unwrap()
    }

    fn runner(&self, name: &'static str) -> Runner {
        let model = model(name);
        let plan = self.plan(&model);
        let runner = Runner::new(model, &plan).unwrap();
        assert_eq!(runner.cache_bytes(), plan.total_bytes());
        runner
    }

    fn session(&self, name: &'static str) -> Session {
        Session::new(self.runner(name), self.max_num_batched_tokens)
    }

    fn engine(&self, name: &'static str) -> Engine {
        let runner = self.runner(name);
        let config = EngineConfig {
            max_queued_requests: 1000,
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            max_model_len: runner.model().config.max_model_len,
            eos_token_ids: vec![],
        };
        Engine::start(runner, config).unwrap()
    }
}

/// Arbitrary token ids below 256, the vocabulary of all tiny models.
fn text(seed: u32, len: usize) -> Vec<u32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 24
    };
    (0..len).map(next).collect()
}

fn check_close(got: &[f32], golden: &[f32], what: &str) {
    let worst = got.iter().zip(golden).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst <= MAX_ERROR, "{what}: {worst}");
    assert_eq!(argmax(got), argmax(golden), "{what}");
}

#[test]
fn f32_rows_give_the_golden_logits_by_prefill_and_by_decode() {
    for name in MODELS {
        let golden =
            candle_core::safetensors::load(tiny(name).join("golden.safetensors"), &Device::Cpu).unwrap();
        let ids = golden["input_ids"].to_dtype(DType::U32).unwrap().flatten_all().unwrap();
        let ids: Vec<u32> = ids.to_vec1().unwrap();
        let full = golden["logits_full"].squeeze(0).unwrap().to_vec2::<f32>().unwrap();
        let split = golden["logits_prefill32_then_decode"].squeeze(0).unwrap().to_vec2::<f32>().unwrap();
        let mut session = Cache::roomy(CacheDtype::Auto).session(name);
        let last = session.prefill(&ids).unwrap();
        check_close(last.row(0), full.last().unwrap(), name);
        session.clear();
        let last = session.prefill(&ids[..32]).unwrap();
        check_close(last.row(0), &split[31], name);
        let scored = session.score(&ids[32..]).unwrap();
        assert_eq!(scored.num_rows(), ids.len() - 32);
        for (row, golden) in scored.rows().zip(&split[32..]) {
            check_close(row, golden, name);
        }
    }
}

#[test]
fn greedy_answers_are_those_of_dense_attention() {
    for name in MODELS {
        let prompt = text(1, 40);
        let reference = model(name);
        let mut attention = DenseAttention::default();
        let (mut step, mut start, mut expected) = (prompt.clone(), 0, Vec::<u32>::new());
        for _ in 0..30 {
            let batch = StepBatch {
                positions: (start..start + step.len()).map(|at| at as u32).collect(),
                segments: vec![Segment {
                    rows: 0..step.len(),
                    phase: if start == 0 { Phase::Prefill } else { Phase::Decode },
                    block_tables: Vec::new(),
                }],
                logits_rows: vec![step.len() as u32 - 1],
                token_ids: step.clone(),
                ..StepBatch::default()
            };
            let logits = reference.forward(&batch, &mut attention).unwrap();
            let logits = logits.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            start += step.len();
            step = vec![argmax(&logits).unwrap()];
            expected.extend(&step);
        }
        let engine = Cache::roomy(CacheDtype::Auto).engine(name);
        let events = collect(engine.handle().submit(request(prompt, 30, None)).unwrap());
        assert_eq!(tokens(&events), expected, "{name}");
    }
}

#[test]
fn chunked_prefill_and_single_decodes_change_no_bit() {
    for name in MODELS {
        for dtype in CacheDtype::ALL {
            let tokens = text(2, 505);
            let (prompt, rest) = tokens.split_at(490);
            let mut whole = Cache { max_num_batched_tokens: 1024, ..Cache::roomy(dtype) }.session(name);
            let mut chunked = Cache { max_num_batched_tokens: 256, ..Cache::roomy(dtype) }.session(name);
            assert_eq!(whole.prefill(prompt).unwrap(), chunked.prefill(prompt).unwrap(), "{name} {dtype}");
            let together = whole.score(rest).unwrap();
            for (token, expected) in rest.iter().zip(together.rows()) {
                let one = chunked.score(&[*token]).unwrap();
                assert_eq!(one.row(0), expected, "{name} {dtype}");
            }
        }
    }
}

/// Greedy without a seed. Log-probabilities of 20 tokens stand for all bits of the logits.
fn request(prompt: Vec<u32>, max_tokens: usize, seed: Option<u64>) -> Request {
    let params = SamplingParams {
        max_tokens: Some(max_tokens),
        temperature: if seed.is_some() { 1.0 } else { 0.0 },
        seed,
        logprobs: Some(20),
        ..SamplingParams::default()
    };
    Request { prompt, params }
}

fn crowd() -> Vec<Request> {
    let request = |at: u32| {
        let seed = (!at.is_multiple_of(3)).then_some(u64::from(at));
        request(text(at, [3, 300, 20, 257, 64, 1][at as usize % 6]), 30 + 25 * (at as usize % 4), seed)
    };
    (0..9).map(request).collect()
}

fn collect(mut stream: RequestStream) -> Vec<Event> {
    let mut events = Vec::new();
    while let Some(event) = stream.blocking_recv() {
        events.push(event);
    }
    assert!(matches!(events.last(), Some(Event::Finished { .. })), "{:?}", events.last());
    events
}

fn tokens(events: &[Event]) -> Vec<u32> {
    let token = |event: &Event| match event {
        Event::Token { id, .. } => Some(*id),
        _ => None,
    };
    events.iter().filter_map(token).collect()
}

fn together(handle: &EngineHandle, requests: Vec<Request>) -> Vec<Vec<Event>> {
    let streams: Vec<_> = requests.into_iter().map(|request| handle.submit(request).unwrap()).collect();
    streams.into_iter().map(collect).collect()
}

#[test]
fn company_and_preemption_change_no_bit() {
    let four_bit = [CacheDtype::TurboQuant(Preset::FourBitNc)];
    for (name, dtypes) in [("llama", &CacheDtype::ALL[..]), ("ministral", &four_bit), ("mistral", &four_bit)]
    {
        for &dtype in dtypes {
            let engine = Cache::roomy(dtype).engine(name);
            let alone: Vec<_> = crowd()
                .into_iter()
                .map(|request| together(&engine.handle(), vec![request]).remove(0))
                .collect();
            assert_eq!(together(&engine.handle(), crowd()), alone, "{name} {dtype}");
            assert_eq!(engine.handle().stats().preemptions, 0);
            if name == "mistral" {
                continue; // Windows of a page: nothing to run out of.
            }
            // The longest request takes 404 tokens of cache.
            let tight = Cache { tokens: 26 * 16, ..Cache::roomy(dtype) }.engine(name);
            assert_eq!(together(&tight.handle(), crowd()), alone, "{name} {dtype}");
            let stats = tight.handle().stats();
            assert!(stats.preemptions > 0, "{name} {dtype}");
            assert!(stats.pages.iter().all(|group| group.free == group.total));
        }
    }
}

#[test]
fn a_seed_fixes_the_answer_and_another_one_changes_it() {
    let engine = Cache::roomy(CacheDtype::Fp8).engine("llama");
    let answer = |seed| tokens(&together(&engine.handle(), vec![request(text(5, 30), 40, Some(seed))])[0]);
    assert_eq!(answer(1), answer(1));
    assert_ne!(answer(1), answer(2));
}

#[test]
fn a_session_refuses_what_it_cannot_append() {
    let cache = Cache { tokens: 300, max_num_batched_tokens: 256, ..Cache::roomy(CacheDtype::Auto) };
    let mut session = cache.session("llama");
    assert!(matches!(session.prefill(&[]), Err(SessionError::NoTokens)));
    session.prefill(&text(1, 20)).unwrap();
    let error = session.prefill(&[1]).unwrap_err().to_string();
    assert_eq!(
        error,
        "a prefill must begin at a multiple of 256 tokens, 20 are in the cache; score further tokens instead"
    );
    assert!(matches!(session.score(&text(1, 300)), Err(SessionError::OutOfPages(_))));
    assert_eq!(session.num_tokens(), 20);
    assert_eq!(session.score(&text(1, 284)).unwrap().num_rows(), 284);
    assert!(matches!(session.score(&[1]), Err(SessionError::OutOfPages(_))));
    assert!(matches!(session.score(&[256]), Err(SessionError::OutOfPages(_))));
    session.clear();
    assert!(matches!(session.score(&[256]), Err(SessionError::Engine(_))));
    assert_eq!(session.num_tokens(), 0);
}
