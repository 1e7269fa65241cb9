//! Layers with pages, sequences and random numbers.

use turboquant::{
    attention::{AttentionParams, Cpu, DecodeRow, Pages, PagesMut, oracle::Dense},
    exec::{Executor, Serial},
    format::{CacheDtype, NativeDtype, RowFormat},
    page::PageCodec,
    rows::{Isa, RowCodec},
};

/// Runs the items of each call on `0` threads of their own, last item first.
pub(crate) struct Threads(pub(crate) usize);

impl Executor for Threads {
    fn for_each(&self, items: usize, work: &(dyn Fn(usize) + Sync)) {
        std::thread::scope(|scope| {
            for thread in (0..self.0).rev() {
                scope.spawn(move || (0..items).rev().filter(|i| i % self.0 == thread).for_each(work));
            }
        });
    }
    fn threads(&self) -> usize {
        self.0
    }
}

/// SplitMix64.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Random(seed)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    /// Close to N(0, 1): the sum of 12 uniform numbers.
    pub(crate) fn normal(&mut self) -> f32 {
        (0..3)
            .map(|_| self.bits())
            .map(|b| (0..4).map(|i| (b >> (16 * i) & 0xFFFF) as f32).sum::<f32>())
            .sum::<f32>()
            / 65535.0
            - 6.0
    }

    pub(crate) fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

/// Every row format: native dtypes, fp8, presets.
pub(crate) fn formats() -> Vec<(String, RowFormat)> {
    let natives = [NativeDtype::F32, NativeDtype::F16, NativeDtype::Bf16];
    let natives = natives.into_iter().map(|n| (format!("{n:?}"), CacheDtype::Auto.row_format(n)));
    let packed =
        CacheDtype::ALL.into_iter().skip(1).map(|d| (d.to_string(), d.row_format(NativeDtype::Bf16)));
    natives.chain(packed).collect()
}

/// A layer's shape.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Geometry {
    pub(crate) key_head_dim: usize,
    pub(crate) value_head_dim: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) gqa_group: usize,
    pub(crate) page_size: usize,
}

impl Geometry {
    pub(crate) const fn new(
        head_dim: usize,
        num_kv_heads: usize,
        gqa_group: usize,
        page_size: usize,
    ) -> Self {
        Geometry { key_head_dim: head_dim, value_head_dim: head_dim, num_kv_heads, gqa_group, page_size }
    }

    pub(crate) fn num_qo_heads(&self) -> usize {
        self.num_kv_heads * self.gqa_group
    }

    pub(crate) fn params(&self) -> AttentionParams<'static> {
        AttentionParams::new(self.num_qo_heads(), 1.0 / (self.key_head_dim as f32).sqrt())
    }
}

/// One layer and its slab. Bytes that no token was stored in are 0xFF: NaN in every fp16 field and
/// every native element.
pub(crate) struct Layer {
    pub(crate) geometry: Geometry,
    pub(crate) codec: PageCodec,
    pub(crate) slab: Vec<u8>,
    free: Vec<i32>,
    random: Random,
}

/// One sequence in a layer.
#[derive(Clone)]
pub(crate) struct Sequence {
    pub(crate) block_table: Vec<i32>,
    pub(crate) len: usize,
}

impl Sequence {
    pub(crate) fn row(&self) -> DecodeRow<'_> {
        DecodeRow { block_table: &self.block_table, seq_len: self.len }
    }
}

impl Layer {
    pub(crate) fn new(format: RowFormat, geometry: Geometry, num_pages: usize, seed: u64) -> Layer {
        let rows = RowCodec::new(format, geometry.key_head_dim, geometry.value_head_dim).unwrap();
        let codec = PageCodec::new(rows, geometry.num_kv_heads, geometry.page_size).unwrap();
        let slab = vec![0xFF; num_pages * codec.page_bytes()];
        let mut random = Random::new(seed);
        let mut free: Vec<i32> = (0..num_pages as i32).collect();
        for i in (1..free.len()).rev() {
            free.swap(i, (random.bits() % (i as u64 + 1)) as usize);
        }
        Layer { geometry, codec, slab, free, random }
    }

    pub(crate) fn pages(&self) -> Pages<'_> {
        Pages { codec: &self.codec, slab: &self.slab }
    }

    pub(crate) fn queries(&mut self, rows: usize) -> Vec<f32> {
        self.random.normals(rows * self.geometry.num_qo_heads() * self.geometry.key_head_dim)
    }

    /// Random keys (some dimensions larger than others) and values of `tokens` tokens.
    pub(crate) fn rows(&mut self, tokens: usize) -> (Vec<f32>, Vec<f32>) {
        let Geometry { num_kv_heads, key_head_dim, value_head_dim, .. } = self.geometry;
        let mut keys = self.random.normals(tokens * num_kv_heads * key_head_dim);
        for key in keys.chunks_exact_mut(key_head_dim) {
            key[3] *= 4.0;
            key[5] += 2.0;
        }
        (keys, self.random.normals(tokens * num_kv_heads * value_head_dim))
    }

    /// A sequence of `tokens` random tokens on pages of its own.
    pub(crate) fn sequence(&mut self, tokens: usize) -> Sequence {
        let (keys, values) = self.rows(tokens);
        let mut sequence = Sequence { block_table: Vec::new(), len: 0 };
        self.append(&mut sequence, &keys, &values);
        sequence
    }

    pub(crate) fn append(&mut self, sequence: &mut Sequence, keys: &[f32], values: &[f32]) {
        let Geometry { num_kv_heads, key_head_dim, page_size, .. } = self.geometry;
        let tokens = keys.len() / num_kv_heads / key_head_dim;
        let slots: Vec<i64> = (sequence.len..sequence.len + tokens)
            .map(|position| {
                if position / page_size == sequence.block_table.len() {
                    sequence.block_table.push(self.free.pop().expect("the fixture has too few pages"));
                }
                i64::from(sequence.block_table[position / page_size]) * page_size as i64
                    + (position % page_size) as i64
            })
            .collect();
        let pages = PagesMut { codec: &self.codec, slab: &mut self.slab };
        Cpu { exec: &Serial, isa: Isa::detect() }.store(pages, keys, values, &slots).unwrap();
        sequence.len += tokens;
    }

    pub(crate) fn dense(&self, sequence: &Sequence) -> Dense {
        Dense::from_pages(self.pages(), &sequence.block_table, sequence.len)
    }

    /// Outputs `[rows, num_qo_heads, value_head_dim]` and log sums `[rows, num_qo_heads]`.
    pub(crate) fn decode(
        &self,
        cpu: &Cpu<'_>,
        params: &AttentionParams<'_>,
        queries: &[f32],
        rows: &[DecodeRow<'_>],
    ) -> (Vec<f32>, Vec<f32>) {
        let heads = rows.len() * self.geometry.num_qo_heads();
        // What is not written must show.
        let (mut out, mut lse) =
            (vec![f32::NAN; heads * self.geometry.value_head_dim], vec![f32::NAN; heads]);
        cpu.decode(self.pages(), params, queries, rows, &mut out, Some(&mut lse)).unwrap();
        (out, lse)
    }
}

/// Serial, on every instruction set.
pub(crate) fn cpus() -> impl Iterator<Item = Cpu<'static>> {
    Isa::available().into_iter().map(|isa| Cpu { exec: &Serial, isa })
}
