//! Runs on their way in: [`Fill`].
//!
//! The rule: whoever holds a fill owns its pages, and maps or gives up each of them.

use std::sync::Arc;

use farpage_store::{IoQueue, PageIndex, PageRange, PageStore};
use farpage_vm::Frame;

use crate::{
    freeze::Departure,
    installer::UsageCount,
    region::{Region, RegionGuard},
    requests::RunRequest,
    run::StoreFrame,
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

    pub(crate) fn is_wanted(&self) -> bool {
        self.region.is_wanted(self.pages)
    }
}

impl RunRequest for Fill {
    fn region(&self) -> &Arc<Region> {
        &self.region
    }

    fn pages(&self) -> PageRange {
        self.pages
    }

    fn start<F: Frame>(
        io_queue: &mut IoQueue<StoreFrame<F>>,
        store: &Arc<PageStore>,
        page: PageIndex,
        frame: StoreFrame<F>,
        tag: u64,
    ) -> Result<(), StoreFrame<F>> {
        io_queue.fill(store, page, frame, tag)
    }
}
