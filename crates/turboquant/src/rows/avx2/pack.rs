//! Packing and unpacking of codes.

use std::arch::x86_64::*;

use crate::rows::scalar;

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load_32_bytes(x: &[u8; 32]) -> __m256i {
    // SAFETY: 32 bytes behind the reference; the load needs no alignment.
    unsafe { _mm256_loadu_si256(x.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::rows) fn pack4(codes: &[u8], packed: &mut [u8]) {
    let (blocks, codes) = codes.as_chunks::<32>();
    let (packed_blocks, packed) = packed.as_chunks_mut::<16>();
    for (codes, packed) in blocks.iter().zip(packed_blocks) {
        // code[2j] + 16 code[2j+1] in 16 bits, then the low bytes.
        let pairs = _mm256_maddubs_epi16(load_32_bytes(codes), _mm256_set1_epi16(16 << 8 | 1));
        let bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0b1000);
        // SAFETY: 16 bytes behind the reference; the store needs no alignment.
        unsafe { _mm_storeu_si128(packed.as_mut_ptr().cast(), _mm256_castsi256_si128(bytes)) };
    }
    scalar::pack4(codes, packed);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::rows) fn unpack4(packed: &[u8], codes: &mut [u8]) {
    let (blocks, codes) = codes.as_chunks_mut::<32>();
    let (packed_blocks, packed) = packed.as_chunks::<16>();
    for (codes, packed) in blocks.iter_mut().zip(packed_blocks) {
        // SAFETY: 16 bytes behind the reference; the load needs no alignment.
        let bytes = unsafe { _mm_loadu_si128(packed.as_ptr().cast()) };
        // Byte j in 16 bits becomes its low half and, eight bits up, its high half.
        let wide = _mm256_cvtepu8_epi16(bytes);
        let halves = _mm256_or_si256(wide, _mm256_slli_epi16(wide, 4));
        let halves = _mm256_and_si256(halves, _mm256_set1_epi8(15));
        // SAFETY: 32 bytes behind the reference; the store needs no alignment.
        unsafe { _mm256_storeu_si256(codes.as_mut_ptr().cast(), halves) };
    }
    scalar::unpack4(packed, codes);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::rows) fn pack3(codes: &[u8], packed: &mut [u8]) {
    let (blocks, codes) = codes.as_chunks::<32>();
    let (packed_blocks, packed) = packed.as_chunks_mut::<12>();
    for (codes, packed) in blocks.iter().zip(packed_blocks) {
        // Two codes in 16 bits, four in 32, eight in 64; then three bytes of each 64.
        let two = _mm256_maddubs_epi16(load_32_bytes(codes), _mm256_set1_epi16(8 << 8 | 1));
        let four = _mm256_madd_epi16(two, _mm256_set1_epi32(64 << 16 | 1));
        let eight = _mm256_or_si256(four, _mm256_srli_epi64(four, 20));
        let to_front = _mm256_broadcastsi128_si256(_mm_setr_epi8(
            0, 1, 2, 8, 9, 10, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
        ));
        let bytes = _mm256_shuffle_epi8(eight, to_front);
        let low = _mm_cvtsi128_si64(_mm256_castsi256_si128(bytes));
        let high = _mm_cvtsi128_si64(_mm256_extracti128_si256(bytes, 1));
        packed[..6].copy_from_slice(&low.to_le_bytes()[..6]);
        packed[6..].copy_from_slice(&high.to_le_bytes()[..6]);
    }
    scalar::pack3(codes, packed);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::rows) fn unpack3(packed: &[u8], codes: &mut [u8]) {
    let (blocks, codes) = codes.as_chunks_mut::<16>();
    let (packed_blocks, packed) = packed.as_chunks::<6>();
    // Code i sits in the 16 bits from byte 3i/8 on, at bit 3i%8.
    let windows = _mm256_setr_epi8(
        0, 1, 0, 1, 0, 1, 1, 2, 1, 2, 1, 2, 2, 2, 2, 2, 3, 4, 3, 4, 3, 4, 4, 5, 4, 5, 4, 5, 5, 5, 5, 5,
    );
    // Times 2^(13 - bit) brings a code to the top.
    let up = |bit: u32| 1i16 << (13 - bit);
    let shifts = _mm_setr_epi16(up(0), up(3), up(6), up(1), up(4), up(7), up(2), up(5));
    let shifts = _mm256_broadcastsi128_si256(shifts);
    for (codes, six) in blocks.iter_mut().zip(packed_blocks) {
        let [a, b, c, d, e, f] = *six;
        let word = i64::from_le_bytes([a, b, c, d, e, f, 0, 0]);
        let windows = _mm256_shuffle_epi8(_mm256_set1_epi64x(word), windows);
        let wide = _mm256_srli_epi16(_mm256_mullo_epi16(windows, shifts), 13);
        let bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(wide, wide), 0b1000);
        // SAFETY: 16 bytes behind the reference; the store needs no alignment.
        unsafe { _mm_storeu_si128(codes.as_mut_ptr().cast(), _mm256_castsi256_si128(bytes)) };
    }
    scalar::unpack3(packed, codes);
}
