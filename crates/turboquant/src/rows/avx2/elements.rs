//! Conversions between the float types.

use std::arch::x86_64::*;

use half::{bf16, f16, slice::HalfFloatSliceExt};

use super::{LANES, load, load_bytes, low_bytes, store, total};

const INFINITY_BITS: i32 = 0x7F80_0000;

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load_u16(x: &[u16; LANES]) -> __m128i {
    // SAFETY: eight u16 behind the reference; the load needs no alignment.
    unsafe { _mm_loadu_si128(x.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load_16_bytes(x: &[u8; 2 * LANES]) -> __m128i {
    // SAFETY: 16 bytes behind the reference; the load needs no alignment.
    unsafe { _mm_loadu_si128(x.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn store_16_bytes(x: &mut [u8; 2 * LANES], v: __m128i) {
    // SAFETY: 16 bytes behind the reference; the store needs no alignment.
    unsafe { _mm_storeu_si128(x.as_mut_ptr().cast(), v) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn bf16_to_f32(x: __m128i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16))
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn magnitude_bits(x: __m256) -> __m256i {
    _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(i32::MAX))
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn is_above(x: __m256i, limit: i32) -> __m256i {
    _mm256_cmpgt_epi32(x, _mm256_set1_epi32(limit))
}

/// `counts` plus one in each lane where `x` is NaN or infinite.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn count_non_finite(counts: __m256i, x: __m256) -> __m256i {
    _mm256_sub_epi32(counts, is_above(magnitude_bits(x), INFINITY_BITS - 1))
}

/// Exact; returns how many elements are not finite.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::rows) fn widen_f32(src: &[f32], dst: &mut [f32]) -> u64 {
    let mut counts = _mm256_setzero_si256();
    for (src, dst) in src.as_chunks().0.iter().zip(dst.as_chunks_mut().0) {
        let x = load(src);
        store(dst, x);
        counts = count_non_finite(counts, x);
    }
    total(counts)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::rows) fn widen_f16(src: &[f16], dst: &mut [f32]) -> u64 {
    let mut counts = _mm256_setzero_si256();
    for (src, dst) in src.reinterpret_cast().as_chunks().0.iter().zip(dst.as_chunks_mut().0) {
        let x = _mm256_cvtph_ps(load_u16(src));
        store(dst, x);
        counts = count_non_finite(counts, x);
    }
    total(counts)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::rows) fn widen_bf16(src: &[bf16], dst: &mut [f32]) -> u64 {
    let mut counts = _mm256_setzero_si256();
    for (src, dst) in src.reinterpret_cast().as_chunks().0.iter().zip(dst.as_chunks_mut().0) {
        let x = bf16_to_f32(load_u16(src));
        store(dst, x);
        counts = count_non_finite(counts, x);
    }
    total(counts)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::rows) fn f16_values(bytes: &[u8], out: &mut [f32]) {
    for (out, bytes) in out.as_chunks_mut().0.iter_mut().zip(bytes.as_chunks().0) {
        store(out, _mm256_cvtph_ps(load_16_bytes(bytes)));
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::rows) fn bf16_values(bytes: &[u8], out: &mut [f32]) {
    for (out, bytes) in out.as_chunks_mut().0.iter_mut().zip(bytes.as_chunks().0) {
        store(out, bf16_to_f32(load_16_bytes(bytes)));
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::rows) fn f16_bytes(x: &[f32], bytes: &mut [u8]) -> u64 {
    // 65520 and above round to infinity.
    let first_beyond = 65520f32.to_bits() as i32;
    let mut saturated = _mm256_setzero_si256();
    for (x, bytes) in x.as_chunks().0.iter().zip(bytes.as_chunks_mut().0) {
        let x = load(x);
        let magnitude = magnitude_bits(x);
        let beyond = _mm256_andnot_si256(
            is_above(magnitude, INFINITY_BITS - 1),
            is_above(magnitude, first_beyond - 1),
        );
        saturated = _mm256_sub_epi32(saturated, beyond);
        let largest = _mm256_or_ps(_mm256_set1_ps(65504.0), _mm256_and_ps(x, _mm256_set1_ps(-0.0)));
        let x = _mm256_blendv_ps(x, largest, _mm256_castsi256_ps(beyond));
        store_16_bytes(bytes, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
    total(saturated)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::rows) fn bf16_bytes(x: &[f32], bytes: &mut [u8]) -> u64 {
    let splat = |bits: i32| _mm256_set1_epi32(bits);
    // Half a step below infinity, which rounds to it, and the largest finite bf16.
    let (first_beyond, largest) = (0x7F7F_8000, 0x7F7F_0000);
    let mut saturated = _mm256_setzero_si256();
    for (x, bytes) in x.as_chunks().0.iter().zip(bytes.as_chunks_mut().0) {
        let bits = _mm256_castps_si256(load(x));
        let magnitude = _mm256_and_si256(bits, splat(i32::MAX));
        let sign = _mm256_xor_si256(bits, magnitude);
        let beyond = _mm256_andnot_si256(
            is_above(magnitude, INFINITY_BITS - 1),
            is_above(magnitude, first_beyond - 1),
        );
        saturated = _mm256_sub_epi32(saturated, beyond);
        let odd = _mm256_and_si256(_mm256_srli_epi32(magnitude, 16), splat(1));
        let rounded = _mm256_add_epi32(magnitude, _mm256_add_epi32(splat(0x7FFF), odd));
        let rounded = _mm256_blendv_epi8(rounded, splat(largest), beyond);
        // A NaN keeps its upper bits and is made quiet.
        let quiet = _mm256_or_si256(magnitude, splat(0x40_0000));
        let rounded = _mm256_blendv_epi8(rounded, quiet, is_above(magnitude, INFINITY_BITS));
        let upper = _mm256_srli_epi32(_mm256_or_si256(rounded, sign), 16);
        let packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(upper, upper), 0b1000);
        store_16_bytes(bytes, _mm256_castsi256_si128(packed));
    }
    total(saturated)
}

/// The steps of [`crate::fp8::encode`] on each lane.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::rows) fn fp8_bytes(x: &[f32], bytes: &mut [u8]) -> u64 {
    let splat = |bits: i32| _mm256_set1_epi32(bits);
    let largest = splat(448f32.to_bits() as i32);
    let mut clipped = _mm256_setzero_si256();
    for (x, bytes) in x.as_chunks().0.iter().zip(bytes.as_chunks_mut().0) {
        let x = load(x);
        let magnitude = magnitude_bits(x);
        let beyond = _mm256_cmpgt_epi32(magnitude, largest);
        let non_finite = _mm256_cmpgt_epi32(magnitude, splat(INFINITY_BITS - 1));
        clipped = _mm256_sub_epi32(clipped, _mm256_andnot_si256(non_finite, beyond));

        let bits = _mm256_min_epi32(magnitude, largest);
        let odd = _mm256_and_si256(_mm256_srli_epi32(bits, 20), splat(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(splat(0x7_FFFF), odd));
        let normal = _mm256_sub_epi32(_mm256_srli_epi32(rounded, 20), splat(120 << 3));

        let shifted = _mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_set1_ps(16384.0));
        let subnormal = _mm256_sub_epi32(_mm256_castps_si256(shifted), splat(16384f32.to_bits() as i32));
        let is_subnormal = _mm256_cmpgt_epi32(splat(0.015625f32.to_bits() as i32), magnitude);

        let sign = _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(x), 24), splat(0x80));
        let number = _mm256_or_si256(sign, _mm256_blendv_epi8(normal, subnormal, is_subnormal));
        let nan = _mm256_cmpgt_epi32(magnitude, splat(INFINITY_BITS));
        let byte = _mm256_blendv_epi8(number, splat(i32::from(crate::fp8::E4M3_NAN)), nan);
        *bytes = low_bytes(byte);
    }
    total(clipped)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::rows) fn fp8_values(bytes: &[u8], out: &mut [f32]) {
    for (out, bytes) in out.as_chunks_mut().0.iter_mut().zip(bytes.as_chunks().0) {
        store(out, fp8_decode(load_bytes(*bytes)));
    }
}

/// The values of e4m3 bytes, one in each 32-bit lane.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(crate) fn fp8_decode(bytes: __m256i) -> __m256 {
    let magnitude = _mm256_and_si256(bytes, _mm256_set1_epi32(0x7F));
    let sign = _mm256_slli_epi32(_mm256_xor_si256(bytes, magnitude), 24);
    // Exponent bias 7 -> 127.
    let normal = _mm256_add_epi32(_mm256_slli_epi32(magnitude, 20), _mm256_set1_epi32(120 << 23));
    let subnormal = _mm256_mul_ps(_mm256_cvtepi32_ps(magnitude), _mm256_set1_ps(1.0 / 512.0));
    let is_subnormal = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), magnitude);
    let number = _mm256_blendv_ps(_mm256_castsi256_ps(normal), subnormal, _mm256_castsi256_ps(is_subnormal));
    let is_nan = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7F));
    let number = _mm256_blendv_ps(number, _mm256_set1_ps(f32::NAN), _mm256_castsi256_ps(is_nan));
    _mm256_xor_ps(number, _mm256_castsi256_ps(sign))
}
