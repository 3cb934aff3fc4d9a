//! The victim: a client whose one thread runs STREAM over remote arrays and checks each word, and
//! whose other thread takes a single fault at a time.
//!
//! The rule it keeps: every word that is read is compared with what was written there.

use std::{
    hint::black_box,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::Instant,
};

use anyhow::{Context, Result};
use farpage::{Advice, RemoteArray, Runtime};
use farpage_wire::Endpoint;
use hdrhistogram::Histogram;

use farpage_bench_kit::{
    arena::runtime,
    pick::{Shuffle, mix},
    report::new_histogram,
};

#[derive(Clone, Copy)]
pub(super) struct Sizes {
    /// Bytes of each of the three arrays.
    pub(super) array_bytes: u64,
    pub(super) budget_bytes: u64,
    pub(super) page_bytes: u64,
}

impl Sizes {
    pub(super) fn of(smoke: bool) -> Sizes {
        let array_bytes = if smoke { 2 << 20 } else { 32 << 20 };
        Sizes {
            array_bytes,
            // A quarter of the three arrays.
            budget_bytes: array_bytes * 3 / 4,
            page_bytes: if smoke { 4 << 10 } else { 64 << 10 },
        }
    }
}

/// The victim's arrays and its runtime. Fields are dropped in this order.
pub(super) struct Victim {
    a: RemoteArray<u64>,
    b: RemoteArray<u64>,
    faults: RemoteArray<u64>,
    _runtime: Runtime,
    page_words: u64,
    /// Number that has been added to each word of `a`.
    passes: u64,
    /// Number of the random round over `faults`.
    rounds: u64,
    damaged: u64,
}

/// Observations of the victim beside one neighbour.
pub(super) struct Seen {
    pub(super) faults_ns: Histogram<u64>,
    pub(super) stream_bytes: u64,
    pub(super) words_checked: u64,
}

impl Victim {
    pub(super) fn start(endpoint: &Endpoint, sizes: Sizes) -> Result<Victim> {
        let runtime = runtime(endpoint, sizes.budget_bytes, sizes.page_bytes)?;
        let array = |advice| {
            let array = runtime.array::<u64>(sizes.array_bytes as usize / 8);
            let array = array.context("cannot create a remote array")?;
            array.advise(.., advice).context("cannot advise")?;
            anyhow::Ok(array)
        };
        let mut victim = Victim {
            a: array(Advice::Sequential)?,
            b: array(Advice::Sequential)?,
            faults: array(Advice::Random)?,
            _runtime: runtime.clone(),
            page_words: sizes.page_bytes / 8,
            passes: 0,
            rounds: 0,
            damaged: 0,
        };
        for array in [&mut victim.a, &mut victim.faults] {
            for (at, word) in (0..).zip(array.iter_mut()) {
                *word = mix(at);
            }
        }
        Ok(victim)
    }

    /// Runs STREAM and takes faults until `stop` is set.
    pub(super) fn work(&mut self, stop: &AtomicBool) -> Seen {
        let (a, b, passes) = (&mut self.a, &mut self.b, &mut self.passes);
        let (faults, page_words, rounds) = (&self.faults, self.page_words, &mut self.rounds);
        thread::scope(|scope| {
            let stream = scope.spawn(move || {
                let (mut words, mut damaged) = (0, 0);
                while !stop.load(Relaxed) {
                    damaged += pass(a, b, *passes);
                    *passes += 1;
                    words += 2 * a.len() as u64;
                }
                (words, damaged)
            });
            let mut faults_ns = new_histogram();
            let mut damaged = 0;
            while !stop.load(Relaxed) {
                *rounds += 1;
                let pages = faults.len() as u64 / page_words;
                // The order is the same each time: a page comes again after all others.
                for page in Shuffle::new(pages, 1) {
                    let at = page * page_words + mix(page ^ *rounds) % page_words;
                    let begin = Instant::now();
                    let word = black_box(faults[at as usize]);
                    faults_ns.saturating_record(begin.elapsed().as_nanos() as u64);
                    damaged += u64::from(word != mix(at));
                    if stop.load(Relaxed) {
                        break;
                    }
                }
            }
            let (words, damaged_by_stream) = stream.join().expect("STREAM does not panic");
            self.damaged += damaged + damaged_by_stream;
            Seen {
                words_checked: words + faults_ns.len(),
                faults_ns,
                // Each word that is checked is one that is read, and one is written for it.
                stream_bytes: words * 2 * 8,
            }
        })
    }

    /// Checks every word once more. Returns the number of words that were damaged at any time.
    pub(super) fn finish(self) -> Result<u64> {
        let mut damaged = self.damaged;
        for (array, passes) in [(&self.a, self.passes), (&self.faults, 0)] {
            for (at, &word) in (0..).zip(array.iter()) {
                damaged += u64::from(word != mix(at).wrapping_add(passes));
            }
        }
        Ok(damaged)
    }
}

/// Copies each element to `b` as STREAM does, and back larger by one. Returns the number of wrong
/// elements.
fn pass(a: &mut [u64], b: &mut [u64], passes: u64) -> u64 {
    let mut damaged = 0;
    for (at, (a, b)) in (0..).zip(a.iter().zip(b.iter_mut())) {
        damaged += u64::from(*a != mix(at).wrapping_add(passes));
        *b = *a;
    }
    for (at, (a, b)) in (0..).zip(a.iter_mut().zip(b.iter())) {
        damaged += u64::from(*b != mix(at).wrapping_add(passes));
        *a = b.wrapping_add(1);
    }
    damaged
}
