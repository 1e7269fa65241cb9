//! Attention on packed pages: store, decode, prefill.
//!
//! A query of head `h` sees keys and values of KV head `h / (num_qo_heads / num_kv_heads)` at the
//! positions that its kind of call and its window allow:
//!
//! ```text
//! s_j = sm_scale * <q, k_j>;  with a soft cap c: s_j = c * tanh(s_j / c)
//! lse = ln(sum_j exp(s_j) + exp(sink))                     natural logarithm; sink: if the layer has one
//! out = sum_j exp(s_j - lse) * v_j                         zeros where nothing is seen
//! ```
//!
//! | call | a query at position p sees |
//! |---|---|
//! | [`Cpu::decode`] | packed rows `0..=p` (`p = seq_len - 1`), its own included |
//! | [`Cpu::prefill`] | packed rows `0..context_len`, and the raw keys and values of the call up to its own |
//!
//! Results are the same bit for bit for any number of threads and whatever else is in the call: all
//! sums are cut at fixed positions ([`BLOCK_TOKENS`], [`SPLIT_TOKENS`]) and merged in order. Bytes of
//! pages and table entries outside a query's range are never read into a result. A NaN in a query or
//! in a row shows in the results that see it, and in no others.
//!
//! Scratch is independent of the context. A decode holds, per thread, the keys and values of one
//! block and the queries of one KV head; and, if it has too few rows for all threads, the larger of
//! [`MAX_PARTIALS`] and 8 per thread partial states of `gqa_group * (value_head_dim + 2)` floats. A
//! prefill holds, per thread, two blocks and the queries and accumulators of at most 192 query rows
//! (of one token's, if its KV head has more).
//!
//! ```
//! use turboquant::{
//!     attention::{AttentionParams, Cpu, DecodeRow, Pages, PagesMut, PrefillChunk},
//!     exec::Rayon,
//!     format::*,
//!     page::PageCodec,
//!     rows::RowCodec,
//! };
//! let format = CacheDtype::TurboQuant(Preset::FourBitNc).row_format(NativeDtype::Bf16);
//! let codec = PageCodec::new(RowCodec::new(format, 64, 64)?, 1, 16)?;
//! let mut slab = vec![0; 4 * codec.page_bytes()];
//! let (cpu, params) = (Cpu::new(&Rayon), AttentionParams::new(2, 0.125));
//!
//! // A prompt of 3 tokens attends to itself; its rows go to page 2.
//! let (queries, keys, values) = (vec![0.5; 3 * 2 * 64], vec![0.1; 3 * 64], vec![7.0; 3 * 64]);
//! let chunk =
//!     PrefillChunk { queries: &queries, keys: &keys, values: &values, block_table: &[], context_len: 0 };
//! let mut out = vec![0.0; queries.len()];
//! cpu.prefill(Pages { codec: &codec, slab: &slab }, &params, &chunk, &mut out)?;
//! assert!(out.iter().all(|x| (x - 7.0).abs() < 1e-5));
//! let pages = PagesMut { codec: &codec, slab: &mut slab };
//! let report = cpu.store(pages, &keys, &values, &[32, 33, 34])?;
//! assert!(report.is_clean());
//!
//! // A query at position 2 sees the three packed rows.
//! let row = DecodeRow { block_table: &[2], seq_len: 3 };
//! let (mut out, mut lse) = (vec![0.0; 2 * 64], vec![0.0; 2]);
//! let pages = Pages { codec: &codec, slab: &slab };
//! cpu.decode(pages, &params, &queries[..2 * 64], &[row], &mut out, Some(&mut lse))?;
//! assert!(out.iter().all(|x| (x - 7.0).abs() < 1e-3));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#[cfg(target_arch = "x86_64")]
mod avx2;
mod block;
mod decode;
mod kernels;
pub mod oracle;
mod prefill;
mod queries;
mod scalar;
mod softmax;
mod store;
mod work;

use std::ops::Range;

use crate::{exec::Executor, page::PageCodec, rows::Isa};

