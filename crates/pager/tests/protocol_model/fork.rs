//! Thread of the program that forks, and what keeps out of its way.

use super::{
    Twin,
    moves::Moves,
    world::{EVICTOR, Fork, Next, WORKER_NAMES},
};
use crate::explore::Label;

impl Moves<'_> {
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
        let label = Label {
            actor: "the forking thread",
            does,
            page: 0,
        };
        self.add(self.world.fork != Fork::NotYet, label, |w| {
            w.fork = next;
            Ok(())
        });
    }

    /// Adds the step of an evictor that sees something to take out.
    pub(super) fn before_the_gate(&mut self, me: usize) {
        if self.world.is_closed() {
            return;
        }
        let others = self.out.len();
        self.of_idle_evictor(me);
        let begins = self.out.split_off(others);
        if begins.is_empty() {
            return;
        }
        let does = if self.paging.is(Twin::LooksBeforeItCounts) {
            "sees the gate open"
        } else {
            "counts itself as inside"
        };
        let label = Label {
            actor: WORKER_NAMES[me],
            does,
            page: 0,
        };
        let late = self.paging.is(Twin::LooksBeforeItCounts);
        self.add(begins.iter().any(|begins| begins.compulsory), label, |w| {
            w.workers[me].inside = !late;
            w.go(me, Next::ComeIn);
            Ok(())
        });
    }

    /// Adds the step of a filler that does not see a page which is called resident.
    pub(super) fn fill_at_the_gate(&mut self, me: usize) {
        // Put off: the filler would do something else.
        if self.world.is_sealed() {
            return;
        }
        self.must(me, "counts itself as inside", |w| {
            w.workers[me].inside = true;
            w.go(me, Next::ComeIn);
            Ok(())
        });
    }

    /// Adds the steps of a worker that counts as inside and owns nothing.
    pub(super) fn in_the_gate(&mut self, me: usize) {
        let (is_filler, world) = (me < EVICTOR, self.world);
        match world.workers[me].next {
            Next::ComeIn if self.paging.is(Twin::LooksBeforeItCounts) => {
                self.must(me, "counts itself as inside", |w| {
                    w.workers[me].inside = true;
                    w.go(me, if is_filler { Next::Own } else { Next::Choose });
                    Ok(())
                });
            }
            Next::ComeIn if is_filler && world.is_sealed() => {
                self.must(me, "is refused, and puts the fault off", |w| {
                    w.workers[me].inside = false;
                    w.go(me, Next::Look);
                    Ok(())
                });
            }
            Next::ComeIn if !is_filler && world.is_closed() => {
                self.must(me, "is refused", |w| {
                    w.go(me, Next::Idle);
                    Ok(())
                });
            }
            Next::ComeIn => self.must(me, "is let in", |w| {
                w.go(me, if is_filler { Next::Own } else { Next::Choose });
                Ok(())
            }),
            Next::Choose => {
                let others = self.out.len();
                self.of_idle_evictor(me);
                // What has been begun must go on.
                (self.out[others..].iter_mut()).for_each(|begins| begins.compulsory = true);
                if self.out.len() == others {
                    self.must(me, "finds nothing to take out", |w| {
                        w.go(me, Next::Idle);
                        Ok(())
                    });
                }
            }
            _ => self.must(me, "counts itself out", |w| {
                w.workers[me].inside = false;
                w.go(me, Next::Idle);
                Ok(())
            }),
        }
    }
}
