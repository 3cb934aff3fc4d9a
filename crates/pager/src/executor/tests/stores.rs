//! Handlers that call a store of a user's own, which may not return.

use std::{io, sync::atomic::AtomicUsize};

use farpage_signals::{Condvar, Mutex};
use farpage_store::{BlockingOptions, PageRange, Store};

use super::*;
use crate::job::Job;

/// A handler without a thread.
struct Puppet<'a> {
    executor: &'a Executor<SimSpace>,
    poll_set: PollSet<'a, SimSpace>,
    dues: Dues,
    asleep: Option<Option<Instant>>,
    /// Call of a store that the handler is in, and the shard whose filler's turn has led to it.
    call: Option<(usize, StoreCall<PageRun<<SimSpace as AddressSpace>::Frame>>)>,
}

impl Puppet<'_> {
    /// Takes the next step; other handlers may come between two steps.
    fn step(&mut self) {
        if let Some((shard, mut call)) = self.call.take() {
            call.make();
            return self.took(shard, self.executor.go_on(shard, call));
        }
        match (self.asleep, self.dues.pop()) {
            (Some(until), _) => {
                let now = Instant::now();
                self.poll_set.sleep(Some(now), &mut self.dues);
                // In its sleep the handler was told nothing before the time.
                if until.is_none_or(|until| now < until) && self.dues.is_empty() {
                    return;
                }
                self.asleep = None;
            }
            (None, Some(due)) => self.took(due.shard, self.executor.begin(due)),
            (None, None) => {
                let until = self.poll_set.prepare(&mut self.dues);
                if self.dues.is_empty() {
                    self.asleep = Some(until);
                }
            }
        }
    }

    fn took(&mut self, shard: usize, step: TurnOutcome<SimSpace>) {
        match step {
            TurnOutcome::Call(call) => self.call = Some((shard, call)),
            TurnOutcome::Done { again: true } => self.dues.push(Due::all(shard)),
            TurnOutcome::Done { again: false } => {}
        }
    }
}

/// A store of a user's own, whose calls wait while the gate is shut.
#[derive(Default)]
struct Gated {
    bytes: Mutex<Vec<u8>>,
    is_shut: Mutex<bool>,
    opened: Condvar,
    waiting: AtomicUsize,
}

impl Gated {
    /// Maps a region over the store, whose calls are all made by workers.
    fn map(
        self: &Arc<Self>,
        cluster: &Arc<Cluster>,
        pager: &Arc<Pager<SimSpace>>,
    ) -> MappedRegion<SimSpace> {
        *self.bytes.lock() = vec![0; BYTES as usize];
        let options = BlockingOptions { threads: 0 };
        let store = PageStore::blocking(cluster, "own", BYTES, PAGE_BYTES, self.clone(), &options);
        let store = store.expect("the sizes are sound");
        (pager.map(store, RegionOptions::default())).expect("the budget holds pages of all fillers")
    }

    fn pass(&self) {
        let mut is_shut = self.is_shut.lock();
        self.waiting.fetch_add(1, Ordering::SeqCst);
        while *is_shut {
            is_shut = self.opened.wait(is_shut);
        }
        self.waiting.fetch_sub(1, Ordering::SeqCst);
    }

    fn shut(&self) {
        *self.is_shut.lock() = true;
    }

    fn open(&self) {
        *self.is_shut.lock() = false;
        self.opened.notify_all();
    }
}

impl Store for Gated {
    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.pass();
        buf.copy_from_slice(&self.bytes.lock()[offset as usize..][..buf.len()]);
        Ok(())
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.pass();
        self.bytes.lock()[offset as usize..][..buf.len()].copy_from_slice(buf);
        Ok(())
    }
}

