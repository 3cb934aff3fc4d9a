//! Stretches of pages that may come in together: finding the remote ones, and owning them.
//!
//! The rule: pages are named from the nearest on, up to the first that cannot come along, so that
//! they are one run in one stripe.

use farpage_store::{PageIndex, PageRange};

use crate::{
    ahead::ReadAhead,
    protocol::{self, PageState},
    region::Region,
};

/// Returns the pages of a plan from the nearest on, up to the first that is not remote or not in
/// the same stripe, at most `most`.
pub(crate) fn remote(region: &Region, plan: &ReadAhead, most: usize) -> PageRange {
    let pages = region.in_one_stripe(plan.ahead, plan.down);
    let is_there = |page: &PageIndex| region.words.load(*page).state() != PageState::Remote;
    if plan.down {
        let start = PageIndex(pages.end.0.saturating_sub(most)).max(pages.start);
        let stop = start.until(pages.end).iter().rev().find(is_there);
        stop.map_or(start, |page| page + 1).until(pages.end)
    } else {
        let pages = pages.within(pages.start.and_on(most));
        let stop = pages.iter().find(is_there);
        pages.start.until(stop.unwrap_or(pages.end))
    }
}

/// True if the plan's nearest page lies next to `page` in the same stripe.
pub(crate) fn is_next_to(region: &Region, page: PageIndex, plan: &ReadAhead) -> bool {
    if plan.down {
        plan.ahead.end == page
            && region
                .in_one_stripe(PageRange::first(page.0 + 1), true)
                .start
                < page
    } else {
        plan.ahead.start == page + 1 && region.in_one_stripe(page.and_on(2), false).len() == 2
    }
}

/// Owns pages ahead of need, from the nearest on, up to the first that is not remote. Returns the
/// owned ones.
pub(crate) fn own(region: &Region, pages: PageRange, down: bool) -> PageRange {
    let refused = |page: &PageIndex| {
        let owned = region.words.try_apply(*page, protocol::prefetch);
        owned.is_none()
    };
    if down {
        let stop = pages.iter().rev().find(refused);
        stop.map_or(pages.start, |page| page + 1).until(pages.end)
    } else {
        let stop = pages.iter().find(refused);
        pages.start.until(stop.unwrap_or(pages.end))
    }
}
