//! Judgement of a world: the harm in it, if any.

use farpage_pager::protocol::PageState;

use super::{
    Harm, Paging, Step,
    world::{Bytes, EVICTOR, Fork, Mapping, Next, Page, Worker, World},
};

impl Paging {
    pub(super) fn what_is_wrong(&self, world: &World, at_rest: bool) -> Step {
        let pages = &world.pages[..self.pages];
        if at_rest {
            let slept =
                (0..2).any(|thread| self.access(thread, world.threads[thread].done).is_some());
            if slept || world.workers.iter().any(|w| w.next != Next::Idle) {
                return Err(Harm::SleepsForever);
            }
            let there = |p: &Page| {
                if let Mapping::Mapped(version) = p.mapping {
                    version
                } else {
                    p.stored
                }
            };
            // A lost page is told by SIGBUS: no thread reads other bytes in its place.
            let is_lost = |p: &Page| p.word.state() == PageState::Lost && !p.is_mapped();
            if pages.iter().any(|p| there(p) != p.last && !is_lost(p)) {
                return Err(Harm::LostWrite);
            }
        }
        if let Some(budget) = self.frames {
            let mapped = pages.iter().filter(|p| p.is_mapped()).count();
            let held = world
                .workers
                .iter()
                .filter(|w| w.next.has_a_frame())
                .count();
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
            let is_here = |w: &Worker| usize::from(w.page) == number;
            let owns = |w: &Worker| is_here(w) && w.next.owns_the_page();
            let loses = |w: &Worker| {
                use Next::*;
                let bytes = match w.next {
                    Poison(bytes) | WakePoisoned(bytes) | PublishPoisoned(bytes) => bytes,
                    _ => return false,
                };
                bytes == Bytes::Lost
            };

            let state = page.word.state();
            let fillers = world.workers[..EVICTOR].iter();
            let (losing, fillers) = fillers
                .filter(|w| owns(w))
                .partition::<Vec<&Worker>, _>(|w| loses(w));
            let evictors = world.workers[EVICTOR..].iter().filter(|w| owns(w)).count();
            let (fillers, evictors) = (fillers.len(), evictors + losing.len());
            let expected = (
                usize::from(state == PageState::Filling),
                usize::from(state == PageState::Leaving),
            );
            if (fillers, evictors) != expected {
                return Err(Harm::Ownership);
            }

            let detached = world
                .workers
                .iter()
                .filter(|w| is_here(w) && w.next.has_detached_bytes())
                .count();
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
                    self.madvises && page.stored == page.last
                }
                (PageState::Lost, Mapping::Poison) => true,
                (PageState::Lost, Mapping::Absent) => self.madvises,
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
