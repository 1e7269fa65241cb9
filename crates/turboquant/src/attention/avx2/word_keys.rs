//! Key codes to words, and products of query words with them (see [`crate::attention::block`]).

use std::{arch::x86_64::*, ops::Range};

use super::{
    LANES, MAX_WORD_ROWS, fields, load, load_bytes, load_half, load_words, max, store, store_words, sum,
};
use crate::{
    attention::{
        block::{BLOCK_TILES, BlockRow, CHUNK_DIMS, Words, tiles_of},
        queries::QueryRows,
    },
    format::KeyFormat,
    page::{IntegerCentroids, PageCodec, tile::TILE_TOKENS},
    rows::Avx2,
};

/// Pairs of dimensions whose products are summed in 32 bits.
const CHUNK_STEPS: usize = CHUNK_DIMS / 2;

/// Centroid words of a tile's keys, `[key_head_dim / 2]` pairs of dimensions; a key is words times
/// factor.
pub(in crate::attention) fn unpack_keys(
    _: Avx2,
    codec: &PageCodec,
    tile: &[u8],
    keys: &mut [[Words; 2]],
    factors: &mut [f32; TILE_TOKENS],
) {
    // SAFETY: the proof.
    unsafe { unpack(codec, tile, keys, factors) }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn unpack(codec: &PageCodec, tile: &[u8], keys: &mut [[Words; 2]], factors: &mut [f32; TILE_TOKENS]) {
    let Some(centroids) = codec.centroids() else { return };
    let area = &tile[codec.tile().key_codes.clone()];
    let mut squares = [_mm256_setzero_ps(); 2];
    let four_bits = codec.rows().format().key == (KeyFormat::LloydMax { bits: 4 });
    // 3 bits: the top bits of half the codes lie with the other half.
    let (wide, narrow) = area.split_at(if four_bits { area.len() } else { area.len() / 3 * 2 });
    for (chunk, keys) in keys.chunks_mut(CHUNK_STEPS).enumerate() {
        let first = chunk * CHUNK_DIMS;
        let sums = if four_bits {
            unpack4(centroids, &wide[first * 8..], keys)
        } else {
            unpack3(centroids, &wide[first * 4..], &narrow[first * 2..], keys)
        };
        for (squares, sums) in squares.iter_mut().zip(sums) {
            *squares = _mm256_add_ps(*squares, unsigned(sums));
        }
    }
    let norms = fields(tile, codec.tile().norms);
    for ((factors, norm), squares) in factors.as_chunks_mut::<LANES>().0.iter_mut().zip(norms).zip(squares) {
        store(factors, _mm256_div_ps(norm, _mm256_sqrt_ps(squares)));
    }
}

/// Words of one chunk of 4-bit codes; returns the sums of their squares.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn unpack4(centroids: &IntegerCentroids, area: &[u8], out: &mut [[Words; 2]]) -> [__m256i; 2] {
    let mut squares = [_mm256_setzero_si256(); 2];
    let nibble = _mm256_set1_epi8(15);
    let by_code = tables(&centroids.by_code);
    for (packed, out) in area.as_chunks::<32>().0.iter().zip(out.as_chunks_mut::<2>().0) {
        let packed = load_bytes(packed);
        look_up(by_code, _mm256_and_si256(packed, nibble), &mut out[0], &mut squares);
        look_up(by_code, _mm256_and_si256(_mm256_srli_epi16(packed, 4), nibble), &mut out[1], &mut squares);
    }
    squares
}

/// Words of one chunk of 3-bit codes; returns the sums of their squares.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn unpack3(centroids: &IntegerCentroids, wide: &[u8], narrow: &[u8], out: &mut [[Words; 2]]) -> [__m256i; 2] {
    let mut squares = [_mm256_setzero_si256(); 2];
    let (nibble, low, top) = (_mm256_set1_epi8(15), _mm256_set1_epi8(3), _mm256_set1_epi8(8));
    let (by_code, by_split_code) = (tables(&centroids.by_code), tables(&centroids.by_split_code));
    let packed = wide.as_chunks::<32>().0.iter().zip(narrow.as_chunks::<16>().0);
    for ((wide, narrow), out) in packed.zip(out.as_chunks_mut::<4>().0) {
        let first = load_bytes(wide);
        let second = _mm256_srli_epi16(first, 4);
        look_up(by_code, _mm256_and_si256(first, nibble), &mut out[0], &mut squares);
        look_up(by_code, _mm256_and_si256(second, nibble), &mut out[1], &mut squares);
        let narrow = load_half(narrow);
        let third = _mm256_set_m128i(_mm_srli_epi16(narrow, 4), narrow);
        let fourth = _mm256_srli_epi16(third, 2);
        let third = _mm256_or_si256(_mm256_and_si256(third, low), _mm256_and_si256(first, top));
        let fourth = _mm256_or_si256(_mm256_and_si256(fourth, low), _mm256_and_si256(second, top));
        look_up(by_split_code, third, &mut out[2], &mut squares);
        look_up(by_split_code, fourth, &mut out[3], &mut squares);
    }
    squares
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn tables(bytes: &[[u8; 16]; 2]) -> [__m256i; 2] {
    [_mm256_broadcastsi128_si256(load_half(&bytes[0])), _mm256_broadcastsi128_si256(load_half(&bytes[1]))]
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn look_up(tables: [__m256i; 2], codes: __m256i, out: &mut [Words; 2], squares: &mut [__m256i; 2]) {
    let (low, high) = (_mm256_shuffle_epi8(tables[0], codes), _mm256_shuffle_epi8(tables[1], codes));
    let words = [_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)];
    for ((out, squares), words) in out.iter_mut().zip(squares).zip(words) {
        store_words(out, words);
        *squares = _mm256_add_epi32(*squares, _mm256_madd_epi16(words, words));
    }
}

