//! Changed pages on their way from a thread that serves its own faults to an evictor: [`HandOver`].
//!
//! Such a thread takes victims out itself. Unchanged pages are gone at once. Changed ones are
//! detached and owned, and an evictor goes on with them, since writing a page back allocates and
//! may take as long as a server likes.
//!
//! The rule it keeps: whoever found room can hand over what it takes out for one fault, so that a
//! signal handler never holds a page that nobody takes. Evictors are woken for several pages at
//! once, for one that is wanted at once, and all of them by whoever waits for a page to leave.

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

use crate::{
    budget::Budget, doors::Doors, flights::Flight, leaving::Leaving, protocol::State,
    region::Region,
};

/// A thread moves this many pages out at once, for most faults once: more than it brings in, and
/// little beside what the fault itself takes.
pub(crate) const PAGES_PER_CALL: usize = 2;
/// With this many runs waiting an evictor is woken: waking costs as much as writing several pages
/// back. Above the high mark it is woken anyway.
const RUNS_PER_CALL: usize = 64;
/// With this many, evictors do not keep up, and nobody takes out any more for them.
const RUNS_MAX: usize = 4 * RUNS_PER_CALL;

/// A run that waits, and its frame.
type Waiting<F> = (Leaving, F);

/// Runs that evictors shall write back.
pub(crate) struct HandOver<F> {
    doors: Arc<Doors>,
    sender: Sender<Waiting<F>>,
    receiver: Receiver<Waiting<F>>,
    /// Some of them may be wanted since.
    is_wanted: AtomicBool,
    began: Instant,
    /// Microseconds since then.
    rests_until_us: AtomicU64,
}

impl<F> HandOver<F> {
    /// For `threads` threads at once, and `evictors` evictors that each may put a run back.
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

    /// An evictor goes on with this run: writes it back, or maps it again if it is wanted.
    pub(crate) fn hand_over(&self, leaving: Leaving, frame: F, budget: &Budget) {
        budget.begin_leaving(leaving.bytes());
        let sent = self.offer(leaving, frame);
        assert!(sent.is_ok(), "there is room for all threads at once");
        if self.len() >= RUNS_PER_CALL {
            self.doors.evictor(0).ring();
        }
    }

    /// Puts a run where evictors find it. The error gives it back: there is no room.
    pub(crate) fn offer(&self, leaving: Leaving, frame: F) -> Result<(), Waiting<F>> {
        let (region, pages) = (leaving.region.clone(), leaving.pages);
        let sent = self.sender.try_send((leaving, frame));
        sent.map_err(TrySendError::into_inner)?;
        // Pairs with the fence in `noted`: either we see the note, or who left it sees what waits
        // here.
        fence(Ordering::SeqCst);
        if region.is_closing() || region.is_wanted(pages) {
            self.call();
        }
        Ok(())
    }

    /// Somebody has left a note on a page in other hands. It may be one that was handed over and
    /// that no evictor has been called for.
    pub(crate) fn noted(&self, region: &Region, page: PageIndex) {
        fence(Ordering::SeqCst);
        if region.words.load(page).state() == State::Leaving && self.len() > 0 {
            self.call();
        }
    }

    /// All evictors, since some may be busy with a store that stalls.
    pub(crate) fn call(&self) {
        self.is_wanted.store(true, Ordering::SeqCst);
        self.doors.ring_evictors();
    }

    /// The next run that waits.
    pub(crate) fn take(&self) -> Option<Waiting<F>> {
        self.receiver.try_recv().ok()
    }

    pub(crate) fn len(&self) -> usize {
        self.receiver.len()
    }

    /// Whether somebody waits for what may be one of these runs. For an evictor before it sleeps.
    pub(crate) fn is_called(&self) -> bool {
        self.is_wanted.load(Ordering::SeqCst) && self.len() > 0
    }

    /// The same for an evictor that looks through all of them now.
    pub(crate) fn answer(&self) -> bool {
        self.is_wanted.swap(false, Ordering::SeqCst)
    }

    /// A write-back failed: threads take nothing out for this time.
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
