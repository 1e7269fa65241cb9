//! 16-bit activations with quantised weights, unpacked to 16-bit integers: products and sums of a block
//! are exact integers, which then are scaled and added up in f32.

use std::arch::x86_64::{
    __m128i, __m256, __m256i, _MM_HINT_T1, _mm_loadu_si128, _mm_prefetch, _mm256_add_epi32, _mm256_add_ps,
    _mm256_broadcast_ss, _mm256_cvtepi32_ps, _mm256_cvtepu8_epi16, _mm256_fmadd_ps, _mm256_load_si256,
    _mm256_loadu_ps, _mm256_madd_epi16, _mm256_mul_ps, _mm256_setzero_ps, _mm256_storeu_ps,
};

use candle_core::quantized::k_quants::GgmlType;

use super::activations::{Activations, pairs_stride, sum, sums_even_odd};
use super::{GROUP, Output, for_each_tile};

/// What the second number of a unit's pair is; the first is the scale of its codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Second {
    /// Nothing.
    Unused,
    /// What is added to each weight.
    Offset,
    /// The scale of the second 16 codes, the first being that of the first 16 alone.
    Scale,
}

/// Quantised types, cut into units of 32 weights: `weight = scale * code + offset`.
pub(super) trait Codes: GgmlType {
    /// Units of a block, 1 or 8.
    const UNITS: usize;
    /// See [`Second`].
    const SECOND: Second;

    /// The pairs of a row's units.
    ///
    /// # Safety
    /// The machine has AVX2, FMA and F16C.
    unsafe fn pairs(row: &[Self], pairs: &mut [f32]);

    /// Codes 0 to 15 and 16 to 31 of a unit, as i16. Their sums of products with 32 activations must fit
    /// into 31 bits, so they must be below 2^14.
    ///
    /// # Safety
    /// At `block` is one, `unit < UNITS`, and the machine has AVX2, FMA and F16C.
    unsafe fn codes(block: *const Self, unit: usize) -> [__m256i; 2];
}

/// 16 bytes as 16-bit integers.
///
/// # Safety
/// 16 bytes can be read.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn widened(at: *const u8) -> __m256i {
    // SAFETY: the caller's promise.
    _mm256_cvtepu8_epi16(unsafe { _mm_loadu_si128(at.cast::<__m128i>()) })
}

/// # Safety
/// The machine has AVX2, FMA and F16C.
pub(super) unsafe fn product<T: Codes>(cols: usize, weights: &[T], x: &[f32], out: Output<'_>) {
    let row_blocks = cols / T::BLCK_SIZE;
    let stride = pairs_stride(cols);
    // SAFETY: the caller's promise.
    let x = unsafe { Activations::new(cols, x) };
    let x_rows = x.codes.len() / x.blocks;
    for_each_tile(weights.len() / row_blocks, x_rows, 2 * cols, out, |column, rows, results, scratch| {
        // What is beyond the last pair stays 0.
        scratch.resize((1 + GROUP) * stride, 0.0);
        let (pairs, scaled) = scratch.split_at_mut(stride);
        let row = &weights[column * row_blocks..][..row_blocks];
        prefetch(row);
        // SAFETY: the caller's promise.
        unsafe {
            T::pairs(row, pairs);
            let (fours, rest) = results.as_chunks_mut::<GROUP>();
            for (group, results) in fours.iter_mut().enumerate() {
                *results = dots(row, pairs, &x, rows.start + GROUP * group, scaled);
            }
            for (first, result) in (rows.end - rest.len()..).zip(rest) {
                [*result] = dots(row, pairs, &x, first, scaled);
            }
        }
    });
}

/// Asks for what comes a few KiB behind `row`: a worker reads its rows one after the other, faster than
/// the hardware fetches them unasked.
fn prefetch<T>(row: &[T]) {
    const AHEAD: usize = 8 << 10;
    let start = row.as_ptr().cast::<i8>().wrapping_add(AHEAD);
    for offset in (0..size_of_val(row)).step_by(64) {
        // SAFETY: a hint; no address is invalid for it.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(start.wrapping_add(offset)) };
    }
}

