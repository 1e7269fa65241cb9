//! Row by row over plain slices, on the pool that also computes the products.

use std::sync::Mutex;

use candle_core::utils::barrier_pool;

/// Fewer elements than this are not worth waking a thread for.
const PARALLEL_ELEMENTS: usize = 1 << 14;

/// Calls `f(row, out_row)` for every row of `out [rows, width]`.
pub(crate) fn for_each_row(out: &mut [f32], width: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    if out.len() < PARALLEL_ELEMENTS {
        out.chunks_exact_mut(width).enumerate().for_each(|(row, out)| f(row, out));
        return;
    }
    let pool = barrier_pool();
    let rows_per_chunk = (out.len() / width).div_ceil(4 * (pool.n_workers() + 1));
    let chunks: Vec<_> = out.chunks_mut(rows_per_chunk * width).map(Mutex::new).collect();
    pool.execute_chunked(chunks.len(), |range| {
        for index in range {
            let mut chunk = chunks[index].lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            for (row, out) in chunk.chunks_exact_mut(width).enumerate() {
                f(index * rows_per_chunk + row, out);
            }
        }
    });
}
