//! Handlers over simulated memory: threads of their own, or one after the other by hand.

mod stores;

use std::{
    mem::ManuallyDrop,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use farpage_fabric::{
    SessionOptions,
    sim::{SimConfig, SimServer},
};
use farpage_store::{Cluster, ClusterOptions, PageIndex, PageStore, RemoteOptions};
use farpage_vm::{Faulted, Shard, SimOptions, SimSpace};

use super::*;
use crate::{
    MappedRegion, Pager, PagerOptions, RegionOptions,
    evictor::Evictor,
    pager::PagerParts,
    simulation::{self, next},
};

const SHARDS: usize = 4;
/// Numbers of CPUs, one larger than any that exists, which no handler minds.
const HANDLERS: [usize; 3] = [0, 1, 1 << 9];
const PROGRAMS: usize = 3;
const PAGE_BYTES: usize = 4096;
/// Size of the region. Stripes are of 16 MiB: each shard has one.
const BYTES: u64 = 64 << 20;

/// Touches pages of all shards, wakes fillers once for each fault, and counts in its own words.
fn program(
    thread: usize,
    space: &SimSpace,
    shared: &SharedParts<SimSpace>,
    mapped: &MappedRegion<SimSpace>,
) {
    const ROUNDS: u64 = 40;
    const PAGES: usize = 16;
    let end = Instant::now() + Duration::from_secs(20);
    let access = |page: usize, value: Option<u64>| loop {
        let shard = page % SHARDS;
        let offset = shard * (16 << 20) + page / SHARDS * PAGE_BYTES;
        let address = mapped.address() + offset + thread * 8;
        let outcome = match value {
            Some(value) => space.try_store(thread, address, value).map(|()| value),
            None => space.try_load(thread, address),
        };
        match outcome {
            Ok(seen) => return seen,
            Err(Faulted::Asleep) => shared.doors.wake_fillers(),
            Err(other) => panic!("page {page}: {other}"),
        }
        while space.is_asleep(thread) {
            assert!(Instant::now() < end, "nobody serves page {page}");
            std::thread::yield_now();
        }
    };
    for round in 0..ROUNDS {
        for page in 0..PAGES {
            let page = (page * 5 + thread) % PAGES;
            assert_eq!(access(page, None), round, "page {page}");
            access(page, Some(round + 1));
        }
    }
}

/// A region of [`BYTES`] over simulated memory, and an executor whose threads do not run.
struct World {
    space: Arc<SimSpace>,
    cluster: Arc<Cluster>,
    executor: Arc<Executor<SimSpace>>,
    evictors: Vec<Evictor<SimSpace>>,
    /// Region. A failed test does not drop it: the workers that a drop waits for do not run.
    mapped: ManuallyDrop<MappedRegion<SimSpace>>,
}

fn world(seed: u64) -> World {
    world_with(seed, &HANDLERS)
}

fn world_with(seed: u64, handlers: &[usize]) -> World {
    let space = Arc::new(SimSpace::new(SimOptions {
        shards: SHARDS,
        seed,
        busy_probability: 0.0,
        duplicate_probability: 0.0,
        ..SimOptions::default()
    }));
    let session = SimServer::new(SimConfig::new(seed))
        .session(&SessionOptions::default())
        .expect("the simulated server takes sessions");
    let cluster = Cluster::new(vec![session], ClusterOptions::default());
    let options = PagerOptions::new(8 * PAGE_BYTES as u64);
    let PagerParts {
        pager,
        fillers,
        evictors,
    } = Pager::assemble(space.clone(), cluster.clone(), &options).expect("the options are sound");
    let seats = Seats::new(
        pager.shared().doors.clone(),
        handlers.len() + evictors.len(),
    );
    let seats = Arc::new(seats.expect("descriptors are to be had"));
    let executor = Executor::new(pager.shared(), fillers, handlers, &seats);
    let options = RemoteOptions::default();
    let store = PageStore::remote(&cluster, "a region", BYTES, PAGE_BYTES, &options)
        .expect("the server has room");
    let mapped = (Arc::new(pager).map(store, RegionOptions::default()))
        .expect("the budget holds the pages of all fillers");
    World {
        space,
        cluster,
        executor: executor.expect("descriptors are to be had"),
        evictors,
        mapped: ManuallyDrop::new(mapped),
    }
}

fn shard_at(mapped: &MappedRegion<SimSpace>, offset: usize) -> Shard {
    mapped
        .region()
        .shard_of(PageIndex(offset / PAGE_BYTES), SHARDS)
}

#[test]
fn fillers_change_hands_while_programs_fault() {
    let World {
        space,
        executor,
        evictors,
        mapped,
        ..
    } = world(1);
    let shared = executor.tasks.shared.clone();
    start(&executor, evictors);

    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in (0..HANDLERS.len()).cycle() {
                if done.load(Ordering::Relaxed) {
                    break;
                }
                // Lets the others rest.
                executor.handlers.call_alone(number);
                std::thread::yield_now();
            }
        });
        let programs: Vec<_> = (0..PROGRAMS)
            .map(|thread| {
                let (space, shared, mapped) = (&space, &shared, &mapped);
                scope.spawn(move || program(thread, space, shared, mapped))
            })
            .collect();
        let ends: Vec<_> = programs.into_iter().map(|program| program.join()).collect();
        done.store(true, Ordering::Relaxed);
        ends.into_iter()
            .for_each(|end| end.expect("the program sees what it wrote"));
    });
    end(&executor, vec![ManuallyDrop::into_inner(mapped)]);
}

