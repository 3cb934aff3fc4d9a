//! Every interleaving of two application threads, two fillers, an evictor and a flusher, explored
//! exhaustively.
//!
//! The rule: the page protocol loses no write, shows no old byte, maps no page twice, and lets no
//! thread sleep for ever. Each mistake that could be made in its use is made here once, by a twin
//! that must be caught. `--nocapture` prints how many worlds were visited, and for each twin the
//! shortest way to its harm.

#[path = "protocol_model/explore.rs"]
mod explore;
#[path = "protocol_model/paging.rs"]
mod paging;

use explore::{Summary, explore};
use paging::{
    Access::{Await, Pin, Read, Unpin, Write},
    Harm, Paging, Twin,
};

/// Program whose two threads write the page and read it again.
const PLAIN: Paging = Paging {
    program: [&[Write(0), Read(0)], &[Write(0), Read(0)]],
    pages: 1,
    frames: None,
    prefetches: false,
    flushes: false,
    gives_up: false,
    madvises: false,
    copies: false,
    holds: false,
    fills_fail: false,
    writes_fail: false,
    remaps_fail: false,
    forks: false,
    twin: Twin::Good,
};

/// Program on two pages that want the same frame.
const CROWDED: Paging = Paging {
    program: [&[Write(0), Read(1)], &[Write(1), Read(0)]],
    pages: 2,
    frames: Some(1),
    ..PLAIN
};

/// Program of which one thread pins the page, and relies on it.
const PINNED: Paging = Paging {
    program: [
        &[Pin(0), Await(0), Write(0), Read(0), Unpin(0)],
        &[Write(0), Read(0)],
    ],
    ..PLAIN
};

/// Program of which both threads pin the page, and rely on it.
const PINNED_TWICE: Paging = Paging {
    program: [
        &[Pin(0), Await(0), Write(0), Read(0), Unpin(0)],
        &[Pin(0), Await(0), Write(0), Unpin(0)],
    ],
    ..PLAIN
};

/// Program on one page, with everything that can happen to it.
const EVERYTHING: Paging = Paging {
    prefetches: true,
    flushes: true,
    madvises: true,
    holds: true,
    fills_fail: true,
    writes_fail: true,
    ..PLAIN
};

fn assert_harmless(what: &str, paging: Paging) -> Summary {
    match explore(&paging) {
        Ok(summary) => {
            println!("{what}: {summary}");
            summary
        }
        Err(counterexample) => panic!("{what}: {counterexample}"),
    }
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
    assert!(assert_harmless("plain", PLAIN).always_comes_to_rest);
}

#[test]
fn prefetch() {
    let paging = Paging {
        prefetches: true,
        ..PLAIN
    };
    assert!(assert_harmless("prefetch", paging).always_comes_to_rest);
}

#[test]
fn flush_that_puts_the_page_back() {
    let paging = Paging {
        flushes: true,
        ..PLAIN
    };
    assert!(assert_harmless("flush", paging).always_comes_to_rest);
}

#[test]
fn page_that_is_held_when_it_is_half_out() {
    let paging = Paging {
        holds: true,
        ..PLAIN
    };
    assert!(assert_harmless("held", paging).always_comes_to_rest);
}

#[test]
fn program_drops_the_page_itself() {
    let paging = Paging {
        madvises: true,
        ..PLAIN
    };
    assert!(assert_harmless("madvise", paging).always_comes_to_rest);
}

#[test]
fn reads_from_the_store_that_fail() {
    let paging = Paging {
        fills_fail: true,
        prefetches: true,
        ..PLAIN
    };
    assert!(assert_harmless("failing fills", paging).always_comes_to_rest);
}

#[test]
fn writes_to_the_store_that_fail() {
    let paging = Paging {
        writes_fail: true,
        flushes: true,
        ..PLAIN
    };
    assert!(assert_harmless("failing writes", paging).always_comes_to_rest);
}

/// Program on a page that can neither be written nor mapped again: it is lost, and stays so until
/// the program overwrites it.
const LOSES: Paging = Paging {
    prefetches: true,
    writes_fail: true,
    remaps_fail: true,
    ..PLAIN
};

