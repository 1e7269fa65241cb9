//! Root-mean-square norm.

use candle_core::{Result, Tensor};

use super::rows::for_each_row;
use crate::weights::linear::with_values;

/// `y = x / sqrt(mean(x^2) + eps) * weight`
#[derive(Debug)]
pub(crate) struct RmsNorm {
    /// `[width]`
    pub(crate) weight: Vec<f32>,
    pub(crate) eps: f32,
}

impl RmsNorm {
    /// `[rows, width] -> [rows, width]`
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut out = vec![0f32; x.elem_count()];
        let width = self.weight.len();
        with_values(x, |x| {
            for_each_row(&mut out, width, |row, out| self.row(&x[row * width..][..width], out));
        })?;
        Tensor::from_vec(out, x.shape(), x.device())
    }

    /// One row.
    pub(crate) fn row(&self, x: &[f32], out: &mut [f32]) {
        let scale = 1.0 / (sum_of_squares(x) / x.len() as f32 + self.eps).sqrt();
        for ((y, x), w) in out.iter_mut().zip(x).zip(&self.weight) {
            *y = x * scale * w;
        }
    }
}

/// In eight partial sums, an order that vectorises.
fn sum_of_squares(x: &[f32]) -> f32 {
    let mut sums = [0f32; 8];
    let (chunks, rest) = x.as_chunks::<8>();
    for chunk in chunks {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *sum += x * x;
        }
    }
    sums.iter().sum::<f32>() + rest.iter().map(|x| x * x).sum::<f32>()
}
