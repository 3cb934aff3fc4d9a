//! [`Shared`]: a keeper as other threads know it, and [`AcceptHold`].
//!
//! The rule it keeps: a thread that forks waits for the keeper's thread, never the other way round.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use farpage_tables::Doorbell;

use super::image::{Census, Image};

/// Time between two looks whether the thread has accepted a connection.
const PAUSE: Duration = Duration::from_micros(20);
/// Upper bound of the time that noticing the ends of children takes.
pub(super) const SETTLE: Duration = Duration::from_secs(1);

/// Keeper as other threads know it.
pub(super) struct Shared {
    /// Images whose children have not connected yet, by number.
    pub(super) expected: Mutex<HashMap<u64, Arc<Image>>>,
    pub(super) census: Arc<Census>,
    /// Number of turns of the thread.
    pub(super) turns: AtomicU64,
    /// Held while connections are accepted, and by a fork: where the thread works on the program's
    /// table, a child would get the keeper's own end of its connection.
    pub(super) accepting: Mutex<()>,
    /// True while a fork holds `accepting`.
    pub(super) is_held: AtomicBool,
    /// True from the end of a fork until the thread has accepted its connection. The next fork
    /// waits for that: forks in a row would leave the thread no time.
    pub(super) is_due: AtomicBool,
    pub(super) ends: AtomicBool,
    pub(super) waker: Doorbell,
}

pub(super) fn locked<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Hold on the thread, which accepts no connection.
pub(super) struct AcceptHold<'a> {
    shared: &'a Shared,
    _lock: MutexGuard<'a, ()>,
}

impl<'a> AcceptHold<'a> {
    /// Lets the thread accept again. The caller [wakes](Shared::wake) the thread.
    pub(super) fn release(self) -> &'a Shared {
        self.shared.is_due.store(true, Ordering::SeqCst);
        self.shared.is_held.store(false, Ordering::SeqCst);
        self.shared
    }
}

impl Shared {
    /// Holds the thread back from accepting connections until the result is released.
    pub(super) fn hold(&self) -> AcceptHold<'_> {
        let until = Instant::now() + SETTLE;
        while self.is_due.load(Ordering::SeqCst) && Instant::now() < until {
            thread::sleep(PAUSE);
        }
        let lock = locked(&self.accepting);
        self.is_held.store(true, Ordering::SeqCst);
        AcceptHold {
            shared: self,
            _lock: lock,
        }
    }

    /// Wakes the thread. To be called on its table.
    pub(super) fn wake(&self) {
        // Fails if the program has closed the doorbell. The thread's next turn is a later event's.
        let _ = self.waker.try_ring();
    }

    /// Drops images and stores on another thread: servers may have to be asked, which the other
    /// children must not wait for.
    pub(super) fn drop_elsewhere(&self, ended: impl Send + 'static) {
        let census = self.census.clone();
        census.begin_to_end();
        let end = move || {
            drop(ended);
            census.has_ended();
        };
        if farpage_tables::errand("farpage-child", end).is_err() {
            // No thread can be started: dropping the closure has dropped the images.
            self.census.has_ended();
        }
    }
}
