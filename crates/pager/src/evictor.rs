//! Background reclaim: [`Evictor`] takes pages out.
//!
//! Victims are taken out (`reclaim.rs`) into the write-backs (`write_backs.rs`), which hash each
//! run, write it back, publish it and give its frame back.
//!
//! Runs that threads of the program have taken out come in there, too (`hand_over.rs`). Evictors
//! start above the high water mark and stop at the low one. In between they do work that the
//! program asks for ([`Job`]). The rule: an evictor waits only in its sleep, so that a store that
//! stalls holds up its own region alone.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_fabric::Since;
use farpage_signals::Mutex;
use farpage_store::{IoQueue, PageIndex, PageRange, StoreCall};
use farpage_vm::{AddressSpace, DetachError};

use crate::{
    PageError,
    budget::Budget,
    clock::FoundBy,
    freeze::Entered,
    job::Job,
    protocol,
    reclaim::{Eviction, EvictionLimit, Sink, evict},
    region::RegionGuard,
    requests::Leaving,
    run::PageRun,
    seats::{Seats, Serve},
    shared::SharedParts,
    victims::NotTaken,
    waker::RETRY,
    write_backs::WriteBacks,
};

/// Number of chunks that one turn looks at without finding a victim, before other work goes on.
const CHUNKS_PER_TURN: usize = 256;
/// Time after a failed write-back in which no victim is tried: the store needs time, not more load.
const BACKOFF: Duration = Duration::from_millis(20);

pub(crate) struct Evictor<A: AddressSpace> {
    shared: Arc<SharedParts<A>>,
    /// Number of the worker, behind the fillers'.
    worker: usize,
    index: usize,
    deadline: Duration,
    /// True from above the high mark until the low one is reached.
    reclaiming: bool,
    write_backs: WriteBacks<A>,
    /// Pages of a job that another worker owned when their turn came.
    later: Vec<Later>,
    rest_until: Option<Instant>,
}

#[derive(Debug)]
struct Later {
    job: Arc<Job>,
    page: PageIndex,
    since: Since,
}

/// Write-backs as the way of runs that were taken out, for the program's `job` or for room.
struct WriteBackSink<'a, A: AddressSpace> {
    write_backs: &'a mut WriteBacks<A>,
    job: Option<&'a Arc<Job>>,
}

impl<A: AddressSpace> Sink<A> for WriteBackSink<'_, A> {
    fn has_room(&self) -> bool {
        self.write_backs.has_room(1)
    }

    fn wants_more(&self, budget: &Budget) -> bool {
        budget.excess() > 0
    }

    fn put(
        &mut self,
        entered: &Entered<'_>,
        region: &RegionGuard,
        run: PageRun<A::Frame>,
        found_by: FoundBy,
    ) {
        self.write_backs
            .add(entered, region, run, self.job, found_by);
    }
}

impl<A: AddressSpace> Evictor<A> {
    pub(crate) fn new(
        shared: Arc<SharedParts<A>>,
        index: usize,
        io: IoQueue<Leaving, PageRun<A::Frame>>,
        deadline: Duration,
    ) -> Self {
        let worker = shared.shards() + index;
        Evictor {
            write_backs: WriteBacks::new(shared.clone(), worker, io),
            shared,
            worker,
            index,
            deadline,
            reclaiming: false,
            later: Vec::new(),
            rest_until: None,
        }
    }

    /// Performs all work that can be done without waiting. Returns whether anything was done.
    pub(crate) fn turn(&mut self) -> bool {
        let mut busy = self.write_backs.withdraw();
        busy |= self.take_handed_over();
        busy |= self.reclaim();
        busy |= self.work_on_jobs();
        busy | self.poll()
    }

    fn poll(&mut self) -> bool {
        let (rest_until, hand_over) = (&mut self.rest_until, &self.shared.hand_over);
        let failed = || {
            *rest_until = Some(Instant::now() + BACKOFF);
            hand_over.rest(BACKOFF);
        };
        self.write_backs.poll(failed)
    }

