//! Steps of the evictor, which moves pages out or copies them, and of the flusher; and the gate.

use farpage_pager::protocol::{self, OnLeft, PageState};

use super::{
    COPIES, FAILS_REMAPS, FAILS_WRITES, FORKS, GIVES_UP, HOLDS, Harm, Moves, Paging, Twin,
    WORKER_NAMES,
    world::{
        EVICTOR, FLUSHER, Mapping,
        Next::{self, *},
        Version, Worker, World,
    },
};
use crate::explore::Label;

/// Version that the program writes when it overwrites a lost page.
const OVERWRITTEN: Version = 99;

impl Moves<'_> {
    pub(super) fn of_evictor(&mut self, me: usize) {
        let paging = self.paging;
        let Worker { next, page, .. } = self.world.workers[me];
        let page = usize::from(page);
        let (word, stored) = (self.world.pages[page].word, self.world.pages[page].stored);
        match next {
            Idle if paging.can(FORKS) => self.before_the_gate(me),
            ComeIn | Choose | GoOut => self.in_the_gate(me),
            Idle => self.of_idle_evictor(me),
            Detach => {
                let Mapping::Mapped(version) = self.world.pages[page].mapping else {
                    return self.goes(me, "finds no page", PublishRemoved);
                };
                self.must(me, "takes the page out", Compare(version), |w| {
                    w.pages[page].map(Mapping::Absent);
                    w.workers[me].inside &= !paging.is(Twin::CountsTheSearchAlone);
                });
                if paging.can(HOLDS) {
                    let does = "takes a part of the page out, the rest is held";
                    self.must(me, does, PutBack(version), |w| {
                        w.pages[page].map(Mapping::Absent);
                    });
                }
            }
            PutBack(version) => self.must(me, "puts the part back", PublishStayed, |w| {
                w.pages[page].map(Mapping::Mapped(version));
            }),
            PublishStayed => self.choose(me, "publishes stayed", |w| {
                let noted = paging.publish(w, page, PageState::Leaving, protocol::stayed)?;
                Ok(paging.wake_if(noted, Twin::NoWakeWhenStayed))
            }),
            PublishRemoved => self.choose(me, "publishes removed", |w| {
                let removed = |word| protocol::removed(word, 0).0;
                let noted = paging.publish(w, page, PageState::Leaving, removed)?;
                w.add_frame();
                Ok(paging.wake_if(noted, Twin::NoWakeWhenRemoved))
            }),
            Compare(version) => {
                let is_done = version == stored || paging.is(Twin::PublishesBeforeWrite);
                let next = match is_done {
                    true => paging.written(me, version),
                    false => Write(version),
                };
                self.goes(me, "compares with what the store holds", next);
                if word.wanted() {
                    self.goes(me, "sees the note", Reinstall(version));
                } else if self.world.is_closed() && me == EVICTOR {
                    self.goes(me, "sees that the program forks", Reinstall(version));
                }
            }
            Write(version) => {
                self.must(
                    me,
                    "writes to the store",
                    paging.written(me, version),
                    |w| {
                        w.pages[page].stored = version;
                    },
                );
                if paging.can(FAILS_WRITES) {
                    self.goes(me, "fails to write to the store", Reinstall(version));
                }
            }
            PublishLeft(version) => self.choose(me, "publishes left", |w| {
                let (next, outcome) = match word.state() {
                    PageState::Leaving => (paging.protocol.left)(word),
                    _ if paging.strict() => return Err(Harm::Ownership),
                    _ => (word, OnLeft::Gone),
                };
                w.pages[page].word = next;
                if outcome == OnLeft::TakeBack {
                    return Ok(Reinstall(version));
                }
                w.add_frame();
                Ok(match version == stored {
                    true => Idle,
                    false => LateWrite(version),
                })
            }),
            LateWrite(version) => self.must(me, "writes, too late", Idle, |w| {
                w.pages[page].stored = version;
            }),
            _ => self.of_copying_evictor(me),
        }
    }

    /// Copies a page out, without owning it while it does.
    fn of_copying_evictor(&mut self, me: usize) {
        let paging = self.paging;
        let Worker { next, page, .. } = self.world.workers[me];
        let page = usize::from(page);
        let mapping = self.world.pages[page].mapping;
        match next {
            Protect => self.must(me, "protects the page", CopyOut, |w| {
                w.pages[page].protected = w.pages[page].is_mapped();
            }),
            CopyOut => self.choose(me, "copies the page", |w| {
                Ok(match mapping {
                    Mapping::Mapped(version) if paging.is(Twin::CopiesWhatItOwns) => {
                        GiveBack(version)
                    }
                    Mapping::Mapped(version) => OwnCopied(version),
                    Mapping::Poison => Lift,
                    Mapping::Absent => {
                        w.fault_of_evictor();
                        Sleep
                    }
                })
            }),
            OwnCopied(version) => self.choose(me, "owns what it has copied", |w| {
                let Some(mine) = (paging.protocol.copied)(w.pages[page].word) else {
                    return Ok(Lift);
                };
                w.pages[page].word = mine;
                Ok(GiveBack(version))
            }),
            GiveBack(version) => {
                self.must(me, "gives the page's memory back", LiftLeft(version), |w| {
                    // The program has dropped the page after it was copied, and no thread has
                    // touched it since: it had left before.
                    if mapping == Mapping::Absent {
                        w.pages[page].last = version;
                    }
                    w.pages[page].map(Mapping::Absent);
                });
            }
            LiftLeft(version) => {
                self.must(me, "lifts the protection", Compare(version), |w| {
                    w.pages[page].protected = false;
                });
            }
            Lift => self.must(me, "lifts the protection", Idle, |w| {
                w.pages[page].protected = false;
            }),
            // Sleeps until it is woken.
            Sleep => {}
            _ => self.of_owner(me),
        }
    }

    /// Adds the beginnings of an evictor that is let in.
    fn of_idle_evictor(&mut self, me: usize) {
        let (paging, is_evictor) = (self.paging, me == EVICTOR);
        // Compulsory only while a filler waits for a frame.
        let waits = |worker: &Worker| worker.next == TakeFrame;
        let is_urgent = self.world.frames == Some(0) && self.world.workers.iter().any(waits);
        for page in 0..paging.pages {
            let word = self.world.pages[page].word;
            // The program does this; the evictor lends it its place.
            if paging.can(FAILS_REMAPS)
                && is_evictor
                && self.world.frames != Some(0)
                && let Some(mine) = protocol::taken_up(word)
            {
                let (actor, does) = (WORKER_NAMES[me], "overwrites the lost page");
                self.add(false, Label { actor, does, page }, |w| {
                    w.take_frame();
                    w.pages[page].last = OVERWRITTEN;
                    w.own(me, page, mine, Reinstall(OVERWRITTEN));
                    Ok(())
                });
            }
            let leaving = match is_evictor {
                true => (paging.protocol.leave)(word),
                false => protocol::borrow(word),
            };
            if paging.is(Twin::DetachesWithoutOwning) {
                if let Mapping::Mapped(version) = self.world.pages[page].mapping {
                    let (actor, does) = (WORKER_NAMES[me], "takes it out without owning it");
                    self.add(false, Label { actor, does, page }, |w| {
                        w.pages[page].mapping = Mapping::Absent;
                        w.own(me, page, word, Compare(version));
                        Ok(())
                    });
                }
            } else if paging.can(COPIES) && is_evictor {
                let marked = match paging.is(Twin::CopiesWhatItOwns) {
                    true => leaving,
                    false => protocol::copying(word),
                };
                if let Some(marked) = marked {
                    self.own(false, me, "begins to copy it", (page, marked), Protect);
                }
            } else if let Some(mine) = leaving {
                let compulsory = is_urgent && is_evictor;
                self.own(
                    compulsory,
                    me,
                    "begins to take it out",
                    (page, mine),
                    Detach,
                );
            }
        }
    }

    /// Adds the step of an evictor that sees something to take out.
    fn before_the_gate(&mut self, me: usize) {
        if self.world.is_closed() {
            return;
        }
        let others = self.out.len();
        self.of_idle_evictor(me);
        let begins = self.out.split_off(others);
        if begins.is_empty() {
            return;
        }
        let is_late = self.paging.is(Twin::LooksBeforeItCounts);
        let (actor, page) = (WORKER_NAMES[me], 0);
        let does = match is_late {
            true => "sees the gate open",
            false => "counts itself as inside",
        };
        let compulsory = begins.iter().any(|begins| begins.compulsory);
        self.add(compulsory, Label { actor, does, page }, |w| {
            w.workers[me].inside = !is_late;
            w.go(me, ComeIn);
            Ok(())
        });
    }

    /// Adds the step of a filler that does not see a page which is called resident. While the gate
    /// is sealed, the fault is put off: the filler would do something else.
    pub(super) fn fill_at_the_gate(&mut self, me: usize) {
        if !self.world.is_sealed() {
            let does = "counts itself as inside";
            self.must(me, does, ComeIn, |w| w.workers[me].inside = true);
        }
    }

    /// Adds the steps of a worker that counts as inside and owns nothing.
    pub(super) fn in_the_gate(&mut self, me: usize) {
        let (is_filler, world) = (me < EVICTOR, self.world);
        let let_in = if is_filler { Own } else { Choose };
        let leave = |w: &mut World| w.workers[me].inside = false;
        match world.workers[me].next {
            ComeIn if self.paging.is(Twin::LooksBeforeItCounts) => {
                let does = "counts itself as inside";
                self.must(me, does, let_in, |w| w.workers[me].inside = true);
            }
            ComeIn if is_filler && world.is_sealed() => {
                self.must(me, "is refused, and puts the fault off", Look, leave);
            }
            ComeIn if !is_filler && world.is_closed() => {
                self.goes(me, "is refused", Idle);
            }
            ComeIn => self.goes(me, "is let in", let_in),
            Choose => {
                let others = self.out.len();
                self.of_idle_evictor(me);
                // What has been begun must go on.
                (self.out[others..].iter_mut()).for_each(|begins| begins.compulsory = true);
                if self.out.len() == others {
                    self.goes(me, "finds nothing to take out", Idle);
                }
            }
            _ => self.must(me, "counts itself out", Idle, leave),
        }
    }
}

impl Paging {
    /// Returns the step that follows once a page's bytes are in the store.
    fn written(&self, worker: usize, version: Version) -> Next {
        if worker == FLUSHER && !self.can(GIVES_UP) && !self.is(Twin::FlushDrops) {
            Reinstall(version)
        } else {
            PublishLeft(version)
        }
    }
}
