//! Room made by the threads that serve their own faults, and changed pages on their way from them to an evictor: [`HandOver`].
//!
//! A thread that faults takes a few victims out itself: no evictor has to be woken for it, and no other processor has to forget the addresses while the program
//! runs there. (Where others of its threads do run there, it takes more of them out for fewer faults: `scatter.rs`.) What is as the store has it has left then. What changed is detached and owned, and an evictor goes on with it, since
//! to write a page back allocates, and may take as long as a server likes.
//!
//! The rule it keeps: whoever found room can hand over what it takes out for one fault, so that a signal handler never holds a page that nobody
//! takes. Evictors are woken for several pages at once; for one that is wanted at once; and for all of them by whoever waits for a page to leave.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering, fence},
    },
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, Sender, TrySendError};
use farpage_vm::{AddressSpace, SCATTERED_PAGES_MAX};

use crate::{
    behind::{Behind, Way},
    core::Core,
    evictor::Leaving,
    protocol::{self, OnLeft, State},
    region::Region,
    run::cut,
    scatter::Scattered,
    stats::Counters,
    victims::{Out, Walk},
};

/// A thread takes out so many pages at once, for most faults once: more than it brings in, and little beside what the fault itself takes.
const PAGES_PER_CALL: usize = 2;
/// And looks at the victims of so many chunks, of which some have none.
const CHUNKS_PER_CALL: usize = 4;
/// With so many runs waiting an evictor is woken: waking costs as much as writing several pages back. Above the high mark it is woken anyway.
const RUNS_PER_CALL: usize = 64;
/// With so many, evictors do not keep up, and nobody takes out any more for them.
const RUNS_MAX: usize = 4 * RUNS_PER_CALL;

/// A run that waits, and its frame.
type Run<F> = (Leaving, F);

/// Runs that evictors shall write back.
#[derive(Debug)]
pub(crate) struct HandOver<F> {
    sender: Sender<Run<F>>,
    receiver: Receiver<Run<F>>,
    /// Some of them may be wanted since.
    is_wanted: AtomicBool,
    began: Instant,
    /// Microseconds since then.
    rests_until_us: AtomicU64,
}

impl<F> HandOver<F> {
    /// For so many threads at once, and evictors that each may put a run back.
    pub(crate) fn new(threads: usize, evictors: usize) -> Self {
        let runs = RUNS_MAX + threads * PAGES_PER_CALL.max(SCATTERED_PAGES_MAX) + evictors;
        let (sender, receiver) = crossbeam_channel::bounded(runs);
        HandOver {
            sender,
            receiver,
            is_wanted: AtomicBool::new(false),
            began: Instant::now(),
            rests_until_us: AtomicU64::new(0),
        }
    }

    /// The next run that waits.
    pub(crate) fn take(&self) -> Option<Run<F>> {
        self.receiver.try_recv().ok()
    }

    pub(crate) fn len(&self) -> usize {
        self.receiver.len()
    }

    /// Whether somebody waits for what may be one of these runs. For an evictor before it sleeps.
    pub(crate) fn is_called(&self) -> bool {
        self.is_wanted.load(Ordering::SeqCst) && self.len() > 0
    }

    /// The same for who looks through all of them now.
    pub(crate) fn answer(&self) -> bool {
        self.is_wanted.swap(false, Ordering::SeqCst)
    }

    /// A write-back failed: threads take nothing out for so long.
    pub(crate) fn rest(&self, time: Duration) {
        let until = (self.began.elapsed() + time).as_micros() as u64;
        self.rests_until_us.store(until, Ordering::Relaxed);
    }

    fn rests(&self) -> bool {
        let until = self.rests_until_us.load(Ordering::Relaxed);
        until > 0 && (self.began.elapsed().as_micros() as u64) < until
    }

    fn has_room(&self) -> bool {
        self.sender.len() < RUNS_MAX
    }
}

