//! Packed pages: where the rows of `page_size` tokens of one layer lie.
//!
//! ```text
//! page    [num_kv_heads][page_size / 16] tiles
//! tile    [key codes | 16 fp16 norms | value codes | 16 fp16 scales | 16 fp16 minima | 16 pads]
//! ```
//!
//! A tile holds 16 consecutive tokens of one KV head in 16 x `slot_bytes` bytes; fields that the row
//! format lacks are absent. The order of codes inside a tile is described in [`tile`]. A page has
//! exactly the bytes of vLLM's page of the same tokens, and [`PageCodec::page_to_slots`] and
//! [`PageCodec::slots_to_page`] translate without loss, whatever the bytes are.
//!
//! Page `p` starts at byte `p * page_bytes` of the layer's slab, in 64 bits.

mod centroids;
pub mod tile;

use std::{ops::Range, sync::Arc};

use half::f16;

use crate::{
    format::{KeyFormat, ValueFormat},
    layout::MAX_HEAD_DIM,
    rows::{self, Isa, KeyMeta, RowCodec, ValueMeta},
};
pub(crate) use centroids::IntegerCentroids;
use tile::TILE_TOKENS;

/// Room for one row of any format: codes one per byte, or the elements' bytes.
pub(crate) const MAX_ROW_CODES: usize = 4 * MAX_HEAD_DIM;

/// A page shape or a buffer that does not fit it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PageError {
    /// The number of tokens of a page.
    #[error("a page of {got} tokens cannot be made; a positive multiple of 16 is needed")]
    PageSize {
        /// Tokens asked for.
        got: usize,
    },
    /// A layer without KV heads.
    #[error("a page needs at least one KV head")]
    NoKvHeads,
    /// A page too large to address.
    #[error("a page of {page_size} tokens and {num_kv_heads} KV heads has too many bytes")]
    TooLarge {
        /// Tokens asked for.
        page_size: usize,
        /// Heads asked for.
        num_kv_heads: usize,
    },
    /// A buffer of another length than the page.
    #[error("{what} of {got} bytes where {expected} bytes are needed")]
    Length {
        /// "page" or "slots".
        what: &'static str,
        /// Bytes needed.
        expected: usize,
        /// Bytes given.
        got: usize,
    },
}

/// Where the fields of a tile lie, in bytes from its start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TileLayout {
    pub(crate) key_codes: Range<usize>,
    pub(crate) norms: Option<usize>,
    pub(crate) value_codes: Range<usize>,
    pub(crate) scales: Option<usize>,
    pub(crate) zeros: Option<usize>,
    pub(crate) pads: Range<usize>,
}

impl TileLayout {
    fn new(rows: &RowCodec) -> TileLayout {
        let layout = rows.layout();
        let of = |bytes: usize| bytes * TILE_TOKENS;
        TileLayout {
            key_codes: 0..of(layout.key_codes.len()),
            norms: layout.norm.map(of),
            value_codes: of(layout.value_codes.start)..of(layout.value_codes.end),
            scales: layout.scale.map(of),
            zeros: layout.zero.map(of),
            pads: of(layout.key_row_bytes + layout.value_row_bytes)..of(layout.slot_bytes),
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.pads.end
    }
}

/// The rows of one layer and their places in its pages.
#[derive(Debug, Clone)]
pub struct PageCodec {
    rows: RowCodec,
    num_kv_heads: usize,
    page_size: usize,
    tile: TileLayout,
    centroids: Option<Arc<IntegerCentroids>>,
}

impl PageCodec {
    /// Pages of `page_size` tokens with `num_kv_heads` rows of `rows` per token.
    ///
    /// # Errors
    /// A `page_size` that is no positive multiple of 16, no KV heads, or a page beyond 2^31 bytes.
    ///
    /// ```
    /// use turboquant::{format::*, page::PageCodec, rows::RowCodec};
    /// let format = CacheDtype::TurboQuant(Preset::FourBitNc).row_format(NativeDtype::Bf16);
    /// let pages = PageCodec::new(RowCodec::new(format, 128, 128)?, 8, 16)?;
    /// assert_eq!(pages.page_bytes(), 16 * 8 * 134);
    /// assert_eq!(pages.page_offset(250_407), 4_294_980_864);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn new(rows: RowCodec, num_kv_heads: usize, page_size: usize) -> Result<Self, PageError> {
        if page_size == 0 || !page_size.is_multiple_of(TILE_TOKENS) {
            return Err(PageError::PageSize { got: page_size });
        }
        if num_kv_heads == 0 {
            return Err(PageError::NoKvHeads);
        }
        let bytes = page_size.checked_mul(num_kv_heads).and_then(|n| n.checked_mul(rows.layout().slot_bytes));
        if bytes.is_none_or(|bytes| bytes > 1 << 31) {
            return Err(PageError::TooLarge { page_size, num_kv_heads });
        }
        let tile = TileLayout::new(&rows);
        let centroids = rows.codebook().map(|codebook| Arc::new(IntegerCentroids::new(codebook)));
        Ok(PageCodec { rows, num_kv_heads, page_size, tile, centroids })
    }

