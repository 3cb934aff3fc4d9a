//! What an application chooses: [`PagerOptions`] for a runtime, [`RegionOptions`] for a region,
//! [`Advice`] for a part of one.
//!
//! The rule it keeps: every field says its default. What the choices lead to is said where they are
//! used.

use std::time::Duration;

/// How a pager works. All of it is the application's choice.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PagerOptions {
    /// Bytes of pages that may be mapped or in flight at once, over all regions.
    pub budget_bytes: u64,
    /// Evictor threads. Default: 2. (There is one filler per shard of the address space, and one
    /// thread that drives fillers per CPU.)
    pub evictors: usize,
    /// Evictors sleep while the load does not need them. `false`: all start at the high mark.
    /// Default: true.
    pub tune_evictors: bool,
    /// Bytes of neighbouring pages that move together at most; at least a page does.
    /// Default: none, for 512 KiB, and less over slow links.
    pub run_bytes: Option<usize>,
    /// Evictors start when more than this fraction of the budget is used. Default: 0.95.
    pub high_water: f64,
    /// And stop at this one. Default: 0.90.
    pub low_water: f64,
    /// How many of the program's threads can serve their own faults at once. The address space
    /// must have been opened for it. Default: 0, all faults are served by the filler threads.
    pub in_thread: usize,
    /// A page that cannot be brought in within this time is poisoned. Default: 10 s.
    pub deadline: Duration,
    /// Before pages are poisoned, a line on standard error says why, once for each cause. Default:
    /// true.
    pub last_words: bool,
}

impl PagerOptions {
    /// The defaults with a budget.
    pub fn new(budget_bytes: u64) -> PagerOptions {
        PagerOptions {
            budget_bytes,
            evictors: 2,
            tune_evictors: true,
            run_bytes: None,
            high_water: 0.95,
            low_water: 0.90,
            in_thread: 0,
            deadline: Duration::from_secs(10),
            last_words: true,
        }
    }
}

/// How the program will use a region, or a part of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Advice {
    /// Nothing known: sequential runs are found from the faults. Holds for the whole region.
    #[default]
    Normal,
    /// In order: reads ahead from the first fault on. Holds for the whole region.
    Sequential,
    /// In no order: never reads ahead. Holds for the whole region.
    Random,
    /// The range is needed soon: brought in while there is room. Does not wait.
    WillNeed,
    /// The range is not needed soon: written back where it changed, and given up. The data stays,
    /// and pinned pages do.
    DontNeed,
    /// The kernel will be given the range by a call that keeps references to its pages without
    /// pinning them: `vmsplice`, a send with `MSG_ZEROCOPY`, a zero-copy send of `io_uring` from
    /// memory that is not registered with it. To be said before the call. When such a page leaves,
    /// its bytes move to new memory and the old is left to the kernel, so that what is sent is what
    /// was there. That is a copy more per page; neighbours within 64 pages share it. Holds until
    /// the region ends.
    ZeroCopy,
}

impl Advice {
    pub(crate) fn from_u8(value: u8) -> Advice {
        match value {
            1 => Advice::Sequential,
            2 => Advice::Random,
            _ => Advice::Normal,
        }
    }
}

/// What a region is to be like.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct RegionOptions {
    /// Pages to read ahead at most; 0 switches it off. A sixteenth of the budget is the limit.
    /// Default: none, for a megabyte, and as much more as covers the link's delay.
    pub read_ahead: Option<usize>,
    /// The region's first address, a multiple of its page size. What is mapped there is replaced,
    /// and the caller vouches for it. Default: `None`, anywhere.
    pub address: Option<usize>,
    /// The program may only read: a write raises SIGSEGV, and pages are dropped when they leave.
    /// Default: false.
    pub read_only: bool,
    /// The program promises that no device writes into the region's pages: no `O_DIRECT` read, no
    /// RDMA and no registered buffer of `io_uring` has its bytes there. Pages of 4 KiB then leave
    /// as copies, many by one call. What a device writes into a page while it leaves is lost.
    /// Default: false.
    pub no_direct_io: bool,
}
