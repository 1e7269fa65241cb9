//! `out [m, rows] = x [m, cols] * weights^T`, in two ways.
//!
//! Generated tokens come a few at a time: their product reads the weights as they are stored, and is
//! bound by memory ([`decode`]). Prompts come in hundreds of rows: a tile of weights is unpacked to f32
//! once and used for all of them, bound by arithmetic ([`prefill`]). Which one a row takes is decided by
//! its phase and not by how many rows there are, and within each a row's result depends on that row
//! alone: so a token's logits do not depend on what else is in the batch.
#![expect(unsafe_code, reason = "workers write disjoint columns of one output")]

#[cfg(target_arch = "x86_64")]
mod avx2;
mod tile;
mod widen;

use std::marker::PhantomData;

use candle_core::quantized::k_quants::GgmlType;

use super::blocks::{Blocks, Matrix};
use crate::batch::Phase;
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

    /// Where `(row, column)` is, for `width` elements of that row.
    fn at(&self, row: usize, column: usize, width: usize) -> *mut f32 {
        assert!(row < self.rows && self.column + column + width <= self.stride);
        // SAFETY: in bounds, as just checked.
        unsafe { self.start.add(row * self.stride + self.column + column) }
    }

    /// Copies `values` to `row`, from `column` on.
    ///
    /// # Safety
    /// No other thread reads or writes these elements at the same time.
    unsafe fn write(&self, row: usize, column: usize, values: &[f32]) {
        let target = self.at(row, column, values.len());
        // SAFETY: `at` has checked the bounds; the caller is alone with these elements.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), target, values.len()) };
    }
}

/// The product of rows of one phase.
pub(crate) fn product(matrix: &Matrix, phase: Phase, x: &[f32], out: Output<'_>) {
    match phase {
        Phase::Prefill => tile::prefill(matrix, x, out),
        Phase::Decode => decode(matrix, x, out),
    }
}

/// K-quants meet activations that candle rounds to 8 bits per 256, as llama.cpp does; all other weights
/// meet f32 activations.
fn decode(matrix: &Matrix, x: &[f32], out: Output<'_>) {
    match &matrix.blocks {
        Blocks::F32(weights) => widen::product(matrix.cols, weights, x, out),
        Blocks::F16(weights) => widen::product(matrix.cols, weights, x, out),
        Blocks::Bf16(weights) => widen::product(matrix.cols, weights, x, out),
        Blocks::Q4_0(weights) => widen::product(matrix.cols, weights, x, out),
        Blocks::Q4_1(weights) => widen::product(matrix.cols, weights, x, out),
        Blocks::Q5_0(weights) => widen::product(matrix.cols, weights, x, out),
        Blocks::Q5_1(weights) => widen::product(matrix.cols, weights, x, out),
        Blocks::Q8_0(weights) => widen::product(matrix.cols, weights, x, out),
        Blocks::Q2K(weights) => k_quant(matrix, weights, x, out),
        Blocks::Q3K(weights) => k_quant(matrix, weights, x, out),
        Blocks::Q4K(weights) => k_quant(matrix, weights, x, out),
        Blocks::Q5K(weights) => k_quant(matrix, weights, x, out),
        Blocks::Q6K(weights) => k_quant(matrix, weights, x, out),
    }
}

fn k_quant<T: GgmlType>(matrix: &Matrix, weights: &[T], x: &[f32], out: Output<'_>) {
    let Matrix { rows, cols, .. } = *matrix;
    let blocks = cols / T::BLCK_SIZE;
    let mut rounded = vec![T::VecDotType::zeros(); x.len() / T::BLCK_SIZE];
    for (x, rounded) in x.chunks_exact(cols).zip(rounded.chunks_exact_mut(blocks)) {
        T::VecDotType::from_float(x, rounded);
    }
    let weights_of = |column: usize| &weights[column * blocks..][..blocks];
    ModelPool.for_each_range(rows.div_ceil(4), |fours| {
        for first in fours.map(|four| 4 * four) {
            for (row, x) in rounded.chunks_exact(blocks).enumerate() {
                if first + 4 <= rows {
                    let [a, b, c, d] = [0, 1, 2, 3].map(|column| weights_of(first + column));
                    let dots = T::vec_dot_4(cols, a, b, c, d, x);
                    // SAFETY: these four columns belong to this item, which one worker takes.
                    unsafe { out.write(row, first, &[dots.0, dots.1, dots.2, dots.3]) };
                    continue;
                }
                for column in first..rows {
                    // SAFETY: as above.
                    unsafe { out.write(row, column, &[T::vec_dot(cols, weights_of(column), x)]) };
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use candle_core::quantized::k_quants::{self, BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5K, BlockQ6K};

    use super::*;

    fn is_candles<T: GgmlType>(blocks: impl Fn(Vec<T>) -> Blocks) {
        let noise = |len, step: f32| -> Vec<f32> { (0..len).map(|i| (i as f32 * step).sin()).collect() };
        // Rows of weights that fill fours, and rows that do not.
        for rows in [8, 10, 11] {
            let (cols, tokens) = (512, 3);
            let mut weights = vec![T::zeros(); rows * cols / T::BLCK_SIZE];
            T::from_float(&noise(rows * cols, 0.7), &mut weights);
            let x = noise(tokens * cols, 1.3);
            let mut expected = vec![0f32; tokens * rows];
            k_quants::matmul((tokens, cols, rows), &x, &weights, &mut expected).unwrap();
            let matrix = Matrix { rows, cols, blocks: blocks(weights) };
            let mut got = vec![0f32; tokens * rows];
            product(&matrix, Phase::Decode, &x, Output::new(&mut got, rows, 0));
            assert_eq!(got, expected, "{:?}, {rows} rows", T::DTYPE);
            for (x, expected) in x.chunks_exact(cols).zip(expected.chunks_exact(rows)) {
                let mut alone = vec![0f32; rows];
                product(&matrix, Phase::Decode, x, Output::new(&mut alone, rows, 0));
                assert_eq!(alone, expected, "{:?}, one token", T::DTYPE);
            }
        }
    }

    #[test]
    fn products_of_k_quants_are_candles_and_do_not_depend_on_other_rows() {
        is_candles::<BlockQ2K>(Blocks::Q2K);
        is_candles::<BlockQ3K>(Blocks::Q3K);
        is_candles::<BlockQ4K>(Blocks::Q4K);
        is_candles::<BlockQ5K>(Blocks::Q5K);
        is_candles::<BlockQ6K>(Blocks::Q6K);
    }
}
