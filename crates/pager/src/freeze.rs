//! Gate of reclaim, which is closed while the program forks: [`ReclaimGate`].
//!
//! A child of `fork` gets the mapped pages and what the store has of the others, and no frames. So
//! at the kernel's fork no page's newest bytes may lie in a frame alone, and no entry may be half
//! moved. A thread that takes pages out, or moves entries, goes in by the gate first ([`Entered`]).
//! A run that is out counts as inside until its pages are published ([`Departure`]). Fills go on,
//! since their bytes are in the store.
//!
//! A freeze, in order:
//!
//! 1. close the gate to reclaim and to calls of the program, and wait until nothing is inside;
//! 2. seal it: fills, which now and then take a page out to look at it, stay outside, too. Not
//!    before, since a thread that copies pages out may sleep on a fault;
//! 3. wait once more, for fills alone.
//!
//! The rule: who is inside waits for nothing that the gate holds up: for no frame and no other
//! thread that goes in. Who is refused owns no page, and does something else meanwhile.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use crossbeam_utils::CachePadded;

/// Gate of all that takes pages out or moves entries. While nobody forks, going in and out costs
/// one atomic operation each, on a cache line that only the same worker uses.
#[derive(Debug)]
pub(crate) struct ReclaimGate {
    freezes: CachePadded<Freezes>,
    /// Turnstiles of the workers, by number, and of the program's calls.
    turnstiles: Vec<Arc<Turnstile>>,
}

/// Numbers of freezes under way. Freezes of several threads overlap.
#[derive(Debug, Default)]
struct Freezes {
    /// Freezes that have not opened the gate again: reclaim and calls of the program go in at 0.
    closed: AtomicUsize,
    /// Freezes among them that have sealed the gate: fills go in at 0.
    sealed: AtomicUsize,
}

/// Number of searches and runs inside that came in by one turnstile. Each goes out by the same.
type Turnstile = CachePadded<AtomicUsize>;

/// Guard of a search for pages to take out, or of a call that moves entries. Dropping it goes out.
#[derive(Debug)]
#[must_use = "dropping it goes out of the gate"]
pub(crate) struct Entered<'a>(&'a Arc<Turnstile>);

/// Count of one run on its way out. Dropped when the run's pages are published.
#[derive(Debug)]
pub(crate) struct Departure(Arc<Turnstile>);

impl ReclaimGate {
    /// Makes an open gate for as many `workers`.
    pub(crate) fn new(workers: usize) -> ReclaimGate {
        ReclaimGate {
            freezes: CachePadded::default(),
            turnstiles: (0..workers + 1).map(|_| Arc::default()).collect(),
        }
    }

    /// Lets the reclaim of a worker in. `None`: the gate is closed.
    pub(crate) fn enter(&self, worker: usize) -> Option<Entered<'_>> {
        self.enter_at(worker, &self.freezes.closed)
    }

    /// Lets a call of the program in. `None`: the gate is closed.
    pub(crate) fn enter_for_program(&self) -> Option<Entered<'_>> {
        self.enter_at(self.turnstiles.len() - 1, &self.freezes.closed)
    }

    /// Lets a fill in that takes its page out to look at it. `None`: the gate is sealed.
    pub(crate) fn enter_for_fill(&self, worker: usize) -> Option<Entered<'_>> {
        self.enter_at(worker, &self.freezes.sealed)
    }

    fn enter_at(&self, turnstile: usize, refused_by: &AtomicUsize) -> Option<Entered<'_>> {
        // Spares the counts of a closed gate: the freezing thread looks at them.
        if refused_by.load(Ordering::Relaxed) > 0 {
            return None;
        }
        self.count_in(turnstile, refused_by)
    }

    /// Counts a search as inside, and looks if it is let in.
    fn count_in(&self, turnstile: usize, refused_by: &AtomicUsize) -> Option<Entered<'_>> {
        let entered = Entered::count_in(&self.turnstiles[turnstile]);
        // Sequentially consistent with `close`, `seal` and `inside`: either the freezing thread
        // sees the count, or the refusal is seen here.
        (refused_by.load(Ordering::SeqCst) == 0).then_some(entered)
    }

    /// True if a freeze is under way: who is inside had better come to an end.
    pub(crate) fn is_closed(&self) -> bool {
        self.freezes.closed.load(Ordering::Relaxed) > 0
    }

    /// True if a freeze has sealed the gate.
    pub(crate) fn is_sealed(&self) -> bool {
        self.freezes.sealed.load(Ordering::Relaxed) > 0
    }

    /// Closes the gate. To be followed by one [`open`](Self::open).
    pub(crate) fn close(&self) {
        self.freezes.closed.fetch_add(1, Ordering::SeqCst);
    }

    /// Seals the gate, which this freeze has closed, and in which nothing was left.
    pub(crate) fn seal(&self) {
        self.freezes.sealed.fetch_add(1, Ordering::SeqCst);
    }

    /// Opens the gate, as far as this freeze is concerned. `sealed`: it has sealed the gate.
    pub(crate) fn open(&self, sealed: bool) {
        if sealed {
            self.freezes.sealed.fetch_sub(1, Ordering::SeqCst);
        }
        self.freezes.closed.fetch_sub(1, Ordering::SeqCst);
    }

    /// Returns the number of searches and runs inside a closed gate. After it has been 0 all of
    /// their pages are published, and what the gate refuses does not come in before it opens: a run
    /// counts where its search does, so the turnstiles need not be read at once. What is refused
    /// shows for a moment.
    pub(crate) fn inside(&self) -> usize {
        let turnstiles = self.turnstiles.iter();
        turnstiles
            .map(|turnstile| turnstile.load(Ordering::SeqCst))
            .sum()
    }
}

