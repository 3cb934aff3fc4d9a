//! Every interleaving of two application threads, two fillers, an evictor and a flusher, explored
//! exhaustively.
//!
//! The rule: the page protocol loses no write, shows no old byte, maps no page twice, and lets no
//! thread sleep for ever. Each mistake that could be made in it or in its use is made here once, by
//! a twin that must be caught. `--nocapture` prints how many worlds were visited, and for each twin
//! the shortest way to its harm.

#[path = "protocol_model/explore.rs"]
mod explore;
#[path = "protocol_model/paging.rs"]
mod paging;

use farpage_pager::protocol::{self, OnAbsent, OnFailed, OnFault, OnLeft, PageState, PageWord};

use explore::explore;
use paging::{
    Access::{self, Await, Pin, Read, Unpin, Write},
    COPIES, FAILS_FILLS, FAILS_REMAPS, FAILS_WRITES, FLUSHES, FORKS, GIVES_UP, HOLDS,
    Harm::{self, *},
    MADVISES, PREFETCHES, PRODUCTION, Paging, Protocol,
    Twin::*,
};

/// Program whose two threads write the page and read it again.
const PLAIN: Paging = Paging {
    program: [&[Write(0), Read(0)], &[Write(0), Read(0)]],
    pages: 1,
    frames: None,
    can: 0,
    protocol: PRODUCTION,
    twin: Good,
};

/// Program on two pages that want the same frame.
const CROWDED: Paging = Paging {
    program: [&[Write(0), Read(1)], &[Write(1), Read(0)]],
    pages: 2,
    frames: Some(1),
    ..PLAIN
};

/// Accesses of a thread that pins the page, and relies on it.
const PINS: &[Access] = &[Pin(0), Await(0), Write(0), Read(0), Unpin(0)];

/// Program of which one thread pins the page.
const PINNED: Paging = Paging {
    program: [PINS, &[Write(0), Read(0)]],
    ..PLAIN
};

/// Program of which both threads pin the page.
const PINNED_TWICE: Paging = Paging {
    program: [PINS, &[Pin(0), Await(0), Write(0), Unpin(0)]],
    ..PLAIN
};

/// Program on a page that can neither be written nor mapped again: it is lost, and stays so until
/// the program overwrites it.
const LOSES: Paging = PLAIN.with(PREFETCHES | FAILS_WRITES | FAILS_REMAPS);

/// Program whose evictor copies pages where they lie, and sleeps on the fault of one that the
/// program drops.
const COPIED: Paging = PLAIN.with(MADVISES | COPIES);

/// Program of which a third thread forks, at any moment. Its accesses are few, since its worlds are
/// many.
const FORKED: Paging = Paging {
    program: [&[Write(0), Read(0)], &[Write(0)]],
    ..PLAIN.with(FORKS)
};

/// Explores a good model. Returns whether it always comes to rest.
fn rests(what: &str, paging: Paging) -> bool {
    match explore(&paging) {
        Ok(summary) => {
            println!("{what}: {summary}");
            summary.always_comes_to_rest
        }
        Err(counterexample) => panic!("{what}: {counterexample}"),
    }
}

fn good(what: &str, paging: Paging) {
    assert!(rests(what, paging), "{what} may never come to rest");
}

fn caught(paging: Paging, expected: Harm) {
    match explore(&paging) {
        Ok(summary) => panic!(
            "{:?} does no harm in {} worlds",
            paging.twin, summary.worlds
        ),
        Err(counterexample) => {
            println!("{:?}: {counterexample}", paging.twin);
            assert_eq!(counterexample.harm, expected, "{:?}", paging.twin);
        }
    }
}

#[test]
fn two_threads_two_fillers_and_an_evictor() {
    good("plain", PLAIN);
}

#[test]
fn prefetch() {
    good("prefetch", PLAIN.with(PREFETCHES));
}

#[test]
fn flush_that_puts_the_page_back() {
    good("flush", PLAIN.with(FLUSHES));
}

#[test]
fn page_that_is_held_when_it_is_half_out() {
    good("held", PLAIN.with(HOLDS));
}

#[test]
fn program_drops_the_page_itself() {
    good("madvise", PLAIN.with(MADVISES));
}

#[test]
fn reads_from_the_store_that_fail() {
    good("failing fills", PLAIN.with(FAILS_FILLS | PREFETCHES));
}

#[test]
fn writes_to_the_store_that_fail() {
    good("failing writes", PLAIN.with(FAILS_WRITES | FLUSHES));
}

