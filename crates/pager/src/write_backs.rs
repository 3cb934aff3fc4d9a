//! Runs that were taken out, until their bytes are safe: [`WriteBacks`] of one evictor.
//!
//! 1. map those pages of a run again that are wanted by now;
//! 2. hash each page: an unchanged one is done, changed ones are encoded and their WRITE posted;
//! 3. when the bytes are safe, publish (`Leaving` to `Remote`) and give the frame back. Pages that
//!    were wanted meanwhile are mapped again from the frame, without the network.
//!
//! The rule: a page whose write-back failed is mapped again, never dropped.

use std::{sync::Arc, time::Duration};

use crate::{
    PageError,
    clock::FoundBy,
    freeze::Entered,
    installer::UsageCount,
    job::Job,
    region::{Region, RegionGuard},
    requests::Leaving,
    run::PageRun,
    shared::SharedParts,
    stats::Counters,
};
use farpage_store::{IoQueue, PageIndex, RunCompletion};
use farpage_vm::AddressSpace;

/// Bounds of the bytes and runs that one evictor has on their way out at once, not counting overdue
/// ones: enough to keep a fast link busy for a round trip.
const BYTES_OUT_MAX: usize = 8 << 20;
const RUNS_OUT_MAX: usize = 64;
/// Time on its way out after which a page is overdue while a fill waits for a frame. Its store is
/// slow, stalled or dead, and waiting for it would make its region the whole runtime's pace. A
/// write-back that goes well takes a tenth of it.
const OVERDUE: Duration = Duration::from_millis(3);

/// Fate of a page whose write-back has ended.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Gone,
    /// The page is wanted again.
    Stolen,
    /// The page shall stay, or its write-back failed.
    Stays,
}

/// Runs that one evictor has on their way out.
pub(crate) struct WriteBacks<A: AddressSpace> {
    shared: Arc<SharedParts<A>>,
    worker: usize,
    pub(crate) io: IoQueue<Leaving, PageRun<A::Frame>>,
    /// Bytes and runs that are on their way out, without those that are overdue.
    out_bytes: usize,
    out_runs: usize,
}

impl<A: AddressSpace> WriteBacks<A> {
    pub(crate) fn new(
        shared: Arc<SharedParts<A>>,
        worker: usize,
        io: IoQueue<Leaving, PageRun<A::Frame>>,
    ) -> Self {
        WriteBacks {
            shared,
            worker,
            io,
            out_bytes: 0,
            out_runs: 0,
        }
    }

    fn counters(&self) -> &Counters {
        &self.shared.counters[self.worker]
    }

    /// True if one more run may leave, within the `share`-th part of the bounds.
    pub(crate) fn has_room(&self, share: usize) -> bool {
        // A store that stalls may be what keeps the I/O queue busy: runs that wait for it for too
        // long stop nothing else.
        self.io.held().all(|leaving| leaving.overdue)
            && self.out_bytes < BYTES_OUT_MAX / share
            && self.out_runs < RUNS_OUT_MAX / share
    }

    /// Takes over a run that was taken out: its bytes are ours. While the program forks, the run is
    /// mapped again, unless the program has asked for it to be written back.
    pub(crate) fn add(
        &mut self,
        entered: &Entered<'_>,
        region: &RegionGuard,
        run: PageRun<A::Frame>,
        job: Option<&Arc<Job>>,
        found_by: FoundBy,
    ) {
        let frozen = self.shared.gate.is_closed();
        let wanted = |page| job.is_none() && (frozen || region.words.load(page).wanted());
        run.cut(wanted, |run, wanted| {
            if let Some(job) = job {
                job.open_one();
            }
            let (guard, departure) = (region.again(), entered.depart());
            let leaving = Leaving::new(guard, run.pages(), job.cloned(), found_by, departure);
            if wanted {
                if !frozen {
                    self.counters().steals.add(run.len());
                }
                let error = self.map_again(region, run, false, |_| None);
                self.close(leaving, error);
            } else {
                self.out_bytes += leaving.bytes();
                self.out_runs += 1;
                (self.shared.frames.budget()).begin_leaving(leaving.bytes());
                self.io.write_back(&region.store, run.first(), run, leaving);
            }
        });
    }

    /// Maps runs again whose request the I/O queue holds and their job has given up; while the
    /// program forks, also those without a job. Returns whether there were any.
    pub(crate) fn withdraw(&mut self) -> bool {
        let frozen = self.shared.gate.is_closed();
        let given_up = |leaving: &Leaving| match &leaving.job {
            Some(job) => job.ends_early(),
            None => frozen,
        };
        let mut any = false;
        while let Some((leaving, run)) = self.io.withdraw(given_up) {
            any = true;
            self.end_leaving(&leaving);
            let error = self.map_again(&leaving.region, run, false, |_| None);
            self.close(leaving, error);
        }
        any
    }

