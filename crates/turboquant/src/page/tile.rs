//! Order of codes inside a tile: 16 consecutive tokens of one KV head.
//!
//! The decode kernel reads a tile's keys with tokens across the lanes and multiplies pairs of
//! dimensions, and its values with dimensions across the lanes and multiplies pairs of tokens; the
//! orders below are the ones in which its vectors come out of plain loads, masks and shifts.
//!
//! **Key codes.** A *step* is 32 bytes, one per (token, parity of the dimension), see `key_lane`;
//! it spans two dimensions of all 16 tokens.
//!
//! ```text
//! 4 bits: 32 bytes per 4 dims          low halves = step of dims 0,1; high halves = dims 2,3
//! 3 bits: 32 bytes per 8 dims, then    bits 0-2 = dims 0,1; 4-6 = dims 2,3; 3, 7 = top bits of dims 4,5 and 6,7
//!         16 bytes per 8 dims          a half byte per lane (low: lanes 0-15): low two bits of dims 4,5, of dims 6,7
//! ```
//!
//! **Value codes.** A *plane* is 16 codes, 8 dims x 2 tokens: lane `2 * dim + token % 2`. The 8
//! planes (token pairs) of 8 dims lie together:
//!
//! ```text
//! 4 bits: 2 x 16 words of 16 bits      word k, bits 4f.. = plane 4k + f
//! 3 bits: 16 words of 16 bits, then    bits 3p.. = plane p of 0-4; bit 15 = top bit of plane 7
//!         16 bytes (after all words)   bits 0-2 = plane 5; 3-5 = plane 6; 6-7 = low bits of plane 7
//! ```
//!
//! **Elements** (fp8, native): keys `[head_dim][16 tokens]`, values `[16 tokens][head_dim]`.

/// Tokens of a tile.
pub const TILE_TOKENS: usize = 16;

/// Lane of (token, even dimension) in a step; the odd dimension's is the next. Interleaving the low
/// halves of both 128-bit parts gives tokens 0-7 in order, the high halves tokens 8-15.
fn key_lane(token: usize) -> usize {
    (token >> 2 & 1) * 16 + (token >> 3) * 8 + (token & 3) * 2
}

/// Writes a token's key codes, one per byte, into a tile's key area.
pub(super) fn put_key_codes(bits: u8, area: &mut [u8], token: usize, codes: &[u8]) {
    let lane = key_lane(token);
    if bits == 4 {
        for (step, c) in area.chunks_exact_mut(32).zip(codes.chunks_exact(4)) {
            step[lane] = c[0] | c[2] << 4;
            step[lane + 1] = c[1] | c[3] << 4;
        }
        return;
    }
    let (wide, narrow) = area.split_at_mut(codes.len() / 8 * 32);
    let (half, shift) = (lane % 16, lane / 16 * 4);
    for ((wide, narrow), c) in
        wide.chunks_exact_mut(32).zip(narrow.chunks_exact_mut(16)).zip(codes.chunks_exact(8))
    {
        for j in 0..2 {
            let (a, b, c, d) = (c[j], c[2 + j], c[4 + j], c[6 + j]);
            wide[lane + j] = a | b << 4 | (c & 4) << 1 | (d & 4) << 5;
            let low = (c & 3) | (d & 3) << 2;
            narrow[half + j] = narrow[half + j] & !(15 << shift) | low << shift;
        }
    }
}

/// Inverse of [`put_key_codes`].
pub(super) fn take_key_codes(bits: u8, area: &[u8], token: usize, codes: &mut [u8]) {
    let lane = key_lane(token);
    if bits == 4 {
        for (step, c) in area.chunks_exact(32).zip(codes.chunks_exact_mut(4)) {
            let (even, odd) = (step[lane], step[lane + 1]);
            c.copy_from_slice(&[even & 15, odd & 15, even >> 4, odd >> 4]);
        }
        return;
    }
    let (wide, narrow) = area.split_at(codes.len() / 8 * 32);
    let (half, shift) = (lane % 16, lane / 16 * 4);
    for ((wide, narrow), c) in
        wide.chunks_exact(32).zip(narrow.chunks_exact(16)).zip(codes.chunks_exact_mut(8))
    {
        for j in 0..2 {
            let (wide, low) = (wide[lane + j], narrow[half + j] >> shift);
            c[j] = wide & 7;
            c[2 + j] = wide >> 4 & 7;
            c[4 + j] = low & 3 | wide >> 1 & 4;
            c[6 + j] = low >> 2 & 3 | wide >> 5 & 4;
        }
    }
}

