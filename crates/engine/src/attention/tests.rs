//! Steps over a real cache, against f64 attention over what the cache holds and against other cuts
//! of the same work.

use candle_core::{Device, Tensor};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use turboquant::{attention::oracle::Dense, exec::Serial, format::CacheDtype};

use super::*;
use crate::{
    batch::LogitsOf,
    cache::pages::SequencePages,
    config::{AttentionSpec, CacheSpec, ModelConfig},
    executor::ModelPool,
    plan::{Budget, Plan, PlanOptions},
};

const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const WINDOW: usize = 300;
/// Full attention, a window, and a layer that reads the pages of the first one.
const LAYERS: usize = 3;

fn plan(dtype: CacheDtype, head_dim: usize) -> Plan {
    let attention = |window| {
        CacheSpec::Attention(AttentionSpec {
            num_qo_heads: HEADS,
            num_kv_heads: KV_HEADS,
            key_head_dim: head_dim,
            value_head_dim: head_dim,
            window,
        })
    };
    let layers = vec![attention(None), attention(Some(WINDOW)), CacheSpec::Shared { owner: 0 }];
    let config = ModelConfig::new("test", turboquant::format::NativeDtype::F32, 4096, layers);
    let options = PlanOptions {
        dtype,
        boundary_layers: Some(0),
        budget: Budget::Tokens(8192),
        max_num_seqs: 5,
        max_num_batched_tokens: 2048,
        ..PlanOptions::default()
    };
    Plan::build(&config, &options).unwrap()
}

fn params(layer: usize, head_dim: usize) -> LayerAttention {
    LayerAttention {
        num_qo_heads: HEADS,
        num_kv_heads: KV_HEADS,
        key_head_dim: head_dim,
        value_head_dim: head_dim,
        sm_scale: (head_dim as f32).sqrt().recip(),
        window: (layer == 1).then_some(WINDOW),
        soft_cap: (layer == 1).then_some(30.0),
        sinks: (layer == 2).then(|| (0..HEADS).map(|head| head as f32 / 4.0).collect()),
    }
}

/// What the model would compute for one token: the same however the work is cut.
fn rows(head_dim: usize, sequence: usize, position: usize, layer: usize, what: usize) -> Vec<f32> {
    // A shared layer has the keys and values of its owner.
    let layer = if what > 0 { layer % 2 } else { layer };
    let seed = ((sequence * 10_000 + position) * LAYERS + layer) * 3 + what;
    let mut rng = StdRng::seed_from_u64(seed as u64);
    let heads = if what == 0 { HEADS } else { KV_HEADS };
    (0..heads * head_dim).map(|_| rng.random_range(-2.0f32..2.0)).collect()
}

/// Tokens of one sequence in one step.
#[derive(Clone, Copy)]
struct Part {
    sequence: usize,
    start: usize,
    end: usize,
    phase: Phase,
}

struct Bench {
    head_dim: usize,
    cache: KvCache,
    pages: Vec<SequencePages>,
    release: bool,
}

impl Bench {
    fn new(dtype: CacheDtype, head_dim: usize, num_seqs: usize) -> Self {
        let cache = KvCache::new(&plan(dtype, head_dim)).unwrap();
        let pages = (0..num_seqs).map(|_| cache.pools().sequence()).collect();
        Self { head_dim, cache, pages, release: true }
    }

    /// `[layer][row]` of each part, in the order given.
    fn step(&mut self, parts: &[Part], exec: &dyn Executor) -> Vec<Vec<Vec<Vec<f32>>>> {
        let head_dim = self.head_dim;
        let mut batch = StepBatch::default();
        for part in parts {
            let pages = &mut self.pages[part.sequence];
            pages.reserve(part.end).unwrap();
            let tokens = vec![0; part.end - part.start];
            batch.push(&tokens, part.start, part.phase, pages, LogitsOf::Nothing);
        }
        let places: Vec<(usize, usize)> =
            parts.iter().flat_map(|part| (part.start..part.end).map(|at| (part.sequence, at))).collect();
        let mut attention = PagedAttention::new(&mut self.cache, &batch, exec);
        let mut out = vec![Vec::new(); parts.len()];
        for layer in 0..LAYERS {
            let tensor = |what, heads: usize| {
                let places = places.iter();
                let values: Vec<f32> =
                    places.flat_map(|&(sequence, at)| rows(head_dim, sequence, at, layer, what)).collect();
                Tensor::from_vec(values, (batch.num_rows(), heads, head_dim), &Device::Cpu).unwrap()
            };
            let (q, k, v) = (tensor(0, HEADS), tensor(1, KV_HEADS), tensor(2, KV_HEADS));
            let attended = attention.attend(layer, &q, &k, &v, &params(layer, head_dim)).unwrap();
            let mut attended = attended.flatten_from(1).unwrap().to_vec2::<f32>().unwrap().into_iter();
            for (part, out) in parts.iter().zip(&mut out) {
                out.push(attended.by_ref().take(part.end - part.start).collect());
            }
        }
        for part in parts.iter().filter(|_| self.release) {
            self.pages[part.sequence].release_outside_window(part.end);
        }
        out
    }