    /// The rows.
    pub fn rows(&self) -> &RowCodec {
        &self.rows
    }

    /// Rows per token.
    pub fn num_kv_heads(&self) -> usize {
        self.num_kv_heads
    }

    /// Tokens of a page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Bytes of a page: `page_size * num_kv_heads * slot_bytes`.
    pub fn page_bytes(&self) -> usize {
        self.page_size * self.num_kv_heads * self.rows.layout().slot_bytes
    }

    /// Byte of a slab at which page `page` starts.
    pub fn page_offset(&self, page: u32) -> u64 {
        u64::from(page) * self.page_bytes() as u64
    }

    /// Byte of a slab at which the tile of KV head `head` that holds `token` (of a page) starts.
    pub fn tile_offset(&self, page: u32, head: usize, token: usize) -> u64 {
        debug_assert!(head < self.num_kv_heads && token < self.page_size, "place outside the page");
        let tile = head * (self.page_size / TILE_TOKENS) + token / TILE_TOKENS;
        self.page_offset(page) + (tile * self.tile.bytes()) as u64
    }

    /// Rewrites a page in vLLM's order, `[page_size, num_kv_heads, slot_bytes]`.
    ///
    /// # Errors
    /// `page` or `slots` not of [`PageCodec::page_bytes`].
    pub fn page_to_slots(&self, page: &[u8], slots: &mut [u8]) -> Result<(), PageError> {
        self.check_lengths(page.len(), slots.len())?;
        let slot_bytes = self.rows.layout().slot_bytes;
        for (i, slot) in slots.chunks_exact_mut(slot_bytes).enumerate() {
            let (token, head) = (i / self.num_kv_heads, i % self.num_kv_heads);
            let at = self.tile_offset(0, head, token) as usize;
            self.read_slot(&page[at..at + self.tile.bytes()], token % TILE_TOKENS, slot);
        }
        Ok(())
    }

    /// Inverse of [`PageCodec::page_to_slots`].
    ///
    /// # Errors
    /// As [`PageCodec::page_to_slots`].
    pub fn slots_to_page(&self, slots: &[u8], page: &mut [u8]) -> Result<(), PageError> {
        self.check_lengths(page.len(), slots.len())?;
        let slot_bytes = self.rows.layout().slot_bytes;
        for (i, slot) in slots.chunks_exact(slot_bytes).enumerate() {
            let (token, head) = (i / self.num_kv_heads, i % self.num_kv_heads);
            let at = self.tile_offset(0, head, token) as usize;
            self.write_slot(slot, &mut page[at..at + self.tile.bytes()], token % TILE_TOKENS);
        }
        Ok(())
    }

    fn check_lengths(&self, page: usize, slots: usize) -> Result<(), PageError> {
        let expected = self.page_bytes();
        for (what, got) in [("page", page), ("slots", slots)] {
            if got != expected {
                return Err(PageError::Length { what, expected, got });
            }
        }
        Ok(())
    }

    pub(crate) fn tile(&self) -> &TileLayout {
        &self.tile
    }

    /// The key centroids as words; None for fp8 and native keys.
    pub(crate) fn centroids(&self) -> Option<&IntegerCentroids> {
        self.centroids.as_deref()
    }

    fn read_slot(&self, tile: &[u8], token: usize, slot: &mut [u8]) {
        let (layout, format) = (self.rows.layout(), self.rows.format());
        let mut codes = [0; MAX_ROW_CODES];
        let key = &mut codes[..self.rows.key_codes_len()];
        let meta = self.take_key(tile, token, key);
        match format.key {
            KeyFormat::LloydMax { bits } => {
                rows::pack_codes(Isa::Scalar, bits, key, &mut slot[layout.key_codes.clone()]);
            }
            KeyFormat::Fp8 | KeyFormat::Native(_) => slot[layout.key_codes.clone()].copy_from_slice(key),
        }
        put_f16(slot, layout.norm, meta.norm);
        let value = &mut codes[..self.rows.value_codes_len()];
        let meta = self.take_value(tile, token, value);
        match format.value {
            ValueFormat::Uniform { bits } => {
                rows::pack_codes(Isa::Scalar, bits, value, &mut slot[layout.value_codes.clone()]);
            }
            ValueFormat::Fp8 | ValueFormat::Native(_) => {
                slot[layout.value_codes.clone()].copy_from_slice(value)
            }
        }
        put_f16(slot, layout.scale, meta.scale);
        put_f16(slot, layout.zero, meta.zero);
        let pad = layout.pad_bytes();
        slot[layout.slot_bytes - pad..].copy_from_slice(&tile[self.tile.pads.clone()][token * pad..][..pad]);
    }

