//! Completion of a filler's fills: [`HeldBack`] maps runs, and holds read-ahead markers back.
//!
//! A read-ahead marker is the first run of a read-ahead window. It is kept unmapped, so that the
//! fault on it says that the program has come so far. The rule: a run that is held back is mapped
//! as soon as a thread wants a page of it, or a fill finds no frame.

use std::sync::Arc;

use farpage_store::PageIndex;
use farpage_vm::AddressSpace;

use crate::{
    PageError,
    ahead::STREAMS,
    fills::{Arrivals, Fill, FillCompletion},
    freeze::Entered,
    region::{Region, RegionGuard},
    requests::RunRequest,
    run::PageRun,
    shared::SharedParts,
};

/// Runs that are complete and not mapped.
pub(crate) struct HeldBack<A: AddressSpace> {
    arrivals: Arrivals<A>,
    /// Runs, the one held back longest first.
    runs: Vec<(Fill, PageRun<A::Frame>)>,
}

impl<A: AddressSpace> HeldBack<A> {
    pub(crate) fn new(shared: Arc<SharedParts<A>>, worker: usize) -> Self {
        HeldBack {
            arrivals: Arrivals::new(shared, worker),
            runs: Vec::new(),
        }
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// True if held back runs are needed: some filler finds no frame.
    pub(crate) fn is_called(&self) -> bool {
        !self.runs.is_empty() && self.arrivals.shared.frames.budget().is_starving()
    }

    /// Maps runs that are held back if some fill finds no frame, so that they can be evicted.
    /// Returns whether there were any.
    pub(crate) fn lend(&mut self) -> bool {
        let called = self.is_called();
        while called && !self.runs.is_empty() {
            self.map_at(0);
        }
        called
    }

    /// Maps the runs of a closing region.
    pub(crate) fn give_up(&mut self, region: &Region) {
        for at in (0..self.runs.len()).rev() {
            if self.runs[at].0.region.id == region.id {
                self.map_at(at);
            }
        }
    }

    /// Keeps a read-ahead marker unmapped. With as many as there are streams, the oldest one is
    /// mapped: its stream has ended.
    fn hold_back(&mut self, fill: Fill, run: PageRun<A::Frame>) {
        if self.runs.len() == STREAMS {
            self.map_at(0);
        }
        self.arrivals
            .shared
            .frames
            .budget()
            .begin_holding_back(fill.bytes());
        self.runs.push((fill, run));
    }

    fn map_at(&mut self, at: usize) {
        let (fill, run) = self.runs.remove(at);
        self.arrivals
            .shared
            .frames
            .budget()
            .end_holding_back(fill.bytes());
        self.map(fill, run);
    }
}

impl<A: AddressSpace> FillCompletion<A> for HeldBack<A> {
    fn arrivals(&mut self) -> &mut Arrivals<A> {
        &mut self.arrivals
    }

    fn complete(&mut self, fill: Fill, run: PageRun<A::Frame>) {
        if fill.marker && !fill.is_wanted() && !fill.region.is_closing() {
            self.hold_back(fill, run);
        } else {
            self.map(fill, run);
        }
    }

    fn fail(&mut self, region: &RegionGuard, page: PageIndex, error: PageError) {
        if self.arrivals.shared.installer.fail(region, page, error) {
            self.arrivals.counters().poisoned.bump();
        }
    }

    fn lose(
        &mut self,
        _entered: &Entered<'_>,
        region: &RegionGuard,
        page: PageIndex,
        error: PageError,
    ) {
        self.arrivals.shared.installer.lose(region, page, &error);
        self.arrivals.counters().poisoned.bump();
    }

    /// Maps the page if it is held back: the program has come along.
    fn noted(&mut self, region: &Arc<Region>, page: PageIndex) {
        let holds =
            |(fill, _): &(Fill, _)| fill.pages.contains(page) && fill.region.id == region.id;
        if let Some(at) = self.runs.iter().position(holds) {
            self.map_at(at);
        }
    }
}