/// Tokens whose scores are taken together; blocks start at multiples of this (in a prefill, raw
/// tokens are counted from `context_len`).
pub const BLOCK_TOKENS: usize = 64;
/// Tokens after which a decode starts a new partial state, counted from position 0.
pub const SPLIT_TOKENS: usize = 512;
/// Partial states that a decode holds at a time, unless it runs on more than an eighth as many
/// threads.
pub const MAX_PARTIALS: usize = 64;

/// What a store, a decode or a prefill refuses. Nothing has been written then.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AttentionError {
    /// A slice of the wrong length.
    #[error("{what} has {got} elements where {expected} are needed")]
    Length {
        /// Which slice.
        what: &'static str,
        /// Elements needed.
        expected: usize,
        /// Elements given.
        got: usize,
    },
    /// Query heads that cannot share the KV heads evenly.
    #[error("{num_qo_heads} query heads cannot share {num_kv_heads} KV heads evenly")]
    Heads {
        /// Query heads.
        num_qo_heads: usize,
        /// KV heads.
        num_kv_heads: usize,
    },
    /// A window, soft cap or scale without meaning.
    #[error("{what} of {got} is not possible")]
    Parameter {
        /// Which parameter.
        what: &'static str,
        /// Its value.
        got: f64,
    },
    /// A slab that is no whole number of pages.
    #[error("a slab of {got} bytes is no multiple of the page's {page_bytes} bytes")]
    Slab {
        /// Bytes of a page.
        page_bytes: usize,
        /// Bytes of the slab.
        got: usize,
    },
    /// A slot outside the slab.
    #[error("token {token} is to be stored in slot {got}, but the slab has {num_slots} slots")]
    Slot {
        /// Index in the slot mapping.
        token: usize,
        /// The slot.
        got: i64,
        /// Slots of the slab.
        num_slots: usize,
    },
    /// A block table that ends before the sequence does.
    #[error("row {row}: {tokens} tokens need a block table of {needed} pages, it has {got}")]
    BlockTable {
        /// Row of the call.
        row: usize,
        /// Packed tokens of the sequence.
        tokens: usize,
        /// Entries needed.
        needed: usize,
        /// Entries given.
        got: usize,
    },
    /// A page id outside the slab.
    #[error("row {row}: entry {entry} of the block table is page {got}, but the slab has {num_pages} pages")]
    Page {
        /// Row of the call.
        row: usize,
        /// Index in the block table.
        entry: usize,
        /// The entry.
        got: i32,
        /// Pages of the slab.
        num_pages: usize,
    },
}

/// The pages of a layer, to read.
#[derive(Debug, Clone, Copy)]
pub struct Pages<'a> {
    /// Shape and rows.
    pub codec: &'a PageCodec,
    /// `[num_pages, page_bytes]`. Loads are fastest where it starts at a multiple of 64.
    pub slab: &'a [u8],
}

/// The pages of a layer, to write.
#[derive(Debug)]
pub struct PagesMut<'a> {
    /// Shape and rows.
    pub codec: &'a PageCodec,
    /// `[num_pages, page_bytes]`
    pub slab: &'a mut [u8],
}

/// What attention is, apart from the data.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionParams<'a> {
    /// Query heads.
    pub num_qo_heads: usize,
    /// Factor of the scores, usually `1 / sqrt(head_dim)`.
    pub sm_scale: f32,
    /// Tokens a query sees, its own included; `None` is all of them.
    pub window: Option<usize>,
    /// `s -> cap * tanh(s / cap)`.
    pub soft_cap: Option<f32>,
    /// `[num_qo_heads]`: logits that take part in the sum and have no value.
    pub sinks: Option<&'a [f32]>,
}

impl AttentionParams<'_> {
    /// Full causal attention without soft cap and sinks.
    pub fn new(num_qo_heads: usize, sm_scale: f32) -> Self {
        AttentionParams { num_qo_heads, sm_scale, window: None, soft_cap: None, sinks: None }
    }
}

/// One query token of a decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeRow<'a> {
    /// `block_table[position / page_size]` is the page of a position. Entries before the window and
    /// after the sequence may be anything.
    pub block_table: &'a [i32],
    /// Packed tokens that the query may see: its position + 1.
    pub seq_len: usize,
}

