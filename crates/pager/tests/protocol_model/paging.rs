//! The model that the checker explores: program, kernel, fillers, evictor and flusher around one or
//! two pages.
//!
//! The rule: every compare-and-swap is one step and every action of the kernel is one step, in the
//! order in which production takes them; the words change by the real functions of `protocol.rs`
//! alone. A [`Twin`] deviates in one place.
//!
//! Left out: the bytes (a page holds the number of the last write to it), memory order, heat and
//! stamps, and the budget of pins.

use farpage_pager::protocol::{self, OnFailed, OnFault, OnLeft, State, Word};
use std::fmt;

use crate::explore::{Label, Model, Move};

/// The number of the write that made the page what it is; 0: never written.
type Version = u8;

/// A deliberate mistake, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Twin {
    Good,
    /// Calls the page resident before it is mapped.
    PublishesBeforeInstall,
    /// Calls the page remote before its bytes are in the store.
    PublishesBeforeWrite,
    /// Leaves no note on a leaving page.
    IgnoresFaultWhileLeaving,
    /// Does not wake after it found the page mapped already.
    NoWakeWhenAlreadyMapped,
    /// Does not wake for a fault on a page that is there.
    NoWakeForStaleFault,
    /// Calls the page remote without looking at the note.
    LeavesDespiteNote,
    /// Takes the page out without owning it.
    DetachesWithoutOwning,
    /// Drops a failed fill, noted or not.
    DropsFailedFill,
    /// Does not wake for a note that arrived after the install.
    NoWakeForLateNote,
    /// Does not wake for a note on a page that could not be taken out.
    NoWakeWhenStayed,
    /// Does not wake for a note on a page that the program took away.
    NoWakeWhenRemoved,
    /// Only wakes for a fault on a poisoned page, whether or not the poison is still there.
    OnlyWakesPoisoned,
    /// Fills a page that seems to have vanished without looking again as its owner.
    LooksOnce,
    /// Evicts a page although it is pinned.
    EvictsPinned,
    /// Calls a page remote that was to be given up, without looking at its pins.
    LeavesDespitePin,
    /// Does not map a page again that was flushed.
    FlushDrops,
    /// Calls a pin complete while the page is still on its way out.
    PinsWhatLeaves,
    /// Takes back all pins of a page at once.
    UnpinsForAll,
    /// Calls a page poisoned whose newest bytes are lost.
    CallsLostPoisoned,
    /// Calls a page remote whose newest bytes are lost, unless somebody waits for it.
    CallsLostRemote,
    /// Takes a page out that it has copied, although somebody has taken it up meanwhile.
    TakesWhatWasTakenUp,
    /// Owns the page before it copies it.
    CopiesWhatItOwns,
}

/// What an access does.
#[derive(Clone, Copy)]
pub(crate) enum Access {
    Read(usize),
    Write(usize),
    /// The first half of `Mapped::pin`: the page shall stay.
    Pin(usize),
    /// The second half: asks for the page, and waits until it is there. From here to the `Unpin` it
    /// has to be.
    Await(usize),
    Unpin(usize),
}

