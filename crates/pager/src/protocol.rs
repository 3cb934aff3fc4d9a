//! The page protocol: one atomic word per page, and the pure functions that say what may become of
//! it.
//!
//! The rule: **only the thread that moved a page into an owned state acts on it. Everyone else
//! leaves a note in the word; the owner settles the note before it publishes a stable state.**
//! Nothing here touches a page, a kernel or a network; the callers do, in the order that each
//! function demands.
//!
//! ```text
//!               fault / prefetch                 installed
//!   Remote ───────────────────────▶ Filling ────────────────▶ Resident
//!    ▲  ▲ ▲                          │  │  ▲                   │    ▲
//!    │  │ └─ fill_failed, no note ───┘  │  │ heal, vanished    │    │ installed (it comes back),
//!    │  │         fill_failed, WANTED   ▼  │             leave │    │ stayed (it never went)
//!    │  │                            Poisoned                 ▼    │
//!    │  └──────────────────────────────────────────────────  Leaving
//!    └──────── removed ───────────────────  left, no note  ──────┘
//! ```
//!
//! A page may be taken out and come back without having left: because it is wanted, because it is
//! flushed and stays, or because its write-back failed. It is `Leaving` all the while. So `Filling`
//! always means that the page's bytes are in the store, and a flush that meets `Leaving` knows that
//! it has to wait.
//!
//! A page that left with bytes that the store does not have, and that could not be mapped again, is
//! `Lost`: nothing fills it from the store, whose copy is an older one. It comes back by `taken_up`
//! alone, by somebody who has bytes for it: the program, which overwrites it.
//!
//! ```text
//!   Leaving, or Filling of bytes that were never stored ── lost ──▶ Lost ── taken_up ──▶ Leaving
//! ```
//!
//! Stable states are `Remote`, `Resident`, `Poisoned` and `Lost`; owned states are `Filling` and
//! `Leaving`. A page that was never written is `Remote` too: its page entry says that it holds
//! zeros, and filling it costs no request.
//!
//! The word, from bit 0:
//!
//! | bits | field | means |
//! |---|---|---|
//! | 0 - 2 | state | see [`State`] |
//! | 3 | `WANTED` | a thread faulted on the page while it was owned |
//! | 6 | `INSTALLING` | the page may be mapped and changed; its owner has only to publish it |
//! | 7 | `COPYING` | the page is being copied, and nobody has owned it since that began |
//! | 8 - 15 | pins | how often the program has pinned the page: unless 0 it comes back when taken out |
//! | 16 - 19 | heat | how many sweeps the page survives |
//! | 32 - 63 | stamp | the fill clock when it became resident, or when it left |
//!
//! A word changes by compare-and-swap only. The swap into an owned state is an acquire and the one
//! out of it a release: what an owner wrote to the page entry is seen by the next owner.

use std::sync::atomic::{AtomicU64, Ordering};

use farpage_store::PageIndex;

/// Where a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum State {
    /// Not here: the store has it, or it was never written.
    Remote = 0,
    /// Owned by whoever brings it in.
    Filling = 1,
    /// Mapped in the program.
    Resident = 2,
    /// Owned by whoever takes it out.
    Leaving = 3,
    /// Lost for now: touching it raises SIGBUS.
    Poisoned = 4,
    /// Its newest bytes are nowhere: touching it raises SIGBUS until the program overwrites it.
    Lost = 5,
}

const STATE: u64 = 0b111;
const WANTED: u64 = 1 << 3;
const INSTALLING: u64 = 1 << 6;
const COPYING: u64 = 1 << 7;
const PIN: u64 = 1 << 8;
const PINS: u64 = 0xff << 8;
const HEAT_SHIFT: u32 = 16;
const HEAT: u64 = 0b1111 << HEAT_SHIFT;
const STAMP_SHIFT: u32 = 32;

/// The highest heat: a page survives so many sweeps at most. With less, pages that are hot leave so
/// often that a small budget is worse off than by least recently used; with more, little is gained,
/// and what was hot once stays longer.
pub const HEAT_MAX: u8 = 15;

/// The stamp of a page that never left, or whose bytes nobody wants any more.
pub const NEVER_LEFT: u32 = 0;

/// A page's word, as a value. `Word::default()` is `Remote`, never touched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Word(u64);

/// What a faulting page asks of the thread that reads the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFault {
    /// The caller owns the page now and must fill it.
    Fill,
    /// The note is in the word; the owner settles it.
    Noted,
    /// The fault is stale, or the program took the page away itself: wake its thread after looking
    /// which.
    Stale,
}

