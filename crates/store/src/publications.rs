//! [`Publications`]: which slots of a named region the published maps refer to.
//!
//! The rule it keeps: a slot that the last published map refers to, or that a running publication's
//! map may refer to, is not free before the next publication has succeeded. After a publication
//! whose outcome is unknown, that holds for both maps. Slots that other programs read are left to
//! [`ReaderSlots`](crate::readers::ReaderSlots).

use std::{
    mem,
    sync::{
        RwLock, RwLockReadGuard,
        atomic::{AtomicU64, Ordering},
    },
};

use farpage_fabric::AllocError;
use farpage_signals::{Mutex, MutexGuard};

use crate::{
    groups::NO_PANIC,
    place::SlotSpan,
    pool::SlotPool,
    readers::{PackedPlaces, ToldVersions},
    slots::GRANULE_BYTES,
};

/// Length of the pieces in which maps are written and read.
pub(crate) const PIECE_BYTES: usize = 1 << 20;

/// Returns the bytes of a region's map: whole pages, or whole granules where pages are larger, so
/// that its slots leave no odd holes between pages.
pub(crate) fn map_bytes(bytes: u64, page_bytes: usize) -> u64 {
    let unit = GRANULE_BYTES.min(page_bytes as u64);
    (bytes.div_ceil(page_bytes as u64) * 32).next_multiple_of(unit)
}

/// State of a region's publications.
#[derive(Default)]
pub(crate) struct Publications {
    /// True while a publication runs. Locked shared by threads that replace an entry; exclusive
    /// while a map is copied or marked, which takes milliseconds per GiB of map.
    commits: RwLock<bool>,
    /// Slots that the last published map refers to and that are not used any more.
    deferred: Mutex<Vec<SlotSpan>>,
    /// Slots that went out of use during a running publication, whose map may refer to them.
    undecided: Mutex<Vec<SlotSpan>>,
    /// Number of publications that have ended.
    ended: AtomicU64,
    /// The last publication, locked by the one that runs.
    last: Mutex<Last>,
}

/// The last publication.
#[derive(Default)]
struct Last {
    /// Count of this writer's versions; 0 for the one that was opened, or none.
    version: u64,
    /// Slots of the pages and the map. After a publication whose outcome is unknown, the slots of
    /// both versions.
    places: PackedPlaces,
    /// Slots of the map.
    map: Vec<SlotSpan>,
    /// Slots for whole maps to come, where the region reserves its memory: a region that has been
    /// in use for long may have no hole for a piece of a map.
    spare: Vec<Vec<SlotSpan>>,
    /// Upper bound of the maps in `spare`.
    spares_max: usize,
}

/// The right to replace entries while no map is being copied.
pub(crate) struct Commit<'a> {
    publications: &'a Publications,
    publishing: RwLockReadGuard<'a, bool>,
}

/// A publication that runs.
pub(crate) struct Publication<'a> {
    publications: &'a Publications,
    last: MutexGuard<'a, Last>,
    map_bytes: u64,
    /// Slots of the new map.
    area: Vec<SlotSpan>,
    /// Slots that only the previous map refers to.
    stale: Vec<SlotSpan>,
}

/// Outcome of a publication.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The name is bound to the new map. Holds the answers of the servers that hold the name.
    Bound(Vec<ToldVersions>),
    /// The name is bound to the previous map.
    Failed,
    /// The name is bound to either map.
    Unknown,
}

impl Publications {
    /// Makes the publications of a region whose published version has the slots `places`, those of
    /// `map` among them.
    pub(crate) fn of(places: PackedPlaces, map: Vec<SlotSpan>) -> Self {
        let publications = Self::default();
        let mut last = publications.last.lock();
        (last.places, last.map) = (places, map);
        drop(last);
        publications
    }

    /// Takes slots for later maps, as far as there is room. Missing slots are taken when they are
    /// needed.
    pub(crate) fn set_aside(&self, pool: &SlotPool, map_bytes: u64, maps: usize) {
        let mut last = self.last.lock();
        last.spares_max = maps;
        let areas = (0..maps).map_while(|_| map_slots(pool, map_bytes).ok());
        last.spare = areas.collect();
    }

    /// True if a publication runs. Its end frees slots.
    pub(crate) fn is_running(&self) -> bool {
        *self.commits.read().expect(NO_PANIC)
    }

    /// Returns the number of publications that have ended.
    pub(crate) fn ended(&self) -> u64 {
        self.ended.load(Ordering::Acquire)
    }

    pub(crate) fn commit(&self) -> Commit<'_> {
        Commit {
            publications: self,
            publishing: self.commits.read().expect(NO_PANIC),
        }
    }

    /// Begins a publication, once the one before has ended, and takes slots for its map.
    ///
    /// # Errors
    /// No server has room for the map.
    pub(crate) fn begin(
        &self,
        pool: &SlotPool,
        map_bytes: u64,
    ) -> Result<Publication<'_>, AllocError> {
        let mut last = self.last.lock();
        // The map's slots come before its content: evictions meanwhile must not take their room.
        let area = match last.spare.pop() {
            Some(area) => area,
            None => map_slots(pool, map_bytes)?,
        };
        Ok(Publication {
            publications: self,
            last,
            map_bytes,
            area,
            stale: Vec::new(),
        })
    }
}