#[test]
fn pages_that_are_lost_are_never_read_as_something_older() {
    good("lost", LOSES);
    good("lost, flush", LOSES.with(FLUSHES | FAILS_FILLS));
    good("lost, madvise", LOSES.with(MADVISES | FAILS_FILLS));
    good("lost, pinned", PINNED.with(FAILS_WRITES | FAILS_REMAPS));
    let frames = Some(1);
    good("lost, one frame", Paging { frames, ..LOSES });
}

#[test]
fn page_that_leaves_as_a_copy() {
    good("copied", COPIED);
    good("copied, flush", COPIED.with(FLUSHES | PREFETCHES));
    good("copied, failing", COPIED.with(FAILS_FILLS | FAILS_WRITES));
    good("copied, pinned", PINNED.with(COPIES | FLUSHES));
}

#[test]
fn everything_at_once() {
    let fails = FAILS_FILLS | FAILS_WRITES;
    good(
        "everything",
        PLAIN.with(PREFETCHES | FLUSHES | MADVISES | HOLDS | fails),
    );
}

/// An eviction may have to follow an eviction here, so that only some schedules come to rest.
#[test]
fn two_pages_and_one_frame() {
    rests("crowded", CROWDED);
}

#[test]
fn two_pages_and_one_frame_with_flush() {
    rests("crowded, flush", CROWDED.with(FLUSHES));
}

#[test]
fn two_pages_and_one_frame_when_the_program_drops_pages() {
    rests("crowded, madvise", CROWDED.with(MADVISES));
}

#[test]
fn two_pages_and_one_frame_when_pages_are_held_and_prefetched() {
    rests("crowded, held, prefetch", CROWDED.with(HOLDS | PREFETCHES));
}

#[test]
fn pinned_page_is_there_while_others_leave() {
    good("pinned", PINNED);
    good("pinned twice", PINNED_TWICE);
}

#[test]
fn pinned_page_that_is_flushed_prefetched_and_held_comes_back() {
    good(
        "pinned, flush",
        PINNED.with(PREFETCHES | FLUSHES | HOLDS | FAILS_WRITES),
    );
    good("pinned twice, flush", PINNED_TWICE.with(FLUSHES));
}

#[test]
fn pinned_page_that_shall_be_given_up_stays() {
    good("pinned, given up", PINNED.with(GIVES_UP | PREFETCHES));
}

#[test]
fn pin_of_a_page_that_cannot_be_read_is_given_up() {
    good("pinned, failing fills", PINNED.with(FAILS_FILLS | FLUSHES));
}

/// The other page gets the frame when the pin is taken back, and not before.
#[test]
fn pinned_page_keeps_its_frame_and_gives_it_back() {
    let paging = Paging {
        program: [PINS, &[Write(1), Read(0)]],
        ..CROWDED.with(FLUSHES)
    };
    rests("crowded, pinned", paging);
}

#[test]
fn child_has_each_page_as_it_is_when_the_kernel_copies_the_program() {
    good("fork", FORKED);
    good("fork, flush", FORKED.with(FLUSHES));
    good(
        "fork, failing",
        FORKED.with(HOLDS | FAILS_FILLS | FAILS_WRITES),
    );
    good("fork, pinned", PINNED.with(FORKS | FLUSHES));
    good("fork, lost", FORKED.with(LOSES.can | MADVISES));
    rests("fork, crowded", CROWDED.with(FORKS));
}

/// The evictor sleeps inside the gate, on a fault that only a look at the page settles.
#[test]
fn fork_waits_for_a_page_that_the_program_drops_while_it_is_copied() {
    good("fork, copied", FORKED.with(COPIED.can));
}

#[test]
fn twin_that_calls_a_lost_page_poisoned() {
    let lost = protocol::poisoned;
    caught(LOSES.broken(|p| p.lost = lost), LostWrite);
}

#[test]
fn twin_that_calls_a_lost_page_remote() {
    caught(LOSES.twin(CallsLostRemote), LostWrite);
}

#[test]
fn twin_that_takes_a_copied_page_that_was_taken_up_meanwhile() {
    let copied = protocol::leave;
    caught(COPIED.broken(|p| p.copied = copied), WrongRead);
}

#[test]
fn twin_that_copies_what_it_owns() {
    caught(COPIED.twin(CopiesWhatItOwns), SleepsForever);
}

#[test]
fn twin_that_evicts_a_pinned_page() {
    let leave = protocol::borrow;
    caught(PINNED.broken(|p| p.leave = leave), PinBroken);
}

/// Lets a page leave whether or not it is pinned.
fn despite_pin(protocol: &mut Protocol) {
    protocol.left = |w| match w.wanted() {
        true => protocol::left(w, 0),
        false => (protocol::removed(w, 0).0, OnLeft::Gone),
    };
}

