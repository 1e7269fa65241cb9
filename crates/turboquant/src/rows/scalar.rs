//! The reference of every row kernel. It prescribes the order of all sums, so that packed bytes do
//! not depend on the instruction set: sums over a row run in 8 lanes (element i in lane i % 8),
//! which [`reduce`] adds up as a fixed tree; no multiplication is fused with an addition.

use half::{bf16, f16};

use super::Element;
use crate::{codebook::Codebook, fp8, hadamard::Rotation, layout::MAX_HEAD_DIM};

pub(super) fn widen_f32(src: &[f32], dst: &mut [f32]) -> u64 {
    widen(src, dst)
}

pub(super) fn widen_f16(src: &[f16], dst: &mut [f32]) -> u64 {
    widen(src, dst)
}

pub(super) fn widen_bf16(src: &[bf16], dst: &mut [f32]) -> u64 {
    widen(src, dst)
}

/// Exact; returns how many elements are not finite.
fn widen<T: Element>(src: &[T], dst: &mut [f32]) -> u64 {
    let mut non_finite = 0;
    for (to, from) in dst.iter_mut().zip(src) {
        *to = from.widen();
        non_finite += u64::from(!to.is_finite());
    }
    non_finite
}

pub(super) fn reduce(lanes: [f32; 8]) -> f32 {
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

pub(super) fn sum_squares(x: &[f32]) -> f32 {
    let mut lanes = [0.0; 8];
    for eight in x.chunks_exact(8) {
        for (lane, x) in lanes.iter_mut().zip(eight) {
            *lane += x * x;
        }
    }
    reduce(lanes)
}

/// `x @ H`, in place: butterflies of length 1, 2, 4, ... inside each Sylvester piece, then the Paley
/// part (from 0 on, in ascending order of its rows), then the scale.
pub(super) fn rotate(rotation: &Rotation, x: &mut [f32]) {
    rotate_by(rotation, x, |order, i, j| i * order + j);
}

/// `x @ H^T`, in place.
pub(super) fn rotate_back(rotation: &Rotation, x: &mut [f32]) {
    rotate_by(rotation, x, |order, i, j| j * order + i);
}

fn rotate_by(rotation: &Rotation, x: &mut [f32], entry: impl Fn(usize, usize, usize) -> usize) {
    let n = rotation.sylvester();
    butterflies(n, x);
    if let Some((order, paley)) = rotation.paley() {
        let mut pieces = [0.0; MAX_HEAD_DIM];
        let pieces = &mut pieces[..x.len()];
        pieces.copy_from_slice(x);
        x.fill(0.0);
        for (j, out) in x.chunks_exact_mut(n).enumerate() {
            for (i, piece) in pieces.chunks_exact(n).enumerate() {
                let sign = paley[entry(order, i, j)];
                for (y, z) in out.iter_mut().zip(piece) {
                    *y += sign * z;
                }
            }
        }
    }
    scale_by(rotation.scale(), x);
}

fn butterflies(n: usize, x: &mut [f32]) {
    let mut half = 1;
    while half < n {
        for pair in x.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
}

fn scale_by(scale: f32, x: &mut [f32]) {
    for x in x {
        *x *= scale;
    }
}

/// Codes of a finite key, one per byte; returns its norm. `x` is scratch.
pub(super) fn lloyd_max_codes(
    rotation: &Rotation,
    codebook: &Codebook,
    x: &mut [f32],
    codes: &mut [u8],
) -> f32 {
    let mut norm = sum_squares(x).sqrt();
    let mut scale = 1.0;
    if norm.is_infinite() {
        scale = super::HUGE_KEY_SCALE;
        scale_by(scale, x);
        norm = sum_squares(x).sqrt();
    }
    let divisor = norm + super::KEY_NORM_EPSILON;
    for x in x.iter_mut() {
        *x /= divisor;
    }
    rotate(rotation, x);
    for (code, y) in codes.iter_mut().zip(x) {
        *code = codebook.midpoints().iter().filter(|m| *y >= **m).count() as u8;
    }
    norm / scale
}

/// Bits above the codebook's do not count.
fn centroid(codebook: &Codebook, code: u8) -> f32 {
    let centroids = codebook.centroids();
    centroids[usize::from(code) & (centroids.len() - 1)]
}

/// Lloyd-Max centroids of codes, times `factor`.
pub(super) fn centroid_values(codebook: &Codebook, codes: &[u8], factor: f32, out: &mut [f32]) {
    for (x, code) in out.iter_mut().zip(codes) {
        *x = centroid(codebook, *code) * factor;
    }
}

/// Sum of the squared centroids of codes.
pub(super) fn centroid_squares(codebook: &Codebook, codes: &[u8]) -> f32 {
    let mut lanes = [0.0; 8];
    for eight in codes.chunks_exact(8) {
        for (lane, code) in lanes.iter_mut().zip(eight) {
            let c = centroid(codebook, *code);
            *lane += c * c;
        }
    }
    reduce(lanes)
}

pub(super) fn min_max(x: &[f32]) -> (f32, f32) {
    x.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), x| (low.min(*x), high.max(*x)))
}

