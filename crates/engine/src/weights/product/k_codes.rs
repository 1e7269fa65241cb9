//! Blocks of 256 weights in eight units with scales of their own: Q4_K, Q5_K, Q6_K.

use std::arch::x86_64::{
    __m256i, _mm_cvtsi32_si128, _mm256_and_si256, _mm256_or_si256, _mm256_set1_epi16, _mm256_slli_epi16,
    _mm256_srl_epi16, _mm256_sub_epi16,
};

use candle_core::quantized::k_quants::{BlockQ4K, BlockQ5K, BlockQ6K};
use half::f16;

use super::fixed::{Codes, Second, widened};

/// 16 bytes as 16-bit integers, shifted down by `shift` and masked.
///
/// # Safety
/// 16 bytes can be read.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn bits(at: *const u8, shift: usize, mask: i16) -> __m256i {
    // SAFETY: the caller's promise.
    let bytes = unsafe { widened(at) };
    _mm256_and_si256(_mm256_srl_epi16(bytes, _mm_cvtsi32_si128(shift as i32)), _mm256_set1_epi16(mask))
}

/// `N` bytes at `offset` of a block.
///
/// # Safety
/// The block has them.
#[inline]
unsafe fn bytes<T, const N: usize>(block: &T, offset: usize) -> [u8; N] {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::from_ref(block).cast::<u8>().add(offset).cast::<[u8; N]>().read_unaligned() }
}

/// The pairs of Q4_K and Q5_K, `[d f16][dmin f16][12 bytes of 8 scales and 8 minima of 6 bits]`.
///
/// # Safety
/// The blocks of `row` begin so.
#[inline]
unsafe fn six_bit_pairs<T>(row: &[T], pairs: &mut [f32]) {
    for (block, pairs) in row.iter().zip(pairs.as_chunks_mut::<16>().0) {
        // SAFETY: the caller's promise.
        let (d, dmin, packed): (f32, f32, [u8; 12]) = unsafe {
            (
                f16::from_le_bytes(bytes(block, 0)).to_f32(),
                f16::from_le_bytes(bytes(block, 2)).to_f32(),
                bytes(block, 4),
            )
        };
        let word =
            |at: usize| u32::from_le_bytes([packed[at], packed[at + 1], packed[at + 2], packed[at + 3]]);
        let (a, b, c) = (word(0), word(4), word(8));
        let high = |word: u32| (word >> 6 & 0x0303_0303) << 4;
        let scales = [a & 0x3f3f_3f3f, c & 0x0f0f_0f0f | high(a)];
        let minima = [b & 0x3f3f_3f3f, c >> 4 & 0x0f0f_0f0f | high(b)];
        for unit in 0..8 {
            let six = |words: [u32; 2]| f32::from(words[unit / 4].to_le_bytes()[unit % 4]);
            pairs[2 * unit] = d * six(scales);
            pairs[2 * unit + 1] = -dmin * six(minima);
        }
    }
}

/// After 16 bytes of scales, 128 bytes of nibbles: units 2i and 2i + 1 are the low and the high ones of
/// bytes 32 i and following.
impl Codes for BlockQ4K {
    const UNITS: usize = 8;
    const SECOND: Second = Second::Offset;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn pairs(row: &[Self], pairs: &mut [f32]) {
        // SAFETY: the layout of Q4_K.
        unsafe { six_bit_pairs(row, pairs) };
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes(block: *const Self, unit: usize) -> [__m256i; 2] {
        let shift = 4 * (unit % 2);
        // SAFETY: one block of 144 bytes.
        unsafe {
            let low = block.cast::<u8>().add(16 + unit / 2 * 32);
            [bits(low, shift, 15), bits(low.add(16), shift, 15)]
        }
    }
}

/// After 16 bytes of scales, 32 bytes of fifth bits (bit `unit` of byte `i` is that of weight `i`), then
/// nibbles as in Q4_K.
impl Codes for BlockQ5K {
    const UNITS: usize = 8;
    const SECOND: Second = Second::Offset;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn pairs(row: &[Self], pairs: &mut [f32]) {
        // SAFETY: the layout of Q5_K.
        unsafe { six_bit_pairs(row, pairs) };
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes(block: *const Self, unit: usize) -> [__m256i; 2] {
        let shift = 4 * (unit % 2);
        // SAFETY: one block of 176 bytes.
        unsafe {
            let high = block.cast::<u8>().add(16);
            let low = high.add(32 + unit / 2 * 32);
            let five = |at: usize| {
                let fifth = _mm256_slli_epi16::<4>(bits(high.add(at), unit, 1));
                _mm256_or_si256(bits(low.add(at), shift, 15), fifth)
            };
            [five(0), five(16)]
        }
    }
}

/// `[128 bytes of nibbles][64 bytes of upper bit pairs][16 i8 scales][d f16]`, weight
/// `d * scale * (q - 32)` with a scale per 16. Of each half of the block, unit `r` has the nibbles of
/// bytes 32 (r % 2) and following, low for r < 2, and the bit pairs `r` of the bytes.
impl Codes for BlockQ6K {
    const UNITS: usize = 8;
    const SECOND: Second = Second::Scale;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn pairs(row: &[Self], pairs: &mut [f32]) {
        for (block, pairs) in row.iter().zip(pairs.as_chunks_mut::<16>().0) {
            // SAFETY: one block of 210 bytes.
            let (scales, d) =
                unsafe { (bytes::<_, 16>(block, 192), f16::from_le_bytes(bytes(block, 208)).to_f32()) };
            for (pair, scale) in pairs.iter_mut().zip(scales) {
                *pair = d * f32::from(scale as i8);
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes(block: *const Self, unit: usize) -> [__m256i; 2] {
        let (half, r) = (unit / 4, unit % 4);
        // SAFETY: one block of 210 bytes.
        unsafe {
            let low = block.cast::<u8>().add(64 * half + 32 * (r % 2));
            let high = block.cast::<u8>().add(128 + 32 * half);
            let six = |at: usize| {
                let upper = _mm256_slli_epi16::<4>(bits(high.add(at), 2 * r, 3));
                let code = _mm256_or_si256(bits(low.add(at), 4 * (r / 2), 15), upper);
                _mm256_sub_epi16(code, _mm256_set1_epi16(32))
            };
            [six(0), six(16)]
        }
    }
}
