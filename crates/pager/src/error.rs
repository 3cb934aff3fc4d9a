//! What can go wrong with a page after it was mapped: [`PageError`].

use std::time::Duration;

use farpage_store::StoreError;

/// Why a page could not be brought in, or not be written back. It reaches the program through `flush`, `close` and `take_error`.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PageError {
    /// The store's error, which names region, page and server.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// No frame came free within the deadline.
    #[error(
        "page {page} of region {region} found no frame within {waited:?}: all of the budget is pinned, or held by pages that cannot be \
         written back; raise the budget or look at the errors before this one"
    )]
    NoFrame {
        /// The region.
        region: u64,
        /// The page in the region.
        page: u64,
        /// How long it waited.
        waited: Duration,
    },
    /// The kernel, a device or another worker held the page until the deadline.
    #[error(
        "page {page} of region {region} could not be written back in time: the kernel or a device holds it (direct I/O?), or a worker is still busy with it (a slow store?); try again later"
    )]
    Held {
        /// The region.
        region: u64,
        /// The page in the region.
        page: u64,
    },
    /// The program has unmapped the page's addresses, or part of them, itself.
    #[error("page {page} of region {region} is gone: the program has unmapped its addresses")]
    Unmapped {
        /// The region.
        region: u64,
        /// The page in the region.
        page: u64,
    },
    /// The page could neither be written back nor be mapped again: the store has an older copy of it, which is never taken for
    /// the page. Touching the page raises SIGBUS, and flushing the region fails, until the program overwrites the whole page.
    #[error(
        "the newest bytes of page {page} of region {region} are lost, and the older ones are not put in their place: {why}; overwrite the whole page \
         (`overwrite`), or discard the region"
    )]
    Lost {
        /// The region.
        region: u64,
        /// The page in the region.
        page: u64,
        /// Why it could not stay.
        why: String,
    },
    /// The operating system refused to map or take out a page.
    #[error("cannot {what} page {page} of region {region}: {message}")]
    Os {
        /// "map" or "take out".
        what: &'static str,
        /// The region.
        region: u64,
        /// The page in the region.
        page: u64,
        /// The operating system's words.
        message: String,
    },
}

impl PageError {
    /// Whether trying again may help without anything being changed.
    pub fn may_retry(&self) -> bool {
        match self {
            Self::Store(error) => error.may_retry(),
            Self::NoFrame { .. } | Self::Held { .. } => true,
            Self::Os { .. } | Self::Unmapped { .. } | Self::Lost { .. } => false,
        }
    }
}
