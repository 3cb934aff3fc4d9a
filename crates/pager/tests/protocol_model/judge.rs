//! Judgement of a world: the harm in it, if any.

use farpage_pager::protocol::PageState;

use super::{
    Harm, MADVISES, Paging, Step,
    world::{Bytes, EVICTOR, Fork, Mapping, Next, Page, Worker, World},
};

impl Paging {
    pub(super) fn what_is_wrong(&self, world: &World, at_rest: bool) -> Step {
        let (pages, workers) = (&world.pages[..self.pages], &world.workers);
        if at_rest {
            let is_left = |thread| self.access(thread, world.threads[thread].done).is_some();
            if (0..2).any(is_left) || workers.iter().any(|w| w.next != Next::Idle) {
                return Err(Harm::SleepsForever);
            }
            // A lost page is told by SIGBUS: no thread reads other bytes in its place.
            let is_lost = |p: &Page| p.word.state() == PageState::Lost && !p.is_mapped();
            let is_newest = |p: &Page| match p.mapping {
                Mapping::Mapped(version) => version == p.last,
                Mapping::Absent | Mapping::Poison => p.stored == p.last,
            };
            if !pages.iter().all(|p| is_newest(p) || is_lost(p)) {
                return Err(Harm::LostWrite);
            }
        }
        if let Some(budget) = self.frames {
            let mapped = pages.iter().filter(|p| p.is_mapped()).count();
            let held = workers.iter().filter(|w| w.next.has_a_frame()).count();
            if mapped + held > usize::from(budget) {
                return Err(Harm::OverBudget);
            }
        }
        if world.fork == Fork::Frozen && pages.iter().any(is_half_out) {
            return Err(Harm::HalfOut);
        }
        if !self.strict() {
            return Ok(());
        }
        for (number, page) in pages.iter().enumerate() {
            let state = page.word.state();
            let is_here = |w: &&Worker| usize::from(w.page) == number;
            let owners = |of: &[Worker]| {
                let here = of.iter().filter(is_here);
                here.filter(|w| w.next.owns_the_page()).count()
            };
            let of_lost = Bytes::Lost;
            let poisons = [
                Next::Poison(of_lost),
                Next::WakePoisoned(of_lost),
                Next::PublishPoisoned(of_lost),
            ];
            // A filler that poisons a lost page once more owns it as `Leaving`.
            let losing = workers[..EVICTOR].iter().filter(is_here);
            let losing = losing.filter(|w| poisons.contains(&w.next)).count();
            let fillers = owners(&workers[..EVICTOR]) - losing;
            let expected = (
                usize::from(state == PageState::Filling),
                usize::from(state == PageState::Leaving),
            );
            if (fillers, owners(workers) - fillers) != expected {
                return Err(Harm::Ownership);
            }
            let detached = workers.iter().filter(is_here);
            let detached = detached.filter(|w| w.next.has_detached_bytes()).count();
            if detached + usize::from(page.is_mapped()) > 1 {
                return Err(Harm::TwoCopies);
            }
            let agrees = match (state, page.mapping) {
                (PageState::Remote, mapping) => {
                    mapping == Mapping::Absent && page.stored == page.last
                }
                (PageState::Resident, Mapping::Mapped(version)) => version == page.last,
                (PageState::Poisoned, Mapping::Poison) => page.stored == page.last,
                (PageState::Resident | PageState::Poisoned, Mapping::Absent) => {
                    self.can(MADVISES) && page.stored == page.last
                }
                (PageState::Lost, Mapping::Poison) => true,
                (PageState::Lost, Mapping::Absent) => self.can(MADVISES),
                (PageState::Resident, Mapping::Poison)
                | (PageState::Poisoned | PageState::Lost, Mapping::Mapped(_)) => false,
                (PageState::Filling | PageState::Leaving, _) => true,
            };
            if !agrees {
                return Err(Harm::WordAndKernelDisagree);
            }
        }
        Ok(())
    }
}

/// True if a child that is made now could not have the page as it is.
fn is_half_out(page: &Page) -> bool {
    let state = page.word.state();
    let has_bytes = page.mapping == Mapping::Mapped(page.last) || page.stored == page.last;
    state == PageState::Leaving || page.protected || !has_bytes && state != PageState::Lost
}
