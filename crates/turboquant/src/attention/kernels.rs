//! The steps of an attention over one block, on the chosen instruction set.

#![expect(unsafe_code, reason = "functions that need instructions are called on a proof of them")]

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::avx2;
use super::{
    AttentionParams,
    block::{Block, BlockRow, KeyLanes, Keys, Tiles, ValueLanes, Values},
    queries::QueryRows,
    scalar,
};
use crate::{page::PageCodec, rows::Isa};

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

macro_rules! kernels {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $out:ty)?;)*) => {
        $($(#[$doc])* pub(super) fn $name(isa: Isa, $($arg: $type),*) $(-> $out)? {
            match isa {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: an `Avx2` exists only where the features were found that every function of
                // the module enables.
                Isa::Avx2(_) => unsafe { avx2::$name($($arg),*) },
                _ => scalar::$name($($arg),*),
            }
        })*
    };
}

kernels! {
    /// Widens a tile's keys, `[key_head_dim]` lanes of tokens.
    fn widen_keys(codec: &PageCodec, tile: &[u8], keys: &mut [KeyLanes]);

    /// Widens a tile's values, `[TILE_TOKENS, value_head_dim / 8]`.
    fn widen_values(codec: &PageCodec, tile: &[u8], values: &mut [ValueLanes]);

    /// Queries `[rows, key_head_dim]` times keys of which tokens `columns` are wanted.
    fn wide_scores(queries: &[f32], keys: &[KeyLanes], columns: Range<usize>, scores: &mut [BlockRow]);

    /// Turns products of queries and keys without their factors into weights `2^(score - max)`, zero
    /// outside of `visible`; brings `max` and `sum` up to date. Returns the factor that older sums of
    /// the row have to be multiplied by.
    fn softmax_step(
        scores: &mut BlockRow,
        factors: &BlockRow,
        visible: Range<usize>,
        scale: ScoreScale,
        max: &mut f32,
        sum: &mut f32,
    ) -> f32;

    /// [`accumulate`] for values in f32.
    fn wide_accumulate(
        weights: &[BlockRow],
        columns: Range<usize>,
        values: &[ValueLanes],
        corrections: &[f32],
        acc: &mut [f32],
    );
}

/// Products of query rows with a block's keys (without `factors`), of which tokens `columns` are
/// wanted; elsewhere anything.
pub(super) fn scores(
    isa: Isa,
    queries: QueryRows<'_>,
    block: &Block,
    columns: Range<usize>,
    out: &mut [BlockRow],
) {
    match &block.keys {
        Keys::Wide(keys) => wide_scores(isa, queries.floats, keys, columns, out),
        #[cfg(target_arch = "x86_64")]
        Keys::Words(proof, keys) => avx2::word_scores(*proof, queries, keys, columns, out),
    }
}

/// `acc = acc * correction + weights * values` for rows `[rows, value_head_dim]`; only tokens of
/// `columns` have weights.
pub(super) fn accumulate(
    isa: Isa,
    weights: &[BlockRow],
    columns: Range<usize>,
    block: &Block,
    corrections: &[f32],
    acc: &mut [f32],
) {
    match &block.values {
        Values::Wide(values) => wide_accumulate(isa, weights, columns, values, corrections, acc),
        #[cfg(target_arch = "x86_64")]
        Values::Words { proof, planes, fields } => {
            avx2::word_accumulate(*proof, weights, columns, planes, fields, corrections, acc);
        }
    }
}

/// Asks for the tiles' bytes ahead of their use.
pub(super) fn prefetch(tiles: &Tiles<'_>) {
    #[cfg(target_arch = "x86_64")]
    for tile in tiles.iter().flatten() {
        for line in tile.chunks(64) {
            // SAFETY: a prefetch reads nothing; every x86-64 machine has it.
            unsafe {
                std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(line.as_ptr().cast());
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = tiles;
}