/// Unsigned integers of 32 bits as f32, without the lowest bit.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn unsigned(v: __m256i) -> __m256 {
    _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(v, 1)), _mm256_set1_ps(2.0))
}

/// Turns rotated queries `[rows, key_head_dim]` into words and what a word of each 64 dimensions is
/// worth.
pub(in crate::attention) fn code_queries(
    _: Avx2,
    centroids: &IntegerCentroids,
    key_head_dim: usize,
    queries: &[f32],
    words: &mut [i32],
    scales: &mut [f32],
) {
    let words = words.chunks_exact_mut(key_head_dim / 2);
    let scales = scales.chunks_exact_mut(key_head_dim.div_ceil(CHUNK_DIMS));
    for ((query, words), scales) in queries.chunks_exact(key_head_dim).zip(words).zip(scales) {
        let chunks = query.chunks(CHUNK_DIMS).zip(words.chunks_mut(CHUNK_STEPS));
        for ((query, words), scale) in chunks.zip(scales) {
            // SAFETY: the proof.
            *scale = unsafe { code_query(centroids.largest as f32, query, words) };
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn code_query(largest_centroid: f32, query: &[f32], words: &mut [i32]) -> f32 {
    let absolute = _mm256_castsi256_ps(_mm256_set1_epi32(i32::MAX));
    let query = query.as_chunks::<LANES>().0;
    let (mut most, mut total) = (_mm256_setzero_ps(), _mm256_setzero_ps());
    for q in query {
        let q = _mm256_and_ps(load(q), absolute);
        most = _mm256_max_ps(q, most);
        total = _mm256_add_ps(total, q);
    }
    let (most, total) = (max(most), sum(total));
    // Rounding moves each of 64 words by half a unit; as much again is left for the rounding of sums.
    let limit = i32::MAX as f32 / largest_centroid - CHUNK_DIMS as f32;
    let factor = (f32::from(i16::MAX) / most).min(limit / total);
    // A NaN or an infinity in the query has to show in the score. All zeros (or so small that the
    // factor is infinite) score 0.
    let (factor, scale) = if !total.is_finite() {
        (0.0, f32::NAN)
    } else if factor.is_finite() {
        (factor, 1.0 / factor)
    } else {
        (0.0, 0.0)
    };
    let factor = _mm256_set1_ps(factor);
    for (q, words) in query.iter().zip(words.as_chunks_mut::<4>().0) {
        let q = _mm256_cvtps_epi32(_mm256_mul_ps(load(q), factor));
        let q = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
        // SAFETY: four i32 behind the reference; the store needs no alignment.
        unsafe { _mm_storeu_si128(words.as_mut_ptr().cast(), q) };
    }
    scale
}

/// Products of query rows with a block's words, `[BLOCK_TILES, key_head_dim / 2]`.
pub(in crate::attention) fn word_scores(
    _: Avx2,
    queries: QueryRows<'_>,
    keys: &[[Words; 2]],
    columns: Range<usize>,
    scores: &mut [BlockRow],
) {
    let steps = keys.len() / BLOCK_TILES;
    let chunks = steps.div_ceil(CHUNK_STEPS);
    let words = queries.words.chunks(MAX_WORD_ROWS * steps);
    let scales = queries.scales.chunks(MAX_WORD_ROWS * chunks);
    for ((words, scales), scores) in words.zip(scales).zip(scores.chunks_mut(MAX_WORD_ROWS)) {
        for j in tiles_of(&columns) {
            let keys = &keys[j * steps..][..steps];
            // SAFETY: the proof.
            unsafe {
                match scores.len() {
                    1 => dot::<1>(words, scales, keys, j, scores),
                    2 => dot::<2>(words, scales, keys, j, scores),
                    3 => dot::<3>(words, scales, keys, j, scores),
                    _ => dot::<4>(words, scales, keys, j, scores),
                }
            }
        }
    }
}

/// Products of R query rows with the keys of tile `j`.
#[target_feature(enable = "avx2,fma,f16c")]
fn dot<const R: usize>(
    words: &[i32],
    scales: &[f32],
    keys: &[[Words; 2]],
    j: usize,
    scores: &mut [BlockRow],
) {
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    for (chunk, chunk_keys) in keys.chunks(CHUNK_STEPS).enumerate() {
        let mut rows: [&[i32]; R] = [&[]; R];
        for (row, words) in rows.iter_mut().zip(words.chunks_exact(keys.len())) {
            *row = &words[chunk * CHUNK_STEPS..][..chunk_keys.len()];
        }
        let mut acc = [[_mm256_setzero_si256(); 2]; R];
        for (step, keys) in chunk_keys.iter().enumerate() {
            let k = [load_words(&keys[0]), load_words(&keys[1])];
            for r in 0..R {
                // SAFETY: every row was cut to the length of `chunk_keys`.
                let q = _mm256_set1_epi32(unsafe { *rows[r].get_unchecked(step) });
                for i in 0..2 {
                    acc[r][i] = _mm256_add_epi32(acc[r][i], _mm256_madd_epi16(q, k[i]));
                }
            }
        }
        for r in 0..R {
            let scale = _mm256_set1_ps(scales[r * scales.len() / R + chunk]);
            for i in 0..2 {
                sums[r][i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc[r][i]), scale, sums[r][i]);
            }
        }
    }
    for (scores, sums) in scores.iter_mut().zip(sums) {
        let scores = scores.0[j * TILE_TOKENS..].as_chunks_mut::<LANES>().0;
        for (out, sum) in scores.iter_mut().zip(sums) {
            store(out, sum);
        }
    }
}
