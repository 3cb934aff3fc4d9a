//! Where victims may be: a [`Candidates`], and what found it.

use std::sync::Arc;

use farpage_store::PageRange;

use crate::region::Region;

/// Pages to look through for victims. Nobody else looks through them meanwhile.
#[derive(Debug)]
pub(crate) struct Candidates {
    pub(crate) region: Arc<Region>,
    /// Pages of one chunk, or what a stream has gone through.
    pub(crate) pages: PageRange,
    /// Pages younger than this stay.
    pub(crate) age_floor: u32,
    pub(crate) found_by: FoundBy,
}

/// What found a page that leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FoundBy {
    /// The sweep came by, or the program wished it.
    Sweep = 0,
    /// A stream had gone through it.
    Stream = 1,
}
