//! [`Work`]: a program that uses remote memory while servers die: one thread goes through its words
//! in order, as STREAM does, and one accesses them at random.
//!
//! The rule it keeps: a word is compared with a plain array each time before it is written, and a
//! fault counts for the second in which it is under way, whenever it ends.

use std::{
    hint::black_box,
    ops::Range,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use farpage::StoreStatsSnapshot;
use farpage_bench_kit::{
    pick::{Random, mix},
    report::new_histogram,
};
use hdrhistogram::Histogram;

/// Number of threads that write and check.
pub(super) const THREADS: usize = 2;
/// Time from the beginning of an event over which faults are measured.
pub(super) const MEASURED: Duration = Duration::from_secs(1);
/// Shortest access that counts as a page fault: an access to pages in memory takes less.
const FAULT_NS_MIN: u64 = 3_000;
/// Number of words that the thread which goes in order accesses between two looks at the clock.
/// Less than a page, so that most of these accesses have one fault at most.
const IN_ORDER: usize = 256;
/// Parts of the words, one of which is written to while the others are left in peace.
const PARTS: u64 = 8;
/// Time for which the same part is written to. Longer than pages have to be left in peace for to
/// get parity.
const PART_TIME: Duration = Duration::from_secs(10);
/// Upper bound of the time that an access may take: far beyond the runtime's deadline.
const STUCK_AFTER: Duration = Duration::from_secs(60);

/// State that both threads and their observer share.
pub(super) struct Work {
    began: Instant,
    stop: AtomicBool,
    /// True while all words are written to, and not only those of one part.
    everywhere: AtomicBool,
    wrong: AtomicU64,
    /// Number of threads that have written all of their words once.
    filled: AtomicUsize,
    /// Number of words that each thread has checked.
    checked: [AtomicU64; THREADS],
    measured: Mutex<Measured>,
    /// Time at which copies were last seen to be missing.
    last_lack: Mutex<Instant>,
}

/// Faults that were under way within a second.
struct Measured {
    from: Instant,
    faults_ns: Histogram<u64>,
}

impl Work {
    pub(super) fn new(everywhere: bool) -> Self {
        let began = Instant::now();
        Self {
            began,
            stop: AtomicBool::new(false),
            everywhere: AtomicBool::new(everywhere),
            wrong: AtomicU64::new(0),
            filled: AtomicUsize::new(0),
            checked: Default::default(),
            measured: Mutex::new(Measured {
                from: began,
                faults_ns: new_histogram(),
            }),
            last_lack: Mutex::new(began),
        }
    }

    /// Notes the time if copies are missing, or if a server is being emptied.
    pub(super) fn note_lack(&self, store: &StoreStatsSnapshot) {
        if store.under_protected_bytes + store.draining_bytes > 0 {
            *self.last_lack.lock().expect("nothing panics under it") = Instant::now();
        }
    }

    /// Returns the time at which copies were last seen to be missing.
    pub(super) fn last_lack(&self) -> Instant {
        *self.last_lack.lock().expect("nothing panics under it")
    }

    /// Returns the time since the start of the run.
    pub(super) fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// Returns the time from the start of the run to `at`.
    pub(super) fn time_of(&self, at: Instant) -> Duration {
        at - self.began
    }

    pub(super) fn stop(&self) {
        self.stop.store(true, Relaxed);
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stop.load(Relaxed)
    }

    pub(super) fn write_everywhere(&self, everywhere: bool) {
        self.everywhere.store(everywhere, Relaxed);
    }

    /// Returns the number of wrong words that were seen.
    pub(super) fn wrong(&self) -> u64 {
        self.wrong.load(Relaxed)
    }

    /// Counts wrong words that another part of the program has seen.
    pub(super) fn add_wrong(&self, words: u64) {
        self.wrong.fetch_add(words, Relaxed);
    }

    /// True once all words were written.
    pub(super) fn is_filled(&self) -> bool {
        self.filled.load(Relaxed) == THREADS
    }

    /// Returns the number of words that were checked.
    pub(super) fn checked(&self) -> u64 {
        self.checked.iter().map(|thread| thread.load(Relaxed)).sum()
    }

    /// Begins to measure the faults of a second. Returns its beginning.
    pub(super) fn measure(&self) -> Instant {
        let from = Instant::now();
        *self.measured.lock().expect("nothing panics under it") = Measured {
            from,
            faults_ns: new_histogram(),
        };
        from
    }

    /// Returns the faults of the second that was measured last. Waits for its end, and for accesses
    /// that began in it and have not ended.
    ///
    /// # Errors
    /// An access does not end.
    pub(super) fn faults(&self) -> Result<Histogram<u64>> {
        let lock = || self.measured.lock().expect("nothing panics under it");
        let until = lock().from + MEASURED;
        thread::sleep(until.saturating_duration_since(Instant::now()));
        let mut checked = self.checked.iter().map(|thread| thread.load(Relaxed));
        let before: [u64; THREADS] = std::array::from_fn(|_| checked.next().expect("a thread"));
        let begin = Instant::now();
        for (thread, before) in self.checked.iter().zip(before) {
            while thread.load(Relaxed) == before && self.wrong() == 0 {
                ensure!(
                    begin.elapsed() < STUCK_AFTER,
                    "an access does not end within {STUCK_AFTER:?}: this is a bug to report"
                );
                thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(lock().faults_ns.clone())
    }

    /// Writes all words of `part`. Then writes to some again, and compares each with a plain array,
    /// until it is stopped or a word is wrong. Then compares all. Returns the plain array.
    pub(super) fn write(&self, part: &mut [u64], thread: usize, seed: u64) -> Vec<u64> {
        let mut random = Random(mix(seed ^ thread as u64));
        let mut plain: Vec<u64> = (0..part.len()).map(|_| random.bits()).collect();
        part.copy_from_slice(&plain);
        self.filled.fetch_add(1, Relaxed);
        let (mut at, mut is_right) = (0, true);
        while is_right && !self.stop.load(Relaxed) {
            let written = self.written(part.len());
            let some = match thread {
                0 => {
                    let from = at;
                    let to = (from + IN_ORDER).min(part.len());
                    at = if to == part.len() { 0 } else { to };
                    from..to
                }
                _ => {
                    // Half of these go to the words that are written.
                    let (from, words) = match random.below(2) {
                        0 => (0, part.len()),
                        _ => (written.start, written.len()),
                    };
                    let at = from + random.below(words as u64) as usize;
                    at..at + 1
                }
            };
            let writes = written.contains(&some.start);
            let (words, kept) = (&mut part[some.clone()], &mut plain[some.clone()]);
            let begin = Instant::now();
            for (word, kept) in words.iter_mut().zip(kept) {
                is_right &= black_box(*word) == *kept;
                if writes {
                    *kept = random.bits();
                    *word = *kept;
                }
            }
            self.note(begin);
            self.checked[thread].fetch_add(some.len() as u64, Relaxed);
        }
        let differing = part.iter().zip(&plain).filter(|(a, b)| a != b).count() as u64;
        self.add_wrong(differing.max(u64::from(!is_right)));
        plain
    }

    /// Returns the places of the words that are written to now.
    fn written(&self, words: usize) -> Range<usize> {
        if self.everywhere.load(Relaxed) {
            return 0..words;
        }
        let part = (self.began.elapsed().as_nanos() / PART_TIME.as_nanos()) as u64 % PARTS;
        let bound = |part: u64| (words as u64 * part / PARTS) as usize;
        bound(part)..bound(part + 1)
    }

    /// Counts an access that began at `begin`, if it was a fault in the measured second: also one
    /// that had begun before, and was caught by the event.
    fn note(&self, begin: Instant) {
        let ns = begin.elapsed().as_nanos() as u64;
        if ns < FAULT_NS_MIN {
            return;
        }
        let mut measured = self.measured.lock().expect("nothing panics under it");
        if begin < measured.from + MEASURED {
            measured.faults_ns.saturating_record(ns);
        }
    }
}
