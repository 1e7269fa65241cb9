//! The attention kernels on AVX2, FMA and F16C.
//!
//! Every function here needs those three features: those that take an [`crate::rows::Avx2`] are safe, the
//! others are called where one is at hand.

#![expect(unsafe_code, reason = "vector loads and stores take raw pointers")]

mod softmax;
mod wide;
mod widen;
mod word_keys;
mod word_values;

use std::arch::x86_64::*;

use super::block::Words;
use crate::avx2::{LANES, load, store};

pub(super) use softmax::softmax_step;
pub(super) use wide::{wide_accumulate, wide_scores};
pub(super) use widen::{widen_keys, widen_values};
pub(super) use word_keys::{code_queries, unpack_keys, word_scores};
pub(super) use word_values::{unpack_values, word_accumulate};

/// Most query rows that share a load of words.
const MAX_WORD_ROWS: usize = 4;

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load_words(x: &Words) -> __m256i {
    // SAFETY: the type has the size and the alignment of a vector.
    unsafe { _mm256_load_si256(x.0.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn store_words(x: &mut Words, v: __m256i) {
    // SAFETY: as load_words.
    unsafe { _mm256_store_si256(x.0.as_mut_ptr().cast(), v) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load_bytes(x: &[u8; 32]) -> __m256i {
    // SAFETY: 32 bytes behind the reference; the load needs no alignment.
    unsafe { _mm256_loadu_si256(x.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load_half(x: &[u8; 16]) -> __m128i {
    // SAFETY: 16 bytes behind the reference; the load needs no alignment.
    unsafe { _mm_loadu_si128(x.as_ptr().cast()) }
}

/// A tile's 16 fp16 fields from byte `at` on, widened; zeros where the format has no such field.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn fields(tile: &[u8], at: Option<usize>) -> [__m256; 2] {
    let Some(at) = at else { return [_mm256_setzero_ps(); 2] };
    let halves = tile[at..at + 32].as_chunks::<16>().0;
    [_mm256_cvtph_ps(load_half(&halves[0])), _mm256_cvtph_ps(load_half(&halves[1]))]
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn sum(v: __m256) -> f32 {
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
}

/// The largest lane; a NaN may or may not win.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn max(v: __m256) -> f32 {
    let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
}