impl<A: AddressSpace> Core<A> {
    /// Takes a few pages out if there is need. Returns whether it did. Allocates nothing, unless the program itself has given a part of such a page back to the kernel.
    pub(crate) fn make_room(&self, counters: &Counters) -> bool {
        let (mut left, mut any) = (PAGES_PER_CALL, false);
        if self.frames.is_tight() && self.handed_over.rests() {
            return false;
        }
        for _ in 0..CHUNKS_PER_CALL {
            if left == 0 || !self.frames.is_tight() || !self.handed_over.has_room() {
                break;
            }
            let Some(claim) = self.claim() else {
                break;
            };
            if claim.region.is_stalled() {
                continue;
            }
            // What streams have gone through lies in rows, which move at once.
            if claim.way == Way::Swept && self.scatters(&claim.region) {
                let (region, way) = (claim.region.clone(), claim.way);
                let scattered = self.take_out_scattered(claim, |pages, frame| {
                    self.let_go(&region, pages, frame, way, counters);
                });
                let Scattered { any: some, refused } = scattered.unwrap_or_default();
                any |= some;
                for page in refused {
                    any |= self.take_out_by_moving(&region, page..page + 1, way, counters) > 0;
                }
                return any;
            }
            let page_bytes = claim.region.page_bytes() as u64;
            let mut walk = Walk::new(self, &claim);
            loop {
                let excess = self.frames.excess().div_ceil(page_bytes) as usize;
                let most = left.min(excess);
                if most == 0 {
                    break;
                }
                let Some(run) = walk.next(most) else {
                    break;
                };
                left -= run.len();
                walk.took(self.take_out_by_moving(&claim.region, run, claim.way, counters));
            }
            any |= walk.end();
        }
        any
    }

    /// Takes as many of the leading ones of these pages out as go together. Returns how many.
    pub(crate) fn take_out_by_moving(
        &self,
        region: &Arc<Region>,
        pages: Range<usize>,
        way: Way,
        counters: &Counters,
    ) -> usize {
        match self.take_out(region, pages, protocol::leave) {
            Out::Taken(pages, frame) => {
                let taken = pages.len();
                self.let_go(region, pages, frame, way, counters);
                return taken;
            }
            Out::Refused(_) => counters.failed_evictions.bump(),
            Out::NotNow | Out::NotHere => {}
        }
        0
    }

    /// Pages that were taken out: what is unchanged has left, the rest is handed over.
    pub(crate) fn let_go(
        &self,
        region: &Arc<Region>,
        pages: Range<usize>,
        frame: A::Frame,
        way: Way,
        counters: &Counters,
    ) {
        let (first, page_bytes) = (pages.start, region.page_bytes());
        let stamp = Behind::stamp(way, self.now());
        let mut gone = [false; PAGES_PER_CALL];
        for (page, bytes) in pages.clone().zip(frame.as_ref().chunks_exact(page_bytes)) {
            gone[page - first] = region.store.is_unchanged(page as u64, bytes)
                && region.words.apply(page, |w| protocol::left(w, stamp)) == OnLeft::Gone;
        }
        let left = gone.iter().filter(|&&gone| gone).count();
        counters.evictions.add(left);
        counters.clean_evictions.add(left);
        region.store.count_clean(left);
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
        let leaving = Leaving::new(region.clone(), pages, None, way);
        self.frames.begin_leaving(leaving.bytes());
        let sent = self.offer(leaving, frame);
        assert!(sent.is_ok(), "there is room for all threads at once");
        if self.handed_over.len() >= RUNS_PER_CALL {
            self.evictors[0].ring();
        }
    }

    /// Puts a run where evictors find it. The error gives it back: there is no room.
    pub(crate) fn offer(&self, leaving: Leaving, frame: A::Frame) -> Result<(), Run<A::Frame>> {
        let (region, pages) = (leaving.region().clone(), leaving.pages());
        let sent = self.handed_over.sender.try_send((leaving, frame));
        sent.map_err(TrySendError::into_inner)?;
        // Pairs with the fence in `noted`: either we see the note, or who left it sees what waits here.
        fence(Ordering::SeqCst);
        if region.is_closing()
            || pages
                .into_iter()
                .any(|page| region.words.load(page).wanted())
        {
            self.call_for_handed_over();
        }
        Ok(())
    }

    /// Somebody has left a note on a page in other hands: it may be one that was handed over and that no evictor has been called for.
    pub(crate) fn noted(&self, region: &Region, page: usize) {
        fence(Ordering::SeqCst);
        if region.words.load(page).state() == State::Leaving && self.handed_over.len() > 0 {
            self.call_for_handed_over();
        }
    }

    /// All of them, since some may be busy with a store that stalls.
    fn call_for_handed_over(&self) {
        self.handed_over.is_wanted.store(true, Ordering::SeqCst);
        self.ring_evictors();
    }
}
