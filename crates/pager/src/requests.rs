//! Requests to a worker's I/O queue: a run on its way in ([`Fill`]), and one on its way out
//! ([`Leaving`]).
//!
//! The rule: the holder of a request owns its pages, and maps, gives up or publishes each of them.

use std::{sync::Arc, time::Instant};

use farpage_store::PageRange;

use crate::{
    clock::FoundBy, freeze::Departure, installer::UsageCount, job::Job, region::RegionGuard,
};

/// Run of pages that its worker owns as `Filling`.
#[derive(Debug)]
pub(crate) struct Fill {
    pub(crate) region: RegionGuard,
    pub(crate) pages: PageRange,
    pub(crate) usage: UsageCount,
    /// True for the read-ahead marker of a stream: held back when complete.
    pub(crate) marker: bool,
    /// Count of the run as on its way out, if the store does not have its bytes.
    pub(crate) unsaved: Option<Departure>,
}

impl Fill {
    pub(crate) fn new(region: RegionGuard, pages: PageRange, usage: UsageCount) -> Fill {
        Fill {
            region,
            pages,
            usage,
            marker: false,
            unsaved: None,
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.pages.len() * self.region.page_bytes()
    }

    pub(crate) fn is_wanted(&self) -> bool {
        self.region.is_wanted(self.pages)
    }
}

/// Run that was taken out, without its frame. Its pages are owned as `Leaving`, by an evictor or by
/// the thread that hands them over to one. Dropped when all of its pages are published.
#[derive(Debug)]
pub(crate) struct Leaving {
    pub(crate) region: RegionGuard,
    pub(crate) pages: PageRange,
    /// Job that asked for the run, if the program did.
    pub(crate) job: Option<Arc<Job>>,
    pub(crate) found_by: FoundBy,
    pub(crate) since: Instant,
    /// True if the run takes so long that it is not counted on any more.
    pub(crate) overdue: bool,
    /// Count of the run in the reclaim gate: a freeze waits until the run is dropped.
    pub(crate) departure: Departure,
}

impl Leaving {
    pub(crate) fn new(
        region: RegionGuard,
        pages: PageRange,
        job: Option<Arc<Job>>,
        found_by: FoundBy,
        departure: Departure,
    ) -> Leaving {
        Leaving {
            region,
            pages,
            job,
            found_by,
            since: Instant::now(),
            overdue: false,
            departure,
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.pages.len() * self.region.page_bytes()
    }

    /// True if a thread wants one of the run's pages back.
    pub(crate) fn is_wanted(&self) -> bool {
        self.region.is_wanted(self.pages)
    }
}
