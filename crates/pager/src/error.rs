//! Errors, an enum for each call: [`PageError`] for a page, at any time after it was mapped;
//! [`StartError`], [`MapError`], [`PinError`], [`FlushError`] and [`FreezeError`].
//!
//! The rule: each text says what was tried, why it failed, and what to do.

use std::{io, sync::Arc, time::Duration};

use farpage_store::{PageIndex, StoreError};
use farpage_vm::DetachError;

farpage_fabric::debug_as_display!(
    PageError,
    StartError,
    MapError,
    FlushError,
    PinError,
    FreezeError
);

/// Text of the error that calls return in a child of `fork`.
pub const FORKED: &str = "a process made by fork has copies of its parent's regions to read and \
                          write, and nothing more of its runtimes: make new ones in the child";

/// Reason why a page could not be brought in, or not be written back. The program gets it from
/// `flush`, `close` and `take_error`.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum PageError {
    /// The store's error, which names region, page and server.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The fill of a page found no free frame within the deadline.
    #[error("page {page} of {region} found no frame within {waited:.1?}{}", why_no_frame(.unwritten))]
    NoFrame {
        /// The region's label.
        region: Arc<str>,
        /// The page in the region.
        page: u64,
        /// Time that the fill waited.
        waited: Duration,
        /// Error of the last failed write-back, if there is one.
        unwritten: Option<Arc<StoreError>>,
    },
    /// The kernel, a device or another worker held the page until the deadline.
    #[error(
        "page {page} of {region} could not be written back in time: the kernel or a device holds it (direct I/O?), or a worker is still busy with it (a slow store?); try again later"
    )]
    Busy {
        /// The region's label.
        region: Arc<str>,
        /// The page in the region.
        page: u64,
    },
    /// The program has unmapped the page's addresses, or part of them, itself.
    #[error("page {page} of {region} is gone: the program has unmapped its addresses")]
    Unmapped {
        /// The region's label.
        region: Arc<str>,
        /// The page in the region.
        page: u64,
    },
    /// The page could neither be written back nor be mapped again. The store has an older copy of
    /// it, which is never taken for the page. Touching the page raises SIGBUS, and flushing the
    /// region fails, until the program overwrites the whole page.
    #[error(
        "the newest bytes of page {page} of {region} are lost, and the older ones are not put in their place: {why}; overwrite the whole page \
         (`overwrite`), or discard the region"
    )]
    Lost {
        /// The region's label.
        region: Arc<str>,
        /// The page in the region.
        page: u64,
        /// Reason why the page could not stay.
        why: String,
    },
    /// The process is a child of the one that has the region: it has neither the region's memory
    /// nor the threads that move its pages.
    #[error("{FORKED}")]
    Forked,
    /// The operating system refused to map or take out a page.
    #[error("cannot {what} page {page} of {region}: {message}")]
    Os {
        /// The action: "map" or "take out".
        what: &'static str,
        /// The region's label.
        region: Arc<str>,
        /// The page in the region.
        page: u64,
        /// The operating system's message.
        message: String,
    },
}

impl PageError {
    /// True if a deadline was spent on a server that cannot be reached: for now, other pages would
    /// fare no better.
    pub(crate) fn is_lost_server(&self) -> bool {
        matches!(self, Self::Store(error) if error.is_lost_server())
    }

    /// Returns the error of a page that the operating system refused to map.
    pub(crate) fn cannot_map(region: Arc<str>, page: PageIndex, error: &io::Error) -> PageError {
        PageError::Os {
            what: "map",
            region,
            page: page.number(),
            message: error.to_string(),
        }
    }

    /// Returns the error of a region that could not be put under paging.
    pub(crate) fn cannot_begin(region: Arc<str>, error: &io::Error) -> PageError {
        PageError::Os {
            what: "catch the faults of",
            region,
            page: 0,
            message: error.to_string(),
        }
    }

    /// Returns the error of a region whose faults nobody would serve.
    pub(crate) fn cannot_start(region: Arc<str>, error: &io::Error) -> PageError {
        let why = format!("no thread can be started: {error} (see `ulimit -u` and `ulimit -v`)");
        PageError::cannot_begin(region, &io::Error::new(error.kind(), why))
    }

