//! Steps of a filler until it owns a page.

use farpage_pager::protocol::{self, OnFault, PageState};

use super::{
    Access, Paging, Step, Twin,
    moves::Moves,
    world::{Asked, Bytes, EVICTOR, EVICTORS_FAULT, Mapping, Next, Thread, WORKER_NAMES, World},
};
use crate::explore::Label;

impl Moves<'_> {
    pub(super) fn of_filler(&mut self, me: usize) {
        let paging = self.paging;
        let worker = self.world.workers[me];
        let page = usize::from(worker.page);
        let there = self.world.pages[page].mapping != Mapping::Absent;
        match worker.next {
            Next::Idle => self.of_idle_filler(me),

            Next::Look if there => self.must(me, "looks: the page is there", |w| {
                w.go(
                    me,
                    if paging.is(Twin::NoWakeForStaleFault) {
                        Next::Idle
                    } else {
                        Next::Wake
                    },
                );
                Ok(())
            }),
            Next::Look if paging.forks => self.fill_at_the_gate(me),
            Next::ComeIn | Next::GoOut => self.in_the_gate(me),
            Next::Look => self.must(me, "looks: the page is not there", |w| {
                w.go(me, Next::Own);
                Ok(())
            }),
            Next::Own => self.must(me, "owns what has vanished", |w| {
                let word = w.pages[page].word;
                if let Some(mine) = protocol::vanished(word) {
                    if paging.is(Twin::LooksOnce) {
                        w.add_frames(paging, 1);
                        w.own(me, page, mine, Next::TakeFrame);
                    } else {
                        w.own(me, page, mine, Next::LookAgain);
                    }
                } else if let Some(mine) =
                    protocol::heal(word).filter(|_| !paging.is(Twin::OnlyWakesPoisoned))
                {
                    w.own(me, page, mine, Next::TakeFrame);
                } else if let Some(mine) = protocol::taken_up(word) {
                    w.own(me, page, mine, Next::Poison(Bytes::Lost));
                } else {
                    // Another owner was faster. The sleeper may have been served, or not: let it
                    // fault again.
                    w.go(me, Next::Wake);
                }
                Ok(())
            }),

            Next::LookAgain => self.must(me, "looks again as the owner", |w| {
                if there {
                    w.go(me, Next::AlreadyMapped);
                } else {
                    // The program gave the page's memory back, and with it the page's share of the
                    // budget.
                    w.add_frames(paging, 1);
                    w.go(me, Next::TakeFrame);
                }
                Ok(())
            }),
            _ => self.of_owner(me),
        }
    }

    fn of_idle_filler(&mut self, me: usize) {
        let paging = self.paging;
        let [first, second, third] = self.world.workers[me].batch;
        if first != 0 {
            let label = Label {
                actor: WORKER_NAMES[me],
                does: "serves a fault",
                page: usize::from(first) - 1,
            };
            return self.add(true, label, |w| {
                w.workers[me].batch = [second, third, 0];
                w.workers[me].page = first - 1;
                paging.on_fault(w, me)
            });
        }
        if self.world.unread != [0; 3] {
            self.must(me, "reads the faults", |w| {
                let pages = w.unread.map(|thread| match usize::from(thread) {
                    0 => 0,
                    _ if thread == EVICTORS_FAULT => w.workers[EVICTOR].page + 1,
                    thread => match paging.access(thread - 1, w.threads[thread - 1].done) {
                        Some(Access::Read(page) | Access::Write(page)) => page as u8 + 1,
                        _ => unreachable!("a sleeping thread has an access to do"),
                    },
                });
                w.workers[me].batch = pages;
                w.unread = [0; 3];
                Ok(())
            });
        }
        for thread in 0..2 {
            let Thread { done, asked, .. } = self.world.threads[thread];
            if let (Some(Access::Await(page)), Asked::Waiting) =
                (paging.access(thread, done), asked)
            {
                self.add(
                    true,
                    Label {
                        actor: WORKER_NAMES[me],
                        does: "takes on what is asked for",
                        page,
                    },
                    |w| {
                        w.threads[thread].asked = Asked::TakenOn;
                        let word = w.pages[page].word;
                        let (next, on_fault) = match protocol::heal(word) {
                            Some(mine) => (mine, OnFault::Fill),
                            None => protocol::fault(word),
                        };
                        w.pages[page].word = next;
                        if on_fault == OnFault::Fill {
                            w.own(me, page, next, Next::TakeFrame);
                        }
                        Ok(())
                    },
                );
            }
        }
        for page in 0..paging.pages {
            let word = self.world.pages[page].word;
            if paging.prefetches
                && let Some(mine) = protocol::prefetch(word)
            {
                self.may(me, "begins to prefetch", page, |w| {
                    w.own(me, page, mine, Next::TakeFrame);
                    Ok(())
                });
            }
            if (paging.fills_fail || paging.remaps_fail)
                && let Some(mine) = protocol::heal(word)
            {
                self.may(me, "begins to heal", page, |w| {
                    w.own(me, page, mine, Next::TakeFrame);
                    Ok(())
                });
            }
        }
    }
}

impl Paging {
    fn on_fault(&self, world: &mut World, me: usize) -> Step {
        let page = usize::from(world.workers[me].page);
        let word = world.pages[page].word;
        if self.is(Twin::IgnoresFaultWhileLeaving) && word.state() == PageState::Leaving {
            world.go(me, Next::Idle);
            return Ok(());
        }
        let (next, outcome) = protocol::fault(word);
        world.pages[page].word = next;
        world.go(
            me,
            match outcome {
                OnFault::Fill => Next::TakeFrame,
                OnFault::Noted => Next::Idle,
                OnFault::Stale => Next::Look,
            },
        );
        Ok(())
    }
}