/// Writes a token's value codes, one per byte, into a tile's value area.
pub(super) fn put_value_codes(bits: u8, area: &mut [u8], token: usize, codes: &[u8]) {
    let (plane, parity) = (token / 2, token % 2);
    if bits == 4 {
        let (at, shift) = (plane / 4 * 32 + parity * 2 + plane % 4 / 2, plane % 2 * 4);
        for (words, codes) in area.chunks_exact_mut(64).zip(codes.chunks_exact(8)) {
            for (i, code) in codes.iter().enumerate() {
                let byte = &mut words[at + 4 * i];
                *byte = *byte & !(15 << shift) | code << shift;
            }
        }
        return;
    }
    let (words, bytes) = area.split_at_mut(codes.len() / 8 * 32);
    for ((words, bytes), codes) in
        words.chunks_exact_mut(32).zip(bytes.chunks_exact_mut(16)).zip(codes.chunks_exact(8))
    {
        for (i, &code) in codes.iter().enumerate() {
            let (word_at, byte) = (4 * i + 2 * parity, &mut bytes[2 * i + parity]);
            let word = u16::from_le_bytes([words[word_at], words[word_at + 1]]);
            let word = match plane {
                0..=4 => word & !(7 << (3 * plane)) | u16::from(code) << (3 * plane),
                7 => word & 0x7FFF | u16::from(code >> 2) << 15,
                _ => word,
            };
            *byte = match plane {
                5 => *byte & !7 | code,
                6 => *byte & !(7 << 3) | code << 3,
                7 => *byte & 0x3F | code << 6,
                _ => *byte,
            };
            words[word_at..word_at + 2].copy_from_slice(&word.to_le_bytes());
        }
    }
}

/// Inverse of [`put_value_codes`].
pub(super) fn take_value_codes(bits: u8, area: &[u8], token: usize, codes: &mut [u8]) {
    let (plane, parity) = (token / 2, token % 2);
    if bits == 4 {
        let (at, shift) = (plane / 4 * 32 + parity * 2 + plane % 4 / 2, plane % 2 * 4);
        for (words, codes) in area.chunks_exact(64).zip(codes.chunks_exact_mut(8)) {
            for (i, code) in codes.iter_mut().enumerate() {
                *code = words[at + 4 * i] >> shift & 15;
            }
        }
        return;
    }
    let (words, bytes) = area.split_at(codes.len() / 8 * 32);
    for ((words, bytes), codes) in
        words.chunks_exact(32).zip(bytes.chunks_exact(16)).zip(codes.chunks_exact_mut(8))
    {
        for (i, code) in codes.iter_mut().enumerate() {
            let (word_at, byte) = (4 * i + 2 * parity, bytes[2 * i + parity]);
            let word = u16::from_le_bytes([words[word_at], words[word_at + 1]]);
            *code = match plane {
                0..=4 => (word >> (3 * plane)) as u8 & 7,
                5 => byte & 7,
                6 => byte >> 3 & 7,
                _ => byte >> 6 | (word >> 13) as u8 & 4,
            };
        }
    }
}

/// Writes a token's key elements of `width` bytes each: `[head_dim][16 tokens]`.
pub(super) fn put_key_elements(width: usize, area: &mut [u8], token: usize, elements: &[u8]) {
    for (column, element) in area.chunks_exact_mut(width * TILE_TOKENS).zip(elements.chunks_exact(width)) {
        column[token * width..][..width].copy_from_slice(element);
    }
}

/// Inverse of [`put_key_elements`].
pub(super) fn take_key_elements(width: usize, area: &[u8], token: usize, elements: &mut [u8]) {
    for (column, element) in area.chunks_exact(width * TILE_TOKENS).zip(elements.chunks_exact_mut(width)) {
        element.copy_from_slice(&column[token * width..][..width]);
    }
}