impl<'a> Entered<'a> {
    fn count_in(turnstile: &'a Arc<Turnstile>) -> Entered<'a> {
        turnstile.fetch_add(1, Ordering::SeqCst);
        Entered(turnstile)
    }

    /// Counts a run that was taken out.
    pub(crate) fn depart(&self) -> Departure {
        self.0.fetch_add(1, Ordering::Relaxed);
        Departure(self.0.clone())
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        count_out(self.0);
    }
}

impl Departure {
    /// Lets a search in beside the run, also while the gate is closed.
    pub(crate) fn inside(&self) -> Entered<'_> {
        Entered::count_in(&self.0)
    }
}

impl Drop for Departure {
    fn drop(&mut self) {
        count_out(&self.0);
    }
}

/// Counts one search or run out. A release: the thread that sees nothing inside sees all pages
/// published.
fn count_out(turnstile: &Turnstile) {
    turnstile.fetch_sub(1, Ordering::Release);
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            atomic::{AtomicBool, AtomicU64},
            mpsc,
        },
        thread,
        time::{Duration, Instant},
    };

    use super::*;

    #[test]
    fn closed_gate_lets_fills_in_until_it_is_sealed() {
        let gate = ReclaimGate::new(2);
        assert!(gate.enter(0).is_some() && gate.enter_for_program().is_some());
        gate.close();
        assert!(gate.is_closed() && !gate.is_sealed());
        assert!(gate.enter(0).is_none() && gate.enter_for_program().is_none());
        assert!(gate.enter_for_fill(1).is_some());
        gate.seal();
        assert!(gate.enter_for_fill(1).is_none());
        assert_eq!(gate.inside(), 0);
        gate.open(true);
        assert!(gate.enter(0).is_some() && gate.enter_for_fill(1).is_some());
    }

    #[test]
    fn search_that_has_seen_the_gate_open_is_refused_when_it_counts_itself() {
        let gate = ReclaimGate::new(1);
        gate.close();
        assert!(gate.count_in(0, &gate.freezes.closed).is_none());
        gate.seal();
        assert!(gate.count_in(0, &gate.freezes.sealed).is_none());
        assert_eq!(gate.inside(), 0);
    }

    #[test]
    fn run_counts_until_it_is_dropped() {
        let gate = ReclaimGate::new(1);
        let search = gate.enter(0).expect("the gate is open");
        let run = search.depart();
        drop(search);
        gate.close();
        assert_eq!(gate.inside(), 1);
        // An evictor goes on with it, in pieces.
        let pieces = [run.inside().depart(), run.inside().depart()];
        drop(run);
        assert_eq!(gate.inside(), 2);
        drop(pieces);
        assert_eq!(gate.inside(), 0);
    }

    #[test]
    fn gate_opens_after_the_last_of_several_freezes() {
        let gate = ReclaimGate::new(1);
        gate.close();
        gate.seal();
        gate.close();
        gate.open(true);
        assert!(gate.enter(0).is_none() && gate.enter_for_fill(0).is_some());
        gate.open(false);
        assert!(gate.enter(0).is_some());
    }

    const RECLAIMERS: usize = 3;
    const FREEZERS: usize = 2;

    /// Pages of several threads, each of which is out now and then, and the gate.
    struct Pages {
        gate: ReclaimGate,
        /// True while a page is out. Relaxed, so that the gate alone orders it.
        is_out: Vec<AtomicBool>,
        ends: AtomicBool,
        times_out: AtomicU64,
    }

    impl Pages {
        /// Takes a page out and puts it back, again and again. Every other time another thread puts
        /// it back.
        fn reclaim(&self, worker: usize, others: &mpsc::Sender<(usize, Departure)>) {
            while !self.ends.load(Ordering::Relaxed) {
                let fills = worker + 1 == RECLAIMERS;
                let entered = match fills {
                    true => self.gate.enter_for_fill(worker),
                    false => self.gate.enter(worker),
                };
                let Some(entered) = entered else {
                    thread::yield_now();
                    continue;
                };
                self.is_out[worker].store(true, Ordering::Relaxed);
                let times = self.times_out.fetch_add(1, Ordering::Relaxed);
                thread::yield_now();
                if times.is_multiple_of(2) {
                    self.is_out[worker].store(false, Ordering::Relaxed);
                    continue;
                }
                let departure = entered.depart();
                drop(entered);
                others.send((worker, departure)).expect("it listens");
                while self.is_out[worker].load(Ordering::Relaxed) {
                    thread::yield_now();
                }
            }
        }

        /// Freezes once. Returns whether a page was out then.
        fn freeze(&self, waits: bool) -> bool {
            let wait = || {
                while waits && self.gate.inside() > 0 {
                    thread::yield_now();
                }
            };
            self.gate.close();
            wait();
            self.gate.seal();
            wait();
            let any_out = (0..20).any(|_| {
                thread::yield_now();
                self.is_out.iter().any(|out| out.load(Ordering::Relaxed))
            });
            self.gate.open(true);
            any_out
        }
    }

    /// Freezes while other threads take pages out, until `enough` say so of the number of freezes
    /// so far, and a page was out, for which threads may have to wait long. Returns the number of freezes at which a page was out.
    fn stress(waits: bool, enough: impl Fn(u64) -> bool + Sync) -> u64 {
        let pages = Pages {
            gate: ReclaimGate::new(RECLAIMERS),
            is_out: (0..RECLAIMERS).map(|_| AtomicBool::new(false)).collect(),
            ends: AtomicBool::new(false),
            times_out: AtomicU64::new(0),
        };
        let (freezes, harmful) = (AtomicU64::new(0), AtomicU64::new(0));
        let (sender, receiver) = mpsc::channel();
        thread::scope(|scope| {
            let pages = &pages;
            for worker in 0..RECLAIMERS {
                let sender = sender.clone();
                scope.spawn(move || pages.reclaim(worker, &sender));
            }
            drop(sender);
            scope.spawn(move || {
                for (worker, departure) in receiver {
                    thread::yield_now();
                    pages.is_out[worker].store(false, Ordering::Relaxed);
                    drop(departure);
                }
            });
            for _ in 0..FREEZERS {
                scope.spawn(|| {
                    let is_enough = || {
                        let was_out = pages.times_out.load(Ordering::Relaxed) > 0;
                        was_out && enough(freezes.load(Ordering::Relaxed))
                    };
                    while !is_enough() && !pages.ends.load(Ordering::Relaxed) {
                        let harms = pages.freeze(waits);
                        harmful.fetch_add(u64::from(harms), Ordering::Relaxed);
                        freezes.fetch_add(1, Ordering::Relaxed);
                        thread::yield_now();
                    }
                    pages.ends.store(true, Ordering::Relaxed);
                });
            }
        });
        let times_out = pages.times_out.into_inner();
        println!(
            "{} freezes, {times_out} times a page was out",
            freezes.into_inner()
        );
        assert_eq!(pages.gate.inside(), 0);
        harmful.into_inner()
    }

    #[test]
    fn no_page_is_out_while_reclaim_is_frozen() {
        let harmful = stress(true, |freezes| freezes >= 1500);
        assert_eq!(harmful, 0);
    }

    #[test]
    fn twin_that_does_not_wait_freezes_while_pages_are_out() {
        let until = Instant::now() + Duration::from_secs(20);
        let harmful = stress(false, |freezes| freezes >= 1500 || Instant::now() > until);
        assert!(harmful > 0);
    }
}
