//! Store, decode and prefill through the launch path on a real card: bytes against the scalar codec,
//! attention against f64 over the same rows. Prints one table; exits with 1 on a mismatch or without a GPU.
//!
//! `cargo run --release -p turboquant --features cuda --example gpu_smoke`

#![expect(clippy::print_stdout, reason = "its purpose")]
#![expect(unsafe_code, reason = "kernel launches take device addresses")]

use std::{error::Error, ops::Range, process::ExitCode, sync::Arc};

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use half::bf16;
use turboquant::{
    codebook::Codebook,
    cuda::{
        launch::{DecodeKernel, Gpu, PrefillKernel, StoreKernel},
        page::GpuPages,
        params::{DecodeParams, PrefillParams, StoreParams, codebook_words, midpoint_table, odd_centroids},
        variant::{IoDtype, PrefillShape},
    },
    format::{CacheDtype, NativeDtype, Preset},
    rows::{EncodeReport, Isa, RowCodec, unpack_codes},
};

const PAGE_SIZE: usize = 16;
const KV_HEADS: usize = 2;
const GROUP: usize = 4;
/// Tokens of each sequence; their pages interleave.
const LENS: [usize; 4] = [70, 1, 33, 300];
/// New tokens of each sequence, for prefill.
const NEW: [usize; 4] = [40, 17, 130, 1];
/// Relative L2 of an output row; bf16 alone rounds by up to 2^-9, and prefill's weights are bf16 too.
const ATTENTION_BOUND: f64 = 2.6e-3;
const PREFILL_BOUND: f64 = 6e-3;
const LSE_BOUND: f64 = 5e-3;

const CASES: [(CacheDtype, usize); 8] = [
    (CacheDtype::Auto, 128),
    (CacheDtype::Fp8, 128),
    (CacheDtype::TurboQuant(Preset::K8V4), 128),
    (CacheDtype::TurboQuant(Preset::FourBitNc), 128),
    (CacheDtype::TurboQuant(Preset::K3V4Nc), 128),
    (CacheDtype::TurboQuant(Preset::ThreeBitNc), 128),
    (CacheDtype::TurboQuant(Preset::FourBitNc), 80),
    (CacheDtype::TurboQuant(Preset::ThreeBitNc), 192),
];

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("gpu_smoke: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<bool, Box<dyn Error>> {
    let gpu = Gpu::open(0)?;
    println!("sm_{}; {} sequences of {LENS:?} tokens, {KV_HEADS} KV heads", gpu.target(), LENS.len());
    println!(
        "{:<20} {:>8} {:>12} {:>9} {:>9} {:>9} {:>9}",
        "KV cache", "head_dim", "wrong bytes", "decode", "lse", "prefill", "lse"
    );
    let mut all_right = true;
    for (dtype, head_dim) in CASES {
        let found = check(&gpu, dtype, head_dim)?;
        let right = found.wrong_bytes == 0
            && found.decode.attention <= ATTENTION_BOUND
            && found.prefill.attention <= PREFILL_BOUND
            && found.decode.lse.max(found.prefill.lse) <= LSE_BOUND;
        println!(
            "{:<20} {head_dim:>8} {:>12} {:>9.1e} {:>9.1e} {:>9.1e} {:>9.1e}  {}{}",
            dtype.name(),
            found.wrong_bytes,
            found.decode.attention,
            found.decode.lse,
            found.prefill.attention,
            found.prefill.lse,
            found.prefill_kernel,
            if right { "" } else { "  FAIL" }
        );
        all_right &= right;
    }
    println!("{}", if all_right { "all right" } else { "FAILED" });
    Ok(all_right)
}

struct Found {
    wrong_bytes: usize,
    decode: Errors,
    prefill: Errors,
    prefill_kernel: String,
}

#[derive(Default)]
struct Errors {
    /// Worst relative L2 of an output row.
    attention: f64,
    /// Worst difference of a log-sum.
    lse: f64,
}

impl Errors {
    fn add(&mut self, row: &[bf16], lse: f32, (want, want_lse): (Vec<f64>, f64)) {
        let (mut apart, mut size) = (0.0, 0.0);
        for (y, w) in row.iter().zip(&want) {
            apart += (f64::from(y.to_f32()) - w).powi(2);
            size += w * w;
        }
        // a NaN must not pass
        let worse = |known: f64, error: f64| if error <= known { known } else { error };
        self.attention = worse(self.attention, (apart / size).sqrt());
        self.lse = worse(self.lse, (f64::from(lse) - want_lse).abs());
    }
}

