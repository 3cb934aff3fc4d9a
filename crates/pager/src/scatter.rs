//! Single pages, in and out as copies: [`Scatter`]. Used where moving interrupts other threads.
//!
//! A copy that is mapped is new memory. A page that was taken out by copying is memory no more,
//! while its frame stays. So both need room in the budget ([`FrameAllocator::for_copy`]), and where
//! it has none pages move as ever. Where pages leave by moving, frames pile up, and make room when
//! they are given up together.
//!
//! The rule: one thread at a time takes pages out by copying, since another would unprotect the
//! pages that it protects meanwhile.

use std::{
    mem,
    sync::{
        Arc, Mutex, MutexGuard, TryLockError,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Instant,
};

use farpage_store::{PageIndex, PageRange};
use farpage_vm::{AddressSpace, SCATTERED_PAGES_MAX};
use smallvec::SmallVec;

use crate::{
    PageError,
    budget::BudgetReservation,
    clock::FoundBy,
    frames::FrameAllocator,
    freeze::Entered,
    installer::{Installer, UsageCount},
    mapper::{Mapper, Scattered},
    protocol,
    region::{CHUNK_PAGES, Region, RegionGuard, chunk_of},
    run::PageRun,
    victims::{Candidates, Victims, Walk},
};

/// Pages that leave together lie within this span, because write-protecting walks every page of it.
const WINDOW_PAGES: usize = 512;

/// Lower bound of the pages that leave together: fewer are not worth the interruptions they share.
const PAGES_MIN: usize = 4;

/// Upper bound of the time that copying pages out takes, unless it waits for a page.
const HELD_UP_MS: u64 = 2;

/// Outcome of taking pages out by copying.
#[derive(Debug, Default)]
pub(crate) struct CopyOutcome {
    /// True if any page was taken out.
    pub(crate) any: bool,
    /// Pages that could not be copied, or were too few to be. Moving takes them out, or says what
    /// is the matter with them.
    pub(crate) refused: Scattered,
}

/// Copying of pages in and out, where that is cheaper than moving them.
pub(crate) struct Scatter<A: AddressSpace> {
    mapper: Arc<Mapper<A>>,
    frames: Arc<FrameAllocator<A>>,
    installer: Arc<Installer<A>>,
    victims: Arc<Victims<A>>,
    costs: Costs,
    /// Lock of the one thread that takes pages out. The standard library's lock never allocates,
    /// and is tried in a signal handler.
    turn: Mutex<()>,
    started: Instant,
    /// Start of the copying under way, in milliseconds since `started`; 0: none is.
    since_ms: AtomicU64,
}

impl<A: AddressSpace> Scatter<A> {
    pub(crate) fn new(
        mapper: Arc<Mapper<A>>,
        frames: Arc<FrameAllocator<A>>,
        installer: Arc<Installer<A>>,
        victims: Arc<Victims<A>>,
    ) -> Self {
        Scatter {
            mapper,
            frames,
            installer,
            victims,
            costs: Costs::default(),
            turn: Mutex::default(),
            started: Instant::now(),
            since_ms: AtomicU64::new(0),
        }
    }

    #[cfg(test)]
    pub(crate) fn costs(&self) -> &Costs {
        &self.costs
    }

    /// Lifts the protection of a mapped page after a write fault: the page came meanwhile, or is
    /// protected while others leave. Returns whether to try again: not while others leave.
    pub(crate) fn unprotect(&self, region: &Region, page: PageIndex) -> bool {
        if !region.copies_out {
            return true;
        }
        let turn = self.try_turn();
        if turn.is_some() {
            self.mapper.unprotect(region, page);
        }
        turn.is_some()
    }

    /// Waits until the pages that are being taken out are out. Pages pinned before this call are
    /// left alone from then on.
    pub(crate) fn wait(&self) {
        drop(self.turn.lock());
    }

    /// Maps owned pages as [`Installer::install`] does: one alone by copying or moving, whichever
    /// is cheaper. `alone`: number of pages that the caller has mapped so.
    pub(crate) fn install(
        &self,
        region: &Region,
        run: PageRun<A::Frame>,
        usage: UsageCount,
        alone: &mut u32,
        refused: impl FnMut(PageIndex, bool, PageError),
    ) {
        if run.len() > 1 || !region.copies_in {
            return self.installer.install(region, run, usage, refused);
        }
        *alone = alone.wrapping_add(1);
        let trial = self.costs.trial(*alone, region.copies_out);
        let room = (trial.copies)
            .then(|| self.room(region, trial.is_trial))
            .flatten();
        let since = trial.is_timed.then(Instant::now);
        let (rest, cost) = match room {
            Some(mut room) => {
                let page = run.first();
                self.installer.announce(region, page.alone());
                let copied = self.mapper.install_copy(region, run, &mut room);
                let rest = match copied {
                    Ok(frame) => {
                        self.installer.arrived(region, page.alone(), usage);
                        self.frames.copied(frame, region.page_bytes());
                        None
                    }
                    // The page is refused: moving it says why.
                    Err(run) => Some(run),
                };
                (rest, &self.costs.copied_in)
            }
            None => (Some(run), &self.costs.moved_in),
        };
        if let Some(run) = rest {
            self.installer.install(region, run, usage, refused);
        }
        if let Some(since) = since {
            cost.learn(since, 1, 0);
        }
    }

    /// Reserves room for a copy of one page.
    fn room(&self, region: &Region, is_trial: bool) -> Option<BudgetReservation<'_>> {
        let page_bytes = region.page_bytes();
        if region.copies_out {
            return self.frames.for_copy(page_bytes, 1, is_trial);
        }
        let room = self.frames.for_copy(page_bytes, 1, false);
        if room.is_some() {
            return room;
        }
        let since = Instant::now();
        let pages = self.frames.give_up_together(page_bytes, PAGES_MIN);
        if pages > 0 {
            self.costs.given_up.learn(since, pages, 0);
        }
        self.frames.for_copy(page_bytes, 1, false)
    }

    /// True if the candidates had better leave by [`take_out`](Self::take_out), and there are
    /// frames to copy enough of them to. Pages that streams have gone through lie in rows, which
    /// move at once. Pinned pages must not lie between others that are copied, since system calls
    /// may write to them at any time.
    pub(crate) fn is_better(&self, candidates: &Candidates) -> bool {
        let region = &candidates.region;
        candidates.found_by == FoundBy::ClockHand
            && region.copies_out
            && region.pinned() == 0
            && !self.is_held_up()
            && self.costs.copying_is_cheaper()
            && self.most(region) >= PAGES_MIN
    }

    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// True if the thread that takes pages out waits for one that the program dropped: others move.
    fn is_held_up(&self) -> bool {
        let since_ms = self.since_ms.load(Ordering::Relaxed);
        since_ms != 0 && self.now_ms() > since_ms + HELD_UP_MS
    }

    /// Returns the number of pages that may leave at once. Fills find some frames, too.
    fn most(&self, region: &Region) -> usize {
        let budget = self.frames.budget();
        let bytes = budget.excess().min(budget.room() / 2);
        (bytes as usize / region.page_bytes()).min(SCATTERED_PAGES_MAX)
    }

    fn try_turn(&self) -> Option<MutexGuard<'_, ()>> {
        match self.turn.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::WouldBlock) => None,
            Err(TryLockError::Poisoned(_)) => unreachable!("a panic in a handler ends the process"),
        }
    }

    /// Takes victims out by copying, those of `candidates` and of some behind them, while there is
    /// need. Hands each to `taken_out`, owned as `Leaving`. `None`: another thread takes pages out,
    /// or the region has pins or is closing; the candidates are left to others.
    pub(crate) fn take_out(
        &self,
        _inside: &Entered<'_>,
        candidates: Candidates,
        mut taken_out: impl FnMut(&RegionGuard, PageRun<A::Frame>),
    ) -> Option<CopyOutcome> {
        let turn = self.try_turn();
        // Looked at again: a thread that pins waits for the end of a turn that did not see its pin.
        let is_free = turn.is_some() && candidates.region.pinned() == 0;
        let Some(region) = is_free.then(|| candidates.region.enter()).flatten() else {
            Walk::new(&self.victims, &candidates).end();
            return None;
        };
        let page_bytes = region.page_bytes();
        let most = self.most(&region);
        let mut frames = SmallVec::<[A::Frame; SCATTERED_PAGES_MAX]>::new();
        while frames.len() < most
            && let Some(frame) = self.frames.spare(page_bytes)
        {
            frames.push(frame);
        }
        let pages = self.mark(candidates, frames.len());
        let mut outcome = CopyOutcome::default();
        let mut out = SmallVec::<[(PageIndex, A::Frame); SCATTERED_PAGES_MAX]>::new();
        let mut rest = &pages[..];
        self.since_ms.store(self.now_ms().max(1), Ordering::Relaxed);
        while rest.len() >= PAGES_MIN {
            let dealt_with = self.copy_out(&region, rest, &mut frames, &mut out);
            let Some(&refused) = rest.get(dealt_with) else {
                rest = &[];
                break;
            };
            outcome.refused.push(refused);
            rest = &rest[dealt_with + 1..];
            if dealt_with == 0 {
                break;
            }
        }
        self.since_ms.store(0, Ordering::Relaxed);
        drop(turn);
        // Too few to be copied, or none can be.
        outcome.refused.extend(rest.iter().take(PAGES_MIN).copied());
        for frame in frames {
            self.frames.release(frame, page_bytes);
        }
        outcome.any = !out.is_empty();
        for (page, frame) in out {
            taken_out(&region, PageRun::new(page, frame, page_bytes));
        }
        Some(outcome)
    }

    /// Takes out the leading ones of these marked pages, except those that have had an owner since.
    /// Moves their frames to `out`. Returns how many leading pages went well.
    fn copy_out(
        &self,
        region: &Region,
        pages: &[PageIndex],
        frames: &mut SmallVec<[A::Frame; SCATTERED_PAGES_MAX]>,
        out: &mut SmallVec<[(PageIndex, A::Frame); SCATTERED_PAGES_MAX]>,
    ) -> usize {
        let since = Instant::now();
        let mut owned = [false; SCATTERED_PAGES_MAX];
        let own = |at: usize| {
            owned[at] = region
                .words
                .try_apply(pages[at], protocol::copied)
                .is_some();
            owned[at]
        };
        let dealt_with = (self.mapper).detach_copies(region, pages, frames, own);
        let before = out.len();
        for (at, frame) in mem::take(frames).into_iter().enumerate() {
            if at < dealt_with && owned[at] {
                region.count_out(pages[at].alone());
                out.push((pages[at], frame));
            } else {
                frames.push(frame);
            }
        }
        let stays = |at: &usize| owned[*at];
        for at in (dealt_with..pages.len()).filter(stays) {
            self.victims.stay(region, pages[at].alone());
        }
        let taken = out.len() - before;
        self.costs.copied_out(since, taken);
        self.frames.budget().lose(taken * region.page_bytes());
        dealt_with
    }

    /// Marks victims, at most `most`, that lie in one stripe and within [`WINDOW_PAGES`].
    /// Ascending.
    fn mark(&self, candidates: Candidates, most: usize) -> Scattered {
        let (region, found_by) = (candidates.region.clone(), candidates.found_by);
        let window = window_of(&region, candidates.pages.start);
        let mut pages = Scattered::new();
        let mut next = Some(candidates);
        for _ in 0..WINDOW_PAGES / CHUNK_PAGES {
            let Some(candidates) = next.take() else {
                break;
            };
            let is_near = Arc::ptr_eq(&candidates.region, &region)
                && candidates.found_by == found_by
                && window.contains(candidates.pages.start);
            let mut walk = Walk::new(&self.victims, &candidates);
            while is_near
                && pages.len() < most
                && let Some(run) = walk.next(most - pages.len())
            {
                for page in run.iter().filter(|&page| window.contains(page)) {
                    if region.words.try_apply(page, protocol::copying).is_some() {
                        pages.push(page);
                        walk.took(1);
                    }
                }
            }
            walk.end();
            if is_near && pages.len() < most {
                next = self.victims.candidates();
            }
        }
        if let Some(candidates) = next {
            Walk::new(&self.victims, &candidates).end();
        }
        pages.sort_unstable();
        pages
    }
}

