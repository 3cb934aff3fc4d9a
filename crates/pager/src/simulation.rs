//! Seeded simulations: the real workers over simulated memory and a simulated server, against a
//! plain array.
//!
//! One thread plays all parts. A seed decides which takes the next step: a program thread that
//! loads or stores a word, a filler or an evictor that takes a turn. Half of the program's threads
//! mostly serve their faults themselves, step by step. Pages are reported held, faults twice;
//! operations are delayed, reordered and lost. The result of a load is compared with a plain array
//! at once, and the budget is checked after each step.

mod closing;
mod hot;
mod in_order;
mod lost;
mod plain;
mod read_only;
mod tight;
mod wide;
mod world;

use std::{
    collections::HashMap,
    io,
    mem::ManuallyDrop,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use farpage_fabric::{
    SessionOptions,
    sim::{SimConfig, SimServer},
};
use farpage_signals::{Condvar, Mutex};
use farpage_store::{
    BlockingOptions, Cluster, ClusterOptions, Codec, Element, PageIndex, PageRange, PageStore,
    RemoteOptions, Store, ZfpMode,
};
use farpage_vm::{AddressSpace, EventScope, Faulted, SimOptions, SimSpace};

use crate::{
    Advice, InThread, MappedRegion, PageError, Pager, PagerOptions, RegionOptions,
    ahead::ReadAhead,
    cede::Ceded,
    discard::DiscardOutcome,
    doors::Command,
    evictor::Evictor,
    filler::Filler,
    job::Job,
    pager::PagerParts,
    protocol::PageState,
    region::{CHUNK_PAGES, Region},
    relocate::Relocated,
};

const THREADS: usize = 4;
/// Number of threads, the first ones, that can serve their own faults.
const INLINE_HANDLERS: usize = 2;
const PAGES: usize = 96;

/// Returns pages by the numbers that programs have for them.
fn pages_of(numbers: Range<usize>) -> PageRange {
    PageIndex(numbers.start).until(PageIndex(numbers.end))
}

/// Threads of the program that serve their own faults.
struct InlineHandlers {
    in_thread: Arc<InThread<SimSpace>>,
    /// Fault that each thread is serving.
    serving: [Option<(Arc<Region>, PageIndex, ReadAhead)>; INLINE_HANDLERS],
}

impl InlineHandlers {
    fn new(pager: &Pager<SimSpace>) -> InlineHandlers {
        InlineHandlers {
            in_thread: pager.in_thread().expect("there are some").clone(),
            serving: Default::default(),
        }
    }

    /// Begins to serve a fault in a thread, if the thread can.
    fn begin(&mut self, thread: usize, region: &Arc<Region>, address: usize) {
        if thread < INLINE_HANDLERS && !region.store.is_users_own() {
            let page = region.page_at(address);
            let mut handler = self.in_thread.handler(thread);
            let plan = handler.begin_serving(region, page, address);
            self.serving[thread] = plan.map(|plan| (region.clone(), page, plan));
        }
    }

    fn is_serving(&self, thread: usize) -> bool {
        thread < INLINE_HANDLERS && self.serving[thread].is_some()
    }

    /// Goes on with a thread's fault. Returns whether nothing is left to do.
    fn step(&mut self, thread: usize) -> bool {
        let mut handler = self.in_thread.handler(thread);
        let done = handler.serve_a_step();
        if done && let Some((region, page, plan)) = self.serving[thread].take() {
            handler.end_serving(&region, page, plan);
        }
        done
    }

    fn turn(&mut self) {
        (0..INLINE_HANDLERS).for_each(|thread| _ = self.is_serving(thread) && self.step(thread));
    }
}

/// Drops regions on a thread of its own, since a drop waits for workers that `turn` drives here.
pub(crate) fn drop_beside(regions: Vec<MappedRegion<SimSpace>>, mut turn: impl FnMut()) {
    let ender = std::thread::spawn(move || drop(regions));
    while !ender.is_finished() {
        turn();
    }
    ender.join().expect("dropping a region does not panic");
}

fn close(
    regions: Vec<MappedRegion<SimSpace>>,
    fillers: &mut [Filler<SimSpace>],
    evictors: &mut [Evictor<SimSpace>],
) {
    drop_beside(regions, || {
        fillers
            .iter_mut()
            .for_each(|filler| _ = filler.turn(EventScope::All));
        evictors.iter_mut().for_each(|evictor| _ = evictor.turn());
    });
}

pub(crate) fn next(random: &mut u64) -> u64 {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    *random >> 11
}

/// Returns the seeds of one run; `FARPAGE_SIM_SEEDS=from..to` replaces them.
fn seeds(default: Range<u64>) -> Range<u64> {
    let Ok(text) = std::env::var("FARPAGE_SIM_SEEDS") else {
        return default;
    };
    let (from, to) = text
        .split_once("..")
        .expect("FARPAGE_SIM_SEEDS is from..to");
    from.parse().expect("a number")..to.parse().expect("a number")
}

/// A store that fails now and then.
struct Flaky {
    bytes: Mutex<Vec<u8>>,
    random: Mutex<u64>,
    /// Number of calls of which one fails; 0: none fails.
    fail_one_in: AtomicU64,
}

impl Flaky {
    fn call(&self) -> io::Result<()> {
        match self.fail_one_in.load(Ordering::Relaxed) {
            n if n > 0 && next(&mut self.random.lock()).is_multiple_of(n) => {
                Err(io::Error::other("the store fails now and then"))
            }
            _ => Ok(()),
        }
    }
}

impl Store for Flaky {
    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.call()?;
        buf.copy_from_slice(&self.bytes.lock()[offset as usize..][..buf.len()]);
        Ok(())
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.call()?;
        self.bytes.lock()[offset as usize..][..buf.len()].copy_from_slice(buf);
        Ok(())
    }

    fn may_block(&self) -> bool {
        false
    }
}
