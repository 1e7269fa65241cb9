//! Products of weights with value codes (see [`crate::attention::coded`]), and value codes to words.

use std::{arch::x86_64::*, ops::Range};

use super::{
    LANES, MAX_CODED_ROWS, fields, load, load_bytes, load_half, load_words, max, store, store_words, sum,
};
use crate::{
    attention::{
        BLOCK_TOKENS,
        block::{ScoreRow, Tiles},
        coded::{Coded, GROUPS, PAIRS, WeightPairs, Words},
    },
    format::ValueFormat,
    page::{PageCodec, tile::TILE_TOKENS},
};

/// `acc = acc * correction + weights * values` over the tokens `seen` of a block of packed values.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::attention) fn coded_accumulate(
    codec: &PageCodec,
    tiles: &Tiles<'_>,
    seen: Range<usize>,
    weights: &[ScoreRow],
    corrections: &[f32],
    coded: &mut Coded,
    acc: &mut [f32],
) {
    let ValueFormat::Uniform { bits } = codec.rows().format().value else { return };
    code_weights(codec, tiles, seen.clone(), weights, coded);
    let tiles_seen = seen.start / TILE_TOKENS..seen.end.div_ceil(TILE_TOKENS);
    let pairs = tiles_seen.start * TILE_TOKENS / 2..tiles_seen.end * TILE_TOKENS / 2;
    let groups = codec.rows().value_head_dim() / 8;
    let Coded { planes, weights, weight_scales, .. } = coded;
    let acc = acc.as_chunks_mut::<LANES>().0;
    for first in (0..groups).step_by(GROUPS) {
        let here = GROUPS.min(groups - first);
        for j in tiles_seen.clone() {
            let Some(tile) = tiles[j] else { continue };
            let area = &tile[codec.tile().value_codes.clone()];
            for (g, planes) in planes.chunks_exact_mut(PAIRS).take(here).enumerate() {
                let unpacked = unpack_values(bits, area, groups, first + g);
                for (plane, unpacked) in planes[j * TILE_TOKENS / 2..].iter_mut().zip(unpacked) {
                    store_words(plane, unpacked);
                }
            }
        }
        for row in (0..weights.len()).step_by(MAX_CODED_ROWS) {
            let rows = row..weights.len().min(row + MAX_CODED_ROWS);
            let block = Weighing {
                planes: &*planes,
                pairs: pairs.clone(),
                weights: &weights[rows.clone()],
                scales: &weight_scales[rows.clone()],
                corrections: &corrections[rows.clone()],
                width: groups,
            };
            let acc = &mut acc[rows.start * groups..rows.end * groups];
            match (rows.len(), here) {
                (1, 4) => weigh::<1, 4>(&block, 0, acc, first),
                (2, 4) => weigh::<2, 4>(&block, 0, acc, first),
                (3, 4) => weigh::<3, 4>(&block, 0, acc, first),
                (4, 4) => {
                    weigh::<4, 2>(&block, 0, acc, first);
                    weigh::<4, 2>(&block, 2, acc, first);
                }
                (len, _) => {
                    for group in 0..here {
                        match len {
                            1 => weigh::<1, 1>(&block, group, acc, first),
                            2 => weigh::<2, 1>(&block, group, acc, first),
                            3 => weigh::<3, 1>(&block, group, acc, first),
                            _ => weigh::<4, 1>(&block, group, acc, first),
                        }
                    }
                }
            }
        }
    }
}

/// Words for the weights times the values' scales, and the sums of weights times minima.
#[target_feature(enable = "avx2,fma,f16c")]
fn code_weights(
    codec: &PageCodec,
    tiles: &Tiles<'_>,
    seen: Range<usize>,
    weights: &[ScoreRow],
    coded: &mut Coded,
) {
    let (mut scales, mut zeros) = ([0.0f32; BLOCK_TOKENS], [0.0f32; BLOCK_TOKENS]);
    for (j, tile) in tiles.iter().enumerate() {
        let Some(tile) = tile else { continue };
        let layout = codec.tile();
        for (lanes, at) in [(&mut scales, layout.scales), (&mut zeros, layout.zeros)] {
            let lanes = lanes[j * TILE_TOKENS..].as_chunks_mut::<LANES>().0;
            for (lanes, field) in lanes.iter_mut().zip(fields(tile, at)) {
                store(lanes, field);
            }
        }
    }
    // What lies in unseen slots may be NaN: a weight of 0 does not hide it.
    for lanes in [&mut scales, &mut zeros] {
        lanes[..seen.start].fill(0.0);
        lanes[seen.end..].fill(0.0);
    }
    let (scales, zeros) = (scales.as_chunks::<LANES>().0, zeros.as_chunks::<LANES>().0);
    let absolute = _mm256_castsi256_ps(_mm256_set1_epi32(i32::MAX));
    let mut scaled = [_mm256_setzero_ps(); BLOCK_TOKENS / LANES];
    for ((weights, words), worth) in weights.iter().zip(&mut coded.weights).zip(&mut coded.weight_scales) {
        let (mut most, mut total, mut minima) =
            (_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps());
        let weights = weights.0.as_chunks::<LANES>().0;
        for (((scaled, weight), scale), zero) in scaled.iter_mut().zip(weights).zip(scales).zip(zeros) {
            let weight = load(weight);
            *scaled = _mm256_mul_ps(weight, load(scale));
            minima = _mm256_fmadd_ps(weight, load(zero), minima);
            most = _mm256_max_ps(_mm256_and_ps(*scaled, absolute), most);
            total = _mm256_add_ps(total, *scaled);
        }
        let most = max(most);
        let factor = f32::from(i16::MAX) / most;
        // Weights of zero (or nearly: the factor is infinite) add nothing. A NaN has to show.
        let factor = if factor.is_finite() { factor } else { 0.0 };
        let word = if sum(total).is_nan() { f32::NAN } else { most / f32::from(i16::MAX) };
        *worth = [word, sum(minima)];
        let factor = _mm256_set1_ps(factor);
        for (scaled, words) in scaled.as_chunks::<2>().0.iter().zip(words.0.as_chunks_mut::<LANES>().0) {
            let a = _mm256_cvtps_epi32(_mm256_mul_ps(scaled[0], factor));
            let b = _mm256_cvtps_epi32(_mm256_mul_ps(scaled[1], factor));
            let packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0b11_01_10_00);
            // SAFETY: eight i32 behind the reference; the store needs no alignment.
            unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), packed) };
        }
    }
}

