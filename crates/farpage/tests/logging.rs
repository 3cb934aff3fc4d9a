//! Subscribers that need pages which farpage moves: a log line must not hold up their arrival.
//!
//! The rule it keeps: the subscriber is the program's only one, so it hears of every thread.

mod common;

use std::{
    io,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use common::{Call, HookedStore, array_with, begin, builder, words::fill};
use farpage::{FaultMode, RegionOptions, RemoteArray};
use farpage_testkit::{KIB, MIB, mix, wait_until};
use tracing::{Event, Level, Metadata, Subscriber, span};

const PAGE: usize = 4 * KIB;
const PAGE_WORDS: usize = PAGE / 8;

/// Array that the subscriber reads: for each event an element of another page.
static ARRAY: OnceLock<RemoteArray<u64>> = OnceLock::new();
static EVENTS: AtomicU64 = AtomicU64::new(0);

/// Subscriber that reads an absent element for each event, under a lock.
struct Reading(Mutex<()>);

impl Subscriber for Reading {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, _: &Event<'_>) {
        let _lock = self.0.lock().expect("no holder panics");
        let Some(array) = ARRAY.get() else { return };
        let at = (1 + EVENTS.load(Ordering::Relaxed) as usize) * PAGE_WORDS;
        assert_eq!(array[at], mix(at as u64), "word {at}");
        EVENTS.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// Fillers and evictors with one thread each have lines to log while the subscriber waits for a
/// page that only they bring.
#[test]
fn pages_come_for_a_subscriber_that_reads_them_while_workers_log() {
    tracing::subscriber::set_global_default(Reading(Mutex::new(())))
        .expect("this program has no other");
    let Some(_watchdog) = begin(60) else { return };
    let runtime = builder(MIB, PAGE)
        .fillers(1)
        .evictors(1)
        .fault_mode(FaultMode::Filler)
        .last_words(false)
        .deadline(Duration::from_secs(30))
        .build()
        .expect("a runtime");
    let bytes = 4 * MIB;
    let options = || RegionOptions::new().read_ahead(0);
    let kept = HookedStore::new(bytes, |_, _| Ok(()));
    let mut array = array_with(&runtime, bytes / 8, options().store(kept));
    fill(&mut array, 0);
    array.flush().expect("the store takes it");
    // The array's first pages have left: it is four times the budget.
    ARRAY.set(array).expect("set once");

    let fails = Arc::new(AtomicBool::new(true));
    let broken = HookedStore::new(bytes, {
        let fails = fails.clone();
        move |call, _| match call {
            Call::Read if fails.load(Ordering::Relaxed) => Err(io::ErrorKind::Other.into()),
            _ => Ok(()),
        }
    });
    let broken = array_with(&runtime, bytes / 8, options().store(broken));
    // Each lost page makes the only filler log a line. The program logs lines of its own meanwhile.
    for page in 0..8 {
        let at = page * PAGE_WORDS;
        let error = broken.prefetch_now(at..at + 1).expect_err("it fails");
        tracing::info!(%error, "the program's own");
    }
    wait_until("every line is logged", || {
        EVENTS.load(Ordering::Relaxed) >= 16
    });
    fails.store(false, Ordering::Relaxed);
    broken.prefetch_now(..).expect("it works again");
}
