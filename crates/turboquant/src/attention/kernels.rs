//! The steps of an attention over one block, on the chosen instruction set.

#![expect(unsafe_code, reason = "functions that need instructions are called on a proof of them")]

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::avx2;
use super::{
    AttentionParams, Pages,
    block::{Block, KeyLanes, ScoreRow, Tiles, ValueLanes},
    coded::Coded,
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
    /// Widens a tile's keys: `keys[dim].0[token] * factors[token]` is the stored key.
    fn widen_keys(codec: &PageCodec, tile: &[u8], keys: &mut [KeyLanes], factors: &mut [f32; TILE_TOKENS]);

    /// Widens a tile's values, `[TILE_TOKENS, value_head_dim / 8]`.
    fn widen_values(codec: &PageCodec, tile: &[u8], values: &mut [ValueLanes]);

    /// Queries `[rows, key_head_dim]` times a block's keys.
    fn scores(queries: &[f32], keys: &[KeyLanes], factors: &ScoreRow, scores: &mut [ScoreRow]);

    /// Turns dot products into weights `2^(score - max)`, zero outside of `visible`; brings `max` and
    /// `sum` up to date. Returns the factor that older sums of the row have to be multiplied by.
    fn softmax_step(
        scores: &mut ScoreRow,
        visible: Range<usize>,
        scale: ScoreScale,
        max: &mut f32,
        sum: &mut f32,
    ) -> f32;

    /// `acc = acc * correction + weights * values` for rows `[rows, value_head_dim]`; only tokens of
    /// `columns` have weights and values.
    fn accumulate(
        weights: &[ScoreRow],
        columns: Range<usize>,
        values: &[ValueLanes],
        corrections: &[f32],
        acc: &mut [f32],
    );
}

/// Asks for the tiles' bytes ahead of their use.
pub(super) fn prefetch(tiles: &Tiles<'_>) {
    #[cfg(target_arch = "x86_64")]
    for tile in tiles.iter().flatten() {
        for line in tile.chunks(64) {
            // SAFETY: a prefetch reads nothing; every x86-64 machine has it.
            unsafe {
                std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(line.as_ptr().cast())
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = tiles;
}

/// Makes rotated queries `[rows, key_head_dim]` ready for [`packed_scores`].
pub(super) fn prepare_queries(isa: Isa, codec: &PageCodec, queries: &[f32], coded: &mut Coded) {
    #[cfg(target_arch = "x86_64")]
    if let (Isa::Avx2(_), Some(centroids)) = (isa, codec.centroids()) {
        // SAFETY: as in the macro.
        unsafe { avx2::code_queries(centroids, queries, coded) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (isa, codec, queries, coded);
}

/// Queries times the packed keys of a block, from codes where the instruction set can.
pub(super) fn packed_scores(
    isa: Isa,
    pages: Pages<'_>,
    tiles: &Tiles<'_>,
    queries: &[f32],
    coded: &mut Coded,
    block: &mut Block,
    out: &mut [ScoreRow],
) {
    #[cfg(target_arch = "x86_64")]
    if let (Isa::Avx2(_), Some(centroids)) = (isa, pages.codec.centroids()) {
        // SAFETY: as in the macro.
        unsafe { avx2::coded_scores(pages.codec, centroids, tiles, coded, out) }
        return;
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = coded;
    block.widen_keys(isa, pages, tiles);
    scores(isa, queries, &block.keys, &block.factors, out);
}

/// [`accumulate`] with the packed values of a block, from codes where the instruction set can.
#[expect(clippy::too_many_arguments, reason = "operands of one product")]
pub(super) fn packed_accumulate(
    isa: Isa,
    pages: Pages<'_>,
    tiles: &Tiles<'_>,
    seen: Range<usize>,
    weights: &[ScoreRow],
    corrections: &[f32],
    coded: &mut Coded,
    block: &mut Block,
    acc: &mut [f32],
) {
    #[cfg(target_arch = "x86_64")]
    if let (Isa::Avx2(_), crate::format::ValueFormat::Uniform { .. }) =
        (isa, pages.codec.rows().format().value)
    {
        // SAFETY: as in the macro.
        unsafe { avx2::coded_accumulate(pages.codec, tiles, seen, weights, corrections, coded, acc) }
        return;
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = coded;
    block.widen_values(isa, pages, tiles, seen.clone());
    accumulate(isa, weights, seen, &block.values, corrections, acc);
}
