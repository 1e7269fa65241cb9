//! Exponentials.

use std::{arch::x86_64::*, ops::Range};

use super::{LANES, load, max, store, sum};
use crate::attention::{BLOCK_TOKENS, block::BlockRow, kernels::ScoreScale};

const VECTORS: usize = BLOCK_TOKENS / LANES;

/// `2^x` for `x <= 0`, within 2e-7 of itself and exact at 0; 0 below -126.5; NaN for NaN.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn exp2(x: __m256) -> __m256 {
    // With the limit first a NaN passes.
    let x = _mm256_max_ps(_mm256_set1_ps(-127.0), x);
    let n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    let f = _mm256_sub_ps(x, n);
    // 2^f on [-1/2, 1/2]: the least relative error of a polynomial with value 1 and slope ln(2) at 0
    // is 1.1e-7.
    let mut y = _mm256_set1_ps(0.001_330_059_3);
    for c in [0.009_669_691, 0.055_505_585, 0.240_222_83, std::f32::consts::LN_2, 1.0] {
        y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(c));
    }
    // At n = -127 the exponent bits are 0: the power, and with it the result, is 0.
    let power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    _mm256_mul_ps(y, _mm256_castsi256_ps(power))
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn tanh(x: __m256) -> __m256 {
    let sign = _mm256_and_ps(x, _mm256_set1_ps(-0.0));
    let magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0), x);
    let e = exp2(_mm256_mul_ps(magnitude, _mm256_set1_ps(-2.0 * std::f32::consts::LOG2_E)));
    let one = _mm256_set1_ps(1.0);
    _mm256_or_ps(_mm256_div_ps(_mm256_sub_ps(one, e), _mm256_add_ps(one, e)), sign)
}

/// As the scalar kernel of the name.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::attention) fn softmax_step(
    scores: &mut BlockRow,
    factors: &BlockRow,
    visible: Range<usize>,
    scale: ScoreScale,
    max_so_far: &mut f32,
    sum_so_far: &mut f32,
) -> f32 {
    let mut s = [_mm256_setzero_ps(); VECTORS];
    for (s, (dot, factor)) in s.iter_mut().zip(scores.0.as_chunks().0.iter().zip(factors.0.as_chunks().0)) {
        *s = _mm256_mul_ps(load(dot), load(factor));
    }
    match scale {
        ScoreScale::Plain(factor) => {
            for s in &mut s {
                *s = _mm256_mul_ps(*s, _mm256_set1_ps(factor));
            }
        }
        ScoreScale::Capped { inner, outer } => {
            for s in &mut s {
                *s = _mm256_mul_ps(tanh(_mm256_mul_ps(*s, _mm256_set1_ps(inner))), _mm256_set1_ps(outer));
            }
        }
    }
    if visible != (0..BLOCK_TOKENS) {
        hide(&mut s, scores, visible);
    }
    let largest = max(_mm256_max_ps(
        _mm256_max_ps(_mm256_max_ps(s[0], s[1]), _mm256_max_ps(s[2], s[3])),
        _mm256_max_ps(_mm256_max_ps(s[4], s[5]), _mm256_max_ps(s[6], s[7])),
    ));
    let new_max = max_so_far.max(largest);
    // Nothing seen yet, or only scores of -inf: any finite reference will do.
    let reference = if new_max == f32::NEG_INFINITY { 0.0 } else { new_max };
    let correction = if new_max == *max_so_far { 1.0 } else { (*max_so_far - reference).exp2() };
    for (s, out) in s.iter_mut().zip(scores.0.as_chunks_mut().0) {
        *s = exp2(_mm256_sub_ps(*s, _mm256_set1_ps(reference)));
        store(out, *s);
    }
    let total = sum(_mm256_add_ps(
        _mm256_add_ps(_mm256_add_ps(s[0], s[1]), _mm256_add_ps(s[2], s[3])),
        _mm256_add_ps(_mm256_add_ps(s[4], s[5]), _mm256_add_ps(s[6], s[7])),
    ));
    *sum_so_far = *sum_so_far * correction + total;
    *max_so_far = new_max;
    correction
}

/// Makes scores outside of `visible` -inf.
#[target_feature(enable = "avx2,fma,f16c")]
#[cold]
fn hide(s: &mut [__m256; VECTORS], scratch: &mut BlockRow, visible: Range<usize>) {
    for (s, out) in s.iter().zip(scratch.0.as_chunks_mut().0) {
        store(out, *s);
    }
    scratch.0[..visible.start].fill(f32::NEG_INFINITY);
    scratch.0[visible.end..].fill(f32::NEG_INFINITY);
    for (s, from) in s.iter_mut().zip(scratch.0.as_chunks().0) {
        *s = load(from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::Avx2;

    #[test]
    fn exponentials_are_close() {
        if Avx2::detect().is_none() {
            return;
        }
        let eight = |x: f32| {
            // SAFETY: the features were just found.
            unsafe {
                let mut out = [0.0; LANES];
                store(&mut out, exp2(_mm256_set1_ps(x)));
                out[7]
            }
        };
        let mut worst = 0f64;
        for i in 0..2_000_000 {
            let x = -(i as f32) * 63e-6;
            worst = worst.max((f64::from(eight(x)) / f64::from(x).exp2() - 1.0).abs());
        }
        assert!(worst < 2e-7, "relative error {worst:e}");
        assert_eq!(eight(0.0), 1.0);
        for x in [-126.6, -1e6, f32::MIN, f32::NEG_INFINITY] {
            assert_eq!(eight(x), 0.0, "2^{x}");
        }
        assert!(eight(f32::NAN).is_nan());
    }
}
