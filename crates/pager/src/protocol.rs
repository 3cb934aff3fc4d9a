//! The page protocol: one atomic word per page, and the pure functions that say what may become of
//! it.
//!
//! The rule: **only the thread that moved a page into an owned state acts on it. Any other
//! leaves a note in the word; the owner settles the note before it publishes a stable state.**
//! Nothing here touches a page, a kernel or a network; the callers do, in the order that each
//! function demands.
//!
//! ```text
//!               fault / prefetch                 installed
//!   Remote ───────────────────────▶ Filling ────────────────▶ Resident
//!    ▲  ▲ ▲                          │  │  ▲                   │    ▲
//!    │  │ └─ fill_failed, no note ───┘  │  │ heal, absent      │    │ installed (it comes back),
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
//! `Lost`: nothing fills it from the store, whose copy is an older one. Only `taken_up` moves it
//! on, when the program overwrites, moves or discards it, or when it is poisoned once more.
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
//! | 0 - 2 | state | see [`PageState`] |
//! | 3 | `WANTED` | a thread faulted on the page while it was owned |
//! | 6 | `INSTALLING` | the page may be mapped and changed; its owner has only to publish it |
//! | 7 | `COPYING` | the page is being copied, and has had no owner since the copying began |
//! | 8 - 15 | pins | number of pins by the program: unless 0 the page comes back when taken out |
//! | 16 - 19 | usage count | how many passes of the clock hand the page survives |
//! | 32 - 63 | stamp | the fill clock when it came in, was passed over or left (bit 0: by whom) |
//!
//! A word changes by compare-and-swap only. The swap into an owned state is an acquire and the one
//! out of it a release: what an owner wrote to the page entry is seen by the next owner.

use std::sync::atomic::{AtomicU64, Ordering};

use farpage_store::PageIndex;

/// State of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum PageState {
    /// Page whose bytes are in the store, or that was never written.
    Remote = 0,
    /// Page whose owner brings it in.
    Filling = 1,
    /// Page that is mapped in the program.
    Resident = 2,
    /// Page whose owner takes it out.
    Leaving = 3,
    /// Page that raises SIGBUS when touched, until a fill is tried again.
    Poisoned = 4,
    /// Page whose newest bytes are gone: a touch raises SIGBUS until the program overwrites it.
    Lost = 5,
}

const STATE: u64 = 0b111;
const WANTED: u64 = 1 << 3;
const INSTALLING: u64 = 1 << 6;
const COPYING: u64 = 1 << 7;
const PIN: u64 = 1 << 8;
const PINS: u64 = 0xff << 8;
const USAGE_SHIFT: u32 = 16;
const USAGE: u64 = 0b1111 << USAGE_SHIFT;
const STAMP_SHIFT: u32 = 32;

/// Upper bound of the usage count, in passes of the clock hand that a page survives. With less, hot
/// pages leave so often that a small budget is worse off than by least recently used. With more,
/// little is gained, and pages that were hot once stay longer.
pub const USAGE_MAX: u8 = 15;

/// Stamp of a page that never left, or whose former bytes were given up.
pub const NEVER_LEFT: u32 = 0;

/// Value of a page's word. `PageWord::default()` is `Remote`, never touched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PageWord(u64);

/// Duty of the thread that reads a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFault {
    /// The caller owns the page now and must fill it.
    Fill,
    /// The note is in the word; the owner settles it.
    Noted,
    /// The fault is stale, or the program took the page away itself: check which, then wake the
    /// thread.
    Stale,
}

/// Duty of the thread that finds a page absent: see [`absent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnAbsent {
    /// The caller owns the page as `Filling`. An evictor may just have put it back: only as its
    /// owner does a look count. A page that is still absent is filled with what was written back
    /// last.
    LookAgain,
    /// The caller owns the page and must fill it.
    Fill,
    /// The caller owns the page as `Leaving` and must publish it as lost again.
    Lose,
    /// Another owner was faster: wake the threads, which may have been served, or fault again.
    Stale,
}

/// Outcome of [`left`] for a page that was taken out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnLeft {
    /// The page is remote; its frame is free.
    Gone,
    /// The page is wanted or pinned: the caller still owns it and must install the frame again.
    TakeBack,
}

/// Outcome of [`fill_failed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFailed {
    /// The page is remote as before: no thread waits for it.
    Dropped,
    /// A thread waits: the caller still owns the page, must poison it and then call [`poisoned`].
    MustPoison,
}

impl PageWord {
    /// Returns the page's state.
    pub fn state(self) -> PageState {
        match self.0 & STATE {
            0 => PageState::Remote,
            1 => PageState::Filling,
            2 => PageState::Resident,
            3 => PageState::Leaving,
            4 => PageState::Poisoned,
            5 => PageState::Lost,
            _ => unreachable!("only these six states are ever written"),
        }
    }

