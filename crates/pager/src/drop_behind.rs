//! Drop-behind: the queue of victims that streams have gone through, [`DropBehind`].
//!
//! A loop over more data than fits never hits under FIFO: each page leaves just before it is needed
//! again. The opposite is right for a loop: the pages just gone through leave, and the rest stays
//! until the program comes along again. So pages that a stream has gone through wait here for a
//! while, since the next row of a grid looks at the last one once more. Then they leave before
//! other pages do. The frames of streams circulate in little memory, which the caches may hold.
//!
//! The rule: this module remembers addresses only. `proof.rs` says if it is the turn of streams,
//! and the evictor sees if a page is still resident.

use std::{
    collections::VecDeque,
    ops::Range,
    sync::{Mutex, MutexGuard},
};

use farpage_store::PageIndex;

use crate::{
    candidates::{Candidates, FoundBy},
    region::RegionTable,
};

/// A stretch stays until this share of the budget was gone through after it, and at least
/// `GRACE_BYTES_MIN` or half the budget: programs go through several arrays at once and come back
/// to rows.
const GRACE_SHARE: usize = 16;
const GRACE_BYTES_MIN: usize = 8 << 20;
/// Share of the budget after the grace: a stretch that has not left by then counts as staying.
const SLACK_SHARE: usize = 8;
/// Upper bound of the stretches in the queue; most are of megabytes.
const STRETCHES_MAX: usize = 1024;

/// Stretches that streams have gone through, in order.
pub(crate) struct DropBehind {
    /// Queue under a lock of the standard library, which never allocates: for signal handlers.
    queue: Mutex<Queue>,
    grace_bytes: usize,
    queue_bytes_max: usize,
}

struct Queue {
    /// Address ranges, the ones gone through longest ago first.
    stretches: VecDeque<Range<usize>>,
    bytes: usize,
}

impl DropBehind {
    /// Returns an empty queue for a budget of `budget_ticks` units of 4 KiB.
    pub(crate) fn new(budget_ticks: u32) -> DropBehind {
        let budget_bytes = (budget_ticks as usize) << 12;
        let grace_bytes = (budget_bytes / GRACE_SHARE).max(GRACE_BYTES_MIN.min(budget_bytes / 2));
        DropBehind {
            queue: Mutex::new(Queue {
                stretches: VecDeque::with_capacity(STRETCHES_MAX),
                bytes: 0,
            }),
            grace_bytes,
            queue_bytes_max: grace_bytes + budget_bytes / SLACK_SHARE,
        }
    }

    /// Appends addresses of one region that a stream has gone through. Allocates nothing.
    pub(crate) fn passed(&self, addresses: Range<usize>) {
        let mut queue = self.queue();
        while queue.stretches.len() == STRETCHES_MAX {
            queue.pop();
        }
        queue.bytes += addresses.len();
        queue.stretches.push_back(addresses);
        while queue.bytes > self.queue_bytes_max {
            queue.pop();
        }
    }

    /// Returns the pages that a stream went through longest ago, if their grace is over.
    pub(crate) fn candidates(&self, regions: &RegionTable) -> Option<Candidates> {
        let regions = regions.read();
        let mut queue = self.queue();
        while queue.bytes > self.grace_bytes {
            let addresses = queue.pop()?;
            let Some((_, region)) = regions.range(..=addresses.start).next_back() else {
                continue;
            };
            if !region.is_closing() && region.contains(addresses.end - 1) {
                return Some(Candidates {
                    region: region.clone(),
                    pages: (region.page_at(addresses.start))
                        .until(region.page_at(addresses.end - 1) + 1),
                    age_floor: 0,
                    found_by: FoundBy::Stream,
                });
            }
        }
        None
    }

    /// Puts the candidates from `page` on back: enough pages leave already.
    pub(crate) fn stop_at(&self, candidates: &Candidates, page: PageIndex) {
        let rest =
            candidates.region.address_of(page)..candidates.region.address_of(candidates.pages.end);
        let mut queue = self.queue();
        if queue.stretches.len() < STRETCHES_MAX {
            queue.bytes += rest.len();
            queue.stretches.push_front(rest);
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect("nothing panics under this lock")
    }
}

impl Queue {
    fn pop(&mut self) -> Option<Range<usize>> {
        let first = self.stretches.pop_front()?;
        self.bytes -= first.len();
        Some(first)
    }
}
