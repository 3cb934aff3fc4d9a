//! Mapping the pages of a store: [`Pager::map`].
//!
//! The rule: all that a fault needs is reserved before the region is known to any thread. Calls of
//! the program on the region are in `mapped.rs`.

use std::sync::Arc;

use farpage_signals::SignalGuard;
use farpage_store::PageStore;
use farpage_vm::{AddressSpace, Geometry};

use crate::{
    MapError, MappedRegion, Pager, RegionOptions,
    filler::BYTES_AHEAD_MAX,
    region::{CHUNK_PAGES, Region, RegionId},
};

/// Lower bound of a stripe's bytes, so that small regions stay one kernel mapping each.
const STRIPE_BYTES_MIN: usize = 16 << 20;
/// Number of stripes per shard of a large region. Different fillers serve neighbouring parts of it,
/// for a handful of kernel mappings.
const STRIPES_PER_SHARD: usize = 4;

/// Upper bounds of a read-ahead window over links that answer at once: several runs, so that one is
/// mapped while another travels.
const READ_AHEAD_BYTES: usize = 1 << 20;
const READ_AHEAD_PAGES_MAX: usize = 256;
/// Upper bound of a read-ahead window over slow links: as much as a filler has in flight.
const READ_AHEAD_BYTES_MAX: usize = BYTES_AHEAD_MAX;

impl<A: AddressSpace> Pager<A> {
    /// Maps the pages of a store.
    ///
    /// # Errors
    /// See [`MapError`].
    pub fn map(
        self: &Arc<Self>,
        store: Arc<PageStore>,
        options: RegionOptions,
    ) -> Result<MappedRegion<A>, MapError> {
        let _signals = SignalGuard::new();
        let (bytes, page_bytes) = (store.bytes(), store.page_bytes());
        let budget = self.shared().frames.budget();
        let (budget_bytes, pinned_bytes) = (budget.bytes(), budget.pinned());
        let pages_min = self.shared().shards().max(2) as u64;
        if budget_bytes.saturating_sub(pinned_bytes) < pages_min * page_bytes as u64 {
            return Err(MapError::Budget {
                budget_bytes,
                pinned_bytes,
                page_bytes,
                pages_min,
            });
        }
        self.shared().frames.expect(page_bytes);
        if !options.ordinary {
            let started = self.begin_work();
            started.map_err(|source| MapError::Os { bytes, source })?;
        }
        let id = self.next_region();
        let geometry = self.geometry(id, bytes, page_bytes, &options);
        let mapping = self
            .shared()
            .mapper
            .map(geometry)
            .map_err(|source| MapError::Os { bytes, source })?;
        // A window must not push out what was read ahead just before it.
        let most = (budget_bytes / 16) as usize / page_bytes;
        let read_ahead = match options.read_ahead {
            Some(pages) => pages.min(most)..=pages.min(most),
            None => {
                let first = (READ_AHEAD_BYTES / page_bytes).clamp(1, READ_AHEAD_PAGES_MAX);
                first.min(most)..=(READ_AHEAD_BYTES_MAX / page_bytes).min(most)
            }
        };
        let run_pages = (self.run_bytes_max() / page_bytes).clamp(1, CHUNK_PAGES);
        let region = Region::new(id, mapping, geometry, store, read_ahead, run_pages);
        let region = Arc::new(region);
        if let Some(in_thread) = self.in_thread() {
            in_thread.prepare(&region);
        }
        self.shared().regions.insert(region.clone());
        Ok(MappedRegion::new(self.clone(), region))
    }

    fn geometry(
        &self,
        id: RegionId,
        bytes: u64,
        page_bytes: usize,
        options: &RegionOptions,
    ) -> Geometry {
        let shards = self.shared().shards();
        let bytes = (bytes as usize).next_multiple_of(page_bytes);
        let stripe_bytes = bytes
            .div_ceil(shards * STRIPES_PER_SHARD)
            .max(STRIPE_BYTES_MIN)
            .next_multiple_of(page_bytes.max(2 << 20));
        Geometry {
            bytes,
            page_bytes,
            stripe_bytes,
            first_shard: id.0 as usize % shards,
            address: options.address,
            read_only: options.read_only,
            // A copying evictor may have to wait for a page that another one makes room for.
            no_direct_io: options.no_direct_io == Some(true) && self.shared().doors.evictors() > 1,
            ordinary: options.ordinary,
        }
    }
}
