//! Acting on pages of which some have another owner: [`MappedRegion::act_on`].
//!
//! The rule: the caller holds nothing while it waits, so that signals are let in.

use std::{
    thread,
    time::{Duration, Instant},
};

use farpage_signals::SignalGuard;
use farpage_store::{PageIndex, PageRange};
use farpage_vm::AddressSpace;

use crate::{MappedRegion, PageError, mapped::LOOK};

/// Time between two requests for an owned page: see
/// [`MappedRegion::ask_for`](crate::MappedRegion::ask_for).
const ASK: Duration = Duration::from_millis(5);

/// Outcome of one attempt to act on pages.
pub(crate) enum Attempt {
    /// Number of leading pages that are dealt with.
    Done(usize),
    /// The first page has another owner, the kernel or a device holds it (and how), or the program
    /// forks.
    NotNow(Option<PageError>),
    /// The first page has to come in before.
    Absent,
}

/// Wait for the owner of a page, from the first refusal on.
#[derive(Default)]
pub(crate) struct OwnerWait {
    /// Times of the first refusal and of the last request to the owner.
    began: Option<(Instant, Instant)>,
}

impl OwnerWait {
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

impl<A: AddressSpace> MappedRegion<A> {
    /// Calls `act` for what is left of `pages` until all are dealt with. Waits for the thaw while
    /// the program forks, and for a page's other owner, whom `ask` asks to let go of it.
    ///
    /// # Errors
    /// `act` fails, or refuses until the deadline. `pages` begins with the page that it was.
    pub(crate) fn act_on(
        &self,
        pages: &mut PageRange,
        entered: &SignalGuard,
        mut act: impl FnMut(PageRange) -> Result<Attempt, PageError>,
        ask: impl Fn(PageIndex),
    ) -> Result<(), PageError> {
        let mut waiting = OwnerWait::default();
        while !pages.is_empty() {
            self.wait_for_thaw(entered);
            let page = pages.start;
            let deadline = self.pager().deadline();
            let is_over = (waiting.began).is_some_and(|(since, _)| since.elapsed() > deadline);
            match act(*pages)? {
                Attempt::Done(count) => {
                    pages.start += count;
                    waiting = OwnerWait::default();
                }
                Attempt::NotNow(error) if is_over => {
                    return Err(error.unwrap_or_else(|| self.busy(page)));
                }
                Attempt::NotNow(_) => waiting.wait(entered, || ask(page)),
                Attempt::Absent => self.prefetch_now(self.bytes_of(page.alone()))?,
            }
        }
        Ok(())
    }
}