/// What became of a page whose owner is done taking it out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnLeft {
    /// The page is remote; its frame is free.
    Gone,
    /// Somebody wants it, or has pinned it: the caller still owns it and must install the frame
    /// again.
    TakeBack,
}

/// What became of a page whose fill failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFailed {
    /// Nobody waits: the page is remote as before.
    Dropped,
    /// Somebody waits: the caller still owns the page, must poison it and then call [`poisoned`].
    MustPoison,
}

impl Word {
    /// The page's state.
    pub fn state(self) -> State {
        match self.0 & STATE {
            0 => State::Remote,
            1 => State::Filling,
            2 => State::Resident,
            3 => State::Leaving,
            4 => State::Poisoned,
            5 => State::Lost,
            _ => unreachable!("only these six states are ever written"),
        }
    }

    /// Whether a fault arrived while the page was owned.
    pub fn wanted(self) -> bool {
        self.0 & WANTED != 0
    }

    /// How many sweeps the page survives.
    pub fn heat(self) -> u8 {
        ((self.0 & HEAT) >> HEAT_SHIFT) as u8
    }

    /// Whether the owner of the page is installing it. The program may have it, and may have
    /// changed it, before it is called resident.
    pub fn installing(self) -> bool {
        self.0 & INSTALLING != 0
    }

    /// Whether the program has pinned the page.
    pub fn pinned(self) -> bool {
        self.0 & PINS != 0
    }

    /// The fill clock when the page became resident or when it left.
    pub fn stamp(self) -> u32 {
        (self.0 >> STAMP_SHIFT) as u32
    }

    fn with_state(self, state: State) -> Word {
        Word(self.0 & !(STATE | INSTALLING | COPYING) | state as u64)
    }

    fn without_note(self) -> Word {
        Word(self.0 & !WANTED)
    }

    fn with_stamp(self, stamp: u32) -> Word {
        Word(self.0 & ((1 << STAMP_SHIFT) - 1) | u64::from(stamp) << STAMP_SHIFT)
    }

    fn with_heat(self, heat: u8) -> Word {
        Word(self.0 & !HEAT | u64::from(heat.min(HEAT_MAX)) << HEAT_SHIFT)
    }
}

/// A fault on the page was read.
pub fn fault(w: Word) -> (Word, OnFault) {
    match w.state() {
        State::Remote => (w.with_state(State::Filling).with_note(), OnFault::Fill),
        State::Filling | State::Leaving => (w.with_note(), OnFault::Noted),
        State::Resident | State::Poisoned | State::Lost => (w, OnFault::Stale),
    }
}

/// A thread waits for the page without having faulted in the kernel's eyes. `None`: nobody owns it,
/// look again.
pub fn note(w: Word) -> Option<Word> {
    matches!(w.state(), State::Filling | State::Leaving).then(|| w.with_note())
}

/// Somebody expects the page to be needed. `None`: nothing to do.
pub fn prefetch(w: Word) -> Option<Word> {
    (w.state() == State::Remote).then(|| w.with_state(State::Filling))
}

/// The owner of a filling page, or of a leaving page that comes back, is about to install it.
///
/// Notes of faults that were read before are settled by the install, which wakes their threads.
/// What is noted after this may be a fault on a page that was installed and that the program took
/// away at once: see [`installed`].
pub fn installing(w: Word) -> Word {
    debug_assert!(matches!(w.state(), State::Filling | State::Leaving));
    Word(w.without_note().0 | INSTALLING)
}

/// The owner has installed the page. If the word before had a note, the caller wakes the page's
/// threads afterwards.
///
/// Call it *after* the install: a page that is called resident too early can be taken out before it
/// is there.
pub fn installed(w: Word, heat: u8, now: u32) -> Word {
    debug_assert!(matches!(w.state(), State::Filling | State::Leaving));
    w.with_state(State::Resident)
        .without_note()
        .with_heat(heat)
        .with_stamp(now)
}

/// The owner could not fill the page, or could not install it again although its bytes are in the
/// store.
pub fn fill_failed(w: Word) -> (Word, OnFailed) {
    debug_assert!(matches!(w.state(), State::Filling | State::Leaving));
    if w.wanted() {
        (w, OnFailed::MustPoison)
    } else {
        (w.with_state(State::Remote), OnFailed::Dropped)
    }
}

/// The owner has poisoned the page. The caller wakes its threads afterwards: one may have faulted
/// since.
pub fn poisoned(w: Word) -> Word {
    debug_assert!(matches!(w.state(), State::Filling | State::Leaving));
    w.with_state(State::Poisoned).without_note()
}

