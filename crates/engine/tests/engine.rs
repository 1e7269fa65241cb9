//! The step loop with a stand-in for the model: logits follow from a token and its position alone.
#![expect(clippy::unwrap_used, reason = "a test may")]

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use candle_core::{DType, Device, Tensor};
use turboquant_engine::{
    batch::StepBatch,
    engine::{Engine, EngineConfig, EngineHandle, RequestStream, StartError},
    error::EngineError,
    model::{AttentionBackend, LayerAttention},
    plan::{GroupPlan, Lifetime, Plan},
    request::{Event, GenerationError, Request, RequestError, Usage},
    runner::{Runner, StepModel},
    sampler::SamplingParams,
    sequence::FinishReason,
};

const VOCAB: usize = 97;

/// Tokens that make the model misbehave when they are computed.
const PANIC: u32 = 90;
const ERROR: u32 = 91;
const NAN: u32 = 92;

#[derive(Default)]
struct Toy {
    step_time: Duration,
    /// Layers, each of which takes `layer_time`.
    layers: usize,
    layer_time: Duration,
    rows: AtomicUsize,
}

fn layer_attention() -> LayerAttention {
    LayerAttention {
        num_qo_heads: 1,
        num_kv_heads: 1,
        key_head_dim: 16,
        value_head_dim: 16,
        sm_scale: 1.0,
        window: None,
        soft_cap: None,
        sinks: None,
    }
}

/// What follows `token` at `position` with greedy sampling.
fn successor(token: u32, position: u32) -> u32 {
    (token * 7 + position * 3 + 1) % 89
}

impl StepModel for Toy {
    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn forward(
        &self,
        batch: &StepBatch,
        attention: &mut dyn AttentionBackend,
    ) -> Result<Tensor, EngineError> {
        thread::sleep(self.step_time);
        let nothing = Tensor::zeros(0, DType::F32, &Device::Cpu)?;
        for layer in 0..self.layers {
            thread::sleep(self.layer_time);
            // There are no pages to attend to: any other error is as it should be.
            let refusal = attention.attend(layer, &nothing, &nothing, &nothing, &layer_attention());
            if let Err(EngineError::Abandoned) = refusal {
                return Err(EngineError::Abandoned);
            }
        }
        self.rows.fetch_add(batch.num_rows(), Ordering::Relaxed);
        assert!(!batch.token_ids.contains(&PANIC), "a panic on purpose");
        if batch.token_ids.contains(&ERROR) {
            return Err(EngineError::Batch("an error on purpose".to_owned()));
        }
        let logits = batch.logits_rows.iter().flat_map(|&row| {
            let (token, position) = (batch.token_ids[row as usize], batch.positions[row as usize]);
            let next = successor(token, position);
            (0..VOCAB as u32).map(move |id| match (token, id) {
                (NAN, 5) => f32::NAN,
                _ if id == next => 4.0,
                // Never sampled.
                _ if id >= 89 => f32::NEG_INFINITY,
                _ => ((id * 13 + token) % 11) as f32 / 4.0,
            })
        });
        let logits: Vec<f32> = logits.collect();
        Ok(Tensor::from_vec(logits, (batch.logits_rows.len(), VOCAB), &Device::Cpu)?)
    }
}

fn plan(num_pages: usize) -> Plan {
    let group =
        GroupPlan { lifetime: Lifetime::Full, tokens_per_row: 1, layers: vec![], page_bytes: 1, num_pages };
    Plan { page_size: 16, groups: vec![group], ..Plan::default() }
}

fn config() -> EngineConfig {
    EngineConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 512,
        max_queued_requests: 100,
        max_model_len: 1000,
        eos_token_ids: vec![],
    }
}

fn start_toy(toy: Toy, num_pages: usize, config: EngineConfig) -> (Engine, Arc<Toy>) {
    let toy = Arc::new(toy);
    let runner = Runner::new(toy.clone(), &plan(num_pages)).unwrap();
    (Engine::start(runner, config).unwrap(), toy)
}

fn start(num_pages: usize) -> Engine {
    start_toy(Toy::default(), num_pages, config()).0
}

