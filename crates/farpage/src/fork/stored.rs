//! [`Stored`]: pages of a child that have bytes of their own in remote memory, because the child
//! has changed them before they left it.
//!
//! [`Requests`] are what the keeper's lane reads and writes there just now.
//!
//! The rules it keeps: a page is found here when its bytes are complete on the servers, and not
//! before. The end of a store or of a snapshot may ask servers, so none ends inside the lane, whose
//! request may be the last to hold it.

use std::{
    collections::{BTreeMap, HashMap},
    iter, mem,
    ops::Range,
    sync::Arc,
};

use farpage_fabric::ConnectError;
use farpage_store::{Cluster, CreateError, EntryWords, Lane, PageStore, Snapshot};

use super::image::{Image, ImageRegion};

/// Place of the bytes of a page that the child does not have in its memory.
pub(super) enum Place {
    /// Slot of the parent's page at the fork.
    Image,
    /// Store of the child's own.
    Own(Arc<PageStore>),
    /// Store of a process that has made the child by `fork`, and the entry as it was then.
    Inherited(Arc<Snapshot>, EntryWords),
}

/// Pages of a child, by their addresses, that have bytes of their own in remote memory.
#[derive(Default)]
pub(super) struct Stored {
    /// Stores of the child's own, by the address of their region.
    stores: HashMap<usize, Arc<PageStore>>,
    /// Entries of the pages in these stores. Copied at the first change after a fork.
    own: Arc<BTreeMap<usize, EntryWords>>,
    inherited: Option<Arc<Layer>>,
}

/// Pages that a process had stored when it made a child by `fork`. A page of the child's own comes
/// first, and what the child has dropped since is the view's to know.
struct Layer {
    pages: Arc<BTreeMap<usize, EntryWords>>,
    /// Slots of the pages, by the address of their region.
    snapshots: HashMap<usize, Arc<Snapshot>>,
    /// Pages that the process had inherited itself.
    before: Option<Arc<Layer>>,
}

impl Stored {
    /// Returns the place of the bytes of the page at `address`.
    pub(super) fn place(&self, region: &ImageRegion, address: usize) -> Place {
        let start = region.addresses.start;
        if self.own.contains_key(&address) {
            return Place::Own(self.stores[&start].clone());
        }
        let mut layers = iter::successors(self.inherited.as_deref(), |it| it.before.as_deref());
        let found = layers.find_map(|it| Some((it, it.pages.get(&address)?)));
        match found {
            Some((layer, words)) => Place::Inherited(layer.snapshots[&start].clone(), *words),
            None => Place::Image,
        }
    }

    /// Returns the store that takes the child's pages of a region. Made at the first call.
    ///
    /// # Errors
    /// As [`PageStore::beside`].
    pub(super) fn store(&mut self, region: &ImageRegion) -> Result<Arc<PageStore>, CreateError> {
        let start = region.addresses.start;
        if let Some(store) = self.stores.get(&start) {
            return Ok(store.clone());
        }
        let store = region.snapshot.store();
        let made = store.beside(format!("{} of a child made by fork", store.label()))?;
        self.stores.insert(start, made.clone());
        Ok(made)
    }

    /// Notes that the child's own store has the page at `address`.
    pub(super) fn insert(&mut self, region: &ImageRegion, address: usize) {
        let store = &self.stores[&region.addresses.start];
        let words = store.entry_words(region.page(address).0);
        Arc::make_mut(&mut self.own).insert(address, words);
    }

    /// Forgets the pages of the child's own that `range`, which the child has dropped, covers.
    /// `is_idle` says that nothing reads a page just now: its remote memory is given back.
    pub(super) fn forget(
        &mut self,
        image: &Image,
        range: &Range<usize>,
        is_idle: impl Fn(usize) -> bool,
    ) {
        let gone: Vec<usize> = self.own.range(range.clone()).map(|(&at, _)| at).collect();
        for address in gone {
            let region = image.region(address).expect("stored pages are in regions");
            if address + region.page_bytes() > range.end {
                continue;
            }
            Arc::make_mut(&mut self.own).remove(&address);
            if is_idle(address) {
                self.stores[&region.addresses.start].forget(region.page(address).0);
            }
        }
    }

    /// Returns what a process has of these pages that the child makes by `fork` now. Looks at no
    /// page.
    pub(super) fn inherit(&self) -> Stored {
        if self.own.is_empty() {
            let inherited = self.inherited.clone();
            return Stored {
                inherited,
                ..Stored::default()
            };
        }
        let snapshot = |(&start, store): (&usize, &Arc<PageStore>)| {
            let taken = Snapshot::take(store).expect("a store of remote memory that lives");
            (start, Arc::new(taken))
        };
        let layer = Layer {
            pages: self.own.clone(),
            snapshots: self.stores.iter().map(snapshot).collect(),
            before: self.inherited.clone(),
        };
        Stored {
            inherited: Some(Arc::new(layer)),
            ..Stored::default()
        }
    }
}

/// Place that a request reads or writes, and the image of its child.
pub(super) type Source = (Place, Arc<Image>);

/// Sources of all requests that the lane has not completed.
#[derive(Default)]
pub(super) struct Requests {
    sources: HashMap<u64, Source>,
    /// Sources of completed requests whose child has ended.
    spent: Vec<Source>,
}

impl Requests {
    /// Notes what the request of this tag reads or writes.
    pub(super) fn begin(&mut self, tag: u64, source: Source) {
        self.sources.insert(tag, source);
    }

    /// Notes that the request of this tag has ended. `is_alive` says that its child has not.
    pub(super) fn end(&mut self, tag: u64, is_alive: bool) {
        let source = self.sources.remove(&tag);
        self.spent.extend(source.filter(|_| !is_alive));
    }

    /// Returns the sources of requests whose child has ended, which may be the last to be dropped.
    pub(super) fn take_spent(&mut self) -> Option<Vec<Source>> {
        (!self.spent.is_empty()).then(|| mem::take(&mut self.spent))
    }
}

/// Returns the lane to the servers. Made at the first call.
///
/// # Errors
/// As [`Lane::new`].
pub(super) fn lane_of<'a>(
    lane: &'a mut Option<Lane<Vec<u8>>>,
    cluster: &Arc<Cluster>,
) -> Result<&'a mut Lane<Vec<u8>>, ConnectError> {
    match lane {
        Some(lane) => Ok(lane),
        None => Ok(lane.insert(Lane::new(cluster)?)),
    }
}
