//! Completion of a filler's fills: [`HeldBack`] maps runs, and holds read-ahead markers back.
//!
//! The rule: a run that is held back is mapped as soon as a thread wants a page of it, or a fill
//! finds no frame.

use std::sync::Arc;

use farpage_store::PageIndex;
use farpage_vm::AddressSpace;

use crate::{
    PageError,
    fills::{Arrivals, FillCompletion},
    freeze::Entered,
    markers::Markers,
    region::{Region, RegionGuard},
    requests::Fill,
    run::PageRun,
    shared::SharedParts,
};

/// Completion of one filler's fills.
pub(crate) struct HeldBack<A: AddressSpace> {
    arrivals: Arrivals<A>,
}

impl<A: AddressSpace> HeldBack<A> {
    pub(crate) fn new(shared: Arc<SharedParts<A>>, worker: usize) -> Self {
        HeldBack {
            arrivals: Arrivals::new(shared, worker),
        }
    }

    /// Returns this filler's markers. A filler's number among the workers is its shard's.
    fn markers(&self) -> &Markers<A> {
        &self.arrivals.shared.markers[self.arrivals.worker]
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.markers().is_empty()
    }

    /// Maps markers if some fill finds no frame, so that they can be evicted. Returns whether there
    /// were any.
    pub(crate) fn lend(&mut self) -> bool {
        let mut any = false;
        while let Some((fill, run)) = self.markers().take_called() {
            self.map(fill, run);
            any = true;
        }
        any
    }

    /// Maps the markers of a closing region.
    pub(crate) fn give_up(&mut self, region: &Region) {
        while let Some((fill, run)) = self.markers().take_of(region) {
            self.map(fill, run);
        }
    }
}

impl<A: AddressSpace> FillCompletion<A> for HeldBack<A> {
    fn arrivals(&mut self) -> &mut Arrivals<A> {
        &mut self.arrivals
    }

    fn complete(&mut self, fill: Fill, run: PageRun<A::Frame>) {
        let is_held_back = fill.marker && !fill.is_wanted() && !fill.region.is_closing();
        let mapped = match is_held_back {
            true => self.markers().keep(fill, run),
            false => Some((fill, run)),
        };
        if let Some((fill, run)) = mapped {
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
        if let Some((fill, run)) = self.markers().take(region, page) {
            self.map(fill, run);
        }
    }
}
