//! The keys and values of one block of positions, in the form they are multiplied in.
//!
//! Codes are multiplied as 16-bit words where the instruction set can, everything else as f32:
//!
//! - Key words are integer centroids, pairs of dimensions side by side. Queries become words too, with
//!   a scale per 64 dimensions, chosen so that a sum of 64 products fits 32 bits: the sum is exact,
//!   the words are within 1e-4 standard deviations. A key's norm correction is taken from the same
//!   words.
//! - Value words are the codes themselves, pairs of tokens side by side. A weight times the value's
//!   scale becomes a word relative to the row's largest in the block; products with codes are summed
//!   exactly over the block. The minima (`zero`) are one sum per row.
//!
//! Words are chosen over f32 by measurement (`examples/attention_speed.rs`; Gaussian rows of 128
//! dimensions, 4096 tokens): a decode takes less than half the time, as a vector holds twice as many
//! and codes need no conversion, and the output's relative L2 error against f64 on the same rows is
//! 4e-5 where the logits have a standard deviation of 0.5, 8e-5 at 1, 2e-4 at 4. Four-bit rows
//! themselves cost 0.11 to 0.3.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::avx2;
use super::{BLOCK_TOKENS, Pages, kernels};
#[cfg(target_arch = "x86_64")]
use crate::{format::ValueFormat, rows::Avx2};
use crate::{
    page::{PageCodec, tile::TILE_TOKENS},
    rows::Isa,
};

pub(super) const BLOCK_TILES: usize = BLOCK_TOKENS / TILE_TOKENS;
/// Token pairs of a block.
pub(super) const BLOCK_PAIRS: usize = BLOCK_TOKENS / 2;
/// Dimensions whose products of words are summed in 32 bits.
pub(super) const CHUNK_DIMS: usize = 64;

/// One dimension of the keys of a tile.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct KeyLanes(pub(super) [f32; TILE_TOKENS]);

/// Eight consecutive elements of a value.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(32))]
pub(super) struct ValueLanes(pub(super) [f32; 8]);

/// 16 words, as one vector.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
#[repr(C, align(32))]
pub(super) struct Words(pub(super) [i16; 16]);

/// A number per token of a block: scores of a query row, later their exponentials; factors of rows.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct BlockRow(pub(super) [f32; BLOCK_TOKENS]);

/// The keys of a block. Tokens that were not filled in hold anything.
#[derive(Debug)]
pub(super) enum Keys {
    /// `[BLOCK_TILES, key_head_dim]`
    Wide(Vec<KeyLanes>),
    /// `[BLOCK_TILES, key_head_dim / 2]` pairs of dimensions; tokens 0-7 and 8-15 of the tile.
    #[cfg(target_arch = "x86_64")]
    Words(Avx2, Vec<[Words; 2]>),
}

/// The values of a block. Tokens that were not filled in hold zeros (words: zero factors).
#[derive(Debug)]
pub(super) enum Values {
    /// `[BLOCK_TOKENS, value_head_dim / 8]`
    Wide(Vec<ValueLanes>),
    /// `planes[group][pair]`, `[value_head_dim / 8, BLOCK_PAIRS]`: dimensions `8 * group..` of two
    /// tokens.
    #[cfg(target_arch = "x86_64")]
    Words { proof: Avx2, planes: Vec<Words>, fields: Box<Fields> },
}

impl Keys {
    fn wide(head_dim: usize) -> Keys {
        Keys::Wide(vec![KeyLanes([0.0; TILE_TOKENS]); BLOCK_TILES * head_dim])
    }

    fn packed(isa: Isa, codec: &PageCodec) -> Keys {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(proof) if codec.centroids().is_some() => {
                let words = vec![[Words([0; 16]); 2]; BLOCK_TILES * codec.rows().key_head_dim() / 2];
                Keys::Words(proof, words)
            }
            _ => Keys::wide(codec.rows().key_head_dim()),
        }
    }
}

impl Values {
    fn wide(head_dim: usize) -> Values {
        Values::Wide(vec![ValueLanes([0.0; 8]); BLOCK_TOKENS * head_dim / 8])
    }

    fn packed(isa: Isa, codec: &PageCodec) -> Values {
        match (isa, codec.rows().format().value) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2(proof), ValueFormat::Uniform { bits }) => Values::Words {
                proof,
                planes: vec![Words([0; 16]); codec.rows().value_head_dim() / 8 * BLOCK_PAIRS],
                fields: Box::new(Fields {
                    scales: BlockRow([0.0; BLOCK_TOKENS]),
                    zeros: BlockRow([0.0; BLOCK_TOKENS]),
                    middle: f32::from((1u8 << bits) - 1) / 2.0,
                }),
            },
            _ => Values::wide(codec.rows().value_head_dim()),
        }
    }
}

