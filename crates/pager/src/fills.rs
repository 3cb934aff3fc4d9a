//! Bringing pages in: [`Fills`], for fillers and for threads that serve their own faults.
//!
//! A fill, in order:
//!
//! 1. a fault: own its page (`Remote` to `Filling`), and pages next to it that the program is
//!    expected to want at once: a run;
//! 2. take a frame for the run and post its READ;
//! 3. poll: a run that is complete and verified is handed to its completion ([`FillCompletion`]),
//!    which maps it.
//!
//! The rule: nothing here waits. A fill that finds no frame stays in the backlog, still owned, and
//! evictors are called. Fills of the backlog go before others.

use std::{
    collections::VecDeque,
    mem,
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_fabric::Since;
use farpage_store::{IoQueue, PageIndex, PageRange, RunCompletion};
use farpage_vm::{AddressSpace, DetachError};
use nix::poll::PollFd;

use crate::{
    Advice, PageError,
    ahead::{ReadAhead, Streams, own_ahead},
    freeze::Entered,
    installer::UsageCount,
    pace::Pace,
    protocol::{self, OnAbsent, OnFault, PageState},
    region::{Region, RegionGuard},
    requests::Fill,
    run::{PageRun, keep_first, pages_in},
    shared::SharedParts,
    stats::Counters,
};

/// Parts that a worker needs to map runs that it has brought in.
pub(crate) struct Arrivals<A: AddressSpace> {
    pub(crate) shared: Arc<SharedParts<A>>,
    pub(crate) worker: usize,
    /// Number of pages that were mapped by themselves.
    mapped_alone: u32,
}

impl<A: AddressSpace> Arrivals<A> {
    pub(crate) fn new(shared: Arc<SharedParts<A>>, worker: usize) -> Self {
        Arrivals {
            shared,
            worker,
            mapped_alone: 0,
        }
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.shared.counters[self.worker]
    }
}

/// Completion of a fill: maps the run, or deals with pages that failed.
pub(crate) trait FillCompletion<A: AddressSpace> {
    fn arrivals(&mut self) -> &mut Arrivals<A>;

    /// Takes a complete run, to map and publish it.
    fn complete(&mut self, fill: Fill, run: PageRun<A::Frame>);

    /// Deals with an owned page that cannot be brought in.
    fn fail(&mut self, region: &RegionGuard, page: PageIndex, error: PageError);

    /// Deals with an owned page that could not be mapped and whose bytes the store does not have.
    fn lose(
        &mut self,
        entered: &Entered<'_>,
        region: &RegionGuard,
        page: PageIndex,
        error: PageError,
    );

    /// Maps and publishes a run that is complete.
    fn map(&mut self, fill: Fill, run: PageRun<A::Frame>) {
        let Fill {
            region,
            usage,
            unsaved,
            ..
        } = fill;
        let arrivals = self.arrivals();
        let (shared, mut alone) = (arrivals.shared.clone(), arrivals.mapped_alone);
        let mut filled = run.len();
        let refused = |page, _, error| {
            filled -= 1;
            match &unsaved {
                Some(departure) => self.lose(&departure.inside(), &region, page, error),
                None => self.fail(&region, page, error),
            }
        };
        (shared.scatter).install(&region, run, usage, &mut alone, refused);
        let arrivals = self.arrivals();
        arrivals.mapped_alone = alone;
        let demand = usage != UsageCount::Unwanted;
        arrivals.counters().filled(filled, demand);
    }

    /// Takes note of a fault on a page that has another owner.
    fn noted(&mut self, region: &Arc<Region>, page: PageIndex);
}

/// Page that is owned as `Filling` and waits for a frame.
#[derive(Debug)]
struct PendingFill {
    region: RegionGuard,
    page: PageIndex,
    /// Pages next to `page` that are expected to be wanted soon.
    with: ReadAhead,
}

/// Fills of one worker.
pub(crate) struct Fills<A: AddressSpace, L> {
    shared: Arc<SharedParts<A>>,
    /// The worker's number.
    worker: usize,
    deadline: Duration,
    streams: Streams,
    pace: Pace,
    pub(crate) io: IoQueue<Fill, PageRun<A::Frame>>,
    /// Pages that wait for a frame, in the order of their faults, and since when.
    backlog: VecDeque<(PendingFill, Since)>,
    /// Pages that seem to have vanished while the program forks, and the addresses of the faults on
    /// them.
    put_off: Vec<(RegionGuard, PageIndex, usize)>,
    pub(crate) completion: L,
}

impl<A: AddressSpace, L: FillCompletion<A>> Fills<A, L> {
    pub(crate) fn new(
        shared: Arc<SharedParts<A>>,
        worker: usize,
        io: IoQueue<Fill, PageRun<A::Frame>>,
        pace: Pace,
        deadline: Duration,
        completion: L,
    ) -> Self {
        Fills {
            shared,
            worker,
            deadline,
            streams: Streams::default(),
            pace,
            io,
            backlog: VecDeque::new(),
            put_off: Vec::new(),
            completion,
        }
    }

    fn counters(&self) -> &Counters {
        &self.shared.counters[self.worker]
    }

    /// Serves a fault as the page's word says. Returns the plan to read ahead.
    pub(crate) fn on_fault(
        &mut self,
        region: RegionGuard,
        page: PageIndex,
        address: usize,
    ) -> ReadAhead {
        let on_fault = region.words.apply(page, protocol::fault);
        let mut plan = self.plan(&region, page, on_fault == OnFault::Fill);
        match on_fault {
            OnFault::Fill => {
                // Pages that are expected next come along with the page that is wanted now.
                let run = self.begin(region, page, plan.clone());
                let ahead = &mut plan.ahead;
                if plan.down {
                    ahead.end = ahead.end.min(run.start);
                } else {
                    ahead.start = ahead.start.max(run.end);
                }
            }
            OnFault::Noted => self.on_noted(&region, page),
            OnFault::Stale => self.on_stale(region, page, address),
        }
        plan
    }

    /// Brings in pages that the program waits for as if it had touched them; poisoned ones are
    /// tried again. Pages for which `is_ours` is false are left alone.
    pub(crate) fn demand(
        &mut self,
        region: &Arc<Region>,
        pages: PageRange,
        is_ours: impl Fn(PageIndex) -> bool,
    ) {
        let mut page = pages.start;
        while page < pages.end {
            let at = page;
            page += 1;
            if !is_ours(at) {
                continue;
            }
            let Some(region) = region.enter() else {
                return;
            };
            match region.words.apply(at, protocol::demand) {
                OnFault::Fill => {
                    let with = ReadAhead::up(page.until(pages.end));
                    page = self.begin(region, at, with).end;
                }
                OnFault::Noted => self.on_noted(&region, at),
                // The program may have given the page back to the kernel, and wants it now.
                OnFault::Stale => {
                    let address = region.address_of(at);
                    self.on_stale(region, at, address);
                }
            }
        }
    }

    fn on_noted(&mut self, region: &Arc<Region>, page: PageIndex) {
        self.completion.noted(region, page);
        self.shared.hand_over.noted(region, page);
    }

    /// Serves a fault on a page that is called resident or poisoned. Either the thread was served
    /// since, or the program took the page away. A look at a page that is there after all takes it
    /// out for a moment, so it is put off while the program forks.
    fn on_stale(&mut self, region: RegionGuard, page: PageIndex, touched: usize) {
        let shared = self.shared.clone();
        if !shared.mapper.is_present(touched) {
            let Some(entered) = shared.gate.enter_for_fill(self.worker) else {
                return self.put_off.push((region, page, touched));
            };
            match region.words.apply(page, protocol::absent) {
                OnAbsent::LookAgain => match shared.mapper.detach(&region, page.alone()) {
                    Ok(run) => {
                        let mut fill = Fill::new(region, run.pages(), UsageCount::Refault);
                        fill.unsaved = Some(entered.depart());
                        return self.completion.complete(fill, run);
                    }
                    Err(DetachError::Absent) => {
                        shared.frames.budget().lose(region.page_bytes());
                        self.begin(region, page, ReadAhead::NONE);
                        return;
                    }
                    Err(_) => {
                        (shared.installer).publish(&region, page.alone(), UsageCount::Refault);
                    }
                },
                OnAbsent::Fill => {
                    self.begin(region, page, ReadAhead::NONE);
                    return;
                }
                OnAbsent::Lose => {
                    // The program has dropped the poison. The page's bytes are as lost as before.
                    let lost = region.lost(page.alone()).pop();
                    let (_, error) = lost.expect("a lost page has its reason");
                    return self.completion.lose(&entered, &region, page, error);
                }
                OnAbsent::Stale => {}
            }
        }
        self.counters().stale_faults.bump();
        shared.mapper.wake(&region, page.alone());
    }

    /// Serves faults that were put off. Returns whether there were any.
    fn serve_put_off(&mut self) -> bool {
        if self.put_off.is_empty() || self.shared.gate.is_sealed() {
            return false;
        }
        for (region, page, touched) in mem::take(&mut self.put_off) {
            self.on_stale(region, page, touched);
        }
        true
    }

    /// Plans the read-ahead after a fault. `missed`: the page was not on its way.
    fn plan(&mut self, region: &Arc<Region>, page: PageIndex, missed: bool) -> ReadAhead {
        let advice = region.advice();
        if advice == Advice::Random {
            return ReadAhead::NONE;
        }
        let eager = advice == Advice::Sequential;
        let limit = self.window_pages(region);
        let (mut plan, passed) = self.streams.fault(region.id, page, limit, eager, missed);
        plan.ahead.end = plan.ahead.end.min(PageIndex(region.pages()));
        if plan.ahead.is_empty() && missed && limit > 0 {
            plan = ReadAhead::up(self.blank_behind(region, page));
            self.streams.came_along(plan.ahead);
        }
        if !passed.is_empty() {
            self.shared.victims.passed(region, passed);
        }
        plan
    }

    /// Returns the blank pages behind a blank one, up to the start of the next run, while there is
    /// ample room. These cost no READ: all are here before a fault on the next were served.
    fn blank_behind(&self, region: &Region, page: PageIndex) -> PageRange {
        let is_written = |page: &PageIndex| !region.store.is_blank(*page);
        let run_pages = region.run_pages.min(region.read_ahead.end() + 1);
        let end = PageIndex((page.0 / run_pages + 1) * run_pages);
        let behind = (page + 1).until(end.min(PageIndex(region.pages())));
        let budget = self.shared.frames.budget();
        if is_written(&page) || !budget.is_ample((1 + behind.len()) * region.page_bytes()) {
            return PageRange::NONE;
        }
        let behind = ReadAhead::up(behind).remote(region, run_pages);
        let end = behind.iter().find(is_written).unwrap_or(behind.end);
        behind.start.until(end)
    }

    /// Takes planned `pages` that are not read after all out of their stream.
    pub(crate) fn gave_up(&mut self, region: &Region, pages: PageRange) {
        self.streams.gave_up(region.id, pages);
    }

    /// Returns the upper bound of the pages of a region that move together.
    pub(crate) fn run_pages(&self, region: &Region) -> usize {
        let bytes = region.run_pages * region.page_bytes();
        (self.pace.run_bytes(bytes) / region.page_bytes()).max(1)
    }

    /// Returns the upper bound of the pages that a stream of the region reads ahead.
    fn window_pages(&self, region: &Region) -> usize {
        let run_bytes = self.run_pages(region) * region.page_bytes();
        let pages = self.pace.window_bytes(run_bytes) / region.page_bytes();
        pages.clamp(*region.read_ahead.start(), *region.read_ahead.end())
    }

    /// Starts to fill an owned page that a thread waits for, together with remote pages of `with`
    /// next to it. Returns the pages that are filled.
    pub(crate) fn begin(
        &mut self,
        region: RegionGuard,
        page: PageIndex,
        with: ReadAhead,
    ) -> PageRange {
        let mut waiting = PendingFill { region, page, with };
        // Serves fills in the order of their arrival.
        if self.backlog.is_empty() {
            match self.try_begin(waiting) {
                Ok(run) => return run,
                Err(refused) => waiting = refused,
            }
        }
        self.counters().starved.bump();
        self.backlog.push_back((waiting, Since::now()));
        let doors = &self.shared.doors;
        doors.call_evictors(self.shared.frames.budget());
        // Other fillers may hold frames back.
        doors.wake_fillers();
        page.alone()
    }

    fn try_begin(&mut self, waiting: PendingFill) -> Result<PageRange, PendingFill> {
        let PendingFill { region, page, with } = &waiting;
        let page = *page;
        let page_bytes = region.page_bytes();
        // The run has the page itself, too.
        let more = if with.is_next_to(region, page) {
            let most = self.run_pages(region);
            with.remote(region, most).len().min(most - 1)
        } else {
            0
        };
        let Some(mut frame) = self.shared.frames.for_demand(page_bytes, more) else {
            return Err(waiting);
        };
        let got = pages_in(&frame, page_bytes) - 1;
        let pages = if with.down {
            let below = own_ahead(region, (page - got).until(page), true);
            below.start.until(page + 1)
        } else {
            let above = own_ahead(region, (page + 1).and_on(got), false);
            page.until(above.end)
        };
        if let Some(rest) = keep_first(&mut frame, pages.len(), page_bytes) {
            self.shared.frames.release(rest, page_bytes);
        }
        let other_half = PageIndex(page.0 ^ 1);
        if other_half.0 < region.pages()
            && region.words.load(other_half).state() == PageState::Resident
        {
            self.counters().beside_resident.bump();
        }
        let usage = if with.ahead.is_empty() {
            UsageCount::Refault
        } else {
            UsageCount::Along
        };
        let fill = Fill::new(waiting.region, pages, usage);
        self.post(fill, frame);
        Ok(pages)
    }

    /// Posts the READ of a run.
    pub(crate) fn post(&mut self, fill: Fill, frame: A::Frame) {
        let page = fill.pages.start;
        let run = PageRun::new(page, frame, fill.region.page_bytes());
        let store = fill.region.store.clone();
        self.io.fill(&store, page, run, fill);
    }

    /// Begins a turn: retries faults that were put off and fills that wait for a frame. Returns
    /// whether anything was done.
    pub(crate) fn serve_backlog(&mut self) -> bool {
        self.io.begin_turn();
        let mut any = self.serve_put_off();
        if self.backlog.is_empty() {
            return any;
        }
        while let Some((waiting, since)) = self.backlog.pop_front() {
            match self.try_begin(waiting) {
                Ok(_) => {
                    let waited_ns = since.elapsed().as_nanos() as usize;
                    self.counters().waited_ns.add(waited_ns);
                    any = true;
                }
                Err(waiting) if since.elapsed() > self.deadline => {
                    self.starve(waiting, since);
                    any = true;
                }
                Err(waiting) => {
                    self.backlog.push_front((waiting, since));
                    return any;
                }
            }
        }
        // Not before all are served: a filler that holds frames back and looks in between must see
        // the starving.
        self.shared.frames.budget().end_starving();
        any
    }

    /// Fails a fill that found no frame for too long.
    fn starve(&mut self, waiting: PendingFill, since: Since) {
        let error = PageError::NoFrame {
            region: waiting.region.label(),
            page: waiting.page.number(),
            waited: since.elapsed(),
            unwritten: self.shared.unwritten.why(),
        };
        self.completion.fail(&waiting.region, waiting.page, error);
    }

    /// Hands requests that have ended to the completion. Returns whether there were any.
    pub(crate) fn poll(&mut self) -> bool {
        let any = self.io.poll();
        while let Some(ended) = self.io.take_ended() {
            self.settle(ended);
        }
        any
    }

    fn settle(&mut self, ended: RunCompletion<Fill, PageRun<A::Frame>>) {
        if ended.request.usage != UsageCount::Unwanted {
            let waited_ns = ended.timing.began.elapsed().as_nanos() as usize;
            self.counters().waited_ns.add(waited_ns);
        }
        if ended.outcome.wire_bytes > 0 {
            let bytes = ended.outcome.wire_bytes as usize;
            self.pace.arrived(bytes, ended.timing, Instant::now());
        }
        if ended.failed.is_empty() {
            self.completion.complete(ended.request, ended.frame);
        } else {
            self.settle_partly(ended);
        }
    }

    /// Settles a run of which some pages failed.
    fn settle_partly(&mut self, ended: RunCompletion<Fill, PageRun<A::Frame>>) {
        let RunCompletion {
            request,
            frame: run,
            failed,
            ..
        } = ended;
        let region = &request.region;
        let error = |page: PageIndex| failed.iter().find(|(failed, _)| *failed == page);
        run.cut(
            |page| error(page).is_some(),
            |run, is_lost| {
                let pages = run.pages();
                if is_lost {
                    let frames = &self.shared.frames;
                    frames.release(run.into_frame(), region.page_bytes());
                    for page in pages {
                        let (_, error) = error(page).expect("the stretch is of lost pages");
                        self.completion.fail(region, page, error.clone().into());
                    }
                } else {
                    let fill = Fill::new(region.again(), pages, request.usage);
                    self.completion.complete(fill, run);
                }
            },
        );
    }

    /// Gives up faults and fills of a closing region that still wait.
    pub(crate) fn give_up(&mut self, region: &Region) {
        self.put_off.retain(|(of, ..)| of.id != region.id);
        let (waiting, backlog): (VecDeque<_>, VecDeque<_>) = mem::take(&mut self.backlog)
            .into_iter()
            .partition(|(waiting, _)| waiting.region.id == region.id);
        self.backlog = backlog;
        if waiting.is_empty() {
            return;
        }
        for (waiting, since) in waiting {
            self.starve(waiting, since);
        }
        if self.backlog.is_empty() {
            self.shared.frames.budget().end_starving();
        }
    }

    /// Makes room for one fill of the region, so that it need not allocate.
    pub(crate) fn prepare(&mut self, region: &Region) {
        self.io.prepare(&region.store, region.run_pages);
        self.backlog.reserve(1);
    }

    /// True if runs ahead of need may start beside `runs` and `bytes` in flight.
    pub(crate) fn has_room_ahead(&self, runs: usize, bytes: usize) -> bool {
        let load = self.io.load();
        self.backlog.is_empty() && load.held == 0 && load.begun < runs && load.begun_bytes < bytes
    }

    /// True if nothing is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.io.in_flight() == 0 && self.backlog.is_empty() && self.put_off.is_empty()
    }

    /// Appends the descriptors to sleep on. Returns the time of the next turn at the latest, no
    /// later than `retry` from now while a fill waits for a frame or for the end of a fork.
    pub(crate) fn wait<'a>(
        &'a self,
        fds: &mut impl Extend<PollFd<'a>>,
        retry: Duration,
    ) -> Option<Instant> {
        let until = self.io.wait(fds);
        let waits = !self.backlog.is_empty() || !self.put_off.is_empty();
        let retry = waits.then(|| Instant::now() + retry);
        until.into_iter().chain(retry).min()
    }
}