/// Raw rows and where they go: token `i` of sequence `s` in page `i / 16 * LENS.len() + s`.
struct Batch {
    keys: Vec<bf16>,        // [tokens, KV_HEADS, head_dim]
    values: Vec<bf16>,      // as keys
    queries: Vec<bf16>,     // [sequences, KV_HEADS * GROUP, head_dim]
    new_keys: Vec<bf16>,    // [new tokens, KV_HEADS, head_dim]
    new_values: Vec<bf16>,  // as new_keys
    new_queries: Vec<bf16>, // [new tokens, KV_HEADS * GROUP, head_dim]
    slots: Vec<i64>,        // [tokens]
    tables: Vec<i32>,       // [sequences, max_pages]
    max_pages: usize,
}

impl Batch {
    fn new(head_dim: usize) -> Batch {
        let mut random = Random(head_dim as u64);
        let tokens: usize = LENS.iter().sum();
        let mut row = |count: usize| (0..count * head_dim).map(|_| random.bell()).collect::<Vec<_>>();
        let (keys, values) = (row(tokens * KV_HEADS), row(tokens * KV_HEADS));
        let queries = row(LENS.len() * KV_HEADS * GROUP);
        let new: usize = NEW.iter().sum();
        let (new_keys, new_values) = (row(new * KV_HEADS), row(new * KV_HEADS));
        let new_queries = row(new * KV_HEADS * GROUP);
        let max_pages = LENS.iter().max().map_or(0, |len| len.div_ceil(PAGE_SIZE));
        let page = |seq: usize, i: usize| i * LENS.len() + seq;
        let slots = LENS.iter().enumerate().flat_map(|(seq, len)| {
            (0..*len).map(move |i| (page(seq, i / PAGE_SIZE) * PAGE_SIZE + i % PAGE_SIZE) as i64)
        });
        let tables = (0..LENS.len()).flat_map(|seq| (0..max_pages).map(move |i| page(seq, i) as i32));
        let (slots, tables) = (slots.collect(), tables.collect());
        Batch { keys, values, queries, new_keys, new_values, new_queries, slots, tables, max_pages }
    }

    fn num_pages(&self) -> usize {
        self.max_pages * LENS.len()
    }
}

fn check(gpu: &Gpu, dtype: CacheDtype, head_dim: usize) -> Result<Found, Box<dyn Error>> {
    let format = dtype.row_format(NativeDtype::Bf16);
    let codec = RowCodec::new(format, head_dim, head_dim)?;
    let pages = GpuPages::new(format, head_dim, IoDtype::Bf16, KV_HEADS, PAGE_SIZE)?;
    let batch = Batch::new(head_dim);
    let slots = encode(&codec, &batch);
    let empty = to_pages(&pages, &vec![0; slots.len()])?;
    let expected = to_pages(&pages, &slots)?;

    let stream = gpu.context().default_stream();
    let on_card = stream.clone_htod(&empty)?;
    store(gpu, &stream, &pages, &codec, &batch, &on_card)?;
    let stored = stream.clone_dtoh(&on_card)?;
    let wrong_bytes = stored.iter().zip(&expected).filter(|(a, b)| a != b).count();

    let mut found = Found {
        wrong_bytes,
        decode: Errors::default(),
        prefill: Errors::default(),
        prefill_kernel: String::new(),
    };
    let (out, lse) = decode(gpu, &stream, &pages, &codec, &batch, &on_card)?;
    let heads = KV_HEADS * GROUP;
    let mut queries = batch.queries.chunks_exact(head_dim);
    let mut rows = out.chunks_exact(head_dim).zip(&lse);
    for (seq, len) in LENS.iter().enumerate() {
        for q_head in 0..heads {
            let (Some(query), Some((row, lse))) = (queries.next(), rows.next()) else {
                return Err("too few outputs".into());
            };
            let seen = Seen { seq, packed: *len, raw: 0..0, kv_head: q_head / GROUP };
            found.decode.add(row, *lse, attend(&codec, &batch, &slots, query, seen));
        }
    }

    let kernel = PrefillKernel::load(
        gpu,
        &PrefillShape { format, head_dim, io: IoDtype::Bf16, alibi: false, softcap: false },
    )?;
    found.prefill_kernel = kernel.choice().to_string();
    let (out, lse) = prefill(&kernel, &stream, &pages, &codec, &batch, &on_card)?;
    let mut queries = batch.new_queries.chunks_exact(head_dim);
    let mut rows = out.chunks_exact(head_dim).zip(&lse);
    let mut first = 0;
    for (seq, new) in NEW.iter().enumerate() {
        for token in first..first + new {
            for q_head in 0..heads {
                let (Some(query), Some((row, lse))) = (queries.next(), rows.next()) else {
                    return Err("too few outputs".into());
                };
                let seen = Seen { seq, packed: LENS[seq], raw: first..token + 1, kv_head: q_head / GROUP };
                found.prefill.add(row, *lse, attend(&codec, &batch, &slots, query, seen));
            }
        }
        first += new;
    }
    Ok(found)
}

