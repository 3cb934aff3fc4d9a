//! Model that the checker explores: program, kernel, fillers, evictor and flusher around one or two
//! pages.
//!
//! The rule: every compare-and-swap is one step and every action of the kernel is one step, in the
//! order in which production takes them. The words change, and workers decide what to do next, by
//! the functions of `protocol.rs` alone, which the workers of production call. A twin deviates in
//! one place: in one of these functions ([`Protocol`]), or in its order of steps ([`Twin`]).
//!
//! Left out: the bytes (a page holds the number of the last write to it), memory order, usage
//! counts and stamps, and the budget of pins.

mod evictor;
mod filler;
mod judge;
mod program;
mod world;

use farpage_pager::protocol::{self, OnAbsent, OnFailed, OnFault, OnLeft, PageState, PageWord};

use crate::explore::{Label, Model, Move};
use world::{EVICTOR, FILLERS, FLUSHER, Next, World};

/// Transitions of which some twin has a broken one.
#[derive(Clone, Copy)]
pub(crate) struct Protocol {
    pub(crate) fault: fn(PageWord) -> (PageWord, OnFault),
    pub(crate) absent: fn(PageWord) -> (PageWord, OnAbsent),
    pub(crate) left: fn(PageWord) -> (PageWord, OnLeft),
    pub(crate) fill_failed: fn(PageWord) -> (PageWord, OnFailed),
    pub(crate) lost: fn(PageWord) -> PageWord,
    pub(crate) leave: fn(PageWord) -> Option<PageWord>,
    pub(crate) copied: fn(PageWord) -> Option<PageWord>,
    pub(crate) unpin: fn(PageWord) -> Option<PageWord>,
}

/// Transitions of production.
pub(crate) const PRODUCTION: Protocol = Protocol {
    fault: protocol::fault,
    absent: protocol::absent,
    left: |w| protocol::left(w, 0),
    fill_failed: protocol::fill_failed,
    lost: protocol::lost,
    leave: protocol::leave,
    copied: protocol::copied,
    unpin: protocol::unpin,
};

/// Deliberate mistake of a model, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Twin {
    Good,
    /// Breaks a transition.
    BreaksTransition,
    /// Calls the page resident before it is mapped.
    PublishesBeforeInstall,
    /// Calls the page remote before its bytes are in the store.
    PublishesBeforeWrite,
    /// Omits the wake after it found the page mapped already.
    NoWakeWhenAlreadyMapped,
    /// Omits the wake for a fault on a page that is there.
    NoWakeForStaleFault,
    /// Takes the page out without owning it.
    DetachesWithoutOwning,
    /// Omits the wake for a note that arrived after the install.
    NoWakeForLateNote,
    /// Omits the wake for a note on a page that could not be taken out.
    NoWakeWhenStayed,
    /// Omits the wake for a note on a page that the program took away.
    NoWakeWhenRemoved,
    /// Fills a page that seems to have vanished without looking again as its owner.
    LooksOnce,
    /// Leaves a page that was flushed unmapped.
    FlushDrops,
    /// Calls a pin complete while the page is still on its way out.
    PinsWhatLeaves,
    /// Calls a page remote whose newest bytes are lost, unless a thread waits for it.
    CallsLostRemote,
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

/// Bit of models in which pages are brought in unasked.
pub(crate) const PREFETCHES: u16 = 1;
/// Bit of models whose flusher detaches pages, writes them and puts them back.
pub(crate) const FLUSHES: u16 = 1 << 1;
/// Bit of models whose flusher gives up the pages that it writes: `Advice::DontNeed`.
pub(crate) const GIVES_UP: u16 = 1 << 2;
/// Bit of models whose program drops pages with `madvise(MADV_DONTNEED)`.
pub(crate) const MADVISES: u16 = 1 << 3;
/// Bit of models whose evictor copies a page where it lies, instead of moving it.
pub(crate) const COPIES: u16 = 1 << 4;
/// Bit of models in which a page may turn out to be held after a part of it was taken out.
pub(crate) const HOLDS: u16 = 1 << 5;
/// Bits of models in which reads from the store, or writes to it, may fail.
pub(crate) const FAILS_FILLS: u16 = 1 << 6;
pub(crate) const FAILS_WRITES: u16 = 1 << 7;
/// Bit of models in which a page that was taken out may not be mapped again; the program may
/// overwrite it.
pub(crate) const FAILS_REMAPS: u16 = 1 << 8;
/// Bit of models in which a thread of the program forks, once.
pub(crate) const FORKS: u16 = 1 << 9;

