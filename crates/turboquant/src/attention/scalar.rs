//! The reference of the attention kernels: f32, one element after the other.

use std::ops::Range;

use super::{
    block::{BlockRow, KeyLanes, ValueLanes, tiles_of},
    kernels::ScoreScale,
};
use crate::{
    layout::MAX_HEAD_DIM,
    page::{MAX_ROW_CODES, PageCodec, tile::TILE_TOKENS},
    rows::Isa,
};

pub(super) fn widen_keys(codec: &PageCodec, tile: &[u8], keys: &mut [KeyLanes]) {
    let (mut codes, mut row) = ([0; MAX_ROW_CODES], [0.0; MAX_HEAD_DIM]);
    let (codes, row) = (&mut codes[..codec.rows().key_codes_len()], &mut row[..keys.len()]);
    for token in 0..TILE_TOKENS {
        let meta = codec.take_key(tile, token, codes);
        codec.rows().key_from_codes(Isa::Scalar, codes, meta, row);
        for (lanes, x) in keys.iter_mut().zip(&*row) {
            lanes.0[token] = *x;
        }
    }
}

pub(super) fn widen_values(codec: &PageCodec, tile: &[u8], values: &mut [ValueLanes]) {
    let (mut codes, mut row) = ([0; MAX_ROW_CODES], [0.0; MAX_HEAD_DIM]);
    let row = &mut row[..codec.rows().value_head_dim()];
    let codes = &mut codes[..codec.rows().value_codes_len()];
    for (token, lanes) in values.chunks_exact_mut(row.len() / 8).enumerate() {
        let meta = codec.take_value(tile, token, codes);
        codec.rows().value_from_codes(Isa::Scalar, codes, meta, row);
        for (lanes, x) in lanes.iter_mut().zip(row.as_chunks().0) {
            lanes.0 = *x;
        }
    }
}

pub(super) fn wide_scores(
    queries: &[f32],
    keys: &[KeyLanes],
    columns: Range<usize>,
    scores: &mut [BlockRow],
) {
    let width = queries.len() / scores.len();
    for (query, scores) in queries.chunks_exact(width).zip(scores) {
        for j in tiles_of(&columns) {
            let mut tile = [0.0; TILE_TOKENS];
            for (q, keys) in query.iter().zip(&keys[j * width..]) {
                for (score, k) in tile.iter_mut().zip(keys.0) {
                    *score += q * k;
                }
            }
            scores.0[j * TILE_TOKENS..][..TILE_TOKENS].copy_from_slice(&tile);
        }
    }
}

pub(super) fn softmax_step(
    scores: &mut BlockRow,
    factors: &BlockRow,
    visible: Range<usize>,
    scale: ScoreScale,
    max: &mut f32,
    sum: &mut f32,
) -> f32 {
    scores.0[..visible.start].fill(0.0);
    scores.0[visible.end..].fill(0.0);
    let (seen, factors) = (&mut scores.0[visible.clone()], &factors.0[visible]);
    let mut new_max = *max;
    for (s, key_factor) in seen.iter_mut().zip(factors) {
        *s = match scale {
            ScoreScale::Plain(factor) => *s * key_factor * factor,
            ScoreScale::Capped { inner, outer } => (*s * key_factor * inner).tanh() * outer,
        };
        new_max = new_max.max(*s);
    }
    // Nothing seen yet, or only scores of -inf: any finite reference will do.
    let reference = if new_max == f32::NEG_INFINITY { 0.0 } else { new_max };
    let correction = (*max - reference).exp2();
    *sum *= correction;
    for s in seen {
        *s = (*s - reference).exp2();
        *sum += *s;
    }
    *max = new_max;
    correction
}

pub(super) fn wide_accumulate(
    weights: &[BlockRow],
    columns: Range<usize>,
    values: &[ValueLanes],
    corrections: &[f32],
    acc: &mut [f32],
) {
    let width = acc.len() / weights.len();
    for ((weights, correction), acc) in weights.iter().zip(corrections).zip(acc.chunks_exact_mut(width)) {
        for a in &mut *acc {
            *a *= correction;
        }
        for token in columns.clone() {
            let values = &values[token * width / 8..][..width / 8];
            for (acc, value) in acc.as_chunks_mut::<8>().0.iter_mut().zip(values) {
                for (a, v) in acc.iter_mut().zip(value.0) {
                    *a += weights.0[token] * v;
                }
            }
        }
    }
}