    /// True if a fault arrived while the page was owned.
    pub fn wanted(self) -> bool {
        self.0 & WANTED != 0
    }

    /// Returns the number of passes of the clock hand that the page survives.
    pub fn usage(self) -> u8 {
        ((self.0 & USAGE) >> USAGE_SHIFT) as u8
    }

    /// True if the owner of the page is installing it. The program may already have the page, and
    /// may have changed it, before the word says `Resident`.
    pub fn installing(self) -> bool {
        self.0 & INSTALLING != 0
    }

    /// True if the program has pinned the page.
    pub fn pinned(self) -> bool {
        self.0 & PINS != 0
    }

    /// Returns the fill clock's time when the page became resident, was last passed over, or left.
    /// Bit 0 of the last says who found the page.
    pub fn stamp(self) -> u32 {
        (self.0 >> STAMP_SHIFT) as u32
    }

    fn with_state(self, state: PageState) -> PageWord {
        PageWord(self.0 & !(STATE | INSTALLING | COPYING) | state as u64)
    }

    fn without_note(self) -> PageWord {
        PageWord(self.0 & !WANTED)
    }

    fn with_stamp(self, stamp: u32) -> PageWord {
        PageWord(self.0 & ((1 << STAMP_SHIFT) - 1) | u64::from(stamp) << STAMP_SHIFT)
    }

    fn with_usage(self, count: u8) -> PageWord {
        PageWord(self.0 & !USAGE | u64::from(count.min(USAGE_MAX)) << USAGE_SHIFT)
    }
}

/// Applies a fault that was read: owns a remote page, leaves a note on an owned one.
pub fn fault(w: PageWord) -> (PageWord, OnFault) {
    match w.state() {
        PageState::Remote => (w.with_state(PageState::Filling).with_note(), OnFault::Fill),
        PageState::Filling | PageState::Leaving => (w.with_note(), OnFault::Noted),
        PageState::Resident | PageState::Poisoned | PageState::Lost => (w, OnFault::Stale),
    }
}

/// Leaves a note for a thread that waits without a page fault. `None`: the page has no owner, look
/// again.
pub fn note(w: PageWord) -> Option<PageWord> {
    matches!(w.state(), PageState::Filling | PageState::Leaving).then(|| w.with_note())
}

/// Owns a remote page in order to fill it ahead of need. `None`: the page is not remote.
pub fn prefetch(w: PageWord) -> Option<PageWord> {
    (w.state() == PageState::Remote).then(|| w.with_state(PageState::Filling))
}

/// Marks a filling page, or a leaving page that comes back, as about to be installed.
///
/// The install wakes the threads of all notes left before, so these are cleared. A later note may
/// be of a fault on a page that was installed and that the program took away at once: see
/// [`installed`].
pub fn installing(w: PageWord) -> PageWord {
    debug_assert!(matches!(w.state(), PageState::Filling | PageState::Leaving));
    PageWord(w.without_note().0 | INSTALLING)
}

/// Publishes an installed page as resident. If the word before had a note, the caller wakes the
/// page's threads afterwards.
///
/// Call this *after* the install: a page that is called resident too early can be taken out before
/// it is there.
pub fn installed(w: PageWord, count: u8, now: u32) -> PageWord {
    debug_assert!(matches!(w.state(), PageState::Filling | PageState::Leaving));
    w.with_state(PageState::Resident)
        .without_note()
        .with_usage(count)
        .with_stamp(now)
}

/// Settles a page that its owner could not fill, or could not install again although its bytes are
/// in the store.
pub fn fill_failed(w: PageWord) -> (PageWord, OnFailed) {
    debug_assert!(matches!(w.state(), PageState::Filling | PageState::Leaving));
    if w.wanted() {
        (w, OnFailed::MustPoison)
    } else {
        (w.with_state(PageState::Remote), OnFailed::Dropped)
    }
}

/// Publishes a page that its owner has poisoned. The caller wakes the page's threads afterwards:
/// one may have faulted meanwhile.
pub fn poisoned(w: PageWord) -> PageWord {
    debug_assert!(matches!(w.state(), PageState::Filling | PageState::Leaving));
    w.with_state(PageState::Poisoned).without_note()
}

/// Publishes a page whose newest bytes are gone: the store lacks them, and the owner has poisoned
/// the page. The caller wakes the page's threads afterwards: one may have faulted meanwhile.
pub fn lost(w: PageWord) -> PageWord {
    debug_assert!(matches!(w.state(), PageState::Filling | PageState::Leaving));
    w.with_state(PageState::Lost).without_note()
}

