//! Products of queries with key codes (see [`crate::attention::coded`]), and key codes to words.

use std::{arch::x86_64::*, ops::Range};

use super::{
    LANES, MAX_CODED_ROWS, fields, load, load_bytes, load_half, load_words, max, store, store_words, sum,
};
use crate::{
    attention::{
        block::{KeyLanes, ScoreRow, Tiles},
        coded::{CHUNK_DIMS, Coded, Words},
    },
    format::KeyFormat,
    page::{IntegerCentroids, PageCodec, tile::TILE_TOKENS},
};

/// Turns queries `[rows, key_head_dim]` (rotated) into words.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::attention) fn code_queries(centroids: &IntegerCentroids, queries: &[f32], coded: &mut Coded) {
    let width = queries.len() / coded.weights.len();
    let words = queries.chunks_exact(width).zip(coded.queries.chunks_exact_mut(width / 2));
    let scales = coded.query_scales.chunks_exact_mut(width.div_ceil(CHUNK_DIMS));
    let absolute = _mm256_castsi256_ps(_mm256_set1_epi32(i32::MAX));
    // Rounding moves each of 64 words by half a unit.
    let largest = centroids.largest as f32;
    let limit = (i32::MAX as f32 - CHUNK_DIMS as f32 * largest) / largest;
    for ((query, words), scales) in words.zip(scales) {
        let chunks = query.chunks(CHUNK_DIMS).zip(words.chunks_mut(CHUNK_DIMS / 2));
        for ((query, words), scale) in chunks.zip(scales) {
            let vectors = query.as_chunks::<LANES>().0;
            let (mut most, mut total) = (_mm256_setzero_ps(), _mm256_setzero_ps());
            for q in vectors {
                let q = _mm256_and_ps(load(q), absolute);
                most = _mm256_max_ps(q, most);
                total = _mm256_add_ps(total, q);
            }
            let (most, total) = (max(most), sum(total));
            let factor = (f32::from(i16::MAX) / most).min(limit / total);
            // A NaN or an infinity in the query has to show in the score. All zeros (or nearly, so
            // that the factor is infinite) score 0.
            *scale = if !total.is_finite() {
                f32::NAN
            } else if factor.is_finite() {
                1.0 / factor
            } else {
                0.0
            };
            let factor = _mm256_set1_ps(if factor.is_finite() { factor } else { 0.0 });
            for (q, words) in vectors.iter().zip(words.as_chunks_mut::<4>().0) {
                let q = _mm256_cvtps_epi32(_mm256_mul_ps(load(q), factor));
                let q = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
                // SAFETY: four i32 behind the reference; the store needs no alignment.
                unsafe { _mm_storeu_si128(words.as_mut_ptr().cast(), q) };
            }
        }
    }
}

/// Dot products of the coded queries with a block's packed keys; what lies at tokens of absent tiles
/// stays.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::attention) fn coded_scores(
    codec: &PageCodec,
    centroids: &IntegerCentroids,
    tiles: &Tiles<'_>,
    coded: &mut Coded,
    scores: &mut [ScoreRow],
) {
    let width = codec.rows().key_head_dim();
    let chunks = width.div_ceil(CHUNK_DIMS);
    for (j, tile) in tiles.iter().enumerate() {
        let Some(tile) = tile else { continue };
        let mut squares = [_mm256_setzero_ps(); 2];
        for chunk in 0..chunks {
            let dims = chunk * CHUNK_DIMS..width.min((chunk + 1) * CHUNK_DIMS);
            let steps = dims.len() / 2;
            unpack_keys(codec, centroids, tile, dims.clone(), &mut coded.keys);
            let keys = &coded.keys[..steps];
            for (i, scores) in scores.chunks_mut(MAX_CODED_ROWS).enumerate() {
                let first = i * MAX_CODED_ROWS;
                let queries = &coded.queries[first * width / 2..];
                let part = Part {
                    queries,
                    stride: width / 2,
                    start: dims.start / 2,
                    scales: &coded.query_scales[first * chunks + chunk..],
                    chunks,
                    tile: j,
                    add: chunk > 0,
                };
                match (scores.len(), i) {
                    (1, 0) => dot::<1, true>(keys, part, scores, &mut squares),
                    (2, 0) => dot::<2, true>(keys, part, scores, &mut squares),
                    (3, 0) => dot::<3, true>(keys, part, scores, &mut squares),
                    (_, 0) => dot::<4, true>(keys, part, scores, &mut squares),
                    (1, _) => dot::<1, false>(keys, part, scores, &mut squares),
                    (2, _) => dot::<2, false>(keys, part, scores, &mut squares),
                    (3, _) => dot::<3, false>(keys, part, scores, &mut squares),
                    (_, _) => dot::<4, false>(keys, part, scores, &mut squares),
                }
            }
        }
        let norms = fields(tile, codec.tile().norms);
        let factors = [
            _mm256_div_ps(norms[0], _mm256_sqrt_ps(squares[0])),
            _mm256_div_ps(norms[1], _mm256_sqrt_ps(squares[1])),
        ];
        for scores in &mut *scores {
            let scores = scores.0[j * TILE_TOKENS..].as_chunks_mut::<LANES>().0;
            for (s, factor) in scores.iter_mut().zip(factors) {
                store(s, _mm256_mul_ps(load(s), factor));
            }
        }
    }
}

