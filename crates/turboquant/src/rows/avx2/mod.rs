//! The row kernels on AVX2: the arithmetic of [the reference](scalar) in the same order, eight elements at a time.

#![expect(unsafe_code, reason = "vector loads and stores take raw pointers")]

mod codes;
mod elements;
mod pack;
mod rotate;

use std::arch::x86_64::*;

use super::scalar;
use crate::avx2::{LANES, load, store};

pub(super) use codes::{
    centroid_squares, centroid_values, lloyd_max_codes, min_max, uniform_codes, uniform_values,
};
pub(super) use elements::{
    bf16_bytes, bf16_values, f16_bytes, f16_values, fp8_bytes, fp8_values, widen_bf16, widen_f16, widen_f32,
};
pub(super) use pack::{pack3, pack4, unpack3, unpack4};
pub(super) use rotate::rotate;

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
    lanes(_mm256_castsi256_ps(counts)).iter().map(|count| u64::from(count.to_bits())).sum()
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
