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
    COPIES, FAILS_FILLS, FAILS_REMAPS, FAILS_WRITES, FLUSHES, FORKS, GIVES_UP, HOLDS, Harm,
    MADVISES, PREFETCHES, PRODUCTION, Paging, Protocol, Twin,
};

/// Program whose two threads write the page and read it again.
const PLAIN: Paging = Paging {
    program: [&[Write(0), Read(0)], &[Write(0), Read(0)]],
    pages: 1,
    frames: None,
    can: 0,
    protocol: PRODUCTION,
    twin: Twin::Good,
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
fn is_harmless(what: &str, paging: Paging) -> bool {
    match explore(&paging) {
        Ok(summary) => {
            println!("{what}: {summary}");
            summary.always_comes_to_rest
        }
        Err(counterexample) => panic!("{what}: {counterexample}"),
    }
}

fn assert_good(what: &str, paging: Paging) {
    assert!(is_harmless(what, paging), "{what} may never come to rest");
}

fn assert_caught(paging: Paging, expected: Harm) {
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
    assert_good("plain", PLAIN);
}

#[test]
fn prefetch() {
    assert_good("prefetch", PLAIN.with(PREFETCHES));
}

#[test]
fn flush_that_puts_the_page_back() {
    assert_good("flush", PLAIN.with(FLUSHES));
}

#[test]
fn page_that_is_held_when_it_is_half_out() {
    assert_good("held", PLAIN.with(HOLDS));
}

#[test]
fn program_drops_the_page_itself() {
    assert_good("madvise", PLAIN.with(MADVISES));
}

#[test]
fn reads_from_the_store_that_fail() {
    assert_good("failing fills", PLAIN.with(FAILS_FILLS | PREFETCHES));
}

#[test]
fn writes_to_the_store_that_fail() {
    assert_good("failing writes", PLAIN.with(FAILS_WRITES | FLUSHES));
}

#[test]
fn pages_that_are_lost_are_never_read_as_something_older() {
    assert_good("lost", LOSES);
    assert_good("lost, flush", LOSES.with(FLUSHES | FAILS_FILLS));
    assert_good("lost, madvise", LOSES.with(MADVISES | FAILS_FILLS));
    assert_good("lost, pinned", PINNED.with(FAILS_WRITES | FAILS_REMAPS));
    let frames = Some(1);
    assert_good("lost, one frame", Paging { frames, ..LOSES });
}

#[test]
fn page_that_leaves_as_a_copy() {
    assert_good("copied", COPIED);
    assert_good("copied, flush", COPIED.with(FLUSHES | PREFETCHES));
    assert_good("copied, failing", COPIED.with(FAILS_FILLS | FAILS_WRITES));
    assert_good("copied, pinned", PINNED.with(COPIES | FLUSHES));
}

#[test]
fn everything_at_once() {
    let fails = FAILS_FILLS | FAILS_WRITES;
    assert_good(
        "everything",
        PLAIN.with(PREFETCHES | FLUSHES | MADVISES | HOLDS | fails),
    );
}

/// An eviction may have to follow an eviction here, so that only some schedules come to rest.
#[test]
fn two_pages_and_one_frame() {
    is_harmless("crowded", CROWDED);
}

#[test]
fn two_pages_and_one_frame_with_flush() {
    is_harmless("crowded, flush", CROWDED.with(FLUSHES));
}

#[test]
fn two_pages_and_one_frame_when_the_program_drops_pages() {
    is_harmless("crowded, madvise", CROWDED.with(MADVISES));
}

#[test]
fn two_pages_and_one_frame_when_pages_are_held_and_prefetched() {
    is_harmless("crowded, held, prefetch", CROWDED.with(HOLDS | PREFETCHES));
}

#[test]
fn pinned_page_is_there_while_others_leave() {
    assert_good("pinned", PINNED);
    assert_good("pinned twice", PINNED_TWICE);
}

#[test]
fn pinned_page_that_is_flushed_prefetched_and_held_comes_back() {
    assert_good(
        "pinned, flush",
        PINNED.with(PREFETCHES | FLUSHES | HOLDS | FAILS_WRITES),
    );
    assert_good("pinned twice, flush", PINNED_TWICE.with(FLUSHES));
}

#[test]
fn pinned_page_that_shall_be_given_up_stays() {
    assert_good("pinned, given up", PINNED.with(GIVES_UP | PREFETCHES));
}

#[test]
fn pin_of_a_page_that_cannot_be_read_is_given_up() {
    assert_good("pinned, failing fills", PINNED.with(FAILS_FILLS | FLUSHES));
}

/// The other page gets the frame when the pin is taken back, and not before.
#[test]
fn pinned_page_keeps_its_frame_and_gives_it_back() {
    let paging = Paging {
        program: [PINS, &[Write(1), Read(0)]],
        ..CROWDED.with(FLUSHES)
    };
    is_harmless("crowded, pinned", paging);
}

#[test]
fn child_has_each_page_as_it_is_when_the_kernel_copies_the_program() {
    assert_good("fork", FORKED);
    assert_good("fork, flush", FORKED.with(FLUSHES));
    assert_good(
        "fork, failing",
        FORKED.with(HOLDS | FAILS_FILLS | FAILS_WRITES),
    );
    assert_good("fork, pinned", PINNED.with(FORKS | FLUSHES));
    assert_good("fork, lost", FORKED.with(LOSES.can | MADVISES));
    is_harmless("fork, crowded", CROWDED.with(FORKS));
}

/// The evictor sleeps inside the gate, on a fault that only a look at the page settles.
#[test]
fn fork_waits_for_a_page_that_the_program_drops_while_it_is_copied() {
    assert_good("fork, copied", FORKED.with(COPIED.can));
}

#[test]
fn twin_that_calls_a_lost_page_poisoned() {
    let lost = protocol::poisoned;
    assert_caught(
        LOSES.broken(Protocol { lost, ..PRODUCTION }),
        Harm::LostWrite,
    );
}

#[test]
fn twin_that_calls_a_lost_page_remote() {
    assert_caught(LOSES.twin(Twin::CallsLostRemote), Harm::LostWrite);
}

#[test]
fn twin_that_takes_a_copied_page_that_was_taken_up_meanwhile() {
    let copied = protocol::leave;
    assert_caught(
        COPIED.broken(Protocol {
            copied,
            ..PRODUCTION
        }),
        Harm::WrongRead,
    );
}

#[test]
fn twin_that_copies_what_it_owns() {
    assert_caught(COPIED.twin(Twin::CopiesWhatItOwns), Harm::SleepsForever);
}

#[test]
fn twin_that_evicts_a_pinned_page() {
    let leave = protocol::borrow;
    assert_caught(
        PINNED.broken(Protocol {
            leave,
            ..PRODUCTION
        }),
        Harm::PinBroken,
    );
}

/// Transitions by which a page leaves, whether or not it is pinned.
const DESPITE_PIN: Protocol = Protocol {
    left: |w| match w.wanted() {
        true => protocol::left(w, 0),
        false => (protocol::removed(w, 0).0, OnLeft::Gone),
    },
    ..PRODUCTION
};

#[test]
fn twin_that_leaves_despite_a_pin() {
    assert_caught(PINNED.with(GIVES_UP).broken(DESPITE_PIN), Harm::PinBroken);
}

#[test]
fn twin_that_flushes_a_pinned_page_and_drops_it() {
    let paging = PINNED.with(FLUSHES).broken(DESPITE_PIN);
    assert_caught(paging.twin(Twin::FlushDrops), Harm::PinBroken);
}

#[test]
fn twin_that_calls_a_pin_complete_while_the_page_leaves() {
    assert_caught(PINNED.twin(Twin::PinsWhatLeaves), Harm::PinBroken);
}

#[test]
fn twin_that_takes_back_the_pins_of_others() {
    let unpin = |mut w: PageWord| {
        while let Some(less) = protocol::unpin(w) {
            w = less;
        }
        Some(w)
    };
    assert_caught(
        PINNED_TWICE.broken(Protocol {
            unpin,
            ..PRODUCTION
        }),
        Harm::PinBroken,
    );
}

#[test]
fn twin_that_publishes_before_the_install() {
    assert_caught(PLAIN.twin(Twin::PublishesBeforeInstall), Harm::WrongRead);
}

#[test]
fn twin_that_publishes_before_the_bytes_are_written() {
    assert_caught(PLAIN.twin(Twin::PublishesBeforeWrite), Harm::WrongRead);
}

#[test]
fn twin_that_leaves_no_note_on_a_leaving_page() {
    let fault = |w: PageWord| match w.state() {
        PageState::Leaving => (w, OnFault::Noted),
        _ => protocol::fault(w),
    };
    assert_caught(
        PLAIN.broken(Protocol {
            fault,
            ..PRODUCTION
        }),
        Harm::SleepsForever,
    );
}

#[test]
fn twin_that_does_not_wake_when_the_page_is_mapped_already() {
    let paging = PLAIN.with(HOLDS).twin(Twin::NoWakeWhenAlreadyMapped);
    assert_caught(paging, Harm::SleepsForever);
}

#[test]
fn twin_that_does_not_wake_for_a_stale_fault() {
    assert_caught(
        PLAIN.with(HOLDS).twin(Twin::NoWakeForStaleFault),
        Harm::SleepsForever,
    );
}

#[test]
fn twin_that_leaves_despite_a_note() {
    let left = |w| (protocol::removed(w, 0).0, OnLeft::Gone);
    assert_caught(
        PLAIN.broken(Protocol { left, ..PRODUCTION }),
        Harm::SleepsForever,
    );
}

#[test]
fn twin_that_detaches_without_owning() {
    assert_caught(PLAIN.twin(Twin::DetachesWithoutOwning), Harm::WrongRead);
}

#[test]
fn twin_that_drops_a_failed_fill() {
    let fill_failed = |w| match protocol::fill_failed(w).1 {
        OnFailed::MustPoison => (PageWord::default(), OnFailed::Dropped),
        OnFailed::Dropped => protocol::fill_failed(w),
    };
    let paging = PLAIN.with(FAILS_FILLS);
    assert_caught(
        paging.broken(Protocol {
            fill_failed,
            ..PRODUCTION
        }),
        Harm::SleepsForever,
    );
}

#[test]
fn twin_that_does_not_wake_for_a_late_note() {
    assert_caught(
        PLAIN.with(MADVISES).twin(Twin::NoWakeForLateNote),
        Harm::SleepsForever,
    );
}

#[test]
fn twin_that_does_not_wake_for_a_note_on_a_page_that_stayed() {
    assert_caught(
        PLAIN.with(HOLDS).twin(Twin::NoWakeWhenStayed),
        Harm::SleepsForever,
    );
}

#[test]
fn twin_that_does_not_wake_for_a_note_on_a_removed_page() {
    assert_caught(
        PLAIN.with(MADVISES).twin(Twin::NoWakeWhenRemoved),
        Harm::SleepsForever,
    );
}

#[test]
fn twin_that_only_wakes_for_a_poisoned_page() {
    let absent = |w: PageWord| match w.state() {
        PageState::Poisoned => (w, OnAbsent::Stale),
        _ => protocol::absent(w),
    };
    let paging = PLAIN.with(MADVISES | FAILS_FILLS);
    assert_caught(
        paging.broken(Protocol {
            absent,
            ..PRODUCTION
        }),
        Harm::NeverRests,
    );
}

#[test]
fn twin_that_looks_once() {
    let frames = Some(1);
    assert_caught(
        Paging { frames, ..PLAIN }.twin(Twin::LooksOnce),
        Harm::OverBudget,
    );
}

#[test]
fn twin_that_forks_at_once() {
    assert_caught(FORKED.twin(Twin::ForksAtOnce), Harm::HalfOut);
}

#[test]
fn twin_that_looks_at_the_gate_before_it_counts_itself() {
    assert_caught(FORKED.twin(Twin::LooksBeforeItCounts), Harm::HalfOut);
}

#[test]
fn twin_that_counts_the_search_alone() {
    assert_caught(FORKED.twin(Twin::CountsTheSearchAlone), Harm::HalfOut);
}

#[test]
fn twin_that_seals_the_gate_at_once() {
    assert_caught(
        COPIED.with(FORKS).twin(Twin::SealsAtOnce),
        Harm::SleepsForever,
    );
}

#[test]
fn twin_that_waits_for_reclaim_alone() {
    let paging = LOSES.with(FORKS | MADVISES);
    assert_caught(paging.twin(Twin::WaitsForReclaimAlone), Harm::HalfOut);
}
