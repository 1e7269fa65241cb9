//! The keys and values of one block of positions, widened to f32.

use std::ops::Range;

use super::{BLOCK_TOKENS, Pages, kernels};
use crate::{page::tile::TILE_TOKENS, rows::Isa};

pub(super) const BLOCK_TILES: usize = BLOCK_TOKENS / TILE_TOKENS;

/// One dimension of the keys of a tile.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct KeyLanes(pub(super) [f32; TILE_TOKENS]);

/// Eight consecutive elements of a value.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(32))]
pub(super) struct ValueLanes(pub(super) [f32; 8]);

/// Scores of a query row against a block, later their exponentials.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct ScoreRow(pub(super) [f32; BLOCK_TOKENS]);

/// Widened keys and values. Tokens that were not filled in hold zeros as values and anything as keys.
#[derive(Debug)]
pub(super) struct Block {
    /// `[BLOCK_TILES, key_head_dim]`; a key is `lanes * factor`.
    pub(super) keys: Vec<KeyLanes>,
    /// `[BLOCK_TOKENS]`
    pub(super) factors: ScoreRow,
    /// `[BLOCK_TOKENS, value_head_dim / 8]`
    pub(super) values: Vec<ValueLanes>,
}

impl Block {
    pub(super) fn new(key_head_dim: usize, value_head_dim: usize) -> Block {
        Block {
            keys: vec![KeyLanes([0.0; TILE_TOKENS]); BLOCK_TILES * key_head_dim],
            factors: ScoreRow([1.0; BLOCK_TOKENS]),
            values: vec![ValueLanes([0.0; 8]); BLOCK_TOKENS * value_head_dim / 8],
        }
    }

    /// Widens the keys of `tokens` from a block's tiles.
    pub(super) fn widen_keys(&mut self, isa: Isa, pages: Pages<'_>, tiles: &Tiles<'_>) {
        let width = pages.codec.rows().key_head_dim();
        for ((tile, keys), factors) in
            tiles.iter().zip(self.keys.chunks_exact_mut(width)).zip(self.factors.0.as_chunks_mut().0)
        {
            if let Some(tile) = tile {
                kernels::widen_keys(isa, pages.codec, tile, keys, factors);
            }
        }
    }

    /// Widens the values of `tokens` from a block's tiles; the other tokens' become zeros.
    pub(super) fn widen_values(
        &mut self,
        isa: Isa,
        pages: Pages<'_>,
        tiles: &Tiles<'_>,
        tokens: Range<usize>,
    ) {
        let width = pages.codec.rows().value_head_dim() / 8;
        for (j, (tile, values)) in
            tiles.iter().zip(self.values.chunks_exact_mut(TILE_TOKENS * width)).enumerate()
        {
            if let Some(tile) = tile {
                kernels::widen_values(isa, pages.codec, tile, values);
            }
            let filled = within_tile(j, tokens.clone());
            values[..filled.start * width].fill(ValueLanes([0.0; 8]));
            values[filled.end * width..].fill(ValueLanes([0.0; 8]));
        }
    }

    /// Takes over raw keys and values of up to [`BLOCK_TOKENS`] tokens; the others' values become
    /// zeros. `row` gives a token's key and value.
    pub(super) fn copy_raw<'a>(&mut self, tokens: usize, row: impl Fn(usize) -> (&'a [f32], &'a [f32])) {
        let key_width = self.keys.len() / BLOCK_TILES;
        let value_width = self.values.len() / BLOCK_TOKENS;
        self.factors.0.fill(1.0);
        for token in 0..tokens {
            let (key, value) = row(token);
            let lanes = &mut self.keys[token / TILE_TOKENS * key_width..][..key_width];
            for (lanes, x) in lanes.iter_mut().zip(key) {
                lanes.0[token % TILE_TOKENS] = *x;
            }
            let lanes = &mut self.values[token * value_width..][..value_width];
            for (lanes, x) in lanes.iter_mut().zip(value.as_chunks().0) {
                lanes.0 = *x;
            }
        }
        self.values[tokens * value_width..].fill(ValueLanes([0.0; 8]));
    }

    pub(super) fn values_are_finite(&self) -> bool {
        self.values.iter().all(|lanes| lanes.0.iter().all(|x| x.is_finite()))
    }
}

/// The part of `tokens` (of a block) that lies in tile `j`, counted from the tile's start.
pub(super) fn within_tile(j: usize, tokens: Range<usize>) -> Range<usize> {
    let local = |token: usize| token.saturating_sub(j * TILE_TOKENS).min(TILE_TOKENS);
    local(tokens.start)..local(tokens.end)
}

/// Tiles of a block; None where no visible token lies.
pub(super) type Tiles<'a> = [Option<&'a [u8]>; BLOCK_TILES];

/// The tiles of KV head `head` in the block that starts at position `start`. `visible` are positions
/// that the table was checked for.
pub(super) fn tiles<'a>(
    pages: Pages<'a>,
    table: &[i32],
    head: usize,
    start: usize,
    visible: &Range<usize>,
) -> Tiles<'a> {
    let (page_size, bytes) = (pages.codec.page_size(), pages.codec.tile().bytes());
    std::array::from_fn(|j| {
        let first = start + j * TILE_TOKENS;
        if first >= visible.end || first + TILE_TOKENS <= visible.start {
            return None;
        }
        let at = pages.codec.tile_offset(table[first / page_size] as u32, head, first % page_size) as usize;
        Some(&pages.slab[at..at + bytes])
    })
}
