//! Stretches of pages that may come in together: which are remote, and owning them.
//!
//! The rule it keeps: pages are named from the nearest on, up to the first that cannot come along,
//! so that what is brought in is one run in one stripe.

use std::ops::Range;

use crate::{
    ahead::Plan,
    protocol::{self, State},
    region::Region,
};

/// The pages of a plan from the nearest on, up to the first that is not remote or not in the same
/// stripe, `most` at most.
pub(crate) fn remote(region: &Region, plan: &Plan, most: usize) -> Range<usize> {
    let pages = region.in_one_stripe(&plan.ahead, plan.down);
    let is_there = |page: &usize| region.words.load(*page).state() != State::Remote;
    if plan.down {
        let start = pages.start.max(pages.end.saturating_sub(most));
        let stop = (start..pages.end).rev().find(is_there);
        stop.map_or(start, |page| page + 1)..pages.end
    } else {
        let end = pages.end.min(pages.start + most);
        let stop = (pages.start..end).find(is_there);
        pages.start..stop.unwrap_or(end)
    }
}

/// Whether the plan's nearest page lies next to `page` in the same stripe.
pub(crate) fn is_next_to(region: &Region, page: usize, plan: &Plan) -> bool {
    if plan.down {
        plan.ahead.end == page && region.in_one_stripe(&(0..page + 1), true).start < page
    } else {
        plan.ahead.start == page + 1 && region.in_one_stripe(&(page..page + 2), false).len() == 2
    }
}

/// Owns pages that nobody waits for, from the nearest on, up to the first that is not remote.
/// Returns which.
pub(crate) fn own(region: &Region, pages: Range<usize>, down: bool) -> Range<usize> {
    let refused = |page: &usize| {
        let owned = region.words.try_apply(*page, protocol::prefetch);
        owned.is_none()
    };
    if down {
        let stop = pages.clone().rev().find(refused);
        stop.map_or(pages.start, |page| page + 1)..pages.end
    } else {
        let stop = pages.clone().find(refused);
        pages.start..stop.unwrap_or(pages.end)
    }
}