/// Where a chunk's queries and results lie.
#[derive(Clone, Copy)]
struct Part<'a> {
    queries: &'a [i32],
    stride: usize,
    start: usize,
    scales: &'a [f32],
    chunks: usize,
    tile: usize,
    /// Whether earlier chunks of the same dot products are in the scores.
    add: bool,
}

/// Products of R query rows with one chunk of a tile's keys; with NORM also the squares of the keys.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn dot<const R: usize, const NORM: bool>(
    keys: &[[Words; 2]],
    part: Part<'_>,
    scores: &mut [ScoreRow],
    squares: &mut [__m256; 2],
) {
    let mut queries: [&[i32]; R] = [&[]; R];
    for (r, query) in queries.iter_mut().enumerate() {
        *query = &part.queries[r * part.stride + part.start..][..keys.len()];
    }
    let mut acc = [[_mm256_setzero_si256(); 2]; R];
    let mut norm = [_mm256_setzero_si256(); 2];
    for (step, keys) in keys.iter().enumerate() {
        let k = [load_words(&keys[0]), load_words(&keys[1])];
        for r in 0..R {
            // SAFETY: every row of `queries` was cut to the length of `keys`.
            let q = _mm256_set1_epi32(unsafe { *queries[r].get_unchecked(step) });
            for i in 0..2 {
                acc[r][i] = _mm256_add_epi32(acc[r][i], _mm256_madd_epi16(q, k[i]));
            }
        }
        if NORM {
            for i in 0..2 {
                norm[i] = _mm256_add_epi32(norm[i], _mm256_madd_epi16(k[i], k[i]));
            }
        }
    }
    for r in 0..R {
        let scale = _mm256_set1_ps(part.scales[r * part.chunks]);
        let out = scores[r].0[part.tile * TILE_TOKENS..].as_chunks_mut::<LANES>().0;
        for (out, acc) in out.iter_mut().zip(acc[r]) {
            let earlier = if part.add { load(out) } else { _mm256_setzero_ps() };
            store(out, _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc), scale, earlier));
        }
    }
    if NORM {
        for (squares, norm) in squares.iter_mut().zip(norm) {
            *squares = _mm256_add_ps(*squares, unsigned(norm));
        }
    }
}

/// Unsigned words of 32 bits as f32, without the lowest bit.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn unsigned(v: __m256i) -> __m256 {
    _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(v, 1)), _mm256_set1_ps(2.0))
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn table(bytes: &[u8; 16]) -> __m256i {
    _mm256_broadcastsi128_si256(load_half(bytes))
}