#[test]
fn pages_that_are_lost_are_never_read_as_something_older() {
    assert!(assert_harmless("lost", LOSES).always_comes_to_rest);
    let paging = Paging {
        flushes: true,
        fills_fail: true,
        ..LOSES
    };
    assert!(assert_harmless("lost, flush", paging).always_comes_to_rest);
    let paging = Paging {
        madvises: true,
        fills_fail: true,
        ..LOSES
    };
    assert!(assert_harmless("lost, madvise", paging).always_comes_to_rest);
    let paging = Paging {
        writes_fail: true,
        remaps_fail: true,
        ..PINNED
    };
    assert!(assert_harmless("lost, pinned", paging).always_comes_to_rest);
    let paging = Paging {
        frames: Some(1),
        ..LOSES
    };
    assert!(assert_harmless("lost, one frame", paging).always_comes_to_rest);
}

#[test]
fn twin_that_calls_a_lost_page_poisoned() {
    let twin = Twin::CallsLostPoisoned;
    assert_caught(Paging { twin, ..LOSES }, Harm::LostWrite);
}

#[test]
fn twin_that_calls_a_lost_page_remote() {
    let twin = Twin::CallsLostRemote;
    assert_caught(Paging { twin, ..LOSES }, Harm::LostWrite);
}

/// The evictor copies pages where they lie, and sleeps on the fault of one that the program drops.
const COPIED: Paging = Paging {
    madvises: true,
    copies: true,
    ..PLAIN
};

#[test]
fn page_that_leaves_as_a_copy() {
    assert!(assert_harmless("copied", COPIED).always_comes_to_rest);
    let paging = Paging {
        flushes: true,
        prefetches: true,
        ..COPIED
    };
    assert!(assert_harmless("copied, flush", paging).always_comes_to_rest);
    let paging = Paging {
        fills_fail: true,
        writes_fail: true,
        ..COPIED
    };
    assert!(assert_harmless("copied, failing", paging).always_comes_to_rest);
    let paging = Paging {
        copies: true,
        flushes: true,
        ..PINNED
    };
    assert!(assert_harmless("copied, pinned", paging).always_comes_to_rest);
}

#[test]
fn twin_that_takes_a_copied_page_that_was_taken_up_meanwhile() {
    let twin = Twin::TakesWhatWasTakenUp;
    assert_caught(Paging { twin, ..COPIED }, Harm::WrongRead);
}

#[test]
fn twin_that_copies_what_it_owns() {
    let twin = Twin::CopiesWhatItOwns;
    assert_caught(Paging { twin, ..COPIED }, Harm::SleepsForever);
}

#[test]
fn everything_at_once() {
    assert!(assert_harmless("everything", EVERYTHING).always_comes_to_rest);
}

/// An eviction may have to follow an eviction here, so that only some schedules come to rest.
#[test]
fn two_pages_and_one_frame() {
    assert_harmless("crowded", CROWDED);
}

#[test]
fn two_pages_and_one_frame_with_flush() {
    assert_harmless(
        "crowded, flush",
        Paging {
            flushes: true,
            ..CROWDED
        },
    );
}

#[test]
fn two_pages_and_one_frame_when_the_program_drops_pages() {
    assert_harmless(
        "crowded, madvise",
        Paging {
            madvises: true,
            ..CROWDED
        },
    );
}

#[test]
fn two_pages_and_one_frame_when_pages_are_held_and_prefetched() {
    assert_harmless(
        "crowded, held, prefetch",
        Paging {
            holds: true,
            prefetches: true,
            ..CROWDED
        },
    );
}

#[test]
fn pinned_page_is_there_while_others_leave() {
    assert!(assert_harmless("pinned", PINNED).always_comes_to_rest);
    assert!(assert_harmless("pinned twice", PINNED_TWICE).always_comes_to_rest);
}

#[test]
fn pinned_page_that_is_flushed_prefetched_and_held_comes_back() {
    let paging = Paging {
        prefetches: true,
        flushes: true,
        holds: true,
        writes_fail: true,
        ..PINNED
    };
    assert!(assert_harmless("pinned, flush", paging).always_comes_to_rest);
    let paging = Paging {
        flushes: true,
        ..PINNED_TWICE
    };
    assert!(assert_harmless("pinned twice, flush", paging).always_comes_to_rest);
}

