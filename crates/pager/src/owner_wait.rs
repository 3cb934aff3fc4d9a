//! Waiting for pages that have another owner: [`OwnerWait`].
//!
//! The rule: the caller holds nothing while it waits, so that signals are let in.

use std::{
    thread,
    time::{Duration, Instant},
};

use farpage_signals::SignalGuard;

use crate::mapped::LOOK;

/// Time between two requests for an owned page: see
/// [`MappedRegion::ask_for`](crate::MappedRegion::ask_for).
const ASK: Duration = Duration::from_millis(5);

/// Wait for the owner of a page, from the first refusal on.
#[derive(Default)]
pub(crate) struct OwnerWait {
    /// Times of the first refusal and of the last request to the owner.
    began: Option<(Instant, Instant)>,
}

impl OwnerWait {
    /// True if the wait takes longer than `deadline`.
    pub(crate) fn is_over(&self, deadline: Duration) -> bool {
        (self.began).is_some_and(|(since, _)| since.elapsed() > deadline)
    }

    /// Waits a moment. Calls `ask` at the first refusal, and now and then.
    pub(crate) fn wait(&mut self, entered: &SignalGuard, ask: impl FnOnce()) {
        let now = Instant::now();
        let (since, asked) = self.began.get_or_insert((now, now));
        if *since == now || asked.elapsed() > ASK {
            *asked = now;
            ask();
        }
        entered.wait(|| thread::sleep(LOOK));
    }
}
