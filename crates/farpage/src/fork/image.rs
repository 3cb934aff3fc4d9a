//! [`Image`]: all regions of a runtime as they were at one moment, and the [`Census`] of images.
//!
//! The rule it keeps: as long as an image exists, the slots that the page tables of its moment
//! refer to are held.

use std::{
    ops::Range,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use farpage_store::{PageIndex, Snapshot};

/// All regions of a runtime as they were at one moment. Dropping it frees what no other image and
/// no region needs.
pub(super) struct Image {
    pub(super) regions: Vec<ImageRegion>,
    census: Arc<Census>,
}

/// One region of an image.
pub(super) struct ImageRegion {
    pub(super) addresses: Range<usize>,
    /// Parts of the region that children have: the others hold memory that is not the region's.
    kept: Vec<Range<usize>>,
    pub(super) snapshot: Snapshot,
}

impl Image {
    pub(super) fn new(
        regions: impl Iterator<Item = (Range<usize>, Vec<Range<usize>>, Snapshot)>,
        census: &Arc<Census>,
    ) -> Image {
        *census.images() += 1;
        let region = |(addresses, kept, snapshot)| ImageRegion {
            addresses,
            kept,
            snapshot,
        };
        Image {
            regions: regions.map(region).collect(),
            census: census.clone(),
        }
    }

    /// Returns the parts of all regions that children have.
    pub(super) fn kept(&self) -> Vec<Range<usize>> {
        let regions = self.regions.iter();
        regions.flat_map(|region| region.kept.clone()).collect()
    }

    /// Returns the parts of all regions that children do not have.
    pub(super) fn foreign(&self) -> Vec<Range<usize>> {
        let mut foreign = Vec::new();
        for region in &self.regions {
            let mut at = region.addresses.start;
            for part in &region.kept {
                foreign.push(at..part.start);
                at = part.end;
            }
            foreign.push(at..region.addresses.end);
        }
        foreign.retain(|part| !part.is_empty());
        foreign
    }

    /// Returns the region at an address.
    pub(super) fn region(&self, address: usize) -> Option<&ImageRegion> {
        let mut regions = self.regions.iter();
        regions.find(|region| region.addresses.contains(&address))
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        self.regions.clear();
        *self.census.images() -= 1;
        self.census.changed.notify_all();
    }
}

impl ImageRegion {
    pub(super) fn page_bytes(&self) -> usize {
        self.snapshot.store().page_bytes()
    }

    /// Returns the page at `address`, and the page's first address.
    pub(super) fn page(&self, address: usize) -> (PageIndex, usize) {
        let page = (address - self.addresses.start) / self.page_bytes();
        let start = self.addresses.start + page * self.page_bytes();
        (PageIndex(page), start)
    }
}

/// Count of a keeper's images: while one exists, a child may need the keeper. It has no descriptor.
pub(super) struct Census {
    /// Number of images that exist.
    images: Mutex<usize>,
    /// Condition that an image has ended, or a turn of the keeper.
    changed: Condvar,
    /// Number of groups of images that are just being dropped.
    ending: AtomicUsize,
    /// True if the keeper's descriptors are out of the program's reach.
    pub(super) is_apart: bool,
}

impl Census {
    pub(super) fn new(is_apart: bool) -> Census {
        Census {
            images: Mutex::default(),
            changed: Condvar::new(),
            ending: AtomicUsize::new(0),
            is_apart,
        }
    }

    fn images(&self) -> MutexGuard<'_, usize> {
        self.images.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells waiting threads of a turn of the keeper.
    pub(super) fn tell(&self) {
        self.changed.notify_all();
    }

    /// Notes that images are about to be dropped elsewhere.
    pub(super) fn begin_to_end(&self) {
        self.ending.fetch_add(1, Ordering::SeqCst);
    }

    /// Notes that the images have been dropped.
    pub(super) fn has_ended(&self) {
        self.ending.fetch_sub(1, Ordering::SeqCst);
        self.changed.notify_all();
    }

    /// True if images are just being dropped.
    pub(super) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::SeqCst) > 0
    }

    /// Waits until no image is left, for `patience` at most. Returns false if some still are.
    pub(super) fn wait(&self, patience: Duration) -> bool {
        let waited =
            (self.changed).wait_timeout_while(self.images(), patience, |images| *images > 0);
        *waited.unwrap_or_else(PoisonError::into_inner).0 == 0
    }

    /// Waits until no image is left, or `is_over` says so. Calls `again` before each look.
    pub(super) fn wait_unless(
        &self,
        is_over: impl Fn() -> bool,
        again: impl Fn(),
        (pause, until): (Duration, Instant),
    ) {
        let mut images = self.images();
        while *images > 0 && !is_over() && Instant::now() < until {
            again();
            let waited = self.changed.wait_timeout(images, pause);
            images = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
