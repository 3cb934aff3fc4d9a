//! Registered memory: the time of registrations, the owners of bytes, and the messages when there
//! is no memory.
//!
//! The rule: a registrar that records its calls stands in for a network adapter, so that all of it
//! runs anywhere.

use std::{
    io,
    ptr::NonNull,
    sync::{
        Arc, Barrier, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread,
};

use farpage_fabric::{
    Buf, SessionOptions, Verb,
    regmem::{
        Access, DomainId, Keys, MemoryRegistration, NullRegistrar, RegBuf, RegError, RegPool,
        RegPoolOptions, Registrar,
    },
    sim::{SimConfig, SimServer},
};
use farpage_testkit::{op, transfer};
use proptest::prelude::*;

const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A registrar that remembers the registered memory.
#[derive(Debug)]
struct Recorder {
    domain: DomainId,
    next_key: AtomicU32,
    live: Arc<Mutex<Vec<(usize, usize)>>>,
    fails_with: Option<i32>,
}

impl Recorder {
    fn new() -> Arc<Self> {
        Self::failing(None)
    }

    fn failing(fails_with: Option<i32>) -> Arc<Self> {
        Arc::new(Self {
            domain: DomainId::unique(),
            next_key: AtomicU32::new(1),
            live: Arc::default(),
            fails_with,
        })
    }

    fn records(&self) -> MutexGuard<'_, Vec<(usize, usize)>> {
        self.live.lock().expect("nothing panics under it")
    }

    fn live(&self) -> Vec<(usize, usize)> {
        self.records().clone()
    }
}

/// A guard that reads the memory at its end, as an adapter may: a crash if it is gone by then.
struct Guard {
    at: (usize, usize),
    live: Arc<Mutex<Vec<(usize, usize)>>>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        let last = (self.at.0 + self.at.1 - 1) as *const u8;
        // SAFETY: registered memory is mapped until its registration ends.
        unsafe { last.read_volatile() };
        let mut live = self.live.lock().expect("nothing panics under it");
        live.retain(|at| *at != self.at);
    }
}

impl Registrar for Recorder {
    fn domain(&self) -> DomainId {
        self.domain
    }