/// vLLM's slots of all pages, by the scalar codec; zeros where no token is.
fn encode(codec: &RowCodec, batch: &Batch) -> Vec<u8> {
    let (head_dim, slot_bytes) = (codec.key_head_dim(), codec.layout().slot_bytes);
    let mut slots = vec![0; batch.num_pages() * PAGE_SIZE * KV_HEADS * slot_bytes];
    let mut report = EncodeReport::default();
    let rows = batch.keys.chunks_exact(head_dim).zip(batch.values.chunks_exact(head_dim));
    for (i, (key, value)) in rows.enumerate() {
        let at = (batch.slots[i / KV_HEADS] as usize * KV_HEADS + i % KV_HEADS) * slot_bytes;
        codec.encode_slot(Isa::Scalar, key, value, &mut slots[at..at + slot_bytes], &mut report);
    }
    slots
}

fn to_pages(pages: &GpuPages, slots: &[u8]) -> Result<Vec<u8>, Box<dyn Error>> {
    let mut all = vec![0; slots.len()];
    let bytes = pages.page_bytes();
    for (slots, page) in slots.chunks_exact(bytes).zip(all.chunks_exact_mut(bytes)) {
        pages.slots_to_page(slots, page)?;
    }
    Ok(all)
}

fn store(
    gpu: &Gpu,
    stream: &Arc<CudaStream>,
    pages: &GpuPages,
    codec: &RowCodec,
    batch: &Batch,
    on_card: &CudaSlice<u8>,
) -> Result<(), Box<dyn Error>> {
    let kernel = StoreKernel::load(gpu, pages.rows())?;
    let keys = stream.clone_htod(&bits(&batch.keys))?;
    let values = stream.clone_htod(&bits(&batch.values))?;
    let slots = stream.clone_htod(&batch.slots)?;
    let stride = (KV_HEADS * codec.key_head_dim()) as i64;
    let params = StoreParams {
        key: address(&keys, stream),
        value: address(&values, stream),
        slot_mapping: address(&slots, stream),
        pages: address(on_card, stream),
        page_bytes: pages.page_bytes() as i64,
        key_stride: stride,
        value_stride: stride,
        codebook: codec.codebook().map_or([0; 2], codebook_words),
        num_tokens: batch.slots.len() as i32,
        num_kv_heads: KV_HEADS as i32,
        page_size: PAGE_SIZE as i32,
        midpoints: codec.codebook().map_or([0.0; 15], midpoint_table),
    };
    // SAFETY: the addresses are those of the slices above, which outlive the launch.
    unsafe { kernel.launch(stream, &params) }?;
    stream.synchronize()?;
    Ok(())
}

