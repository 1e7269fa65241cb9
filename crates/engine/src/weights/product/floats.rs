//! f32 activations with f32, f16 or bf16 weights, widened to f32.

use std::arch::x86_64::{
    __m128i, __m256, _mm_loadu_si128, _mm256_add_ps, _mm256_castsi256_ps, _mm256_cvtepu16_epi32,
    _mm256_cvtph_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_setzero_ps, _mm256_slli_epi32,
};

use candle_core::quantized::k_quants::GgmlType;
use half::{bf16, f16};

use super::activations::sum;
use super::{GROUP, Output, for_each_tile};

/// Types of one float per element.
pub(super) trait Float: GgmlType {
    /// # Safety
    /// At `at` are 8 elements, and the machine has AVX2, FMA and F16C.
    unsafe fn widen(at: *const Self) -> __m256;
}

/// # Safety
/// The machine has AVX2, FMA and F16C.
pub(super) unsafe fn product<T: Float>(cols: usize, weights: &[T], x: &[f32], out: Output<'_>) {
    for_each_tile(weights.len() / cols, x.len() / cols, 4 * cols, out, |column, rows, results, _| {
        let weights = &weights[column * cols..][..cols];
        let x = &x[rows.start * cols..rows.end * cols];
        let (fours, rest) = results.as_chunks_mut::<GROUP>();
        let (x_fours, x_rest) = x.split_at(fours.len() * GROUP * cols);
        // SAFETY: the caller's promise.
        unsafe {
            for (x, results) in x_fours.chunks_exact(GROUP * cols).zip(fours) {
                *results = dots(weights, x);
            }
            for (x, result) in x_rest.chunks_exact(cols).zip(rest) {
                [*result] = dots(weights, x);
            }
        }
    });
}

/// `x [N, weights.len()]`, each row in four vectors of partial sums.
#[target_feature(enable = "avx2,fma,f16c")]
fn dots<T: Float, const N: usize>(weights: &[T], x: &[f32]) -> [f32; N] {
    let cols = weights.len();
    assert_eq!(x.len(), N * cols);
    let mut sums = [[_mm256_setzero_ps(); 4]; N];
    for start in (0..cols / 32 * 32).step_by(32) {
        for part in 0..4 {
            // SAFETY: 32 elements from `start` on are inside of `weights` and of each row of x.
            unsafe {
                let weights = T::widen(weights.as_ptr().add(start + 8 * part));
                for (row, sums) in sums.iter_mut().enumerate() {
                    let x = _mm256_loadu_ps(x.as_ptr().add(row * cols + start + 8 * part));
                    sums[part] = _mm256_fmadd_ps(weights, x, sums[part]);
                }
            }
        }
    }
    let mut results = [0f32; N];
    for (row, (result, sums)) in results.iter_mut().zip(sums).enumerate() {
        *result = sum(_mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3])));
        for index in cols / 32 * 32..cols {
            let mut weight = [0f32];
            T::to_float(&weights[index..=index], &mut weight);
            *result += weight[0] * x[row * cols + index];
        }
    }
    results
}

impl Float for f32 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn widen(at: *const f32) -> __m256 {
        // SAFETY: 8 floats.
        unsafe { _mm256_loadu_ps(at) }
    }
}

impl Float for f16 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn widen(at: *const f16) -> __m256 {
        // SAFETY: 8 times 2 bytes.
        _mm256_cvtph_ps(unsafe { _mm_loadu_si128(at.cast()) })
    }
}

impl Float for bf16 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn widen(at: *const bf16) -> __m256 {
        // SAFETY: 8 times 2 bytes.
        let bits: __m128i = unsafe { _mm_loadu_si128(at.cast()) };
        // The upper half of an f32 is a bf16.
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits)))
    }
}