/// The centroid words of the dimensions `dims` of a tile's keys, a step per two dimensions.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn unpack_keys(
    codec: &PageCodec,
    centroids: &IntegerCentroids,
    tile: &[u8],
    dims: Range<usize>,
    out: &mut [[Words; 2]],
) {
    let area = &tile[codec.tile().key_codes.clone()];
    let nibble = _mm256_set1_epi8(15);
    let by_code = [table(&centroids.by_code[0]), table(&centroids.by_code[1])];
    if codec.rows().format().key == (KeyFormat::LloydMax { bits: 4 }) {
        let packed = area[dims.start * 8..dims.end * 8].as_chunks::<32>().0;
        for (packed, out) in packed.iter().zip(out.as_chunks_mut::<2>().0) {
            let packed = load_bytes(packed);
            look_up(by_code, _mm256_and_si256(packed, nibble), &mut out[0]);
            look_up(by_code, _mm256_and_si256(_mm256_srli_epi16(packed, 4), nibble), &mut out[1]);
        }
        return;
    }
    let by_split_code = [table(&centroids.by_split_code[0]), table(&centroids.by_split_code[1])];
    let (low, top) = (_mm256_set1_epi8(3), _mm256_set1_epi8(8));
    let (wide, narrow) = area.split_at(codec.rows().key_head_dim() * 4);
    let wide = wide[dims.start * 4..dims.end * 4].as_chunks::<32>().0;
    let narrow = narrow[dims.start * 2..dims.end * 2].as_chunks::<16>().0;
    for ((wide, narrow), out) in wide.iter().zip(narrow).zip(out.as_chunks_mut::<4>().0) {
        let first = load_bytes(wide);
        let second = _mm256_srli_epi16(first, 4);
        look_up(by_code, _mm256_and_si256(first, nibble), &mut out[0]);
        look_up(by_code, _mm256_and_si256(second, nibble), &mut out[1]);
        let narrow = load_half(narrow);
        let third = _mm256_set_m128i(_mm_srli_epi16(narrow, 4), narrow);
        let fourth = _mm256_srli_epi16(third, 2);
        let third = _mm256_or_si256(_mm256_and_si256(third, low), _mm256_and_si256(first, top));
        let fourth = _mm256_or_si256(_mm256_and_si256(fourth, low), _mm256_and_si256(second, top));
        look_up(by_split_code, third, &mut out[2]);
        look_up(by_split_code, fourth, &mut out[3]);
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn look_up(tables: [__m256i; 2], codes: __m256i, out: &mut [Words; 2]) {
    let (low, high) = (_mm256_shuffle_epi8(tables[0], codes), _mm256_shuffle_epi8(tables[1], codes));
    store_words(&mut out[0], _mm256_unpacklo_epi8(low, high));
    store_words(&mut out[1], _mm256_unpackhi_epi8(low, high));
}

/// Keys as centroid words in f32: `lanes * factor` is the key.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn widen_keys(
    codec: &PageCodec,
    centroids: &IntegerCentroids,
    tile: &[u8],
    keys: &mut [KeyLanes],
    factors: &mut [f32; TILE_TOKENS],
) {
    let mut steps = [[Words([0; 16]); 2]; CHUNK_DIMS / 2];
    let mut squares = [_mm256_setzero_ps(); 2];
    for first in (0..keys.len()).step_by(CHUNK_DIMS) {
        let dims = first..keys.len().min(first + CHUNK_DIMS);
        unpack_keys(codec, centroids, tile, dims.clone(), &mut steps);
        for (keys, step) in keys[dims].as_chunks_mut::<2>().0.iter_mut().zip(&steps) {
            let [even, odd] = keys;
            let halves = even.0.as_chunks_mut::<LANES>().0.iter_mut().zip(odd.0.as_chunks_mut::<LANES>().0);
            for (((even, odd), words), squares) in halves.zip(step).zip(&mut squares) {
                let words = load_words(words);
                *squares = _mm256_add_ps(*squares, _mm256_cvtepi32_ps(_mm256_madd_epi16(words, words)));
                store(even, _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words, 16), 16)));
                store(odd, _mm256_cvtepi32_ps(_mm256_srai_epi32(words, 16)));
            }
        }
    }
    let norms = fields(tile, codec.tile().norms);
    for ((factors, norm), squares) in factors.as_chunks_mut::<LANES>().0.iter_mut().zip(norms).zip(squares) {
        store(factors, _mm256_div_ps(norm, _mm256_sqrt_ps(squares)));
    }
}