    fn write_slot(&self, slot: &[u8], tile: &mut [u8], token: usize) {
        let (layout, format) = (self.rows.layout(), self.rows.format());
        let mut codes = [0; MAX_ROW_CODES];
        let key = &mut codes[..self.rows.key_codes_len()];
        match format.key {
            KeyFormat::LloydMax { bits } => {
                rows::unpack_codes(Isa::Scalar, bits, &slot[layout.key_codes.clone()], key);
            }
            KeyFormat::Fp8 | KeyFormat::Native(_) => key.copy_from_slice(&slot[layout.key_codes.clone()]),
        }
        self.put_key(tile, token, key, KeyMeta { norm: take_f16(slot, layout.norm, f16::ONE) });
        let value = &mut codes[..self.rows.value_codes_len()];
        match format.value {
            ValueFormat::Uniform { bits } => {
                rows::unpack_codes(Isa::Scalar, bits, &slot[layout.value_codes.clone()], value);
            }
            ValueFormat::Fp8 | ValueFormat::Native(_) => {
                value.copy_from_slice(&slot[layout.value_codes.clone()])
            }
        }
        let meta = ValueMeta {
            scale: take_f16(slot, layout.scale, f16::ONE),
            zero: take_f16(slot, layout.zero, f16::ZERO),
        };
        self.put_value(tile, token, value, meta);
        let pad = layout.pad_bytes();
        tile[self.tile.pads.clone()][token * pad..][..pad].copy_from_slice(&slot[layout.slot_bytes - pad..]);
    }

    /// Writes a key as [`RowCodec::encode_key`] gives it at `token` (0..16) of a tile.
    pub(crate) fn put_key(&self, tile: &mut [u8], token: usize, codes: &[u8], meta: KeyMeta) {
        let area = &mut tile[self.tile.key_codes.clone()];
        match self.rows.format().key {
            KeyFormat::LloydMax { bits } => tile::put_key_codes(bits, area, token, codes),
            KeyFormat::Fp8 => tile::put_key_elements(1, area, token, codes),
            KeyFormat::Native(dtype) => tile::put_key_elements(dtype.bytes(), area, token, codes),
        }
        put_f16(tile, self.tile.norms.map(|at| at + 2 * token), meta.norm);
    }

    /// Inverse of [`PageCodec::put_key`].
    pub(crate) fn take_key(&self, tile: &[u8], token: usize, codes: &mut [u8]) -> KeyMeta {
        let area = &tile[self.tile.key_codes.clone()];
        match self.rows.format().key {
            KeyFormat::LloydMax { bits } => tile::take_key_codes(bits, area, token, codes),
            KeyFormat::Fp8 => tile::take_key_elements(1, area, token, codes),
            KeyFormat::Native(dtype) => tile::take_key_elements(dtype.bytes(), area, token, codes),
        }
        KeyMeta { norm: take_f16(tile, self.tile.norms.map(|at| at + 2 * token), f16::ONE) }
    }

    /// Writes a value as [`RowCodec::encode_value`] gives it at `token` (0..16) of a tile.
    pub(crate) fn put_value(&self, tile: &mut [u8], token: usize, codes: &[u8], meta: ValueMeta) {
        let area = &mut tile[self.tile.value_codes.clone()];
        match self.rows.format().value {
            ValueFormat::Uniform { bits } => tile::put_value_codes(bits, area, token, codes),
            ValueFormat::Fp8 | ValueFormat::Native(_) => {
                area[token * codes.len()..][..codes.len()].copy_from_slice(codes);
            }
        }
        put_f16(tile, self.tile.scales.map(|at| at + 2 * token), meta.scale);
        put_f16(tile, self.tile.zeros.map(|at| at + 2 * token), meta.zero);
    }

    /// Inverse of [`PageCodec::put_value`].
    pub(crate) fn take_value(&self, tile: &[u8], token: usize, codes: &mut [u8]) -> ValueMeta {
        let area = &tile[self.tile.value_codes.clone()];
        match self.rows.format().value {
            ValueFormat::Uniform { bits } => tile::take_value_codes(bits, area, token, codes),
            ValueFormat::Fp8 | ValueFormat::Native(_) => {
                codes.copy_from_slice(&area[token * codes.len()..][..codes.len()]);
            }
        }
        ValueMeta {
            scale: take_f16(tile, self.tile.scales.map(|at| at + 2 * token), f16::ONE),
            zero: take_f16(tile, self.tile.zeros.map(|at| at + 2 * token), f16::ZERO),
        }
    }
}

fn put_f16(bytes: &mut [u8], at: Option<usize>, x: f16) {
    if let Some(at) = at {
        bytes[at..at + 2].copy_from_slice(&x.to_le_bytes());
    }
}

fn take_f16(bytes: &[u8], at: Option<usize>, absent: f16) -> f16 {
    at.map_or(absent, |at| f16::from_le_bytes([bytes[at], bytes[at + 1]]))
}