#[test]
fn handlers_that_take_over_from_each_other_leave_no_fault_behind() {
    for seed in 1..=20_u64 {
        println!("seed {seed}");
        let World {
            space,
            cluster,
            executor,
            mut evictors,
            mapped,
        } = world(seed);
        let own = Arc::new(Gated::default()).map(&cluster, mapped.pager());
        let regions = [mapped, ManuallyDrop::new(own)];
        let mut random = seed;
        let mut below = |limit: usize| (next(&mut random) % limit as u64) as usize;
        let mut puppets: Vec<_> = HANDLERS
            .map(|_| Puppet {
                executor: &executor,
                poll_set: PollSet::new(&executor.tasks),
                dues: executor.all(),
                asleep: None,
                call: None,
            })
            .into();
        let mut wants: [Option<(usize, usize)>; PROGRAMS] = [None; PROGRAMS];
        // Number of additions, by region and page.
        let mut shadow = [[0; 16]; 2];
        let (mut accesses, mut calls) = (0, 0);
        let mut since = Instant::now();
        while accesses < 2000 {
            assert!(since.elapsed() < Duration::from_secs(20), "nobody gets on");
            match below(10) {
                0..3 => {
                    let thread = below(PROGRAMS);
                    let (region, page) =
                        *wants[thread].get_or_insert_with(|| (below(2), below(16)));
                    if space.is_asleep(thread) {
                        continue;
                    }
                    let mapped = &regions[region];
                    let offset = (page % SHARDS) * (16 << 20) + page / SHARDS * PAGE_BYTES;
                    let address = mapped.address() + offset;
                    let outcome = space.try_load(thread, address).and_then(|seen| {
                        assert_eq!(seen, shadow[region][page], "page {page} of {region}");
                        space.try_store(thread, address, seen + 1)
                    });
                    match outcome {
                        Ok(()) => {
                            shadow[region][page] += 1;
                            (wants[thread], since) = (None, Instant::now());
                            accesses += 1;
                        }
                        // As the kernel does: once for each fault.
                        Err(Faulted::Asleep) => {
                            executor.tasks.waker(shard_at(mapped, offset).0).wake()
                        }
                        Err(other) => panic!("page {page}: {other}"),
                    }
                }
                3 => _ = evictors[below(2)].turn(),
                _ => {
                    let puppet = &mut puppets[below(HANDLERS.len())];
                    puppet.step();
                    calls += usize::from(puppet.call.is_some());
                }
            }
        }
        assert!(calls > 100, "handlers were in {calls} calls");
        while puppets.iter().any(|puppet| puppet.call.is_some()) {
            puppets.iter_mut().for_each(Puppet::step);
        }
        drop(puppets);
        let regions = regions.map(ManuallyDrop::into_inner);
        close(&executor, &mut evictors, regions.into());
    }
}

/// Adds to a word of each of the first pages.
fn add_to(
    space: &SimSpace,
    shared: &SharedParts<SimSpace>,
    mapped: &MappedRegion<SimSpace>,
    pages: usize,
) {
    let end = Instant::now() + Duration::from_secs(20);
    for page in 0..pages {
        let address = mapped.address() + (page % SHARDS) * (16 << 20) + page / SHARDS * PAGE_BYTES;
        loop {
            match space
                .try_load(1, address)
                .and_then(|seen| space.try_store(1, address, seen + 1))
            {
                Ok(()) => break,
                Err(Faulted::Asleep) => shared.doors.wake_fillers(),
                Err(other) => panic!("page {page}: {other}"),
            }
            while space.is_asleep(1) {
                assert!(Instant::now() < end, "nobody serves page {page}");
                std::thread::yield_now();
            }
        }
    }
}

#[test]
fn workers_whose_only_thread_is_kept_by_a_store_go_on() {
    for writes in [false, true] {
        let World {
            space,
            cluster,
            executor,
            evictors,
            mapped,
        } = world_with(1, &HANDLERS[..1]);
        let shared = executor.tasks.shared.clone();
        start(&executor, evictors);
        let gated = Arc::new(Gated::default());
        let own = ManuallyDrop::new(gated.map(&cluster, mapped.pager()));
        if writes {
            // The store keeps the pages, which are less than the budget.
            add_to(&space, &shared, &own, 3);
        }
        gated.shut();
        let pages = PageRange::first(own.region().pages());
        let job = Job::new(own.region().clone(), pages, false);
        if writes {
            shared.jobs.add(job.clone());
            shared.doors.wake_evictors();
        } else {
            assert_eq!(space.try_load(0, own.address()), Err(Faulted::Asleep));
            shared.doors.wake_fillers();
        }
        let limit = Instant::now() + Duration::from_secs(20);
        while gated.waiting.load(Ordering::SeqCst) == 0 {
            assert!(Instant::now() < limit, "nobody calls the store");
            std::thread::yield_now();
        }
        // Twice, since the pages have to leave for each other.
        add_to(&space, &shared, &mapped, 16);
        add_to(&space, &shared, &mapped, 16);
        gated.open();
        while space.is_asleep(0) || writes && !job.has_ended() {
            assert!(Instant::now() < limit, "the call came to nothing");
            std::thread::yield_now();
        }
        end(
            &executor,
            [own, mapped].map(ManuallyDrop::into_inner).into(),
        );
    }
}
