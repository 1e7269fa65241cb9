//! Value codes to words, and products of weight words with them (see [`crate::attention::block`]).

use std::{arch::x86_64::*, ops::Range};

use super::{
    LANES, MAX_WORD_ROWS, fields, load, load_bytes, load_half, load_words, max, store, store_words, sum,
};
use crate::{
    attention::{
        BLOCK_TOKENS,
        block::{BLOCK_PAIRS, BlockRow, Fields, Words, tiles_of},
    },
    format::ValueFormat,
    page::{PageCodec, tile::TILE_TOKENS},
    rows::Avx2,
};

/// Vectors of a row of weights.
const VECTORS: usize = BLOCK_TOKENS / LANES;
/// Token pairs of a tile: planes of 8 dimensions.
const TILE_PAIRS: usize = TILE_TOKENS / 2;

/// Weights of a row as pairs of words: tokens `2i` and `2i + 1` in the low and the high half.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
struct WeightPairs([i32; BLOCK_PAIRS]);

/// The planes of tile `j` of a block, and its values' scales and minima.
pub(in crate::attention) fn unpack_values(
    _: Avx2,
    codec: &PageCodec,
    tile: &[u8],
    j: usize,
    planes: &mut [Words],
    fields: &mut Fields,
) {
    // SAFETY: the proof.
    unsafe {
        match codec.rows().format().value {
            ValueFormat::Uniform { bits: 4 } => unpack4(&tile[codec.tile().value_codes.clone()], j, planes),
            _ => unpack3(&tile[codec.tile().value_codes.clone()], j, planes),
        }
        for (row, at) in [(&mut fields.scales, codec.tile().scales), (&mut fields.zeros, codec.tile().zeros)]
        {
            store_fields(tile, at, &mut row.0[j * TILE_TOKENS..]);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn store_fields(tile: &[u8], at: Option<usize>, out: &mut [f32]) {
    for (out, field) in out.as_chunks_mut::<LANES>().0.iter_mut().zip(fields(tile, at)) {
        store(out, field);
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn unpack4(area: &[u8], j: usize, planes: &mut [Words]) {
    let nibble = _mm256_set1_epi16(15);
    for (packed, planes) in
        area.as_chunks::<32>().0.as_chunks::<2>().0.iter().zip(planes.chunks_exact_mut(BLOCK_PAIRS))
    {
        let planes = planes[j * TILE_PAIRS..].as_chunks_mut::<4>().0;
        for (packed, planes) in packed.iter().zip(planes) {
            let words = load_bytes(packed);
            store_words(&mut planes[0], _mm256_and_si256(words, nibble));
            store_words(&mut planes[1], _mm256_and_si256(_mm256_srli_epi16(words, 4), nibble));
            store_words(&mut planes[2], _mm256_and_si256(_mm256_srli_epi16(words, 8), nibble));
            store_words(&mut planes[3], _mm256_srli_epi16(words, 12));
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn unpack3(area: &[u8], j: usize, planes: &mut [Words]) {
    let (three, top) = (_mm256_set1_epi16(7), _mm256_set1_epi16(4));
    let (words, bytes) = area.split_at(area.len() / 3 * 2);
    let packed = words.as_chunks::<32>().0.iter().zip(bytes.as_chunks::<16>().0);
    for ((words, bytes), planes) in packed.zip(planes.chunks_exact_mut(BLOCK_PAIRS)) {
        let planes = &mut planes[j * TILE_PAIRS..][..TILE_PAIRS];
        let (words, bytes) = (load_bytes(words), _mm256_cvtepu8_epi16(load_half(bytes)));
        store_words(&mut planes[0], _mm256_and_si256(words, three));
        store_words(&mut planes[1], _mm256_and_si256(_mm256_srli_epi16(words, 3), three));
        store_words(&mut planes[2], _mm256_and_si256(_mm256_srli_epi16(words, 6), three));
        store_words(&mut planes[3], _mm256_and_si256(_mm256_srli_epi16(words, 9), three));
        store_words(&mut planes[4], _mm256_and_si256(_mm256_srli_epi16(words, 12), three));
        store_words(&mut planes[5], _mm256_and_si256(bytes, three));
        store_words(&mut planes[6], _mm256_and_si256(_mm256_srli_epi16(bytes, 3), three));
        let top = _mm256_and_si256(_mm256_srli_epi16(words, 13), top);
        store_words(&mut planes[7], _mm256_or_si256(_mm256_srli_epi16(bytes, 6), top));
    }
}

/// `acc = acc * correction + weights * values` for rows `[rows, value_head_dim]`, values as planes
/// with scales and minima.
pub(in crate::attention) fn word_accumulate(
    _: Avx2,
    weights: &[BlockRow],
    columns: Range<usize>,
    planes: &[Words],
    fields: &Fields,
    corrections: &[f32],
    acc: &mut [f32],
) {
    // Weights are zero outside of the columns, which does not hide a NaN.
    let mut fields = *fields;
    for row in [&mut fields.scales, &mut fields.zeros] {
        row.0[..columns.start].fill(0.0);
        row.0[columns.end..].fill(0.0);
    }
    let tiles = tiles_of(&columns);
    let pairs = tiles.start * TILE_PAIRS..tiles.end * TILE_PAIRS;
    let width = planes.len() / BLOCK_PAIRS;
    let rows = weights.chunks(MAX_WORD_ROWS).zip(corrections.chunks(MAX_WORD_ROWS));
    let acc = acc.as_chunks_mut::<LANES>().0;
    for ((weights, corrections), acc) in rows.zip(acc.chunks_mut(MAX_WORD_ROWS * width)) {
        let mut coded = Coded {
            words: [WeightPairs([0; BLOCK_PAIRS]); MAX_WORD_ROWS],
            scales: [0.0; MAX_WORD_ROWS],
            constants: [0.0; MAX_WORD_ROWS],
            corrections: [0.0; MAX_WORD_ROWS],
        };
        coded.corrections[..corrections.len()].copy_from_slice(corrections);
        // SAFETY: the proof.
        unsafe {
            code_weights(weights, &fields, &mut coded);
            match weights.len() {
                1 => all_dims::<1, 4>(&coded, planes, pairs.clone(), acc),
                2 => all_dims::<2, 4>(&coded, planes, pairs.clone(), acc),
                3 => all_dims::<3, 4>(&coded, planes, pairs.clone(), acc),
                _ => all_dims::<4, 2>(&coded, planes, pairs.clone(), acc),
            }
        }
    }
}

/// Weights of some rows as words.
struct Coded {
    words: [WeightPairs; MAX_WORD_ROWS],
    /// What a word is worth.
    scales: [f32; MAX_WORD_ROWS],
    /// What every dimension gets beside: the sum of weight times minimum, and a rounding term.
    constants: [f32; MAX_WORD_ROWS],
    corrections: [f32; MAX_WORD_ROWS],
}

#[target_feature(enable = "avx2,fma,f16c")]
fn code_weights(weights: &[BlockRow], fields: &Fields, coded: &mut Coded) {
    let absolute = _mm256_castsi256_ps(_mm256_set1_epi32(i32::MAX));
    for (r, weights) in weights.iter().enumerate() {
        let (mut scaled, mut minima) = ([_mm256_setzero_ps(); VECTORS], [_mm256_setzero_ps(); 2]);
        let factors = fields.scales.0.as_chunks().0.iter().zip(fields.zeros.0.as_chunks().0);
        for (i, (weight, (scale, zero))) in weights.0.as_chunks().0.iter().zip(factors).enumerate() {
            let weight = load(weight);
            scaled[i] = _mm256_mul_ps(weight, load(scale));
            minima[i % 2] = _mm256_fmadd_ps(weight, load(zero), minima[i % 2]);
        }
        let (mut most, mut total) = (_mm256_setzero_ps(), _mm256_setzero_ps());
        for pair in scaled.as_chunks::<2>().0 {
            let (a, b) = (_mm256_and_ps(pair[0], absolute), _mm256_and_ps(pair[1], absolute));
            most = _mm256_max_ps(_mm256_max_ps(a, b), most);
            total = _mm256_add_ps(_mm256_add_ps(pair[0], pair[1]), total);
        }
        let most = max(most);
        // Weights of zero (or so small that the factor is infinite) add nothing. A NaN has to show.
        let factor = f32::from(i16::MAX) / most;
        let factor = _mm256_set1_ps(if factor.is_finite() { factor } else { 0.0 });
        let scale = if sum(total).is_nan() { f32::NAN } else { most / f32::from(i16::MAX) };
        let mut total_words = _mm256_setzero_si256();
        let words = coded.words[r].0.as_chunks_mut::<LANES>().0;
        for (scaled, words) in scaled.as_chunks::<2>().0.iter().zip(words) {
            let a = _mm256_cvtps_epi32(_mm256_mul_ps(scaled[0], factor));
            let b = _mm256_cvtps_epi32(_mm256_mul_ps(scaled[1], factor));
            total_words = _mm256_add_epi32(_mm256_add_epi32(a, b), total_words);
            let packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0b11_01_10_00);
            // SAFETY: eight i32 behind the reference; the store needs no alignment.
            unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), packed) };
        }
        // What rounding took from the weights counts at the middle code, which leaves the distance of
        // a code from the middle as the only factor of its error.
        let rounded = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(total_words), _mm256_set1_ps(scale), total);
        let minima = _mm256_add_ps(minima[0], minima[1]);
        coded.constants[r] = sum(_mm256_fmadd_ps(rounded, _mm256_set1_ps(fields.middle), minima));
        coded.scales[r] = scale;
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn all_dims<const R: usize, const V: usize>(
    coded: &Coded,
    planes: &[Words],
    pairs: Range<usize>,
    acc: &mut [[f32; LANES]],
) {
    let width = acc.len() / R;
    let mut at = 0;
    while at + V <= width {
        weigh::<R, V>(coded, planes, pairs.clone(), acc, at);
        at += V;
    }
    while at < width {
        weigh::<R, 1>(coded, planes, pairs.clone(), acc, at);
        at += 1;
    }
}

/// R rows, V vectors of dimensions from vector `at` on.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn weigh<const R: usize, const V: usize>(
    coded: &Coded,
    planes: &[Words],
    pairs: Range<usize>,
    acc: &mut [[f32; LANES]],
    at: usize,
) {
    let width = acc.len() / R;
    let mut groups: [&[Words]; V] = [&[]; V];
    for (group, planes) in groups.iter_mut().zip(planes[at * BLOCK_PAIRS..].chunks_exact(BLOCK_PAIRS)) {
        *group = &planes[pairs.clone()];
    }
    let mut weights: [&[i32]; R] = [&[]; R];
    for (weights, words) in weights.iter_mut().zip(&coded.words) {
        *weights = &words.0[pairs.clone()];
    }
    let mut sums = [[_mm256_setzero_si256(); V]; R];
    for pair in 0..pairs.len() {
        for v in 0..V {
            // SAFETY: every row of `groups` and of `weights` was cut to the length of `pairs`.
            let plane = load_words(unsafe { groups[v].get_unchecked(pair) });
            for r in 0..R {
                // SAFETY: as above.
                let weight = _mm256_set1_epi32(unsafe { *weights[r].get_unchecked(pair) });
                sums[r][v] = _mm256_add_epi32(sums[r][v], _mm256_madd_epi16(weight, plane));
            }
        }
    }
    for r in 0..R {
        let (scale, constant) = (_mm256_set1_ps(coded.scales[r]), _mm256_set1_ps(coded.constants[r]));
        let correction = _mm256_set1_ps(coded.corrections[r]);
        for v in 0..V {
            let acc = &mut acc[r * width + at + v];
            let earlier = _mm256_fmadd_ps(load(acc), correction, constant);
            store(acc, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[r][v]), scale, earlier));
        }
    }
}