/// `clamp(trunc((x - zero) / scale + 0.5), 0, levels)`, one code per byte.
pub(super) fn uniform_codes(x: &[f32], scale: f32, zero: f32, levels: f32, codes: &mut [u8]) {
    for (code, x) in codes.iter_mut().zip(x) {
        *code = ((x - zero) / scale + 0.5).clamp(0.0, levels) as u8;
    }
}

/// `code * scale + zero`.
pub(super) fn uniform_values(codes: &[u8], scale: f32, zero: f32, out: &mut [f32]) {
    for (x, code) in out.iter_mut().zip(codes) {
        *x = f32::from(*code) * scale + zero;
    }
}

/// e4m3 bytes; returns how many finite elements lay beyond +-448.
pub(super) fn fp8_bytes(x: &[f32], bytes: &mut [u8]) -> u64 {
    let mut clipped = 0;
    for (byte, x) in bytes.iter_mut().zip(x) {
        *byte = fp8::encode(*x);
        clipped += u64::from(x.abs() > fp8::E4M3_MAX && x.is_finite());
    }
    clipped
}

pub(super) fn fp8_values(bytes: &[u8], out: &mut [f32]) {
    for (x, byte) in out.iter_mut().zip(bytes) {
        *x = fp8::decode(*byte);
    }
}

pub(super) fn pack3(codes: &[u8], packed: &mut [u8]) {
    for (codes, bytes) in codes.chunks_exact(8).zip(packed.chunks_exact_mut(3)) {
        let word = codes.iter().enumerate().fold(0u32, |word, (i, code)| word | u32::from(*code) << (3 * i));
        bytes.copy_from_slice(&word.to_le_bytes()[..3]);
    }
}

pub(super) fn pack4(codes: &[u8], packed: &mut [u8]) {
    for (codes, byte) in codes.chunks_exact(2).zip(packed) {
        *byte = codes[0] | codes[1] << 4;
    }
}

pub(super) fn unpack3(packed: &[u8], codes: &mut [u8]) {
    for (codes, bytes) in codes.chunks_exact_mut(8).zip(packed.chunks_exact(3)) {
        let word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], 0]);
        for (i, code) in codes.iter_mut().enumerate() {
            *code = (word >> (3 * i)) as u8 & 7;
        }
    }
}

pub(super) fn unpack4(packed: &[u8], codes: &mut [u8]) {
    for (codes, byte) in codes.chunks_exact_mut(2).zip(packed) {
        codes[0] = byte & 15;
        codes[1] = byte >> 4;
    }
}

/// f16 elements, little-endian, saturating; returns how many finite elements saturated.
pub(super) fn f16_bytes(x: &[f32], bytes: &mut [u8]) -> u64 {
    let mut saturated = 0;
    for (bytes, x) in bytes.as_chunks_mut().0.iter_mut().zip(x) {
        let mut y = f16::from_f32(*x);
        if y.is_infinite() && x.is_finite() {
            saturated += 1;
            y = f16::MAX.copysign(y);
        }
        *bytes = y.to_le_bytes();
    }
    saturated
}

pub(super) fn f16_values(bytes: &[u8], out: &mut [f32]) {
    for (x, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
        *x = f16::from_le_bytes(*bytes).to_f32();
    }
}

/// bf16 elements, little-endian, saturating; returns how many finite elements saturated.
pub(super) fn bf16_bytes(x: &[f32], bytes: &mut [u8]) -> u64 {
    let mut saturated = 0;
    for (bytes, x) in bytes.as_chunks_mut().0.iter_mut().zip(x) {
        let mut y = bf16::from_f32(*x);
        if y.is_infinite() && x.is_finite() {
            saturated += 1;
            y = bf16::MAX.copysign(y);
        }
        *bytes = y.to_le_bytes();
    }
    saturated
}

pub(super) fn bf16_values(bytes: &[u8], out: &mut [f32]) {
    for (x, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
        *x = bf16::from_le_bytes(*bytes).to_f32();
    }
}
