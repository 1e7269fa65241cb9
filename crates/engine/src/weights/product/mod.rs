//! `out [m, rows] = x [m, cols] * weights^T`
//!
//! A row of the result depends on that row of `x` alone, not on how many rows there are: so a token's
//! logits do not depend on what else is in the batch, nor a prompt's on how it is cut.
//!
//! Weights are read as they are stored, and unpacked in registers: to f32 where they are floats, to
//! 16-bit integers where they are quantised, in which case the activations are rounded to 16 bits per
//! block of 32. (candle's products round activations to the type of the weights or to 8 bits, and have
//! no vector kernels for half of these types.)
#![expect(unsafe_code, reason = "vector kernels, and workers that write disjoint columns of one output")]

#[cfg(target_arch = "x86_64")]
mod activations;
#[cfg(target_arch = "x86_64")]
mod codes;
#[cfg(target_arch = "x86_64")]
mod fixed;
#[cfg(target_arch = "x86_64")]
mod floats;
#[cfg(target_arch = "x86_64")]
mod k_codes;
#[cfg(test)]
mod tests;

use std::marker::PhantomData;
use std::ops::Range;

use candle_core::quantized::k_quants::GgmlType;

use super::blocks::{Blocks, Matrix};
use crate::executor::ModelPool;

/// Columns `column..` of a row-major output, written by many threads, each element by one.
#[derive(Clone, Copy)]
pub(crate) struct Output<'a> {
    start: *mut f32,
    rows: usize,
    stride: usize,
    column: usize,
    _out: PhantomData<&'a mut [f32]>,
}

// SAFETY: a pointer into a slice of f32 that is exclusively borrowed for 'a; writes go through
// `write`, whose callers promise that no two threads write the same element.
unsafe impl Send for Output<'_> {}
// SAFETY: as above.
unsafe impl Sync for Output<'_> {}

impl<'a> Output<'a> {
    /// `out [rows, stride]`
    pub(crate) fn new(out: &'a mut [f32], stride: usize, column: usize) -> Self {
        Output { start: out.as_mut_ptr(), rows: out.len() / stride, stride, column, _out: PhantomData }
    }

    /// # Safety
    /// No other thread reads or writes this element at the same time.
    unsafe fn write(&self, row: usize, column: usize, value: f32) {
        assert!(row < self.rows && self.column + column < self.stride);
        // SAFETY: in bounds, as just checked; the caller is alone with this element.
        unsafe { *self.start.add(row * self.stride + self.column + column) = value };
    }
}

/// The product of `x [m, matrix.cols]` with a matrix.
pub(crate) fn product(matrix: &Matrix, x: &[f32], out: Output<'_>) {
    let cols = matrix.cols;
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
    {
        // SAFETY: the features have just been detected.
        unsafe {
            match &matrix.blocks {
                Blocks::F32(weights) => floats::product(cols, weights, x, out),
                Blocks::F16(weights) => floats::product(cols, weights, x, out),
                Blocks::Bf16(weights) => floats::product(cols, weights, x, out),
                Blocks::Q4_0(weights) => fixed::product(cols, weights, x, out),
                Blocks::Q4_1(weights) => fixed::product(cols, weights, x, out),
                Blocks::Q5_0(weights) => fixed::product(cols, weights, x, out),
                Blocks::Q5_1(weights) => fixed::product(cols, weights, x, out),
                Blocks::Q8_0(weights) => fixed::product(cols, weights, x, out),
                Blocks::Q4K(weights) => fixed::product(cols, weights, x, out),
                Blocks::Q5K(weights) => fixed::product(cols, weights, x, out),
                Blocks::Q6K(weights) => fixed::product(cols, weights, x, out),
                Blocks::Q2K(weights) => by_candle(cols, weights, x, out),
                Blocks::Q3K(weights) => by_candle(cols, weights, x, out),
            }
        }
        return;
    }
    match &matrix.blocks {
        Blocks::F32(weights) => product_scalar(cols, weights, x, out),
        Blocks::F16(weights) => product_scalar(cols, weights, x, out),
        Blocks::Bf16(weights) => product_scalar(cols, weights, x, out),
        Blocks::Q4_0(weights) => by_candle(cols, weights, x, out),
        Blocks::Q4_1(weights) => product_scalar(cols, weights, x, out),
        Blocks::Q5_0(weights) => product_scalar(cols, weights, x, out),
        Blocks::Q5_1(weights) => product_scalar(cols, weights, x, out),
        Blocks::Q8_0(weights) => by_candle(cols, weights, x, out),
        Blocks::Q2K(weights) => by_candle(cols, weights, x, out),
        Blocks::Q3K(weights) => by_candle(cols, weights, x, out),
        Blocks::Q4K(weights) => by_candle(cols, weights, x, out),
        Blocks::Q5K(weights) => by_candle(cols, weights, x, out),
        Blocks::Q6K(weights) => by_candle(cols, weights, x, out),
    }
}

