//! Every interleaving of two application threads, two fillers, an evictor and a flusher, explored exhaustively.
//!
//! The rule: the page protocol loses no write, shows no old byte, maps no page twice, and lets nobody sleep for ever; and
//! each mistake that could be made in its use is made here once, by a twin that must be caught. `--nocapture` prints how many
//! worlds were visited, and for each twin the shortest way to its harm.

#[path = "protocol_model/explore.rs"]
mod explore;
#[path = "protocol_model/paging.rs"]
mod paging;

use explore::{Summary, explore};
use paging::{
    Access::{Read, Write},
    Harm, Paging, Twin,
};

/// Both threads write the page and read it again.
const PLAIN: Paging = Paging {
    program: [&[Write(0), Read(0)], &[Write(0), Read(0)]],
    pages: 1,
    frames: None,
    prefetches: false,
    flushes: false,
    madvises: false,
    holds: false,
    fills_fail: false,
    writes_fail: false,
    twin: Twin::Good,
};

/// Two pages that want the same frame.
const CROWDED: Paging = Paging {
    program: [&[Write(0), Read(1)], &[Write(1), Read(0)]],
    pages: 2,
    frames: Some(1),
    ..PLAIN
};

fn assert_harmless(what: &str, paging: Paging) -> Summary {
    match explore(&paging) {
        Ok(summary) => {
            println!("{what}: {summary:?}");
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
fn plain() {
    assert!(assert_harmless("plain", PLAIN).always_comes_to_rest);
}
