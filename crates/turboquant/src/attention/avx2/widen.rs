//! Packed tiles to f32.

use std::arch::x86_64::*;

use super::{LANES, coded, fields, load_bytes, load_half, store};
use crate::{
    attention::block::{KeyLanes, ValueLanes},
    format::{KeyFormat, NativeDtype, ValueFormat},
    page::{PageCodec, tile::TILE_TOKENS},
};

/// How an element that is no code is stored.
#[derive(Clone, Copy)]
enum Stored {
    Fp8,
    Native(NativeDtype),
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
        return coded::widen_keys(codec, centroids, tile, keys, factors);
    }
    let stored = match codec.rows().format().key {
        KeyFormat::Native(dtype) => Stored::Native(dtype),
        KeyFormat::Fp8 | KeyFormat::LloydMax { .. } => Stored::Fp8,
    };
    let area = &tile[codec.tile().key_codes.clone()];
    let bytes = area.chunks_exact(area.len() / keys.len());
    for (lanes, bytes) in keys.iter_mut().zip(bytes) {
        let out = lanes.0.as_chunks_mut::<LANES>().0;
        for (out, elements) in out.iter_mut().zip(widen(stored, bytes)) {
            store(out, elements);
        }
    }
    factors.fill(1.0);
}

/// As the kernel of the name in `kernels`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::attention) fn widen_values(codec: &PageCodec, tile: &[u8], values: &mut [ValueLanes]) {
    let area = &tile[codec.tile().value_codes.clone()];
    let stored = match codec.rows().format().value {
        ValueFormat::Uniform { bits } => return uniform(codec, bits, tile, area, values),
        ValueFormat::Native(dtype) => Stored::Native(dtype),
        ValueFormat::Fp8 => Stored::Fp8,
    };
    // Rows of head_dim elements, one after the other: 16 elements at a time, across rows.
    let pairs = values.as_chunks_mut::<2>().0;
    let bytes = area.chunks_exact(area.len() / pairs.len());
    for (pair, bytes) in pairs.iter_mut().zip(bytes) {
        for (out, elements) in pair.iter_mut().zip(widen(stored, bytes)) {
            store(&mut out.0, elements);
        }
    }
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
        for (p, plane) in coded::unpack_values(bits, area, groups, group).into_iter().enumerate() {
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

/// 16 elements.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn widen(stored: Stored, bytes: &[u8]) -> [__m256; 2] {
    match stored {
        Stored::Fp8 => e4m3(&bytes.as_chunks::<16>().0[0]),
        Stored::Native(NativeDtype::F32) => {
            let quarters = bytes.as_chunks::<32>().0;
            [load_bytes(&quarters[0]), load_bytes(&quarters[1])].map(|v| _mm256_castsi256_ps(v))
        }
        Stored::Native(NativeDtype::F16) => {
            let halves = bytes.as_chunks::<16>().0;
            [_mm256_cvtph_ps(load_half(&halves[0])), _mm256_cvtph_ps(load_half(&halves[1]))]
        }
        Stored::Native(NativeDtype::Bf16) => {
            let halves = bytes.as_chunks::<16>().0;
            [load_half(&halves[0]), load_half(&halves[1])]
                .map(|v| _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16)))
        }
    }
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
    [_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)]
        .map(|half| _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0)))
}
