//! Products of f32 activations with weights that are widened to f32 in registers.
//!
//! candle's products round the activations to the type of the weights, or to 8 bits per block. For
//! these types that is less accurate, overflows f16, and is no faster.

use crate::executor::ModelPool;
use candle_core::quantized::k_quants::{BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0, GgmlType};
use half::{bf16, f16};

use super::Output;
#[cfg(target_arch = "x86_64")]
use super::avx2;

/// Types that this module multiplies.
#[cfg(target_arch = "x86_64")]
pub(super) trait Widen: GgmlType + avx2::Units {}
/// Types that this module multiplies.
#[cfg(not(target_arch = "x86_64"))]
pub(super) trait Widen: GgmlType {}

impl Widen for f32 {}
impl Widen for f16 {}
impl Widen for bf16 {}
impl Widen for BlockQ4_0 {}
impl Widen for BlockQ4_1 {}
impl Widen for BlockQ5_0 {}
impl Widen for BlockQ5_1 {}
impl Widen for BlockQ8_0 {}

/// Rows of activations that a row of weights is widened for at once. What is computed for one of them
/// does not depend on how many there are.
#[cfg(target_arch = "x86_64")]
const ROWS: usize = 4;

/// `out = x * weights^T`, `weights [rows, cols]`
pub(super) fn product<T: Widen>(cols: usize, weights: &[T], x: &[f32], out: Output<'_>) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
    {
        return for_each_row(cols, weights, out, |weights, result| {
            let (fours, rest) = x.split_at(x.len() / (ROWS * cols) * ROWS * cols);
            let mut row = 0;
            for x in fours.chunks_exact(ROWS * cols) {
                // SAFETY: the features have just been detected.
                for dot in unsafe { avx2::dot::<T, ROWS>(weights, cols, x) } {
                    result(row, dot);
                    row += 1;
                }
            }
            for x in rest.chunks_exact(cols) {
                // SAFETY: as above.
                let [dot] = unsafe { avx2::dot::<T, 1>(weights, cols, x) };
                result(row, dot);
                row += 1;
            }
        });
    }
    product_scalar(cols, weights, x, out);
}

/// Without vector instructions: the reference of those with.
fn product_scalar<T: GgmlType>(cols: usize, weights: &[T], x: &[f32], out: Output<'_>) {
    for_each_row(cols, weights, out, |weights, result| {
        let mut wide = vec![0f32; cols];
        T::to_float(weights, &mut wide);
        for (row, x) in x.chunks_exact(cols).enumerate() {
            let mut sums = [0f32; 8];
            for (wide, x) in wide.chunks(8).zip(x.chunks(8)) {
                for ((sum, w), x) in sums.iter_mut().zip(wide).zip(x) {
                    *sum += w * x;
                }
            }
            result(row, sums.iter().sum());
        }
    });
}

/// Calls `dots(weights, result)` for each row of weights; `result(row, dot)` is for a row of activations.
fn for_each_row<T: GgmlType>(
    cols: usize,
    weights: &[T],
    out: Output<'_>,
    dots: impl Fn(&[T], &mut dyn FnMut(usize, f32)) + Sync,
) {
    let row_blocks = cols / T::BLCK_SIZE;
    ModelPool.for_each_range(weights.len() / row_blocks, |columns| {
        for column in columns {
            dots(&weights[column * row_blocks..][..row_blocks], &mut |row, dot| {
                // SAFETY: this column belongs to this row of weights, which one worker multiplies.
                unsafe { out.write(row, column, &[dot]) };
            });
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values without any pattern that a kernel could profit from.
    fn noise(len: usize, mut state: u32) -> Vec<f32> {
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..len).map(|_| next()).collect()
    }

    fn matches_f64<T: Widen>(cols: usize) {
        let (rows, tokens) = (5, 7);
        let mut weights = vec![T::zeros(); rows * cols / T::BLCK_SIZE];
        T::from_float(&noise(rows * cols, 1), &mut weights);
        let mut wide = vec![0f32; rows * cols];
        T::to_float(&weights, &mut wide);
        let x = noise(tokens * cols, 2);
        let (mut fast, mut scalar) = (vec![0f32; tokens * rows], vec![0f32; tokens * rows]);
        product(cols, &weights, &x, Output::new(&mut fast, rows, 0));
        product_scalar(cols, &weights, &x, Output::new(&mut scalar, rows, 0));
        for token in 0..tokens {
            for row in 0..rows {
                let terms = wide[row * cols..][..cols].iter().zip(&x[token * cols..]);
                let terms = terms.map(|(w, x)| f64::from(*w) * f64::from(*x));
                let (exact, size) = terms.fold((0.0, 0.0), |(sum, size), t| (sum + t, size + t.abs()));
                for got in [fast[token * rows + row], scalar[token * rows + row]] {
                    let error = (f64::from(got) - exact).abs();
                    assert!(error <= 1e-6 * size, "{:?} [{row}, {token}]: {got}, exact {exact}", T::DTYPE);
                }
            }
        }
        // One row alone gives the bits that it gives among others.
        for (token, x) in x.chunks_exact(cols).enumerate() {
            let mut alone = vec![0f32; rows];
            product(cols, &weights, x, Output::new(&mut alone, rows, 0));
            assert_eq!(alone, fast[token * rows..][..rows], "{:?} token {token}", T::DTYPE);
        }
    }

    #[test]
    fn products_match_f64_and_do_not_depend_on_other_rows() {
        for cols in [32, 64, 96, 576, 1536] {
            matches_f64::<f32>(cols);
            matches_f64::<f16>(cols);
            matches_f64::<bf16>(cols);
            matches_f64::<BlockQ4_0>(cols);
            matches_f64::<BlockQ4_1>(cols);
            matches_f64::<BlockQ5_0>(cols);
            matches_f64::<BlockQ5_1>(cols);
            matches_f64::<BlockQ8_0>(cols);
        }
        for cols in [1, 7, 8, 33, 100] {
            matches_f64::<f32>(cols);
            matches_f64::<f16>(cols);
            matches_f64::<bf16>(cols);
        }
    }
}