/// Owns a lost page, to give it new bytes or to poison it once more. `None`: the page is not lost.
pub fn taken_up(w: PageWord) -> Option<PageWord> {
    (w.state() == PageState::Lost).then(|| w.with_state(PageState::Leaving))
}

/// Owns a poisoned page in order to fill it again. `None`: the page is not poisoned.
pub fn heal(w: PageWord) -> Option<PageWord> {
    (w.state() == PageState::Poisoned).then(|| w.with_state(PageState::Filling).with_note())
}

/// Owns a resident page in order to evict it. `None`: the page is not resident, or is pinned.
pub fn leave(w: PageWord) -> Option<PageWord> {
    borrow(w).filter(|w| !w.pinned())
}

/// Owns a resident page in order to write it back. The page comes back afterwards if it is pinned
/// or its borrower wants it to. `None`: the page is not resident.
pub fn borrow(w: PageWord) -> Option<PageWord> {
    (w.state() == PageState::Resident).then(|| w.with_state(PageState::Leaving))
}

/// Marks a resident page that is copied where it lies, without owning it. `None`: the page is not
/// resident, or is pinned.
///
/// Call this *before* writes to the page are kept out. Every change of state clears the mark.
pub fn copying(w: PageWord) -> Option<PageWord> {
    (w.state() == PageState::Resident && !w.pinned()).then_some(PageWord(w.0 | COPYING))
}

/// Owns a page that was copied, in order to evict it. `None`: the page is pinned, or has had an
/// owner since the copying began and may hold something else.
pub fn copied(w: PageWord) -> Option<PageWord> {
    (w.0 & COPYING != 0).then(|| leave(w)).flatten()
}

/// Adds one pin. `None`: the page is pinned 255 times already.
///
/// The page may be in any state: the caller brings it in afterwards. A page that is on its way out
/// comes back.
pub fn pin(w: PageWord) -> Option<PageWord> {
    (w.0 & PINS != PINS).then(|| PageWord(w.0 + PIN))
}

/// Takes back one [`pin`]. `None`: the page is not pinned.
pub fn unpin(w: PageWord) -> Option<PageWord> {
    w.pinned().then(|| PageWord(w.0 - PIN))
}

/// Publishes a leaving page that stays mapped: it could not be taken out, or must not be. The
/// caller wakes the page's threads if there was a note.
pub fn stayed(w: PageWord) -> PageWord {
    debug_assert_eq!(w.state(), PageState::Leaving);
    w.with_state(PageState::Resident).without_note()
}

/// Publishes a page whose bytes are safe in the store as remote, unless it is wanted or pinned.
///
/// Call this *after* the bytes are safe: the next fill reads them from the store.
pub fn left(w: PageWord, now: u32) -> (PageWord, OnLeft) {
    debug_assert_eq!(w.state(), PageState::Leaving);
    if w.wanted() || w.pinned() {
        (w, OnLeft::TakeBack)
    } else {
        (
            w.with_state(PageState::Remote)
                .with_stamp(now)
                .with_usage(0),
            OnLeft::Gone,
        )
    }
}

/// Forgets when the owned page left: the next fill does not count as a return.
pub fn forgotten(w: PageWord) -> PageWord {
    debug_assert!(matches!(w.state(), PageState::Filling | PageState::Leaving));
    w.with_stamp(NEVER_LEFT)
}

/// Publishes a page as remote that its owner found unmapped: the program took it away itself. The
/// page is from now on what was written back last. Returns true if the caller must wake threads
/// that sleep on the page; they fault again, and are served.
pub fn removed(w: PageWord, now: u32) -> (PageWord, bool) {
    debug_assert_eq!(w.state(), PageState::Leaving);
    (
        w.with_state(PageState::Remote)
            .without_note()
            .with_stamp(now)
            .with_usage(0),
        w.wanted(),
    )
}

/// Applies the sight that a page is absent which is called resident, poisoned or lost: the program
/// took it or its poison away itself (`madvise`). Owns it, unless another thread was faster.
pub fn absent(w: PageWord) -> (PageWord, OnAbsent) {
    let filling = w.with_state(PageState::Filling).with_note();
    match w.state() {
        PageState::Resident => (filling, OnAbsent::LookAgain),
        PageState::Poisoned => (filling, OnAbsent::Fill),
        PageState::Lost => (w.with_state(PageState::Leaving), OnAbsent::Lose),
        PageState::Remote | PageState::Filling | PageState::Leaving => (w, OnAbsent::Stale),
    }
}

/// Applies a thread's wish for a page that it has not touched: as [`fault`], but heals it, too.
pub fn demand(w: PageWord) -> (PageWord, OnFault) {
    heal(w).map_or_else(|| fault(w), |mine| (mine, OnFault::Fill))
}