/// Operands of [`weigh`] for some query rows.
struct Weighing<'a> {
    /// `[GROUPS, PAIRS]`
    planes: &'a [Words],
    pairs: Range<usize>,
    weights: &'a [WeightPairs],
    scales: &'a [[f32; 2]],
    corrections: &'a [f32],
    /// Vectors of a row of the accumulators.
    width: usize,
}

/// R rows, V vectors of dimensions from vector `group` of the unpacked ones on, which is vector
/// `first + group` of the row.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn weigh<const R: usize, const V: usize>(
    block: &Weighing<'_>,
    group: usize,
    acc: &mut [[f32; LANES]],
    first: usize,
) {
    let pairs = block.pairs.clone();
    let mut planes: [&[Words]; V] = [&[]; V];
    for (v, planes) in planes.iter_mut().enumerate() {
        *planes = &block.planes[(group + v) * PAIRS..][pairs.clone()];
    }
    let mut weights: [&[i32]; R] = [&[]; R];
    for (weights, row) in weights.iter_mut().zip(block.weights) {
        *weights = &row.0[pairs.clone()];
    }
    let mut sums = [[_mm256_setzero_si256(); V]; R];
    for pair in 0..pairs.len() {
        for v in 0..V {
            // SAFETY: every row of `planes` and of `weights` was cut to the length of `pairs`.
            let plane = load_words(unsafe { planes[v].get_unchecked(pair) });
            for r in 0..R {
                // SAFETY: as above.
                let weight = _mm256_set1_epi32(unsafe { *weights[r].get_unchecked(pair) });
                sums[r][v] = _mm256_add_epi32(sums[r][v], _mm256_madd_epi16(weight, plane));
            }
        }
    }
    for r in 0..R {
        let (word, minima) = (_mm256_set1_ps(block.scales[r][0]), _mm256_set1_ps(block.scales[r][1]));
        let correction = _mm256_set1_ps(block.corrections[r]);
        for v in 0..V {
            let acc = &mut acc[r * block.width + first + group + v];
            let earlier = _mm256_fmadd_ps(load(acc), correction, minima);
            store(acc, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[r][v]), word, earlier));
        }
    }
}

/// The 8 planes of the value codes of dimensions `8 * group..` of a tile.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn unpack_values(bits: u8, area: &[u8], groups: usize, group: usize) -> [__m256i; 8] {
    if bits == 4 {
        let nibble = _mm256_set1_epi16(15);
        let planes = |words: __m256i| {
            [
                _mm256_and_si256(words, nibble),
                _mm256_and_si256(_mm256_srli_epi16(words, 4), nibble),
                _mm256_and_si256(_mm256_srli_epi16(words, 8), nibble),
                _mm256_srli_epi16(words, 12),
            ]
        };
        let words = &area.as_chunks::<32>().0[2 * group..2 * group + 2];
        let ([a, b, c, d], [e, f, g, h]) = (planes(load_bytes(&words[0])), planes(load_bytes(&words[1])));
        return [a, b, c, d, e, f, g, h];
    }
    let three = _mm256_set1_epi16(7);
    let (words, bytes) = area.split_at(groups * 32);
    let words = load_bytes(&words.as_chunks::<32>().0[group]);
    let bytes = _mm256_cvtepu8_epi16(load_half(&bytes.as_chunks::<16>().0[group]));
    let top = _mm256_and_si256(_mm256_srli_epi16(words, 13), _mm256_set1_epi16(4));
    [
        _mm256_and_si256(words, three),
        _mm256_and_si256(_mm256_srli_epi16(words, 3), three),
        _mm256_and_si256(_mm256_srli_epi16(words, 6), three),
        _mm256_and_si256(_mm256_srli_epi16(words, 9), three),
        _mm256_and_si256(_mm256_srli_epi16(words, 12), three),
        _mm256_and_si256(bytes, three),
        _mm256_and_si256(_mm256_srli_epi16(bytes, 3), three),
        _mm256_or_si256(_mm256_srli_epi16(bytes, 6), top),
    ]
}
