//! [`Announcements`]: threads of this process that wait for a number on a board.
//!
//! The rule it keeps: a thread that has looked before a number changes is woken by the change.

use std::{
    ptr,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    thread::{self, Thread},
    time::{Duration, Instant},
};

/// Threads of this process that wait for a number on a board.
#[derive(Debug, Default)]
pub(crate) struct Announcements(Mutex<Vec<Weak<dyn Wake>>>);

/// A thread that waits.
pub(crate) trait Wake: Send + Sync {
    /// Makes the thread look again, if it sleeps. It sees everything stored before the call.
    fn wake(&self);
}

impl Wake for Thread {
    fn wake(&self) {
        self.unpark();
    }
}

impl Announcements {
    /// Longest sleep of a thread that has to look from time to time whether its wait is over.
    const NAP: Duration = Duration::from_millis(20);

    /// Wakes all that wait, after the number has been placed.
    pub(crate) fn tell(&self) {
        // A thread that has looked before the change is in the list.
        let watchers = self.lock();
        let watchers = watchers.iter().filter_map(Weak::upgrade);
        watchers.for_each(|watcher| watcher.wake());
    }

    /// Wakes `watcher`, too, from now on and as long as it lives.
    pub(crate) fn watch<W: Wake + 'static>(&self, watcher: &Arc<W>) {
        let mut watchers = self.lock();
        let is_it = |known: &Weak<dyn Wake>| ptr::addr_eq(known.as_ptr(), Arc::as_ptr(watcher));
        if !watchers.iter().any(is_it) {
            watchers.retain(|known| known.strong_count() > 0);
            let watcher: Weak<W> = Arc::downgrade(watcher);
            watchers.push(watcher);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Weak<dyn Wake>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
        let this = Arc::new(thread::current());
        self.watch(&this);
        loop {
            if is_so() {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || !stays() {
                return false;
            }
            thread::park_timeout(left.min(Self::NAP));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    impl Wake for AtomicU32 {
        fn wake(&self) {
            self.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn each_that_watches_is_woken_once_by_a_change_until_it_has_gone() {
        let announcements = Announcements::default();
        let [one, other] = [(); 2].map(|()| Arc::new(AtomicU32::new(0)));
        for watcher in [&one, &other, &one] {
            announcements.watch(watcher);
        }
        announcements.tell();
        let woken = [&one, &other].map(|watcher| watcher.load(Ordering::Relaxed));
        assert_eq!(woken, [1, 1]);
        drop(other);
        announcements.watch(&Arc::new(AtomicU32::new(0)));
        announcements.tell();
        assert_eq!(one.load(Ordering::Relaxed), 2);
        assert_eq!(announcements.lock().len(), 2, "who has gone is forgotten");
    }

    #[test]
    fn threads_that_wait_are_woken_by_a_change_and_do_not_sleep_their_time_out() {
        const WAITS: u32 = 50;
        let announcements = Announcements::default();
        let begun = Instant::now();
        for _ in 0..WAITS {
            let looks = AtomicU32::new(0);
            // The change comes between the second look and the sleep.
            let is_so = || {
                if looks.fetch_add(1, Ordering::Relaxed) == 1 {
                    announcements.tell();
                }
                looks.load(Ordering::Relaxed) > 2
            };
            let until = begun + Duration::from_secs(60);
            assert!(announcements.wait(until, &is_so, &|| true));
        }
        let took = begun.elapsed();
        assert!(took < Announcements::NAP * WAITS / 2, "{took:?}");
    }
}