/// Dot products of a row of weights with rows `first..first + N` of `x`. `scaled [N, stride]` is scratch.
#[target_feature(enable = "avx2,fma,f16c")]
fn dots<T: Codes, const N: usize>(
    row: &[T],
    pairs: &[f32],
    x: &Activations,
    first: usize,
    scaled: &mut [f32],
) -> [f32; N] {
    let (units, stride) = (x.blocks, x.stride);
    assert!(
        row.len() * T::UNITS == units && units > 0 && pairs.len() == stride && scaled.len() >= N * stride
    );
    assert!((first + N) * units <= x.codes.len() && stride.is_multiple_of(8));
    let factors = if T::SECOND == Second::Scale { &x.scale_scale } else { &x.scale_sum };
    assert!((first + N) * stride <= factors.len());
    let mut offsets = [_mm256_setzero_ps(); N];
    for (n, offset) in offsets.iter_mut().enumerate() {
        for at in (0..stride).step_by(8) {
            // SAFETY: `stride` floats each, a multiple of 8, as just checked.
            unsafe {
                let factor = _mm256_loadu_ps(factors.as_ptr().add((first + n) * stride + at));
                let product = _mm256_mul_ps(_mm256_loadu_ps(pairs.as_ptr().add(at)), factor);
                _mm256_storeu_ps(scaled.as_mut_ptr().add(n * stride + at), product);
                if T::SECOND == Second::Offset {
                    *offset = _mm256_add_ps(*offset, product);
                }
            }
        }
    }
    // Even and odd units apart: two chains of additions instead of one.
    let (mut even, mut odd) = ([_mm256_setzero_ps(); N], [_mm256_setzero_ps(); N]);
    // SAFETY: `units` units are in `row`, 32 codes each in a row of x, a pair each in `scaled`.
    unsafe {
        if T::UNITS == 8 {
            // Written out, so that the unit's shifts are constants.
            for block in 0..row.len() {
                add_unit(row, block, 0, x, first, scaled, &mut even);
                add_unit(row, block, 1, x, first, scaled, &mut odd);
                add_unit(row, block, 2, x, first, scaled, &mut even);
                add_unit(row, block, 3, x, first, scaled, &mut odd);
                add_unit(row, block, 4, x, first, scaled, &mut even);
                add_unit(row, block, 5, x, first, scaled, &mut odd);
                add_unit(row, block, 6, x, first, scaled, &mut even);
                add_unit(row, block, 7, x, first, scaled, &mut odd);
            }
        } else {
            for block in (0..row.len() - 1).step_by(2) {
                add_unit(row, block, 0, x, first, scaled, &mut even);
                add_unit(row, block + 1, 0, x, first, scaled, &mut odd);
            }
            if !row.len().is_multiple_of(2) {
                add_unit(row, row.len() - 1, 0, x, first, scaled, &mut even);
            }
        }
    }
    let mut results = [0f32; N];
    for n in 0..N {
        let result = &mut results[n];
        *result = sum(_mm256_add_ps(even[n], odd[n]));
        if T::SECOND == Second::Offset {
            *result += sums_even_odd(offsets[n]).1;
        }
    }
    results
}

/// Adds the products of a block's unit with rows `first..first + N` of `x` to `sums`.
///
/// # Safety
/// `row`, the rows of `x` and `scaled` have that unit.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_unit<T: Codes, const N: usize>(
    row: &[T],
    block: usize,
    unit: usize,
    x: &Activations,
    first: usize,
    scaled: &[f32],
    sums: &mut [__m256; N],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let codes = T::codes(row.as_ptr().add(block), unit);
        let unit = block * T::UNITS + unit;
        for (n, sum) in sums.iter_mut().enumerate() {
            let x_codes = x.codes.as_ptr().add((first + n) * x.blocks + unit).cast::<__m256i>();
            let pair = scaled.as_ptr().add(n * x.stride + 2 * unit);
            let first = _mm256_madd_epi16(codes[0], _mm256_load_si256(x_codes));
            let second = _mm256_madd_epi16(codes[1], _mm256_load_si256(x_codes.add(1)));
            let scale = _mm256_broadcast_ss(&*pair);
            *sum = if T::SECOND == Second::Scale {
                let sum = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(first), *sum);
                _mm256_fmadd_ps(_mm256_broadcast_ss(&*pair.add(1)), _mm256_cvtepi32_ps(second), sum)
            } else {
                _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(_mm256_add_epi32(first, second)), *sum)
            };
        }
    }
}