/// New tokens of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct PrefillChunk<'a> {
    /// `[num_tokens, num_qo_heads, key_head_dim]`
    pub queries: &'a [f32],
    /// `[num_tokens, num_kv_heads, key_head_dim]`
    pub keys: &'a [f32],
    /// `[num_tokens, num_kv_heads, value_head_dim]`
    pub values: &'a [f32],
    /// As [`DecodeRow::block_table`], for the tokens before the chunk.
    pub block_table: &'a [i32],
    /// Packed tokens before the chunk: the position of its first token.
    pub context_len: usize,
}

/// Runs attention on the CPU.
#[derive(Clone, Copy)]
pub struct Cpu<'a> {
    /// Whose threads do the work.
    pub exec: &'a dyn Executor,
    /// With which instructions.
    pub isa: Isa,
}

impl<'a> Cpu<'a> {
    /// On `exec`, with the best instructions of this machine.
    pub fn new(exec: &'a dyn Executor) -> Self {
        Cpu { exec, isa: Isa::detect() }
    }
}

/// Shape of a call, checked.
#[derive(Debug, Clone, Copy)]
struct Shape {
    num_qo_heads: usize,
    num_kv_heads: usize,
    /// Query heads of a KV head.
    gqa_group: usize,
    key_head_dim: usize,
    value_head_dim: usize,
    num_pages: usize,
}

impl Shape {
    fn new(pages: Pages<'_>, params: &AttentionParams<'_>) -> Result<Shape, AttentionError> {
        let num_kv_heads = pages.codec.num_kv_heads();
        let num_qo_heads = params.num_qo_heads;
        if num_qo_heads == 0 || !num_qo_heads.is_multiple_of(num_kv_heads) {
            return Err(AttentionError::Heads { num_qo_heads, num_kv_heads });
        }
        if params.window == Some(0) {
            return Err(AttentionError::Parameter { what: "a window", got: 0.0 });
        }
        if let Some(cap) = params.soft_cap
            && !(cap.is_finite() && cap > 0.0)
        {
            return Err(AttentionError::Parameter { what: "a soft cap", got: cap.into() });
        }
        if !params.sm_scale.is_finite() {
            return Err(AttentionError::Parameter { what: "a softmax scale", got: params.sm_scale.into() });
        }
        if let Some(sinks) = params.sinks {
            check_length("sinks", num_qo_heads, sinks.len())?;
        }
        Ok(Shape {
            num_qo_heads,
            num_kv_heads,
            gqa_group: num_qo_heads / num_kv_heads,
            key_head_dim: pages.codec.rows().key_head_dim(),
            value_head_dim: pages.codec.rows().value_head_dim(),
            num_pages: num_pages(pages.codec, pages.slab)?,
        })
    }
}

fn num_pages(codec: &PageCodec, slab: &[u8]) -> Result<usize, AttentionError> {
    let page_bytes = codec.page_bytes();
    if !slab.len().is_multiple_of(page_bytes) {
        return Err(AttentionError::Slab { page_bytes, got: slab.len() });
    }
    Ok(slab.len() / page_bytes)
}

fn check_length(what: &'static str, expected: usize, got: usize) -> Result<(), AttentionError> {
    if expected == got { Ok(()) } else { Err(AttentionError::Length { what, expected, got }) }
}

/// Checks that the table leads every position of `visible` to a page of the slab.
fn check_table(
    row: usize,
    table: &[i32],
    visible: Range<usize>,
    page_size: usize,
    num_pages: usize,
) -> Result<(), AttentionError> {
    if visible.is_empty() {
        return Ok(());
    }
    let needed = visible.end.div_ceil(page_size);
    if table.len() < needed {
        return Err(AttentionError::BlockTable { row, tokens: visible.end, needed, got: table.len() });
    }
    let first = visible.start / page_size;
    for (entry, &got) in table[..needed].iter().enumerate().skip(first) {
        if usize::try_from(got).is_err() || got as usize >= num_pages {
            return Err(AttentionError::Page { row, entry, got, num_pages });
        }
    }
    Ok(())
}

/// Positions before `end` that a query at `end - 1` sees.
fn visible(window: Option<usize>, end: usize) -> Range<usize> {
    window.map_or(0, |window| end.saturating_sub(window))..end
}
