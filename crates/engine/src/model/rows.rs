//! Row by row over plain slices, on the pool that also computes the products.

use std::sync::Mutex;

use candle_core::{Result, Tensor};
use turboquant::exec::Executor;

use crate::executor::ModelPool;
use crate::weights::linear::with_values;

/// Fewer elements than this are not worth waking a thread for.
const PARALLEL_ELEMENTS: usize = 1 << 14;

/// Calls `f(row, out_row)` for every row of `out [rows, width]`.
pub(crate) fn for_each_row(out: &mut [f32], width: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    if out.len() < PARALLEL_ELEMENTS {
        out.chunks_exact_mut(width).enumerate().for_each(|(row, out)| f(row, out));
        return;
    }
    let rows_per_chunk = (out.len() / width).div_ceil(4 * ModelPool.threads());
    let chunks: Vec<_> = out.chunks_mut(rows_per_chunk * width).map(Mutex::new).collect();
    ModelPool.for_each_range(chunks.len(), |range| {
        for index in range {
            let mut chunk = chunks[index].lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            for (row, out) in chunk.chunks_exact_mut(width).enumerate() {
                f(index * rows_per_chunk + row, out);
            }
        }
    });
}

/// `x + y`, both `[rows, width]`
pub(crate) fn add(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    let (rows, width) = x.dims2()?;
    let mut out = vec![0f32; y.dims2()?.0 * width];
    with_values(x, |x| {
        with_values(y, |y| {
            for_each_row(&mut out, width, |row, out| {
                let (x, y) = (&x[row * width..][..width], &y[row * width..][..width]);
                for ((out, x), y) in out.iter_mut().zip(x).zip(y) {
                    *out = x + y;
                }
            });
        })
    })??;
    Tensor::from_vec(out, (rows, width), x.device())
}

/// `cap * tanh(x / cap)`, `x [rows, width]`
pub(crate) fn soft_cap(x: &Tensor, cap: f32) -> Result<Tensor> {
    let mut out = with_values(x, <[f32]>::to_vec)?;
    for_each_row(&mut out, 1, |_, x| x[0] = cap * (x[0] / cap).tanh());
    Tensor::from_vec(out, x.shape(), x.device())
}