    /// Returns the error of a page that could not be taken out.
    pub(crate) fn cannot_take_out(
        region: Arc<str>,
        page: PageIndex,
        error: DetachError,
    ) -> PageError {
        let page = page.number();
        let message = match error {
            DetachError::Busy => return PageError::Busy { region, page },
            DetachError::Os(error) => error.to_string(),
            other => other.to_string(),
        };
        PageError::Os {
            what: "take out",
            region,
            page,
            message,
        }
    }

    /// True if trying again may help although nothing is changed.
    pub fn may_retry(&self) -> bool {
        match self {
            Self::Store(error) => error.may_retry(),
            Self::NoFrame { .. } | Self::Busy { .. } => true,
            Self::Os { .. } | Self::Unmapped { .. } | Self::Lost { .. } | Self::Forked => false,
        }
    }
}

fn why_no_frame(unwritten: &Option<Arc<StoreError>>) -> String {
    match unwritten {
        Some(error) => format!(", since pages could not be written back: {error}"),
        None => {
            ": all of the budget is pinned, or held by pages that cannot be written back; raise \
                 the budget or look at the errors before this one"
                .to_owned()
        }
    }
}

/// Reason why a pager could not be started.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// An option makes no sense.
    #[error("{0}")]
    Option(String),
    /// A worker could not connect to a memory server.
    #[error(transparent)]
    Connect(#[from] farpage_fabric::ConnectError),
    /// The operating system gave no thread or descriptor.
    #[error("cannot start a worker: {0}")]
    Os(io::Error),
}

impl From<io::Error> for StartError {
    fn from(error: io::Error) -> Self {
        Self::Os(error)
    }
}

/// Reason why a region could not be mapped.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// The budget cannot hold the pages that the workers need at once.
    #[error(
        "a budget of {budget_bytes} bytes, of which {pinned_bytes} are pinned, is too small for pages of {page_bytes} bytes: {pages_min} of them must \
         fit beside what is pinned (one per filler, and two at least, since one instruction may touch two); raise the budget, unpin pages or use \
         smaller ones"
    )]
    Budget {
        /// The runtime's budget.
        budget_bytes: u64,
        /// Bytes of the budget that the program has pinned.
        pinned_bytes: u64,
        /// The region's page size.
        page_bytes: usize,
        /// Number of pages that the budget must hold.
        pages_min: u64,
    },
    /// The operating system refused the mapping.
    #[error("cannot map a region of {bytes} bytes: {source}")]
    Os {
        /// The region's size.
        bytes: u64,
        /// The reason.
        r#source: io::Error,
    },
}

/// Reason why changed pages could not all be made safe. These pages are still in memory, except
/// those that a [`PageError::Lost`] names.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum FlushError {
    /// A page could not be written back.
    #[error(transparent)]
    Page(#[from] PageError),
    /// All pages were written, but the store could not make them durable.
    #[error("the region's store could not make its pages durable: {0}")]
    Durable(io::Error),
}

/// Reason why pages could not be pinned.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum PinError {
    /// Pinned pages would leave too little of the budget for all others.
    #[error(
        "cannot pin {asked_bytes} bytes more: of this budget {most_bytes} bytes can be pinned at once; unpin others or raise the budget"
    )]
    Budget {
        /// Bytes of the pages asked for.
        asked_bytes: u64,
        /// Bytes that can be pinned in all.
        most_bytes: u64,
    },
    /// The page is pinned 255 times.
    #[error("page {page} of {region} is pinned 255 times already: every pin needs its unpin")]
    TooOften {
        /// The region's label.
        region: Arc<str>,
        /// The page in the region.
        page: u64,
    },
    /// A page could not be brought in.
    #[error(transparent)]
    Page(#[from] PageError),
}

/// Reason why reclaim could not be frozen for a `fork`. Reclaim goes on then.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum FreezeError {
    /// Pages were still on their way out at the deadline: a child would not have their bytes.
    #[error(
        "{runs} runs of pages were still on their way out after {waited:.1?}, and a child would not have their bytes: a memory server or a store of \
         the program is slow, or cannot be reached; fork again later"
    )]
    Busy {
        /// Number of runs, and of searches for more.
        runs: usize,
        /// Time that the call waited.
        waited: Duration,
    },
    /// The process is a child of the one that has the pager.
    #[error("{FORKED}")]
    Forked,
}
