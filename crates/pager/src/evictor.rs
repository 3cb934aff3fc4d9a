//! Taking pages out: [`Evictor`].
//!
//! An eviction, in order:
//!
//! 1. the sweep names a victim; own it (`Resident` to `Leaving`);
//! 2. detach it: atomic, from here on its bytes are ours alone, and a touch of it faults;
//! 3. if it is wanted by now, map it again;
//! 4. hash it: an unchanged page is done, a changed one is encoded and its WRITE posted;
//! 5. when the bytes are safe, publish (`Leaving` to `Remote`) and give the frame back; a page that was wanted meanwhile is mapped again
//!    from the frame, without the network.
//!
//! Many pages are in steps 4 and 5 at once. Evictors start above the high water mark and stop at the low one; in between they do
//! what the program asks for ([`Job`]). The rule: a page whose write-back failed is mapped again, never dropped.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_store::{Done, Lane, Outcome};
use farpage_vm::{AddressSpace, DetachError};

use crate::{
    PageError,
    core::{Core, Heat},
    job::Job,
    protocol::{self, OnLeft, State},
    region::Region,
    slab::Slab,
    stats::Counters,
};

/// Pages that one evictor has on their way out at once, not counting overdue ones.
const DEPTH: usize = 64;
/// A page that has been on its way out for so long while a fill waits for a frame is overdue: its store is slow, stalled or dead, and waiting
/// for it would make its region the whole runtime's pace. A write-back that goes well takes a tenth of it.
const OVERDUE: Duration = Duration::from_millis(3);
/// A region with so many overdue pages is passed over by the sweep until some of them are gone.
const OVERDUE_PER_REGION: usize = 64;
/// Chunks that one turn looks at when it finds no victim, before it lets other work go on.
const CHUNKS_PER_TURN: usize = 256;
/// After a failed write-back no victim is tried for so long: the store needs time, not more load.
const BACKOFF: Duration = Duration::from_millis(20);

pub(crate) struct Evictor<A: AddressSpace> {
    core: Arc<Core<A>>,
    /// The worker's number, behind the fillers'.
    worker: usize,
    index: usize,
    lane: Lane<A::Frame>,
    deadline: Duration,
    /// Above the high mark until the low one is reached.
    draining: bool,
    flights: Slab<Leaving>,
    /// How many of them are overdue.
    overdue: usize,
    /// Pages that the lane was too busy to take.
    unposted: VecDeque<(Leaving, A::Frame)>,
    /// Pages of a job that another worker owned when their turn came.
    later: Vec<Later>,
    rest_until: Option<Instant>,
    done: Vec<Done<A::Frame>>,
}

/// A page that this evictor owns as `Leaving`. Its region has been entered.
#[derive(Debug)]
struct Leaving {
    region: Arc<Region>,
    page: usize,
    job: Option<Arc<Job>>,
    since: Instant,
    overdue: bool,
}

#[derive(Debug)]
struct Later {
    job: Arc<Job>,
    page: usize,
    since: Instant,
}

/// What came of trying to take a page out.
enum Begun {
    /// It is under way, or has ended already.
    Yes,
    /// Another worker owns it, or the kernel holds it.
    NotNow(Option<PageError>),
    /// There is nothing to take out.
    NotHere,
}

impl<A: AddressSpace> Evictor<A> {
    pub(crate) fn new(
        core: Arc<Core<A>>,
        index: usize,
        lane: Lane<A::Frame>,
        deadline: Duration,
    ) -> Self {
        Evictor {
            worker: core.shards() + index,
            core,
            index,
            lane,
            deadline,
            draining: false,
            flights: Slab::default(),
            overdue: 0,
            unposted: VecDeque::new(),
            later: Vec::new(),
            rest_until: None,
            done: Vec::with_capacity(DEPTH),
        }
    }

    fn counters(&self) -> &Counters {
        &self.core.counters[self.worker]
    }

    /// Does what can be done without waiting. Returns whether anything was done.
    pub(crate) fn turn(&mut self) -> bool {
        let mut busy = self.post_unposted();
        busy |= self.make_room();
        busy |= self.work_on_jobs();
        self.lane.poll(&mut self.done);
        busy |= !self.done.is_empty();
        while let Some(done) = self.done.pop() {
            self.settle(done);
        }
        busy
    }

    fn has_room(&self) -> bool {
        self.unposted.is_empty() && self.flights.len() - self.overdue < DEPTH
    }

