//! [`RoomWish`]: the wish of writes for room that a parity set may have.
//!
//! The rule it keeps: a wish ends soon after the writes that have it, so that no set is opened in
//! vain. Opening sets is left to the [set maker](crate::set_maker).

use std::time::{Duration, Instant};

/// Time for which a wish stands: writes that wait repeat theirs many times within.
const WISH_STANDS: Duration = Duration::from_millis(500);

/// Wish of writes that found no room for a set to be opened.
#[derive(Clone, Copy)]
pub(super) struct RoomWish {
    pub(super) since: Instant,
    /// Time when the wish was last repeated.
    last: Instant,
}

impl RoomWish {
    /// Makes a wish, or repeats one that stands. Returns it, and true if it is new.
    pub(super) fn repeat(before: Option<Self>) -> (Self, bool) {
        let last = Instant::now();
        match before.filter(Self::stands) {
            Some(Self { since, .. }) => (Self { since, last }, false),
            None => (Self { since: last, last }, true),
        }
    }

    /// True if a write has repeated the wish a moment ago.
    pub(super) fn stands(&self) -> bool {
        self.last.elapsed() < WISH_STANDS
    }
}
