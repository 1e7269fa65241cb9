//! The order of bytes in a page on a GPU, and the lossless way to vLLM's slots and back.
//!
//! A page takes the bytes of vLLM's page of the same tokens. The order is described, and the kernels
//! read it, in `cuda/layout.cuh`: units of 16 tokens of one head, each with its key codes, value codes
//! and fp16 fields, codes as the tensor cores take them.
//!
//! One number is not the slot's: the key norm is stored times a constant over the length of the
//! (rounded) codes, as a float of 5 exponent and 11 mantissa bits, which spares the kernels a reduction
//! per token. With its one mantissa bit more than fp16 no two norms of the same codes fall together, so
//! the way back is exact for every row an encoder makes with a norm up to [`GREATEST_EXACT_NORM`]. A row
//! that was not finite (norm NaN) keeps its meaning, not the NaN's payload.

use std::sync::Arc;

use half::f16;

use super::{
    params::odd_centroids,
    variant::{GpuRows, IoDtype, VariantError, check_page_size},
};
use crate::{codebook::Codebook, error::CodecError, format::RowFormat, layout::RowLayout};

/// Tokens of a unit.
pub const UNIT_TOKENS: usize = 16;
/// Up to this norm the folded norm gives the fp16 norm back, whatever the codes.
pub const GREATEST_EXACT_NORM: f32 = 7900.0;
/// Stored for a key that was not finite.
const FOLDED_NAN: u16 = 0xFFFF;