impl Commit<'_> {
    /// Keeps a slot that goes out of use if a map may refer to it. False if the slot is free now.
    pub(crate) fn keep(&self, slot: SlotSpan, published: bool) -> bool {
        let list = match (published, *self.publishing) {
            (true, _) => &self.publications.deferred,
            (false, true) => &self.publications.undecided,
            (false, false) => return false,
        };
        list.lock().push(slot);
        true
    }
}

impl Publication<'_> {
    /// Returns the slots of the new map.
    pub(crate) fn area(&self) -> &[SlotSpan] {
        &self.area
    }

    /// Copies the map by `map` while no entry is replaced. The slots that the map refers to are
    /// kept from here on.
    pub(crate) fn copy<T>(&mut self, map: impl FnOnce() -> T) -> T {
        let mut publishing = self.publications.commits.write().expect(NO_PANIC);
        *publishing = true;
        self.stale = mem::take(&mut *self.publications.deferred.lock());
        map()
    }

    /// Frees the slots of a map that was not written, except `failed`: a write to that slot may
    /// still arrive, so it is given up.
    pub(crate) fn give_up_area(&mut self, pool: &SlotPool, failed: Option<SlotSpan>) {
        self.area.retain(|&slot| Some(slot) != failed);
        pool.give_back(&mem::take(&mut self.area));
    }

    /// Ends the publication. Frees slots that no map refers to any more, unless they are read.
    /// `places` are the slots of the new version. `mark`, called unless the publication failed,
    /// marks the pages whose slots the new map refers to; no entry is replaced meanwhile.
    pub(crate) fn end(
        mut self,
        pool: &SlotPool,
        ended: Ended,
        places: Vec<u64>,
        mark: impl FnOnce(),
    ) {
        let publications = self.publications;
        let mut publishing = publications.commits.write().expect(NO_PANIC);
        *publishing = false;
        publications.ended.fetch_add(1, Ordering::Release);
        let undecided = mem::take(&mut *publications.undecided.lock());
        let mut deferred = publications.deferred.lock();
        match ended {
            Ended::Bound(told) => {
                mark();
                deferred.extend(undecided);
                let before = mem::replace(&mut self.last.map, self.area);
                let since = self.last.version;
                self.last.version += 1;
                let old = mem::replace(&mut self.last.places, sorted(places));
                let readers = pool.readers().expect("only named regions are published");
                let is_written = pool.written_servers();
                let is_written = |server: u8| is_written[usize::from(server)];
                let (number, replaced) = (self.last.version, (since, old));
                // The map's slots are read with the rest of the version.
                let kept = match readers.published(&told, number, replaced, is_written) {
                    true => before,
                    false => {
                        self.last.give_back(pool, before, self.map_bytes);
                        Vec::new()
                    }
                };
                let stale = self.stale.into_iter().chain(kept);
                pool.free(&readers.keep(stale, is_written));
            }
            Ended::Failed => {
                deferred.extend(self.stale);
                pool.free(&undecided);
                self.last.give_back(pool, self.area, self.map_bytes);
            }
            // The next publication frees what both maps refer to.
            Ended::Unknown => {
                mark();
                deferred.extend(undecided);
                deferred.extend(self.stale);
                self.last.map.extend(self.area);
                let both = self.last.places.iter().copied().chain(places);
                self.last.places = sorted(both.collect());
            }
        }
    }
}

impl Last {
    /// Keeps the slots of a map that is gone for a later map, if they hold a whole one and a spare
    /// is missing. Otherwise frees them.
    fn give_back(&mut self, pool: &SlotPool, area: Vec<SlotSpan>, map_bytes: u64) {
        let whole = area.len() == (map_bytes as usize).div_ceil(PIECE_BYTES);
        if whole && self.spare.len() < self.spares_max {
            self.spare.push(area);
        } else {
            pool.give_back(&area);
        }
    }
}

fn sorted(mut places: Vec<u64>) -> PackedPlaces {
    places.sort_unstable();
    places.into()
}

/// Allocates slots for all pieces of a map.
fn map_slots(pool: &SlotPool, map_bytes: u64) -> Result<Vec<SlotSpan>, AllocError> {
    let pieces = map_bytes.div_ceil(PIECE_BYTES as u64);
    let mut slots = Vec::with_capacity(pieces as usize);
    for piece in 0..pieces {
        let left = map_bytes - piece * PIECE_BYTES as u64;
        let bytes = left.min(PIECE_BYTES as u64) as u32;
        let place = loop {
            match pool.alloc(bytes, piece) {
                Some(place) => break place,
                None => {
                    if let Err(error) = pool.grow(bytes) {
                        pool.give_back(&slots);
                        return Err(error);
                    }
                }
            }
        };
        pool.settle(place, 1);
        slots.push(SlotSpan { place, bytes });
    }
    Ok(slots)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::SlotPlace;

    #[test]
    fn a_slot_that_a_running_publication_may_refer_to_is_kept() {
        let place = |offset| SlotSpan {
            place: SlotPlace {
                server: 0,
                extent: 0,
                offset,
            },
            bytes: 64,
        };
        let publications = Publications::default();
        assert!(!publications.commit().keep(place(0), false));
        assert!(publications.commit().keep(place(64), true));
        *publications.commits.write().expect(NO_PANIC) = true;
        assert!(publications.commit().keep(place(128), false));
        assert!(publications.commit().keep(place(192), true));
        assert_eq!(*publications.deferred.lock(), [place(64), place(192)]);
        assert_eq!(*publications.undecided.lock(), [place(128)]);
    }
}
