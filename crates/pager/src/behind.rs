//! What streams have gone through, and whether it leaves before other pages: [`Behind`].
//!
//! A program that goes through more than fits, again and again, finds nothing of it in memory if what came in first leaves first: what it needs next has
//! always just left. For it the opposite is right: what it has just gone through leaves, and the rest stays until it comes along again. So what a stream
//! has gone through waits in a queue for a while, since the next row of a grid looks at the last one once more, and then leaves before others do. The
//! frames of streams circulate in little memory then, which the caches may hold.
//!
//! **The proof.** That is right for loops and for what is used only once, and wrong where the pages that stay are never used again. Those that come back
//! tell: a page's stamp says whether it left behind a stream or by the sweep. While those that the sweep took come back less than a quarter as often,
//! the sweep finds the better victims and takes nearly all; otherwise streams give nearly all. Each always takes a part, so that there is proof.
//!
//! The rule: this module counts and remembers addresses only. Whether the pages there are still resident is for the evictor to see.

use std::{
    collections::VecDeque,
    ops::Range,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::core::RegionTable;
use crate::sweep::Claim;

/// What is gone through stays for so much of the budget before it may leave, at least for so many bytes (several windows, since programs go through
/// several arrays at once and come back to rows) or half the budget, and counts as staying after so much more that was not needed.
const GRACE_SHARE: usize = 16;
const GRACE_BYTES_MIN: usize = 8 << 20;
const SLACK_SHARE: usize = 8;
/// Stretches in the queue at most; most are of megabytes.
const STRETCHES_MAX: usize = 1024;
/// Who finds the worse victims gives one page for so many of the other.
const MINOR_SHARE: u64 = 16;
/// The past counts half after so many budgets have left: loops are longer than the budget, and what left in one piece comes back in one piece.
const MEMORY_BUDGETS: u64 = 16;
/// Fill clock ticks after which a page that comes back proves nothing. Pages that never left have stamps much further away.
const MEMORY_TICKS: u32 = 1 << 30;

pub(crate) struct Behind {
    queue: Mutex<Queue>,
    grace_bytes: usize,
    queue_bytes_max: usize,
    budget_ticks: u64,
    /// By [`Way`].
    proof: [Proof; 2],
}

/// How a page left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// The sweep came by, or the program wished it.
    Swept = 0,
    /// A stream had gone through it.
    Behind = 1,
}

#[derive(Default)]
struct Queue {
    /// Addresses, those gone through longest ago first.
    stretches: VecDeque<Range<usize>>,
    bytes: usize,
}

/// In ticks of the fill clock; fading.
#[derive(Default)]
struct Proof {
    out: AtomicU64,
    back: AtomicU64,
}

impl Behind {
    /// `budget_ticks`: how many ticks of the fill clock fill the budget once; a tick is 4 KiB.
    pub(crate) fn new(budget_ticks: u32) -> Behind {
        let budget_bytes = (budget_ticks as usize) << 12;
        let grace_bytes = (budget_bytes / GRACE_SHARE).max(GRACE_BYTES_MIN.min(budget_bytes / 2));
        let stretches = VecDeque::with_capacity(STRETCHES_MAX);
        Behind {
            queue: Mutex::new(Queue {
                stretches,
                bytes: 0,
            }),
            grace_bytes,
            queue_bytes_max: grace_bytes + budget_bytes / SLACK_SHARE,
            budget_ticks: u64::from(budget_ticks),
            proof: Default::default(),
        }
    }

    /// A stream has gone through these addresses of one region. Allocates nothing: faults may be served in a signal handler.
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

    /// The pages that a stream went through longest ago, if it is such that shall leave next.
    pub(crate) fn claim(&self, regions: &RegionTable) -> Option<Claim> {
        if !self.goes_first() {
            return None;
        }
        let regions = regions.read();
        let mut queue = self.queue();
        while queue.bytes > self.grace_bytes {
            let addresses = queue.pop()?;
            let Some((_, region)) = regions.range(..=addresses.start).next_back() else {
                continue;
            };
            if !region.is_closing() && region.contains(addresses.end - 1) {
                return Some(Claim {
                    region: region.clone(),
                    pages: region.page_at(addresses.start)..region.page_at(addresses.end - 1) + 1,
                    age_floor: 0,
                    way: Way::Behind,
                });
            }
        }
        None
    }

    /// Enough pages leave: those of the claim from `page` on are still to come.
    pub(crate) fn stop_at(&self, claim: &Claim, page: usize) {
        let rest = claim.region.address_of(page)..claim.region.address_of(claim.pages.end);
        let mut queue = self.queue();
        if queue.stretches.len() < STRETCHES_MAX {
            queue.bytes += rest.len();
            queue.stretches.push_front(rest);
        }
    }

    /// Pages began to leave.
    pub(crate) fn leave(&self, way: Way, bytes: usize) {
        self.proof[way as usize]
            .out
            .fetch_add(bytes as u64 >> 12, Ordering::Relaxed);
        let [swept, behind] = self.out();
        if swept + behind > MEMORY_BUDGETS * self.budget_ticks {
            // Others count meanwhile; what that loses is little beside what fading loses.
            for proof in &self.proof {
                for figure in [&proof.out, &proof.back] {
                    figure.store(figure.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
                }
            }
        }
    }

    /// The stamp of a page that has left.
    pub(crate) fn stamp(way: Way, now: u32) -> u32 {
        now & !1 | way as u32
    }

    /// A run came back from the store.
    pub(crate) fn came_back(&self, back: &Back) {
        for (proof, bytes) in self.proof.iter().zip(back.0) {
            if bytes > 0 {
                proof.back.fetch_add(bytes as u64 >> 12, Ordering::Relaxed);
            }
        }
    }

    /// Whether what streams have gone through leaves before the sweep looks for others.
    fn goes_first(&self) -> bool {
        let [swept, behind] = self.out();
        if self.sweep_is_better() {
            behind * MINOR_SHARE <= swept
        } else {
            behind <= swept * MINOR_SHARE
        }
    }

    /// Whether less than a quarter as many come back of those that the sweep took.
    fn sweep_is_better(&self) -> bool {
        let [swept, behind] = self.out();
        let [swept_back, behind_back] =
            [0, 1].map(|way| self.proof[way].back.load(Ordering::Relaxed));
        u128::from(swept_back) * u128::from(behind) * 4
            < u128::from(behind_back) * u128::from(swept)
    }

    fn out(&self) -> [u64; 2] {
        [0, 1].map(|way: usize| self.proof[way].out.load(Ordering::Relaxed))
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect("nothing panics under this lock")
    }
}

/// Bytes of a run that came back, by [`Way`].
#[derive(Default)]
pub(crate) struct Back([usize; 2]);

impl Back {
    /// A page of so many bytes, with the stamp of its leaving.
    pub(crate) fn count(&mut self, stamp: u32, now: u32, bytes: usize) {
        if now.wrapping_sub(stamp) < MEMORY_TICKS {
            self.0[(stamp & 1) as usize] += bytes;
        }
    }
}

impl Queue {
    fn pop(&mut self) -> Option<Range<usize>> {
        let first = self.stretches.pop_front()?;
        self.bytes -= first.len();
        Some(first)
    }
}