    /// What a row must see: packed rows, and raw ones inside its own prefill block.
    fn expected(&self, part: &Part, position: usize, layer: usize) -> Vec<f64> {
        let (owner, paged) = self.cache.owner(layer).unwrap();
        assert_eq!(owner, layer % 2);
        let table = &self.pages[part.sequence].block_tables()[paged.group];
        let packed = match part.phase {
            Phase::Prefill => position / PREFILL_BLOCK * PREFILL_BLOCK,
            Phase::Decode => position + 1,
        };
        let pages = Pages { codec: &paged.codec, slab: paged.slab() };
        let mut dense = Dense::from_pages(pages, table, packed);
        let rows = |position, what| rows(self.head_dim, part.sequence, position, layer, what);
        for raw in packed..=position {
            dense.push(&rows(raw, 1), &rows(raw, 2));
        }
        let params = params(layer, self.head_dim);
        let params = AttentionParams {
            num_qo_heads: HEADS,
            sm_scale: params.sm_scale,
            window: params.window,
            soft_cap: params.soft_cap,
            sinks: params.sinks.as_deref(),
        };
        let first = params.window.map_or(0, |window| (position + 1).saturating_sub(window));
        dense.attend(&params, &rows(position, 0), first..position + 1, self.head_dim).0
    }
}

const PREFILL: Phase = Phase::Prefill;
const DECODE: Phase = Phase::Decode;

/// A fresh prompt as long as the longest sequence, beside four that continue a prefix: as decode
/// rows, one and several, and as prefill chunks.
const MIXED: [Part; 5] = [
    Part { sequence: 0, start: 0, end: 1000, phase: PREFILL },
    Part { sequence: 1, start: 400, end: 500, phase: DECODE },
    Part { sequence: 2, start: 800, end: 801, phase: DECODE },
    Part { sequence: 3, start: 512, end: 640, phase: PREFILL },
    Part { sequence: 4, start: 512, end: 641, phase: PREFILL },
];

fn prefix(part: &Part) -> Part {
    Part { start: 0, end: part.start, phase: PREFILL, ..*part }
}

fn alone(dtype: CacheDtype, head_dim: usize, part: &Part) -> (Bench, Vec<Vec<Vec<f32>>>) {
    let mut bench = Bench::new(dtype, head_dim, 5);
    bench.release = false;
    if part.start > 0 {
        bench.step(&[prefix(part)], &ModelPool);
    }
    let out = bench.step(&[*part], &ModelPool).remove(0);
    (bench, out)
}

