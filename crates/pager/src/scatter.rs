//! Single pages of threads that serve their own faults, in and out by copying where moving them interrupts other threads: [`Scatter`].
//!
//! Which of the two is cheaper depends on who else runs: a page that moves makes all other processors that run the program forget an address, and takes several times as long
//! then. So both are timed now and then, and what costs less is done (`farpage_vm::AddressSpace::detach_scattered` says how copying goes).
//!
//! A copy that is mapped is memory that was not there before, and a page that was taken out by copying is memory no more, while the frames stay: so both go by what the
//! budget has room for ([`Frames::make_elsewhere`](crate::frames::Frames::make_elsewhere)), and where it has none pages move as ever.

use std::{
    io,
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, TryLockError,
        atomic::{AtomicU32, Ordering},
    },
    time::Instant,
};

use farpage_vm::{AddressSpace, SCATTERED_PAGES_MAX};
use smallvec::SmallVec;

use crate::{
    core::{Core, Heat},
    protocol,
    region::{CHUNK_PAGES, Region},
    sweep::Claim,
    victims::Walk,
};

/// Pages that leave together lie in so many at most: protecting them takes a look at each.
const WINDOW_PAGES: usize = 512;

/// Fewer are not worth three interruptions.
const PAGES_MIN: usize = 4;

/// One fill in so many is timed, and one in so many does what seems to cost more, to see whether it still does.
const TIMED: u32 = 8;
const TRIED: u32 = 64;

/// What moving and copying cost here, and who is taking pages out.
#[derive(Debug, Default)]
pub(crate) struct Scatter {
    /// Held by the one thread that takes pages out. Of the standard library: it never allocates, and is tried in a signal handler.
    turn: Mutex<()>,
    moved_in: Cost,
    copied_in: Cost,
    copied_out: Cost,
    #[cfg(test)]
    pretended: std::sync::OnceLock<bool>,
}

impl Scatter {
    /// Whether a page had better be copied.
    fn is_cheaper(&self) -> bool {
        #[cfg(test)]
        if let Some(&pretended) = self.pretended.get() {
            return pretended;
        }
        let (moved, copied) = (self.moved_in.get(), self.copied_in.get());
        let out = match self.copied_out.get() {
            0 => copied,
            out => out,
        };
        // Whoever moves in also moves out.
        copied > 0 && copied + out < 2 * moved
    }

    /// Nobody takes pages out before this is dropped. `None`: somebody does.
    pub(crate) fn try_turn(&self) -> Option<MutexGuard<'_, ()>> {
        match self.turn.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::WouldBlock) => None,
            Err(TryLockError::Poisoned(_)) => unreachable!("a panic in a handler ends the process"),
        }
    }

    /// Waits until the pages that are taken out now are out: what was pinned before is left alone from then on.
    pub(crate) fn wait(&self) {
        drop(self.turn.lock());
    }

    /// From now on copying is the cheaper way, or never is, whatever is measured.
    #[cfg(test)]
    pub(crate) fn pretend(&self, is_cheaper: bool) {
        self.pretended.set(is_cheaper).expect("said once");
    }
}

/// Nanoseconds per page, a mean in which older ones fade. 0: not known.
#[derive(Debug, Default)]
struct Cost(AtomicU32);

impl Cost {
    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed).into()
    }

    /// So many pages have been dealt with since then. `expected`: what is thought while nothing is known. Threads may overwrite each other's: there are more.
    fn learn(&self, since: Instant, pages: usize, expected: u64) {
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

    /// Is thought less of each time, until it is tried again.
    fn fade(&self) {
        let faded = self.get() * 15 / 16;
        self.0.store(faded as u32, Ordering::Relaxed);
    }
}

/// What came of it.
#[derive(Debug, Default)]
pub(crate) struct Scattered {
    /// Whether any page was taken out.
    pub(crate) any: bool,
    /// Pages that could not be copied, or were too few to be: moving takes them out, or says what is the matter with them.
    pub(crate) refused: SmallVec<[usize; SCATTERED_PAGES_MAX]>,
}

