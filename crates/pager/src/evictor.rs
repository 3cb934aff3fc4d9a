//! Taking pages out: [`Evictor`].
//!
//! An eviction, in order:
//!
//! 1. streams, or the sweep, name victims; neighbours among them are a run: own its pages (`Resident` to `Leaving`);
//! 2. detach it: atomic, from here on its bytes are ours alone, and a touch of it faults;
//! 3. map those of its pages again that are wanted by now;
//! 4. hash each page: an unchanged one is done, changed ones are encoded and their WRITE posted;
//! 5. when the bytes are safe, publish (`Leaving` to `Remote`) and give the frame back; pages that were wanted meanwhile are mapped again
//!    from the frame, without the network.
//!
//! Runs that threads of the program have taken out come in at step 4 (`handover.rs`). Many runs are in steps 4 and 5 at once. Evictors start above the high water mark and stop at the low one; in between they do
//! what the program asks for ([`Job`]). The rule: a page whose write-back failed is mapped again, never dropped.

use std::{
    collections::VecDeque,
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_store::{Done, Lane};
use farpage_vm::{AddressSpace, DetachError};

use crate::{
    PageError,
    behind::{Behind, Way},
    core::{Core, Heat},
    job::Job,
    protocol::{self, OnLeft},
    region::Region,
    run::{Local, cut},
    slab::Slab,
    stats::Counters,
    sweep::Claim,
    victims::{Out, Walk},
};

/// Bytes that one evictor has on their way out at once, not counting overdue ones, and runs: enough to keep a fast link busy for a round trip.
const BYTES_OUT_MAX: usize = 8 << 20;
const RUNS_OUT_MAX: usize = 64;
/// A page that has been on its way out for so long while a fill waits for a frame is overdue: its store is slow, stalled or dead, and waiting
/// for it would make its region the whole runtime's pace. A write-back that goes well takes a tenth of it.
const OVERDUE: Duration = Duration::from_millis(3);
/// Chunks that one turn looks at when it finds no victim, before it lets other work go on.
const CHUNKS_PER_TURN: usize = 256;
/// After a failed write-back no victim is tried for so long: the store needs time, not more load.
const BACKOFF: Duration = Duration::from_millis(20);

pub(crate) struct Evictor<A: AddressSpace> {
    core: Arc<Core<A>>,
    /// The worker's number, behind the fillers'.
    worker: usize,
    index: usize,
    lane: Lane<Local<A::Frame>>,
    deadline: Duration,
    /// Above the high mark until the low one is reached.
    draining: bool,
    flights: Slab<Leaving>,
    /// Bytes of runs that are on their way out, and runs; without those that are overdue.
    out: usize,
    runs_out: usize,
    /// Runs that the lane was too busy to take.
    unposted: VecDeque<(Leaving, A::Frame)>,
    /// Pages of a job that another worker owned when their turn came.
    later: Vec<Later>,
    rest_until: Option<Instant>,
    done: Vec<Done<Local<A::Frame>>>,
}

/// A run of pages that are owned as `Leaving`, by this evictor or whoever hands them over to one. Its region has been entered.
#[derive(Debug)]
pub(crate) struct Leaving {
    region: Arc<Region>,
    pages: Range<usize>,
    job: Option<Arc<Job>>,
    way: Way,
    since: Instant,
    overdue: bool,
}

impl Leaving {
    pub(crate) fn new(
        region: Arc<Region>,
        pages: Range<usize>,
        job: Option<Arc<Job>>,
        way: Way,
    ) -> Leaving {
        Leaving {
            region,
            pages,
            job,
            way,
            since: Instant::now(),
            overdue: false,
        }
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    pub(crate) fn pages(&self) -> Range<usize> {
        self.pages.clone()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.pages.len() * self.region.page_bytes()
    }

    fn is_wanted(&self) -> bool {
        (self.pages.clone()).any(|page| self.region.words.load(page).wanted())
    }
}

/// What becomes of a page whose bytes are safe, or are not.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Gone,
    /// It is wanted again.
    Stolen,
    /// It shall stay, or its write-back failed.
    Stays,
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
        lane: Lane<Local<A::Frame>>,
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
            out: 0,
            runs_out: 0,
            unposted: VecDeque::new(),
            later: Vec::new(),
            rest_until: None,
            done: Vec::with_capacity(RUNS_OUT_MAX),
        }
    }

    fn counters(&self) -> &Counters {
        &self.core.counters[self.worker]
    }

    /// Does what can be done without waiting. Returns whether anything was done.
    pub(crate) fn turn(&mut self) -> bool {
        let mut busy = self.post_unposted();
        busy |= self.take_over();
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
        // A store that stalls may be what keeps the lane busy: what waits for it for too long stops nothing else.
        self.unposted.iter().all(|(leaving, _)| leaving.overdue)
            && self.out < BYTES_OUT_MAX
            && self.runs_out < RUNS_OUT_MAX
    }

    /// Goes on with what threads of the program have taken out: maps again what is wanted by now, and writes the rest back as far as there is room. Closing regions wait for theirs.
    fn take_over(&mut self) -> bool {
        let (core, mut any) = (self.core.clone(), false);
        let waiting = core.handed_over.len();
        if waiting == 0 {
            return false;
        }
        // A flush has its share, however fast pages are handed over.
        let share = if core.jobs.lock().is_empty() { 1 } else { 2 };
        let called = core.handed_over.answer();
        for _ in 0..waiting {
            let has_room = self.has_room()
                && self.out < BYTES_OUT_MAX / share
                && self.runs_out < RUNS_OUT_MAX / share;
            if !has_room && !called {
                break;
            }
            let Some((leaving, frame)) = core.handed_over.take() else {
                break;
            };
            let is_urgent = leaving.is_wanted() || leaving.region.is_closing();
            let mine = if has_room || is_urgent {
                Some((leaving, frame))
            } else {
                core.offer(leaving, frame).err()
            };
            if let Some((leaving, frame)) = mine {
                core.frames.end_leaving(leaving.bytes());
                let (region, pages) = (&leaving.region, leaving.pages.clone());
                self.took_out(region, pages, frame, None, leaving.way);
                region.exit();
                any = true;
            }
        }
        any
    }

    /// Takes out victims of the sweep while there is pressure.
    fn make_room(&mut self) -> bool {
        if self.rest_until.is_some_and(|until| Instant::now() < until) {
            return false;
        }
        self.rest_until = None;
        self.write_off_overdue();
        self.draining =
            self.core.frames.excess() > 0 && (self.draining || self.core.needs_evictor(self.index));
        if !self.draining {
            return false;
        }
        let mut begun = false;
        for _ in 0..CHUNKS_PER_TURN {
            if self.core.frames.excess() == 0 || !self.has_room() {
                break;
            }
            let Some(claim) = self.core.claim() else {
                break;
            };
            if claim.region.is_stalled() {
                continue;
            }
            // What streams have gone through lies in rows, which move at once.
            if claim.way == Way::Swept && self.core.scatters(&claim.region) {
                match self.take_scattered(claim) {
                    Some(any) => begun |= any,
                    None => break,
                }
            } else {
                begun |= self.take_victims(&claim);
            }
        }
        begun
    }

    /// Takes the claim's victims out, neighbours together. Returns whether there were any.
    fn take_victims(&mut self, claim: &Claim) -> bool {
        let (core, page_bytes) = (self.core.clone(), claim.region.page_bytes());
        let mut walk = Walk::new(&core, claim);
        loop {
            let excess = core.frames.excess().div_ceil(page_bytes as u64) as usize;
            if excess == 0 || !self.has_room() {
                break;
            }
            let Some(run) = walk.next(excess) else {
                break;
            };
            let mut page = run.start;
            while page < run.end {
                let (pages, begun) = self.begin(&claim.region, page..run.end, None, claim.way);
                if matches!(begun, Begun::Yes) {
                    walk.took(pages);
                }
                page += pages;
            }
        }
        walk.end()
    }

    /// The same where pages leave by copying. `None`: somebody else makes room.
    fn take_scattered(&mut self, claim: Claim) -> Option<bool> {
        let (core, region, way) = (self.core.clone(), claim.region.clone(), claim.way);
        let scattered = core.take_out_scattered(claim, |pages, frame| {
            self.took_out(&region, pages, frame, None, way);
            region.exit();
        })?;
        let mut any = scattered.any;
        for page in scattered.refused {
            let (_, begun) = self.begin(&region, page..page + 1, None, way);
            any |= matches!(begun, Begun::Yes);
        }
        Some(any)
    }

    /// A fill waits for a frame: pages that are on their way out for too long count as staying from now on, so that others leave.
    fn write_off_overdue(&mut self) {
        if !self.core.frames.is_starving() {
            return;
        }
        let unposted = self.unposted.iter_mut().map(|(leaving, _)| leaving);
        for leaving in self.flights.values_mut().chain(unposted) {
            if !leaving.overdue && leaving.since.elapsed() > OVERDUE {
                leaving.overdue = true;
                self.out -= leaving.bytes();
                self.runs_out -= 1;
                leaving.region.count_overdue(leaving.pages.len());
                self.core.frames.end_leaving(leaving.bytes());
            }
        }
    }

    /// A run was on its way out: each of its pages is out, or stays after all.
    fn end_leaving(&mut self, leaving: &Leaving) {
        if leaving.overdue {
            leaving.region.count_overdue_out(leaving.pages.len());
        } else {
            self.out -= leaving.bytes();
            self.runs_out -= 1;
            self.core.frames.end_leaving(leaving.bytes());
        }
    }

    /// Steps 1 to 4 of the module's story for the leading ones of these pages, which lie in one stripe. Returns how many of them are dealt with, at
    /// least one, and how.
    fn begin(
        &mut self,
        region: &Arc<Region>,
        pages: Range<usize>,
        job: Option<&Arc<Job>>,
        way: Way,
    ) -> (usize, Begun) {
        // A pinned page is no victim, but can be written back.
        let own = if job.is_some() {
            protocol::borrow
        } else {
            protocol::leave
        };
        let first = pages.start;
        match self.core.take_out(region, pages, own) {
            Out::Taken(pages, frame) => {
                self.took_out(region, pages.clone(), frame, job, way);
                region.exit();
                (pages.len(), Begun::Yes)
            }
            Out::NotHere => (1, Begun::NotHere),
            Out::NotNow => (1, Begun::NotNow(None)),
            Out::Refused(error) => {
                self.counters().failed_evictions.bump();
                (1, Begun::NotNow(Some(refused(region, first, error))))
            }
        }
    }

    /// Steps 3 and 4: the run's bytes are ours.
    fn took_out(
        &mut self,
        region: &Arc<Region>,
        pages: Range<usize>,
        frame: A::Frame,
        job: Option<&Arc<Job>>,
        way: Way,
    ) {
        let leaving = |pages| Leaving::new(region.clone(), pages, job.cloned(), way);
        let wanted = |page| job.is_none() && region.words.load(page).wanted();
        cut(
            pages,
            region.page_bytes(),
            frame,
            wanted,
            |pages, frame, wanted| {
                region.enter_again();
                if let Some(job) = job {
                    job.open_one();
                }
                let leaving = leaving(pages.clone());
                if wanted {
                    self.counters().steals.add(pages.len());
                    let error = self.map_again(&leaving, pages, frame, false, |_| None);
                    self.close(leaving, error);
                } else {
                    self.out += leaving.bytes();
                    self.runs_out += 1;
                    self.core.frames.begin_leaving(leaving.bytes());
                    self.post(leaving, frame);
                }
            },
        );
    }

    fn post(&mut self, leaving: Leaving, frame: A::Frame) {
        let (store, page) = (leaving.region.store.clone(), leaving.pages.start as u64);
        let tag = self.flights.insert(leaving);
        if let Err(Local(frame)) = self.lane.write_back(&store, page, Local(frame), tag) {
            let leaving = self.flights.remove(tag);
            self.unposted.push_back((leaving, frame));
        }
    }

    /// Tries all of them, since each store is busy for itself; what is refused again keeps its order.
    fn post_unposted(&mut self) -> bool {
        let waiting = self.unposted.len();
        for _ in 0..waiting {
            let (leaving, frame) = self
                .unposted
                .pop_front()
                .expect("the loop runs over its length");
            self.post(leaving, frame);
        }
        self.unposted.len() < waiting
    }

    /// Step 5.
    fn settle(&mut self, done: Done<Local<A::Frame>>) {
        let leaving = self.flights.remove(done.tag);
        self.end_leaving(&leaving);
        self.counters().writes.add(done.outcome.written as usize);
        if !done.failed.is_empty() {
            self.counters().failed_evictions.add(done.failed.len());
            self.rest_until = Some(Instant::now() + BACKOFF);
            self.core.handed_over.rest(BACKOFF);
        }
        let region = leaving.region.clone();
        let failure = |page: usize| {
            let failed = done
                .failed
                .iter()
                .find(|(failed, _)| *failed == page as u64);
            failed.map(|(_, error)| PageError::from(error.clone()))
        };
        let keep = leaving.job.as_ref().is_some_and(|job| job.keep);
        // Settled page by page, since each may be wanted; what has left is given back together.
        let fates: Vec<_> = leaving
            .pages
            .clone()
            .map(|page| {
                if keep || failure(page).is_some() {
                    return Fate::Stays;
                }
                let stamp = Behind::stamp(leaving.way, self.core.now());
                match region.words.apply(page, |w| protocol::left(w, stamp)) {
                    OnLeft::Gone => Fate::Gone,
                    OnLeft::TakeBack => Fate::Stolen,
                }
            })
            .collect();
        let gone = fates.iter().filter(|&&fate| fate == Fate::Gone).count();
        self.counters().evictions.add(gone);
        self.counters()
            .clean_evictions
            .add(gone.min(done.outcome.clean as usize));
        let (first, mut error) = (leaving.pages.start, None);
        cut(
            leaving.pages.clone(),
            region.page_bytes(),
            done.frame.0,
            |page| fates[page - first],
            |pages, frame, fate| match fate {
                Fate::Gone => self.core.release(frame, region.page_bytes()),
                Fate::Stays | Fate::Stolen => {
                    if fate == Fate::Stolen {
                        self.counters().steals.add(pages.len());
                    }
                    let why = self.map_again(&leaving, pages, frame, true, failure);
                    error = error.take().or(why);
                }
            },
        );
        self.close(leaving, error);
    }

    /// These pages of the run stay after all: maps their frame again. `written`: their bytes are in the store, except where `failure` says why
    /// they are not. Returns the first error: why they had to stay, or could not.
    fn map_again(
        &self,
        leaving: &Leaving,
        pages: Range<usize>,
        frame: A::Frame,
        written: bool,
        failure: impl Fn(usize) -> Option<PageError>,
    ) -> Option<PageError> {
        let region = &leaving.region;
        let heat = if region.words.load(pages.start).wanted() {
            Heat::Hot
        } else {
            Heat::Cold
        };
        let mut error = pages.clone().find_map(&failure);
        self.core
            .install(region, pages, frame, heat, |page, frame, os| {
                let failed = failure(page);
                // Bytes that were not written may be those that the store has.
                let is_stored = written && failed.is_none()
                    || region.store.is_unchanged(page as u64, frame.as_ref());
                self.core.release(frame, region.page_bytes());
                let os = PageError::Os {
                    what: "map",
                    region: region.id,
                    page: page as u64,
                    message: os.to_string(),
                };
                // Where the write-back has failed too, its error goes first.
                let why = failed.unwrap_or(os);
                if is_stored {
                    self.core.fail_fill(region, page, why.clone());
                    error.get_or_insert(why);
                } else {
                    // Worse than any error before it.
                    error = Some(self.core.lose(region, page, &why));
                }
            });
        error
    }

    /// The run is settled.
    fn close(&mut self, leaving: Leaving, error: Option<PageError>) {
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
            let region = &job.region;
            let mut page = pages.start;
            while page < pages.end {
                let run = pages.end.min(page + region.run_pages);
                let run = region.in_one_stripe(&(page..run), false);
                let (dealt_with, begun) = self.begin(region, run, Some(&job), Way::Swept);
                if matches!(begun, Begun::NotNow(_)) {
                    job.open_one();
                    self.later.push(Later {
                        job: job.clone(),
                        page,
                        since: Instant::now(),
                    });
                }
                page += dealt_with;
            }
            job.close_one(None);
        }
        any
    }

    fn try_again(&mut self) -> bool {
        let mut any = false;
        for later in std::mem::take(&mut self.later) {
            let region = later.job.region.clone();
            let page = later.page..later.page + 1;
            match self.begin(&region, page, Some(&later.job), Way::Swept).1 {
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

    /// Drives it until the runtime stops.
    pub(crate) fn serve(mut self) {
        while !self.core.is_stopping() {
            if !self.turn() {
                self.sleep();
            }
        }
    }

    /// Nothing is under way.
    #[cfg(test)]
    pub(crate) fn is_at_rest(&self) -> bool {
        self.flights.len() == 0
            && self.unposted.is_empty()
            && self.core.handed_over.len() == 0
            && self.later.is_empty()
            && (self.out, self.runs_out) == (0, 0)
    }

    /// Sleeps until there may be something to do.
    fn sleep(&mut self) {
        let bell = &self.core.evictors[self.index];
        bell.prepare();
        let pressure =
            self.rest_until.is_none() && self.has_room() && self.core.needs_evictor(self.index);
        let handed_over = &self.core.handed_over;
        let asked = !self.core.jobs.lock().is_empty() || handed_over.len() > 0;
        if self.core.is_stopping() || asked && self.has_room() || handed_over.is_called() {
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

/// Why a page could not be taken out, as the program is told.
fn refused(region: &Region, page: usize, error: DetachError) -> PageError {
    let (region, page) = (region.id, page as u64);
    match error {
        DetachError::Held => PageError::Held { region, page },
        other => PageError::Os {
            what: "take out",
            region,
            page,
            message: match other {
                DetachError::Os(error) => error.to_string(),
                other => other.to_string(),
            },
        },
    }
}
