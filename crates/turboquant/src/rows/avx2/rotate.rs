//! The rotation.

use std::arch::x86_64::*;

use super::{LANES, load, scale_by, store};
use crate::{hadamard::Rotation, layout::MAX_HEAD_DIM};

#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::rows) fn rotate(rotation: &Rotation, x: &mut [f32]) {
    let n = rotation.sylvester();
    butterflies(n, x);
    if let Some((order, entries)) = rotation.paley() {
        match n {
            1 => paley::<1>(order, rotation.spread_paley(), x),
            2 => paley::<2>(order, rotation.spread_paley(), x),
            4 => paley::<4>(order, rotation.spread_paley(), x),
            _ => wide_paley(n, order, entries, x),
        }
    }
    scale_by(rotation.scale(), x);
}

/// Stages of length 1, 2 and 4 inside a vector, as far as they are shorter than `n`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn short_butterflies(n: usize, mut v: __m256) -> __m256 {
    // The lane that subtracts gets (partner + -itself), which rounds like (partner - itself).
    let flip = |v: __m256, signs: __m256| _mm256_xor_ps(v, signs);
    if n >= 2 {
        let odd = _mm256_setr_ps(0.0, -0.0, 0.0, -0.0, 0.0, -0.0, 0.0, -0.0);
        v = _mm256_add_ps(_mm256_permute_ps(v, 0b10_11_00_01), flip(v, odd));
    }
    if n >= 4 {
        let upper_pairs = _mm256_setr_ps(0.0, 0.0, -0.0, -0.0, 0.0, 0.0, -0.0, -0.0);
        v = _mm256_add_ps(_mm256_permute_ps(v, 0b01_00_11_10), flip(v, upper_pairs));
    }
    if n >= 8 {
        let upper_half = _mm256_setr_ps(0.0, 0.0, 0.0, 0.0, -0.0, -0.0, -0.0, -0.0);
        v = _mm256_add_ps(_mm256_permute2f128_ps(v, v, 1), flip(v, upper_half));
    }
    v
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn butterfly(a: __m256, b: __m256) -> (__m256, __m256) {
    (_mm256_add_ps(a, b), _mm256_sub_ps(a, b))
}

/// Three stages at once over eight vectors.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn butterflies_of_8(v: [__m256; 8]) -> [__m256; 8] {
    let [a, b, c, d, e, f, g, h] = v;
    let ((a, b), (c, d), (e, f), (g, h)) =
        (butterfly(a, b), butterfly(c, d), butterfly(e, f), butterfly(g, h));
    let ((a, c), (b, d), (e, g), (f, h)) =
        (butterfly(a, c), butterfly(b, d), butterfly(e, g), butterfly(f, h));
    let ((a, e), (b, f), (c, g), (d, h)) =
        (butterfly(a, e), butterfly(b, f), butterfly(c, g), butterfly(d, h));
    [a, b, c, d, e, f, g, h]
}

#[target_feature(enable = "avx2,fma,f16c")]
fn butterflies(n: usize, x: &mut [f32]) {
    let (x, _) = x.as_chunks_mut::<LANES>();
    // Length of the next stage, in vectors.
    let mut half = 1;
    if n >= 64 {
        for eight in x.as_chunks_mut::<8>().0 {
            let v = eight.each_ref().map(|x| short_butterflies(64, load(x)));
            for (x, v) in eight.iter_mut().zip(butterflies_of_8(v)) {
                store(x, v);
            }
        }
        half = 8;
    } else {
        for x in x.iter_mut() {
            store(x, short_butterflies(n, load(x)));
        }
    }
    while half * LANES < n {
        for pair in x.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                let (sum, difference) = butterfly(load(a), load(b));
                store(a, sum);
                store(b, difference);
            }
        }
        half *= 2;
    }
}

/// The Paley part where a Sylvester piece fills whole vectors, four pieces at a time: one vector of
/// an input piece serves four output pieces. A product with 1 or -1 is exact, so the fused operation
/// rounds like an addition.
#[target_feature(enable = "avx2,fma,f16c")]
fn wide_paley(n: usize, order: usize, entries: &[f32], x: &mut [f32]) {
    let mut z = [0.0; MAX_HEAD_DIM];
    z[..x.len()].copy_from_slice(x);
    let (z, _) = z.as_chunks::<LANES>();
    let vectors = n / LANES;
    // A Paley order is a multiple of 4.
    for (j, out) in x.chunks_exact_mut(4 * n).enumerate() {
        let (out, _) = out.as_chunks_mut::<LANES>();
        for at in 0..vectors {
            let mut sums = [_mm256_setzero_ps(); 4];
            for (row, z) in entries.chunks_exact(order).zip(z[at..].iter().step_by(vectors)) {
                let z = load(z);
                for (sum, entry) in sums.iter_mut().zip(&row.as_chunks::<4>().0[j]) {
                    *sum = _mm256_fmadd_ps(z, _mm256_set1_ps(*entry), *sum);
                }
            }
            for (out, sum) in out[at..].iter_mut().step_by(vectors).zip(sums) {
                store(out, sum);
            }
        }
    }
}

/// The Paley part where a vector holds `8 / N` pieces of length N, four output vectors at a time.
#[target_feature(enable = "avx2,fma,f16c")]
fn paley<const N: usize>(order: usize, spread_entries: &[f32], x: &mut [f32]) {
    let mut z = [0.0; MAX_HEAD_DIM];
    z[..x.len()].copy_from_slice(x);
    let z = &z.as_chunks::<N>().0[..order];
    let (rows, _) = spread_entries.as_chunks::<LANES>();
    let (x, _) = x.as_chunks_mut::<LANES>();
    let vectors = x.len();
    let (fours, rest) = x.as_chunks_mut::<4>();
    let first_of_rest = 4 * fours.len();
    for (k, four) in fours.iter_mut().enumerate() {
        paley_vectors(z, &rows[4 * k..], vectors, four);
    }
    for (k, one) in rest.iter_mut().enumerate() {
        paley_vectors(z, &rows[first_of_rest + k..], vectors, std::array::from_mut(one));
    }
}

/// B neighbouring output vectors: the input piece is repeated to fill a vector, and `rows` has each
/// entry N times, `vectors` vectors to a row.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn paley_vectors<const N: usize, const B: usize>(
    z: &[[f32; N]],
    rows: &[[f32; LANES]],
    vectors: usize,
    out: &mut [[f32; LANES]; B],
) {
    let mut sums = [_mm256_setzero_ps(); B];
    for (z, row) in z.iter().zip(rows.chunks(vectors)) {
        let z = repeat(z);
        for (sum, entries) in sums.iter_mut().zip(&row[..B]) {
            *sum = _mm256_fmadd_ps(z, load(entries), *sum);
        }
    }
    for (out, sum) in out.iter_mut().zip(sums) {
        store(out, sum);
    }
}

/// N = 1, 2 or 4 elements over and over.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn repeat<const N: usize>(x: &[f32; N]) -> __m256 {
    load(&std::array::from_fn(|lane| x[lane % N]))
}
