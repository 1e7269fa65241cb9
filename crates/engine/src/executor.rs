//! The kernels' threads: the pool that also computes candle's quantised products.

use std::{
    any::Any,
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use candle_core::utils::barrier_pool;
use turboquant::exec::Executor;

/// candle's barrier pool as an [`Executor`].
///
/// The pool takes one caller at a time behind a lock that it holds while the caller works too, so
/// that a call from inside a call would wait for itself, and a panic would leave the lock unusable
/// for the rest of the process. Here a nested call runs on its own thread alone, and panics are
/// carried past the lock. Work handed to it must not compute candle products.
#[derive(Debug, Clone, Copy)]
pub struct ModelPool;

thread_local! {
    static BUSY: Cell<bool> = const { Cell::new(false) };
}

impl Executor for ModelPool {
    fn for_each(&self, items: usize, work: &(dyn Fn(usize) + Sync)) {
        if items <= 1 || BUSY.get() {
            return (0..items).for_each(work);
        }
        let next = AtomicUsize::new(0);
        let panic: Mutex<Option<Box<dyn Any + Send>>> = Mutex::new(None);
        barrier_pool().execute(|_| {
            BUSY.set(true);
            let drain = || {
                loop {
                    let item = next.fetch_add(1, Ordering::Relaxed);
                    if item >= items {
                        return;
                    }
                    work(item);
                }
            };
            if let Err(payload) = catch_unwind(AssertUnwindSafe(drain)) {
                next.store(items, Ordering::Relaxed);
                panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(payload);
            }
            BUSY.set(false);
        });
        if let Some(payload) = panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(payload);
        }
    }

    fn threads(&self) -> usize {
        barrier_pool().n_workers() + 1
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    fn check_all_run_once(items: usize) {
        let counts: Vec<AtomicU32> = (0..items).map(|_| AtomicU32::new(0)).collect();
        ModelPool.for_each(items, &|item| {
            counts[item].fetch_add(1, Ordering::Relaxed);
        });
        assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
    }

    #[test]
    fn every_item_runs_once_from_several_threads_at_a_time() {
        assert!(ModelPool.threads() >= 1);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| [0, 1, 2, 1000].into_iter().for_each(check_all_run_once));
            }
        });
    }

    #[test]
    fn a_nested_call_runs_where_it_is() {
        let count = AtomicU32::new(0);
        ModelPool.for_each(4, &|_| {
            ModelPool.for_each(5, &|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(count.into_inner(), 20);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        for panicking in [0, 7] {
            let run = || {
                ModelPool.for_each(8, &|item| assert_ne!(item, panicking, "on purpose"));
            };
            assert!(catch_unwind(run).is_err());
        }
        check_all_run_once(100);
        // candle's own use of the pool still works, too.
        barrier_pool().execute(|_| {});
    }
}