/// Who takes part, and what may go wrong.
#[derive(Clone, Copy)]
pub(crate) struct Paging {
    /// What the two application threads do.
    pub(crate) program: [&'static [Access]; 2],
    pub(crate) pages: usize,
    /// How many pages may be resident or on their way; `None`: enough.
    pub(crate) frames: Option<u8>,
    /// Pages are brought in unasked.
    pub(crate) prefetches: bool,
    /// A second thread detaches, writes and puts back.
    pub(crate) flushes: bool,
    /// That thread does not put back what it writes, but gives it up: `Advice::DontNeed`.
    pub(crate) gives_up: bool,
    /// The program drops pages with `madvise(MADV_DONTNEED)`.
    pub(crate) madvises: bool,
    /// The evictor copies a page where it lies, instead of moving it.
    pub(crate) copies: bool,
    /// A page may turn out to be held after a part of it was taken out.
    pub(crate) holds: bool,
    pub(crate) fills_fail: bool,
    pub(crate) writes_fail: bool,
    /// A page that was taken out may not be mapped again; the program may overwrite it.
    pub(crate) remaps_fail: bool,
    pub(crate) twin: Twin,
}

/// What can go wrong. The good model is held to all of it; a twin must do one of the harms that a
/// program would see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Harm {
    /// A read saw something else than the last write.
    WrongRead,
    /// All is quiet and the last write is nowhere.
    LostWrite,
    /// Bytes that are nowhere else came back to a page that is mapped already.
    MappedTwice,
    /// All is quiet and a thread still sleeps, or a runtime thread still waits.
    SleepsForever,
    /// However the threads are scheduled, it never ends.
    NeverRests,
    /// More pages are mapped or on their way than there may be.
    OverBudget,
    /// An access failed though nothing else did.
    NeedlessSigbus,
    /// A pinned page was not there, though nobody was writing it back for the program.
    PinBroken,
    /// Not visible by itself: an owned state without exactly one owner, an owner without its state,
    /// or a pin that is not its thread's.
    Ownership,
    /// Not visible by itself: a stable state that is not what the kernel says.
    WordAndKernelDisagree,
    /// Not visible by itself: a page's bytes are both mapped and in a frame that may be installed,
    /// or there twice.
    TwoCopies,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Mapping {
    Absent,
    Poison,
    Mapped(Version),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Page {
    word: Word,
    mapping: Mapping,
    /// What is mapped cannot be written to for now.
    protected: bool,
    stored: Version,
    /// What a read must see.
    last: Version,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Thread {
    /// Accesses done.
    done: u8,
    asleep: bool,
    asked: Asked,
}

/// How far a thread is that waits for a page without touching it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Asked {
    NotYet,
    /// In the fillers' mail.
    Waiting,
    /// A filler has taken the page on.
    TakenOn,
}

/// Where a runtime thread stands: the step that it takes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Next {
    /// Take a fault from the batch, read a new batch, or begin something.
    Idle,
    // Owning nothing.
    Look,
    Claim,
    Wake,
    // An evictor that copies, owning nothing.
    Protect,
    CopyOut,
    /// Its copying has met an absent page.
    Sleep,
    OwnCopied(Version),
    Lift,
    // The same, owning a leaving page.
    GiveBack(Version),
    LiftLeft(Version),
    // A filler, owning a filling page.
    LookAgain,
    TakeFrame,
    Fetch,
    Install(Version),
    AlreadyMapped,
    PublishFailed,
    Poison(Bytes),
    WakePoisoned(Bytes),
    PublishPoisoned(Bytes),
    // Either, owning the page that it has just mapped.
    WakeInstalled,
    PublishInstalled,
    // An evictor or flusher, owning a leaving page.
    Detach,
    PutBack(Version),
    PublishStayed,
    PublishRemoved,
    Compare(Version),
    Write(Version),
    PublishLeft(Version),
    Reinstall(Version),

    // Steps that only a broken twin takes: after publishing.
    LateInstall(Version),
    LateWrite(Version),
}

/// What is left of a page that is poisoned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Bytes {
    Stored,
    Lost,
}

/// What the program writes when it overwrites a lost page.
const OVERWRITTEN: Version = 99;

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Worker {
    next: Next,
    page: u8,
    /// Faults that were read and are not served yet: page + 1, 0 for none.
    batch: [u8; 3],
}

const FILLERS: [usize; 2] = [0, 1];
const EVICTOR: usize = 2;
const FLUSHER: usize = 3;
const EVICTORS_FAULT: u8 = 3;
const WORKER_NAMES: [&str; 4] = ["filler a", "filler b", "evictor", "flusher"];
const THREAD_NAMES: [&str; 2] = ["thread 0", "thread 1"];

/// Everything that there is at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pages: [Page; 2],
    threads: [Thread; 2],
    /// The faults that nobody has read yet, oldest first: thread + 1, 3 for the evictor's, 0 for
    /// none.
    unread: [u8; 3],
    workers: [Worker; 4],
    frames: u8,
}

type Step = Result<(), Harm>;

impl Next {
    fn owns_the_page(self) -> bool {
        use Next::*;
        !matches!(
            self,
            Idle | Look | Claim | Wake | LateInstall(_) | LateWrite(_)
        ) && !matches!(self, Protect | CopyOut | Sleep | OwnCopied(_) | Lift)
    }

