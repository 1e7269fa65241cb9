//! Decode on codes: keys as integer centroids and values as integer codes, never widened to f32.
//!
//! Scores: queries become words with a scale per 64 dimensions, chosen so that a sum of 64 products
//! with centroid words fits 32 bits; the sum is exact, the words are within about 1e-4 of a standard
//! deviation. A key's norm correction is taken from the same codes: the sum of the squared words.
//!
//! Values: a weight times the value's scale becomes a word relative to the block's largest; products
//! with codes are summed exactly over the block. The minima (`zero`) are a sum per head.
//!
//! This file has the operands; the arithmetic is in `avx2::coded_keys` and
//! `avx2::coded_values`.

use super::BLOCK_TOKENS;

/// Dimensions whose products are summed in 32 bits.
pub(super) const CHUNK_DIMS: usize = 64;
/// Vectors of 8 dimensions whose planes are unpacked at a time.
pub(super) const GROUPS: usize = 4;
/// Token pairs of a block.
pub(super) const PAIRS: usize = BLOCK_TOKENS / 2;

/// 16 words, as one vector.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(32))]
pub(super) struct Words(pub(super) [i16; 16]);

/// Weights of a block as pairs of words: tokens `2i` and `2i + 1` in the low and high half.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(32))]
pub(super) struct WeightPairs(pub(super) [i32; PAIRS]);

/// Operands of a decode, per thread.
#[derive(Debug)]
pub(super) struct Coded {
    /// `[rows, key_head_dim / 2]`: dimensions `2i` and `2i + 1` in the low and high half.
    pub(super) queries: Vec<i32>,
    /// `[rows, chunks]`: what a word of the query is worth.
    pub(super) query_scales: Vec<f32>,
    /// `[CHUNK_DIMS / 2]` steps of a tile's keys, tokens 0-7 and 8-15, pairs of dimensions.
    pub(super) keys: Vec<[Words; 2]>,
    /// `[rows]`
    pub(super) weights: Vec<WeightPairs>,
    /// `[rows]`: what a word of the weights is worth, and the sum of weight times minimum.
    pub(super) weight_scales: Vec<[f32; 2]>,
    /// `[GROUPS, PAIRS]` planes of a block's values.
    pub(super) planes: Vec<Words>,
}

impl Coded {
    pub(super) fn new(rows: usize, key_head_dim: usize) -> Coded {
        Coded {
            queries: vec![0; rows * key_head_dim / 2],
            query_scales: vec![0.0; rows * key_head_dim.div_ceil(CHUNK_DIMS)],
            keys: vec![[Words([0; 16]); 2]; CHUNK_DIMS / 2],
            weights: vec![WeightPairs([0; PAIRS]); rows],
            weight_scales: vec![[0.0; 2]; rows],
            planes: vec![Words([0; 16]); GROUPS * PAIRS],
        }
    }
}
