//! Products of prompt rows: weights unpacked to f32 tile by tile.

use std::cell::RefCell;

use crate::executor::ModelPool;

use super::Output;
use crate::weights::blocks::Matrix;

/// Rows of activations per call of the matrix product. Every call has this height, missing rows being
/// zeros: its order of sums may depend on the shape, so the shape must not depend on the batch.
const TILE_ROWS: usize = 64;

/// Rows of weights that are unpacked at a time; with 1536 columns 384 KiB, which stays in a core's cache.
const TILE_COLS: usize = 64;

/// `out = x * matrix^T`
pub(super) fn prefill(matrix: &Matrix, x: &[f32], out: Output<'_>) {
    thread_local! {
        static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    }
    let cols = matrix.cols;
    let rows = x.len() / cols;
    let (whole, rest) = x.split_at(rows / TILE_ROWS * TILE_ROWS * cols);
    let mut last = Vec::new();
    if !rest.is_empty() {
        last.extend_from_slice(rest);
        last.resize(TILE_ROWS * cols, 0.0);
    }
    ModelPool.for_each_range(matrix.rows.div_ceil(TILE_COLS), |tiles| {
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.resize(TILE_COLS * (cols + TILE_ROWS), 0.0);
            let (weights, product) = scratch.split_at_mut(TILE_COLS * cols);
            for tile in tiles {
                let first = tile * TILE_COLS;
                let width = TILE_COLS.min(matrix.rows - first);
                let weights = &mut weights[..width * cols];
                let product = &mut product[..TILE_ROWS * width];
                matrix.dequantize_rows(first, weights);
                for (index, x) in whole.chunks_exact(TILE_ROWS * cols).chain([&last[..]]).enumerate() {
                    if x.is_empty() {
                        continue;
                    }
                    multiply(cols, x, weights, product);
                    for (row, values) in product.chunks_exact(width).enumerate() {
                        let row = index * TILE_ROWS + row;
                        if row < rows {
                            // SAFETY: these columns belong to this tile, and each tile to one worker.
                            unsafe { out.write(row, first, values) };
                        }
                    }
                }
            }
        });
    });
}

/// `product [TILE_ROWS, width] = x [TILE_ROWS, cols] * weights [width, cols]^T`
fn multiply(cols: usize, x: &[f32], weights: &[f32], product: &mut [f32]) {
    let width = weights.len() / cols;
    assert_eq!(x.len(), TILE_ROWS * cols);
    assert_eq!(product.len(), TILE_ROWS * width);
    // SAFETY: the three matrices are inside of their slices with these sizes and strides, as just
    // checked; `product` is exclusively borrowed.
    unsafe {
        gemm::gemm(
            TILE_ROWS,
            width,
            cols,
            product.as_mut_ptr(),
            1,
            width as isize,
            false,
            x.as_ptr(),
            1,
            cols as isize,
            weights.as_ptr(),
            cols as isize,
            1,
            0.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}
