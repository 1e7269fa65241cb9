//! Dot products on AVX2 with FMA and F16C: 32 weights at a time are widened to four vectors.

use std::arch::x86_64::{
    __m128i, __m256, __m256i, _mm_and_si128, _mm_cvtph_ps, _mm_cvtsi32_si128, _mm_cvtss_f32, _mm_loadl_epi64,
    _mm_loadu_si128, _mm_set1_epi8, _mm_srli_epi16, _mm_unpackhi_epi64, _mm256_add_ps, _mm256_and_si256,
    _mm256_castsi256_ps, _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps, _mm256_cvtepu8_epi32,
    _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_mul_ps,
    _mm256_set1_epi32, _mm256_set1_ps, _mm256_setr_epi32, _mm256_setzero_ps, _mm256_slli_epi32,
    _mm256_srli_epi32, _mm256_srlv_epi32, _mm256_storeu_ps,
};

use candle_core::quantized::k_quants::{BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0, GgmlType};
use half::{bf16, f16};

/// 32 weights, to be multiplied by `scale` and then raised by `offset` where the type has them.
pub(super) struct Unit {
    vectors: [__m256; 4],
    scale: f32,
    offset: f32,
}

/// Types whose rows are cut into units of 32 weights; only rows of floats may have a rest.
pub(super) trait Units: GgmlType {
    /// Whether `Unit::scale` counts.
    const SCALED: bool;
    /// Whether `Unit::offset` counts.
    const RAISED: bool;

    /// # Safety
    /// At `at` are 32 weights, and the machine has AVX2, FMA and F16C.
    unsafe fn unit(at: *const Self) -> Unit;
}

/// Dot products of one row of weights with `N` rows of activations, `x [N, cols]`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn dot<T: Units, const N: usize>(weights: &[T], cols: usize, x: &[f32]) -> [f32; N] {
    assert!(x.len() == N * cols && weights.len() * T::BLCK_SIZE == cols);
    let units = cols / 32;
    let mut sums = [_mm256_setzero_ps(); N];
    for index in 0..units {
        // SAFETY: weights and x hold `units` times 32 elements a row, as just checked.
        unsafe {
            let unit = T::unit(weights.as_ptr().add(index * 32 / T::BLCK_SIZE));
            for (row, sum) in sums.iter_mut().enumerate() {
                *sum = add_unit::<T>(&unit, load(x.as_ptr().add(row * cols + index * 32)), *sum);
            }
        }
    }
    let mut dots = [0f32; N];
    for (row, (dot, sum)) in dots.iter_mut().zip(sums).enumerate() {
        let mut lanes = [0f32; 8];
        // SAFETY: lanes holds 8 floats.
        unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), sum) };
        *dot = lanes.iter().sum::<f32>();
        if T::BLCK_SIZE == 1 {
            for index in units * 32..cols {
                let mut weight = [0f32];
                T::to_float(&weights[index..=index], &mut weight);
                *dot += weight[0] * x[row * cols + index];
            }
        }
    }
    dots
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add_unit<T: Units>(unit: &Unit, x: [__m256; 4], sum: __m256) -> __m256 {
    let w = unit.vectors;
    let product = _mm256_mul_ps(w[0], x[0]);
    let product = _mm256_fmadd_ps(w[1], x[1], product);
    let product = _mm256_fmadd_ps(w[2], x[2], product);
    let product = _mm256_fmadd_ps(w[3], x[3], product);
    let mut sum = if T::SCALED {
        _mm256_fmadd_ps(_mm256_set1_ps(unit.scale), product, sum)
    } else {
        _mm256_add_ps(product, sum)
    };
    if T::RAISED {
        let sum_of_x = _mm256_add_ps(_mm256_add_ps(x[0], x[1]), _mm256_add_ps(x[2], x[3]));
        sum = _mm256_fmadd_ps(_mm256_set1_ps(unit.offset), sum_of_x, sum);
    }
    sum
}

/// # Safety
/// 32 floats can be read.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load(x: *const f32) -> [__m256; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        [
            _mm256_loadu_ps(x),
            _mm256_loadu_ps(x.add(8)),
            _mm256_loadu_ps(x.add(16)),
            _mm256_loadu_ps(x.add(24)),
        ]
    }
}

/// The f16 at `at`.
///
/// # Safety
/// 2 bytes can be read.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn half_at(at: *const u8) -> f32 {
    // SAFETY: the caller's promise.
    let bits = unsafe { at.cast::<u16>().read_unaligned() };
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits.into())))
}

/// The low nibbles of 16 bytes, then the high ones, each with the bit of its place in `high_bits` above it.
///
/// # Safety
/// 16 bytes can be read.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn five_bits(at: *const u8, high_bits: u32) -> [__m256; 4] {
    // SAFETY: the caller's promise.
    let [a, b, c, d] = unsafe { nibbles(at) };
    let first = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    let bits = _mm256_set1_epi32(high_bits as i32);
    [
        _mm256_add_ps(a, sixteens(bits, first)),
        _mm256_add_ps(b, sixteens(_mm256_srli_epi32::<8>(bits), first)),
        _mm256_add_ps(c, sixteens(_mm256_srli_epi32::<16>(bits), first)),
        _mm256_add_ps(d, sixteens(_mm256_srli_epi32::<24>(bits), first)),
    ]
}

