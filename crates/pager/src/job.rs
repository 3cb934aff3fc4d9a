//! Work on many pages that the program asks evictors for and may wait for: [`Job`].

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, Thread},
};

use farpage_signals::Mutex;
use farpage_signals::SignalGuard;
use farpage_store::PageRange;

use crate::{
    PageError,
    region::{Region, chunks_of},
};

/// Write-back of a range of pages, which then stay or are given up. Evictors share its chunks.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) region: Arc<Region>,
    /// True if pages stay mapped (a flush); false if they leave.
    pub(crate) keep: bool,
    pages: PageRange,
    cursor: AtomicUsize,
    /// Number of chunks not yet gone through, plus pages begun and not yet settled.
    open: AtomicUsize,
    outcome: Mutex<JobOutcome>,
    /// Thread of the program that has asked for the work and may wait for it. The thread is parked
    /// and not at a condition variable, since it must hold no lock while it lets signals in.
    asked_by: Thread,
    /// True if a server is lost: no more pages begin. Guards nothing else.
    ends_early: AtomicBool,
}

#[derive(Debug, Default)]
struct JobOutcome {
    ended: bool,
    error: Option<PageError>,
}

/// Jobs of which chunks are left to take, the oldest first.
#[derive(Debug, Default)]
pub(crate) struct Jobs(Mutex<VecDeque<Arc<Job>>>);

impl Jobs {
    pub(crate) fn add(&self, job: Arc<Job>) {
        self.0.lock().push_back(job);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }

    /// Returns the oldest job.
    pub(crate) fn first(&self) -> Option<Arc<Job>> {
        self.0.lock().front().cloned()
    }

    /// Fails all jobs on a region: a server that its pages are on is lost.
    pub(crate) fn fail(&self, region: &Arc<Region>, error: &PageError) {
        let jobs = self.0.lock();
        for job in jobs.iter().filter(|job| Arc::ptr_eq(&job.region, region)) {
            job.fail(error.clone());
        }
    }

    /// Removes a job whose chunks are all taken, unless another evictor has done so before.
    pub(crate) fn remove(&self, job: &Arc<Job>) {
        let mut jobs = self.0.lock();
        if jobs.front().is_some_and(|first| Arc::ptr_eq(first, job)) {
            jobs.pop_front();
        }
    }
}

impl Job {
    pub(crate) fn new(region: Arc<Region>, pages: PageRange, keep: bool) -> Arc<Job> {
        let chunks = chunks_of(pages);
        let job = Job {
            region,
            keep,
            pages,
            cursor: AtomicUsize::new(chunks.start),
            open: AtomicUsize::new(chunks.len() + 1),
            outcome: Mutex::default(),
            asked_by: thread::current(),
            ends_early: AtomicBool::new(false),
        };
        job.close_one(None);
        Arc::new(job)
    }

    /// Takes the next chunk with touched pages. `None`: all chunks are taken. The taker calls
    /// [`close_one`](Self::close_one) when it has begun all pages of the chunk.
    pub(crate) fn next_chunk(&self) -> Option<PageRange> {
        let end = chunks_of(self.pages).end;
        let mut at = self.cursor.load(Ordering::Relaxed);
        loop {
            if at >= end {
                return None;
            }
            let next = self.region.next_touched(at).unwrap_or(end).min(end);
            match self.cursor.compare_exchange_weak(
                at,
                next + 1,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => {
                    // Chunks that were passed over are done.
                    (at..next).for_each(|_| self.close_one(None));
                    if next == end {
                        return None;
                    }
                    return Some(self.region.chunk(next).within(self.pages));
                }
                Err(now) => at = now,
            }
        }
    }

    /// Counts one more page under way.
    pub(crate) fn open_one(&self) {
        self.open.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a page as settled, or a chunk as gone through.
    pub(crate) fn close_one(&self, error: Option<PageError>) {
        if let Some(error) = error {
            self.fail(error);
        }
        if self.open.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.outcome.lock().ended = true;
            self.asked_by.unpark();
        }
    }

    /// Keeps the job's first error. A lost server ends the job, which would otherwise wait for a
    /// deadline with every few pages.
    pub(crate) fn fail(&self, error: PageError) {
        let is_lost_server = error.is_lost_server();
        self.outcome.lock().error.get_or_insert(error);
        if is_lost_server {
            self.ends_early.store(true, Ordering::Relaxed);
            let end = chunks_of(self.pages).end;
            let at = self.cursor.swap(end, Ordering::Relaxed);
            (at..end).for_each(|_| self.close_one(None));
        }
    }

    /// True if pages that have not begun are to stay as they are.
    pub(crate) fn ends_early(&self) -> bool {
        self.ends_early.load(Ordering::Relaxed)
    }

    /// Waits until all pages are settled. Returns the first error. Must be called by the thread
    /// that has made the job.
    pub(crate) fn wait(&self, entered: &SignalGuard) -> Result<(), PageError> {
        loop {
            {
                let mut outcome = self.outcome.lock();
                if outcome.ended {
                    return outcome.error.take().map_or(Ok(()), Err);
                }
            }
            entered.wait(thread::park);
        }
    }

    #[cfg(test)]
    pub(crate) fn has_ended(&self) -> bool {
        self.outcome.lock().ended
    }
}
