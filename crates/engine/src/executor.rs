//! The threads of the engine: one pool for products, attention and everything else of a step.
//!
//! The caller works too, and returns as soon as every item is done: a thread that has not begun by
//! then is not waited for. So a machine that is busy with other things slows a step down by what it
//! takes away, while a barrier over all threads would wait for the slowest one to be scheduled, a few
//! hundred times per token.
#![expect(unsafe_code, reason = "workers borrow the caller's closure for the time of a call")]

use std::{
    any::Any,
    cell::{Cell, UnsafeCell},
    hint::spin_loop,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread::{self, Thread},
};

use turboquant::exec::Executor;

/// How often a worker looks for work before it sleeps, and a caller for the end before it yields:
/// the serial parts between two calls are shorter than this, the pause between two requests is not.
const SPINS: usize = 2000;

/// Work is handed out in this many portions per thread, so that a fast thread makes up for a slow one.
const PORTIONS: usize = 8;

/// As many threads as the machine has cores, the caller included; `RAYON_NUM_THREADS` in the
/// environment says otherwise. Calls from inside a call run where they are; calls from several
/// threads take turns.
#[derive(Debug, Clone, Copy)]
pub struct ModelPool;

impl ModelPool {
    /// Runs `work` on ranges that together cover `0..items` once.
    pub fn for_each_range(self, items: usize, work: impl Fn(Range<usize>) + Sync) {
        let portion = items.div_ceil(PORTIONS * self.threads()).max(1);
        self.for_each(items.div_ceil(portion), &|at| {
            work(at * portion..((at + 1) * portion).min(items));
        });
    }
}

impl Executor for ModelPool {
    fn for_each(&self, items: usize, work: &(dyn Fn(usize) + Sync)) {
        if items <= 1 || INSIDE.get() {
            return (0..items).for_each(work);
        }
        pool().run(items, work);
    }

    fn threads(&self) -> usize {
        pool().workers.len() + 1
    }
}

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

fn pool() -> &'static Pool {
    static POOL: OnceLock<Pool> = OnceLock::new();
    // The caller is one of the threads.
    POOL.get_or_init(|| Pool::new(candle_core::utils::get_num_threads().saturating_sub(1)))
}

/// `state` of [`Shared`]: a counter of calls in the high half; whether threads may join the present
/// one; how many have joined and not left.
const CALL: u64 = 1 << 32;
const OPEN: u64 = 1 << 31;
const JOINED: u64 = OPEN - 1;

/// A call's closure, its lifetime forgotten.
type Work = *const (dyn Fn(usize) + Sync);

/// Keeps a counter that all threads change away from what they read.
#[repr(align(128))]
struct Apart<T>(T);

struct Shared {
    state: Apart<AtomicU64>,
    /// Written by the caller while `state` is neither open nor joined, read by those who joined.
    work: UnsafeCell<Work>,
    items: AtomicUsize,
    /// The next item to be taken.
    next: Apart<AtomicUsize>,
    /// Workers that sleep or are about to.
    sleepers: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `work` is the only field that is not Sync by itself; how it is shared is said there.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer is not dereferenced but by `Shared::drain`.
unsafe impl Send for Shared {}

struct Pool {
    shared: &'static Shared,
    workers: Vec<Thread>,
    /// Held for the time of a call.
    caller: Mutex<()>,
}

impl Pool {
    /// Workers that cannot be started are done without.
    fn new(num_workers: usize) -> Self {
        let nothing: &'static (dyn Fn(usize) + Sync) = &|_| {};
        let shared: &'static Shared = Box::leak(Box::new(Shared {
            state: Apart(AtomicU64::new(0)),
            work: UnsafeCell::new(nothing),
            items: AtomicUsize::new(0),
            next: Apart(AtomicUsize::new(0)),
            sleepers: AtomicUsize::new(0),
            panic: Mutex::new(None),
        }));
        let start = |index| {
            let builder = thread::Builder::new().name(format!("worker-{index}"));
            builder.spawn(move || shared.serve()).ok().map(|handle| handle.thread().clone())
        };
        Pool { shared, workers: (0..num_workers).filter_map(start).collect(), caller: Mutex::new(()) }
    }

    fn run(&self, items: usize, work: &(dyn Fn(usize) + Sync)) {
        let caller = lock(&self.caller);
        let shared = self.shared;
        // SAFETY: only the lifetime is changed. This function returns after the state was closed and
        // all who had joined have left, and nobody else reads the pointer.
        let work =
            unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(work) };
        // SAFETY: the state is closed and nobody is joined; `caller` keeps other callers out.
        unsafe { *shared.work.get() = work };
        shared.items.store(items, Ordering::Relaxed);
        shared.next.0.store(0, Ordering::Relaxed);
        let call = shared.state.0.load(Ordering::Relaxed) / CALL;
        // SeqCst, as in `serve`: either this sees a sleeper or the sleeper sees the call.
        shared.state.0.store(call.wrapping_add(1).wrapping_mul(CALL) | OPEN, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            self.workers.iter().for_each(Thread::unpark);
        }
        shared.drain();
        shared.state.0.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0;
        while shared.state.0.load(Ordering::Acquire) & JOINED > 0 {
            spins += 1;
            if spins < SPINS { spin_loop() } else { thread::yield_now() }
        }
        let panic = lock(&shared.panic).take();
        drop(caller);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }
}