    /// Counts overdue pages as staying while a fill waits for a frame, so that others leave.
    pub(crate) fn write_off_overdue(&mut self) {
        let budget = self.shared.frames.budget();
        if !budget.is_starving() {
            return;
        }
        for leaving in self.io.requests_mut() {
            if !leaving.overdue && leaving.since.elapsed() > OVERDUE {
                leaving.overdue = true;
                self.out_bytes -= leaving.bytes();
                self.out_runs -= 1;
                leaving.region.count_overdue(leaving.pages.len());
                budget.end_leaving(leaving.bytes());
            }
        }
    }

    /// Settles requests that have ended. Returns whether there were any. Calls `failed` for pages
    /// that stay because their write-back failed.
    pub(crate) fn poll(&mut self, mut failed: impl FnMut()) -> bool {
        let any = self.io.poll();
        if let Some(error) = self.io.take_refused() {
            self.shared.unwritten.set(&error);
        }
        while let Some(ended) = self.io.take_ended() {
            if !ended.failed.is_empty() {
                failed();
            }
            self.settle(ended);
        }
        any
    }

    fn settle(&mut self, ended: RunCompletion<Leaving, PageRun<A::Frame>>) {
        let RunCompletion {
            request: leaving,
            frame: run,
            outcome,
            failed,
            ..
        } = ended;
        self.end_leaving(&leaving);
        self.counters().writes.add(outcome.written as usize);
        self.counters().failed_evictions.add(failed.len());
        match failed.first() {
            Some((_, error)) => self.shared.unwritten.set(error),
            None if outcome.written > 0 => self.shared.unwritten.clear(),
            None => {}
        }
        let region = &leaving.region;
        let failure = |page: PageIndex| {
            let failed = failed.iter().find(|(failed, _)| *failed == page);
            failed.map(|(_, error)| PageError::from(error.clone()))
        };
        let keep = leaving.job.as_ref().is_some_and(|job| job.keep);
        // Settled page by page, since each may be wanted; gone pages are given back together.
        let stamp = self.shared.victims.stamp(leaving.found_by);
        let fate = |page| {
            if keep || failure(page).is_some() {
                Fate::Stays
            } else if region.leave(page, stamp) {
                Fate::Gone
            } else {
                Fate::Stolen
            }
        };
        let fates: Vec<_> = run.pages().iter().map(fate).collect();
        let gone = fates.iter().filter(|&&fate| fate == Fate::Gone).count();
        (self.counters()).evicted(gone, gone.min(outcome.clean as usize));
        let (first, mut error) = (run.first(), None);
        run.cut(
            |page| fates[page - first],
            |run, fate| match fate {
                Fate::Gone => {
                    let frames = &self.shared.frames;
                    frames.release(run.into_frame(), region.page_bytes());
                }
                Fate::Stays | Fate::Stolen => {
                    if fate == Fate::Stolen {
                        self.counters().steals.add(run.len());
                    }
                    let why = self.map_again(region, run, true, failure);
                    error = error.take().or(why);
                }
            },
        );
        self.close(leaving, error);
    }

    /// Ends the count of a run as on its way out: each of its pages is out, or stays after all.
    fn end_leaving(&mut self, leaving: &Leaving) {
        if leaving.overdue {
            leaving.region.count_overdue_out(leaving.pages.len());
        } else {
            self.out_bytes -= leaving.bytes();
            self.out_runs -= 1;
            (self.shared.frames.budget()).end_leaving(leaving.bytes());
        }
    }

    /// Maps the frame of pages again that stay after all. `written`: their bytes are in the store,
    /// except where `failure` says why they are not. Returns the first error: why pages had to
    /// stay, or could not.
    fn map_again(
        &self,
        region: &Arc<Region>,
        run: PageRun<A::Frame>,
        written: bool,
        failure: impl Fn(PageIndex) -> Option<PageError>,
    ) -> Option<PageError> {
        let usage = if region.words.load(run.first()).wanted() {
            UsageCount::Wanted
        } else {
            UsageCount::Unwanted
        };
        let mut error = run.pages().iter().find_map(&failure);
        let installer = &self.shared.installer;
        installer.install(region, run, usage, |page, is_stored, os| {
            let failed = failure(page);
            // Bytes that were not written may still be those that the store has.
            let is_stored = written && failed.is_none() || is_stored;
            // Where the write-back has failed too, its error goes first.
            let why = failed.unwrap_or(os);
            if is_stored {
                installer.fail(region, page, why.clone());
                error.get_or_insert(why);
            } else {
                // Worse than any error before.
                error = Some(installer.lose(region, page, &why));
            }
        });
        error
    }

    /// Closes a run that is settled: reports to its job or its region.
    fn close(&self, leaving: Leaving, error: Option<PageError>) {
        match (&leaving.job, error) {
            (Some(job), error) => job.close_one(error),
            (None, Some(error)) => {
                if error.is_lost_server() {
                    self.shared.jobs.fail(&leaving.region, &error);
                }
                leaving.region.record(error);
            }
            (None, None) => {}
        }
    }

    /// True if nothing is under way.
    #[cfg(test)]
    pub(crate) fn is_at_rest(&self) -> bool {
        self.io.in_flight() == 0 && (self.out_bytes, self.out_runs) == (0, 0)
    }
}
