//! The row kernels on AVX2: the arithmetic of [`scalar`] in the same order, eight elements at a time.

#![expect(unsafe_code, reason = "vector loads and stores take raw pointers")]

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::scalar;
use crate::{codebook::Codebook, hadamard::Rotation, layout::MAX_HEAD_DIM};

const LANES: usize = 8;
const SIGN: u32 = 1 << 31;
const INFINITY_BITS: i32 = 0x7F80_0000;

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load(x: &[f32; LANES]) -> __m256 {
    // SAFETY: eight f32 behind the reference; the load needs no alignment.
    unsafe { _mm256_loadu_ps(x.as_ptr()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn store(x: &mut [f32; LANES], v: __m256) {
    // SAFETY: as load.
    unsafe { _mm256_storeu_ps(x.as_mut_ptr(), v) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load_u32(x: &[u32; LANES]) -> __m256i {
    // SAFETY: eight u32 behind the reference; the load needs no alignment.
    unsafe { _mm256_loadu_si256(x.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load_u16(x: &[u16; LANES]) -> __m128i {
    // SAFETY: eight u16 behind the reference; the load needs no alignment.
    unsafe { _mm_loadu_si128(x.as_ptr().cast()) }
}

/// Lane `i` of the result: byte `i`, widened.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load_bytes(x: [u8; LANES]) -> __m256i {
    _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(i64::from_le_bytes(x)))
}

/// Byte `i` of the result: the low byte of lane `i`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn low_bytes(v: __m256i) -> [u8; LANES] {
    let to_front = _mm256_setr_epi8(
        0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1, -1, -1,
        -1, -1, -1, -1, -1,
    );
    let v = _mm256_shuffle_epi8(v, to_front);
    let both = _mm_or_si128(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    _mm_cvtsi128_si64(both).to_le_bytes()
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn lanes(v: __m256) -> [f32; LANES] {
    let mut lanes = [0.0; LANES];
    store(&mut lanes, v);
    lanes
}

/// Number of lanes counted by masks that were subtracted from zero.
#[target_feature(enable = "avx2,fma,f16c")]
fn total(counts: __m256i) -> u64 {
    let mut lanes = [0u32; LANES];
    // SAFETY: eight u32 behind the pointer; the store needs no alignment.
    unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), counts) };
    lanes.iter().map(|n| u64::from(*n)).sum()
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn magnitude_bits(x: __m256) -> __m256i {
    _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(!(SIGN as i32)))
}

/// `counts` plus one in each lane where `x` is NaN or infinite.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn count_non_finite(counts: __m256i, x: __m256) -> __m256i {
    let is_finite_limit = _mm256_set1_epi32(INFINITY_BITS - 1);
    _mm256_sub_epi32(counts, _mm256_cmpgt_epi32(magnitude_bits(x), is_finite_limit))
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn widen_f32(src: &[f32], dst: &mut [f32]) -> u64 {
    let mut counts = _mm256_setzero_si256();
    for (src, dst) in src.as_chunks().0.iter().zip(dst.as_chunks_mut().0) {
        let x = load(src);
        store(dst, x);
        counts = count_non_finite(counts, x);
    }
    total(counts)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn widen_f16(src: &[f16], dst: &mut [f32]) -> u64 {
    use half::slice::HalfFloatSliceExt;
    let mut counts = _mm256_setzero_si256();
    for (src, dst) in src.reinterpret_cast().as_chunks().0.iter().zip(dst.as_chunks_mut().0) {
        let x = _mm256_cvtph_ps(load_u16(src));
        store(dst, x);
        counts = count_non_finite(counts, x);
    }
    total(counts)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn widen_bf16(src: &[bf16], dst: &mut [f32]) -> u64 {
    use half::slice::HalfFloatSliceExt;
    let mut counts = _mm256_setzero_si256();
    for (src, dst) in src.reinterpret_cast().as_chunks().0.iter().zip(dst.as_chunks_mut().0) {
        let x = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_u16(src)), 16));
        store(dst, x);
        counts = count_non_finite(counts, x);
    }
    total(counts)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn sum_squares(x: &[f32]) -> f32 {
    let mut sum = _mm256_setzero_ps();
    for x in x.as_chunks().0 {
        let x = load(x);
        sum = _mm256_add_ps(sum, _mm256_mul_ps(x, x));
    }
    scalar::reduce(lanes(sum))
}

#[target_feature(enable = "avx2,fma,f16c")]
fn scale_by(scale: f32, x: &mut [f32]) {
    let scale = _mm256_set1_ps(scale);
    for x in x.as_chunks_mut().0 {
        store(x, _mm256_mul_ps(load(x), scale));
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn rotate(rotation: &Rotation, x: &mut [f32]) {
    let n = rotation.sylvester();
    butterflies(n, x);
    if let Some((order, _)) = rotation.paley() {
        if n >= LANES { paley::<true>(rotation, order, x) } else { paley::<false>(rotation, order, x) }
    }
    scale_by(rotation.scale(), x);
}

/// Stages of length 1, 2 and 4 inside a vector, as far as they are shorter than `n`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn short_butterflies(n: usize, mut v: __m256) -> __m256 {
    // The lane that subtracts gets (partner + -itself), which rounds like (partner - itself).
    let flip = |v: __m256, signs: __m256| _mm256_xor_ps(v, signs);
    if n >= 2 {
        let odd = _mm256_setr_ps(0.0, -0.0, 0.0, -0.0, 0.0, -0.0, 0.0, -0.0);
        v = _mm256_add_ps(_mm256_permute_ps(v, 0b10_11_00_01), flip(v, odd));
    }
    if n >= 4 {
        let upper_pairs = _mm256_setr_ps(0.0, 0.0, -0.0, -0.0, 0.0, 0.0, -0.0, -0.0);
        v = _mm256_add_ps(_mm256_permute_ps(v, 0b01_00_11_10), flip(v, upper_pairs));
    }
    if n >= 8 {
        let upper_half = _mm256_setr_ps(0.0, 0.0, 0.0, 0.0, -0.0, -0.0, -0.0, -0.0);
        v = _mm256_add_ps(_mm256_permute2f128_ps(v, v, 1), flip(v, upper_half));
    }
    v
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn butterfly(a: __m256, b: __m256) -> (__m256, __m256) {
    (_mm256_add_ps(a, b), _mm256_sub_ps(a, b))
}

/// Three stages at once over eight vectors.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn butterflies_of_8(v: [__m256; 8]) -> [__m256; 8] {
    let [a, b, c, d, e, f, g, h] = v;
    let ((a, b), (c, d), (e, f), (g, h)) =
        (butterfly(a, b), butterfly(c, d), butterfly(e, f), butterfly(g, h));
    let ((a, c), (b, d), (e, g), (f, h)) =
        (butterfly(a, c), butterfly(b, d), butterfly(e, g), butterfly(f, h));
    let ((a, e), (b, f), (c, g), (d, h)) =
        (butterfly(a, e), butterfly(b, f), butterfly(c, g), butterfly(d, h));
    [a, b, c, d, e, f, g, h]
}

#[target_feature(enable = "avx2,fma,f16c")]
fn butterflies(n: usize, x: &mut [f32]) {
    let (x, _) = x.as_chunks_mut::<LANES>();
    // Length of the next stage, in vectors.
    let mut half = 1;
    if n >= 64 {
        for eight in x.as_chunks_mut::<8>().0 {
            let v = eight.each_ref().map(|x| short_butterflies(64, load(x)));
            for (x, v) in eight.iter_mut().zip(butterflies_of_8(v)) {
                store(x, v);
            }
        }
        half = 8;
    } else {
        for x in x.iter_mut() {
            store(x, short_butterflies(n, load(x)));
        }
    }
    while half * LANES < n {
        for pair in x.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                let (sum, difference) = butterfly(load(a), load(b));
                store(a, sum);
                store(b, difference);
            }
        }
        half *= 2;
    }
}

/// The Paley part. `WIDE`: a Sylvester piece fills whole vectors; else a vector holds elements of
/// `8 / n` pieces.
#[target_feature(enable = "avx2,fma,f16c")]
fn paley<const WIDE: bool>(rotation: &Rotation, order: usize, x: &mut [f32]) {
    let n = rotation.sylvester();
    let signs = rotation.padded_paley();
    let mut z = [0.0; MAX_HEAD_DIM + LANES];
    z[..x.len()].copy_from_slice(x);
    // Lane l of an output vector belongs to element l % n of piece l / n.
    let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    let element = _mm256_and_si256(lane, _mm256_set1_epi32(n as i32 - 1));
    let piece = _mm256_srl_epi32(lane, _mm_cvtsi32_si128(n.trailing_zeros() as i32));
    for (k, out) in x.as_chunks_mut().0.iter_mut().enumerate() {
        let (j, at) = (k * LANES / n, k * LANES % n);
        let term = |i: usize| {
            let z = load(eight(&z[i * n + at..]));
            let (z, sign) = if WIDE {
                (z, _mm256_set1_epi32(signs[i * order + j] as i32))
            } else {
                let signs = load_u32(eight(&signs[i * order + j..]));
                (_mm256_permutevar8x32_ps(z, element), _mm256_permutevar8x32_epi32(signs, piece))
            };
            _mm256_xor_ps(z, _mm256_castsi256_ps(sign))
        };
        let mut sum = term(0);
        for i in 1..order {
            sum = _mm256_add_ps(sum, term(i));
        }
        store(out, sum);
    }
}

/// The first eight elements of a slice that has them.
#[inline]
fn eight<T>(x: &[T]) -> &[T; LANES] {
    match x.first_chunk() {
        Some(eight) => eight,
        None => unreachable!("the tables of a row are padded by a vector"),
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn lloyd_max_codes(
    rotation: &Rotation,
    codebook: &Codebook,
    x: &mut [f32],
    codes: &mut [u8],
) -> f32 {
    let mut norm = sum_squares(x).sqrt();
    let mut scale = 1.0;
    if norm.is_infinite() {
        scale = super::HUGE_KEY_SCALE;
        scale_by(scale, x);
        norm = sum_squares(x).sqrt();
    }
    let divisor = _mm256_set1_ps(norm + super::KEY_NORM_EPSILON);
    for x in x.as_chunks_mut().0 {
        store(x, _mm256_div_ps(load(x), divisor));
    }
    rotate(rotation, x);
    if codebook.midpoints().len() == 7 {
        bucket::<3>(codebook, x, codes);
    } else {
        bucket::<4>(codebook, x, codes);
    }
    norm / scale
}

/// Number of midpoints at or below each element, by halving: the next threshold of a lane is looked
/// up by the bits found so far.
#[target_feature(enable = "avx2,fma,f16c")]
fn bucket<const BITS: usize>(codebook: &Codebook, x: &[f32], codes: &mut [u8]) {
    let midpoints = codebook.midpoints();
    let mut thresholds = [_mm256_setzero_ps(); BITS];
    for (round, threshold) in thresholds.iter_mut().enumerate() {
        let step = 1 << (BITS - 1 - round);
        let mut table = [0.0; LANES];
        for (at, m) in table.iter_mut().zip(midpoints[step - 1..].iter().step_by(2 * step)) {
            *at = *m;
        }
        *threshold = load(&table);
    }
    for (x, codes) in x.as_chunks().0.iter().zip(codes.as_chunks_mut().0) {
        let y = load(x);
        let mut code = _mm256_setzero_si256();
        for threshold in thresholds {
            let threshold = _mm256_permutevar8x32_ps(threshold, code);
            let above = _mm256_castps_si256(_mm256_cmp_ps(y, threshold, _CMP_GE_OQ));
            code = _mm256_sub_epi32(_mm256_add_epi32(code, code), above);
        }
        *codes = low_bytes(code);
    }
}

/// Looks codes up in a table of 8 or 16 centroids.
struct Lookup {
    low: __m256,
    high: __m256,
}

impl Lookup {
    #[target_feature(enable = "avx2,fma,f16c")]
    fn new(codebook: &Codebook) -> Lookup {
        // The 8-entry table is its own upper half: bit 3 of a code does not count.
        let (halves, _) = codebook.centroids().as_chunks();
        match halves {
            [low, high] => Lookup { low: load(low), high: load(high) },
            [only] => Lookup { low: load(only), high: load(only) },
            _ => unreachable!("a row codebook has 8 or 16 centroids"),
        }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    fn get(&self, codes: __m256i) -> __m256 {
        let low = _mm256_permutevar8x32_ps(self.low, codes);
        let high = _mm256_permutevar8x32_ps(self.high, codes);
        // Bit 3 becomes the sign bit, which chooses.
        _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)))
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn centroid_values(codebook: &Codebook, codes: &[u8], factor: f32, out: &mut [f32]) {
    let lookup = Lookup::new(codebook);
    let factor = _mm256_set1_ps(factor);
    for (out, codes) in out.as_chunks_mut().0.iter_mut().zip(codes.as_chunks().0) {
        store(out, _mm256_mul_ps(lookup.get(load_bytes(*codes)), factor));
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn centroid_squares(codebook: &Codebook, codes: &[u8]) -> f32 {
    let lookup = Lookup::new(codebook);
    let mut sum = _mm256_setzero_ps();
    for codes in codes.as_chunks().0 {
        let c = lookup.get(load_bytes(*codes));
        sum = _mm256_add_ps(sum, _mm256_mul_ps(c, c));
    }
    scalar::reduce(lanes(sum))
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn min_max(x: &[f32]) -> (f32, f32) {
    let mut low = _mm256_set1_ps(f32::INFINITY);
    let mut high = _mm256_set1_ps(f32::NEG_INFINITY);
    for x in x.as_chunks().0 {
        let x = load(x);
        low = _mm256_min_ps(low, x);
        high = _mm256_max_ps(high, x);
    }
    (scalar::min_max(&lanes(low)).0, scalar::min_max(&lanes(high)).1)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn uniform_codes(x: &[f32], scale: f32, zero: f32, levels: f32, codes: &mut [u8]) {
    let (scale, zero, levels) = (_mm256_set1_ps(scale), _mm256_set1_ps(zero), _mm256_set1_ps(levels));
    for (x, codes) in x.as_chunks().0.iter().zip(codes.as_chunks_mut().0) {
        let position = _mm256_div_ps(_mm256_sub_ps(load(x), zero), scale);
        let rounded = _mm256_add_ps(position, _mm256_set1_ps(0.5));
        let clamped = _mm256_min_ps(_mm256_max_ps(rounded, _mm256_setzero_ps()), levels);
        *codes = low_bytes(_mm256_cvttps_epi32(clamped));
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn uniform_values(codes: &[u8], scale: f32, zero: f32, out: &mut [f32]) {
    let (scale, zero) = (_mm256_set1_ps(scale), _mm256_set1_ps(zero));
    for (out, codes) in out.as_chunks_mut().0.iter_mut().zip(codes.as_chunks().0) {
        let code = _mm256_cvtepi32_ps(load_bytes(*codes));
        store(out, _mm256_add_ps(_mm256_mul_ps(code, scale), zero));
    }
}

/// The steps of [`crate::fp8::encode`] on each lane.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn fp8_bytes(x: &[f32], bytes: &mut [u8]) -> u64 {
    let splat = |bits: i32| _mm256_set1_epi32(bits);
    let largest = splat(448f32.to_bits() as i32);
    let mut clipped = _mm256_setzero_si256();
    for (x, bytes) in x.as_chunks().0.iter().zip(bytes.as_chunks_mut().0) {
        let x = load(x);
        let magnitude = magnitude_bits(x);
        let beyond = _mm256_cmpgt_epi32(magnitude, largest);
        let non_finite = _mm256_cmpgt_epi32(magnitude, splat(INFINITY_BITS - 1));
        clipped = _mm256_sub_epi32(clipped, _mm256_andnot_si256(non_finite, beyond));

        let bits = _mm256_min_epi32(magnitude, largest);
        let odd = _mm256_and_si256(_mm256_srli_epi32(bits, 20), splat(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(splat(0x7_FFFF), odd));
        let normal = _mm256_sub_epi32(_mm256_srli_epi32(rounded, 20), splat(120 << 3));

        let shifted = _mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_set1_ps(16384.0));
        let subnormal = _mm256_sub_epi32(_mm256_castps_si256(shifted), splat(16384f32.to_bits() as i32));
        let is_subnormal = _mm256_cmpgt_epi32(splat(0.015625f32.to_bits() as i32), magnitude);

        let sign = _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(x), 24), splat(0x80));
        let number = _mm256_or_si256(sign, _mm256_blendv_epi8(normal, subnormal, is_subnormal));
        let nan = _mm256_cmpgt_epi32(magnitude, splat(INFINITY_BITS));
        let byte = _mm256_blendv_epi8(number, splat(i32::from(crate::fp8::E4M3_NAN)), nan);
        *bytes = low_bytes(byte);
    }
    total(clipped)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn fp8_values(bytes: &[u8], out: &mut [f32]) {
    for (out, bytes) in out.as_chunks_mut().0.iter_mut().zip(bytes.as_chunks().0) {
        store(out, fp8_decode(load_bytes(*bytes)));
    }
}

/// The values of e4m3 bytes, one in each 32-bit lane.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(crate) fn fp8_decode(bytes: __m256i) -> __m256 {
    let magnitude = _mm256_and_si256(bytes, _mm256_set1_epi32(0x7F));
    let sign = _mm256_slli_epi32(_mm256_xor_si256(bytes, magnitude), 24);
    // Exponent bias 7 -> 127.
    let normal = _mm256_add_epi32(_mm256_slli_epi32(magnitude, 20), _mm256_set1_epi32(120 << 23));
    let subnormal = _mm256_mul_ps(_mm256_cvtepi32_ps(magnitude), _mm256_set1_ps(1.0 / 512.0));
    let is_subnormal = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), magnitude);
    let number = _mm256_blendv_ps(_mm256_castsi256_ps(normal), subnormal, _mm256_castsi256_ps(is_subnormal));
    let is_nan = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7F));
    let number = _mm256_blendv_ps(number, _mm256_set1_ps(f32::NAN), _mm256_castsi256_ps(is_nan));
    _mm256_xor_ps(number, _mm256_castsi256_ps(sign))
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load_32_bytes(x: &[u8; 32]) -> __m256i {
    // SAFETY: 32 bytes behind the reference; the load needs no alignment.
    unsafe { _mm256_loadu_si256(x.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn pack4(codes: &[u8], packed: &mut [u8]) {
    let (blocks, codes) = codes.as_chunks::<32>();
    let (packed_blocks, packed) = packed.as_chunks_mut::<16>();
    for (codes, packed) in blocks.iter().zip(packed_blocks) {
        // code[2j] + 16 code[2j+1] in 16 bits, then the low bytes.
        let pairs = _mm256_maddubs_epi16(load_32_bytes(codes), _mm256_set1_epi16(16 << 8 | 1));
        let bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0b1000);
        // SAFETY: 16 bytes behind the reference; the store needs no alignment.
        unsafe { _mm_storeu_si128(packed.as_mut_ptr().cast(), _mm256_castsi256_si128(bytes)) };
    }
    // Less than a block: the zip above has left the packed bytes of whole blocks behind.
    scalar::pack4(codes, packed);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn unpack4(packed: &[u8], codes: &mut [u8]) {
    let (blocks, codes) = codes.as_chunks_mut::<32>();
    let (packed_blocks, packed) = packed.as_chunks::<16>();
    for (codes, packed) in blocks.iter_mut().zip(packed_blocks) {
        // SAFETY: 16 bytes behind the reference; the load needs no alignment.
        let bytes = unsafe { _mm_loadu_si128(packed.as_ptr().cast()) };
        // Byte j in 16 bits becomes its low half and, eight bits up, its high half.
        let wide = _mm256_cvtepu8_epi16(bytes);
        let halves = _mm256_or_si256(wide, _mm256_slli_epi16(wide, 4));
        let halves = _mm256_and_si256(halves, _mm256_set1_epi8(15));
        // SAFETY: 32 bytes behind the reference; the store needs no alignment.
        unsafe { _mm256_storeu_si256(codes.as_mut_ptr().cast(), halves) };
    }
    scalar::unpack4(packed, codes);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn pack3(codes: &[u8], packed: &mut [u8]) {
    let (blocks, codes) = codes.as_chunks::<32>();
    let (packed_blocks, packed) = packed.as_chunks_mut::<12>();
    for (codes, packed) in blocks.iter().zip(packed_blocks) {
        // Two codes in 16 bits, four in 32, eight in 64; then three bytes of each 64.
        let two = _mm256_maddubs_epi16(load_32_bytes(codes), _mm256_set1_epi16(8 << 8 | 1));
        let four = _mm256_madd_epi16(two, _mm256_set1_epi32(64 << 16 | 1));
        let eight = _mm256_or_si256(four, _mm256_srli_epi64(four, 20));
        let to_front = _mm256_broadcastsi128_si256(_mm_setr_epi8(
            0, 1, 2, 8, 9, 10, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
        ));
        let bytes = _mm256_shuffle_epi8(eight, to_front);
        let low = _mm_cvtsi128_si64(_mm256_castsi256_si128(bytes));
        let high = _mm_cvtsi128_si64(_mm256_extracti128_si256(bytes, 1));
        packed[..6].copy_from_slice(&low.to_le_bytes()[..6]);
        packed[6..].copy_from_slice(&high.to_le_bytes()[..6]);
    }
    scalar::pack3(codes, packed);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn unpack3(packed: &[u8], codes: &mut [u8]) {
    let (blocks, codes) = codes.as_chunks_mut::<16>();
    let (packed_blocks, packed) = packed.as_chunks::<6>();
    // Code i sits in the 16 bits from byte 3i/8 on, at bit 3i%8.
    let windows = _mm256_setr_epi8(
        0, 1, 0, 1, 0, 1, 1, 2, 1, 2, 1, 2, 2, 2, 2, 2, 3, 4, 3, 4, 3, 4, 4, 5, 4, 5, 4, 5, 5, 5, 5, 5,
    );
    // Times 2^(13 - bit) brings a code to the top.
    let up = |bit: u32| 1i16 << (13 - bit);
    let shifts = _mm_setr_epi16(up(0), up(3), up(6), up(1), up(4), up(7), up(2), up(5));
    let shifts = _mm256_broadcastsi128_si256(shifts);
    for (codes, six) in blocks.iter_mut().zip(packed_blocks) {
        let [a, b, c, d, e, f] = *six;
        let word = i64::from_le_bytes([a, b, c, d, e, f, 0, 0]);
        let windows = _mm256_shuffle_epi8(_mm256_set1_epi64x(word), windows);
        let wide = _mm256_srli_epi16(_mm256_mullo_epi16(windows, shifts), 13);
        let bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(wide, wide), 0b1000);
        // SAFETY: 16 bytes behind the reference; the store needs no alignment.
        unsafe { _mm_storeu_si128(codes.as_mut_ptr().cast(), _mm256_castsi256_si128(bytes)) };
    }
    scalar::unpack3(packed, codes);
}
