//! Products of activations with weight matrices.

use std::sync::Arc;

use candle_core::{CpuStorage, Result, Storage, Tensor};

use super::blocks::Matrix;
use super::product::{Output, product};

/// Runs `f` on the values of a contiguous f32 tensor in main memory.
pub(crate) fn with_values<R>(x: &Tensor, f: impl FnOnce(&[f32]) -> R) -> Result<R> {
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cpu(CpuStorage::F32(values)) = &*storage else {
        candle_core::bail!("expected an f32 tensor in main memory, got {:?} on {:?}", x.dtype(), x.device());
    };
    let Some((start, end)) = layout.contiguous_offsets() else {
        candle_core::bail!("expected a contiguous tensor, got strides {:?}", layout.stride());
    };
    Ok(f(&values[start..end]))
}

/// `y = x W^T + b`
#[derive(Debug)]
pub(crate) struct Linear {
    cols: usize,
    rows: usize,
    /// Stacked along the rows.
    matrices: Vec<Arc<Matrix>>,
    /// `[rows]`
    bias: Option<Vec<f32>>,
}

impl Linear {
    /// `matrices` is not empty and all have the same number of columns.
    pub(crate) fn new(matrices: Vec<Arc<Matrix>>, bias: Option<Vec<f32>>) -> Self {
        let cols = matrices.first().map_or(0, |matrix| matrix.cols);
        let rows = matrices.iter().map(|matrix| matrix.rows).sum();
        Linear { cols, rows, matrices, bias }
    }

    /// `[m, cols] -> [m, rows]`
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (m, cols) = x.dims2()?;
        if cols != self.cols {
            candle_core::bail!("a product with a [{}, {}] matrix got rows of {cols}", self.rows, self.cols);
        }
        let mut out = vec![0f32; m * self.rows];
        with_values(x, |x| {
            let mut column = 0;
            for matrix in &self.matrices {
                product(matrix, x, Output::new(&mut out, self.rows, column));
                column += matrix.rows;
            }
        })?;
        if let Some(bias) = &self.bias {
            for row in out.chunks_exact_mut(self.rows) {
                row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
            }
        }
        Tensor::from_vec(out, (m, self.rows), x.device())
    }
}