fn greedy(prompt: &[u32], max_tokens: usize) -> Request {
    let params =
        SamplingParams { temperature: 0.0, max_tokens: Some(max_tokens), ..SamplingParams::default() };
    Request { prompt: prompt.to_vec(), params }
}

fn expected(prompt: &[u32], num_tokens: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..num_tokens {
        let position = tokens.len() - 1;
        tokens.push(successor(tokens[position], position as u32));
    }
    tokens.split_off(prompt.len())
}

fn collect(mut stream: RequestStream) -> (Vec<u32>, Event) {
    let mut tokens = Vec::new();
    loop {
        match stream.blocking_recv().unwrap() {
            Event::Token { id, .. } => tokens.push(id),
            last => {
                assert_eq!(stream.blocking_recv(), None);
                return (tokens, last);
            }
        }
    }
}

fn tokens_of(handle: &EngineHandle, request: Request) -> Vec<u32> {
    let (tokens, last) = collect(handle.submit(request).unwrap());
    assert!(matches!(last, Event::Finished { .. }), "{last:?}");
    tokens
}

/// Waits up to two seconds.
fn wait_for(mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(2), "it does not come about");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Waits for the engine to have nothing left and all pages back.
fn wait_for_idle(handle: &EngineHandle) {
    wait_for(|| {
        let stats = handle.stats();
        let free = stats.pages.iter().all(|group| group.free == group.total);
        stats.num_running + stats.num_waiting == 0 && free
    });
}

#[test]
fn a_request_is_answered_to_its_length() {
    let engine = start(100);
    let prompt: Vec<u32> = (0..300).map(|i| i % 80).collect();
    let (tokens, last) = collect(engine.handle().submit(greedy(&prompt, 50)).unwrap());
    assert_eq!(tokens, expected(&prompt, 50));
    let usage = Usage { prompt_tokens: 300, completion_tokens: 50 };
    assert_eq!(last, Event::Finished { reason: FinishReason::Length, usage });
    let stats = engine.handle().stats();
    assert_eq!((stats.num_running, stats.num_waiting, stats.finished), (0, 0, 1));
    assert_eq!((stats.prompt_tokens, stats.generation_tokens), (300, 50));
    assert_eq!(stats.pages[0].free, 100);
}

#[test]
fn without_max_tokens_the_context_is_filled() {
    let mut config = config();
    config.max_model_len = 40;
    let engine = start_toy(Toy::default(), 100, config).0;
    let unlimited = |len| {
        let mut request = greedy(&vec![1; len], 1);
        request.params.max_tokens = None;
        request
    };
    assert_eq!(tokens_of(&engine.handle(), unlimited(10)).len(), 30);
    // Of the cache: 32 tokens, and the last one of the output needs no place.
    let engine = start(2);
    assert_eq!(tokens_of(&engine.handle(), unlimited(10)).len(), 23);
}

#[test]
fn stop_tokens_end_the_answer_and_are_not_part_of_it() {
    let prompt = [3, 4];
    let all = expected(&prompt, 12);
    let stop = all[5];
    let at = all.iter().position(|&token| token == stop).unwrap();
    let finished = |completion_tokens| Event::Finished {
        reason: FinishReason::Stop { token: stop },
        usage: Usage { prompt_tokens: 2, completion_tokens },
    };
    let engine = start(100);
    let mut request = greedy(&prompt, 12);
    request.params.stop_token_ids = [stop].into();
    let (tokens, last) = collect(engine.handle().submit(request).unwrap());
    assert_eq!((tokens, last), (all[..at].to_vec(), finished(at + 1)));

    let engine = start_toy(Toy::default(), 100, EngineConfig { eos_token_ids: vec![stop], ..config() }).0;
    let (tokens, last) = collect(engine.handle().submit(greedy(&prompt, 12)).unwrap());
    assert_eq!((tokens, last), (all[..at].to_vec(), finished(at + 1)));
    let mut request = greedy(&prompt, 12);
    request.params.ignore_eos = true;
    assert_eq!(tokens_of(&engine.handle(), request), all);
    // Suppressed while there are fewer than min_tokens: the runner-up comes instead.
    let mut request = greedy(&prompt, 12);
    request.params.min_tokens = at + 1;
    let tokens = tokens_of(&engine.handle(), request);
    assert_eq!(tokens[..at], all[..at]);
    assert_ne!(tokens[at], stop);
    assert!(tokens.len() > at);
}