/// The owner's bytes of the page, which the store does not have, are gone, and the owner has
/// poisoned the page. The caller wakes its threads afterwards: one may have faulted since.
pub fn lost(w: Word) -> Word {
    debug_assert!(matches!(w.state(), State::Filling | State::Leaving));
    w.with_state(State::Lost).without_note()
}

/// Somebody has new bytes for a lost page, or poisons it once more. `None`: it is not lost.
pub fn taken_up(w: Word) -> Option<Word> {
    (w.state() == State::Lost).then(|| w.with_state(State::Leaving))
}

/// Somebody tries to bring a poisoned page in again. `None`: it is not poisoned.
pub fn heal(w: Word) -> Option<Word> {
    (w.state() == State::Poisoned).then(|| w.with_state(State::Filling).with_note())
}

/// The page shall leave. `None`: it is not resident, or pinned.
pub fn leave(w: Word) -> Option<Word> {
    borrow(w).filter(|w| !w.pinned())
}

/// The page shall be written back. It comes back afterwards if it is pinned or its borrower wants
/// it to. `None`: it is not resident.
pub fn borrow(w: Word) -> Option<Word> {
    (w.state() == State::Resident).then(|| w.with_state(State::Leaving))
}

/// Somebody copies the page where it lies, without owning it. `None`: it is not resident, or
/// pinned.
///
/// Call it *before* writes to the page are kept out. Every change of state takes the mark away.
pub fn copying(w: Word) -> Option<Word> {
    (w.state() == State::Resident && !w.pinned()).then_some(Word(w.0 | COPYING))
}

/// The page was copied and shall leave. `None`: it is pinned, or somebody has owned it since the
/// copying began, so that it may hold something else.
pub fn copied(w: Word) -> Option<Word> {
    (w.0 & COPYING != 0).then(|| leave(w)).flatten()
}

/// The program wants the page to stay once it is here. `None`: it is pinned too often already.
///
/// The page may be anywhere: who pins it brings it in afterwards. One that is on its way out comes
/// back.
pub fn pin(w: Word) -> Option<Word> {
    (w.0 & PINS != PINS).then(|| Word(w.0 + PIN))
}

/// Takes back one [`pin`]. `None`: the page is not pinned.
pub fn unpin(w: Word) -> Option<Word> {
    w.pinned().then(|| Word(w.0 - PIN))
}

/// The page could not be taken out, or must not be: it is mapped as before. The caller wakes if
/// there was a note.
pub fn stayed(w: Word) -> Word {
    debug_assert_eq!(w.state(), State::Leaving);
    w.with_state(State::Resident).without_note()
}

/// The page is out and its bytes are safe in the store.
///
/// Call it *after* the bytes are safe: whoever fills the page next reads them from there.
pub fn left(w: Word, now: u32) -> (Word, OnLeft) {
    debug_assert_eq!(w.state(), State::Leaving);
    if w.wanted() || w.pinned() {
        (w, OnLeft::TakeBack)
    } else {
        (
            w.with_state(State::Remote).with_stamp(now).with_heat(0),
            OnLeft::Gone,
        )
    }
}

/// What the owned page was is gone for good: what comes in next does not come back.
pub fn forgotten(w: Word) -> Word {
    debug_assert!(matches!(w.state(), State::Filling | State::Leaving));
    w.with_stamp(NEVER_LEFT)
}

/// The owner found no page to take out: the program took it away itself. What was written back last
/// is the page from now on. Returns whether the caller must wake threads that sleep on the page;
/// they fault again, and are served.
pub fn removed(w: Word, now: u32) -> (Word, bool) {
    debug_assert_eq!(w.state(), State::Leaving);
    (
        w.with_state(State::Remote)
            .without_note()
            .with_stamp(now)
            .with_heat(0),
        w.wanted(),
    )
}

/// A fault was read on a page that is called resident but is not mapped: the program took it away
/// itself (`madvise`). The caller owns it and fills it again with what was written back last.
pub fn vanished(w: Word) -> Option<Word> {
    (w.state() == State::Resident).then(|| w.with_state(State::Filling).with_note())
}

/// A sweep passes a resident page: it cools by one, and is as young again as at its installation.
pub fn cooled(w: Word, now: u32) -> Word {
    w.with_heat(w.heat().saturating_sub(1)).with_stamp(now)
}

impl Word {
    fn with_note(self) -> Word {
        Word(self.0 | WANTED)
    }
}