/// 16 where the bit at `place` is set, else 0.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sixteens(bits: __m256i, place: __m256i) -> __m256 {
    let bit = _mm256_and_si256(_mm256_srlv_epi32(bits, place), _mm256_set1_epi32(1));
    _mm256_cvtepi32_ps(_mm256_slli_epi32::<4>(bit))
}

/// The low nibbles of 16 bytes, then the high ones.
///
/// # Safety
/// 16 bytes can be read.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn nibbles(at: *const u8) -> [__m256; 4] {
    // SAFETY: the caller's promise.
    let both = unsafe { _mm_loadu_si128(at.cast()) };
    let mask = _mm_set1_epi8(15);
    let low = _mm_and_si128(both, mask);
    let high = _mm_and_si128(_mm_srli_epi16::<4>(both), mask);
    [
        unsigned(low),
        unsigned(_mm_unpackhi_epi64(low, low)),
        unsigned(high),
        unsigned(_mm_unpackhi_epi64(high, high)),
    ]
}

/// The first eight bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn unsigned(bytes: __m128i) -> __m256 {
    _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes))
}

impl Units for f32 {
    const SCALED: bool = false;
    const RAISED: bool = false;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unit(at: *const f32) -> Unit {
        // SAFETY: 32 floats.
        Unit { vectors: unsafe { load(at) }, scale: 1.0, offset: 0.0 }
    }
}

impl Units for f16 {
    const SCALED: bool = false;
    const RAISED: bool = false;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unit(at: *const f16) -> Unit {
        let at: *const __m128i = at.cast();
        // SAFETY: 32 times 2 bytes.
        let vectors = unsafe {
            [
                _mm256_cvtph_ps(_mm_loadu_si128(at)),
                _mm256_cvtph_ps(_mm_loadu_si128(at.add(1))),
                _mm256_cvtph_ps(_mm_loadu_si128(at.add(2))),
                _mm256_cvtph_ps(_mm_loadu_si128(at.add(3))),
            ]
        };
        Unit { vectors, scale: 1.0, offset: 0.0 }
    }
}

/// The upper half of an f32 is a bf16.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn widen_bf16(bits: __m128i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits)))
}

impl Units for bf16 {
    const SCALED: bool = false;
    const RAISED: bool = false;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unit(at: *const bf16) -> Unit {
        let at: *const __m128i = at.cast();
        // SAFETY: 32 times 2 bytes.
        let vectors = unsafe {
            [
                widen_bf16(_mm_loadu_si128(at)),
                widen_bf16(_mm_loadu_si128(at.add(1))),
                widen_bf16(_mm_loadu_si128(at.add(2))),
                widen_bf16(_mm_loadu_si128(at.add(3))),
            ]
        };
        Unit { vectors, scale: 1.0, offset: 0.0 }
    }
}

/// `[d f16][32 i8]`, weight `d * q`.
impl Units for BlockQ8_0 {
    const SCALED: bool = true;
    const RAISED: bool = false;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unit(at: *const BlockQ8_0) -> Unit {
        let at: *const u8 = at.cast();
        // SAFETY: one block of 34 bytes.
        unsafe {
            let vectors = [
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(at.add(2).cast()))),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(at.add(10).cast()))),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(at.add(18).cast()))),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(at.add(26).cast()))),
            ];
            Unit { vectors, scale: half_at(at), offset: 0.0 }
        }
    }
}

/// `[d f16][16 bytes of nibbles]`, weight `d * (q - 8)`.
impl Units for BlockQ4_0 {
    const SCALED: bool = true;
    const RAISED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unit(at: *const BlockQ4_0) -> Unit {
        let at: *const u8 = at.cast();
        // SAFETY: one block of 18 bytes.
        unsafe {
            let scale = half_at(at);
            Unit { vectors: nibbles(at.add(2)), scale, offset: -8.0 * scale }
        }
    }
}

/// `[d f16][m f16][16 bytes of nibbles]`, weight `d * q + m`.
impl Units for BlockQ4_1 {
    const SCALED: bool = true;
    const RAISED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unit(at: *const BlockQ4_1) -> Unit {
        let at: *const u8 = at.cast();
        // SAFETY: one block of 20 bytes.
        unsafe { Unit { vectors: nibbles(at.add(4)), scale: half_at(at), offset: half_at(at.add(2)) } }
    }
}

/// `[d f16][32 high bits][16 bytes of nibbles]`, weight `d * (q - 16)`.
impl Units for BlockQ5_0 {
    const SCALED: bool = true;
    const RAISED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unit(at: *const BlockQ5_0) -> Unit {
        let at: *const u8 = at.cast();
        // SAFETY: one block of 22 bytes.
        unsafe {
            let (scale, high_bits) = (half_at(at), at.add(2).cast::<u32>().read_unaligned());
            Unit { vectors: five_bits(at.add(6), high_bits), scale, offset: -16.0 * scale }
        }
    }
}

/// `[d f16][m f16][32 high bits][16 bytes of nibbles]`, weight `d * q + m`.
impl Units for BlockQ5_1 {
    const SCALED: bool = true;
    const RAISED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unit(at: *const BlockQ5_1) -> Unit {
        let at: *const u8 = at.cast();
        // SAFETY: one block of 24 bytes.
        unsafe {
            let high_bits = at.add(4).cast::<u32>().read_unaligned();
            let vectors = five_bits(at.add(8), high_bits);
            Unit { vectors, scale: half_at(at), offset: half_at(at.add(2)) }
        }
    }
}