impl<A: AddressSpace> Core<A> {
    /// Maps a page that the caller, a thread that serves its own fault, owns, as [`install`](Self::install) does: by copying or moving, whichever is cheaper. `count`: how
    /// many it has mapped before.
    pub(crate) fn install_alone(
        &self,
        region: &Region,
        page: usize,
        frame: A::Frame,
        heat: Heat,
        count: u32,
        refused: impl FnMut(usize, A::Frame, io::Error),
    ) {
        let (is_timed, is_trial) = (count.is_multiple_of(TIMED), count % TRIED == 1);
        let is_cheaper = self.scatter.is_cheaper();
        if is_trial && !is_cheaper {
            self.scatter.copied_out.fade();
        }
        let copies = self.may_scatter(region)
            && is_cheaper != is_trial
            && self.frames.make_elsewhere(region.page_bytes(), is_trial);
        let since = (is_timed || is_trial).then(Instant::now);
        let (left, cost) = match copies {
            true => (
                self.install_copy(region, page, frame, heat),
                &self.scatter.copied_in,
            ),
            false => (Some(frame), &self.scatter.moved_in),
        };
        if let Some(frame) = left {
            self.install(region, page..page + 1, frame, heat, refused);
        }
        if let Some(since) = since {
            cost.learn(since, 1, 0);
        }
    }

    /// Maps a copy for which room was made. What comes back is to be moved: the page is refused.
    fn install_copy(
        &self,
        region: &Region,
        page: usize,
        frame: A::Frame,
        heat: Heat,
    ) -> Option<A::Frame> {
        region.touch(&(page..page + 1));
        region.words.apply(page, |w| (protocol::installing(w), ()));
        let (shard, address) = (
            region.shard_of(page, self.shards()),
            region.address_of(page),
        );
        if !self.space.install_copy(shard, address, &frame) {
            self.frames.unmake(region.page_bytes());
            return Some(frame);
        }
        self.arrived(region, page..page + 1, heat);
        if self.frames.replaced(frame, region.page_bytes()) {
            self.ring_fillers();
        }
        None
    }

    pub(crate) fn may_scatter(&self, region: &Region) -> bool {
        !region.layout.read_only && self.space.can_scatter(region.page_bytes())
    }

    /// Whether pages of the region had better leave by [`take_out_scattered`](Self::take_out_scattered), and there are frames to copy enough of them to. Pinned pages must not
    /// lie between others that do, since system calls may write to them at any time.
    pub(crate) fn scatters(&self, region: &Region) -> bool {
        self.may_scatter(region)
            && region.pinned() == 0
            && self.scatter.is_cheaper()
            && self.most_scattered(region) >= PAGES_MIN
    }

    /// So many pages may leave at once. Fills find some frames, too.
    fn most_scattered(&self, region: &Region) -> usize {
        let bytes = self.frames.excess().min(self.frames.room() / 2);
        (bytes as usize / region.page_bytes()).min(SCATTERED_PAGES_MAX)
    }

    /// Takes victims out by copying, those of `claim` and of some behind it, while there is need, and hands each to `taken_out`: it is the caller's then, as `Leaving`, and its region has
    /// been entered for it. `None`: somebody else makes room, and the claim is left to others.
    pub(crate) fn take_out_scattered(
        &self,
        claim: Claim,
        mut taken_out: impl FnMut(Range<usize>, A::Frame),
    ) -> Option<Scattered> {
        let region = claim.region.clone();
        let turn = self.scatter.try_turn();
        // Looked at again since: nobody who pins goes on before a turn that did not see it has ended.
        if turn.is_none() || region.pinned() > 0 || !region.enter() {
            Walk::new(self, &claim).end();
            return None;
        }
        let page_bytes = region.page_bytes();
        let most = self.most_scattered(&region);
        let mut frames = SmallVec::<[A::Frame; SCATTERED_PAGES_MAX]>::new();
        while frames.len() < most
            && let Some(frame) = self.frames.spare(page_bytes)
        {
            frames.push(frame);
        }
        let pages = self.own_scattered(claim, frames.len());
        let mut scattered = Scattered::default();
        let mut out = SmallVec::<[(usize, A::Frame); SCATTERED_PAGES_MAX]>::new();
        let mut rest = &pages[..];
        while rest.len() >= PAGES_MIN {
            let taken = self.copy_out(&region, rest, &mut frames);
            out.extend(rest.iter().copied().zip(frames.drain(..taken)));
            let Some(&refused) = rest.get(taken) else {
                rest = &[];
                break;
            };
            scattered.refused.push(refused);
            self.stay(&region, refused..refused + 1);
            rest = &rest[taken + 1..];
            if taken == 0 {
                break;
            }
        }
        drop(turn);
        // Too few to be copied, or none can be.
        scattered
            .refused
            .extend(rest.iter().take(PAGES_MIN).copied());
        for &page in rest {
            self.stay(&region, page..page + 1);
        }
        for frame in frames {
            self.release(frame, page_bytes);
        }
        scattered.any = !out.is_empty();
        for (page, frame) in out {
            region.enter_again();
            taken_out(page..page + 1, frame);
        }
        region.exit();
        Some(scattered)
    }