#[test]
fn pinned_page_that_shall_be_given_up_stays() {
    let paging = Paging {
        gives_up: true,
        prefetches: true,
        ..PINNED
    };
    assert!(assert_harmless("pinned, given up", paging).always_comes_to_rest);
}

#[test]
fn pin_of_a_page_that_cannot_be_read_is_given_up() {
    let paging = Paging {
        fills_fail: true,
        flushes: true,
        ..PINNED
    };
    assert!(assert_harmless("pinned, failing fills", paging).always_comes_to_rest);
}

/// The other page gets the frame when the pin is taken back, and not before.
#[test]
fn pinned_page_keeps_its_frame_and_gives_it_back() {
    let paging = Paging {
        program: [
            &[Pin(0), Await(0), Write(0), Read(0), Unpin(0)],
            &[Write(1), Read(0)],
        ],
        flushes: true,
        ..CROWDED
    };
    assert_harmless("crowded, pinned", paging);
}

#[test]
fn twin_that_evicts_a_pinned_page() {
    let paging = Paging {
        twin: Twin::EvictsPinned,
        ..PINNED
    };
    assert_caught(paging, Harm::PinBroken);
}

#[test]
fn twin_that_leaves_despite_a_pin() {
    let paging = Paging {
        gives_up: true,
        twin: Twin::LeavesDespitePin,
        ..PINNED
    };
    assert_caught(paging, Harm::PinBroken);
}

#[test]
fn twin_that_flushes_a_pinned_page_and_drops_it() {
    let paging = Paging {
        flushes: true,
        twin: Twin::FlushDrops,
        ..PINNED
    };
    assert_caught(paging, Harm::PinBroken);
}

#[test]
fn twin_that_calls_a_pin_complete_while_the_page_leaves() {
    let paging = Paging {
        twin: Twin::PinsWhatLeaves,
        ..PINNED
    };
    assert_caught(paging, Harm::PinBroken);
}

#[test]
fn twin_that_takes_back_the_pins_of_others() {
    let paging = Paging {
        twin: Twin::UnpinsForAll,
        ..PINNED_TWICE
    };
    assert_caught(paging, Harm::PinBroken);
}

#[test]
fn twin_that_publishes_before_the_install() {
    assert_caught(
        Paging {
            twin: Twin::PublishesBeforeInstall,
            ..PLAIN
        },
        Harm::WrongRead,
    );
}

#[test]
fn twin_that_publishes_before_the_bytes_are_written() {
    assert_caught(
        Paging {
            twin: Twin::PublishesBeforeWrite,
            ..PLAIN
        },
        Harm::WrongRead,
    );
}

#[test]
fn twin_that_leaves_no_note_on_a_leaving_page() {
    assert_caught(
        Paging {
            twin: Twin::IgnoresFaultWhileLeaving,
            ..PLAIN
        },
        Harm::SleepsForever,
    );
}

#[test]
fn twin_that_does_not_wake_when_the_page_is_mapped_already() {
    assert_caught(
        Paging {
            holds: true,
            twin: Twin::NoWakeWhenAlreadyMapped,
            ..PLAIN
        },
        Harm::SleepsForever,
    );
}

#[test]
fn twin_that_does_not_wake_for_a_stale_fault() {
    assert_caught(
        Paging {
            holds: true,
            twin: Twin::NoWakeForStaleFault,
            ..PLAIN
        },
        Harm::SleepsForever,
    );
}

#[test]
fn twin_that_leaves_despite_a_note() {
    assert_caught(
        Paging {
            twin: Twin::LeavesDespiteNote,
            ..PLAIN
        },
        Harm::SleepsForever,
    );
}

#[test]
fn twin_that_detaches_without_owning() {
    assert_caught(
        Paging {
            twin: Twin::DetachesWithoutOwning,
            ..PLAIN
        },
        Harm::WrongRead,
    );
}

#[test]
fn twin_that_drops_a_failed_fill() {
    assert_caught(
        Paging {
            fills_fail: true,
            twin: Twin::DropsFailedFill,
            ..PLAIN
        },
        Harm::SleepsForever,
    );
}