    /// Goes on with runs that threads of the program have taken out: maps wanted ones again, and
    /// writes others back as far as there is room. Runs of closing regions need no room. While the
    /// program forks, all are mapped again.
    fn take_handed_over(&mut self) -> bool {
        let (shared, mut any) = (self.shared.clone(), false);
        let hand_over = &shared.hand_over;
        if hand_over.len() == 0 {
            return false;
        }
        // A flush has its share, however fast pages are handed over.
        let share = if shared.jobs.is_empty() { 1 } else { 2 };
        // Answered before the runs are counted: the run that a call is for is among them.
        let called = hand_over.answer();
        let waiting = hand_over.len();
        for _ in 0..waiting {
            let has_room = self.write_backs.has_room(share);
            if !has_room && !called {
                break;
            }
            let Some((leaving, frame)) = hand_over.take() else {
                break;
            };
            let is_urgent =
                leaving.is_wanted() || leaving.region.is_closing() || shared.gate.is_closed();
            let mine = if has_room || is_urgent {
                Some((leaving, frame))
            } else {
                hand_over.offer(leaving, frame).err()
            };
            if let Some((leaving, frame)) = mine {
                shared.frames.budget().end_leaving(leaving.bytes());
                let run = PageRun::new(leaving.pages.start, frame, leaving.region.page_bytes());
                let entered = leaving.departure.inside();
                (self.write_backs).add(&entered, &leaving.region, run, None, leaving.found_by);
                any = true;
            }
        }
        any
    }

    /// Takes victims out while there is pressure.
    fn reclaim(&mut self) -> bool {
        if self.rest_until.is_some_and(|until| Instant::now() < until) {
            return false;
        }
        self.rest_until = None;
        self.write_backs.write_off_overdue();
        let has_excess = self.shared.frames.budget().excess() > 0;
        self.reclaiming = has_excess && (self.reclaiming || self.is_needed());
        let limit = EvictionLimit {
            chunks: CHUNKS_PER_TURN,
            pages: usize::MAX,
        };
        let sink = WriteBackSink {
            write_backs: &mut self.write_backs,
            job: None,
        };
        self.reclaiming && evict(&self.shared, self.worker, limit, sink)
    }

    fn is_needed(&self) -> bool {
        let budget = self.shared.frames.budget();
        self.shared.doors.needs_evictor(self.index, budget)
    }

    /// Takes out the leading ones of `pages` for a job. Returns as [`Eviction::take_out`] does.
    fn begin(
        &mut self,
        entered: &Entered<'_>,
        job: &Arc<Job>,
        pages: PageRange,
    ) -> (usize, Result<(), NotTaken>) {
        let mut eviction = Eviction {
            shared: &*self.shared,
            worker: self.worker,
            entered,
            sink: WriteBackSink {
                write_backs: &mut self.write_backs,
                job: Some(job),
            },
        };
        // A pinned page is no victim, but can be written back.
        eviction.take_out(&job.region, pages, protocol::borrow, FoundBy::ClockHand)
    }

    /// Goes on with the oldest job, and with pages of jobs that were owned by others before.
    fn work_on_jobs(&mut self) -> bool {
        if self.later.is_empty() && self.shared.jobs.is_empty() {
            return false;
        }
        let shared = self.shared.clone();
        let Some(entered) = shared.gate.enter(self.worker) else {
            return false;
        };
        let mut any = self.try_again(&entered);
        while self.write_backs.has_room(1) && !shared.gate.is_closed() {
            let Some(job) = shared.jobs.first() else {
                break;
            };
            any = true;
            let Some(pages) = job.next_chunk() else {
                shared.jobs.remove(&job);
                continue;
            };
            let region = &job.region;
            let mut page = pages.start;
            while page < pages.end && !job.ends_early() {
                let run = pages.end.min(page + region.run_pages);
                let run = region.in_one_stripe(page.until(run), false);
                let (dealt_with, begun) = match shared.gate.is_closed() {
                    // A whole chunk of large pages would hold up a freeze.
                    true => (1, Err(NotTaken::NotNow(None))),
                    false => self.begin(&entered, &job, run),
                };
                if matches!(begun, Err(NotTaken::NotNow(_))) {
                    job.open_one();
                    self.later.push(Later {
                        job: job.clone(),
                        page,
                        since: Since::now(),
                    });
                }
                page += dealt_with;
            }
            job.close_one(None);
        }
        any
    }

