//! [`Transfer`]: buffers for moving one chunk, and [`Buffers`], which lends them.
//!
//! The rule it keeps: the buffers' memory is taken at the start, and counted from then on.

use std::time::Instant;

use farpage_wire::segment::CHUNK_BYTES;
use lz4_flex::block::{CompressTable, get_maximum_output_size};
use parking_lot::{Condvar, Mutex};

use super::disk::{Aligned, BLOCK_BYTES};

/// A set of [`Transfer`]s, lent one at a time.
pub(super) struct Buffers {
    pub(super) free: Mutex<Vec<Transfer>>,
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

impl Buffers {
    pub(super) fn new(count: usize) -> Self {
        Self {
            free: Mutex::new((0..count).map(|_| Transfer::new()).collect()),
            came_back: Condvar::new(),
        }
    }

    /// Lends a buffer to `work`, and waits for one until `until`. `None` if all stay in use.
    pub(super) fn lend<T>(
        &self,
        until: Instant,
        work: impl FnOnce(&mut Transfer) -> T,
    ) -> Option<T> {
        let mut free = self.free.lock();
        let mut buffer = loop {
            if let Some(buffer) = free.pop() {
                break buffer;
            }
            if self.came_back.wait_until(&mut free, until).timed_out() {
                return None;
            }
        };
        drop(free);
        let done = work(&mut buffer);
        self.free.lock().push(buffer);
        self.came_back.notify_one();
        Some(done)
    }
}