impl Shared {
    /// The life of a worker.
    fn serve(&self) {
        let (mut last, mut spins) = (0, 0);
        loop {
            let state = self.state.0.load(Ordering::SeqCst);
            if state & OPEN > 0 && state / CALL != last {
                let joined =
                    self.state.0.compare_exchange(state, state + 1, Ordering::Acquire, Ordering::Relaxed);
                if joined.is_ok() {
                    self.drain();
                    self.state.0.fetch_sub(1, Ordering::Release);
                    (last, spins) = (state / CALL, 0);
                }
                continue;
            }
            spins += 1;
            if spins < SPINS {
                spin_loop();
                continue;
            }
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            let state = self.state.0.load(Ordering::SeqCst);
            if state & OPEN == 0 || state / CALL == last {
                thread::park();
            }
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
            spins = 0;
        }
    }

    /// Takes items until there are none left. For the caller and for workers that have joined.
    fn drain(&self) {
        // SAFETY: the call is open or this thread is joined, so that the caller waits and its closure
        // lives.
        let work = unsafe { &**self.work.get() };
        let items = self.items.load(Ordering::Relaxed);
        INSIDE.set(true);
        let take_items = || {
            loop {
                let item = self.next.0.fetch_add(1, Ordering::Relaxed);
                if item >= items {
                    return;
                }
                work(item);
            }
        };
        if let Err(payload) = catch_unwind(AssertUnwindSafe(take_items)) {
            self.next.0.store(items, Ordering::Relaxed);
            lock(&self.panic).get_or_insert(payload);
        }
        INSIDE.set(false);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while one of these is held.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::AtomicU32,
        time::{Duration, Instant},
    };

    use super::*;

    fn check_all_run_once(items: usize) {
        let counts: Vec<AtomicU32> = (0..items).map(|_| AtomicU32::new(0)).collect();
        ModelPool.for_each(items, &|item| {
            counts[item].fetch_add(1, Ordering::Relaxed);
        });
        assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        let counts: Vec<AtomicU32> = (0..items).map(|_| AtomicU32::new(0)).collect();
        ModelPool.for_each_range(items, |range| {
            assert!(!range.is_empty());
            for item in range {
                counts[item].fetch_add(1, Ordering::Relaxed);
            }
        });
        assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
    }

    #[test]
    fn every_item_runs_once_from_several_threads_at_a_time() {
        assert!(ModelPool.threads() >= 1);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| (0..300).chain([10_000]).for_each(check_all_run_once));
            }
        });
    }

    #[test]
    fn workers_wake_from_their_sleep() {
        let pool = Pool::new(3);
        for pause in [0, 1, 5, 20] {
            thread::sleep(Duration::from_millis(pause));
            let threads = Mutex::new(Vec::new());
            pool.run(4, &|_| {
                lock(&threads).push(thread::current().id());
                // All four threads must come for all four items to be under way at once.
                let start = Instant::now();
                while lock(&threads).len() < 4 {
                    assert!(start.elapsed() < Duration::from_secs(20), "a worker did not wake");
                    thread::yield_now();
                }
            });
        }
    }

    #[test]
    fn results_of_workers_are_seen_after_the_call() {
        let pool = Pool::new(3);
        for round in 0..2000u32 {
            let cells: Vec<AtomicU32> = (0..16).map(|_| AtomicU32::new(0)).collect();
            pool.run(16, &|item| cells[item].store(round + item as u32, Ordering::Relaxed));
            assert!((0..16).all(|item| cells[item].load(Ordering::Relaxed) == round + item as u32));
        }
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
    }
}