/// What a value's codes are multiplied by, and what is added.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
pub(super) struct Fields {
    pub(super) scales: BlockRow,
    pub(super) zeros: BlockRow,
    /// Middle of the codes' range.
    pub(super) middle: f32,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) keys: Keys,
    /// A key is what `keys` holds times this.
    pub(super) factors: BlockRow,
    pub(super) values: Values,
}

impl Block {
    /// A block for raw keys and values.
    pub(super) fn wide(key_head_dim: usize, value_head_dim: usize) -> Block {
        Block {
            keys: Keys::wide(key_head_dim),
            factors: BlockRow([1.0; BLOCK_TOKENS]),
            values: Values::wide(value_head_dim),
        }
    }

    /// A block for packed keys and values.
    pub(super) fn packed(isa: Isa, codec: &PageCodec) -> Block {
        Block {
            keys: Keys::packed(isa, codec),
            factors: BlockRow([1.0; BLOCK_TOKENS]),
            values: Values::packed(isa, codec),
        }
    }

    /// Takes over the keys of a block's tiles.
    pub(super) fn fill_keys(&mut self, isa: Isa, codec: &PageCodec, tiles: &Tiles<'_>) {
        let factors = self.factors.0.as_chunks_mut::<TILE_TOKENS>().0;
        match &mut self.keys {
            Keys::Wide(keys) => {
                let keys = keys.chunks_exact_mut(codec.rows().key_head_dim());
                for ((tile, keys), factors) in tiles.iter().zip(keys).zip(factors) {
                    if let Some(tile) = tile {
                        kernels::widen_keys(isa, codec, tile, keys);
                        factors.fill(1.0);
                    }
                }
            }
            #[cfg(target_arch = "x86_64")]
            Keys::Words(proof, keys) => {
                let keys = keys.chunks_exact_mut(codec.rows().key_head_dim() / 2);
                for ((tile, keys), factors) in tiles.iter().zip(keys).zip(factors) {
                    if let Some(tile) = tile {
                        avx2::unpack_keys(*proof, codec, tile, keys, factors);
                    }
                }
            }
        }
    }

    /// Takes over the values of `tokens` from a block's tiles.
    pub(super) fn fill_values(
        &mut self,
        isa: Isa,
        codec: &PageCodec,
        tiles: &Tiles<'_>,
        tokens: Range<usize>,
    ) {
        match &mut self.values {
            Values::Wide(values) => {
                let width = codec.rows().value_head_dim() / 8;
                for (tile, values) in tiles.iter().zip(values.chunks_exact_mut(TILE_TOKENS * width)) {
                    if let Some(tile) = tile {
                        kernels::widen_values(isa, codec, tile, values);
                    }
                }
                values[..tokens.start * width].fill(ValueLanes([0.0; 8]));
                values[tokens.end * width..].fill(ValueLanes([0.0; 8]));
            }
            #[cfg(target_arch = "x86_64")]
            Values::Words { proof, planes, fields } => {
                for (j, tile) in tiles.iter().enumerate() {
                    if let Some(tile) = tile {
                        avx2::unpack_values(*proof, codec, tile, j, planes, fields);
                    }
                }
                for row in [&mut fields.scales, &mut fields.zeros] {
                    row.0[..tokens.start].fill(0.0);
                    row.0[tokens.end..].fill(0.0);
                }
            }
        }
    }

    /// Takes over raw keys and values of the first `tokens` tokens; `row` gives a token's key and
    /// value. Only for a block made by [`Block::wide`].
    pub(super) fn fill_raw<'a>(&mut self, tokens: usize, row: impl Fn(usize) -> (&'a [f32], &'a [f32])) {
        let Block { keys: Keys::Wide(keys), values: Values::Wide(values), .. } = self else { return };
        let (key_width, value_width) = (keys.len() / BLOCK_TILES, values.len() / BLOCK_TOKENS);
        for token in 0..tokens {
            let (key, value) = row(token);
            let lanes = &mut keys[token / TILE_TOKENS * key_width..][..key_width];
            for (lanes, x) in lanes.iter_mut().zip(key) {
                lanes.0[token % TILE_TOKENS] = *x;
            }
            let lanes = &mut values[token * value_width..][..value_width];
            for (lanes, x) in lanes.iter_mut().zip(value.as_chunks().0) {
                lanes.0 = *x;
            }
        }
        values[tokens * value_width..].fill(ValueLanes([0.0; 8]));
    }

    pub(super) fn values_are_finite(&self) -> bool {
        match &self.values {
            Values::Wide(values) => values.iter().all(|lanes| lanes.0.iter().all(|x| x.is_finite())),
            #[cfg(target_arch = "x86_64")]
            Values::Words { fields, .. } => {
                fields.scales.0.iter().chain(&fields.zeros.0).all(|x| x.is_finite())
            }
        }
    }
}

/// Tiles that hold `tokens` of a block.
pub(super) fn tiles_of(tokens: &Range<usize>) -> Range<usize> {
    tokens.start / TILE_TOKENS..tokens.end.div_ceil(TILE_TOKENS)
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
