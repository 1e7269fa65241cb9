//! Products against f64.

use candle_core::quantized::k_quants::{
    self, BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K,
    BlockQ8_0, GgmlType,
};
use half::{bf16, f16};

use super::{Output, product, product_scalar};
use crate::weights::blocks::{Blocks, Matrix};

/// Values without any pattern that a kernel could profit from.
fn noise(len: usize, mut state: u32) -> Vec<f32> {
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn multiply(matrix: &Matrix, x: &[f32]) -> Vec<f32> {
    let mut out = vec![f32::NAN; x.len() / matrix.cols * matrix.rows];
    product(matrix, x, Output::new(&mut out, matrix.rows, 0));
    out
}

/// `error` is relative to the sum of the products' sizes.
fn matches_f64<T: GgmlType>(cols: usize, error: f64, wrap: impl Fn(Vec<T>) -> Blocks) {
    let (rows, tokens) = (5, 11);
    let mut weights = vec![T::zeros(); rows * cols / T::BLCK_SIZE];
    let mut values = noise(rows * cols, 1);
    // Rows of another size, and blocks that are all one value.
    values[cols..2 * cols].iter_mut().for_each(|x| *x *= 100.0);
    values[2 * cols..3 * cols].fill(0.25);
    values[3 * cols..4 * cols].fill(0.0);
    T::from_float(&values, &mut weights);
    let mut wide = vec![0f32; rows * cols];
    T::to_float(&weights, &mut wide);
    let mut x = noise(tokens * cols, 2);
    x[..cols].fill(0.0);
    x[cols..2 * cols].iter_mut().for_each(|x| *x = *x * 3.0 + 2.0);
    let mut scalar = vec![0f32; tokens * rows];
    product_scalar(cols, &weights, &x, Output::new(&mut scalar, rows, 0));
    let matrix = Matrix { rows, cols, blocks: wrap(weights) };
    let fast = multiply(&matrix, &x);
    for token in 0..tokens {
        for row in 0..rows {
            let terms = wide[row * cols..][..cols].iter().zip(&x[token * cols..]);
            let terms = terms.map(|(w, x)| f64::from(*w) * f64::from(*x));
            let (exact, size) = terms.fold((0.0, 0.0), |(sum, size), t| (sum + t, size + t.abs()));
            for (got, error) in [(fast[token * rows + row], error), (scalar[token * rows + row], 1e-6)] {
                let got = f64::from(got);
                assert!(
                    (got - exact).abs() <= error * size,
                    "{:?}, {cols} columns [{row}, {token}]: {got}, exact {exact} of {size}",
                    T::DTYPE
                );
            }
        }
    }
    // One row alone, or two, give the bits that they give among others.
    for at in 0..tokens - 1 {
        let two = &x[at * cols..(at + 2) * cols];
        assert_eq!(multiply(&matrix, two), fast[at * rows..(at + 2) * rows], "{:?} row {at}", T::DTYPE);
        assert_eq!(
            multiply(&matrix, &two[..cols]),
            fast[at * rows..(at + 1) * rows],
            "{:?} row {at}",
            T::DTYPE
        );
    }
    if error == EIGHT_BITS {
        return; // candle's rounding loses what is not finite
    }
    // What is not finite stays so, in its own row only.
    x[3 * cols] = f32::NAN;
    x[5 * cols + cols / 2] = f32::INFINITY;
    let poisoned = multiply(&matrix, &x);
    for token in 0..tokens {
        let (got, before) = (&poisoned[token * rows..][..rows], &fast[token * rows..][..rows]);
        match token {
            3 | 5 => assert!(got.iter().all(|y| !y.is_finite()), "{:?}: {got:?}", T::DTYPE),
            _ => assert_eq!(got, before, "{:?}", T::DTYPE),
        }
    }
}

/// Activations of 16 bits are off by at most half a step of 1/32767 of their block's largest.
const SIXTEEN_BITS: f64 = 3e-5;
/// And of 8 bits by half a step of 1/127.
const EIGHT_BITS: f64 = 8e-3;

#[test]
fn products_match_f64_and_do_not_depend_on_other_rows() {
    for cols in [1, 7, 8, 33, 64, 100, 1536] {
        matches_f64::<f32>(cols, 1e-6, Blocks::F32);
        matches_f64::<f16>(cols, 1e-6, Blocks::F16);
        matches_f64::<bf16>(cols, 1e-6, Blocks::Bf16);
    }
    for cols in [32, 64, 96, 160, 576, 1536] {
        matches_f64::<BlockQ4_0>(cols, SIXTEEN_BITS, Blocks::Q4_0);
        matches_f64::<BlockQ4_1>(cols, SIXTEEN_BITS, Blocks::Q4_1);
        matches_f64::<BlockQ5_0>(cols, SIXTEEN_BITS, Blocks::Q5_0);
        matches_f64::<BlockQ5_1>(cols, SIXTEEN_BITS, Blocks::Q5_1);
        matches_f64::<BlockQ8_0>(cols, SIXTEEN_BITS, Blocks::Q8_0);
    }
    for cols in [256, 768, 2048] {
        matches_f64::<BlockQ4K>(cols, SIXTEEN_BITS, Blocks::Q4K);
        matches_f64::<BlockQ5K>(cols, SIXTEEN_BITS, Blocks::Q5K);
        matches_f64::<BlockQ6K>(cols, SIXTEEN_BITS, Blocks::Q6K);
    }
}

#[test]
fn products_by_candle_match_f64_too() {
    for cols in [256, 768] {
        matches_f64::<BlockQ2K>(cols, EIGHT_BITS, Blocks::Q2K);
        matches_f64::<BlockQ3K>(cols, EIGHT_BITS, Blocks::Q3K);
    }
}

#[test]
fn products_by_candle_are_candles() {
    fn check<T: GgmlType>(wrap: impl Fn(Vec<T>) -> Blocks) {
        let (rows, cols, tokens) = (11, 512, 3);
        let mut weights = vec![T::zeros(); rows * cols / T::BLCK_SIZE];
        T::from_float(&noise(rows * cols, 5), &mut weights);
        let x = noise(tokens * cols, 6);
        let mut expected = vec![0f32; tokens * rows];
        k_quants::matmul((tokens, cols, rows), &x, &weights, &mut expected).unwrap();
        assert_eq!(multiply(&Matrix { rows, cols, blocks: wrap(weights) }, &x), expected, "{:?}", T::DTYPE);
    }
    check::<BlockQ2K>(Blocks::Q2K);
    check::<BlockQ3K>(Blocks::Q3K);
}