fn decode(
    gpu: &Gpu,
    stream: &Arc<CudaStream>,
    pages: &GpuPages,
    codec: &RowCodec,
    batch: &Batch,
    on_card: &CudaSlice<u8>,
) -> Result<(Vec<bf16>, Vec<f32>), Box<dyn Error>> {
    let kernel = DecodeKernel::load(gpu, pages.rows(), GROUP, false)?.overlapping();
    let queries = stream.clone_htod(&bits(&batch.queries))?;
    let tables = stream.clone_htod(&batch.tables)?;
    let lens = stream.clone_htod(&LENS.map(|len| len as i32))?;
    let out = stream.clone_htod(&vec![bf16::NAN.to_bits(); batch.queries.len()])?;
    let lse = stream.clone_htod(&vec![f32::NAN; LENS.len() * KV_HEADS * GROUP])?;
    let partials = kernel.partials(stream)?;
    let params = DecodeParams {
        out: address(&out, stream),
        lse: address(&lse, stream),
        q: address(&queries, stream),
        pages: address(on_card, stream),
        block_tables: address(&tables, stream),
        seq_lens: address(&lens, stream),
        sinks: 0,
        partials: address(&partials, stream),
        page_bytes: pages.page_bytes() as i64,
        codebook: codec.codebook().map_or([0; 2], codebook_words),
        num_seqs: LENS.len() as i32,
        num_kv_heads: KV_HEADS as i32,
        gqa_group: GROUP as i32,
        q_len: 1,
        page_size: PAGE_SIZE as i32,
        max_pages: batch.max_pages as i32,
        window: 0,
        sm_scale: sm_scale(codec),
        softcap: 0.0,
    };
    // SAFETY: the addresses are those of the slices above, which outlive the launch.
    unsafe { kernel.launch(stream, &params) }?;
    stream.synchronize()?;
    if stream.clone_dtoh(&partials)?.iter().any(|word| *word != u32::MAX) {
        return Err("a part was left behind".into());
    }
    let out = stream.clone_dtoh(&out)?.into_iter().map(bf16::from_bits).collect();
    Ok((out, stream.clone_dtoh(&lse)?))
}

/// The new tokens of all sequences over what is stored.
fn prefill(
    kernel: &PrefillKernel,
    stream: &Arc<CudaStream>,
    pages: &GpuPages,
    codec: &RowCodec,
    batch: &Batch,
    on_card: &CudaSlice<u8>,
) -> Result<(Vec<bf16>, Vec<f32>), Box<dyn Error>> {
    let new: usize = NEW.iter().sum();
    let mut starts = vec![0];
    for tokens in NEW {
        starts.push(starts[starts.len() - 1] + tokens as i32);
    }
    let queries = stream.clone_htod(&bits(&batch.new_queries))?;
    let keys = stream.clone_htod(&bits(&batch.new_keys))?;
    let values = stream.clone_htod(&bits(&batch.new_values))?;
    let tables = stream.clone_htod(&batch.tables)?;
    let starts = stream.clone_htod(&starts)?;
    let prefixes = stream.clone_htod(&LENS.map(|len| len as i32))?;
    let out = stream.clone_htod(&vec![bf16::NAN.to_bits(); batch.new_queries.len()])?;
    let lse = stream.clone_htod(&vec![f32::NAN; new * KV_HEADS * GROUP])?;
    let stride = (KV_HEADS * codec.key_head_dim()) as i64;
    let params = PrefillParams {
        out: address(&out, stream),
        lse: address(&lse, stream),
        q: address(&queries, stream),
        key: address(&keys, stream),
        value: address(&values, stream),
        pages: address(on_card, stream),
        block_tables: address(&tables, stream),
        query_starts: address(&starts, stream),
        prefix_lens: address(&prefixes, stream),
        sinks: 0,
        page_bytes: pages.page_bytes() as i64,
        key_stride: stride,
        value_stride: stride,
        codebook: codec.codebook().map_or([0; 2], codebook_words),
        num_seqs: NEW.len() as i32,
        num_kv_heads: KV_HEADS as i32,
        gqa_group: GROUP as i32,
        page_size: PAGE_SIZE as i32,
        max_pages: batch.max_pages as i32,
        window: 0,
        sm_scale: sm_scale(codec),
        softcap: 0.0,
    };
    // SAFETY: the addresses are those of the slices above, which outlive the launch.
    unsafe { kernel.launch(stream, &params, new) }?;
    stream.synchronize()?;
    let out = stream.clone_dtoh(&out)?.into_iter().map(bf16::from_bits).collect();
    Ok((out, stream.clone_dtoh(&lse)?))
}

fn bits(numbers: &[bf16]) -> Vec<u16> {
    numbers.iter().map(|x| x.to_bits()).collect()
}

