//! [`Snapshot`]: hold on the remote bytes of a region's pages at one moment.
//!
//! The rule it keeps: nothing is read or copied when a snapshot is taken. The count of what is held
//! is the pool's ([`Snapshots`](crate::snapshots::Snapshots)).

use std::sync::Arc;

use crate::{PageStore, place::SlotSpan, remote::Backing, snapshots::SnapshotEnd};

/// Number of slots that are given back under one lock of an arena: a write-back that needs the
/// lock waits for less than a millisecond.
const GIVEN_BACK_MAX: usize = 1024;

/// Hold on all that a region's pages had in remote memory at one moment, for a copy of the
/// process. Pages may be written back, discarded and moved meanwhile, and the region may be
/// retired. [`IoQueue::fill_copy`](crate::IoQueue::fill_copy) reads pages as they were.
///
/// Dropping a snapshot frees what no page and no other snapshot needs. Surplus extents go back to
/// their servers, which are asked and waited for.
pub struct Snapshot {
    number: u64,
    store: Arc<PageStore>,
}

impl Snapshot {
    /// Takes a snapshot of a region in remote memory. `None` for a user's own store, which keeps no
    /// older bytes, and for a region that was retired. Looks at no page and asks no server.
    ///
    /// No entry of the region may change from this call on until the process has been copied:
    /// nothing is written back, discarded or moved.
    pub fn take(store: &Arc<PageStore>) -> Option<Snapshot> {
        let pool = store.pool_if_open()?;
        Some(Snapshot {
            number: pool.snapshots.take(),
            store: store.clone(),
        })
    }

    /// Returns the region.
    pub fn store(&self) -> &Arc<PageStore> {
        &self.store
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        let Backing::Remote(remote) = &self.store.backing else {
            unreachable!("only regions in remote memory have snapshots")
        };
        let pool = &remote.pool;
        let SnapshotEnd {
            mut free,
            free_bytes,
            pool_ends,
        } = pool.snapshots.end(self.number);
        if pool_ends {
            remote.end_pool();
        } else if !free.is_empty() {
            // Neighbours go back as one.
            free.sort_unstable_by_key(|slot| slot.place);
            for part in free.chunks(GIVEN_BACK_MAX) {
                let slots: Vec<SlotSpan> = part.iter().map(|slot| slot.span()).collect();
                pool.give_back(&slots);
            }
            pool.shrink();
        }
        pool.snapshots.freed(free_bytes);
    }
}
