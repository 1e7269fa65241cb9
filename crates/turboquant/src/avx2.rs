//! Vectors of eight f32: what the row kernels and the attention kernels both load and store.

#![expect(unsafe_code, reason = "vector loads and stores take raw pointers")]

use std::arch::x86_64::*;

pub(crate) const LANES: usize = 8;

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(crate) fn load(x: &[f32; LANES]) -> __m256 {
    // SAFETY: eight f32 behind the reference; the load needs no alignment.
    unsafe { _mm256_loadu_ps(x.as_ptr()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(crate) fn store(x: &mut [f32; LANES], v: __m256) {
    // SAFETY: as load.
    unsafe { _mm256_storeu_ps(x.as_mut_ptr(), v) }
}