/// Returns the pages that may leave together with `page`. Whole chunks, so that the candidates of
/// the clock hand are not cut.
fn window_of(region: &Region, page: PageIndex) -> PageRange {
    let end = region.chunk(chunk_of(page)).start + WINDOW_PAGES;
    region.in_one_stripe(page.until(end), false)
}

/// One fill in `TIMED` is timed. One in `TRIED` uses the method that currently looks slower, so
/// that a change is noticed.
const TIMED: u32 = 8;
const TRIED: u32 = 64;

/// Costs of moving and of copying a page on this machine, now, per page, in and out.
///
/// Other load decides which of the two is cheaper. A page that moves makes all other processors
/// that run the program forget an address, and then takes several times as long. So both ways are
/// timed now and then, and the cheaper one is used.
///
/// A page that leaves by moving leaves a frame behind, which a copy coming in does not take. So
/// such a copy costs as much more as giving a frame up does.
#[derive(Debug, Default)]
pub(crate) struct Costs {
    pub(crate) moved_in: Cost,
    pub(crate) copied_in: Cost,
    pub(crate) copied_out: Cost,
    pub(crate) given_up: Cost,
    #[cfg(test)]
    pretended: std::sync::OnceLock<bool>,
}

/// Method of one fill.
pub(crate) struct FillMethod {
    /// True if the page is copied: copying looks cheaper, or is tried.
    pub(crate) copies: bool,
    /// True if the method that currently looks slower is tried.
    pub(crate) is_trial: bool,
    /// True if the fill is timed.
    pub(crate) is_timed: bool,
}

