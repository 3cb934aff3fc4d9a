//! Steps of the program: its threads touch pages, pin them and drop them, and one forks.

use farpage_pager::protocol::{self, PageState};

use super::{
    Access, FAILS_FILLS, FAILS_REMAPS, Harm, Moves, Step, Twin,
    world::{Asked, FLUSHER, Fork, Mapping, Thread, Version, World},
};
use crate::explore::Label;

impl Moves<'_> {
    fn of(
        &mut self,
        thread: usize,
        does: &'static str,
        page: usize,
        step: impl FnOnce(&mut World) -> Step,
    ) {
        let actor = ["thread 0", "thread 1"][thread];
        self.add(true, Label { actor, does, page }, step);
    }

    /// Adds a thread's touch of its next page, or its falling asleep on it: the kernel checks and
    /// enqueues in one step.
    pub(super) fn of_thread(&mut self, thread: usize) {
        let paging = self.paging;
        let Thread { done, asleep, .. } = self.world.threads[thread];
        let Some(access) = paging.access(thread, done).filter(|_| asleep == 0) else {
            return;
        };
        let (page, is_write) = match access {
            Access::Read(page) => (page, false),
            Access::Write(page) => (page, true),
            Access::Pin(page) => return self.pin(thread, page),
            Access::Await(page) => return self.wait_for(thread, page),
            Access::Unpin(page) => return self.unpin(thread, page),
        };
        let does = if is_write { "writes" } else { "reads" };
        let flusher = &self.world.workers[FLUSHER];
        let borrowed = usize::from(flusher.page) == page && flusher.next.owns_the_page();
        let has_to_be_there = paging.relies_on(thread, done, page) && !borrowed;
        match self.world.pages[page].mapping {
            // The thread sleeps until the protection is lifted.
            Mapping::Mapped(_) if is_write && self.world.pages[page].protected => {}
            Mapping::Mapped(seen) => self.of(thread, does, page, |w| {
                w.threads[thread].done += 1;
                let page = &mut w.pages[page];
                if is_write {
                    page.last = 1 + 2 * done + thread as Version;
                    page.mapping = Mapping::Mapped(page.last);
                } else if seen != page.last {
                    return Err(Harm::WrongRead);
                }
                Ok(())
            }),
            _ if has_to_be_there => self.of(thread, does, page, |_| Err(Harm::PinBroken)),
            Mapping::Poison => self.of(thread, "gets SIGBUS", page, |w| {
                w.threads[thread].done += 1;
                let may_fail = paging.can(FAILS_FILLS | FAILS_REMAPS);
                may_fail.then_some(()).ok_or(Harm::NeedlessSigbus)
            }),
            Mapping::Absent => self.of(thread, "faults and sleeps", page, |w| {
                w.fault(thread, page);
                Ok(())
            }),
        }
    }

    fn pin(&mut self, thread: usize, page: usize) {
        self.of(thread, "pins", page, |w| {
            let word = &mut w.pages[page].word;
            *word = protocol::pin(*word).expect("few threads pin");
            w.threads[thread].done += 1;
            Ok(())
        });
    }

    fn unpin(&mut self, thread: usize, page: usize) {
        let paging = self.paging;
        self.of(thread, "unpins", page, |w| {
            let word = &mut w.pages[page].word;
            match (paging.protocol.unpin)(*word) {
                Some(less) => *word = less,
                None if paging.strict() => return Err(Harm::Ownership),
                None => {}
            }
            w.threads[thread].done += 1;
            Ok(())
        });
    }

    /// Adds the rest of a pin: ask a filler, look at the word until it is resident, ask again if
    /// the fill came to nothing.
    fn wait_for(&mut self, thread: usize, page: usize) {
        let paging = self.paging;
        let asked = self.world.threads[thread].asked;
        let ask = |w: &mut World| {
            w.threads[thread].asked = Asked::Waiting;
            Ok(())
        };
        let pinned = |w: &mut World| {
            w.threads[thread].done += 1;
            w.threads[thread].asked = Asked::NotYet;
            Ok(())
        };
        match (self.world.pages[page].word.state(), asked) {
            (_, Asked::NotYet) => self.of(thread, "asks for the page", page, ask),
            (PageState::Resident, _) => self.of(thread, "sees it resident", page, pinned),
            (PageState::Leaving, _) if paging.is(Twin::PinsWhatLeaves) => {
                self.of(thread, "sees it leaving", page, pinned);
            }
            (PageState::Remote, Asked::TakenOn) => self.of(thread, "asks once more", page, ask),
            (PageState::Poisoned, Asked::TakenOn) | (PageState::Lost, _) => {
                self.of(thread, "gives the pin up", page, |w| {
                    let word = &mut w.pages[page].word;
                    *word = protocol::unpin(*word).ok_or(Harm::Ownership)?;
                    w.threads[thread].done = paging.program[thread].len() as u8;
                    w.threads[thread].asked = Asked::NotYet;
                    Ok(())
                })
            }
            _ => {}
        }
    }

    /// Adds the program's dropping of a page.
    pub(super) fn of_madvise(&mut self) {
        for page in 0..self.paging.pages {
            if self.world.pages[page].mapping == Mapping::Absent {
                continue;
            }
            let (actor, does) = ("the program", "drops it with madvise");
            self.add(false, Label { actor, does, page }, |w| {
                let page = &mut w.pages[page];
                // With poison go no bytes: a page that is lost stays lost.
                if page.is_mapped() {
                    page.last = page.stored;
                }
                page.map(Mapping::Absent);
                Ok(())
            });
        }
    }

    /// Adds the next step of the thread that forks.
    pub(super) fn of_fork(&mut self) {
        let paging = self.paging;
        let at_once = paging.is(Twin::ForksAtOnce);
        let is_empty = !self.world.workers.iter().any(|worker| worker.inside);
        let (does, next) = match self.world.fork {
            Fork::NotYet if paging.is(Twin::SealsAtOnce) => ("seals the gate", Fork::Sealed),
            Fork::NotYet => ("closes the gate", Fork::Closed),
            Fork::Closed if is_empty || at_once => ("sees nothing inside", Fork::Quiet),
            Fork::Quiet => ("seals the gate", Fork::Sealed),
            Fork::Sealed if is_empty || at_once || paging.is(Twin::WaitsForReclaimAlone) => {
                ("sees nothing inside again", Fork::Frozen)
            }
            Fork::Frozen => ("has forked, and opens the gate", Fork::Done),
            Fork::Closed | Fork::Sealed | Fork::Done => return,
        };
        let (actor, page) = ("the forking thread", 0);
        self.add(
            self.world.fork != Fork::NotYet,
            Label { actor, does, page },
            |w| {
                w.fork = next;
                Ok(())
            },
        );
    }
}
