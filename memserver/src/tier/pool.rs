//! [`Pool`]: compressed chunks in memory, each a chain of cells of 4 KiB.
//!
//! The rule it keeps: every cell that is physical memory is charged to `--memory`, also one that
//! holds nothing now. Cells are all alike, so that the pool has no fragments.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{Arc, Weak},
};

use farpage_fabric::memory::{ExtentFile, ExtentMemory};
use farpage_wire::ExtentId;
use parking_lot::Mutex;

use super::extent::TieredExtent;
use crate::handover::{HandedPool, HandoverError};

pub(super) const CELL_BYTES: usize = 4096;
/// Upper bound of a cell's memory in the pool's tables.
const TABLE_BYTES_PER_CELL: usize = 48;

/// Number that ends a chain.
const NONE: u32 = u32::MAX;

pub(super) struct Pool {
    file: ExtentFile,
    cells_most: usize,
    cells: Mutex<Cells>,
}

#[derive(Default)]
struct Cells {
    /// The next cell of the same chunk, for every cell that was ever used.
    next: Vec<u32>,
    /// Chunk that begins in a cell, if one does.
    owner: Vec<Option<Owner>>,
    /// Cells that hold nothing and are physical memory.
    free: Vec<u32>,
    /// Cells that hold nothing and are holes.
    hollow: Vec<u32>,
    used: usize,
    /// Cell at which the search for the oldest chunk goes on.
    hand: usize,
}

/// A chunk that the pool holds.
#[derive(Clone)]
pub(super) struct Owner {
    pub(super) extent: Weak<TieredExtent>,
    pub(super) chunk: usize,
}

impl Pool {
    pub(super) fn new(bytes: u64) -> io::Result<Self> {
        let memory: Arc<ExtentMemory> = ExtentMemory::create(ExtentId(0), bytes, false)?;
        let cells_most = bytes as usize / CELL_BYTES;
        let mut cells = Cells::default();
        // Reserved in full: growth would move the tables, which takes their memory twice.
        (cells.next.try_reserve_exact(cells_most))
            .and_then(|()| cells.owner.try_reserve_exact(cells_most))
            .map_err(|_| io::ErrorKind::OutOfMemory)?;
        Ok(Self {
            file: memory.file(),
            cells_most,
            cells: Mutex::new(cells),
        })
    }

    /// Takes over the cells of an earlier process. The chunks in them [say so](Self::own) later.
    pub(super) fn take_over(
        &mut self,
        handed: HandedPool,
        memory: OwnedFd,
    ) -> Result<(), HandoverError> {
        let wrong = |what: &str| HandoverError::State(format!("its pool of chunks: {what}"));
        let bytes = self.file.bytes();
        let memory = ExtentMemory::inherited(ExtentId(0), bytes, false, false, memory);
        self.file = memory.map_err(|error| wrong(&error.to_string()))?.file();
        let count = handed.next.len();
        let outside = |cell: &u32| *cell != NONE && *cell as usize >= count;
        let lists = handed.free.iter().chain(&handed.hollow);
        let empty = handed.free.len() + handed.hollow.len();
        if count > self.cells_most
            || handed.next.iter().any(outside)
            || lists.clone().any(|cell| *cell as usize >= count)
            || Some(handed.used as usize) != count.checked_sub(empty)
        {
            return Err(wrong("a cell is outside"));
        }
        let cells = self.cells.get_mut();
        cells.next.extend(handed.next);
        cells.owner.extend((0..count).map(|_| None));
        (cells.free, cells.hollow) = (handed.free, handed.hollow);
        cells.used = handed.used as usize;
        Ok(())
    }

    /// Notes that the chunk of `owner` begins at `cell`. False if there is no such cell.
    pub(super) fn own(&self, cell: u32, owner: Owner) -> bool {
        let mut cells = self.cells.lock();
        let place = cells.owner.get_mut(cell as usize);
        place.is_some_and(|place| place.replace(owner).is_none())
    }

    /// Returns the pool's file, and its cells. `add` returns the file's place.
    pub(super) fn hand_over(&self, add: impl FnOnce(ExtentFile) -> u32) -> HandedPool {
        let cells = self.cells.lock();
        HandedPool {
            memory: add(self.file.clone()),
            next: cells.next.clone(),
            free: cells.free.clone(),
            hollow: cells.hollow.clone(),
            used: cells.used as u64,
        }
    }

    /// Returns the memory of the tables when the pool is full.
    pub(super) fn table_bytes(&self) -> u64 {
        (self.cells_most * TABLE_BYTES_PER_CELL) as u64
    }

    /// Returns the physical memory of the cells.
    pub(super) fn bytes(&self) -> u64 {
        let cells = self.cells.lock();
        ((cells.used + cells.free.len()) * CELL_BYTES) as u64
    }

    /// True if the oldest chunks should go to the spill file, to leave room for younger ones.
    pub(super) fn is_nearly_full(&self) -> bool {
        self.cells.lock().used > self.cells_most / 8 * 7
    }

