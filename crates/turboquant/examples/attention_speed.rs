//! Times decode, prefill and store on packed pages.
//!
//! `cargo run --release -p turboquant --example attention_speed [-- [threads=N] [only=decode|prefill|store]
//! [FILTER]...]`: rows of the table whose text contains every FILTER; N threads, by default all.

#![expect(clippy::print_stdout, reason = "prints a table")]

use std::time::{Duration, Instant};

use half::bf16;
use turboquant::{
    attention::{AttentionParams, Cpu, DecodeRow, Pages, PagesMut, PrefillChunk},
    exec::Rayon,
    format::{CacheDtype, NativeDtype},
    page::PageCodec,
    rows::RowCodec,
};

const PAGE_SIZE: usize = 16;
const CONTEXTS: [usize; 4] = [512, 2048, 7400, 32768];
/// Query heads, KV heads, head_dim.
const SHAPES: [(usize, usize, usize); 3] = [(9, 3, 64), (32, 8, 128), (4, 1, 256)];
const PREFILL_TOKENS: usize = 256;
/// Layers that calls go through in turn, so that a call finds its pages no nearer than a model does.
const MAX_LAYERS: usize = 30;
const ENOUGH_BYTES: usize = 96 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut filters: Vec<String> = std::env::args().skip(1).collect();
    if let Some(i) = filters.iter().position(|arg| arg.starts_with("threads=")) {
        let threads = filters.remove(i)["threads=".len()..].parse()?;
        rayon::ThreadPoolBuilder::new().num_threads(threads).build_global()?;
    }
    let mut calls = [true; 3];
    if let Some(i) = filters.iter().position(|arg| arg.starts_with("only=")) {
        calls = ["decode", "prefill", "store"].map(|call| filters[i]["only=".len()..] == *call);
        filters.remove(i);
    }
    println!(
        "{} thread(s), {}, pages of {PAGE_SIZE}; decode: one row of one layer, us and GB/s of packed bytes;\n\
         prefill: {PREFILL_TOKENS} tokens after the context, ms and GFLOP/s (2 per multiply-add);\n\
         store: {PREFILL_TOKENS} tokens of bf16, GB/s of input\n",
        rayon::current_num_threads(),
        turboquant::rows::Isa::detect().name()
    );
    println!(
        "| heads/KV/dim | context | format | decode us | GB/s | prefill ms | GFLOP/s | store GB/s |\n\
         |--|--|--|--|--|--|--|--|"
    );
    for shape in SHAPES {
        for context in CONTEXTS {
            for dtype in CacheDtype::ALL {
                let name = format!("| {}/{}/{} | {context} | {dtype} |", shape.0, shape.1, shape.2);
                if filters.iter().all(|filter| name.contains(filter.as_str())) {
                    println!("{name} {}", measure(dtype, shape, context, calls)?);
                }
            }
        }
    }
    Ok(())
}

