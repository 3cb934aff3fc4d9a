//! [`Loans`]: a set of things that are lent to one user each. [`Transfer`]: buffers for moving one
//! chunk, which are lent so, as turns at the disk are.
//!
//! The rule it keeps: the buffers' memory is taken at the start, and counted from then on.

use std::time::Instant;

use farpage_wire::segment::CHUNK_BYTES;
use lz4_flex::block::{CompressTable, get_maximum_output_size};
use parking_lot::{Condvar, Mutex};

use super::disk::{Aligned, BLOCK_BYTES};

/// A set of things, each lent to one user at a time.
pub(super) struct Loans<T> {
    pub(super) free: Mutex<Vec<T>>,
    came_back: Condvar,
}

/// Buffers for moving one chunk.
pub(super) struct Transfer {
    pub(super) plain: Vec<u8>,
    pub(super) packed: Aligned,
    pub(super) table: CompressTable,
}

impl Transfer {
    pub(super) fn new() -> Self {
        let chunk = CHUNK_BYTES as usize;
        let most = get_maximum_output_size(chunk).next_multiple_of(BLOCK_BYTES);
        Self {
            plain: vec![0; chunk],
            packed: Aligned::new(most),
            table: CompressTable::default(),
        }
    }
}

impl<T> Loans<T> {
    pub(super) fn new(count: usize, make: impl Fn() -> T) -> Self {
        Self {
            free: Mutex::new((0..count).map(|_| make()).collect()),
            came_back: Condvar::new(),
        }
    }

    /// Lends one thing to `work`. Waits until `until` for a thing to come back. `None` if all stay
    /// in use.
    pub(super) fn lend<R>(&self, until: Instant, work: impl FnOnce(&mut T) -> R) -> Option<R> {
        let mut free = self.free.lock();
        let mut lent = loop {
            if let Some(lent) = free.pop() {
                break lent;
            }
            if self.came_back.wait_until(&mut free, until).timed_out() {
                return None;
            }
        };
        drop(free);
        let done = work(&mut lent);
        self.free.lock().push(lent);
        self.came_back.notify_one();
        Some(done)
    }
}
