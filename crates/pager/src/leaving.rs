//! A run on its way out: [`Leaving`].

use std::{sync::Arc, time::Instant};

use farpage_store::{Lane, PageIndex, PageRange, PageStore};
use farpage_vm::Frame;

use crate::{
    clock::FoundBy,
    freeze::Departure,
    job::Job,
    region::{Region, RegionGuard},
    requests::RunRequest,
    run::{PageRun, StoreFrame},
};

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

    /// Returns the run, with its frame again.
    pub(crate) fn run<F: Frame>(&self, frame: F) -> PageRun<F> {
        PageRun::new(self.pages.start, frame, self.region.page_bytes())
    }

    /// True if a thread wants one of the run's pages back.
    pub(crate) fn is_wanted(&self) -> bool {
        self.region.is_wanted(self.pages)
    }
}

impl RunRequest for Leaving {
    fn region(&self) -> &Arc<Region> {
        &self.region
    }

    fn pages(&self) -> PageRange {
        self.pages
    }

    fn start<F: Frame>(
        lane: &mut Lane<StoreFrame<F>>,
        store: &Arc<PageStore>,
        page: PageIndex,
        frame: StoreFrame<F>,
        tag: u64,
    ) -> Result<(), StoreFrame<F>> {
        lane.write_back(store, page, frame, tag)
    }
}
