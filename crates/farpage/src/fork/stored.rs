//! [`Stored`]: pages of a child that have bytes of their own in remote memory, because the child
//! has changed them before they left it.
//!
//! The rule it keeps: a page is found here when its bytes are complete on the servers, and not
//! before.

use std::{
    collections::{BTreeMap, HashMap},
    iter,
    ops::Range,
    sync::Arc,
};

use farpage_store::{CreateError, EntryWords, PageStore, Snapshot};

use super::image::{Image, ImageRegion};

/// Place of the bytes of a page that the child does not have in its memory.
#[derive(Clone)]
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
