//! [`Announcements`]: threads of this process that wait for a number on a board.
//!
//! The rule it keeps: a thread that has looked before a number changes is woken by the change.

use std::{
    ptr,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

/// Place where threads of this process wait for a number on a board.
#[derive(Debug, Default)]
pub(crate) struct Announcements {
    waiting: Mutex<Waiters>,
    made: Condvar,
}

#[derive(Debug, Default)]
struct Waiters {
    /// Number of threads that sleep until there is news. Without any, no thread is notified.
    sleepers: usize,
    watchers: Vec<Weak<dyn Wake>>,
}

/// A thread that waits for more than one thing.
pub(crate) trait Wake: Send + Sync {
    /// Makes the thread look again, if it sleeps. It sees everything stored before the call.
    fn wake(&self);
}

impl Announcements {
    /// Longest sleep of a thread that has to look from time to time whether its wait is over.
    const NAP: Duration = Duration::from_millis(20);

    /// Wakes all that wait, after the number has been placed.
    pub(crate) fn tell(&self) {
        // A thread that has looked before the change and does not sleep yet holds the lock.
        let waiting = self.lock();
        waiting
            .watchers
            .iter()
            .filter_map(Weak::upgrade)
            .for_each(|watcher| watcher.wake());
        let sleepers = waiting.sleepers;
        drop(waiting);
        if sleepers > 0 {
            self.made.notify_all();
        }
    }

    /// Wakes `watcher`, too, from now on and as long as it lives.
    pub(crate) fn watch<W: Wake + 'static>(&self, watcher: &Arc<W>) {
        let mut waiting = self.lock();
        let is_it = |known: &Weak<dyn Wake>| ptr::addr_eq(known.as_ptr(), Arc::as_ptr(watcher));
        if !waiting.watchers.iter().any(is_it) {
            waiting.watchers.retain(|known| known.strong_count() > 0);
            let watcher: Weak<W> = Arc::downgrade(watcher);
            waiting.watchers.push(watcher);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Waiters> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `is_so`, while `stays`, and no longer than `until`. Returns the last `is_so`.
    pub(crate) fn wait(
        &self,
        until: Instant,
        is_so: &dyn Fn() -> bool,
        stays: &dyn Fn() -> bool,
    ) -> bool {
        if is_so() {
            return true;
        }
        let mut held = self.lock();
        loop {
            if is_so() {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || !stays() {
                return false;
            }
            held.sleepers += 1;
            let slept = self.made.wait_timeout(held, left.min(Self::NAP));
            held = slept.unwrap_or_else(PoisonError::into_inner).0;
            held.sleepers -= 1;
        }
    }
}
