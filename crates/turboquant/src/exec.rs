//! Who runs the work items of a kernel: the caller's thread pool, not one of ours.

use rayon::prelude::*;

/// Runs `work(0), ..., work(items - 1)`, each once, in any order and on any thread, and returns
/// when all are done.
///
/// An engine has one pool for its matrix products and its attention; two pools on the same cores
/// slow each other down, so the kernels take the pool as a parameter.
pub trait Executor: Sync {
    /// See the trait.
    fn for_each(&self, items: usize, work: &(dyn Fn(usize) + Sync));
    /// How many threads take part; kernels cut their work into a multiple of it.
    fn threads(&self) -> usize;
}

/// Everything on the calling thread.
#[derive(Debug, Clone, Copy)]
pub struct Serial;

impl Executor for Serial {
    fn for_each(&self, items: usize, work: &(dyn Fn(usize) + Sync)) {
        (0..items).for_each(work);
    }
    fn threads(&self) -> usize {
        1
    }
}

/// The current rayon pool.
#[derive(Debug, Clone, Copy)]
pub struct Rayon;

impl Executor for Rayon {
    fn for_each(&self, items: usize, work: &(dyn Fn(usize) + Sync)) {
        (0..items).into_par_iter().for_each(work);
    }
    fn threads(&self) -> usize {
        rayon::current_num_threads()
    }
}
