//! Evictor, which moves pages out or copies them, and flusher.

use farpage_pager::protocol::{self, OnLeft, PageState};

use super::{
    Harm, Paging, Twin,
    moves::Moves,
    world::{
        EVICTOR, EVICTORS_FAULT, FLUSHER, Mapping, Next, OVERWRITTEN, Page, Version, WORKER_NAMES,
        World, push,
    },
};
use crate::explore::Label;

impl Moves<'_> {
    pub(super) fn of_evictor(&mut self, me: usize) {
        let paging = self.paging;
        let worker = self.world.workers[me];
        let page = usize::from(worker.page);
        let Page {
            word,
            mapping,
            stored,
            ..
        } = self.world.pages[page];
        match (worker.next, mapping) {
            (Next::Idle, _) if paging.forks => self.before_the_gate(me),
            (Next::ComeIn | Next::Choose | Next::GoOut, _) => self.in_the_gate(me),
            (Next::Idle, _) => self.of_idle_evictor(me),
            (
                Next::Protect
                | Next::CopyOut
                | Next::Sleep
                | Next::OwnCopied(_)
                | Next::Lift
                | Next::GiveBack(_)
                | Next::LiftLeft(_),
                _,
            ) => self.of_copying_evictor(me),
            (Next::Detach, Mapping::Mapped(version)) => {
                self.must(me, "takes the page out", |w| {
                    w.map(page, Mapping::Absent);
                    w.workers[me].inside &= !paging.is(Twin::CountsTheSearchAlone);
                    w.go(me, Next::Compare(version));
                    Ok(())
                });
                if paging.holds {
                    self.must(me, "takes a part of the page out, the rest is held", |w| {
                        w.map(page, Mapping::Absent);
                        w.go(me, Next::PutBack(version));
                        Ok(())
                    });
                }
            }
            (Next::Detach, _) => self.must(me, "finds no page to take out", |w| {
                w.go(me, Next::PublishRemoved);
                Ok(())
            }),
            (Next::PutBack(version), _) => self.must(me, "puts the part back", |w| {
                w.map(page, Mapping::Mapped(version));
                w.go(me, Next::PublishStayed);
                Ok(())
            }),
            (Next::PublishStayed, _) => self.must(me, "publishes stayed", |w| {
                let noted = paging.publish(w, page, PageState::Leaving, protocol::stayed)?;
                w.go(
                    me,
                    if noted && !paging.is(Twin::NoWakeWhenStayed) {
                        Next::Wake
                    } else {
                        Next::Idle
                    },
                );
                Ok(())
            }),
            (Next::PublishRemoved, _) => self.must(me, "publishes removed", |w| {
                let noted = paging.publish(w, page, PageState::Leaving, |word| {
                    protocol::removed(word, 0).0
                })?;
                w.add_frames(paging, 1);
                w.go(
                    me,
                    if noted && !paging.is(Twin::NoWakeWhenRemoved) {
                        Next::Wake
                    } else {
                        Next::Idle
                    },
                );
                Ok(())
            }),
            (Next::Compare(version), _) => {
                let leaves = paging.written(me, version);
                self.must(me, "compares with what the store holds", |w| {
                    let late = paging.is(Twin::PublishesBeforeWrite);
                    w.go(
                        me,
                        if version == stored || late {
                            leaves
                        } else {
                            Next::Write(version)
                        },
                    );
                    Ok(())
                });
                if word.wanted() {
                    self.must(me, "sees the note", |w| {
                        w.go(me, Next::Reinstall(version));
                        Ok(())
                    });
                } else if self.world.is_closed() && me == EVICTOR {
                    self.must(me, "sees that the program forks", |w| {
                        w.go(me, Next::Reinstall(version));
                        Ok(())
                    });
                }
            }
            (Next::Write(version), _) => {
                let leaves = paging.written(me, version);
                self.must(me, "writes to the store", |w| {
                    w.pages[page].stored = version;
                    w.go(me, leaves);
                    Ok(())
                });
                if paging.writes_fail {
                    self.must(me, "fails to write to the store", |w| {
                        w.go(me, Next::Reinstall(version));
                        Ok(())
                    });
                }
            }
            (Next::PublishLeft(version), _) => self.must(me, "publishes left", |w| {
                let mut gone = OnLeft::Gone;
                let blind = paging.is(Twin::LeavesDespiteNote)
                    || !word.wanted()
                        && (paging.is(Twin::LeavesDespitePin) || paging.is(Twin::FlushDrops));
                if blind {
                    paging.publish(w, page, PageState::Leaving, |word| {
                        protocol::removed(word, 0).0
                    })?;
                } else {
                    gone = protocol_left(paging, w, page)?;
                }
                w.go(
                    me,
                    match gone {
                        OnLeft::TakeBack => Next::Reinstall(version),
                        OnLeft::Gone if version != stored => Next::LateWrite(version),
                        OnLeft::Gone => Next::Idle,
                    },
                );
                w.add_frames(paging, u8::from(gone == OnLeft::Gone));
                Ok(())
            }),

            (Next::LateWrite(version), _) => self.must(me, "writes to the store, too late", |w| {
                w.pages[page].stored = version;
                w.go(me, Next::Idle);
                Ok(())
            }),
            _ => self.of_owner(me),
        }
    }

    /// Copies a page out, without owning it while it does.
    fn of_copying_evictor(&mut self, me: usize) {
        let paging = self.paging;
        let worker = self.world.workers[me];
        let page = usize::from(worker.page);
        let Page { word, mapping, .. } = self.world.pages[page];
        let owns_already = paging.is(Twin::CopiesWhatItOwns);
        match worker.next {
            Next::Protect => self.must(me, "protects the page", |w| {
                let page = &mut w.pages[page];
                page.protected = page.is_mapped();
                w.go(me, Next::CopyOut);
                Ok(())
            }),
            Next::CopyOut => self.must(me, "copies the page", |w| {
                let next = match mapping {
                    Mapping::Mapped(version) if owns_already => Next::GiveBack(version),
                    Mapping::Mapped(version) => Next::OwnCopied(version),
                    Mapping::Poison => Next::Lift,
                    Mapping::Absent => {
                        push(&mut w.unread, EVICTORS_FAULT);
                        Next::Sleep
                    }
                };
                w.go(me, next);
                Ok(())
            }),
            Next::OwnCopied(version) => self.must(me, "owns what it has copied", |w| {
                let copied = if paging.is(Twin::TakesWhatWasTakenUp) {
                    protocol::leave(word)
                } else {
                    protocol::copied(word)
                };
                match copied {
                    Some(mine) => w.own(me, page, mine, Next::GiveBack(version)),
                    None => w.go(me, Next::Lift),
                }
                Ok(())
            }),
            Next::GiveBack(version) => self.must(me, "gives the page's memory back", |w| {
                // The program has dropped the page after it was copied, and no thread has touched
                // it since: it had left before.
                if mapping == Mapping::Absent {
                    w.pages[page].last = version;
                }
                w.map(page, Mapping::Absent);
                w.go(me, Next::LiftLeft(version));
                Ok(())
            }),
            Next::LiftLeft(version) => self.must(me, "lifts the protection", |w| {
                w.pages[page].protected = false;
                w.go(me, Next::Compare(version));
                Ok(())
            }),
            Next::Lift => self.must(me, "lifts the protection", |w| {
                w.pages[page].protected = false;
                w.go(me, Next::Idle);
                Ok(())
            }),
            // Sleeps until it is woken.
            _ => {}
        }
    }

    /// Adds the beginnings of an evictor that is let in.
    pub(super) fn of_idle_evictor(&mut self, me: usize) {
        let paging = self.paging;
        // Compulsory only while a filler waits for a frame.
        let urgent = self.world.frames == 0
            && paging.frames.is_some()
            && self.world.workers.iter().any(|w| w.next == Next::TakeFrame);
        for page in 0..paging.pages {
            let label = Label {
                actor: WORKER_NAMES[me],
                does: "begins to take it out",
                page,
            };
            let Page { word, mapping, .. } = self.world.pages[page];
            // The program does this; the evictor lends it its place.
            if paging.remaps_fail
                && me == EVICTOR
                && (paging.frames.is_none() || self.world.frames > 0)
                && let Some(mine) = protocol::taken_up(word)
            {
                self.may(me, "overwrites the lost page", page, |w| {
                    if paging.frames.is_some() {
                        w.frames -= 1;
                    }
                    w.pages[page].last = OVERWRITTEN;
                    w.own(me, page, mine, Next::Reinstall(OVERWRITTEN));
                    Ok(())
                });
            }
            let leaving = if me == FLUSHER || paging.is(Twin::EvictsPinned) {
                protocol::borrow(word)
            } else {
                protocol::leave(word)
            };
            if paging.is(Twin::DetachesWithoutOwning) {
                if let Mapping::Mapped(version) = mapping {
                    self.may(me, "takes it out without owning it", page, |w| {
                        w.pages[page].mapping = Mapping::Absent;
                        w.own(me, page, word, Next::Compare(version));
                        Ok(())
                    });
                }
            } else if paging.copies && me == EVICTOR {
                let marked = if paging.is(Twin::CopiesWhatItOwns) {
                    leaving
                } else {
                    protocol::copying(word)
                };
                if let Some(marked) = marked {
                    self.may(me, "begins to copy it", page, |w| {
                        w.own(me, page, marked, Next::Protect);
                        Ok(())
                    });
                }
            } else if let Some(mine) = leaving {
                self.add(urgent && me == EVICTOR, label, |w| {
                    w.own(me, page, mine, Next::Detach);
                    Ok(())
                });
            }
        }
    }
}

fn protocol_left(paging: &Paging, world: &mut World, page: usize) -> Result<OnLeft, Harm> {
    let word = world.pages[page].word;
    if word.state() != PageState::Leaving {
        return if paging.strict() {
            Err(Harm::Ownership)
        } else {
            Ok(OnLeft::Gone)
        };
    }
    let (next, outcome) = protocol::left(word, 0);
    world.pages[page].word = next;
    Ok(outcome)
}

impl Paging {
    /// Returns the step that follows once a page's bytes are in the store.
    fn written(&self, worker: usize, version: Version) -> Next {
        if worker == FLUSHER && !self.gives_up && !self.is(Twin::FlushDrops) {
            Next::Reinstall(version)
        } else {
            Next::PublishLeft(version)
        }
    }
}
