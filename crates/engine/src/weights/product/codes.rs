//! Blocks of 32 weights with one scale, and an offset in some: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.

use std::arch::x86_64::{
    __m128i, __m256i, _mm_cvtsi32_si128, _mm_insert_epi32, _mm_loadu_si128, _mm256_and_si256,
    _mm256_cmpeq_epi16, _mm256_cvtepi8_epi16, _mm256_cvtph_ps, _mm256_mul_ps, _mm256_or_si256,
    _mm256_set1_epi16, _mm256_setr_epi16, _mm256_setr_ps, _mm256_srli_epi16, _mm256_storeu_ps,
};

use candle_core::quantized::k_quants::{BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0};

use super::fixed::{Codes, Second, widened};

/// Pairs of `row`: of each block the two f16 that `bits` gives, the second one times `factor`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn block_pairs<T>(row: &[T], pairs: &mut [f32], factor: f32, bits: impl Fn(&T) -> u32) {
    let factors = _mm256_setr_ps(1.0, factor, 1.0, factor, 1.0, factor, 1.0, factor);
    for (blocks, pairs) in row.chunks(4).zip(pairs.chunks_exact_mut(8)) {
        let bits = |i: usize| blocks.get(i).map_or(0, &bits) as i32;
        let four = _mm_insert_epi32::<1>(_mm_cvtsi32_si128(bits(0)), bits(1));
        let four = _mm_insert_epi32::<3>(_mm_insert_epi32::<2>(four, bits(2)), bits(3));
        // SAFETY: 8 floats.
        unsafe { _mm256_storeu_ps(pairs.as_mut_ptr(), _mm256_mul_ps(_mm256_cvtph_ps(four), factors)) };
    }
}

/// The first 2 bytes of a block.
#[inline]
fn first_half<T>(block: &T) -> u32 {
    // SAFETY: all blocks of this file begin with an f16.
    unsafe { std::ptr::from_ref(block).cast::<u16>().read_unaligned() }.into()
}

/// The first 4 bytes of a block that begins with two f16.
#[inline]
fn first_halves<T>(block: &T) -> u32 {
    // SAFETY: Q4_1 and Q5_1 begin with two f16.
    unsafe { std::ptr::from_ref(block).cast::<u32>().read_unaligned() }
}

/// The low nibbles of 16 bytes, and the high ones.
///
/// # Safety
/// 16 bytes can be read.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn nibbles(at: *const u8) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    let bytes = unsafe { widened(at) };
    [_mm256_and_si256(bytes, _mm256_set1_epi16(15)), _mm256_srli_epi16::<4>(bytes)]
}

/// 16 signed bytes as 16-bit integers.
///
/// # Safety
/// 16 bytes can be read.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn signed(at: *const u8) -> __m256i {
    // SAFETY: the caller's promise.
    _mm256_cvtepi8_epi16(unsafe { _mm_loadu_si128(at.cast::<__m128i>()) })
}

/// 16 bits as 0 or 16 each.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn fifth_bits(bits: i16) -> __m256i {
    let place =
        _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, i16::MIN);
    let own = _mm256_and_si256(_mm256_set1_epi16(bits), place);
    _mm256_and_si256(_mm256_cmpeq_epi16(own, place), _mm256_set1_epi16(16))
}

/// The nibbles of 16 bytes, each with its bit of the 32 at `high` above it.
///
/// # Safety
/// 4 bytes at `high` and 16 at `low` can be read.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn five_bits(high: *const u8, low: *const u8) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    let (high, [first, second]) = unsafe { (high.cast::<[i16; 2]>().read_unaligned(), nibbles(low)) };
    [_mm256_or_si256(first, fifth_bits(high[0])), _mm256_or_si256(second, fifth_bits(high[1]))]
}

/// [`Codes`] of types with one unit a block, each said in four expressions: what the second number of a
/// pair is; the factor on it; the bits of both numbers; and where the codes of a block at `$at` are.
macro_rules! one_unit {
    ($($(#[$layout:meta])+ $block:ident: $second:ident, $factor:literal, $bits:expr, $at:ident => $codes:expr;)+) => {$(
        $(#[$layout])+
        impl Codes for $block {
            const UNITS: usize = 1;
            const SECOND: Second = Second::$second;

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn pairs(row: &[Self], pairs: &mut [f32]) {
                block_pairs(row, pairs, $factor, $bits);
            }

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn codes(block: *const Self, _unit: usize) -> [__m256i; 2] {
                let $at = block.cast::<u8>();
                // SAFETY: within one block, whose layout stands above.
                unsafe { $codes }
            }
        }
    )+};
}

one_unit! {
    /// `[d f16][16 bytes of nibbles]`, weight `d * (q - 8)`.
    BlockQ4_0: Offset, -8.0, |block| first_half(block) * 0x1_0001, at => nibbles(at.add(2));
    /// `[d f16][m f16][16 bytes of nibbles]`, weight `d * q + m`.
    BlockQ4_1: Offset, 1.0, first_halves, at => nibbles(at.add(4));
    /// `[d f16][32 high bits][16 bytes of nibbles]`, weight `d * (q - 16)`.
    BlockQ5_0: Offset, -16.0, |block| first_half(block) * 0x1_0001, at => five_bits(at.add(2), at.add(6));
    /// `[d f16][m f16][32 high bits][16 bytes of nibbles]`, weight `d * q + m`.
    BlockQ5_1: Offset, 1.0, first_halves, at => five_bits(at.add(4), at.add(8));
    /// `[d f16][32 i8]`, weight `d * q`.
    BlockQ8_0: Unused, 1.0, first_half, at => [signed(at.add(2)), signed(at.add(18))];
}
