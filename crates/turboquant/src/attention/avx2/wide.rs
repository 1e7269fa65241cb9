//! Products of query rows with keys and values that were widened to f32.
//!
//! 12 accumulators of 8 lanes: up to 6 rows by 2 vectors, or up to 3 rows by 4, so that the two FMA
//! ports stay busy. What a row gets does not depend on how many rows go along with it.

use std::{arch::x86_64::*, ops::Range};

use super::{LANES, load, store};
use crate::{
    attention::block::{BlockRow, KeyLanes, ValueLanes, tiles_of},
    page::tile::TILE_TOKENS,
};

const MAX_ROWS: usize = 6;

/// As the kernel of the name in `kernels`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::attention) fn wide_scores(
    queries: &[f32],
    keys: &[KeyLanes],
    columns: Range<usize>,
    scores: &mut [BlockRow],
) {
    let width = queries.len() / scores.len();
    let tiles = tiles_of(&columns);
    for (queries, scores) in queries.chunks(MAX_ROWS * width).zip(scores.chunks_mut(MAX_ROWS)) {
        for first in (tiles.start / 2 * 2..tiles.end).step_by(2) {
            let keys = &keys[first * width..(first + 2) * width];
            match scores.len() {
                1 => two_tiles::<1>(queries, keys, first, scores),
                2 => two_tiles::<2>(queries, keys, first, scores),
                3 => two_tiles::<3>(queries, keys, first, scores),
                4 => one_tile_each::<4>(queries, keys, first, scores),
                5 => one_tile_each::<5>(queries, keys, first, scores),
                _ => one_tile_each::<6>(queries, keys, first, scores),
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn two_tiles<const R: usize>(queries: &[f32], keys: &[KeyLanes], first: usize, scores: &mut [BlockRow]) {
    let (low, high) = keys.split_at(keys.len() / 2);
    dot::<R, 2>(queries, [low, high], first, scores);
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn one_tile_each<const R: usize>(queries: &[f32], keys: &[KeyLanes], first: usize, scores: &mut [BlockRow]) {
    let (low, high) = keys.split_at(keys.len() / 2);
    dot::<R, 1>(queries, [low], first, scores);
    dot::<R, 1>(queries, [high], first + 1, scores);
}

/// Scores of R rows against T tiles from `first` on.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn dot<const R: usize, const T: usize>(
    queries: &[f32],
    keys: [&[KeyLanes]; T],
    first: usize,
    scores: &mut [BlockRow],
) {
    let width = queries.len() / R;
    let mut rows: [&[f32]; R] = [&[]; R];
    for (row, query) in rows.iter_mut().zip(queries.chunks_exact(width)) {
        *row = query;
    }
    let mut tiles: [&[KeyLanes]; T] = [&[]; T];
    for (tile, keys) in tiles.iter_mut().zip(keys) {
        *tile = &keys[..width];
    }
    let mut acc = [[[_mm256_setzero_ps(); 2]; T]; R];
    for d in 0..width {
        for t in 0..T {
            // SAFETY: every tile and every row was cut to `width` elements.
            let halves = unsafe { tiles[t].get_unchecked(d) }.0.as_chunks::<LANES>().0;
            let k = [load(&halves[0]), load(&halves[1])];
            for r in 0..R {
                // SAFETY: as above.
                let q = _mm256_set1_ps(unsafe { *rows[r].get_unchecked(d) });
                for (acc, k) in acc[r][t].iter_mut().zip(k) {
                    *acc = _mm256_fmadd_ps(q, k, *acc);
                }
            }
        }
    }
    for (scores, acc) in scores.iter_mut().zip(acc) {
        let out = scores.0[first * TILE_TOKENS..].as_chunks_mut::<LANES>().0;
        for (out, acc) in out.iter_mut().zip(acc.as_flattened()) {
            store(out, *acc);
        }
    }
}

/// As the kernel of the name in `kernels`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::attention) fn wide_accumulate(
    weights: &[BlockRow],
    columns: Range<usize>,
    values: &[ValueLanes],
    corrections: &[f32],
    acc: &mut [f32],
) {
    let width = acc.len() / weights.len() / LANES;
    let values = &values[columns.start * width..columns.end * width];
    let acc = acc.as_chunks_mut::<LANES>().0;
    let rows = weights.chunks(MAX_ROWS).zip(corrections.chunks(MAX_ROWS));
    for ((weights, corrections), acc) in rows.zip(acc.chunks_mut(MAX_ROWS * width)) {
        let start = columns.start;
        match weights.len() {
            1 => all_dims::<1, 4>(weights, start, values, corrections, acc),
            2 => all_dims::<2, 4>(weights, start, values, corrections, acc),
            3 => all_dims::<3, 4>(weights, start, values, corrections, acc),
            4 => all_dims::<4, 2>(weights, start, values, corrections, acc),
            5 => all_dims::<5, 2>(weights, start, values, corrections, acc),
            _ => all_dims::<6, 2>(weights, start, values, corrections, acc),
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn all_dims<const R: usize, const V: usize>(
    weights: &[BlockRow],
    start: usize,
    values: &[ValueLanes],
    corrections: &[f32],
    acc: &mut [[f32; LANES]],
) {
    let width = acc.len() / R;
    let mut at = 0;
    while at + V <= width {
        weigh::<R, V>(weights, start, values, corrections, acc, at);
        at += V;
    }
    while at < width {
        weigh::<R, 1>(weights, start, values, corrections, acc, at);
        at += 1;
    }
}

/// R rows, V vectors of dimensions from vector `at` on.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn weigh<const R: usize, const V: usize>(
    weights: &[BlockRow],
    start: usize,
    values: &[ValueLanes],
    corrections: &[f32],
    acc: &mut [[f32; LANES]],
    at: usize,
) {
    let width = acc.len() / R;
    assert!(at + V <= width, "vectors of a row");
    let mut sums = [[_mm256_setzero_ps(); V]; R];
    for r in 0..R {
        for v in 0..V {
            sums[r][v] = _mm256_mul_ps(load(&acc[r * width + at + v]), _mm256_set1_ps(corrections[r]));
        }
    }
    let tokens = values.len() / width;
    let mut rows: [&[f32]; R] = [&[]; R];
    for (row, weights) in rows.iter_mut().zip(weights) {
        *row = &weights.0[start..start + tokens];
    }
    for token in 0..tokens {
        // SAFETY: `at + V <= width` and there are `tokens * width` vectors.
        let value = unsafe { values.get_unchecked(token * width + at..token * width + at + V) };
        for r in 0..R {
            // SAFETY: every row was cut to `tokens` elements.
            let weight = _mm256_set1_ps(unsafe { *rows[r].get_unchecked(token) });
            for v in 0..V {
                sums[r][v] = _mm256_fmadd_ps(weight, load(&value[v].0), sums[r][v]);
            }
        }
    }
    for r in 0..R {
        for v in 0..V {
            store(&mut acc[r * width + at + v], sums[r][v]);
        }
    }
}