    /// Stores `bytes`, and returns their first cell. Asks `charge` for memory that the pool does
    /// not have yet. `None` if there is no room, or the system refuses.
    pub(super) fn put(
        &self,
        bytes: &[u8],
        owner: Owner,
        charge: impl FnOnce(u64) -> bool,
    ) -> Option<u32> {
        let count = bytes.len().div_ceil(CELL_BYTES);
        let mut taken = Vec::with_capacity(count);
        {
            let mut cells = self.cells.lock();
            let reused = count.min(cells.free.len());
            let fresh = count - reused;
            // Some cells may be in `trim`, and in neither list.
            let there = cells.hollow.len() + self.cells_most - cells.next.len();
            if fresh > there || (fresh > 0 && !charge((fresh * CELL_BYTES) as u64)) {
                return None;
            }
            let keep = cells.free.len() - reused;
            taken.extend(cells.free.drain(keep..));
            let keep = cells.hollow.len().saturating_sub(fresh);
            taken.extend(cells.hollow.drain(keep..));
            while taken.len() < count {
                taken.push(cells.next.len() as u32);
                cells.next.push(NONE);
                cells.owner.push(None);
            }
            for (i, cell) in taken.iter().enumerate() {
                cells.next[*cell as usize] = taken.get(i + 1).copied().unwrap_or(NONE);
            }
            cells.owner[taken[0] as usize] = Some(owner);
            cells.used += count;
        }
        let mut left = bytes;
        for (at, len) in runs(&taken) {
            let (piece, rest) = left.split_at(len.min(left.len()));
            if self.file.write_at(at, piece).is_err() {
                self.free(taken[0]);
                return None;
            }
            left = rest;
        }
        Some(taken[0])
    }

    /// Fills `to` with the bytes that were put at `first`.
    pub(super) fn get(&self, first: u32, to: &mut [u8]) -> io::Result<()> {
        let chain: Vec<u32> = {
            let cells = self.cells.lock();
            let next = |cell: &u32| Some(cells.next[*cell as usize]).filter(|next| *next != NONE);
            std::iter::successors(Some(first), next).collect()
        };
        let mut left = to;
        for (at, len) in runs(&chain) {
            let (piece, rest) = left.split_at_mut(len.min(left.len()));
            self.file.read_at(at, piece)?;
            left = rest;
        }
        Ok(())
    }

    /// Frees the cells of the chunk at `first`. They stay memory until [`trim`](Self::trim).
    pub(super) fn free(&self, first: u32) {
        let mut cells = self.cells.lock();
        cells.owner[first as usize] = None;
        let mut cell = first;
        while cell != NONE {
            cells.free.push(cell);
            cells.used -= 1;
            cell = cells.next[cell as usize];
        }
    }

    /// Returns the chunk that has been in the pool for longest, or nearly, and its first cell.
    pub(super) fn oldest(&self) -> Option<(Owner, u32)> {
        let mut cells = self.cells.lock();
        let count = cells.owner.len();
        for _ in 0..count {
            let at = cells.hand % count;
            cells.hand = at + 1;
            if let Some(owner) = &cells.owner[at] {
                return Some((owner.clone(), at as u32));
            }
        }
        None
    }

    /// Gives cells that hold nothing back to the system if there are more than `keep_bytes` of
    /// them. Returns the bytes that are no longer physical memory.
    pub(super) fn trim(&self, keep_bytes: u64) -> u64 {
        let mut free = {
            let mut cells = self.cells.lock();
            if (cells.free.len() * CELL_BYTES) as u64 <= keep_bytes {
                return 0;
            }
            std::mem::take(&mut cells.free)
        };
        free.sort_unstable();
        let mut given = Vec::with_capacity(free.len());
        let mut kept = Vec::new();
        for run in free.chunk_by(|a, b| a + 1 == *b) {
            let (at, len) = (u64::from(run[0]), run.len() as u64);
            let cell = CELL_BYTES as u64;
            match self.file.punch_range(at * cell, len * cell) {
                Ok(()) => given.extend_from_slice(run),
                Err(_) => kept.extend_from_slice(run),
            }
        }
        let bytes = (given.len() * CELL_BYTES) as u64;
        let mut cells = self.cells.lock();
        cells.hollow.append(&mut given);
        cells.free.append(&mut kept);
        bytes
    }
}

/// Returns offset and length of each run of neighbouring cells: most chunks take one system call.
fn runs(cells: &[u32]) -> impl Iterator<Item = (u64, usize)> {
    (cells.chunk_by(|a, b| a + 1 == *b)).map(|run| {
        (
            u64::from(run[0]) * CELL_BYTES as u64,
            run.len() * CELL_BYTES,
        )
    })
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicBool, Ordering},
        thread,
    };

    use super::*;

    #[test]
    fn cells_that_are_being_trimmed_are_nobodys_and_counted() {
        const CELLS: usize = 64;
        let pool = Pool::new((CELLS * CELL_BYTES) as u64).expect("memory");
        let owner = || Owner {
            extent: Weak::new(),
            chunk: 0,
        };
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    pool.trim(0);
                }
            });
            for _ in 0..2000 {
                let put = || pool.put(&[1; 4 * CELL_BYTES], owner(), |_| true);
                let full: Vec<u32> = std::iter::from_fn(put).collect();
                for first in full {
                    pool.free(first);
                }
            }
            is_over.store(true, Ordering::Relaxed);
        });
        pool.trim(0);
        let cells = pool.cells.lock();
        assert_eq!(cells.used, 0);
        assert!(
            cells.next.len() <= CELLS,
            "{} cells in a pool of {CELLS}",
            cells.next.len()
        );
        assert_eq!(cells.hollow.len() + cells.free.len(), cells.next.len());
    }
}
