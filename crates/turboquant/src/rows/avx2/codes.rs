//! Codes of keys and values, and what they stand for.

use std::arch::x86_64::*;

use super::{lanes, load, load_bytes, low_bytes, rotate, scalar, scale_by, store, sum_squares};
use crate::{
    codebook::Codebook,
    hadamard::Rotation,
    rows::{HUGE_KEY_SCALE, KEY_NORM_EPSILON},
};

#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::rows) fn lloyd_max_codes(
    rotation: &Rotation,
    codebook: &Codebook,
    x: &mut [f32],
    codes: &mut [u8],
) -> f32 {
    let mut norm = sum_squares(x).sqrt();
    let mut scale = 1.0;
    if norm.is_infinite() {
        scale = HUGE_KEY_SCALE;
        scale_by(scale, x);
        norm = sum_squares(x).sqrt();
    }
    let divisor = _mm256_set1_ps(norm + KEY_NORM_EPSILON);
    for x in x.as_chunks_mut().0 {
        store(x, _mm256_div_ps(load(x), divisor));
    }
    rotate(rotation, x);
    if codebook.midpoints().len() == 7 {
        bucket::<3>(codebook, x, codes);
    } else {
        bucket::<4>(codebook, x, codes);
    }
    norm / scale
}

/// Number of midpoints at or below each element, by halving: the next threshold of a lane is looked
/// up by the bits found so far.
#[target_feature(enable = "avx2,fma,f16c")]
fn bucket<const BITS: usize>(codebook: &Codebook, x: &[f32], codes: &mut [u8]) {
    let mut thresholds = [_mm256_setzero_ps(); BITS];
    for (threshold, table) in thresholds.iter_mut().zip(codebook.halvings()) {
        *threshold = load(table);
    }
    for (x, codes) in x.as_chunks().0.iter().zip(codes.as_chunks_mut().0) {
        let y = load(x);
        let mut code = _mm256_setzero_si256();
        for threshold in thresholds {
            let threshold = _mm256_permutevar8x32_ps(threshold, code);
            let above = _mm256_castps_si256(_mm256_cmp_ps(y, threshold, _CMP_GE_OQ));
            code = _mm256_sub_epi32(_mm256_add_epi32(code, code), above);
        }
        *codes = low_bytes(code);
    }
}

/// Looks codes up in a table of 8 or 16 centroids.
struct Lookup {
    low: __m256,
    high: __m256,
}

impl Lookup {
    #[target_feature(enable = "avx2,fma,f16c")]
    fn new(codebook: &Codebook) -> Lookup {
        // The 8-entry table is its own upper half: bit 3 of a code does not count.
        let (halves, _) = codebook.centroids().as_chunks();
        match halves {
            [low, high] => Lookup { low: load(low), high: load(high) },
            [only] => Lookup { low: load(only), high: load(only) },
            _ => unreachable!("a row codebook has 8 or 16 centroids"),
        }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    fn get(&self, codes: __m256i) -> __m256 {
        let low = _mm256_permutevar8x32_ps(self.low, codes);
        let high = _mm256_permutevar8x32_ps(self.high, codes);
        // Bit 3 becomes the sign bit, which chooses.
        _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)))
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::rows) fn centroid_values(codebook: &Codebook, codes: &[u8], factor: f32, out: &mut [f32]) {
    let lookup = Lookup::new(codebook);
    let factor = _mm256_set1_ps(factor);
    for (out, codes) in out.as_chunks_mut().0.iter_mut().zip(codes.as_chunks().0) {
        store(out, _mm256_mul_ps(lookup.get(load_bytes(*codes)), factor));
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::rows) fn centroid_squares(codebook: &Codebook, codes: &[u8]) -> f32 {
    let lookup = Lookup::new(codebook);
    let mut sum = _mm256_setzero_ps();
    for codes in codes.as_chunks().0 {
        let c = lookup.get(load_bytes(*codes));
        sum = _mm256_add_ps(sum, _mm256_mul_ps(c, c));
    }
    scalar::reduce(lanes(sum))
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::rows) fn min_max(x: &[f32]) -> (f32, f32) {
    let mut low = _mm256_set1_ps(f32::INFINITY);
    let mut high = _mm256_set1_ps(f32::NEG_INFINITY);
    for x in x.as_chunks().0 {
        let x = load(x);
        low = _mm256_min_ps(low, x);
        high = _mm256_max_ps(high, x);
    }
    (scalar::min_max(&lanes(low)).0, scalar::min_max(&lanes(high)).1)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::rows) fn uniform_codes(x: &[f32], scale: f32, zero: f32, levels: f32, codes: &mut [u8]) {
    let (scale, zero, levels) = (_mm256_set1_ps(scale), _mm256_set1_ps(zero), _mm256_set1_ps(levels));
    for (x, codes) in x.as_chunks().0.iter().zip(codes.as_chunks_mut().0) {
        let position = _mm256_div_ps(_mm256_sub_ps(load(x), zero), scale);
        let rounded = _mm256_add_ps(position, _mm256_set1_ps(0.5));
        let clamped = _mm256_min_ps(_mm256_max_ps(rounded, _mm256_setzero_ps()), levels);
        *codes = low_bytes(_mm256_cvttps_epi32(clamped));
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::rows) fn uniform_values(codes: &[u8], scale: f32, zero: f32, out: &mut [f32]) {
    let (scale, zero) = (_mm256_set1_ps(scale), _mm256_set1_ps(zero));
    for (out, codes) in out.as_chunks_mut().0.iter_mut().zip(codes.as_chunks().0) {
        let code = _mm256_cvtepi32_ps(load_bytes(*codes));
        store(out, _mm256_add_ps(_mm256_mul_ps(code, scale), zero));
    }
}