/// Program, and what may happen to its pages.
#[derive(Clone, Copy)]
pub(crate) struct Paging {
    /// Accesses of the two application threads.
    pub(crate) program: [&'static [Access]; 2],
    pub(crate) pages: usize,
    /// Number of pages that may be resident or on their way; `None`: enough.
    pub(crate) frames: Option<u8>,
    /// Bits of what may happen.
    pub(crate) can: u16,
    pub(crate) protocol: Protocol,
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

/// Names of the workers, by number.
const WORKER_NAMES: [&str; 4] = ["filler a", "filler b", "evictor", "flusher"];

/// Publishes a page as installed, whatever its age.
fn installed(word: PageWord) -> PageWord {
    protocol::installed(word, 0, 0)
}

impl Paging {
    /// Returns the model with one more mistake in its order of steps.
    pub(crate) const fn twin(self, twin: Twin) -> Paging {
        Paging { twin, ..self }
    }

    /// Returns the model with transitions that `breaks` has broken.
    pub(crate) fn broken(mut self, breaks: impl FnOnce(&mut Protocol)) -> Paging {
        breaks(&mut self.protocol);
        self.twin(Twin::BreaksTransition)
    }

    /// Returns the model in which `more` may happen, too.
    pub(crate) const fn with(self, more: u16) -> Paging {
        let can = self.can | more;
        Paging { can, ..self }
    }

    /// True if some of `what` may happen.
    fn can(&self, what: u16) -> bool {
        self.can & what != 0
    }

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
        transition: fn(PageWord) -> PageWord,
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

    /// Returns the step after a page was published: a wake if there was a note, unless `omitted` is
    /// the twin.
    fn wake_if(&self, noted: bool, omitted: Twin) -> Next {
        match noted && !self.is(omitted) {
            true => Next::Wake,
            false => Next::Idle,
        }
    }
}

/// Collector of the moves that can happen in one world.
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
            next.workers[..FILLERS].sort_unstable();
            next
        });
        self.out.push(Move {
            compulsory,
            label,
            to,
        });
    }

    /// Adds the only step that a worker can take now, or one of some. `step` returns the worker's
    /// next step.
    fn choose(
        &mut self,
        me: usize,
        does: &'static str,
        step: impl FnOnce(&mut World) -> Result<Next, Harm>,
    ) {
        let (actor, page) = (WORKER_NAMES[me], self.world.workers[me].page.into());
        self.add(true, Label { actor, does, page }, |w| {
            let next = step(w)?;
            w.go(me, next);
            Ok(())
        });
    }

    /// Adds a step that `next` follows in any case: see [`choose`](Self::choose).
    fn must(&mut self, me: usize, does: &'static str, next: Next, step: impl FnOnce(&mut World)) {
        self.choose(me, does, |w| {
            step(w);
            Ok(next)
        });
    }

    /// Adds a step that changes nothing but the worker's next step.
    fn goes(&mut self, me: usize, does: &'static str, next: Next) {
        self.must(me, does, next, |_| {});
    }

    /// Adds the beginning of a worker's work on a page, whose word it changes.
    fn own(
        &mut self,
        compulsory: bool,
        me: usize,
        does: &'static str,
        (page, word): (usize, PageWord),
        next: Next,
    ) {
        let actor = WORKER_NAMES[me];
        self.add(compulsory, Label { actor, does, page }, |w| {
            w.own(me, page, word, next);
            Ok(())
        });
    }
}

impl Model for Paging {
    type World = World;
    type Harm = Harm;

    fn start(&self) -> World {
        World {
            frames: self.frames,
            ..World::default()
        }
    }

    fn moves(&self, world: &World, out: &mut Vec<Move<World, Harm>>) {
        let mut moves = Moves {
            paging: self,
            world,
            out,
        };
        (0..2).for_each(|thread| moves.of_thread(thread));
        (0..FILLERS).for_each(|filler| moves.of_filler(filler));
        moves.of_evictor(EVICTOR);
        if self.can(FLUSHES | GIVES_UP) {
            moves.of_evictor(FLUSHER);
        }
        if self.can(MADVISES) {
            moves.of_madvise();
        }
        if self.can(FORKS) {
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
