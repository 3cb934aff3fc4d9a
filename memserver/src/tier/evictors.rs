//! [`Evictors`]: the threads that move chunks out of memory.
//!
//! The rule it keeps: evictors make room before an operation waits for it, and none dies alone: its
//! chunk would stay `Busy` for ever. [`Books`](super::shares::Books) chooses the victims, and
//! [`Mover`] moves them.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    process,
    sync::{Arc, atomic::Ordering},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use farpage_fabric::log::later;
use parking_lot::MutexGuard;

use super::{loans::Transfer, moves::Mover, pool::Owner, storage::EVICTORS};

/// Pause of an evictor that found nothing to do.
const PAUSE: Duration = Duration::from_millis(20);
/// The longest wait of a server's end for its evictors, which may wait for a disk.
const JOIN: Duration = Duration::from_secs(5);

/// The threads that move chunks out. Dropping `Evictors` ends them.
pub(crate) struct Evictors {
    mover: Arc<Mover>,
    threads: Vec<JoinHandle<()>>,
}

impl Evictors {
    /// Starts the evictors of `mover`.
    ///
    /// # Errors
    /// The system has no thread.
    pub(super) fn start(mover: &Arc<Mover>) -> io::Result<Self> {
        let mut evictors = Self {
            mover: Arc::clone(mover),
            threads: Vec::new(),
        };
        for _ in 0..EVICTORS {
            let mover = Arc::clone(mover);
            let thread = thread::Builder::new().name("farpage-tier".to_owned());
            let work = move || {
                if catch_unwind(AssertUnwindSafe(|| mover.keep_room())).is_err() {
                    eprintln!(
                        "an evictor of this server panicked; ending the process, whose clients would wait without end for what it was moving"
                    );
                    process::abort();
                }
            };
            evictors.threads.push(thread.spawn(work)?);
        }
        Ok(evictors)
    }
}

impl Drop for Evictors {
    fn drop(&mut self) {
        self.mover.room.books.lock().stops = true;
        self.mover.room.work.notify_all();
        let until = Instant::now() + JOIN;
        for thread in self.threads.drain(..) {
            // `join` has no deadline.
            while !thread.is_finished() && Instant::now() < until {
                thread::sleep(Duration::from_millis(1));
            }
            if !thread.is_finished() {
                later(|| {
                    tracing::warn!(
                        "an evictor did not end within {JOIN:?}: the disk does not answer"
                    );
                });
            }
        }
    }
}

impl Mover {
    /// Makes room whenever memory is short, until the server ends.
    fn keep_room(&self) {
        let mut buffer = Transfer::new();
        let room = &self.room;
        let mut books = room.books.lock();
        while !books.stops {
            if !room.is_short(&books) {
                room.work.wait(&mut books);
                continue;
            }
            // Many chunks at once, so that most fetches meet no evictor.
            while !books.stops && room.has_less_than(room.headroom_bytes, &books) {
                let made_room = MutexGuard::unlocked(&mut books, || self.make_room(&mut buffer));
                if !made_room && !books.stops {
                    room.work.wait_for(&mut books, PAUSE);
                }
            }
        }
    }

    /// Trims the pool or moves a chunk out. Returns false if neither was done.
    fn make_room(&self, buffer: &mut Transfer) -> bool {
        let trimmed = self.storage.pool.trim(self.room.headroom_bytes / 4);
        if trimmed > 0 {
            self.room.discharge(trimmed);
            return true;
        }
        if self.storage.pool.is_nearly_full() && self.demote_one(buffer) {
            return true;
        }
        let victim = self.room.books.lock().victim();
        match victim {
            Some((extent, chunk)) => {
                let is_out = self.evict(&extent, chunk, buffer);
                match is_out {
                    true => {
                        self.figures.evictions.fetch_add(1, Ordering::Relaxed);
                        let forced = u64::from(extent.is_shared());
                        (self.figures.forced_seals).fetch_add(forced, Ordering::Relaxed);
                    }
                    false => self.room.books.lock().pass_by(extent.id(), chunk),
                }
                is_out
            }
            None => self.demote_one(buffer),
        }
    }

    fn demote_one(&self, buffer: &mut Transfer) -> bool {
        let Some((Owner { extent, chunk }, cell)) = self.storage.pool.oldest() else {
            return false;
        };
        (extent.upgrade()).is_some_and(|extent| self.demote(&extent, chunk, cell, buffer))
    }
}
