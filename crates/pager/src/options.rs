//! Choices of an application: [`PagerOptions`] for a runtime, [`RegionOptions`] for a region,
//! [`Advice`] for a part of one.
//!
//! The rule: every field says its default. The effects of a choice are described where it is used.

use std::time::Duration;

/// Options of a pager.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PagerOptions {
    /// Bytes of pages that may be mapped or in flight at once, over all regions.
    pub budget_bytes: u64,
    /// Number of evictor threads. Default: 2. (There is one filler per shard of the address space,
    /// and one thread that drives fillers per CPU.)
    pub evictors: usize,
    /// True if evictors sleep while the load does not need them. `false`: all start at the high
    /// mark. Default: true.
    pub tune_evictors: bool,
    /// Upper bound of the bytes of neighbouring pages that move together; one page always moves.
    /// Default: `None`, which is 512 KiB, and less over slow links.
    pub run_bytes: Option<usize>,
    /// Fraction of the budget above which evictors start. Default: 0.95.
    pub high_water: f64,
    /// Fraction of the budget at which evictors stop. Default: 0.90.
    pub low_water: f64,
    /// Number of the program's threads that can serve their own faults at once. The address space
    /// must have been opened for it. Default: 0, all faults are served by the filler threads.
    pub in_thread: usize,
    /// Time within which a page must be brought in; later it is poisoned. Default: 10 s.
    pub deadline: Duration,
    /// True if the workers' threads start when the first region comes under paging, instead of with
    /// the pager. Default: false.
    pub starts_late: bool,
    /// True if a line on standard error says why pages are about to be poisoned, once for each
    /// cause. Default: true.
    pub crash_message: bool,
}

impl PagerOptions {
    /// Returns the defaults with a budget of `budget_bytes`.
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
            starts_late: false,
            crash_message: true,
        }
    }
}

/// Way in which the program will use a region, or a part of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Advice {
    /// Unknown order: sequential access is found from the faults. Holds for the whole region.
    #[default]
    Normal,
    /// Access in order: reads ahead from the first fault on. Holds for the whole region.
    Sequential,
    /// Access in no order: never reads ahead. Holds for the whole region.
    Random,
    /// Range that is needed soon: brought in while there is room. Does not wait.
    WillNeed,
    /// Range that is not needed soon: changed pages are written back, and all are given up. The
    /// data stays in the store, and pinned pages stay in memory.
    DontNeed,
    /// Range whose pages the kernel will reference without pinning them: `vmsplice`, a send with
    /// `MSG_ZEROCOPY`, a zero-copy send of `io_uring` from memory that is not registered with it.
    /// Must be given before that call. When such a page leaves, its bytes move to new memory and
    /// the old is left to the kernel, so that the bytes sent are those of the call. The price is
    /// one more copy per page; neighbours within 64 pages share it. Holds until the region ends.
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

/// Options of a region.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct RegionOptions {
    /// Largest read-ahead window in pages; 0 switches read-ahead off. A sixteenth of the budget is
    /// the limit. Default: `None`, a megabyte, and as much more as covers the link's delay.
    pub read_ahead: Option<usize>,
    /// First address of the region, a multiple of its page size. Mappings at that place are
    /// replaced, and the caller vouches for it. Default: `None`, anywhere.
    pub address: Option<usize>,
    /// True if the program may only read: a write raises SIGSEGV, and pages are dropped when they
    /// leave. Default: false.
    pub read_only: bool,
    /// True if the program promises that no device writes into the region's pages: no `O_DIRECT`
    /// read, no RDMA and no registered buffer of `io_uring` has its bytes there. Pages of 4 KiB
    /// then leave as copies, many by one call. A device's write into a page that leaves at that
    /// moment is lost. Default: `None`, no promise.
    pub no_direct_io: Option<bool>,
    /// True if the region is ordinary memory of the program's, which no budget counts, until
    /// [`MappedRegion::begin_paging`](crate::MappedRegion::begin_paging). Default: false.
    pub ordinary: bool,
}
