//! Steps of a filler, and of any worker that maps a page which it owns.

use farpage_pager::protocol::{self, OnAbsent, OnFailed, OnFault, PageState};

use super::{
    Access, FAILS_FILLS, FAILS_REMAPS, FORKS, Harm, Moves, PREFETCHES, Twin, WORKER_NAMES,
    installed,
    world::{Asked, Bytes, EVICTOR, Mapping, Next::*, Thread, Worker, World},
};
use crate::explore::Label;

impl Moves<'_> {
    pub(super) fn of_filler(&mut self, me: usize) {
        let paging = self.paging;
        let Worker { next, page, .. } = self.world.workers[me];
        let page = usize::from(page);
        let is_there = self.world.pages[page].mapping != Mapping::Absent;
        match next {
            Idle => self.of_idle_filler(me),
            Look if is_there => {
                let next = match paging.is(Twin::NoWakeForStaleFault) {
                    true => Idle,
                    false => Wake,
                };
                self.goes(me, "looks: the page is there", next);
            }
            Look if paging.can(FORKS) => self.fill_at_the_gate(me),
            ComeIn | GoOut => self.in_the_gate(me),
            Look => self.goes(me, "looks: the page is not there", Own),
            Own => self.choose(me, "owns what has vanished", |w| {
                let (next, outcome) = (paging.protocol.absent)(w.pages[page].word);
                w.pages[page].word = next;
                Ok(match outcome {
                    OnAbsent::LookAgain if paging.is(Twin::LooksOnce) => {
                        w.add_frame();
                        TakeFrame
                    }
                    OnAbsent::LookAgain => LookAgain,
                    OnAbsent::Fill => TakeFrame,
                    OnAbsent::Lose => Poison(Bytes::Lost),
                    OnAbsent::Stale => Wake,
                })
            }),
            LookAgain if is_there => {
                self.goes(me, "looks again as the owner", AlreadyMapped);
            }
            // The program gave the page's memory back, and with it the page's share of the budget.
            LookAgain => {
                self.must(me, "looks again as the owner", TakeFrame, World::add_frame);
            }
            _ => self.of_owner(me),
        }
    }

    fn of_idle_filler(&mut self, me: usize) {
        let (paging, actor) = (self.paging, WORKER_NAMES[me]);
        let [first, second, third] = self.world.workers[me].batch;
        if first != 0 {
            let (does, page) = ("serves a fault", usize::from(first) - 1);
            return self.add(true, Label { actor, does, page }, |w| {
                w.workers[me].batch = [second, third, 0];
                w.workers[me].page = first - 1;
                let (next, outcome) = (paging.protocol.fault)(w.pages[page].word);
                w.pages[page].word = next;
                let next = match outcome {
                    OnFault::Fill => TakeFrame,
                    OnFault::Noted => Idle,
                    OnFault::Stale => Look,
                };
                w.go(me, next);
                Ok(())
            });
        }
        if self.world.unread != [0; 3] {
            self.must(me, "reads the faults", Idle, |w| {
                w.workers[me].batch = w.read_faults();
            });
        }
        for thread in 0..2 {
            let Thread { done, asked, .. } = self.world.threads[thread];
            let access = paging.access(thread, done);
            let (Some(Access::Await(page)), Asked::Waiting) = (access, asked) else {
                continue;
            };
            let does = "takes on what is asked for";
            self.add(true, Label { actor, does, page }, |w| {
                w.threads[thread].asked = Asked::TakenOn;
                let (next, outcome) = protocol::demand(w.pages[page].word);
                w.pages[page].word = next;
                if outcome == OnFault::Fill {
                    w.workers[me].page = page as u8;
                    w.go(me, TakeFrame);
                }
                Ok(())
            });
        }
        for page in 0..paging.pages {
            let word = self.world.pages[page].word;
            let prefetched = protocol::prefetch(word).filter(|_| paging.can(PREFETCHES));
            let heals = paging.can(FAILS_FILLS | FAILS_REMAPS);
            let healed = protocol::heal(word).filter(|_| heals);
            let begins = [
                ("begins to prefetch", prefetched),
                ("begins to heal", healed),
            ];
            for (does, mine) in begins {
                if let Some(mine) = mine {
                    self.own(false, me, does, (page, mine), TakeFrame);
                }
            }
        }
    }

    /// Adds the step of an owner that brings a page in: a filler, or a worker that puts it back.
    pub(super) fn of_owner(&mut self, me: usize) {
        let paging = self.paging;
        let Worker { next, page, .. } = self.world.workers[me];
        let page = usize::from(page);
        let (word, stored) = (self.world.pages[page].word, self.world.pages[page].stored);
        let is_mapped = self.world.pages[page].is_mapped();
        // A filler that poisons a lost page once more owns it as `Leaving`.
        let owned = match me < EVICTOR {
            true => PageState::Filling,
            false => PageState::Leaving,
        };
        match next {
            TakeFrame if self.world.frames == Some(0) => {}
            TakeFrame => self.must(me, "takes a frame", Fetch, World::take_frame),
            Fetch => {
                self.choose(me, "reads from the store", |w| {
                    if !paging.is(Twin::PublishesBeforeInstall) {
                        return Ok(Install(stored));
                    }
                    paging.publish(w, page, PageState::Filling, installed)?;
                    Ok(LateInstall(stored))
                });
                if paging.can(FAILS_FILLS) {
                    self.goes(me, "fails to read from the store", PublishFailed);
                }
            }
            // The frame's share of the budget stands for the mapped page from now on.
            Install(_) | LateInstall(_) if is_mapped => {
                self.goes(me, "finds the page mapped, drops the frame", AlreadyMapped);
            }
            Reinstall(_) if is_mapped => {
                self.choose(me, "finds the page mapped already", |_| {
                    Err(Harm::MappedTwice)
                });
            }
            Install(version) | Reinstall(version) | LateInstall(version) => {
                if paging.can(FAILS_REMAPS) && matches!(next, Reinstall(_)) {
                    self.choose(me, "cannot map the page again", |w| {
                        // A page that was lost before stays lost, whatever it should have become.
                        let was_lost = w.pages[page].mapping == Mapping::Poison;
                        if version == stored && !was_lost {
                            return Ok(PublishFailed);
                        }
                        w.add_frame();
                        if paging.is(Twin::CallsLostRemote) && !word.wanted() {
                            w.pages[page].word = protocol::removed(word, 0).0;
                            return Ok(Idle);
                        }
                        Ok(Poison(Bytes::Lost))
                    });
                }
                self.must(me, "maps the page", WakeInstalled, |w| {
                    w.pages[page].map(Mapping::Mapped(version));
                });
            }
            AlreadyMapped if paging.is(Twin::NoWakeWhenAlreadyMapped) => {
                self.choose(me, "publishes installed and wakes nobody", |w| {
                    paging.publish(w, page, PageState::Filling, installed)?;
                    Ok(Idle)
                });
            }
            AlreadyMapped | WakeInstalled => {
                self.must(me, "wakes", PublishInstalled, |w| w.wake(page));
            }
            PublishInstalled => self.choose(me, "publishes installed", |w| {
                let noted = paging.publish(w, page, owned, installed)?;
                Ok(paging.wake_if(noted, Twin::NoWakeForLateNote))
            }),
            PublishFailed => self.choose(me, "publishes the failure", |w| {
                w.add_frame();
                if word.state() != owned {
                    return Err(Harm::Ownership);
                }
                let (next, outcome) = (paging.protocol.fill_failed)(word);
                w.pages[page].word = next;
                Ok(match outcome {
                    OnFailed::Dropped => Idle,
                    OnFailed::MustPoison => Poison(Bytes::Stored),
                })
            }),
            Poison(_) if is_mapped => {
                self.goes(me, "cannot poison a mapped page", AlreadyMapped);
            }
            Poison(bytes) => self.must(me, "poisons", WakePoisoned(bytes), |w| {
                w.pages[page].mapping = Mapping::Poison;
            }),
            WakePoisoned(bytes) => {
                self.must(me, "wakes", PublishPoisoned(bytes), |w| w.wake(page));
            }
            PublishPoisoned(bytes) => self.choose(me, "publishes poisoned or lost", |w| {
                let noted = match bytes {
                    Bytes::Lost => {
                        paging.publish(w, page, PageState::Leaving, paging.protocol.lost)?
                    }
                    Bytes::Stored => paging.publish(w, page, owned, protocol::poisoned)?,
                };
                Ok(paging.wake_if(noted, Twin::NoWakeForLateNote))
            }),
            Wake => self.must(me, "wakes", Idle, |w| w.wake(page)),
            other => unreachable!("{} does not take the step {other:?}", WORKER_NAMES[me]),
        }
    }
}
