//! [`Stored`]: pages of a child that have bytes of their own in remote memory, because the child
//! has changed them before they left it.
//!
//! The rule it keeps: a page is found here when its bytes are complete on the servers, and not
//! before.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::Range,
    sync::Arc,
};

use farpage_store::{CreateError, EntryWords, PageStore, Snapshot};

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
    own: BTreeSet<usize>,
    inherited: BTreeMap<usize, (Arc<Snapshot>, EntryWords)>,
}

impl Stored {
    /// Returns the place of the bytes of the page at `address`.
    pub(super) fn place(&self, region: &ImageRegion, address: usize) -> Place {
        if self.own.contains(&address) {
            return Place::Own(self.stores[&region.addresses.start].clone());
        }
        match self.inherited.get(&address) {
            Some((snapshot, words)) => Place::Inherited(snapshot.clone(), *words),
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
    pub(super) fn insert(&mut self, address: usize) {
        self.inherited.remove(&address);
        self.own.insert(address);
    }

    /// Forgets the pages that `range`, which the child has dropped, covers. `is_idle` says that
    /// nothing reads a page just now: its remote memory is given back.
    pub(super) fn forget(
        &mut self,
        image: &Image,
        range: &Range<usize>,
        is_idle: impl Fn(usize) -> bool,
    ) {
        let covered = |address: usize| {
            let region = image.region(address).expect("stored pages are in regions");
            (address + region.page_bytes() <= range.end).then_some(region)
        };
        let inherited = self.inherited.range(range.clone());
        let gone: Vec<usize> = inherited.map(|(&address, _)| address).collect();
        for address in gone {
            if covered(address).is_some() {
                self.inherited.remove(&address);
            }
        }
        let gone: Vec<usize> = self.own.range(range.clone()).copied().collect();
        for address in gone {
            let Some(region) = covered(address) else {
                continue;
            };
            self.own.remove(&address);
            if is_idle(address) {
                self.stores[&region.addresses.start].forget(region.page(address).0);
            }
        }
    }

    /// Returns what a process has of these pages that the child makes by `fork` now.
    pub(super) fn inherit(&self, image: &Image) -> Stored {
        let mut inherited = self.inherited.clone();
        let mut snapshots = HashMap::new();
        for &address in &self.own {
            let region = image.region(address).expect("stored pages are in regions");
            let start = region.addresses.start;
            let store = &self.stores[&start];
            let taken = snapshots.entry(start).or_insert_with(|| {
                Arc::new(Snapshot::take(store).expect("a store of remote memory that lives"))
            });
            let words = store.entry_words(region.page(address).0);
            inherited.insert(address, (taken.clone(), words));
        }
        Stored {
            inherited,
            ..Stored::default()
        }
    }
}
