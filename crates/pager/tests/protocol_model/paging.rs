//! Model that the checker explores: program, kernel, fillers, evictor and flusher around one or two
//! pages.
//!
//! The rule: every compare-and-swap is one step and every action of the kernel is one step, in the
//! order in which production takes them; the words change by the real functions of `protocol.rs`
//! alone. A [`Twin`] deviates in one place.
//!
//! Left out: the bytes (a page holds the number of the last write to it), memory order, usage
//! counts and stamps, and the budget of pins.

mod evictor;
mod filler;
mod fork;
mod judge;
mod moves;
mod owner;
mod program;
mod world;

use farpage_pager::protocol::{PageState, PageWord};

use crate::explore::{Model, Move};
use moves::Moves;
use world::{Asked, EVICTOR, FILLERS, FLUSHER, Fork, Mapping, Next, Page, Thread, Worker, World};

/// Deliberate mistake of a model, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Twin {
    Good,
    /// Calls the page resident before it is mapped.
    PublishesBeforeInstall,
    /// Calls the page remote before its bytes are in the store.
    PublishesBeforeWrite,
    /// Leaves no note on a leaving page.
    IgnoresFaultWhileLeaving,
    /// Omits the wake after it found the page mapped already.
    NoWakeWhenAlreadyMapped,
    /// Omits the wake for a fault on a page that is there.
    NoWakeForStaleFault,
    /// Calls the page remote without looking at the note.
    LeavesDespiteNote,
    /// Takes the page out without owning it.
    DetachesWithoutOwning,
    /// Drops a failed fill, noted or not.
    DropsFailedFill,
    /// Omits the wake for a note that arrived after the install.
    NoWakeForLateNote,
    /// Omits the wake for a note on a page that could not be taken out.
    NoWakeWhenStayed,
    /// Omits the wake for a note on a page that the program took away.
    NoWakeWhenRemoved,
    /// Just wakes for a fault on a poisoned page, whether or not the poison is still there.
    OnlyWakesPoisoned,
    /// Fills a page that seems to have vanished without looking again as its owner.
    LooksOnce,
    /// Evicts a page although it is pinned.
    EvictsPinned,
    /// Calls a page remote that was to be given up, without looking at its pins.
    LeavesDespitePin,
    /// Leaves a page that was flushed unmapped.
    FlushDrops,
    /// Calls a pin complete while the page is still on its way out.
    PinsWhatLeaves,
    /// Takes back all pins of a page at once.
    UnpinsForAll,
    /// Calls a page poisoned whose newest bytes are lost.
    CallsLostPoisoned,
    /// Calls a page remote whose newest bytes are lost, unless a thread waits for it.
    CallsLostRemote,
    /// Takes a page out that it has copied, although another thread has taken it up meanwhile.
    TakesWhatWasTakenUp,
    /// Owns the page before it copies it.
    CopiesWhatItOwns,
    /// Forks as soon as the gate is sealed, whatever is inside.
    ForksAtOnce,
    /// Looks at the gate, and counts itself as inside only then.
    LooksBeforeItCounts,
    /// Counts itself as inside until it has taken the page out, and not until it has published it.
    CountsTheSearchAlone,
    /// Seals the gate before reclaim has come to an end.
    SealsAtOnce,
    /// Seals the gate and forks, without waiting for fillers that were inside.
    WaitsForReclaimAlone,
}

/// Access of an application thread.
#[derive(Clone, Copy)]
pub(crate) enum Access {
    Read(usize),
    Write(usize),
    /// First half of `MappedRegion::pin`: the page shall stay.
    Pin(usize),
    /// Second half of `MappedRegion::pin`: asks for the page, and waits until it is there. From
    /// here to the `Unpin` the page has to be there.
    Await(usize),
    Unpin(usize),
}

/// Actors of a model, and the failures that may happen.
#[derive(Clone, Copy)]
pub(crate) struct Paging {
    /// Accesses of the two application threads.
    pub(crate) program: [&'static [Access]; 2],
    pub(crate) pages: usize,
    /// Number of pages that may be resident or on their way; `None`: enough.
    pub(crate) frames: Option<u8>,
    /// True if pages are brought in unasked.
    pub(crate) prefetches: bool,
    /// True if the flusher detaches pages, writes them and puts them back.
    pub(crate) flushes: bool,
    /// True if the flusher gives up the pages that it writes: `Advice::DontNeed`.
    pub(crate) gives_up: bool,
    /// True if the program drops pages with `madvise(MADV_DONTNEED)`.
    pub(crate) madvises: bool,
    /// True if the evictor copies a page where it lies, instead of moving it.
    pub(crate) copies: bool,
    /// True if a page may turn out to be held after a part of it was taken out.
    pub(crate) holds: bool,
    pub(crate) fills_fail: bool,
    pub(crate) writes_fail: bool,
    /// True if a page that was taken out may not be mapped again; the program may overwrite it.
    pub(crate) remaps_fail: bool,
    /// True if a thread of the program forks, once.
    pub(crate) forks: bool,
    pub(crate) twin: Twin,
}

/// Kinds of harm. The good model is held to all of it; a twin must do one of the harms that a
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
    /// Endless moves: the model never rests, however the threads are scheduled.
    NeverRests,
    /// More pages than allowed are mapped or on their way.
    OverBudget,
    /// An access failed though nothing else did.
    NeedlessSigbus,
    /// A child was made that has no way to a page's newest bytes.
    HalfOut,
    /// A pinned page was absent, though no thread was writing it back for the program.
    PinBroken,
    /// Invisible by itself: an owned state without exactly one owner, an owner without its state,
    /// or a pin that is not its thread's.
    Ownership,
    /// Invisible by itself: a stable state that is not what the kernel says.
    WordAndKernelDisagree,
    /// Invisible by itself: a page's bytes are both mapped and in a frame that may be installed, or
    /// there twice.
    TwoCopies,
}

type Step = Result<(), Harm>;

impl Paging {
    fn is(&self, twin: Twin) -> bool {
        self.twin == twin
    }

    /// True for the good model. Harm that no program sees is not counted against a twin, which must
    /// show what its mistake costs.
    fn strict(&self) -> bool {
        self.is(Twin::Good)
    }

    fn access(&self, thread: usize, done: u8) -> Option<Access> {
        self.program[thread].get(usize::from(done)).copied()
    }

    /// True if a thread may rely on its pin of a page.
    fn relies_on(&self, thread: usize, done: u8, page: usize) -> bool {
        let past = &self.program[thread][..usize::from(done)];
        past.iter().fold(false, |pinned, &access| match access {
            Access::Await(on) if on == page => true,
            Access::Unpin(on) if on == page => false,
            _ => pinned,
        })
    }

    /// Applies a transition that only an owner may apply. Returns whether there was a note.
    fn publish(
        &self,
        world: &mut World,
        page: usize,
        owned: PageState,
        transition: impl Fn(PageWord) -> PageWord,
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

impl Model for Paging {
    type World = World;
    type Harm = Harm;

    fn start(&self) -> World {
        World {
            pages: [Page {
                word: PageWord::default(),
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
                inside: false,
                batch: [0; 3],
            }; 4],
            frames: self.frames.unwrap_or(0),
            fork: Fork::NotYet,
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
        if self.forks {
            moves.of_fork();
        }
    }

    fn judge(&self, world: &World, at_rest: bool) -> Step {
        self.what_is_wrong(world, at_rest)
    }

    fn never_rests(&self) -> Harm {
        Harm::NeverRests
    }
}
