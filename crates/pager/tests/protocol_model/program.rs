//! Steps of the program: its threads touch pages, pin them and drop them.

use farpage_pager::protocol::{self, PageState};

use super::{
    Access, Harm, Twin,
    moves::Moves,
    world::{Asked, FLUSHER, Mapping, THREAD_NAMES, Thread, Version, World, push},
};
use crate::explore::Label;

impl Moves<'_> {
    /// Adds a thread's touch of its next page, or its falling asleep on it: the kernel checks and
    /// enqueues in one step.
    pub(super) fn of_thread(&mut self, thread: usize) {
        let paging = self.paging;
        let Thread { done, asleep, .. } = self.world.threads[thread];
        let Some(access) = paging.access(thread, done).filter(|_| !asleep) else {
            return;
        };
        let (page, does) = match access {
            Access::Read(page) => (page, "reads"),
            Access::Write(page) => (page, "writes"),
            Access::Pin(page) => return self.pin(thread, page),
            Access::Await(page) => return self.wait_for(thread, page),
            Access::Unpin(page) => return self.unpin(thread, page),
        };
        let label = Label {
            actor: THREAD_NAMES[thread],
            does,
            page,
        };
        let flusher = &self.world.workers[FLUSHER];
        let borrowed = usize::from(flusher.page) == page && flusher.next.owns_the_page();
        let has_to_be_there = paging.relies_on(thread, done, page) && !borrowed;
        let is_write = matches!(access, Access::Write(_));
        match self.world.pages[page].mapping {
            // The thread sleeps until the protection is lifted.
            Mapping::Mapped(_) if is_write && self.world.pages[page].protected => {}
            Mapping::Mapped(seen) => self.add(true, label, |w| {
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
            _ if has_to_be_there => self.add(true, label, |_| Err(Harm::PinBroken)),
            Mapping::Poison => self.add(
                true,
                Label {
                    does: "gets SIGBUS",
                    ..label
                },
                |w| {
                    w.threads[thread].done += 1;
                    if paging.fills_fail || paging.remaps_fail {
                        Ok(())
                    } else {
                        Err(Harm::NeedlessSigbus)
                    }
                },
            ),
            Mapping::Absent => self.add(
                true,
                Label {
                    does: "faults and sleeps",
                    ..label
                },
                |w| {
                    w.threads[thread].asleep = true;
                    push(&mut w.unread, thread as u8 + 1);
                    Ok(())
                },
            ),
        }
    }

    fn pin(&mut self, thread: usize, page: usize) {
        let label = Label {
            actor: THREAD_NAMES[thread],
            does: "pins",
            page,
        };
        self.add(true, label, |w| {
            let word = &mut w.pages[page].word;
            *word = protocol::pin(*word).expect("few threads pin");
            w.threads[thread].done += 1;
            Ok(())
        });
    }

    fn unpin(&mut self, thread: usize, page: usize) {
        let paging = self.paging;
        let label = Label {
            actor: THREAD_NAMES[thread],
            does: "unpins",
            page,
        };
        self.add(true, label, |w| {
            let word = &mut w.pages[page].word;
            if paging.strict() && !word.pinned() {
                return Err(Harm::Ownership);
            }
            while let Some(less) = protocol::unpin(*word) {
                *word = less;
                if !paging.is(Twin::UnpinsForAll) {
                    break;
                }
            }
            w.threads[thread].done += 1;
            Ok(())
        });
    }

    /// Adds the rest of a pin: ask a filler, look at the word until it is resident, ask again if
    /// the fill came to nothing.
    fn wait_for(&mut self, thread: usize, page: usize) {
        let paging = self.paging;
        let label = |does| Label {
            actor: THREAD_NAMES[thread],
            does,
            page,
        };
        let ask = |w: &mut World| {
            w.threads[thread].asked = Asked::Waiting;
            Ok(())
        };
        let asked = self.world.threads[thread].asked;
        match (self.world.pages[page].word.state(), asked) {
            (_, Asked::NotYet) => self.add(true, label("asks for the page"), ask),
            (PageState::Resident, _) => self.pinned(thread, label("sees it resident")),
            (PageState::Leaving, _) if paging.is(Twin::PinsWhatLeaves) => {
                self.pinned(thread, label("sees it leaving"));
            }
            (PageState::Remote, Asked::TakenOn) => self.add(true, label("asks once more"), ask),
            (PageState::Poisoned, Asked::TakenOn) | (PageState::Lost, _) => {
                self.add(true, label("gives the pin up"), |w| {
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

    fn pinned(&mut self, thread: usize, label: Label) {
        self.add(true, label, |w| {
            w.threads[thread].done += 1;
            w.threads[thread].asked = Asked::NotYet;
            Ok(())
        });
    }

    pub(super) fn of_madvise(&mut self) {
        for page in 0..self.paging.pages {
            if self.world.pages[page].mapping != Mapping::Absent {
                self.add(
                    false,
                    Label {
                        actor: "the program",
                        does: "drops it with madvise",
                        page,
                    },
                    |w| {
                        let page = &mut w.pages[page];
                        // With poison go no bytes: a page that is lost stays lost.
                        if page.is_mapped() {
                            page.last = page.stored;
                        }
                        (page.mapping, page.protected) = (Mapping::Absent, false);
                        Ok(())
                    },
                );
            }
        }
    }
}
