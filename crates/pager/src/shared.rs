//! Parts that all workers of a runtime share: [`SharedParts`].
//!
//! The rule: no business is done here. Each part owns what it uses, and imports no worker.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use crossbeam_utils::CachePadded;
use farpage_signals::Mutex;
use farpage_store::StoreError;
use farpage_vm::AddressSpace;

use crate::{
    budget::Budget, clock::FillClock, crash_message::CrashMessage, doors::Doors,
    frames::FrameAllocator, freeze::ReclaimGate, hand_over::HandOver, installer::Installer,
    job::Jobs, mapper::Mapper, markers::Markers, region::RegionTable, scatter::Scatter,
    stats::Counters, victims::Victims,
};

pub(crate) struct SharedParts<A: AddressSpace> {
    pub(crate) mapper: Arc<Mapper<A>>,
    pub(crate) frames: Arc<FrameAllocator<A>>,
    pub(crate) regions: Arc<RegionTable>,
    pub(crate) doors: Arc<Doors>,
    pub(crate) installer: Arc<Installer<A>>,
    pub(crate) victims: Arc<Victims<A>>,
    pub(crate) scatter: Scatter<A>,
    pub(crate) gate: ReclaimGate,
    pub(crate) hand_over: HandOver<A::Frame>,
    pub(crate) jobs: Jobs,
    pub(crate) unwritten: Unwritten,
    /// Read-ahead markers, by the shard of their filler.
    pub(crate) markers: Vec<CachePadded<Markers<A>>>,
    /// Counters, one set per worker: fillers, evictors, threads that serve their own faults.
    pub(crate) counters: Vec<CachePadded<Counters>>,
}

/// Number of workers of each kind.
pub(crate) struct Workers {
    pub(crate) fillers: usize,
    pub(crate) evictors: usize,
    /// Number of threads that can serve their own faults at once.
    pub(crate) inline_handlers: usize,
}

impl<A: AddressSpace> SharedParts<A> {
    pub(crate) fn new(
        space: Arc<A>,
        budget: Budget,
        doors: Arc<Doors>,
        workers: &Workers,
        crash_message: CrashMessage,
    ) -> SharedParts<A> {
        let clock = Arc::new(FillClock::new(budget.bytes()));
        let regions = Arc::new(RegionTable::default());
        let mapper = Arc::new(Mapper::new(space));
        let frames = Arc::new(FrameAllocator::new(mapper.clone(), doors.clone(), budget));
        let installer = Arc::new(Installer {
            mapper: mapper.clone(),
            frames: frames.clone(),
            clock: clock.clone(),
            crash_message,
        });
        let victims = Arc::new(Victims::new(
            mapper.clone(),
            frames.clone(),
            regions.clone(),
            clock,
        ));
        let scatter = Scatter::new(
            mapper.clone(),
            frames.clone(),
            installer.clone(),
            victims.clone(),
        );
        let in_all = workers.fillers + workers.evictors + workers.inline_handlers;
        let markers = || CachePadded::new(Markers::new(frames.clone()));
        SharedParts {
            markers: (0..workers.fillers).map(|_| markers()).collect(),
            mapper,
            frames,
            regions,
            hand_over: HandOver::new(doors.clone(), workers.inline_handlers, workers.evictors),
            doors,
            installer,
            victims,
            scatter,
            gate: ReclaimGate::new(in_all),
            jobs: Jobs::default(),
            unwritten: Unwritten::default(),
            counters: (0..in_all).map(|_| CachePadded::default()).collect(),
        }
    }

    /// Returns the number of shards, each with a filler of its own.
    pub(crate) fn shards(&self) -> usize {
        self.mapper.shards()
    }
}

/// Reason why the last write-back failed, or waits for remote memory, until one succeeds. No call
/// waits here: a thread of the program may be stopped while it looks.
#[derive(Default)]
pub(crate) struct Unwritten {
    /// False while `why` is empty: then write-backs that succeed take no lock. A hint, so relaxed.
    failed: AtomicBool,
    why: Mutex<Option<Arc<StoreError>>>,
}

impl Unwritten {
    /// Notes the error of a write-back that failed, or waits.
    pub(crate) fn set(&self, error: &StoreError) {
        if let Some(mut why) = self.why.try_lock() {
            *why = Some(Arc::new(error.clone()));
            self.failed.store(true, Ordering::Relaxed);
        }
    }

    /// Notes that a write-back succeeded.
    pub(crate) fn clear(&self) {
        if self.failed.load(Ordering::Relaxed)
            && let Some(mut why) = self.why.try_lock()
        {
            *why = None;
            self.failed.store(false, Ordering::Relaxed);
        }
    }

    /// Returns the reason why pages cannot be written back, if there is one.
    pub(crate) fn why(&self) -> Option<Arc<StoreError>> {
        self.why.try_lock()?.clone()
    }
}