/// What a converter refuses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GpuPageError {
    /// A shape without kernels.
    #[error(transparent)]
    Variant(#[from] VariantError),
    /// A row that the codec does not know.
    #[error(transparent)]
    Codec(#[from] CodecError),
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

/// Bits of a code: where they stand in a section, which of the code's they are, how many.
#[derive(Debug, Clone, Copy)]
struct Piece {
    bit: usize,
    from: u32,
    count: u32,
}

/// Pages of one layer on a GPU.
#[derive(Debug, Clone)]
pub struct GpuPages {
    rows: GpuRows,
    layout: RowLayout,
    num_kv_heads: usize,
    page_size: usize,
    /// Odd integers of the codes; empty without Lloyd-Max keys.
    odd: Arc<[i32]>,
}

impl GpuPages {
    /// Pages of `page_size` tokens with `num_kv_heads` rows of `format` at `head_dim` per token.
    ///
    /// # Errors
    /// Shapes that no kernel serves.
    ///
    /// ```
    /// use turboquant::{cuda::{page::GpuPages, variant::IoDtype}, format::*};
    /// let format = CacheDtype::TurboQuant(Preset::FourBitNc).row_format(NativeDtype::Bf16);
    /// assert_eq!(GpuPages::new(format, 128, IoDtype::Bf16, 8, 16)?.page_bytes(), 16 * 8 * 134);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn new(
        format: RowFormat,
        head_dim: usize,
        io: IoDtype,
        num_kv_heads: usize,
        page_size: usize,
    ) -> Result<GpuPages, GpuPageError> {
        let rows = GpuRows::new(format, head_dim, io)?;
        check_page_size(page_size)?;
        let layout = RowLayout::new(format, head_dim, head_dim)?;
        let odd = match rows.key {
            3 => odd_centroids(&Codebook::shared(head_dim, 4)).into(),
            4 => odd_centroids(&Codebook::shared(head_dim, 3)).into(),
            _ => Arc::from([]),
        };
        Ok(GpuPages { rows, layout, num_kv_heads, page_size, odd })
    }

    /// The rows, to load kernels for.
    pub fn rows(&self) -> GpuRows {
        self.rows
    }

    /// Bytes of a page: `page_size * num_kv_heads * slot_bytes`.
    pub fn page_bytes(&self) -> usize {
        self.page_size * self.num_kv_heads * self.layout.slot_bytes
    }

    /// Rewrites vLLM's `[page_size, num_kv_heads, slot_bytes]` in the GPU's order.
    ///
    /// # Errors
    /// Buffers not of [`GpuPages::page_bytes`].
    pub fn slots_to_page(&self, slots: &[u8], page: &mut [u8]) -> Result<(), GpuPageError> {
        self.check_lengths(page.len(), slots.len())?;
        page.fill(0);
        for (i, slot) in slots.chunks_exact(self.layout.slot_bytes).enumerate() {
            let (token, head) = (i / self.num_kv_heads, i % self.num_kv_heads);
            let at = self.unit_offset(token, head);
            self.write_row(slot, &mut page[at..at + self.unit_bytes()], token % UNIT_TOKENS);
        }
        Ok(())
    }

    /// Inverse of [`GpuPages::slots_to_page`].
    ///
    /// # Errors
    /// As [`GpuPages::slots_to_page`].
    pub fn page_to_slots(&self, page: &[u8], slots: &mut [u8]) -> Result<(), GpuPageError> {
        self.check_lengths(page.len(), slots.len())?;
        for (i, slot) in slots.chunks_exact_mut(self.layout.slot_bytes).enumerate() {
            let (token, head) = (i / self.num_kv_heads, i % self.num_kv_heads);
            let at = self.unit_offset(token, head);
            slot.fill(0);
            self.read_row(&page[at..at + self.unit_bytes()], token % UNIT_TOKENS, slot);
        }
        Ok(())
    }

    fn check_lengths(&self, page: usize, slots: usize) -> Result<(), GpuPageError> {
        let expected = self.page_bytes();
        for (what, got) in [("page", page), ("slots", slots)] {
            if got != expected {
                return Err(GpuPageError::Length { what, expected, got });
            }
        }
        Ok(())
    }

    fn unit_bytes(&self) -> usize {
        UNIT_TOKENS * self.layout.slot_bytes
    }

    fn unit_offset(&self, token: usize, head: usize) -> usize {
        (token / UNIT_TOKENS * self.num_kv_heads + head) * self.unit_bytes()
    }

    fn key_bits(&self) -> usize {
        [16, 16, 8, 4, 3][usize::from(self.rows.key)]
    }

    fn value_bits(&self) -> usize {
        [16, 16, 8, 0, 0, 4, 3][usize::from(self.rows.value)]
    }

    /// Byte of field 0 of `token`; the next field of the token is 32 bytes on.
    fn field_offset(&self, token: usize) -> usize {
        let place = token % 8 / 2 * 4 + token / 8 * 2 + token % 2;
        self.value_section() + self.layout.value_codes.len() * UNIT_TOKENS + 2 * place
    }

    fn value_section(&self) -> usize {
        self.layout.key_codes.len() * UNIT_TOKENS
    }

    fn write_row(&self, slot: &[u8], unit: &mut [u8], token: usize) {
        let dims = self.rows.head_dim;
        let mut square = 0i64;
        for d in 0..dims {
            let code = bits(slot, self.layout.key_codes.start * 8 + d * self.key_bits(), self.key_bits());
            if let Some(odd) = self.odd.get(code as usize) {
                square += i64::from(odd * odd);
            }
            let code = if self.rows.key == 3 { sign_magnitude(code) } else { code };
            put(unit, &self.key_pieces(token, d), code);
            let code =
                bits(slot, self.layout.value_codes.start * 8 + d * self.value_bits(), self.value_bits());
            put(&mut unit[self.value_section()..], &self.value_pieces(token, d), code);
        }
        let mut at = self.field_offset(token);
        if let Some(norm) = self.layout.norm {
            let folded = self.fold(half_at(slot, norm), square);
            unit[at..at + 2].copy_from_slice(&folded.to_le_bytes());
            at += 2 * UNIT_TOKENS;
        }
        for field in [self.layout.scale, self.layout.zero].into_iter().flatten() {
            unit[at..at + 2].copy_from_slice(&slot[field..field + 2]);
            at += 2 * UNIT_TOKENS;
        }
    }

    fn read_row(&self, unit: &[u8], token: usize, slot: &mut [u8]) {
        let mut square = 0i64;
        for d in 0..self.rows.head_dim {
            let code = get(unit, &self.key_pieces(token, d));
            let code = if self.rows.key == 3 { from_sign_magnitude(code) } else { code };
            if let Some(odd) = self.odd.get(code as usize) {
                square += i64::from(odd * odd);
            }
            set_bits(slot, self.layout.key_codes.start * 8 + d * self.key_bits(), self.key_bits(), code);
            let code = get(&unit[self.value_section()..], &self.value_pieces(token, d));
            set_bits(
                slot,
                self.layout.value_codes.start * 8 + d * self.value_bits(),
                self.value_bits(),
                code,
            );
        }
        let mut at = self.field_offset(token);
        if let Some(norm) = self.layout.norm {
            let folded = u16::from_le_bytes([unit[at], unit[at + 1]]);
            slot[norm..norm + 2].copy_from_slice(&self.unfold(folded, square).to_le_bytes());
            at += 2 * UNIT_TOKENS;
        }
        for field in [self.layout.scale, self.layout.zero].into_iter().flatten() {
            slot[field..field + 2].copy_from_slice(&unit[at..at + 2]);
            at += 2 * UNIT_TOKENS;
        }
    }

    /// `norm * gain / |codes|` in 5 exponent and 11 mantissa bits, nearest even, saturating.
    fn fold(&self, norm: u16, square: i64) -> u16 {
        let norm = f16::from_bits(norm);
        if norm.is_nan() {
            return FOLDED_NAN;
        }
        let x = norm.to_f32() * norm_gain(self.rows.head_dim) / (square as f32).sqrt();
        // 2^-112 takes f32's exponent bias to 5 bits'; what falls below is subnormal in both
        let bits = (x * f32::from_bits((127 - 112) << 23)).to_bits();
        let rounded = (bits + 0x7FF + (bits >> 12 & 1)) >> 12;
        u16::try_from(rounded).unwrap_or(FOLDED_NAN)
    }

    /// The smallest norm that folds to `folded` or more: folding never falls.
    fn unfold(&self, folded: u16, square: i64) -> u16 {
        if folded == FOLDED_NAN {
            return f16::NAN.to_bits();
        }
        let (mut low, mut high) = (0, f16::INFINITY.to_bits());
        while low < high {
            let middle = (low + high) / 2;
            if self.fold(middle, square) < folded { low = middle + 1 } else { high = middle }
        }
        low
    }

    fn key_pieces(&self, token: usize, d: usize) -> [Piece; 2] {
        let (dims, words) = (self.rows.head_dim, self.rows.head_dim * self.key_bits() / 64);
        let (tile, g) = (token / 8, token % 8);
        let at = |word, t, bit| word_byte(words, word, 4 * g + t) * 8 + bit;
        let none = Piece { bit: 0, from: 0, count: 0 };
        match self.rows.key {
            3 => {
                if !dims.is_multiple_of(32) && d >= dims - 16 {
                    let bit = at(words - 1, d % 16 / 4, tile * 16 + d % 4 * 4);
                    return [Piece { bit, from: 0, count: 4 }, none];
                }
                let (word, t, e) = (d / 32 * 2 + tile, d % 32 / 8, d % 8);
                let sign = if e < 4 { 8 * e + 7 } else { 8 * (e - 4) + 3 };
                [
                    Piece { bit: at(word, t, 4 * e), from: 0, count: 3 },
                    Piece { bit: at(word, t, sign), from: 3, count: 1 },
                ]
            }
            4 => {
                let (block, step, t, e) = (d / 64, d % 64 / 32, d % 32 / 8, d % 8);
                let low = at(3 * block + step, t, tile * 16 + e % 4 * 4 + e / 4 * 2);
                let top = at(3 * block + 2, t, tile * 16 + e % 4 * 4 + step * 2 + e / 4);
                [Piece { bit: low, from: 0, count: 2 }, Piece { bit: top, from: 2, count: 1 }]
            }
            2 => [Piece { bit: at(d / 16 * 2 + tile, d % 16 / 4, d % 4 * 8), from: 0, count: 8 }, none],
            _ => {
                let bit = at(d / 16 * 4 + tile * 2 + d % 4 / 2, d % 16 / 4, d % 2 * 16);
                [Piece { bit, from: 0, count: 16 }, none]
            }
        }
    }

    fn value_pieces(&self, token: usize, d: usize) -> [Piece; 2] {
        let (dims, words) = (self.rows.head_dim, self.rows.head_dim * self.value_bits() / 64);
        let (high, t, half, g) = (token / 8, token % 8 / 2, token % 2, d % 8);
        let at = |word, bit| word_byte(words, word, 4 * g + t) * 8 + bit;
        let none = Piece { bit: 0, from: 0, count: 0 };
        match self.rows.value {
            5 if !dims.is_multiple_of(32) && d >= dims - 16 => {
                [Piece { bit: at(words - 1, half * 16 + high * 8 + d % 16 / 8 * 4), from: 0, count: 4 }, none]
            }
            5 => [Piece { bit: at(d / 32 * 2 + high, half * 16 + d % 32 / 8 * 4), from: 0, count: 4 }, none],
            6 => {
                let (c, x, y) = (d % 64 / 8, d / 64 * 3 + high, d / 64 * 3 + 2);
                match c {
                    0..3 => [Piece { bit: at(x, half * 16 + 3 * c), from: 0, count: 3 }, none],
                    3..5 => [Piece { bit: at(x, half * 16 + 9 + 3 * (c - 3)), from: 0, count: 3 }, none],
                    5..7 => {
                        [Piece { bit: at(y, half * 16 + high * 8 + 3 * (c - 5)), from: 0, count: 3 }, none]
                    }
                    _ => [
                        Piece { bit: at(x, half * 16 + 15), from: 0, count: 1 },
                        Piece { bit: at(y, half * 16 + high * 8 + 6), from: 1, count: 2 },
                    ],
                }
            }
            2 => [Piece { bit: at(d / 16 * 2 + high, (d % 16 / 8 * 2 + half) * 8), from: 0, count: 8 }, none],
            _ => [Piece { bit: at(d / 16 * 4 + high * 2 + d % 16 / 8, half * 16), from: 0, count: 16 }, none],
        }
    }
}

/// As in `layout.cuh`, which says why.
fn norm_gain(head_dim: usize) -> f32 {
    match head_dim {
        0..32 => 512.0,
        32..80 => 1024.0,
        80..128 => 1536.0,
        _ => 2048.0,
    }
}

/// Byte of word `word` of `lane` in a section of `words` words a lane.
fn word_byte(words: usize, word: usize, lane: usize) -> usize {
    let full = words / 4 * 4;
    if word < full {
        word / 4 * 512 + lane * 16 + word % 4 * 4
    } else if words - full >= 2 && word < full + 2 {
        full * 128 + lane * 8 + (word - full) * 4
    } else {
        (full + if words - full >= 2 { 2 } else { 0 }) * 128 + lane * 4
    }
}

/// 4-bit codes ascend from the most negative centroid; the kernels want sign and magnitude.
fn sign_magnitude(code: u32) -> u32 {
    if code >= 8 { code - 8 } else { 8 | (7 - code) }
}

fn from_sign_magnitude(code: u32) -> u32 {
    if code & 8 == 0 { code + 8 } else { 7 - (code & 7) }
}

fn half_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn bits(bytes: &[u8], first: usize, count: usize) -> u32 {
    (0..count).fold(0, |code, i| code | u32::from(bytes[(first + i) / 8] >> ((first + i) % 8) & 1) << i)
}

fn set_bits(bytes: &mut [u8], first: usize, count: usize, code: u32) {
    put(bytes, &[Piece { bit: first, from: 0, count: count as u32 }], code);
}

fn put(bytes: &mut [u8], pieces: &[Piece], code: u32) {
    for piece in pieces {
        for i in 0..piece.count {
            let at = piece.bit + i as usize;
            let bit = (code >> (piece.from + i) & 1) as u8;
            bytes[at / 8] = bytes[at / 8] & !(1 << (at % 8)) | bit << (at % 8);
        }
    }
}

fn get(bytes: &[u8], pieces: &[Piece]) -> u32 {
    pieces.iter().fold(0, |code, piece| code | bits(bytes, piece.bit, piece.count as usize) << piece.from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{CacheDtype, NativeDtype, Preset};

    /// Whatever the codes, no two fp16 norms up to the bound share a folded norm, and none saturates.
    #[test]
    fn folding_keeps_norms_apart() {
        for preset in [Preset::FourBitNc, Preset::ThreeBitNc] {
            let step = if preset == Preset::FourBitNc { 16 } else { 64 };
            for head_dim in (step..=256).step_by(step) {
                let format = CacheDtype::TurboQuant(preset).row_format(NativeDtype::Bf16);
                let pages = GpuPages::new(format, head_dim, IoDtype::Bf16, 1, 16).unwrap();
                let squares = pages.odd.iter().map(|odd| i64::from(odd * odd));
                let (least, most) = (squares.clone().min().unwrap(), squares.max().unwrap());
                let dims = head_dim as i64;
                for square in
                    [dims * least, most + (dims - 1) * least, dims * (least + most) / 2, dims * most]
                {
                    let mut last = None;
                    for norm in 0..=f16::from_f32(GREATEST_EXACT_NORM).to_bits() {
                        let folded = pages.fold(norm, square);
                        assert!(
                            last < Some(folded),
                            "norm {norm:#x} of head_dim {head_dim}, square {square}"
                        );
                        last = Some(folded);
                    }
                    assert!(last < Some(FOLDED_NAN), "head_dim {head_dim}, square {square}");
                }
            }
        }
    }
}