impl Costs {
    /// True if a page had better be copied in, where pages leave by moving.
    pub(crate) fn copying_in_is_cheaper(&self) -> bool {
        #[cfg(test)]
        if let Some(&pretended) = self.pretended.get() {
            return pretended;
        }
        let (moved, copied) = (self.moved_in.get(), self.copied_in.get());
        copied > 0 && copied + self.given_up.get() < moved
    }

    /// True if a page had better be copied in and out.
    pub(crate) fn copying_is_cheaper(&self) -> bool {
        #[cfg(test)]
        if let Some(&pretended) = self.pretended.get() {
            return pretended;
        }
        let (moved, copied) = (self.moved_in.get(), self.copied_in.get());
        let out = match self.copied_out.get() {
            0 => copied,
            out => out,
        };
        // Pages that move in also move out.
        copied > 0 && copied + out < 2 * moved
    }

    /// Chooses the method of the fill that a thread makes after `count` others. `both`: pages may
    /// leave by copying, too.
    pub(crate) fn trial(&self, count: u32, both: bool) -> FillMethod {
        let is_trial = count % TRIED == 1;
        let is_cheaper = if both {
            self.copying_is_cheaper()
        } else {
            self.copying_in_is_cheaper()
        };
        if both && is_trial && !is_cheaper {
            self.copied_out.fade();
        }
        FillMethod {
            copies: is_cheaper != is_trial,
            is_trial,
            is_timed: is_trial || count.is_multiple_of(TIMED),
        }
    }

