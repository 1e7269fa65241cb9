//! Packed tiles to f32.

use std::arch::x86_64::*;

use super::{LANES, coded_keys, coded_values, fields, load_bytes, load_half, store};
use crate::{
    attention::block::{KeyLanes, ValueLanes},
    format::{KeyFormat, NativeDtype, ValueFormat},
    page::{PageCodec, tile::TILE_TOKENS},
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

/// As the kernel of the name in `kernels`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::attention) fn widen_keys(
    codec: &PageCodec,
    tile: &[u8],
    keys: &mut [KeyLanes],
    factors: &mut [f32; TILE_TOKENS],
) {
    if let Some(centroids) = codec.centroids() {
        return coded_keys::widen_keys(codec, centroids, tile, keys, factors);
    }
    factors.fill(1.0);
    let area = &tile[codec.tile().key_codes.clone()];
    let pairs = key_pairs(keys);
    match codec.rows().format().key {
        KeyFormat::Fp8 | KeyFormat::LloydMax { .. } => each!(area, 16, e4m3, pairs),
        KeyFormat::Native(NativeDtype::F16) => each!(area, 32, half, pairs),
        KeyFormat::Native(NativeDtype::Bf16) => each!(area, 32, brain, pairs),
        KeyFormat::Native(NativeDtype::F32) => each!(area, 64, single, pairs),
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
        ValueFormat::Uniform { bits } => uniform(codec, bits, tile, area, values),
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

/// `code * scale + minimum`
#[target_feature(enable = "avx2,fma,f16c")]
fn uniform(codec: &PageCodec, bits: u8, tile: &[u8], area: &[u8], values: &mut [ValueLanes]) {
    let groups = values.len() / TILE_TOKENS;
    let mut pair = [[0.0; TILE_TOKENS]; 2];
    for (lanes, at) in pair.iter_mut().zip([codec.tile().scales, codec.tile().zeros]) {
        for (lanes, field) in lanes.as_chunks_mut::<LANES>().0.iter_mut().zip(fields(tile, at)) {
            store(lanes, field);
        }
    }
    let [scales, zeros] = pair;
    for group in 0..groups {
        for (p, plane) in coded_values::unpack_values(bits, area, groups, group).into_iter().enumerate() {
            let even = _mm256_and_si256(plane, _mm256_set1_epi32(0xFFFF));
            let odd = _mm256_srli_epi32(plane, 16);
            for (token, codes) in [(2 * p, even), (2 * p + 1, odd)] {
                let (scale, zero) = (_mm256_set1_ps(scales[token]), _mm256_set1_ps(zeros[token]));
                let value = _mm256_fmadd_ps(_mm256_cvtepi32_ps(codes), scale, zero);
                store(&mut values[token * groups + group].0, value);
            }
        }
    }
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