#[test]
fn twin_that_leaves_despite_a_pin() {
    caught(PINNED.with(GIVES_UP).broken(despite_pin), PinBroken);
}

#[test]
fn twin_that_flushes_a_pinned_page_and_drops_it() {
    let paging = PINNED.with(FLUSHES).broken(despite_pin);
    caught(paging.twin(FlushDrops), PinBroken);
}

#[test]
fn twin_that_calls_a_pin_complete_while_the_page_leaves() {
    caught(PINNED.twin(PinsWhatLeaves), PinBroken);
}

#[test]
fn twin_that_takes_back_the_pins_of_others() {
    let unpin = |mut w: PageWord| {
        while let Some(less) = protocol::unpin(w) {
            w = less;
        }
        Some(w)
    };
    caught(PINNED_TWICE.broken(|p| p.unpin = unpin), PinBroken);
}

#[test]
fn twin_that_publishes_before_the_install() {
    caught(PLAIN.twin(PublishesBeforeInstall), WrongRead);
}

#[test]
fn twin_that_publishes_before_the_bytes_are_written() {
    caught(PLAIN.twin(PublishesBeforeWrite), WrongRead);
}

#[test]
fn twin_that_leaves_no_note_on_a_leaving_page() {
    let fault = |w: PageWord| match w.state() {
        PageState::Leaving => (w, OnFault::Noted),
        _ => protocol::fault(w),
    };
    caught(PLAIN.broken(|p| p.fault = fault), SleepsForever);
}

#[test]
fn twin_that_does_not_wake_when_the_page_is_mapped_already() {
    let paging = PLAIN.with(HOLDS).twin(NoWakeWhenAlreadyMapped);
    caught(paging, SleepsForever);
}

#[test]
fn twin_that_does_not_wake_for_a_stale_fault() {
    caught(PLAIN.with(HOLDS).twin(NoWakeForStaleFault), SleepsForever);
}

#[test]
fn twin_that_leaves_despite_a_note() {
    let left = |w| (protocol::removed(w, 0).0, OnLeft::Gone);
    caught(PLAIN.broken(|p| p.left = left), SleepsForever);
}

#[test]
fn twin_that_detaches_without_owning() {
    caught(PLAIN.twin(DetachesWithoutOwning), WrongRead);
}

#[test]
fn twin_that_drops_a_failed_fill() {
    let fill_failed = |w| match protocol::fill_failed(w).1 {
        OnFailed::MustPoison => (PageWord::default(), OnFailed::Dropped),
        OnFailed::Dropped => protocol::fill_failed(w),
    };
    let paging = PLAIN.with(FAILS_FILLS);
    caught(
        paging.broken(|p| p.fill_failed = fill_failed),
        SleepsForever,
    );
}

#[test]
fn twin_that_does_not_wake_for_a_late_note() {
    caught(PLAIN.with(MADVISES).twin(NoWakeForLateNote), SleepsForever);
}

#[test]
fn twin_that_does_not_wake_for_a_note_on_a_page_that_stayed() {
    caught(PLAIN.with(HOLDS).twin(NoWakeWhenStayed), SleepsForever);
}

#[test]
fn twin_that_does_not_wake_for_a_note_on_a_removed_page() {
    caught(PLAIN.with(MADVISES).twin(NoWakeWhenRemoved), SleepsForever);
}

#[test]
fn twin_that_only_wakes_for_a_poisoned_page() {
    let absent = |w: PageWord| match w.state() {
        PageState::Poisoned => (w, OnAbsent::Stale),
        _ => protocol::absent(w),
    };
    let paging = PLAIN.with(MADVISES | FAILS_FILLS);
    caught(paging.broken(|p| p.absent = absent), NeverRests);
}

#[test]
fn twin_that_looks_once() {
    let frames = Some(1);
    caught(Paging { frames, ..PLAIN }.twin(LooksOnce), OverBudget);
}

#[test]
fn twin_that_forks_at_once() {
    caught(FORKED.twin(ForksAtOnce), HalfOut);
}

#[test]
fn twin_that_looks_at_the_gate_before_it_counts_itself() {
    caught(FORKED.twin(LooksBeforeItCounts), HalfOut);
}

#[test]
fn twin_that_counts_the_search_alone() {
    caught(FORKED.twin(CountsTheSearchAlone), HalfOut);
}

#[test]
fn twin_that_seals_the_gate_at_once() {
    caught(COPIED.with(FORKS).twin(SealsAtOnce), SleepsForever);
}

#[test]
fn twin_that_waits_for_reclaim_alone() {
    let paging = LOSES.with(FORKS | MADVISES);
    caught(paging.twin(WaitsForReclaimAlone), HalfOut);
}
