//! The byte table of a slot: one KV head's key row and value row at one token, in vLLM's order.
//!
//! ```text
//! LloydMax key   [key codes | fp16 norm]
//! fp8 key        [one byte per element]
//! native key     [elements, little-endian]
//! Uniform value  [value codes | fp16 scale | fp16 minimum]
//! fp8, native    as for keys
//! slot           [key row][value row][0 or 1 pad byte, to an even size]
//! ```
//!
//! 4-bit codes: byte j holds code 2j in its low half and code 2j+1 in its high half. 3-bit codes:
//! eight codes make one 24-bit little-endian word, code i at bit 3i. fp16 fields are little-endian
//! and only byte-aligned.

use std::ops::Range;

use crate::{
    error::CodecError,
    format::{KeyFormat, RowFormat, ValueFormat},
};

/// Smallest width of a key or value row.
pub const MIN_HEAD_DIM: usize = 16;
/// Largest width of a key or value row.
pub const MAX_HEAD_DIM: usize = 576;

/// Every width a row can have, ascending.
pub fn head_dims() -> impl Iterator<Item = usize> {
    (MIN_HEAD_DIM..=MAX_HEAD_DIM).step_by(8)
}

/// Where each field of a slot lies, in bytes from the slot's start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowLayout {
    /// Elements of a key.
    pub key_head_dim: usize,
    /// Elements of a value.
    pub value_head_dim: usize,
    /// Packed key codes; the elements themselves for fp8 and native keys.
    pub key_codes: Range<usize>,
    /// Offset of the key's fp16 norm, where the format has one.
    pub norm: Option<usize>,
    /// Packed value codes; the elements themselves for fp8 and native values.
    pub value_codes: Range<usize>,
    /// Offset of the value's fp16 scale, where the format has one.
    pub scale: Option<usize>,
    /// Offset of the value's fp16 minimum (vLLM calls it "zero"), where the format has one.
    pub zero: Option<usize>,
    /// Bytes of the key row: codes and norm.
    pub key_row_bytes: usize,
    /// Bytes of the value row: codes, scale and minimum.
    pub value_row_bytes: usize,
    /// Bytes of a slot: both rows and the pad byte, if any.
    pub slot_bytes: usize,
}

impl RowLayout {
    /// The table of `format` at the given widths.
    ///
    /// # Errors
    /// Widths that are no multiple of 8 from 16 to 576, and codes of other than 3 or 4 bits.
    ///
    /// ```
    /// use turboquant::{format::{CacheDtype, NativeDtype, Preset}, layout::RowLayout};
    /// let format = CacheDtype::TurboQuant(Preset::FourBitNc).row_format(NativeDtype::Bf16);
    /// let layout = RowLayout::new(format, 128, 128)?;
    /// assert_eq!((layout.norm, layout.scale, layout.slot_bytes), (Some(64), Some(130), 134));
    /// # Ok::<(), turboquant::error::CodecError>(())
    /// ```
    pub fn new(format: RowFormat, key_head_dim: usize, value_head_dim: usize) -> Result<Self, CodecError> {
        check_head_dim("key", key_head_dim)?;
        check_head_dim("value", value_head_dim)?;
        let (key_code_bytes, has_norm) = match format.key {
            KeyFormat::Native(dtype) => (key_head_dim * dtype.bytes(), false),
            KeyFormat::Fp8 => (key_head_dim, false),
            KeyFormat::LloydMax { bits } => (packed_bytes("key", key_head_dim, bits)?, true),
        };
        let (value_code_bytes, has_pair) = match format.value {
            ValueFormat::Native(dtype) => (value_head_dim * dtype.bytes(), false),
            ValueFormat::Fp8 => (value_head_dim, false),
            ValueFormat::Uniform { bits } => (packed_bytes("value", value_head_dim, bits)?, true),
        };
        let key_row_bytes = key_code_bytes + if has_norm { 2 } else { 0 };
        let value_end = key_row_bytes + value_code_bytes;
        let value_row_bytes = value_code_bytes + if has_pair { 4 } else { 0 };
        Ok(RowLayout {
            key_head_dim,
            value_head_dim,
            key_codes: 0..key_code_bytes,
            norm: has_norm.then_some(key_code_bytes),
            value_codes: key_row_bytes..value_end,
            scale: has_pair.then_some(value_end),
            zero: has_pair.then_some(value_end + 2),
            key_row_bytes,
            value_row_bytes,
            slot_bytes: (key_row_bytes + value_row_bytes).next_multiple_of(2),
        })
    }

    /// Bytes of the pad at the slot's end: 0 or 1.
    pub fn pad_bytes(&self) -> usize {
        self.slot_bytes - self.key_row_bytes - self.value_row_bytes
    }
}

fn check_head_dim(side: &'static str, head_dim: usize) -> Result<(), CodecError> {
    if (MIN_HEAD_DIM..=MAX_HEAD_DIM).contains(&head_dim) && head_dim.is_multiple_of(8) {
        Ok(())
    } else {
        Err(CodecError::HeadDim { side, got: head_dim })
    }
}

fn packed_bytes(side: &'static str, head_dim: usize, bits: u8) -> Result<usize, CodecError> {
    match bits {
        3 | 4 => Ok(head_dim / 8 * usize::from(bits)),
        _ => Err(CodecError::Bits { side, got: bits }),
    }
}