    fn has_a_frame(self) -> bool {
        use Next::*;
        self.has_detached_bytes()
            || matches!(
                self,
                Fetch | PublishFailed | Install(_) | LateInstall(_) | LateWrite(_)
            )
    }

    fn has_detached_bytes(self) -> bool {
        use Next::*;
        matches!(
            self,
            LiftLeft(_) | PutBack(_) | Compare(_) | Write(_) | PublishLeft(_) | Reinstall(_)
        )
    }
}

impl Paging {
    fn is(&self, twin: Twin) -> bool {
        self.twin == twin
    }

    /// Harm that no program sees is counted against the good model only, so that a twin must show
    /// what its mistake costs.
    fn strict(&self) -> bool {
        self.is(Twin::Good)
    }

    fn access(&self, thread: usize, done: u8) -> Option<Access> {
        self.program[thread].get(usize::from(done)).copied()
    }

    /// Whether a thread may rely on its pin of a page.
    fn relies_on(&self, thread: usize, done: u8, page: usize) -> bool {
        let past = &self.program[thread][..usize::from(done)];
        past.iter().fold(false, |pinned, &access| match access {
            Access::Await(on) if on == page => true,
            Access::Unpin(on) if on == page => false,
            _ => pinned,
        })
    }

    /// Applies a transition that only an owner may apply; returns whether there was a note.
    fn publish(
        &self,
        world: &mut World,
        page: usize,
        owned: State,
        transition: impl Fn(Word) -> Word,
    ) -> Result<bool, Harm> {
        let word = &mut world.pages[page].word;
        if word.state() != owned {
            return if self.strict() {
                Err(Harm::Ownership)
            } else {
                Ok(false)
            };
        }
        let noted = word.wanted();
        *word = transition(*word);
        Ok(noted)
    }
}

impl Page {
    fn is_mapped(&self) -> bool {
        matches!(self.mapping, Mapping::Mapped(_))
    }
}

impl World {
    fn go(&mut self, worker: usize, next: Next) {
        self.workers[worker].next = next;
        if next == Next::Idle {
            self.workers[worker].page = 0;
        }
    }

    fn add_frames(&mut self, paging: &Paging, count: u8) {
        if paging.frames.is_some() {
            self.frames += count;
        }
    }

    fn own(&mut self, worker: usize, page: usize, word: Word, next: Next) {
        self.pages[page].word = word;
        self.workers[worker].page = page as u8;
        self.workers[worker].next = next;
    }

    /// The kernel wakes everyone that sleeps on the page; a fault that nobody has read yet is gone
    /// with its sleeper.
    fn wake(&mut self, paging: &Paging, page: usize) {
        for thread in 0..2 {
            let Thread { done, asleep, .. } = self.threads[thread];
            let Some(Access::Read(on) | Access::Write(on)) = paging.access(thread, done) else {
                continue;
            };
            if asleep && on == page {
                self.threads[thread].asleep = false;
                self.unread = without(self.unread, thread as u8 + 1);
            }
        }
        let evictor = &mut self.workers[EVICTOR];
        if evictor.next == Next::Sleep && usize::from(evictor.page) == page {
            evictor.next = Next::CopyOut;
            self.unread = without(self.unread, EVICTORS_FAULT);
        }
    }

    /// From now on this is mapped there.
    fn map(&mut self, page: usize, mapping: Mapping) {
        let page = &mut self.pages[page];
        (page.mapping, page.protected) = (mapping, false);
    }
}

fn without(queue: [u8; 3], item: u8) -> [u8; 3] {
    match queue {
        [first, second, third] if first == item => [second, third, 0],
        [first, second, third] if second == item => [first, third, 0],
        [first, second, third] if third == item => [first, second, 0],
        _ => queue,
    }
}

fn push(queue: &mut [u8; 3], item: u8) {
    *queue
        .iter_mut()
        .find(|slot| **slot == 0)
        .expect("each thread has at most one fault in the queue") = item;
}

impl Model for Paging {
    type World = World;
    type Harm = Harm;

    fn start(&self) -> World {
        World {
            pages: [Page {
                word: Word::default(),
                mapping: Mapping::Absent,
                protected: false,
                stored: 0,
                last: 0,
            }; 2],
            threads: [Thread {
                done: 0,
                asleep: false,
                asked: Asked::NotYet,
            }; 2],
            unread: [0; 3],
            workers: [Worker {
                next: Next::Idle,
                page: 0,
                batch: [0; 3],
            }; 4],
            frames: self.frames.unwrap_or(0),
        }
    }

