//! Tiles of fp8 and native rows to f32.

use std::arch::x86_64::*;

use super::{LANES, load_bytes, load_half, store};
use crate::{
    attention::block::{KeyLanes, ValueLanes},
    format::{KeyFormat, NativeDtype, ValueFormat},
    page::PageCodec,
};

/// Stores 16 elements from each `$bytes` bytes of an area, as `$widen` makes them, into the items of
/// an iterator over pairs of 8.
macro_rules! each {
    ($area:expr, $bytes:literal, $widen:ident, $pairs:expr) => {
        for ([first, second], bytes) in $pairs.zip($area.as_chunks::<$bytes>().0) {
            let [low, high] = $widen(bytes);
            store(first, low);
            store(second, high);
        }
    };
}

/// As the kernel of the name in `kernels`. Coded keys do not come here: they become words.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::attention) fn widen_keys(codec: &PageCodec, tile: &[u8], keys: &mut [KeyLanes]) {
    let area = &tile[codec.tile().key_codes.clone()];
    let pairs = key_pairs(keys);
    match codec.rows().format().key {
        KeyFormat::Fp8 => each!(area, 16, e4m3, pairs),
        KeyFormat::Native(NativeDtype::F16) => each!(area, 32, half, pairs),
        KeyFormat::Native(NativeDtype::Bf16) => each!(area, 32, brain, pairs),
        KeyFormat::Native(NativeDtype::F32) => each!(area, 64, single, pairs),
        KeyFormat::LloydMax { .. } => debug_assert!(false, "codes are multiplied as words"),
    }
}

/// As the kernel of the name in `kernels`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::attention) fn widen_values(codec: &PageCodec, tile: &[u8], values: &mut [ValueLanes]) {
    let area = &tile[codec.tile().value_codes.clone()];
    // Rows of head_dim elements, one after the other: 16 elements at a time, across rows.
    match codec.rows().format().value {
        ValueFormat::Fp8 => each!(area, 16, e4m3, value_pairs(values)),
        ValueFormat::Native(NativeDtype::F16) => each!(area, 32, half, value_pairs(values)),
        ValueFormat::Native(NativeDtype::Bf16) => each!(area, 32, brain, value_pairs(values)),
        ValueFormat::Native(NativeDtype::F32) => each!(area, 64, single, value_pairs(values)),
        ValueFormat::Uniform { .. } => debug_assert!(false, "codes are multiplied as words"),
    }
}

/// The 16 lanes of each key dimension.
fn key_pairs(keys: &mut [KeyLanes]) -> impl Iterator<Item = [&mut [f32; LANES]; 2]> {
    keys.iter_mut().filter_map(|lanes| match lanes.0.as_chunks_mut().0 {
        [first, second] => Some([first, second]),
        _ => None,
    })
}

fn value_pairs(values: &mut [ValueLanes]) -> impl Iterator<Item = [&mut [f32; LANES]; 2]> {
    values.as_chunks_mut().0.iter_mut().map(|[first, second]| [&mut first.0, &mut second.0])
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn single(bytes: &[u8; 64]) -> [__m256; 2] {
    let vectors = bytes.as_chunks::<32>().0;
    [_mm256_castsi256_ps(load_bytes(&vectors[0])), _mm256_castsi256_ps(load_bytes(&vectors[1]))]
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn half(bytes: &[u8; 32]) -> [__m256; 2] {
    let halves = bytes.as_chunks::<16>().0;
    [_mm256_cvtph_ps(load_half(&halves[0])), _mm256_cvtph_ps(load_half(&halves[1]))]
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn brain(bytes: &[u8; 32]) -> [__m256; 2] {
    let halves = bytes.as_chunks::<16>().0;
    let (low, high) =
        (_mm256_cvtepu16_epi32(load_half(&halves[0])), _mm256_cvtepu16_epi32(load_half(&halves[1])));
    [_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))]
}

/// e4m3 has f16's layout with a shorter exponent, biased by 7 instead of 15: shifted into place it is
/// 2^-8 of its value as f16, subnormals included. Only NaN needs a hand.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn e4m3(bytes: &[u8; 16]) -> [__m256; 2] {
    let words = _mm256_cvtepu8_epi16(load_half(bytes));
    let sign = _mm256_slli_epi16(_mm256_and_si256(words, _mm256_set1_epi16(0x80)), 8);
    let magnitude = _mm256_slli_epi16(_mm256_and_si256(words, _mm256_set1_epi16(0x7F)), 7);
    let nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7F << 7));
    let half = _mm256_or_si256(_mm256_or_si256(sign, magnitude), nan);
    let (low, high) = (_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    let unbias = _mm256_set1_ps(256.0);
    [_mm256_mul_ps(_mm256_cvtph_ps(low), unbias), _mm256_mul_ps(_mm256_cvtph_ps(high), unbias)]
}