fn start(executor: &Arc<Executor<SimSpace>>, evictors: Vec<Evictor<SimSpace>>) {
    let mut serve = executor.serve_all();
    serve.extend(Evictor::serve_all(evictors, &executor.seats, serve.len()));
    executor.seats.assign(serve);
    executor.seats.start().expect("threads start");
}

/// Drops the regions, which need their workers to the end, and waits for the workers.
fn end(executor: &Executor<SimSpace>, regions: Vec<MappedRegion<SimSpace>>) {
    drop(regions);
    executor.seats.join();
}

#[test]
fn filler_with_faults_that_no_descriptor_tells_of_does_not_sleep() {
    let World {
        space,
        executor,
        mut evictors,
        mapped,
        ..
    } = world(1);
    let mut poll_set = PollSet::new(&executor.tasks);
    let mut dues = Dues::new();
    poll_set.prepare(&mut dues);
    assert!(dues.is_empty());
    let absent = space.try_load(0, mapped.address());
    assert_eq!(absent, Err(Faulted::Asleep));
    let end = Instant::now() + Duration::from_secs(20);
    while space.is_asleep(0) {
        assert!(Instant::now() < end, "nobody looks for the fault");
        poll_set.prepare(&mut dues);
        poll_set.sleep(Some(Instant::now()), &mut dues);
        dues.retain(|due| executor.drive(0, *due) == WorkLeft::Something);
    }
    close(
        &executor,
        &mut evictors,
        vec![ManuallyDrop::into_inner(mapped)],
    );
}

/// Drops the regions, while all workers take turns until they are gone.
fn close(
    executor: &Executor<SimSpace>,
    evictors: &mut [Evictor<SimSpace>],
    regions: Vec<MappedRegion<SimSpace>>,
) {
    simulation::drop_beside(regions, || {
        (0..SHARDS).for_each(|shard| _ = executor.drive(0, Due::all(shard)));
        evictors.iter_mut().for_each(|evictor| _ = evictor.turn());
    });
}

#[test]
fn handler_rests_only_where_nothing_is_asked_for_and_no_time_is_set() {
    let World {
        space: _space,
        executor,
        mut evictors,
        mapped,
        ..
    } = world(1);
    let poll_set = PollSet::new(&executor.tasks);
    // The first turn of a handler: a wake-up would be swallowed, since no handler has prepared for
    // it.
    (0..SHARDS).for_each(|shard| _ = executor.drive(0, Due::all(shard)));
    let region = mapped.region().clone();
    (executor.tasks.shared.doors).tell_fillers(|| crate::doors::Command::Settle(region.clone()));
    let mut dues = Dues::new();
    poll_set.prepare(&mut dues);
    assert_eq!(
        dues.len(),
        SHARDS,
        "what was asked for is found before a rest"
    );
    // Marked as resting, but something is to be done at a time that no other handler knows of.
    executor.tasks.set_until_ns(0, 1);
    assert!(!executor.goes_to_rest(1));
    executor.tasks.set_until_ns(0, u64::MAX);
    assert!(executor.goes_to_rest(1));
    close(
        &executor,
        &mut evictors,
        vec![ManuallyDrop::into_inner(mapped)],
    );
}