#[test]
fn a_mixed_batch_is_what_each_request_is_alone_and_what_the_oracle_says() {
    let four_bit = CacheDtype::TurboQuant(turboquant::format::Preset::FourBitNc);
    // The kernels take queries of packed codes in two 8-bit terms.
    for (dtype, head_dim, tolerance) in [(four_bit, 128, 1e-3), (CacheDtype::Auto, 16, 1e-5)] {
        let mut mixed = Bench::new(dtype, head_dim, 5);
        mixed.step(&MIXED[1..].iter().map(prefix).collect::<Vec<_>>(), &ModelPool);
        let together = mixed.step(&MIXED, &ModelPool);
        let mut reversed = Bench::new(dtype, head_dim, 5);
        reversed.step(&MIXED[1..].iter().rev().map(prefix).collect::<Vec<_>>(), &Serial);
        let parts: Vec<Part> = MIXED.into_iter().rev().collect();
        let mut backwards = reversed.step(&parts, &Serial);
        backwards.reverse();
        assert_eq!(together, backwards, "{dtype}: the order of the batch matters");
        for (part, together) in MIXED.iter().zip(&together) {
            let (bench, alone) = alone(dtype, head_dim, part);
            assert_eq!(*together, alone, "{dtype}: the rest of the batch matters");
            let last = part.end - 1;
            let sampled = (part.start..part.end).step_by(211).chain([last]);
            for (layer, position) in sampled.flat_map(|at| (0..LAYERS).map(move |layer| (layer, at))) {
                let got = &together[layer][position - part.start];
                let expected = bench.expected(part, position, layer);
                let scale = expected.iter().fold(0.0f64, |max, x| max.max(x.abs()));
                for (got, expected) in got.iter().zip(&expected) {
                    let difference = (f64::from(*got) - expected).abs();
                    assert!(
                        difference < tolerance * scale,
                        "{dtype}, layer {layer}, row {position}: {difference}"
                    );
                }
            }
        }
        assert!(mixed.cache.health().total().is_clean());
    }
}

#[test]
fn chunks_and_decode_rows_can_be_cut_anywhere_they_may() {
    for dtype in CacheDtype::ALL {
        let mut whole = Bench::new(dtype, 32, 1);
        let part = |start, end, phase| Part { sequence: 0, start, end, phase };
        let mut prefilled = whole.step(&[part(0, 700, PREFILL)], &ModelPool).remove(0);
        let decoded = whole.step(&[part(700, 740, DECODE)], &ModelPool).remove(0);
        let mut cut = Bench::new(dtype, 32, 1);
        for (start, end) in [(0, 256), (256, 512), (512, 700)] {
            let chunk = cut.step(&[part(start, end, PREFILL)], &ModelPool).remove(0);
            for (layer, chunk) in chunk.into_iter().enumerate() {
                assert_eq!(prefilled[layer].drain(..end - start).collect::<Vec<_>>(), chunk, "{dtype}");
            }
        }
        for (row, position) in (700..740).enumerate() {
            let one = cut.step(&[part(position, position + 1, DECODE)], &Serial).remove(0);
            for (layer, one) in one.into_iter().enumerate() {
                assert_eq!(one[0], decoded[layer][row], "{dtype}, position {position}");
            }
        }
    }
}

#[test]
fn what_the_encoder_gives_up_is_counted_by_layer() {
    let mut bench = Bench::new(CacheDtype::Fp8, 32, 1);
    bench.pages[0].reserve(1).unwrap();
    let mut batch = StepBatch::default();
    batch.push(&[0], 0, DECODE, &bench.pages[0], LogitsOf::Nothing);
    let q = Tensor::zeros((1, HEADS, 32), candle_core::DType::F32, &Device::Cpu).unwrap();
    let k = Tensor::full(500f32, (1, KV_HEADS, 32), &Device::Cpu).unwrap();
    let v = k.zeros_like().unwrap();
    PagedAttention::new(&mut bench.cache, &batch, &Serial).attend(1, &q, &k, &v, &params(1, 32)).unwrap();
    let health = bench.cache.health();
    assert_eq!(health.total().fp8_clipped, (KV_HEADS * 32) as u64);
    assert!(health.layers[0].is_clean() && !health.layers[1].is_clean());
}

#[test]
fn a_model_that_does_not_fit_the_cache_is_refused() {
    let mut bench = Bench::new(CacheDtype::Auto, 32, 1);
    let batch = StepBatch::default();
    let empty = |heads| Tensor::zeros((0, heads, 32), candle_core::DType::F32, &Device::Cpu).unwrap();
    let (q, k) = (empty(HEADS), empty(KV_HEADS));
    let mut attend = |layer, params| {
        let mut attention = PagedAttention::new(&mut bench.cache, &batch, &Serial);
        attention.attend(layer, &q, &k, &k, &params).unwrap_err().to_string()
    };
    assert_eq!(attend(3, params(0, 32)), "inconsistent step: layer 3 has no pages in the cache");
    assert_eq!(
        attend(0, LayerAttention { num_kv_heads: 4, ..params(0, 32) }),
        "inconsistent step: layer 0: the cache stores (KV heads, key width, value width) (2, 32, 32), \
         the model has (4, 32, 32)"
    );
}