    /// Takes out victims of the sweep while there is pressure.
    fn make_room(&mut self) -> bool {
        if self.rest_until.is_some_and(|until| Instant::now() < until) {
            return false;
        }
        self.rest_until = None;
        self.write_off_overdue();
        self.draining =
            self.core.frames.above_low() && (self.draining || self.core.frames.above_high());
        if !self.draining {
            return false;
        }
        let mut begun = 0;
        for _ in 0..CHUNKS_PER_TURN {
            if !self.has_room()
                || begun >= DEPTH
                || !self.core.frames.above_low()
                || self.rest_until.is_some()
            {
                break;
            }
            let Some(claim) = self.core.sweep.claim(&self.core.regions) else {
                break;
            };
            if claim.region.overdue() >= OVERDUE_PER_REGION {
                continue;
            }
            let (mut seen, mut taken) = (0, 0);
            for page in claim.pages.clone() {
                let word = claim.region.words.load(page);
                if word.state() != State::Resident {
                    continue;
                }
                seen += 1;
                let now = self.core.now();
                if now.wrapping_sub(word.stamp()) < claim.age_floor {
                    continue;
                }
                if word.heat() > 0 {
                    claim
                        .region
                        .words
                        .try_apply(page, |w| (w == word).then(|| protocol::cooled(w, now)));
                    continue;
                }
                if matches!(self.begin(&claim.region, page, None), Begun::Yes) {
                    taken += 1;
                }
                if !self.core.frames.above_low() {
                    self.core.sweep.stop_at(&claim, page + 1);
                    break;
                }
            }
            begun += taken;
            let page_bytes = claim.region.page_bytes();
            self.core.sweep.report(
                seen * page_bytes,
                taken * page_bytes,
                self.core.frames.used() as usize,
            );
        }
        begun > 0
    }

    /// A fill waits for a frame: pages that are on their way out for too long count as staying from now on, so that others leave.
    fn write_off_overdue(&mut self) {
        if !self.core.frames.is_starving() {
            return;
        }
        for leaving in self.flights.values_mut() {
            if !leaving.overdue && leaving.since.elapsed() > OVERDUE {
                leaving.overdue = true;
                self.overdue += 1;
                leaving.region.count_overdue();
                self.core.frames.end_leaving(leaving.region.page_bytes());
            }
        }
    }

    /// A page that was on its way out is out, or stays after all.
    fn end_leaving(&mut self, leaving: &Leaving) {
        if leaving.overdue {
            self.overdue -= 1;
            leaving.region.count_overdue_out();
        } else {
            self.core.frames.end_leaving(leaving.region.page_bytes());
        }
    }

    /// Steps 1 to 4 of the module's story.
    fn begin(&mut self, region: &Arc<Region>, page: usize, job: Option<&Arc<Job>>) -> Begun {
        if !region.enter() {
            return Begun::NotHere;
        }
        if region.words.try_apply(page, protocol::leave).is_none() {
            let word = region.words.load(page);
            region.exit();
            // A page being filled has nothing that is not in the store, until it is mapped; one that leaves may.
            return if word.installing() || matches!(word.state(), State::Leaving | State::Resident)
            {
                Begun::NotNow(None)
            } else {
                Begun::NotHere
            };
        }
        let (shard, address, page_bytes) = (
            region.shard_of(page, self.core.shards()),
            region.address_of(page),
            region.page_bytes(),
        );
        self.core.frames.begin_leaving(page_bytes);
        match self.core.space.detach(shard, address, page_bytes) {
            Ok(frame) => {
                region.count_out();
                let leaving = Leaving {
                    region: region.clone(),
                    page,
                    job: job.cloned(),
                    since: Instant::now(),
                    overdue: false,
                };
                if let Some(job) = job {
                    job.open_one();
                }
                if job.is_none() && region.words.load(page).wanted() {
                    self.counters().steals.bump();
                    self.map_again(leaving, frame, None);
                } else {
                    self.post(leaving, frame);
                }
                Begun::Yes
            }
            Err(DetachError::Absent) => {
                // The program gave the page back to the kernel; what was written back last is the page now.
                region.count_out();
                self.core.frames.end_leaving(page_bytes);
                self.core.frames.forget(page_bytes);
                if region
                    .words
                    .apply(page, |w| protocol::removed(w, self.core.now()))
                {
                    self.core.space.wake(shard, address, page_bytes);
                }
                region.exit();
                Begun::NotHere
            }
            Err(error) => {
                self.core.frames.end_leaving(page_bytes);
                let wanted = region
                    .words
                    .apply(page, |w| (protocol::stayed(w), w.wanted()));
                if wanted {
                    self.core.space.wake(shard, address, page_bytes);
                }
                let (id, page) = (region.id, page as u64);
                let error = match error {
                    DetachError::Held => PageError::Held { region: id, page },
                    other => PageError::Os {
                        what: "take out",
                        region: id,
                        page,
                        message: other.to_string(),
                    },
                };
                region.exit();
                self.counters().failed_evictions.bump();
                Begun::NotNow(Some(error))
            }
        }
    }

    fn post(&mut self, leaving: Leaving, frame: A::Frame) {
        let (store, page) = (leaving.region.store.clone(), leaving.page as u64);
        let tag = self.flights.insert(leaving);
        if let Err(frame) = self.lane.write_back(&store, page, frame, tag) {
            let leaving = self.flights.remove(tag);
            self.unposted.push_back((leaving, frame));
        }
    }

    fn post_unposted(&mut self) -> bool {
        let mut any = false;
        while let Some((leaving, frame)) = self.unposted.pop_front() {
            let waiting = self.unposted.len();
            self.post(leaving, frame);
            if self.unposted.len() > waiting {
                self.unposted.rotate_right(1);
                break;
            }
            any = true;
        }
        any
    }