/// With activations rounded to 8 bits per block.
fn by_candle<T: GgmlType>(cols: usize, weights: &[T], x: &[f32], out: Output<'_>) {
    let blocks = cols / T::BLCK_SIZE;
    let mut rounded = vec![T::VecDotType::zeros(); x.len() / T::BLCK_SIZE];
    for (x, rounded) in x.chunks_exact(cols).zip(rounded.chunks_exact_mut(blocks)) {
        T::VecDotType::from_float(x, rounded);
    }
    ModelPool.for_each_range(weights.len() / blocks, |columns| {
        for column in columns {
            for (row, x) in rounded.chunks_exact(blocks).enumerate() {
                let dot = T::vec_dot(cols, &weights[column * blocks..][..blocks], x);
                // SAFETY: this column belongs to this row of weights, which one worker multiplies.
                unsafe { out.write(row, column, dot) };
            }
        }
    });
}

/// Row by row through f32: the reference of the vector kernels.
fn product_scalar<T: GgmlType>(cols: usize, weights: &[T], x: &[f32], out: Output<'_>) {
    let row_blocks = cols / T::BLCK_SIZE;
    ModelPool.for_each_range(weights.len() / row_blocks, |columns| {
        let mut wide = vec![0f32; cols];
        for column in columns {
            T::to_float(&weights[column * row_blocks..][..row_blocks], &mut wide);
            for (row, x) in x.chunks_exact(cols).enumerate() {
                let mut sums = [0f32; 8];
                for (wide, x) in wide.chunks(8).zip(x.chunks(8)) {
                    for ((sum, w), x) in sums.iter_mut().zip(wide).zip(x) {
                        *sum += w * x;
                    }
                }
                // SAFETY: this column belongs to this row of weights, which one worker multiplies.
                unsafe { out.write(row, column, sums.iter().sum()) };
            }
        }
    });
}

/// Rows of activations that a row of weights is unpacked for at once. What is computed for one of them
/// must not depend on how many there are.
#[cfg(target_arch = "x86_64")]
const GROUP: usize = 4;

/// Rows of activations of a tile, at most.
#[cfg(target_arch = "x86_64")]
const MAX_TILE: usize = 32;

/// Calls `dots(row of weights, rows of x, results, scratch)` for all pairs of them, a tile of `x` at a
/// time that stays in a core's first cache while the worker's weights pass by. The scratch keeps its
/// length between calls.
#[cfg(target_arch = "x86_64")]
fn for_each_tile(
    weights_rows: usize,
    x_rows: usize,
    x_row_bytes: usize,
    out: Output<'_>,
    dots: impl Fn(usize, Range<usize>, &mut [f32], &mut Vec<f32>) + Sync,
) {
    const CACHE_BYTES: usize = 24 << 10;
    let tile_rows = (CACHE_BYTES / x_row_bytes / GROUP * GROUP).clamp(2 * GROUP, MAX_TILE);
    ModelPool.for_each_range(weights_rows, |columns| {
        let mut scratch = Vec::new();
        for start in (0..x_rows).step_by(tile_rows) {
            let tile = start..x_rows.min(start + tile_rows);
            for column in columns.clone() {
                let mut results = [0f32; MAX_TILE];
                let results = &mut results[..tile.len()];
                dots(column, tile.clone(), results, &mut scratch);
                for (row, result) in tile.clone().zip(results) {
                    // SAFETY: this column is this worker's alone.
                    unsafe { out.write(row, column, *result) };
                }
            }
        }
    });
}