/// Requests of different lengths and sampling.
fn crowd() -> Vec<Request> {
    let request = |at: u32| {
        let prompt: Vec<u32> = (0..1 + at * 37 % 400).map(|i| (i * at) % 80).collect();
        let mut request = greedy(&prompt, 5 + (at as usize * 11) % 60);
        if !at.is_multiple_of(3) {
            request.params.temperature = 0.9;
            request.params.seed = Some(u64::from(at));
            request.params.top_p = if at.is_multiple_of(2) { 0.9 } else { 1.0 };
            request.params.frequency_penalty = 0.3;
        }
        request
    };
    (0..24).map(request).collect()
}

fn answers_together(handle: &EngineHandle) -> Vec<Vec<u32>> {
    let streams: Vec<_> = crowd().into_iter().map(|request| handle.submit(request).unwrap()).collect();
    streams.into_iter().map(|stream| collect(stream).0).collect()
}

#[test]
fn answers_do_not_depend_on_what_else_runs_or_on_preemption() {
    let roomy = start(10_000);
    let alone: Vec<_> = crowd().into_iter().map(|request| tokens_of(&roomy.handle(), request)).collect();
    assert_eq!(answers_together(&roomy.handle()), alone);
    assert_eq!(roomy.handle().stats().preemptions, 0);
    // 448 tokens: the longest request just fits.
    let tight = start(28);
    assert_eq!(answers_together(&tight.handle()), alone);
    assert!(tight.handle().stats().preemptions > 0);
    wait_for_idle(&tight.handle());
}

#[test]
fn a_dropped_stream_frees_its_pages_and_leaves_the_others() {
    let toy = Toy { step_time: Duration::from_millis(2), ..Toy::default() };
    let (engine, _) = start_toy(toy, 200, config());
    let handle = engine.handle();
    let kept = handle.submit(greedy(&[1, 2, 3], 100)).unwrap();
    let mut dropped = handle.submit(greedy(&[4, 5], 900)).unwrap();
    for _ in 0..3 {
        assert!(matches!(dropped.blocking_recv(), Some(Event::Token { .. })));
    }
    drop(dropped);
    assert_eq!(collect(kept).0, expected(&[1, 2, 3], 100));
    let stats = handle.stats();
    assert_eq!((stats.aborted, stats.finished, stats.num_running), (1, 1, 0));
    assert!(stats.generation_tokens < 200, "{stats:?}");
    wait_for_idle(&handle);
}

#[test]
fn a_request_that_is_dropped_while_it_waits_never_starts() {
    let toy = Toy { step_time: Duration::from_millis(2), ..Toy::default() };
    let (engine, toy) = start_toy(toy, 200, EngineConfig { max_num_seqs: 1, ..config() });
    let first = engine.handle().submit(greedy(&[1], 20)).unwrap();
    drop(engine.handle().submit(greedy(&[2; 300], 20)).unwrap());
    assert_eq!(collect(first).0, expected(&[1], 20));
    wait_for_idle(&engine.handle());
    assert_eq!(toy.rows.load(Ordering::Relaxed), 20);
}

#[test]
fn a_long_prefill_stops_after_the_current_chunk() {
    let toy = Toy { step_time: Duration::from_millis(5), ..Toy::default() };
    let config = EngineConfig {
        max_num_seqs: 1,
        max_num_batched_tokens: 256,
        max_queued_requests: 100,
        max_model_len: 20_000,
        eos_token_ids: vec![],
    };
    let (engine, toy) = start_toy(toy, 2000, config);
    let stream = engine.handle().submit(greedy(&[2; 16_000], 20)).unwrap();
    wait_for(|| engine.handle().stats().steps >= 3);
    drop(stream);
    wait_for_idle(&engine.handle());
    assert!(toy.rows.load(Ordering::Relaxed) <= 10 * 256);
}

