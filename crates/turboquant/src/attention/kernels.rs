//! The steps of an attention over one block, on every instruction set.

use std::ops::Range;

use super::{
    AttentionParams,
    block::{KeyLanes, ScoreRow, ValueLanes},
    scalar,
};
use crate::{
    page::{PageCodec, tile::TILE_TOKENS},
    rows::Isa,
};

/// From dot products to base-2 scores.
#[derive(Debug, Clone, Copy)]
pub(super) enum ScoreScale {
    /// `dot * factor`
    Plain(f32),
    /// `tanh(dot * inner) * outer`
    Capped { inner: f32, outer: f32 },
}

impl ScoreScale {
    pub(super) fn new(params: &AttentionParams<'_>) -> ScoreScale {
        use std::f32::consts::LOG2_E;
        match params.soft_cap {
            None => ScoreScale::Plain(params.sm_scale * LOG2_E),
            Some(cap) => ScoreScale::Capped { inner: params.sm_scale / cap, outer: cap * LOG2_E },
        }
    }
}

/// Widens a tile's keys: `keys[dim].0[token] * factors[token]` is the stored key.
pub(super) fn widen_keys(
    isa: Isa,
    codec: &PageCodec,
    tile: &[u8],
    keys: &mut [KeyLanes],
    factors: &mut [f32; TILE_TOKENS],
) {
    match isa {
        Isa::Scalar | Isa::Avx2(_) => scalar::widen_keys(codec, tile, keys, factors),
    }
}

/// Widens a tile's values, `[TILE_TOKENS, value_head_dim / 8]`.
pub(super) fn widen_values(isa: Isa, codec: &PageCodec, tile: &[u8], values: &mut [ValueLanes]) {
    match isa {
        Isa::Scalar | Isa::Avx2(_) => scalar::widen_values(codec, tile, values),
    }
}

/// Queries `[rows, key_head_dim]` times a block's keys.
pub(super) fn scores(
    isa: Isa,
    queries: &[f32],
    keys: &[KeyLanes],
    factors: &ScoreRow,
    scores: &mut [ScoreRow],
) {
    match isa {
        Isa::Scalar | Isa::Avx2(_) => scalar::scores(queries, keys, factors, scores),
    }
}

/// Turns dot products into weights `2^(score - max)`, zero outside of `visible`; brings `max` and
/// `sum` up to date. Returns the factor that older sums of the row have to be multiplied by.
pub(super) fn softmax_step(
    isa: Isa,
    scores: &mut ScoreRow,
    visible: Range<usize>,
    scale: ScoreScale,
    max: &mut f32,
    sum: &mut f32,
) -> f32 {
    match isa {
        Isa::Scalar | Isa::Avx2(_) => scalar::softmax_step(scores, visible, scale, max, sum),
    }
}

/// `acc = acc * correction + weights * values` for rows `[rows, value_head_dim]`; only tokens of
/// `columns` have weights and values.
pub(super) fn accumulate(
    isa: Isa,
    weights: &[ScoreRow],
    columns: Range<usize>,
    values: &[ValueLanes],
    corrections: &[f32],
    acc: &mut [f32],
) {
    match isa {
        Isa::Scalar | Isa::Avx2(_) => {
            let width = acc.len() / weights.len();
            for ((weights, correction), acc) in
                weights.iter().zip(corrections).zip(acc.chunks_exact_mut(width))
            {
                scalar::accumulate(weights, columns.clone(), values, *correction, acc);
            }
        }
    }
}
