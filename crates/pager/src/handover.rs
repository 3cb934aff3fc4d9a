//! Room made by the threads that serve their own faults, and changed pages on their way from them to an evictor: [`HandOver`].
//!
//! A thread that faults takes a few victims out itself: no evictor has to be woken for it, and no other processor has to forget the addresses while the program
//! runs there. What is as the store has it has left then. What changed is detached and owned, and an evictor goes on with it, since
//! to write a page back allocates, and may take as long as a server likes.
//!
//! The rule it keeps: whoever found room can hand over what it takes out for one fault, so that a signal handler never holds a page that nobody
//! takes. Evictors are woken for several pages at once; for one that is wanted at once; and for all of them by whoever waits for a page to leave.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{Ordering, fence},
    },
};

use crossbeam_channel::{Receiver, Sender};
use farpage_vm::AddressSpace;

use crate::{
    behind::{Behind, Way},
    core::Core,
    evictor::Leaving,
    protocol::{self, OnLeft},
    region::Region,
    run::cut,
    stats::Counters,
    victims::{Out, Walk},
};

/// A thread takes out so many pages for each fault: more than it brings in, and little beside what the fault itself takes.
const PAGES_PER_FAULT: usize = 2;
/// And looks at the victims of so many chunks, of which some have none.
const CHUNKS_PER_FAULT: usize = 4;
/// With so many runs waiting an evictor is woken: waking costs as much as writing several pages back. Above the high mark it is woken anyway.
const RUNS_PER_CALL: usize = 64;
/// With so many, evictors do not keep up, and nobody takes out any more for them.
const RUNS_MAX: usize = 4 * RUNS_PER_CALL;

/// Runs that evictors shall write back.
#[derive(Debug)]
pub(crate) struct HandOver<F> {
    sender: Sender<(Leaving, F)>,
    receiver: Receiver<(Leaving, F)>,
}

impl<F> HandOver<F> {
    /// For so many threads at once.
    pub(crate) fn new(threads: usize) -> Self {
        let (sender, receiver) = crossbeam_channel::bounded(RUNS_MAX + threads * PAGES_PER_FAULT);
        HandOver { sender, receiver }
    }

    /// The next run that waits.
    pub(crate) fn take(&self) -> Option<(Leaving, F)> {
        self.receiver.try_recv().ok()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.receiver.is_empty()
    }

    fn has_room(&self) -> bool {
        self.sender.len() < RUNS_MAX
    }
}

impl<A: AddressSpace> Core<A> {
    /// Takes a few pages out if there is need. Returns whether it did. Allocates nothing.
    pub(crate) fn make_room(&self, counters: &Counters) -> bool {
        let (mut left, mut any) = (PAGES_PER_FAULT, false);
        for _ in 0..CHUNKS_PER_FAULT {
            if left == 0 || !self.frames.is_tight() || !self.handed_over.has_room() {
                break;
            }
            let Some(claim) = self.claim() else {
                break;
            };
            let mut walk = Walk::new(self, &claim);
            while left > 0
                && let Some(run) = walk.next(left)
            {
                left -= run.len();
                match self.take_out(&claim.region, run, protocol::leave) {
                    Out::Taken(pages, frame) => {
                        walk.took(pages.len());
                        self.let_go(&claim.region, pages, frame, claim.way, counters);
                    }
                    Out::Refused(_) => counters.failed_evictions.bump(),
                    Out::NotNow | Out::NotHere => {}
                }
            }
            any |= walk.end();
        }
        any
    }

    /// Pages that were taken out: what is unchanged has left, the rest is handed over.
    fn let_go(
        &self,
        region: &Arc<Region>,
        pages: Range<usize>,
        frame: A::Frame,
        way: Way,
        counters: &Counters,
    ) {
        let (first, page_bytes) = (pages.start, region.page_bytes());
        let stamp = Behind::stamp(way, self.now());
        let mut gone = [false; PAGES_PER_FAULT];
        for (page, bytes) in pages.clone().zip(frame.as_ref().chunks_exact(page_bytes)) {
            gone[page - first] = region.store.is_unchanged(page as u64, bytes)
                && region.words.apply(page, |w| protocol::left(w, stamp)) == OnLeft::Gone;
        }
        let left = gone.iter().filter(|&&gone| gone).count();
        counters.evictions.add(left);
        counters.clean_evictions.add(left);
        let gone = |page: usize| gone[page - first];
        cut(pages, page_bytes, frame, gone, |pages, frame, gone| {
            if gone {
                self.release(frame, page_bytes);
            } else {
                region.enter_again();
                self.hand_over(region, pages, frame, way);
            }
        });
        region.exit();
    }

    /// An evictor goes on with these pages: writes them back, or maps them again if they are wanted.
    fn hand_over(&self, region: &Arc<Region>, pages: Range<usize>, frame: A::Frame, way: Way) {
        let leaving = Leaving::new(region.clone(), pages.clone(), None, way);
        self.frames.begin_leaving(leaving.bytes());
        let sent = self.handed_over.sender.try_send((leaving, frame));
        assert!(sent.is_ok(), "there is room for all threads at once");
        // Pairs with the fence in `noted`, and with the ring of who closes a region: either we see that somebody waits, or they see what waits here.
        fence(Ordering::SeqCst);
        let wanted = |page| region.words.load(page).wanted();
        if self.handed_over.sender.len() >= RUNS_PER_CALL
            || region.is_closing()
            || pages.clone().any(wanted)
        {
            self.evictors[0].ring();
        }
    }

    /// Somebody has left a note on a page in other hands: it may be one that was handed over and that no evictor has been called for.
    pub(crate) fn noted(&self) {
        fence(Ordering::SeqCst);
        if !self.handed_over.is_empty() {
            self.evictors[0].ring();
        }
    }
}