fn address<T>(slice: &CudaSlice<T>, stream: &Arc<CudaStream>) -> u64 {
    slice.device_ptr(stream).0
}

fn sm_scale(codec: &RowCodec) -> f32 {
    1.0 / (codec.key_head_dim() as f32).sqrt()
}

/// What a query row sees: packed tokens of a sequence, then raw ones.
struct Seen {
    seq: usize,
    packed: usize,
    raw: Range<usize>, // of all new tokens
    kv_head: usize,
}

/// Output and natural-log sum of one query row in f64, over rows decoded with the codebook that the
/// kernels multiply with.
fn attend(codec: &RowCodec, batch: &Batch, slots: &[u8], query: &[bf16], seen: Seen) -> (Vec<f64>, f64) {
    let (head_dim, slot_bytes) = (codec.key_head_dim(), codec.layout().slot_bytes);
    let query: Vec<f32> = query.iter().map(|x| x.to_f32()).collect();
    let mut rotated = query.clone();
    codec.rotate_query(Isa::Scalar, &mut rotated);
    let odd = codec.codebook().map(odd_of);
    let mut value = vec![0.0; head_dim];
    let (mut scores, mut values) = (Vec::new(), Vec::new());
    for token in 0..seen.packed {
        let page = batch.tables[seen.seq * batch.max_pages + token / PAGE_SIZE] as usize;
        let row = (page * PAGE_SIZE + token % PAGE_SIZE) * KV_HEADS + seen.kv_head;
        let slot = &slots[row * slot_bytes..(row + 1) * slot_bytes];
        let key = decode_key(codec, odd.as_deref(), slot);
        let dot: f64 = rotated.iter().zip(&key).map(|(q, k)| f64::from(*q) * k).sum();
        scores.push(dot * f64::from(sm_scale(codec)));
        codec.decode_value(Isa::Scalar, slot, &mut value);
        values.push(value.clone());
    }
    for token in seen.raw {
        let at = (token * KV_HEADS + seen.kv_head) * head_dim;
        let key = &batch.new_keys[at..at + head_dim];
        let dot: f64 = query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(k.to_f32())).sum();
        scores.push(dot * f64::from(sm_scale(codec)));
        values.push(batch.new_values[at..at + head_dim].iter().map(|x| x.to_f32()).collect());
    }
    let top = scores.iter().fold(f64::NEG_INFINITY, |top, score| top.max(*score));
    let lse = top + scores.iter().map(|score| (score - top).exp()).sum::<f64>().ln();
    let mut out = vec![0.0; head_dim];
    for (score, value) in scores.iter().zip(&values) {
        for (y, v) in out.iter_mut().zip(value) {
            *y += (score - lse).exp() * f64::from(*v);
        }
    }
    (out, lse)
}

fn odd_of(codebook: &Codebook) -> Vec<f64> {
    odd_centroids(codebook).into_iter().map(f64::from).collect()
}

/// A key in the stored basis.
fn decode_key(codec: &RowCodec, odd: Option<&[f64]>, slot: &[u8]) -> Vec<f64> {
    let (layout, head_dim) = (codec.layout(), codec.key_head_dim());
    let (Some(odd), Some(norm)) = (odd, layout.norm) else {
        let mut key = vec![0.0; head_dim];
        codec.decode_key(Isa::Scalar, slot, &mut key);
        return key.into_iter().map(f64::from).collect();
    };
    let norm = half::f16::from_le_bytes([slot[norm], slot[norm + 1]]).to_f64();
    let packed = &slot[layout.key_codes.clone()];
    let mut codes = vec![0; head_dim];
    unpack_codes(Isa::Scalar, (packed.len() * 8 / head_dim) as u8, packed, &mut codes);
    let key: Vec<f64> = codes.iter().map(|code| odd[usize::from(*code)]).collect();
    let length = key.iter().map(|x| x * x).sum::<f64>().sqrt();
    key.into_iter().map(|x| x * norm / length).collect()
}

struct Random(u64);

impl Random {
    fn uniform(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1u64 << 24) as f32
    }
    /// Close to a standard normal number.
    fn bell(&mut self) -> bf16 {
        bf16::from_f32((0..12).map(|_| self.uniform()).sum::<f32>() - 6.0)
    }
}
