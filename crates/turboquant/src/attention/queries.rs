//! Query rows, in the form that a block's keys are multiplied in.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::avx2;
use super::block::{Block, CHUNK_DIMS, Keys};
use crate::page::PageCodec;
use crate::rows::Isa;

/// Room for query rows.
#[derive(Debug)]
pub(super) struct Queries {
    /// `[rows, key_head_dim]`
    pub(super) floats: Vec<f32>,
    /// `[rows, key_head_dim / 2]` where keys are words: dimensions `2i` and `2i + 1` in the low and
    /// the high half.
    words: Vec<i32>,
    /// `[rows, chunks]`: what a word of 64 dimensions is worth.
    scales: Vec<f32>,
    key_head_dim: usize,
}

/// Some rows of [`Queries`].
#[derive(Debug, Clone, Copy)]
pub(super) struct QueryRows<'a> {
    pub(super) floats: &'a [f32],
    pub(super) words: &'a [i32],
    pub(super) scales: &'a [f32],
}

impl Queries {
    /// Room for `rows` rows that meet the keys of `block`.
    pub(super) fn new(rows: usize, key_head_dim: usize, block: &Block) -> Queries {
        let words = !matches!(block.keys, Keys::Wide(_));
        Queries {
            floats: vec![0.0; rows * key_head_dim],
            words: vec![0; if words { rows * key_head_dim / 2 } else { 0 }],
            scales: vec![0.0; if words { rows * key_head_dim.div_ceil(CHUNK_DIMS) } else { 0 }],
            key_head_dim,
        }
    }

    /// Takes the first `rows` rows from the model's basis to that of packed keys, and into their form.
    pub(super) fn meet_packed(&mut self, isa: Isa, codec: &PageCodec, rows: usize) {
        let floats = &mut self.floats[..rows * self.key_head_dim];
        for query in floats.chunks_exact_mut(self.key_head_dim) {
            codec.rows().rotate_query(isa, query);
        }
        #[cfg(target_arch = "x86_64")]
        if let (Isa::Avx2(proof), Some(centroids)) = (isa, codec.centroids()) {
            avx2::code_queries(
                proof,
                centroids,
                self.key_head_dim,
                floats,
                &mut self.words,
                &mut self.scales,
            );
        }
    }

    pub(super) fn rows(&self, rows: Range<usize>) -> QueryRows<'_> {
        let cut = |width: usize| rows.start * width..rows.end * width;
        let words = !self.words.is_empty();
        QueryRows {
            floats: &self.floats[cut(self.key_head_dim)],
            words: if words { &self.words[cut(self.key_head_dim / 2)] } else { &[] },
            scales: if words { &self.scales[cut(self.key_head_dim.div_ceil(CHUNK_DIMS))] } else { &[] },
        }
    }
}