/// The words of a region's pages, one after the other; each changes by compare-and-swap.
#[derive(Debug)]
pub struct Words(Vec<AtomicU64>);

impl Words {
    /// `pages` words, all `Remote`. Their memory is not touched before a page is.
    pub fn new(pages: usize) -> Words {
        Words(bytemuck::zeroed_vec(pages))
    }

    /// How many pages there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is no page at all.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A page's word now.
    pub fn load(&self, page: PageIndex) -> Word {
        Word(self.0[page.0].load(Ordering::Acquire))
    }

    /// Applies a transition that always applies; returns its outcome.
    pub fn apply<T>(&self, page: PageIndex, transition: impl Fn(Word) -> (Word, T)) -> T {
        let cell = &self.0[page.0];
        let mut seen = cell.load(Ordering::Acquire);
        loop {
            let (next, outcome) = transition(Word(seen));
            match cell.compare_exchange_weak(seen, next.0, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return outcome,
                Err(now) => seen = now,
            }
        }
    }

    /// Applies a transition that may not apply; returns the word before and after it, or `None` if
    /// it does not apply.
    pub fn try_apply(
        &self,
        page: PageIndex,
        transition: impl Fn(Word) -> Option<Word>,
    ) -> Option<(Word, Word)> {
        self.apply(page, |w| match transition(w) {
            Some(next) => (next, Some((w, next))),
            None => (w, None),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_do_not_touch_each_other() {
        let w = Word::default()
            .with_stamp(u32::MAX)
            .with_heat(HEAT_MAX)
            .with_state(State::Resident)
            .with_note();
        let fields = (w.heat(), w.stamp(), w.state(), w.wanted());
        assert_eq!(fields, (HEAT_MAX, u32::MAX, State::Resident, true));
        assert_eq!(
            w.without_note()
                .with_heat(0)
                .with_stamp(0)
                .with_state(State::Remote),
            Word::default()
        );
    }

    #[test]
    fn note_on_a_leaving_page_takes_it_back() {
        let (w, _) = fault(leave(Word::default().with_state(State::Resident)).unwrap());
        assert_eq!(left(w, 7).1, OnLeft::TakeBack);
    }

    #[test]
    fn pins_are_counted_and_touch_nothing_else() {
        let word = Word::default()
            .with_stamp(u32::MAX)
            .with_heat(HEAT_MAX)
            .with_state(State::Poisoned)
            .with_note();
        let mut w = word;
        for _ in 0..255 {
            w = pin(w).unwrap();
            let fields = (w.heat(), w.stamp(), w.state(), w.wanted(), w.installing());
            assert_eq!(fields, (HEAT_MAX, u32::MAX, State::Poisoned, true, false));
        }
        assert_eq!(pin(w), None);
        for _ in 0..255 {
            assert!(w.pinned());
            w = unpin(w).unwrap();
        }
        assert_eq!((w, unpin(w)), (word, None));
    }

    #[test]
    fn pinned_page_is_no_victim_but_can_be_borrowed_and_comes_back() {
        let w = pin(Word::default().with_state(State::Resident)).unwrap();
        assert_eq!(leave(w), None);
        let borrowed = borrow(w).unwrap();
        assert_eq!(left(borrowed, 7), (borrowed, OnLeft::TakeBack));
        assert_eq!(left(unpin(borrowed).unwrap(), 7).1, OnLeft::Gone);
    }

    #[test]
    fn lost_page_comes_back_by_being_taken_up_alone() {
        let leaving = leave(Word::default().with_state(State::Resident)).unwrap();
        let w = lost(fault(leaving).0);
        assert_eq!((w.state(), w.wanted()), (State::Lost, false));
        assert_eq!(fault(w), (w, OnFault::Stale));
        let refusals = [heal, prefetch, borrow, leave, note, vanished];
        assert!(refusals.iter().all(|refused| refused(w).is_none()));
        let taken_up = taken_up(w).unwrap();
        assert_eq!(taken_up.state(), State::Leaving);
        assert_eq!(installed(taken_up, 0, 7).state(), State::Resident);
    }

    #[test]
    fn failed_prefetch_harms_nobody_and_failed_fault_is_told() {
        let ahead = prefetch(Word::default()).unwrap();
        assert_eq!(fill_failed(ahead), (Word::default(), OnFailed::Dropped));
        let (noted, action) = fault(ahead);
        assert_eq!(action, OnFault::Noted);
        assert_eq!(fill_failed(noted).1, OnFailed::MustPoison);
    }
}
