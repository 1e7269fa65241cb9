//! Activations in 16-bit fixed point, with a scale per block of 32.

use std::arch::x86_64::{
    __m256, _mm_add_ps, _mm_cvtss_f32, _mm_max_ps, _mm_movehdup_ps, _mm_movehl_ps, _mm256_add_ps,
    _mm256_andnot_ps, _mm256_castps256_ps128, _mm256_cvtps_epi32, _mm256_extractf128_ps, _mm256_loadu_ps,
    _mm256_max_ps, _mm256_mul_ps, _mm256_packs_epi32, _mm256_permute4x64_epi64, _mm256_set1_ps,
    _mm256_store_si256,
};

/// 32 activations divided by their scale, within +-32767; a cache line of its own.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Block([i16; 32]);

/// `x [rows, blocks * 32]`
pub(super) struct Activations {
    /// Of a row.
    pub(super) blocks: usize,
    /// `[rows, blocks]`
    pub(super) codes: Vec<Block>,
    /// `[rows, stride]`: of each block its scale and the sum of its x.
    pub(super) scale_sum: Vec<f32>,
    /// `[rows, stride]`: of each block its scale, twice.
    pub(super) scale_scale: Vec<f32>,
    /// Twice the blocks of a row, rounded up to 8; what is beyond them is 0.
    pub(super) stride: usize,
}

/// Floats that a row of pairs takes.
pub(super) fn pairs_stride(cols: usize) -> usize {
    (cols / 32 * 2).next_multiple_of(8)
}

impl Activations {
    /// Rounds to the nearest of 65,535 steps between -max and max of each block. A block with a value
    /// that is not finite gets a NaN for a scale.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn new(cols: usize, x: &[f32]) -> Self {
        let rows = x.len() / cols;
        let stride = pairs_stride(cols);
        let blocks = cols / 32;
        let mut codes = vec![Block([0; 32]); rows * blocks];
        let mut scale_sum = vec![0f32; rows * stride];
        let mut scale_scale = vec![0f32; rows * stride];
        for row in 0..rows {
            let x = x[row * cols..][..cols].as_chunks::<32>().0;
            for (block, (x, codes)) in x.iter().zip(&mut codes[row * blocks..]).enumerate() {
                let (scale, sum) = round_block(x, codes);
                let at = row * stride + 2 * block;
                scale_sum[at..at + 2].copy_from_slice(&[scale, sum]);
                scale_scale[at..at + 2].copy_from_slice(&[scale, scale]);
            }
        }
        Activations { blocks, codes, scale_sum, scale_scale, stride }
    }
}

/// Scale and sum.
#[target_feature(enable = "avx2,fma,f16c")]
fn round_block(x: &[f32; 32], codes: &mut Block) -> (f32, f32) {
    const MAX_CODE: f32 = 32767.0;
    let at = x.as_ptr();
    // SAFETY: 32 floats.
    let x: [__m256; 4] = unsafe {
        [
            _mm256_loadu_ps(at),
            _mm256_loadu_ps(at.add(8)),
            _mm256_loadu_ps(at.add(16)),
            _mm256_loadu_ps(at.add(24)),
        ]
    };
    let sum = sum(_mm256_add_ps(_mm256_add_ps(x[0], x[1]), _mm256_add_ps(x[2], x[3])));
    let sign = _mm256_set1_ps(-0.0);
    let max = max(_mm256_max_ps(
        _mm256_max_ps(_mm256_andnot_ps(sign, x[0]), _mm256_andnot_ps(sign, x[1])),
        _mm256_max_ps(_mm256_andnot_ps(sign, x[2]), _mm256_andnot_ps(sign, x[3])),
    ));
    // The sum is finite if all of x is, short of an overflow that is as good a reason to give up.
    let scale = max / MAX_CODE + sum * 0.0;
    let inverse = if max > 0.0 { MAX_CODE / max } else { 0.0 };
    let inverse = _mm256_set1_ps(if inverse.is_finite() { inverse } else { 0.0 });
    let code = |x| _mm256_cvtps_epi32(_mm256_mul_ps(x, inverse));
    // Packing works within 128-bit halves; the permutation puts the quarters back in order.
    let first = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(code(x[0]), code(x[1])));
    let second = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(code(x[2]), code(x[3])));
    // SAFETY: 32 codes of 2 bytes, aligned to 64.
    unsafe {
        _mm256_store_si256(codes.0.as_mut_ptr().cast(), first);
        _mm256_store_si256(codes.0.as_mut_ptr().add(16).cast(), second);
    }
    (scale, sum)
}

/// The sums of a vector's even and of its odd elements.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn sums_even_odd(x: __m256) -> (f32, f32) {
    let four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    (_mm_cvtss_f32(two), _mm_cvtss_f32(_mm_movehdup_ps(two)))
}

/// The sum of a vector's elements.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn sum(x: __m256) -> f32 {
    let (even, odd) = sums_even_odd(x);
    even + odd
}

/// The largest of a vector's elements.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn max(x: __m256) -> f32 {
    let four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_max_ps(two, _mm_movehdup_ps(two)))
}