    unsafe fn register(
        &self,
        memory: NonNull<[u8]>,
        _access: Access,
    ) -> io::Result<MemoryRegistration> {
        if let Some(errno) = self.fails_with {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let at = (memory.as_ptr().cast::<u8>() as usize, memory.len());
        self.records().push(at);
        let key = self.next_key.fetch_add(1, Ordering::Relaxed);
        let live = Arc::clone(&self.live);
        let keys = Keys {
            lkey: key,
            rkey: key,
        };
        Ok(MemoryRegistration::new(keys, Guard { at, live }))
    }
}

fn pool(registrar: &Arc<Recorder>, options: RegPoolOptions) -> RegPool {
    RegPool::new([Arc::clone(registrar) as Arc<dyn Registrar>], options)
}

fn address(buf: &RegBuf) -> usize {
    buf.as_ptr() as usize
}

#[test]
fn slabs_are_registered_once_and_deregistered_with_the_last_buffer() {
    let recorder = Recorder::new();
    let pool = pool(&recorder, RegPoolOptions::default());
    assert_eq!(pool.stats().slabs, 0);
    let bufs: Vec<_> = (0..64).map(|_| pool.acquire(60_000).unwrap()).collect();
    let slabs = recorder.live();
    assert_eq!(pool.stats().registrations, slabs.len() as u64);
    // 64 buffers of 60 KiB each, with a fifth of waste at most, fit into these slabs.
    assert!((2..=3).contains(&slabs.len()), "{slabs:?}");
    for buf in &bufs {
        let keys = buf.keys(recorder.domain).unwrap().expect("its domain");
        let (start, bytes) = slabs[keys.lkey as usize - 1];
        assert!(address(buf) >= start && address(buf) + 60_000 <= start + bytes);
        assert!(buf.keys(DomainId::unique()).unwrap().is_none());
    }
    drop(bufs);
    for _ in 0..1000 {
        drop((pool.acquire(60_000).unwrap(), pool.acquire(58_000).unwrap()));
    }
    let stats = pool.stats();
    assert_eq!(
        (stats.registrations, stats.slabs),
        (slabs.len() as u64, slabs.len() as u64)
    );
    assert_eq!(stats.acquisitions, 64 + 2000);
    assert_eq!(
        stats.cache_hits, 2000,
        "what this thread gave back comes from its cache"
    );
    let last = pool.acquire(60_000).unwrap();
    drop(pool);
    assert_eq!(recorder.live(), slabs, "a buffer keeps its pool");
    drop(last);
    assert!(recorder.live().is_empty());
}

#[test]
fn lazy_pools_register_at_first_use_and_only_with_who_asks() {
    let (recorder, other) = (Recorder::new(), Recorder::new());
    let options = RegPoolOptions {
        lazy: true,
        ..RegPoolOptions::default()
    };
    let registrars = [&recorder, &other].map(|r| Arc::clone(r) as Arc<dyn Registrar>);
    let pool = RegPool::new(registrars, options);
    let (first, second) = (pool.acquire(4096).unwrap(), pool.acquire(4096).unwrap());
    assert!(recorder.live().is_empty());
    let keys = first.keys(recorder.domain).unwrap();
    assert_eq!(
        keys,
        second.keys(recorder.domain).unwrap(),
        "one slab, one key"
    );
    assert_eq!((recorder.live().len(), other.live().len()), (1, 0));
    assert_eq!(pool.stats().registrations, 1);
}

#[test]
fn the_cap_is_an_error_that_says_so_and_what_is_given_back_can_be_had_again() {
    let recorder = Recorder::new();
    let options = RegPoolOptions {
        bytes_max: 2 * HUGE_PAGE_BYTES,
        slab_bytes: 8 * HUGE_PAGE_BYTES,
        ..RegPoolOptions::default()
    };
    let pool = pool(&recorder, options);
    let mut bufs: Vec<_> = (0..4).map(|_| pool.acquire(1 << 20).unwrap()).collect();
    let error = pool.acquire(1 << 20).unwrap_err();
    assert!(
        matches!(error, RegError::Full { used_bytes, .. } if used_bytes == 2 * HUGE_PAGE_BYTES)
    );
    assert!(error.to_string().contains("raise `bytes_max`"), "{error}");
    bufs.pop();
    pool.acquire(1 << 20).unwrap();
}

#[test]
fn memory_that_cannot_be_registered_is_an_error_that_says_what_to_do() {
    let pool_that_fails = |errno| pool(&Recorder::failing(Some(errno)), RegPoolOptions::default());
    let full = pool_that_fails(libc::ENOMEM);
    let error = full.acquire(4096).unwrap_err().to_string();
    assert!(
        error.starts_with("cannot register 2097152 bytes with Recorder"),
        "{error}"
    );
    // The advice depends on the limit of the user who runs this.
    assert!(
        error.contains("ulimit -l") || error.contains("lower the cap"),
        "{error}"
    );
    assert_eq!((full.stats().slabs, full.stats().registrations), (0, 0));
    let other = pool_that_fails(libc::EINVAL)
        .import(vec![0; 4096])
        .unwrap_err();
    assert!(!other.to_string().contains("ulimit"), "{other}");
}

#[test]
fn imported_memory_keeps_its_owner_until_it_is_no_longer_registered() {
    struct Owner {
        bytes: Vec<u8>,
        recorder: Arc<Recorder>,
        dropped: Arc<AtomicBool>,
    }
    impl AsMut<[u8]> for Owner {
        fn as_mut(&mut self) -> &mut [u8] {
            &mut self.bytes
        }
    }
    impl Drop for Owner {
        fn drop(&mut self) {
            assert!(self.recorder.live().is_empty());
            self.dropped.store(true, Ordering::Relaxed);
        }
    }
    let recorder = Recorder::new();
    let pool = pool(&recorder, RegPoolOptions::default());
    let dropped = Arc::new(AtomicBool::new(false));
    let bytes = vec![7; 10_000];
    let at = bytes.as_ptr() as usize;
    let owner = Owner {
        bytes,
        recorder: Arc::clone(&recorder),
        dropped: Arc::clone(&dropped),
    };
    let mut buf = pool.import(owner).unwrap();
    assert_eq!(recorder.live(), [(at, 10_000)]);
    assert!(buf.keys(recorder.domain).unwrap().is_some());
    // Buffers outlive everything that they came from.
    drop(pool);
    buf.as_mut()[9_999] = 8;
    assert_eq!(
        (buf.as_ref()[0], buf.as_ref()[9_999], buf.as_ref().len()),
        (7, 8, 10_000)
    );
    assert!(!dropped.load(Ordering::Relaxed));
    drop(buf);
    assert!(dropped.load(Ordering::Relaxed));
}

#[test]
fn buffers_that_another_thread_gave_back_are_found() {
    let pool = RegPool::new([], RegPoolOptions::default());
    for _ in 0..100 {
        let bufs: Vec<_> = (0..8).map(|_| pool.acquire(100_000).unwrap()).collect();
        thread::scope(|scope| scope.spawn(|| drop(bufs)).join().unwrap());
    }
    assert_eq!(pool.stats().slabs, 1);
}

#[test]
fn threads_never_share_a_buffer() {
    let pool = RegPool::new([Arc::new(NullRegistrar) as _], RegPoolOptions::default());
    let (threads, rounds) = (4, 2_000);
    let barrier = Barrier::new(threads);
    // Buffers change hands, so that other threads empty a thread's caches.
    let exchange = Mutex::new(Vec::<(RegBuf, u8)>::new());
    thread::scope(|scope| {
        for thread in 0..threads {
            let (pool, barrier, exchange) = (&pool, &barrier, &exchange);
            scope.spawn(move || {
                barrier.wait();
                for round in 0..rounds {
                    let stamp = (thread * 64 + round % 64) as u8;
                    let mut buf = pool.acquire(1 + (round * 7919) % 9_000).unwrap();
                    buf.as_mut().fill(stamp);
                    let other = {
                        let mut exchange = exchange.lock().unwrap();
                        exchange.push((buf, stamp));
                        let at = round % exchange.len();
                        (exchange.len() > 16).then(|| exchange.swap_remove(at))
                    };
                    if let Some((buf, stamp)) = other {
                        assert!(buf.as_ref().iter().all(|byte| *byte == stamp));
                    }
                }
            });
        }
    });
    let stats = pool.stats();
    assert_eq!(stats.acquisitions, (threads * rounds) as u64);
    assert_eq!(stats.registrations, stats.slabs);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Compares with the plainest model: buffers that are out do not overlap and keep their bytes;
    /// memory grows with the peak and not with time.
    #[test]
    fn buffers_that_are_out_do_not_overlap(steps in prop::collection::vec((1usize..300_000, any::<bool>()), 1..200)) {
        let pool = RegPool::new([], RegPoolOptions::default());
        let mut out: Vec<(RegBuf, u8)> = Vec::new();
        for (step, (bytes, give_back)) in steps.into_iter().enumerate() {
            if give_back && !out.is_empty() {
                let (buf, stamp) = out.swap_remove(bytes % out.len());
                prop_assert!(buf.as_ref().iter().all(|byte| *byte == stamp));
            } else {
                let mut buf = pool.acquire(bytes).unwrap();
                prop_assert_eq!(buf.as_ref().len(), bytes);
                prop_assert_eq!(address(&buf) % 64, 0);
                buf.as_mut().fill(step as u8);
                out.push((buf, step as u8));
            }
        }
        let mut ranges: Vec<_> = out.iter().map(|(buf, _)| (address(buf), buf.as_ref().len())).collect();
        ranges.sort_unstable();
        prop_assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
    }
}

#[test]
fn a_buffer_travels_through_a_channel_and_comes_back_registered() {
    let recorder = Recorder::new();
    let pool = pool(&recorder, RegPoolOptions::default());
    let session = SimServer::new(SimConfig::new(1))
        .session(&SessionOptions::default())
        .unwrap();
    let extent = session.grant(1 << 16).unwrap().id;
    let mut channel = session.channel::<RegBuf>().unwrap();
    let mut buf = pool.acquire(5000).unwrap();
    buf.as_mut().fill(9);
    let at = address(&buf);
    for verb in [Verb::Write, Verb::Read] {
        buf = transfer(&mut *channel, op(verb, extent, 0, buf)).unwrap();
        assert_eq!(address(&buf), at);
        assert!(buf.as_ref().iter().all(|byte| *byte == 9));
        let keys = buf
            .registered()
            .map(|buf| buf.keys(recorder.domain).unwrap());
        assert_eq!(keys, Some(Some(Keys { lkey: 1, rkey: 1 })));
        if verb == Verb::Write {
            buf.as_mut().fill(0);
        }
    }
}

#[test]
fn a_split_buffer_is_whole_again_when_all_parts_are_back() {
    let recorder = Recorder::new();
    let pool = pool(&recorder, RegPoolOptions::default());
    let whole = pool.acquire(1000).unwrap();
    let at = address(&whole);
    let mut parts = whole.split([100, 1, 899]);
    for (number, part) in parts.iter_mut().enumerate() {
        part.as_mut().fill(number as u8);
        assert_eq!(
            part.keys(recorder.domain).unwrap(),
            Some(Keys { lkey: 1, rkey: 1 })
        );
    }
    let starts: Vec<_> = parts.iter().map(|part| address(part) - at).collect();
    assert_eq!(starts, [0, 100, 101]);
    // Memory that is in use in parts is not handed out again.
    let other = pool.acquire(1000).unwrap();
    assert_ne!(address(&other), at);
    parts.rotate_left(1);
    let whole = RegBuf::join(parts);
    assert_eq!((address(&whole), whole.as_ref().len()), (at, 1000));
    let expected = [vec![0; 100], vec![1; 1], vec![2; 899]].concat();
    assert_eq!(whole.as_ref(), expected);
    drop(whole);
    assert_eq!(address(&pool.acquire(1000).unwrap()), at);
}

#[test]
#[should_panic(expected = "all parts of one buffer")]
fn a_buffer_of_which_a_part_is_missing_is_not_joined() {
    let pool = RegPool::new([], RegPoolOptions::default());
    let mut parts = pool.acquire(1000).unwrap().split([500, 500]);
    let _missing = parts.pop();
    RegBuf::join(parts);
}

#[test]
#[should_panic(expected = "a part of 501 bytes at 500 of 1000")]
fn parts_do_not_reach_beyond_their_buffer() {
    let pool = RegPool::new([], RegPoolOptions::default());
    pool.acquire(1000).unwrap().split([500, 501]);
}
