//! [`Turns`]: limits how many evictors write to the spill file at once.
//!
//! The rule it keeps: one evictor is never at the disk. A disk may not answer, and chunks that
//! leave memory without it (zeros, compressible or unchanged ones) must leave all the same.

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// Number of evictors. Several keep a disk busy, and one is left when the disk does not answer.
pub(super) const EVICTORS: usize = 5;

/// The longest wait of an evictor for a turn: several writes of a sound disk. Its chunk then stays
/// hot, and the clock goes on to the next segment.
const PATIENCE: Duration = Duration::from_millis(20);

pub(super) struct Turns {
    free: Mutex<usize>,
    ended: Condvar,
}

/// The right to write to the spill file, until it is dropped.
pub(super) struct Turn<'a>(&'a Turns);

impl Turns {
    pub(super) fn new() -> Self {
        Self {
            free: Mutex::new(EVICTORS - 1),
            ended: Condvar::new(),
        }
    }

    /// Waits a moment for a turn. `None` if the disk is still busy with earlier writes.
    pub(super) fn take(&self) -> Option<Turn<'_>> {
        let until = Instant::now() + PATIENCE;
        let mut free = self.free.lock();
        while *free == 0 {
            if self.ended.wait_until(&mut free, until).timed_out() {
                return None;
            }
        }
        *free -= 1;
        Some(Turn(self))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.free.lock() += 1;
        self.0.ended.notify_one();
    }
}