/// Its 1000 layers would take 5 s, the pages are back in 2 (see `wait_for_idle`).
#[test]
fn a_step_for_nobody_is_given_up_between_layers() {
    let toy = || Toy { layers: 1000, layer_time: Duration::from_millis(5), ..Toy::default() };
    let (engine, _) = start_toy(toy(), 200, config());
    let handle = engine.handle();
    let stream = handle.submit(greedy(&[2; 300], 20)).unwrap();
    wait_for(|| handle.stats().num_running > 0);
    drop(stream);
    wait_for_idle(&handle);
    assert_eq!((handle.stats().steps, handle.stats().aborted), (0, 1));

    // The other one still wants it.
    let (engine, _) = start_toy(Toy { layers: 40, ..toy() }, 200, config());
    let handle = engine.handle();
    let kept = handle.submit(greedy(&[1, 2, 3], 2)).unwrap();
    let dropped = handle.submit(greedy(&[2; 300], 20)).unwrap();
    wait_for(|| handle.stats().num_running >= 2);
    drop(dropped);
    assert_eq!(collect(kept).0, expected(&[1, 2, 3], 2));
}

#[test]
fn an_answer_that_its_client_ends_is_finished() {
    let toy = Toy { step_time: Duration::from_millis(2), ..Toy::default() };
    let (engine, _) = start_toy(toy, 200, config());
    let handle = engine.handle();
    let mut stream = handle.submit(greedy(&[4, 5], 900)).unwrap();
    assert!(matches!(stream.blocking_recv(), Some(Event::Token { .. })));
    stream.finish();
    wait_for_idle(&handle);
    let stats = handle.stats();
    assert_eq!((stats.finished, stats.aborted), (1, 0));
    assert!(stats.generation_tokens < 200, "{stats:?}");
}

#[test]
fn no_more_requests_wait_than_may() {
    let toy = Toy { step_time: Duration::from_millis(5), ..Toy::default() };
    let config = EngineConfig { max_num_seqs: 2, max_queued_requests: 3, ..config() };
    let (engine, _) = start_toy(toy, 200, config);
    let handle = engine.handle();
    let long = |at| greedy(&[at], 900);
    let short = handle.submit(greedy(&[0], 5)).unwrap();
    let mut streams: Vec<_> = (1..5).map(|at| handle.submit(long(at)).unwrap()).collect();
    let error = handle.submit(long(1)).err().unwrap();
    assert_eq!(error, RequestError::QueueFull { max_requests: 5 });
    // What is refused for itself is so whether or not there is room.
    assert_eq!(handle.submit(greedy(&[], 5)).err().unwrap(), RequestError::EmptyPrompt);
    // Of several, all are queued or none.
    drop(streams.pop());
    wait_for(|| handle.stats().aborted == 1);
    let error = handle.submit_all(vec![long(1), long(2)]).err().unwrap();
    assert_eq!(error, RequestError::QueueFull { max_requests: 5 });
    streams.extend(handle.submit_all(vec![long(4)]).unwrap());
    // A place is free once its request has ended, or its client has gone.
    assert_eq!(collect(short).0, expected(&[0], 5));
    streams.push(handle.submit(long(5)).unwrap());
    assert!(handle.submit(long(1)).is_err());
    drop(streams.remove(0));
    wait_for(|| handle.submit(long(6)).ok().map(|stream| streams.push(stream)).is_some());
    assert!(handle.submit(long(1)).is_err());
    drop(streams);
    wait_for_idle(&handle);
    assert_eq!((handle.stats().finished, handle.stats().aborted), (1, 7));
}

#[test]
fn many_clients_from_many_threads() {
    let engine = start(300);
    thread::scope(|scope| {
        for client in 0..8u32 {
            let handle = engine.handle();
            scope.spawn(move || {
                for at in 0..25 {
                    let prompt = [client, at];
                    assert_eq!(tokens_of(&handle, greedy(&prompt, 8)), expected(&prompt, 8));
                }
            });
        }
    });
    wait_for_idle(&engine.handle());
    assert_eq!(engine.handle().stats().finished, 200);
}