fn measure(
    dtype: CacheDtype,
    (num_qo_heads, num_kv_heads, head_dim): (usize, usize, usize),
    context: usize,
    [decodes, prefills, stores]: [bool; 3],
) -> Result<String, Box<dyn std::error::Error>> {
    let rows = RowCodec::new(dtype.row_format(NativeDtype::F16), head_dim, head_dim)?;
    let codec = PageCodec::new(rows, num_kv_heads, PAGE_SIZE)?;
    let num_pages = context.div_ceil(PAGE_SIZE);
    // Pages in no order, as a pool hands them out after a while.
    let step = (num_pages * 5 / 8) | 1;
    let step = (step..).step_by(2).find(|step| gcd(*step, num_pages) == 1).unwrap_or(1);
    let block_table: Vec<i32> = (0..num_pages).map(|i| (i * step % num_pages) as i32).collect();
    let mut slab = vec![0; num_pages * codec.page_bytes()];
    let mut seed = 1u32;
    let mut random = |n: usize| -> Vec<f32> {
        let mut uniform = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..n).map(|_| uniform() + uniform() + uniform()).collect()
    };
    let cpu = Cpu::new(&Rayon);
    let width = num_kv_heads * head_dim;
    for first in (0..context).step_by(PAGE_SIZE) {
        let tokens = PAGE_SIZE.min(context - first);
        let slots: Vec<i64> = (0..tokens)
            .map(|i| i64::from(block_table[first / PAGE_SIZE]) * PAGE_SIZE as i64 + i as i64)
            .collect();
        let pages = PagesMut { codec: &codec, slab: &mut slab };
        cpu.store(pages, &random(tokens * width), &random(tokens * width), &slots)?;
    }
    let mut spare = slab.clone();
    let layers = vec![slab.clone(); (ENOUGH_BYTES / slab.len()).clamp(1, MAX_LAYERS)];
    let mut layers = layers.iter().map(|slab| Pages { codec: &codec, slab }).cycle();
    let mut next_layer = || layers.next().ok_or("no layers");
    let params = AttentionParams::new(num_qo_heads, 1.0 / (head_dim as f32).sqrt());
    let queries = random(PREFILL_TOKENS * num_qo_heads * head_dim);
    let (keys, values) = (random(PREFILL_TOKENS * width), random(PREFILL_TOKENS * width));
    let mut out = vec![0.0; queries.len()];

    let one = num_qo_heads * head_dim;
    let row = [DecodeRow { block_table: &block_table, seq_len: context }];
    let decode = time(decodes, || {
        cpu.decode(next_layer()?, &params, &queries[..one], &row, &mut out[..one], None)?;
        Ok(())
    })?;
    let chunk = PrefillChunk {
        queries: &queries,
        keys: &keys,
        values: &values,
        block_table: &block_table,
        context_len: context,
    };
    let prefill = time(prefills, || Ok(cpu.prefill(next_layer()?, &params, &chunk, &mut out)?))?;

    let (keys, values): (Vec<bf16>, Vec<bf16>) =
        keys.iter().zip(&values).map(|(k, v)| (bf16::from_f32(*k), bf16::from_f32(*v))).unzip();
    let slots: Vec<i64> = (0..PREFILL_TOKENS as i64).collect();
    let store = time(stores, || {
        cpu.store(PagesMut { codec: &codec, slab: &mut spare }, &keys, &values, &slots)?;
        Ok(())
    })?;

    let bytes = (context * num_kv_heads * codec.rows().layout().slot_bytes) as f64;
    let seen = PREFILL_TOKENS * context + PREFILL_TOKENS * (PREFILL_TOKENS + 1) / 2;
    let flops = (4 * seen * num_qo_heads * head_dim) as f64;
    let columns = [
        (decode * 1e6, 0),
        (bytes / decode / 1e9, 2),
        (prefill * 1e3, 2),
        (flops / prefill / 1e9, 0),
        ((4 * keys.len()) as f64 / store / 1e9, 2),
    ];
    let print = |(x, digits): (f64, usize)| if x.is_nan() { "-".into() } else { format!("{x:.digits$}") };
    Ok(columns.map(print).join(" | ") + " |")
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Time that this thread has run so far, where the system tells: with one thread it leaves out what
/// other programs took.
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(stat.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0))
}

/// Seconds of a call, over at least 5 calls and 0.4 s: the median; with one thread the mean of its own
/// time. NaN if it is not wanted.
fn time(
    wanted: bool,
    mut call: impl FnMut() -> Result<(), Box<dyn std::error::Error>>,
) -> Result<f64, Box<dyn std::error::Error>> {
    if !wanted {
        return Ok(f64::NAN);
    }
    call()?;
    let (begin, cpu_begin, mut times) = (Instant::now(), cpu_time(), Vec::new());
    while times.len() < 5 || begin.elapsed() < Duration::from_millis(400) {
        let start = Instant::now();
        call()?;
        times.push(start.elapsed().as_secs_f64());
    }
    let cpu_time = cpu_time() - cpu_begin;
    if rayon::current_num_threads() == 1 && !cpu_time.is_zero() {
        return Ok(cpu_time.as_secs_f64() / times.len() as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