    fn moves(&self, world: &World, out: &mut Vec<Move<World, Harm>>) {
        let mut moves = Moves {
            paging: self,
            world,
            out,
        };
        for thread in 0..2 {
            moves.of_thread(thread);
        }
        for filler in FILLERS {
            moves.of_filler(filler);
        }
        moves.of_evictor(EVICTOR);
        if self.flushes || self.gives_up {
            moves.of_evictor(FLUSHER);
        }
        if self.madvises {
            moves.of_madvise();
        }
    }

    fn judge(&self, world: &World, at_rest: bool) -> Step {
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
            // What is lost is told by SIGBUS: nobody reads anything else in its place.
            let is_lost = |p: &Page| p.word.state() == State::Lost && !p.is_mapped();
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
                usize::from(state == State::Filling),
                usize::from(state == State::Leaving),
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
                (State::Remote, mapping) => mapping == Mapping::Absent && page.stored == page.last,
                (State::Resident, Mapping::Mapped(version)) => version == page.last,
                (State::Poisoned, Mapping::Poison) => page.stored == page.last,
                (State::Resident | State::Poisoned, Mapping::Absent) => {
                    self.madvises && page.stored == page.last
                }
                (State::Lost, Mapping::Poison) => true,
                (State::Lost, Mapping::Absent) => self.madvises,
                (State::Resident, Mapping::Poison)
                | (State::Poisoned | State::Lost, Mapping::Mapped(_)) => false,
                (State::Filling | State::Leaving, _) => true,
            };
            if !agrees {
                return Err(Harm::WordAndKernelDisagree);
            }
        }
        Ok(())
    }

    fn never_rests(&self) -> Harm {
        Harm::NeverRests
    }
}

/// Collects what can happen in one world.
struct Moves<'a> {
    paging: &'a Paging,
    world: &'a World,
    out: &'a mut Vec<Move<World, Harm>>,
}