#[test]
fn requests_that_can_never_run_are_refused_at_once() {
    let engine = start(10);
    let refused = |request: Request| engine.handle().submit(request).err().unwrap();
    assert_eq!(refused(greedy(&[], 5)), RequestError::EmptyPrompt);
    assert_eq!(
        refused(greedy(&[1, 97], 5)).to_string(),
        "token 1 of the prompt is 97, must be below the vocabulary's 97"
    );
    assert_eq!(
        refused(greedy(&[1; 990], 11)).to_string(),
        "the maximum context length is 1000 tokens, but 990 tokens of prompt and 11 of output were asked \
         for; shorten the prompt or lower max_tokens"
    );
    assert!(matches!(refused(greedy(&[1; 1000], usize::MAX)), RequestError::ContextLength { .. }));
    assert_eq!(
        refused(greedy(&[1; 150], 12)).to_string(),
        "the KV cache holds 160 tokens, but 150 tokens of prompt and 12 of output were asked for; lower \
         max_tokens or give the cache more memory"
    );
    let mut request = greedy(&[1], 5);
    request.params.top_p = 0.0;
    assert_eq!(refused(request).to_string(), "top_p is 0, must be above 0 and at most 1");
    assert_eq!(tokens_of(&engine.handle(), greedy(&[1; 150], 11)).len(), 11);
}

#[test]
fn bad_logits_end_one_request_only() {
    let engine = start(100);
    let handle = engine.handle();
    let good = handle.submit(greedy(&[1], 30)).unwrap();
    let (tokens, last) = collect(handle.submit(greedy(&[NAN], 30)).unwrap());
    assert!(tokens.is_empty());
    let Event::Failed(error) = last else { panic!("{last:?}") };
    assert_eq!(
        error.to_string(),
        "the model's logit of token 5 is NaN; generation of this request cannot go on"
    );
    assert_eq!(collect(good).0, expected(&[1], 30));
    assert_eq!(handle.stats().failed, 1);
    wait_for_idle(&handle);
}

#[test]
fn an_error_in_a_step_ends_its_requests_and_the_engine_goes_on() {
    let engine = start(100);
    let handle = engine.handle();
    let (_, last) = collect(handle.submit(greedy(&[ERROR], 30)).unwrap());
    let message = "inconsistent step: an error on purpose".to_owned();
    assert_eq!(last, Event::Failed(GenerationError::Step(message)));
    assert_eq!(tokens_of(&handle, greedy(&[1], 30)), expected(&[1], 30));
    wait_for_idle(&handle);
}

#[test]
fn a_panic_is_told_to_every_client_and_to_later_ones() {
    let toy = Toy { step_time: Duration::from_millis(2), ..Toy::default() };
    let (engine, _) = start_toy(toy, 100, config());
    let handle = engine.handle();
    let other = handle.submit(greedy(&[1], 500)).unwrap();
    let (_, last) = collect(handle.submit(greedy(&[PANIC], 30)).unwrap());
    let reason = "a step panicked: a panic on purpose".to_owned();
    assert_eq!(last, Event::Failed(GenerationError::Stopped(reason.clone())));
    assert_eq!(collect(other).1, last);
    assert_eq!(handle.stats().stopped, Some(reason.clone()));
    // The thread may take a moment to hang up; a request that slips in hears of it, too.
    match handle.submit(greedy(&[1], 1)) {
        Err(error) => assert_eq!(error, RequestError::Stopped(reason)),
        Ok(stream) => assert_eq!(collect(stream).1, last),
    }
    engine.shutdown();
}

#[test]
fn shutdown_ends_running_requests() {
    let toy = Toy { step_time: Duration::from_millis(2), ..Toy::default() };
    let (engine, _) = start_toy(toy, 100, config());
    let handle = engine.handle();
    let stream = handle.submit(greedy(&[1], 900)).unwrap();
    engine.shutdown();
    assert!(matches!(collect(stream).1, Event::Failed(GenerationError::Stopped(_))));
    let error = handle.submit(greedy(&[1], 1)).err().unwrap();
    assert_eq!(error.to_string(), "the engine has stopped: it was shut down");
}

#[test]
fn limits_that_starve_prompts_are_refused() {
    let runner = Runner::new(Arc::new(Toy::default()), &plan(10)).unwrap();
    let error =
        Engine::start(runner, EngineConfig { max_num_batched_tokens: 100, ..config() }).err().unwrap();
    assert!(matches!(error, StartError::Limits(_)));
}