/// Lowers the usage count of a resident page by one, as the clock hand passes, and makes the page
/// as young as at its installation.
pub fn passed_over(w: PageWord, now: u32) -> PageWord {
    w.with_usage(w.usage().saturating_sub(1)).with_stamp(now)
}

impl PageWord {
    fn with_note(self) -> PageWord {
        PageWord(self.0 | WANTED)
    }
}

/// Words of a region's pages, one after the other; each changes by compare-and-swap.
#[derive(Debug)]
pub struct PageWords(Vec<AtomicU64>);

impl PageWords {
    /// Returns `pages` words, all `Remote`. The memory of a word is not touched before its page is.
    pub fn new(pages: usize) -> PageWords {
        PageWords(bytemuck::zeroed_vec(pages))
    }

    /// Returns the number of pages.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True if there is no page at all.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the current word of `page`.
    pub fn load(&self, page: PageIndex) -> PageWord {
        PageWord(self.0[page.0].load(Ordering::Acquire))
    }

    /// Applies a transition that always applies. Returns its outcome.
    pub fn apply<T>(&self, page: PageIndex, transition: impl Fn(PageWord) -> (PageWord, T)) -> T {
        let cell = &self.0[page.0];
        let mut seen = cell.load(Ordering::Acquire);
        loop {
            let (next, outcome) = transition(PageWord(seen));
            match cell.compare_exchange_weak(seen, next.0, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return outcome,
                Err(now) => seen = now,
            }
        }
    }

    /// Applies a transition that may not apply. Returns the word before and after it, or `None` if
    /// it does not apply.
    pub fn try_apply(
        &self,
        page: PageIndex,
        transition: impl Fn(PageWord) -> Option<PageWord>,
    ) -> Option<(PageWord, PageWord)> {
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
        let w = PageWord::default()
            .with_stamp(u32::MAX)
            .with_usage(USAGE_MAX)
            .with_state(PageState::Resident)
            .with_note();
        let fields = (w.usage(), w.stamp(), w.state(), w.wanted());
        assert_eq!(fields, (USAGE_MAX, u32::MAX, PageState::Resident, true));
        assert_eq!(
            w.without_note()
                .with_usage(0)
                .with_stamp(0)
                .with_state(PageState::Remote),
            PageWord::default()
        );
    }

    #[test]
    fn note_on_a_leaving_page_takes_it_back() {
        let (w, _) = fault(leave(PageWord::default().with_state(PageState::Resident)).unwrap());
        assert_eq!(left(w, 7).1, OnLeft::TakeBack);
    }

    #[test]
    fn pins_are_counted_and_touch_nothing_else() {
        let word = PageWord::default()
            .with_stamp(u32::MAX)
            .with_usage(USAGE_MAX)
            .with_state(PageState::Poisoned)
            .with_note();
        let mut w = word;
        for _ in 0..255 {
            w = pin(w).unwrap();
            let fields = (w.usage(), w.stamp(), w.state(), w.wanted(), w.installing());
            assert_eq!(
                fields,
                (USAGE_MAX, u32::MAX, PageState::Poisoned, true, false)
            );
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
        let w = pin(PageWord::default().with_state(PageState::Resident)).unwrap();
        assert_eq!(leave(w), None);
        let borrowed = borrow(w).unwrap();
        assert_eq!(left(borrowed, 7), (borrowed, OnLeft::TakeBack));
        assert_eq!(left(unpin(borrowed).unwrap(), 7).1, OnLeft::Gone);
    }

    #[test]
    fn lost_page_comes_back_by_being_taken_up_alone() {
        let leaving = leave(PageWord::default().with_state(PageState::Resident)).unwrap();
        let w = lost(fault(leaving).0);
        assert_eq!((w.state(), w.wanted()), (PageState::Lost, false));
        assert_eq!(fault(w), (w, OnFault::Stale));
        assert_eq!(absent(w).1, OnAbsent::Lose);
        let refusals = [heal, prefetch, borrow, leave, note];
        assert!(refusals.iter().all(|refused| refused(w).is_none()));
        let taken_up = taken_up(w).unwrap();
        assert_eq!(taken_up.state(), PageState::Leaving);
        assert_eq!(installed(taken_up, 0, 7).state(), PageState::Resident);
    }

    #[test]
    fn failed_prefetch_harms_nobody_and_failed_fault_is_told() {
        let ahead = prefetch(PageWord::default()).unwrap();
        assert_eq!(fill_failed(ahead), (PageWord::default(), OnFailed::Dropped));
        let (noted, action) = fault(ahead);
        assert_eq!(action, OnFault::Noted);
        assert_eq!(fill_failed(noted).1, OnFailed::MustPoison);
    }
}
