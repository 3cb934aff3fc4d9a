//! Pages among which victims may be: [`Candidates`], and their source.

use std::sync::Arc;

use farpage_store::PageRange;

use crate::region::Region;

/// Pages to look through for victims. Only the holder looks through them meanwhile.
#[derive(Debug)]
pub(crate) struct Candidates {
    pub(crate) region: Arc<Region>,
    /// Pages of one chunk, or pages that a stream has gone through.
    pub(crate) pages: PageRange,
    /// Lowest age of a victim: younger pages stay.
    pub(crate) age_floor: u32,
    pub(crate) found_by: FoundBy,
}

/// Source that found a page which leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FoundBy {
    /// The clock hand came by, or the program asked for it.
    ClockHand = 0,
    /// A stream had gone through the page.
    Stream = 1,
}