    fn try_again(&mut self, entered: &Entered<'_>) -> bool {
        let mut any = false;
        for later in std::mem::take(&mut self.later) {
            if later.job.ends_early() {
                later.job.close_one(None);
                any = true;
                continue;
            }
            if self.shared.gate.is_closed() {
                self.later.push(later);
                continue;
            }
            match self.begin(entered, &later.job, later.page.alone()).1 {
                Ok(()) | Err(NotTaken::NotHere) => {
                    later.job.close_one(None);
                    any = true;
                }
                Err(NotTaken::NotNow(error)) if later.since.elapsed() > self.deadline => {
                    let error = error.unwrap_or(DetachError::Busy);
                    let label = later.job.region.label();
                    let error = PageError::cannot_take_out(label, later.page, error);
                    later.job.close_one(Some(error));
                    any = true;
                }
                Err(NotTaken::NotNow(_)) => self.later.push(later),
            }
        }
        any
    }

    /// Returns the evictors' threads, their names and their work, on the seats from `first` on.
    pub(crate) fn serve_all(
        evictors: Vec<Self>,
        seats: &Arc<Seats>,
        first: usize,
    ) -> impl Iterator<Item = (String, Serve)> {
        evictors.into_iter().map(move |mut evictor| {
            evictor.write_backs.io.keep_calls();
            let (name, seat) = (format!("evictor-{}", evictor.index), first + evictor.index);
            let (evictor, seats) = (Mutex::new(evictor), seats.clone());
            let serve: Serve = Arc::new(move || Evictor::serve(&evictor, &seats, seat));
            (name, serve)
        })
    }

    /// Drives an evictor on a thread of this seat until the runtime stops, or the seat is lost.
    fn serve(evictor: &Mutex<Self>, seats: &Seats, seat: usize) {
        let mut held = evictor.lock();
        // Calls of a thread that has lost the seat.
        held.write_backs.io.await_calls();
        while !held.shared.doors.is_stopping() {
            let mut busy = held.turn();
            while let Some(mut call) = held.write_backs.io.take_call() {
                drop(held);
                if !seats.make(seat, &mut call) {
                    // The thread that has the seat now sleeps under the lock.
                    return Box::new(call).hand_in();
                }
                held = evictor.lock();
                held.end_call(call);
                busy = true;
            }
            if !busy {
                held.sleep();
            }
        }
    }

    /// Ends a call that has returned: its frame may be what a fill waits for.
    fn end_call(&mut self, call: StoreCall<PageRun<A::Frame>>) {
        self.write_backs.io.end_call(call);
        self.poll();
    }

    /// True if nothing is under way.
    #[cfg(test)]
    pub(crate) fn is_at_rest(&self) -> bool {
        self.write_backs.is_at_rest() && self.shared.hand_over.len() == 0 && self.later.is_empty()
    }

    /// Sleeps until there may be something to do.
    pub(crate) fn sleep(&mut self) {
        let (doors, hand_over) = (&self.shared.doors, &self.shared.hand_over);
        let waker = doors.evictor(self.index);
        waker.prepare();
        let has_room = self.write_backs.has_room(1);
        // While the program forks, nothing is taken out. The thaw wakes the evictor.
        let takes_out = !self.shared.gate.is_closed();
        let pressure = self.rest_until.is_none() && has_room && self.is_needed();
        let asked = takes_out && !self.shared.jobs.is_empty() || hand_over.len() > 0;
        if doors.is_stopping() || asked && has_room || hand_over.is_called() {
            return waker.cancel();
        }
        let mut fds = Vec::with_capacity(4);
        let mut until = self.write_backs.io.wait(&mut fds);
        // Look again soon after pressure that this turn could not end (pages pinned, owned by
        // others, or young), and for pages to try again.
        let again = takes_out && (pressure || !self.later.is_empty());
        let soon = again.then(|| Instant::now() + RETRY);
        for at in [soon, self.rest_until].into_iter().flatten() {
            until = Some(until.map_or(at, |until| until.min(at)));
        }
        waker.sleep(fds, until);
    }
}
