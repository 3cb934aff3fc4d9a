//! All mapped regions by their addresses: [`RegionTable`].
//!
//! The rule: a signal handler may read the table. So its lock is the standard library's, which
//! never allocates, and a thread that holds it touches no page of the program's.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, RwLock, RwLockReadGuard},
};

use crate::region::Region;

/// All mapped regions by their first address.
#[derive(Debug, Default)]
pub(crate) struct RegionTable(RwLock<BTreeMap<usize, Arc<Region>>>);

impl RegionTable {
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, BTreeMap<usize, Arc<Region>>> {
        self.0.read().expect("nothing panics under this lock")
    }

    pub(crate) fn insert(&self, region: Arc<Region>) {
        let mut regions = self.0.write().expect("nothing panics under this lock");
        regions.insert(region.address, region);
    }

    pub(crate) fn remove(&self, address: usize) {
        let mut regions = self.0.write().expect("nothing panics under this lock");
        regions.remove(&address);
    }

    /// Returns the region at an address, if one is mapped there.
    pub(crate) fn at(&self, address: usize) -> Option<Arc<Region>> {
        let regions = self.read();
        let (_, region) = regions.range(..=address).next_back()?;
        region.contains(address).then(|| region.clone())
    }

    /// Returns the regions that have some of these addresses.
    pub(crate) fn overlapping(&self, addresses: &Range<usize>) -> Vec<Arc<Region>> {
        let regions = self.read();
        let below = regions.range(..addresses.end).rev();
        below
            .take_while(|(_, region)| region.address + region.geometry.bytes > addresses.start)
            .map(|(_, region)| region.clone())
            .collect()
    }
}
