//! Changed pages on their way from a thread that serves its own faults to an evictor: [`HandOver`].
//!
//! Such a thread takes victims out itself. Unchanged pages are gone at once. Changed ones are
//! detached and owned, and an evictor goes on with them, since writing a page back allocates and
//! may take as long as a server likes.
//!
//! The rule: a thread that found room can hand over all pages that it takes out for one fault, so
//! that a signal handler never holds a page that no evictor takes. Evictors are woken for several
//! pages together, for a wanted page immediately, and all of them by a caller that waits for a
//! page.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering, fence},
    },
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, Sender, TrySendError};
use farpage_store::PageIndex;
use farpage_vm::SCATTERED_PAGES_MAX;

use crate::{budget::Budget, doors::Doors, protocol::PageState, region::Region, requests::Leaving};

/// Number of pages that a thread moves out at once, for most faults once: more than it brings in,
/// and little work beside the fault itself.
pub(crate) const PAGES_PER_CALL: usize = 2;
/// Number of waiting runs at which an evictor is woken: waking costs as much as writing several
/// pages back. Above the high mark it is woken anyway.
const RUNS_PER_CALL: usize = 64;
/// Number of waiting runs at which evictors do not keep up: threads take no more pages out.
const RUNS_MAX: usize = 4 * RUNS_PER_CALL;

/// Run that waits, and its frame.
type PendingWriteBack<F> = (Leaving, F);

/// Runs that evictors shall write back.
pub(crate) struct HandOver<F> {
    doors: Arc<Doors>,
    sender: Sender<PendingWriteBack<F>>,
    receiver: Receiver<PendingWriteBack<F>>,
    /// True if a thread may wait for one of the runs.
    is_wanted: AtomicBool,
    began: Instant,
    /// End of the rest after a failed write-back, in microseconds since `began`.
    rests_until_us: AtomicU64,
}

impl<F> HandOver<F> {
    /// Makes room for `threads` at once, and for `evictors` that each may put a run back.
    pub(crate) fn new(doors: Arc<Doors>, threads: usize, evictors: usize) -> Self {
        let runs = RUNS_MAX + threads * PAGES_PER_CALL.max(SCATTERED_PAGES_MAX) + evictors;
        let (sender, receiver) = crossbeam_channel::bounded(runs);
        HandOver {
            doors,
            sender,
            receiver,
            is_wanted: AtomicBool::new(false),
            began: Instant::now(),
            rests_until_us: AtomicU64::new(0),
        }
    }

    /// Gives a run to the evictors: one writes it back, or maps it again if it is wanted.
    pub(crate) fn hand_over(&self, leaving: Leaving, frame: F, budget: &Budget) {
        budget.begin_leaving(leaving.bytes());
        let sent = self.offer(leaving, frame);
        assert!(sent.is_ok(), "there is room for all threads at once");
        if self.len() >= RUNS_PER_CALL {
            self.doors.evictor(0).wake();
        }
    }

    /// Puts a run where evictors find it. The error gives it back: there is no room.
    pub(crate) fn offer(&self, leaving: Leaving, frame: F) -> Result<(), PendingWriteBack<F>> {
        let (region, pages) = (leaving.region.clone(), leaving.pages);
        let sent = self.sender.try_send((leaving, frame));
        sent.map_err(TrySendError::into_inner)?;
        // Pairs with the fence in `noted`: either we see the note, or the thread that left it sees
        // the run that waits here.
        fence(Ordering::SeqCst);
        if region.is_closing() || region.is_wanted(pages) {
            self.call();
        }
        Ok(())
    }

    /// Calls evictors after a note was left on a page with another owner. The page may be one that
    /// was handed over and that no evictor has been called for.
    pub(crate) fn noted(&self, region: &Region, page: PageIndex) {
        fence(Ordering::SeqCst);
        if region.words.load(page).state() == PageState::Leaving && self.len() > 0 {
            self.call();
        }
    }

    /// Calls all evictors, since some may be busy with a store that stalls.
    pub(crate) fn call(&self) {
        self.is_wanted.store(true, Ordering::SeqCst);
        self.doors.wake_evictors();
    }

    /// Takes the next run that waits.
    pub(crate) fn take(&self) -> Option<PendingWriteBack<F>> {
        self.receiver.try_recv().ok()
    }

    pub(crate) fn len(&self) -> usize {
        self.receiver.len()
    }

    /// True if a thread may wait for one of these runs. For an evictor before it sleeps.
    pub(crate) fn is_called(&self) -> bool {
        self.is_wanted.load(Ordering::SeqCst) && self.len() > 0
    }

    /// Answers a call, if there is one. The evictor looks through all runs now.
    pub(crate) fn answer(&self) -> bool {
        self.is_wanted.swap(false, Ordering::SeqCst)
    }

    /// Notes that a write-back failed: threads take nothing out for `time`.
    pub(crate) fn rest(&self, time: Duration) {
        let until = (self.began.elapsed() + time).as_micros() as u64;
        self.rests_until_us.store(until, Ordering::Relaxed);
    }

    pub(crate) fn rests(&self) -> bool {
        let until = self.rests_until_us.load(Ordering::Relaxed);
        until > 0 && (self.began.elapsed().as_micros() as u64) < until
    }

    pub(crate) fn has_room(&self) -> bool {
        self.sender.len() < RUNS_MAX
    }
}
