//! Hands units of work to the threads of an executor.

use std::sync::{Mutex, PoisonError};

use crate::exec::Executor;

/// Works off `units` in any order on up to as many threads as there are units; each thread makes one
/// scratch and keeps it.
///
/// A shared queue instead of one item per unit: units that carry `&mut` slices can be handed out, and
/// an executor that deals items out in advance still balances.
pub(super) fn for_each_unit<T: Send, S>(
    exec: &dyn Executor,
    units: impl ExactSizeIterator<Item = T> + Send,
    scratch: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, T) + Sync,
) {
    let threads = exec.threads().min(units.len());
    let queue = Mutex::new(units);
    let drain = |_: usize| {
        let mut own = None;
        loop {
            let unit = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(unit) = unit else { return };
            work(own.get_or_insert_with(&scratch), unit);
        }
    };
    if threads <= 1 { drain(0) } else { exec.for_each(threads, &drain) }
}