#[test]
fn twin_that_does_not_wake_for_a_late_note() {
    assert_caught(
        Paging {
            madvises: true,
            twin: Twin::NoWakeForLateNote,
            ..PLAIN
        },
        Harm::SleepsForever,
    );
}

#[test]
fn twin_that_does_not_wake_for_a_note_on_a_page_that_stayed() {
    assert_caught(
        Paging {
            holds: true,
            twin: Twin::NoWakeWhenStayed,
            ..PLAIN
        },
        Harm::SleepsForever,
    );
}

#[test]
fn twin_that_does_not_wake_for_a_note_on_a_removed_page() {
    assert_caught(
        Paging {
            madvises: true,
            twin: Twin::NoWakeWhenRemoved,
            ..PLAIN
        },
        Harm::SleepsForever,
    );
}

#[test]
fn twin_that_only_wakes_for_a_poisoned_page() {
    let paging = Paging {
        madvises: true,
        fills_fail: true,
        twin: Twin::OnlyWakesPoisoned,
        ..PLAIN
    };
    assert_caught(paging, Harm::NeverRests);
}

#[test]
fn twin_that_looks_once() {
    assert_caught(
        Paging {
            frames: Some(1),
            twin: Twin::LooksOnce,
            ..PLAIN
        },
        Harm::OverBudget,
    );
}

/// Program of which a third thread forks, at any moment.
const FORKS: Paging = Paging {
    program: WRITES,
    forks: true,
    ..PLAIN
};

/// Accesses of a program that forks: few, since its worlds are many.
const WRITES: [&[paging::Access]; 2] = [&[Write(0), Read(0)], &[Write(0)]];

#[test]
fn child_has_each_page_as_it_is_when_the_kernel_copies_the_program() {
    assert!(assert_harmless("fork", FORKS).always_comes_to_rest);
    let paging = Paging {
        flushes: true,
        ..FORKS
    };
    assert!(assert_harmless("fork, flush", paging).always_comes_to_rest);
    let paging = Paging {
        holds: true,
        fills_fail: true,
        writes_fail: true,
        ..FORKS
    };
    assert!(assert_harmless("fork, failing", paging).always_comes_to_rest);
    let paging = Paging {
        forks: true,
        flushes: true,
        ..PINNED
    };
    assert!(assert_harmless("fork, pinned", paging).always_comes_to_rest);
    let paging = Paging {
        program: WRITES,
        forks: true,
        madvises: true,
        ..LOSES
    };
    assert!(assert_harmless("fork, lost", paging).always_comes_to_rest);
    let paging = Paging {
        forks: true,
        ..CROWDED
    };
    assert_harmless("fork, crowded", paging);
}

/// The evictor sleeps inside the gate, on a fault that only a look at the page settles.
#[test]
fn fork_waits_for_a_page_that_the_program_drops_while_it_is_copied() {
    let paging = Paging {
        program: WRITES,
        forks: true,
        ..COPIED
    };
    assert!(assert_harmless("fork, copied", paging).always_comes_to_rest);
}

#[test]
fn twin_that_forks_at_once() {
    let twin = Twin::ForksAtOnce;
    assert_caught(Paging { twin, ..FORKS }, Harm::HalfOut);
}

#[test]
fn twin_that_looks_at_the_gate_before_it_counts_itself() {
    let twin = Twin::LooksBeforeItCounts;
    assert_caught(Paging { twin, ..FORKS }, Harm::HalfOut);
}

#[test]
fn twin_that_counts_the_search_alone() {
    let twin = Twin::CountsTheSearchAlone;
    assert_caught(Paging { twin, ..FORKS }, Harm::HalfOut);
}

#[test]
fn twin_that_seals_the_gate_at_once() {
    let paging = Paging {
        forks: true,
        twin: Twin::SealsAtOnce,
        ..COPIED
    };
    assert_caught(paging, Harm::SleepsForever);
}

#[test]
fn twin_that_waits_for_reclaim_alone() {
    let paging = Paging {
        forks: true,
        madvises: true,
        twin: Twin::WaitsForReclaimAlone,
        ..LOSES
    };
    assert_caught(paging, Harm::HalfOut);
}