impl Moves<'_> {
    fn add(&mut self, compulsory: bool, label: Label, step: impl FnOnce(&mut World) -> Step) {
        let mut next = *self.world;
        let to = step(&mut next).map(|()| {
            // The fillers are interchangeable: worlds that differ by their names only are one.
            next.workers[..2].sort_unstable();
            next
        });
        self.out.push(Move {
            compulsory,
            label,
            to,
        });
    }

    fn must(&mut self, worker: usize, does: &'static str, step: impl FnOnce(&mut World) -> Step) {
        let label = Label {
            actor: WORKER_NAMES[worker],
            does,
            page: self.world.workers[worker].page.into(),
        };
        self.add(true, label, step);
    }

    fn may(
        &mut self,
        worker: usize,
        does: &'static str,
        page: usize,
        step: impl FnOnce(&mut World) -> Step,
    ) {
        self.add(
            false,
            Label {
                actor: WORKER_NAMES[worker],
                does,
                page,
            },
            step,
        );
    }

    /// The program touches its next page, or goes to sleep on it: the kernel checks and enqueues in
    /// one step.
    fn of_thread(&mut self, thread: usize) {
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
            // It sleeps until the protection is lifted.
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

    /// The rest of a pin: ask a filler, look at the word until it is resident, ask again if it came
    /// to nothing.
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
            (State::Resident, _) => self.pinned(thread, label("sees it resident")),
            (State::Leaving, _) if paging.is(Twin::PinsWhatLeaves) => {
                self.pinned(thread, label("sees it leaving"));
            }
            (State::Remote, Asked::TakenOn) => self.add(true, label("asks once more"), ask),
            (State::Poisoned, Asked::TakenOn) | (State::Lost, _) => {
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

    fn of_madvise(&mut self) {
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

    fn of_filler(&mut self, me: usize) {
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
            Next::Look => self.must(me, "looks: the page is not there", |w| {
                w.go(me, Next::Claim);
                Ok(())
            }),
            Next::Claim => self.must(me, "claims what has vanished", |w| {
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
                    // Somebody was faster. The sleeper may have been served, or not: let it fault
                    // again.
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

    fn of_evictor(&mut self, me: usize) {
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
                let noted = paging.publish(w, page, State::Leaving, protocol::stayed)?;
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
                let noted =
                    paging.publish(w, page, State::Leaving, |word| protocol::removed(word, 0).0)?;
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
                    paging.publish(w, page, State::Leaving, |word| protocol::removed(word, 0).0)?;
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
                // The program has dropped it after it was copied, and nobody has touched it since:
                // it had left before.
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
            // Until it is woken.
            _ => {}
        }
    }

    fn of_idle_evictor(&mut self, me: usize) {
        let paging = self.paging;
        // Nobody has to evict, unless a filler waits for a frame.
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

    /// What everyone does who brings a page in: a filler, and whoever puts a page back.
    fn of_owner(&mut self, me: usize) {
        let paging = self.paging;
        let worker = self.world.workers[me];
        let page = usize::from(worker.page);
        let Page { word, stored, .. } = self.world.pages[page];
        let mapped = self.world.pages[page].is_mapped();
        match worker.next {
            Next::TakeFrame => {
                if paging.frames.is_none() {
                    self.must(me, "takes a frame", |w| {
                        w.go(me, Next::Fetch);
                        Ok(())
                    });
                } else if self.world.frames > 0 {
                    self.must(me, "takes a frame", |w| {
                        w.frames -= 1;
                        w.go(me, Next::Fetch);
                        Ok(())
                    });
                }
            }
            Next::Fetch => {
                self.must(me, "reads from the store", |w| {
                    let early = paging.is(Twin::PublishesBeforeInstall);
                    if early {
                        paging.publish(w, page, State::Filling, |word| {
                            protocol::installed(word, 0, 0)
                        })?;
                    }
                    w.go(
                        me,
                        if early {
                            Next::LateInstall(stored)
                        } else {
                            Next::Install(stored)
                        },
                    );
                    Ok(())
                });
                if paging.fills_fail {
                    self.must(me, "fails to read from the store", |w| {
                        w.go(me, Next::PublishFailed);
                        Ok(())
                    });
                }
            }
            Next::Install(_) | Next::LateInstall(_) if mapped => {
                self.must(me, "finds the page mapped already, drops the frame", |w| {
                    // Its share of the budget stands for the mapped page from now on.
                    w.go(me, Next::AlreadyMapped);
                    Ok(())
                });
            }
            Next::Reinstall(_) if mapped => self.must(me, "finds the page mapped already", |_| {
                Err(Harm::MappedTwice)
            }),
            Next::Install(version) | Next::Reinstall(version) | Next::LateInstall(version) => {
                if paging.remaps_fail && matches!(worker.next, Next::Reinstall(_)) {
                    self.must(me, "cannot map the page again", |w| {
                        // A page that was lost before stays so, whatever it should have become.
                        let was_lost = w.pages[page].mapping == Mapping::Poison;
                        if version == stored && !was_lost {
                            w.go(me, Next::PublishFailed);
                        } else {
                            w.add_frames(paging, 1);
                            let forgets = paging.is(Twin::CallsLostRemote) && !word.wanted();
                            if forgets {
                                w.pages[page].word = protocol::removed(word, 0).0;
                            }
                            w.go(
                                me,
                                if forgets {
                                    Next::Idle
                                } else {
                                    Next::Poison(Bytes::Lost)
                                },
                            );
                        }
                        Ok(())
                    });
                }
                self.must(me, "maps the page", |w| {
                    w.map(page, Mapping::Mapped(version));
                    w.go(me, Next::WakeInstalled);
                    Ok(())
                });
            }
            Next::AlreadyMapped if paging.is(Twin::NoWakeWhenAlreadyMapped) => {
                self.must(me, "publishes installed and wakes nobody", |w| {
                    paging.publish(w, page, State::Filling, |word| {
                        protocol::installed(word, 0, 0)
                    })?;
                    w.go(me, Next::Idle);
                    Ok(())
                })
            }
            Next::AlreadyMapped => self.must(me, "wakes all the same", |w| {
                w.wake(paging, page);
                w.go(me, Next::PublishInstalled);
                Ok(())
            }),

            Next::WakeInstalled => self.must(me, "wakes", |w| {
                w.wake(paging, page);
                w.go(me, Next::PublishInstalled);
                Ok(())
            }),
            Next::PublishInstalled => self.must(me, "publishes installed", |w| {
                let noted = paging.publish(w, page, owned_by(me), |word| {
                    protocol::installed(word, 0, 0)
                })?;
                w.go(
                    me,
                    if noted && !paging.is(Twin::NoWakeForLateNote) {
                        Next::Wake
                    } else {
                        Next::Idle
                    },
                );
                Ok(())
            }),
            Next::PublishFailed => self.must(me, "publishes the failure", |w| {
                w.add_frames(paging, 1);
                if word.state() != owned_by(me) {
                    return Err(Harm::Ownership);
                }
                let (next, outcome) = match protocol::fill_failed(word) {
                    (_, OnFailed::MustPoison) if paging.is(Twin::DropsFailedFill) => {
                        (Word::default(), OnFailed::Dropped)
                    }
                    other => other,
                };
                w.pages[page].word = next;
                w.go(
                    me,
                    if outcome == OnFailed::Dropped {
                        Next::Idle
                    } else {
                        Next::Poison(Bytes::Stored)
                    },
                );
                Ok(())
            }),
            Next::Poison(_) if mapped => self.must(me, "cannot poison a mapped page", |w| {
                w.go(me, Next::AlreadyMapped);
                Ok(())
            }),
            Next::Poison(bytes) => self.must(me, "poisons", |w| {
                w.pages[page].mapping = Mapping::Poison;
                w.go(me, Next::WakePoisoned(bytes));
                Ok(())
            }),
            Next::WakePoisoned(bytes) => self.must(me, "wakes", |w| {
                w.wake(paging, page);
                w.go(me, Next::PublishPoisoned(bytes));
                Ok(())
            }),
            Next::PublishPoisoned(bytes) => self.must(me, "publishes poisoned or lost", |w| {
                let is_lost = bytes == Bytes::Lost && !paging.is(Twin::CallsLostPoisoned);
                let transition = if is_lost {
                    protocol::lost
                } else {
                    protocol::poisoned
                };
                let owned = match bytes {
                    Bytes::Lost => State::Leaving,
                    Bytes::Stored => owned_by(me),
                };
                let noted = paging.publish(w, page, owned, transition)?;
                w.go(
                    me,
                    if noted && !paging.is(Twin::NoWakeForLateNote) {
                        Next::Wake
                    } else {
                        Next::Idle
                    },
                );
                Ok(())
            }),
            Next::Wake => self.must(me, "wakes", |w| {
                w.wake(paging, page);
                w.go(me, Next::Idle);
                Ok(())
            }),
            other => unreachable!("{} does not take the step {other:?}", WORKER_NAMES[me]),
        }
    }
}

/// The state of the pages that a worker owns. (A filler that poisons a lost page once more owns it
/// as `Leaving`.)
fn owned_by(worker: usize) -> State {
    if worker < EVICTOR {
        State::Filling
    } else {
        State::Leaving
    }
}

fn protocol_left(paging: &Paging, world: &mut World, page: usize) -> Result<OnLeft, Harm> {
    let word = world.pages[page].word;
    if word.state() != State::Leaving {
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
    /// What follows once a page's bytes are in the store.
    fn written(&self, worker: usize, version: Version) -> Next {
        if worker == FLUSHER && !self.gives_up && !self.is(Twin::FlushDrops) {
            Next::Reinstall(version)
        } else {
            Next::PublishLeft(version)
        }
    }

    fn on_fault(&self, world: &mut World, me: usize) -> Step {
        let page = usize::from(world.workers[me].page);
        let word = world.pages[page].word;
        if self.is(Twin::IgnoresFaultWhileLeaving) && word.state() == State::Leaving {
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

impl fmt::Display for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Page {
            word,
            mapping,
            stored,
            ..
        } in &self.pages
        {
            let note = if word.wanted() { "+WANTED" } else { "" };
            let pin = if word.pinned() { "+PINNED" } else { "" };
            write!(
                f,
                "| {:?}{note}{pin}, {mapping:?}, stored {stored} ",
                word.state()
            )?;
        }
        let asleep = self.threads.iter().filter(|t| t.asleep).count();
        let unread = self.unread.iter().filter(|&&thread| thread != 0).count();
        write!(f, "| {asleep} asleep, {unread} unread")
    }
}