    /// Takes the leading ones of these pages, which are owned, out to the first of `frames`. Returns how many.
    fn copy_out(&self, region: &Region, pages: &[usize], frames: &mut [A::Frame]) -> usize {
        let shard = region.shard_of(pages[0], self.shards());
        let addresses: SmallVec<[usize; SCATTERED_PAGES_MAX]> =
            pages.iter().map(|&page| region.address_of(page)).collect();
        let since = Instant::now();
        let taken = self.space.detach_scattered(shard, &addresses, frames);
        let expected = self.scatter.copied_in.get();
        self.scatter.copied_out.learn(since, taken, expected);
        for &page in &pages[..taken] {
            region.count_out(&(page..page + 1));
        }
        self.frames.forget(taken * region.page_bytes());
        taken
    }

    /// Owns victims, `most` at most, that lie in one stripe and not too far from each other. Ascending.
    fn own_scattered(&self, claim: Claim, most: usize) -> SmallVec<[usize; SCATTERED_PAGES_MAX]> {
        let (region, way) = (claim.region.clone(), claim.way);
        let start = claim.pages.start;
        // Whole chunks, so that no claim of a sweep is cut.
        let end = (start / CHUNK_PAGES * CHUNK_PAGES) + WINDOW_PAGES;
        let window = region.in_one_stripe(&(start..end), false);
        let mut pages = SmallVec::new();
        let mut next = Some(claim);
        for _ in 0..WINDOW_PAGES / CHUNK_PAGES {
            let Some(claim) = next.take() else {
                break;
            };
            let is_near = Arc::ptr_eq(&claim.region, &region)
                && claim.way == way
                && window.contains(&claim.pages.start);
            let mut walk = Walk::new(self, &claim);
            while is_near
                && pages.len() < most
                && let Some(run) = walk.next(most - pages.len())
            {
                for page in run.filter(|page| window.contains(page)) {
                    if region.words.try_apply(page, protocol::leave).is_some() {
                        pages.push(page);
                        walk.took(1);
                    }
                }
            }
            walk.end();
            if is_near && pages.len() < most {
                next = self.claim();
            }
        }
        if let Some(claim) = next {
            Walk::new(self, &claim).end();
        }
        pages.sort_unstable();
        pages
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// One that took so many nanoseconds for each page.
    fn learn(cost: &Cost, nanos: u64) {
        let since = Instant::now() - Duration::from_nanos(nanos);
        cost.learn(since, 1, 0);
    }

    #[test]
    fn what_costs_less_is_done_and_what_went_badly_once_is_tried_again() {
        let scatter = Scatter::default();
        assert!(!scatter.is_cheaper(), "nothing is known");
        learn(&scatter.moved_in, 20_000_000);
        learn(&scatter.copied_in, 4_000_000);
        assert!(scatter.is_cheaper());
        (0..9).for_each(|_| learn(&scatter.copied_out, 400_000_000));
        assert!(!scatter.is_cheaper(), "taking out takes too long");
        let trials = (0..).take_while(|_| {
            scatter.copied_out.fade();
            !scatter.is_cheaper()
        });
        assert!(trials.count() < 60);
    }

    #[test]
    fn a_lost_processor_is_no_cost() {
        let cost = Cost::default();
        (0..20).for_each(|_| learn(&cost, 1_000_000));
        learn(&cost, 1_000_000_000);
        assert!((1_000_000..1_600_000).contains(&cost.get()), "{cost:?}");
    }
}
