//! Choice of the pages that leave next by CLOCK: a hand over the page words, [`ClockHand`].
//!
//! Userspace paging has no access bits, and asking the kernel for them costs more than most
//! evictions. The page words say when a page came in (its stamp), and if it came back soon after it
//! had left or was wanted while it left (its usage count). So there is no list of resident pages to
//! keep, lock and update on every fill.
//!
//! One hand sweeps the words of all regions in address order. It passes over pages younger than the
//! *age floor*, lowers the usage counts of others, and gives pages with none to the evictors.
//! Neighbours in memory leave together. The floor rises while most pages are old enough, so that
//! the order approaches first in, first out; it falls when the hand finds too few.
//!
//! The downside: a page that is hot without ever leaving is not known to be hot, so that it leaves
//! and comes back once. A page that was hot stays for a while: its usage count falls by one with
//! each pass.

use std::{
    ops::Bound,
    sync::{Mutex, MutexGuard},
};

use farpage_store::PageIndex;

use crate::{
    candidates::{Candidates, FoundBy},
    region::RegionTable,
    region::{CHUNK_PAGES, chunk_of},
};

/// Clock hand over all pages of a runtime.
#[derive(Debug)]
pub(crate) struct ClockHand {
    /// Hand under a lock of the standard library, which never allocates: threads look for victims
    /// in a signal handler, too.
    hand: Mutex<HandState>,
    /// Upper bound of the age floor, in ticks of the fill clock: a part of the budget, since few
    /// pages stay older for long.
    age_cap: u32,
}

#[derive(Debug)]
struct HandState {
    /// Address of a region; `page` is the page in it that is next.
    address: usize,
    page: PageIndex,
    age_floor: u32,
    seen: usize,
    taken: usize,
}

impl ClockHand {
    /// Returns a hand for a budget that `budget_ticks` ticks of the fill clock fill once.
    pub(crate) fn new(budget_ticks: u32) -> ClockHand {
        let age_cap = budget_ticks / 4 * 3;
        ClockHand {
            hand: Mutex::new(HandState {
                address: 0,
                page: PageIndex(0),
                age_floor: age_cap,
                seen: 0,
                taken: 0,
            }),
            age_cap,
        }
    }

    fn hand(&self) -> MutexGuard<'_, HandState> {
        self.hand.lock().expect("nothing panics under this lock")
    }

    /// Moves the hand past the next chunk that may hold resident pages, or past the rest of one,
    /// and returns its pages. `None`: no region has any.
    pub(crate) fn candidates(&self, regions: &RegionTable) -> Option<Candidates> {
        let mut hand = self.hand();
        let regions = regions.read();
        // Twice around at most: the first time from where the hand stands, the second from the
        // start.
        for _ in 0..2 {
            for (&address, region) in
                regions.range((Bound::Included(hand.address), Bound::Unbounded))
            {
                let from = if address == hand.address {
                    hand.page
                } else {
                    PageIndex(0)
                };
                if region.resident() == 0 || region.is_closing() {
                    continue;
                }
                if let Some(chunk) = region.next_resident(chunk_of(from)) {
                    (hand.address, hand.page) = (address, PageIndex((chunk + 1) * CHUNK_PAGES));
                    let pages = region.chunk(chunk);
                    return Some(Candidates {
                        region: region.clone(),
                        pages: pages.start.max(from).until(pages.end),
                        age_floor: hand.age_floor,
                        found_by: FoundBy::ClockHand,
                    });
                }
            }
            (hand.address, hand.page) = (0, PageIndex(0));
        }
        None
    }

    /// Moves the hand back to `page`, the first candidate that was not looked at: enough pages
    /// leave. Otherwise the rest of each chunk would be passed over, and under a small budget the
    /// same few pages would leave again and again.
    pub(crate) fn stop_at(&self, candidates: &Candidates, page: PageIndex) {
        let mut hand = self.hand();
        let behind = PageIndex(candidates.pages.end.0.next_multiple_of(CHUNK_PAGES));
        if (hand.address, hand.page) == (candidates.region.address, behind) {
            hand.page = page;
        }
    }

    /// Adjusts the age floor by how many resident candidates were seen and how many leave.
    pub(crate) fn report(&self, seen: usize, taken: usize, resident_in_all: usize) {
        let mut hand = self.hand();
        hand.seen += seen;
        hand.taken += taken;
        // A quarter of all pages looked at is evidence enough.
        if hand.seen * 4 >= resident_in_all {
            if hand.taken * 16 < hand.seen {
                hand.age_floor /= 2;
            } else if hand.taken * 2 > hand.seen {
                hand.age_floor = (hand.age_floor + hand.age_floor / 8 + 1).min(self.age_cap);
            }
            (hand.seen, hand.taken) = (0, 0);
        }
    }
}