    /// Step 5.
    fn settle(&mut self, done: Done<A::Frame>) {
        let leaving = self.flights.remove(done.tag);
        match done.outcome {
            Ok(outcome) => {
                if matches!(outcome, Outcome::Written { .. }) {
                    self.counters().writes.bump();
                }
                self.leave(leaving, done.frame, matches!(outcome, Outcome::Clean));
            }
            Err(error) => {
                self.counters().failed_evictions.bump();
                self.rest_until = Some(Instant::now() + BACKOFF);
                self.map_again(leaving, done.frame, Some(error.into()));
            }
        }
    }

    /// The bytes are safe: gives the page up, unless it shall stay or is wanted.
    fn leave(&mut self, leaving: Leaving, frame: A::Frame, clean: bool) {
        if leaving.job.as_ref().is_some_and(|job| job.keep) {
            return self.map_again(leaving, frame, None);
        }
        let (region, page) = (leaving.region.clone(), leaving.page);
        match region
            .words
            .apply(page, |w| protocol::left(w, self.core.now()))
        {
            OnLeft::Gone => {
                self.counters().evictions.bump();
                if clean {
                    self.counters().clean_evictions.bump();
                }
                self.end_leaving(&leaving);
                self.core.release(frame, region.page_bytes());
                self.end(leaving, None);
            }
            OnLeft::TakeBack => {
                self.counters().steals.bump();
                self.map_again(leaving, frame, None);
            }
        }
    }

    /// The page stays after all: maps its frame again.
    fn map_again(&mut self, leaving: Leaving, frame: A::Frame, error: Option<PageError>) {
        let (region, page) = (&leaving.region.clone(), leaving.page);
        let heat = if region.words.load(page).wanted() {
            Heat::Hot
        } else {
            Heat::Cold
        };
        self.end_leaving(&leaving);
        let error = match self.core.install(region, page, frame, heat) {
            Ok(()) => error,
            Err((frame, os)) => {
                // The bytes are in the store, or the write-back has failed too and its error goes first.
                self.core.release(frame, region.page_bytes());
                let os = PageError::Os {
                    what: "map",
                    region: region.id,
                    page: page as u64,
                    message: os.to_string(),
                };
                self.core
                    .fail_fill(region, page, error.clone().unwrap_or_else(|| os.clone()));
                Some(error.unwrap_or(os))
            }
        };
        self.end(leaving, error);
    }

    fn end(&mut self, leaving: Leaving, error: Option<PageError>) {
        match (&leaving.job, error) {
            (Some(job), error) => job.close_one(error),
            (None, Some(error)) => leaving.region.record(error),
            (None, None) => {}
        }
        leaving.region.exit();
    }

    /// Goes on with the oldest job, and with pages of jobs that were owned by others before.
    fn work_on_jobs(&mut self) -> bool {
        let mut any = self.try_again();
        while self.has_room() {
            let Some(job) = self.core.jobs.lock().front().cloned() else {
                break;
            };
            any = true;
            let Some(pages) = job.claim() else {
                let mut jobs = self.core.jobs.lock();
                if jobs.front().is_some_and(|front| Arc::ptr_eq(front, &job)) {
                    jobs.pop_front();
                }
                continue;
            };
            for page in pages {
                if let Begun::NotNow(_) = self.begin(&job.region.clone(), page, Some(&job)) {
                    job.open_one();
                    self.later.push(Later {
                        job: job.clone(),
                        page,
                        since: Instant::now(),
                    });
                }
            }
            job.close_one(None);
        }
        any
    }

    fn try_again(&mut self) -> bool {
        let mut any = false;
        for later in std::mem::take(&mut self.later) {
            let region = later.job.region.clone();
            match self.begin(&region, later.page, Some(&later.job)) {
                Begun::Yes | Begun::NotHere => {
                    later.job.close_one(None);
                    any = true;
                }
                Begun::NotNow(error) if later.since.elapsed() > self.deadline => {
                    let held = PageError::Held {
                        region: region.id,
                        page: later.page as u64,
                    };
                    later.job.close_one(Some(error.unwrap_or(held)));
                    any = true;
                }
                Begun::NotNow(_) => self.later.push(later),
            }
        }
        any
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.core.is_stopping()
    }

    /// Sleeps until there may be something to do.
    pub(crate) fn sleep(&mut self) {
        let bell = &self.core.evictors[self.index];
        bell.prepare();
        let pressure =
            self.rest_until.is_none() && self.has_room() && self.core.frames.above_high();
        if self.core.is_stopping() || !self.core.jobs.lock().is_empty() && self.has_room() {
            return bell.cancel();
        }
        let mut fds = Vec::with_capacity(4);
        let mut until = self.lane.wait(&mut fds);
        // Pressure that this turn could not relieve (pages pinned, owned by others, or young), or pages to try again: look again soon.
        let soon =
            (pressure || !self.later.is_empty()).then(|| Instant::now() + crate::worker::RETRY);
        for at in [soon, self.rest_until].into_iter().flatten() {
            until = Some(until.map_or(at, |until| until.min(at)));
        }
        bell.sleep(fds, until);
    }
}