    /// Learns from `pages` that were copied out `since`.
    pub(crate) fn copied_out(&self, since: Instant, pages: usize) {
        self.copied_out.learn(since, pages, self.copied_in.get());
    }

    /// Fixes the answer for tests: copying is the cheaper way, or never is, whatever is measured.
    #[cfg(test)]
    pub(crate) fn pretend(&self, is_cheaper: bool) {
        self.pretended.set(is_cheaper).expect("said once");
    }
}

/// Nanoseconds per page, a mean in which older values fade. 0: not known.
#[derive(Debug, Default)]
pub(crate) struct Cost(AtomicU32);

impl Cost {
    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed).into()
    }

    /// Learns from `pages` that took the time `since`. `expected`: the value used while none is
    /// known. Threads may overwrite each other's values: more follow.
    pub(crate) fn learn(&self, since: Instant, pages: usize, expected: u64) {
        let nanos = since.elapsed().as_nanos() as u64 / pages.max(1) as u64;
        let mean = match (self.get(), expected) {
            (0, 0) => nanos,
            (0, mean) | (mean, _) => {
                // A thread that lost its processor meanwhile tells nothing.
                (mean * 7 + nanos.min(mean * 4)) / 8
            }
        };
        self.0
            .store(mean.clamp(1, u32::MAX.into()) as u32, Ordering::Relaxed);
    }

    /// Lowers a cost that looks too high, a little each time, until its method is tried again.
    fn fade(&self) {
        let faded = self.get() * 15 / 16;
        self.0.store(faded as u32, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Learns a page that took `nanos` nanoseconds.
    fn learn(cost: &Cost, nanos: u64) {
        let since = Instant::now() - Duration::from_nanos(nanos);
        cost.learn(since, 1, 0);
    }

    #[test]
    fn what_costs_less_is_done_and_what_went_badly_once_is_tried_again() {
        let costs = Costs::default();
        assert!(!costs.copying_is_cheaper(), "nothing is known");
        learn(&costs.moved_in, 20_000_000);
        learn(&costs.copied_in, 4_000_000);
        assert!(costs.copying_is_cheaper());
        (0..9).for_each(|_| learn(&costs.copied_out, 400_000_000));
        assert!(!costs.copying_is_cheaper(), "taking out takes too long");
        let trials = (0..).take_while(|_| {
            costs.copied_out.fade();
            !costs.copying_is_cheaper()
        });
        assert!(trials.count() < 60);
    }

    #[test]
    fn a_copy_costs_a_frame_that_is_given_up() {
        let costs = Costs::default();
        assert!(
            costs.trial(1, false).copies,
            "nothing is known: it is tried"
        );
        learn(&costs.moved_in, 20_000_000);
        learn(&costs.copied_in, 12_000_000);
        assert!(costs.trial(0, false).copies);
        learn(&costs.given_up, 12_000_000);
        assert!(!costs.trial(0, false).copies && costs.trial(0, true).copies);
    }

    #[test]
    fn a_lost_processor_is_no_cost() {
        let cost = Cost::default();
        (0..20).for_each(|_| learn(&cost, 1_000_000));
        learn(&cost, 1_000_000_000);
        assert!((1_000_000..1_600_000).contains(&cost.get()), "{cost:?}");
    }
}
