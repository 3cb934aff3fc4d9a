//! Tests of stores through I/O queues, by subject. This file has the shared parts: simulated
//! servers, I/O queues that are driven to the end, and [`conform`], which compares any store with a
//! plain array.

mod adds;
mod copies;
mod damage;
mod decoding;
mod drains;
mod full;
mod lossy;
mod named;
mod outages;
mod own;
mod pages;
mod parity;
mod readers;
mod repairs;
mod room;
mod runs;
mod sets;
mod snapshots;

use std::{
    collections::HashMap,
    io, iter,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use farpage_fabric::{
    AllocError, Endpoint, ExtentId, PublishError, Session, SessionOptions, Verb,
    server::ServerThread,
    sim::{SimConfig, SimHost, SimServer},
};
use farpage_signals::Mutex;
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::{
    BlockingOptions, Cluster, ClusterOptions, Codec, CreateError, Element, EntryWords, FileStore,
    FileStoreError, IoQueue, Layout, OpenStoreError, PageIndex, PageStore, PublishStoreError,
    RemoteOptions, Reserve, RunBuffer, RunCompletion, RunCounts, Snapshot, Store, StoreError,
    ZfpMode, entry::PageEntry, mover::Mover, place::SlotPlace, pool::SlotPool, remote::Backing,
};

/// A frame that knows where it was cut out, so that it is only joined with what lay behind it.
#[derive(Debug)]
struct Piece {
    origin: usize,
    at: usize,
    bytes: Vec<u8>,
}

impl From<Vec<u8>> for Piece {
    fn from(bytes: Vec<u8>) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let origin = NEXT.fetch_add(1, Ordering::Relaxed);
        Self {
            origin,
            at: 0,
            bytes,
        }
    }
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl AsMut<[u8]> for Piece {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl RunBuffer for Piece {
    fn split_off(&mut self, bytes: usize) -> Self {
        assert!(bytes > 0 && bytes < self.bytes.len());
        Self {
            origin: self.origin,
            at: self.at + bytes,
            bytes: self.bytes.split_off(bytes),
        }
    }

    fn join(&mut self, next: Self) -> Result<(), Self> {
        if (self.origin, self.at + self.bytes.len()) != (next.origin, next.at) {
            return Err(next);
        }
        self.bytes.extend(next.bytes);
        Ok(())
    }
}

const CLEAN: RunCounts = RunCounts {
    clean: 1,
    written: 0,
    wire_bytes: 0,
};

fn written(wire_bytes: u64) -> RunCounts {
    RunCounts {
        clean: 0,
        written: 1,
        wire_bytes,
    }
}

const REGION: &str = "array 7 of 12 MiB";

fn session(server: &Arc<SimServer>) -> Arc<Session> {
    server
        .session(&SessionOptions::default())
        .expect("the simulated server lives")
}

/// Returns a server and a client of it.
fn lone(config: SimConfig, options: ClusterOptions) -> (Arc<SimServer>, Arc<Cluster>) {
    let server = SimServer::new(config);
    let cluster = Cluster::new(vec![session(&server)], options);
    (server, cluster)
}

fn cluster_of(configs: impl IntoIterator<Item = SimConfig>) -> Arc<Cluster> {
    let sessions = configs
        .into_iter()
        .map(|config| session(&SimServer::new(config)))
        .collect();
    Cluster::new(
        sessions,
        // A machine may stand still for seconds between two attempts.
        within(Duration::from_secs(30)),
    )
}

/// Codecs without loss: pages that come back are compared with what was written.
const CODECS: [Codec; 5] = [
    Codec::Raw,
    Codec::Adaptive {
        accuracy: None,
        element: Some(Element::I32),
    },
    Codec::Lz4,
    Codec::Shuffle {
        element_bytes: Some(4),
    },
    Codec::Zfp {
        mode: ZfpMode::Reversible,
        element: Some(Element::F64),
    },
];

fn cluster(seed: u64) -> Arc<Cluster> {
    cluster_of([SimConfig::new(seed), SimConfig::new(seed + 1000)])
}

fn remote(cluster: &Arc<Cluster>, pages: u64, page_bytes: usize, codec: Codec) -> Arc<PageStore> {
    let options = RemoteOptions {
        codec: Some(codec),
        ..RemoteOptions::default()
    };
    PageStore::remote(
        cluster,
        REGION,
        pages * page_bytes as u64,
        page_bytes,
        &options,
    )
    .expect("it fits")
}

fn named(cluster: &Arc<Cluster>, name: &str, pages: u64, codec: Codec) -> Arc<PageStore> {
    let options = RemoteOptions {
        codec: Some(codec),
        name: Some(name.to_owned()),
        ..RemoteOptions::default()
    };
    PageStore::remote(cluster, REGION, pages * 4096, 4096, &options).expect("it fits")
}

/// Makes a store of pages of 4 KiB that reserves nothing. With a name, the store is one of a named
/// region.
fn on_demand(cluster: &Arc<Cluster>, bytes: u64, name: Option<&str>) -> Arc<PageStore> {
    let options = RemoteOptions {
        reserve: Reserve::OnDemand,
        name: name.map(str::to_owned),
        ..RemoteOptions::default()
    };
    PageStore::remote(cluster, REGION, bytes, 4096, &options).expect("no reservation")
}

fn within(deadline: Duration) -> ClusterOptions {
    ClusterOptions {
        deadline,
        ..ClusterOptions::default()
    }
}

/// Returns the settings of a server that lends `bytes`.
fn lending(seed: u64, bytes: u64) -> SimConfig {
    SimConfig {
        capacity_bytes: bytes,
        ..SimConfig::new(seed)
    }
}

/// I/O queue of a test. Requests are numbers.
type Queue = IoQueue<u64, Piece>;
type Done = RunCompletion<u64, Piece>;

fn queue(cluster: &Arc<Cluster>) -> Queue {
    Queue::new(cluster).expect("the servers that are needed live")
}

/// Makes an I/O queue of signal handlers.
fn passive_queue(cluster: &Arc<Cluster>) -> Queue {
    Queue::passive(cluster).expect("the servers that are needed live")
}

/// Waits for a condition, which may take steps towards it, for 20 s at most.
fn wait_until(missing: &str, mut is_met: impl FnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(20);
    while !is_met() {
        assert!(Instant::now() < limit, "{missing}");
        std::thread::yield_now();
    }
}

/// Polls once. Returns the requests that have ended, in the order of their ends.
fn poll(io: &mut Queue) -> Vec<Done> {
    io.poll();
    let mut done: Vec<_> = iter::from_fn(|| io.take_ended()).collect();
    done.reverse();
    done
}

/// Polls until a request has ended.
fn some(io: &mut Queue) -> Vec<Done> {
    let limit = Instant::now() + Duration::from_secs(20);
    let mut done = Vec::new();
    while done.is_empty() {
        done = poll(io);
        if done.is_empty() {
            assert!(
                Instant::now() < limit,
                "{} operations never end",
                io.in_flight()
            );
            let mut fds = Vec::new();
            let until = io.wait(&mut fds);
            assert!(
                until.is_some() || !fds.is_empty(),
                "nothing to sleep on with {} in flight",
                io.in_flight()
            );
            let left = until.map_or(100, |until| {
                until
                    .saturating_duration_since(Instant::now())
                    .as_millis()
                    .min(100)
            });
            nix::poll::poll(&mut fds, left as u16).expect("poll");
        }
    }
    done
}

fn at(page: u64) -> PageIndex {
    PageIndex(page as usize)
}

fn one(io: &mut Queue) -> Done {
    let mut done = some(io);
    assert_eq!(done.len(), 1);
    done.pop().unwrap()
}

fn write(
    io: &mut Queue,
    store: &Arc<PageStore>,
    page: u64,
    bytes: &[u8],
) -> Result<RunCounts, StoreError> {
    let mut done = write_run(io, store, page, bytes);
    match done.failed.pop() {
        Some((_, error)) => Err(error),
        None => Ok(done.outcome),
    }
}

fn write_run(io: &mut Queue, store: &Arc<PageStore>, page: u64, bytes: &[u8]) -> Done {
    io.write_back(store, at(page), bytes.to_vec().into(), page);
    let done = one(io);
    assert_eq!((done.request, &done.frame.bytes[..]), (page, bytes));
    done
}

fn read(io: &mut Queue, store: &Arc<PageStore>, page: u64) -> Result<Vec<u8>, StoreError> {
    let mut done = read_run(io, store, page, 1);
    match done.failed.pop() {
        Some((_, error)) => Err(error),
        None => Ok(done.frame.bytes),
    }
}

fn read_run(io: &mut Queue, store: &Arc<PageStore>, page: u64, pages: usize) -> Done {
    let frame = vec![0xee; pages * store.page_bytes()];
    io.fill(store, at(page), frame.into(), page);
    let done = one(io);
    assert_eq!((done.request, done.frame.at), (page, 0));
    assert_eq!(done.frame.bytes.len(), pages * store.page_bytes());
    done
}

fn read_copy(io: &mut Queue, snapshot: &Snapshot, page: PageIndex, entry: EntryWords) -> Done {
    let frame = vec![0xee; snapshot.store().page_bytes()];
    io.fill_copy(snapshot, page, entry, frame.into(), 0);
    one(io)
}

/// Writes pages, which must succeed.
fn write_pages(io: &mut Queue, store: &Arc<PageStore>, page: u64, bytes: &[u8]) {
    let done = write_run(io, store, page, bytes);
    assert!(done.failed.is_empty(), "{:?}", done.failed);
}

/// Reads pages, which must succeed.
fn read_pages(io: &mut Queue, store: &Arc<PageStore>, page: u64, pages: usize) -> Vec<u8> {
    let done = read_run(io, store, page, pages);
    assert!(done.failed.is_empty(), "{:?}", done.failed);
    done.frame.bytes
}

/// Returns a page of one of the kinds that codecs tell apart.
fn random_page(random: &mut ChaCha8Rng, page_bytes: usize) -> Vec<u8> {
    let mut page = vec![0; page_bytes];
    match random.random_range(0..6) {
        0 => {}
        1 => crate::codec::fill_repeated(&mut page, random.random()),
        2 => random.fill_bytes(&mut page),
        3 => {
            let random_bytes = random.random_range(1..=page_bytes);
            random.fill_bytes(&mut page[..random_bytes]);
        }
        4 => page
            .iter_mut()
            .enumerate()
            .for_each(|(i, byte)| *byte = (i / 7) as u8),
        _ => page[random.random_range(0..page_bytes)] = 1,
    }
    page
}

/// Runs the suite: random fills and write-backs of runs of up to 40 pages, many in flight over
/// several I/O queues, against a plain array, page by page. A failure that may pass is no error
/// here. Returns the number of pages that failed.
fn conform(
    cluster: &Arc<Cluster>,
    store: &Arc<PageStore>,
    model: &mut [u8],
    seed: u64,
    operations: usize,
) -> usize {
    conform_amid(cluster, store, model, seed, operations, |_| {})
}

/// Runs the suite of [`conform`], and calls `amid` between its operations.
fn conform_amid(
    cluster: &Arc<Cluster>,
    store: &Arc<PageStore>,
    model: &mut [u8],
    seed: u64,
    operations: usize,
    mut amid: impl FnMut(&mut ChaCha8Rng),
) -> usize {
    println!("seed {seed}");
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let page_bytes = store.page_bytes();
    let mut ios: Vec<Queue> = (0..3).map(|_| queue(cluster)).collect();
    let mut suite = Suite {
        store,
        model,
        busy: HashMap::new(),
        failed: 0,
        seed,
    };
    for tag in 0..operations as u64 {
        amid(&mut random);
        let io = random.random_range(0..ios.len());
        let page = random.random_range(0..store.pages());
        let pages = match random.random_range(0..3) {
            0 => 1,
            1 => random.random_range(1..=4),
            _ => random.random_range(1..=40),
        };
        let pages = page..(page + pages).min(store.pages());
        if suite.is_free(&pages) && random.random_bool(0.9) {
            let io = &mut ios[io];
            let len = (pages.end - pages.start) as usize * page_bytes;
            let bytes = if random.random_bool(0.5) {
                io.fill(store, at(page), vec![0xee; len].into(), tag);
                None
            } else {
                let mut bytes = Vec::new();
                for page in pages.clone() {
                    match random.random_range(0..3) {
                        0 => bytes.extend(suite.page(page)),
                        _ => bytes.extend(random_page(&mut random, page_bytes)),
                    }
                }
                io.write_back(store, at(page), bytes.clone().into(), tag);
                Some(bytes)
            };
            suite.busy.insert(tag, (pages, bytes));
        } else {
            poll(&mut ios[io])
                .into_iter()
                .for_each(|done| suite.finish(done));
        }
    }
    for io in &mut ios {
        while io.in_flight() > 0 {
            some(io).into_iter().for_each(|done| suite.finish(done));
        }
    }
    assert!(suite.busy.is_empty());
    for page in 0..store.pages() {
        suite.busy.insert(page, (page..page + 1, None));
        ios[0].fill(store, at(page), vec![0xee; page_bytes].into(), page);
        some(&mut ios[0])
            .into_iter()
            .for_each(|done| suite.finish(done));
    }
    suite.failed
}

struct Suite<'a> {
    store: &'a PageStore,
    model: &'a mut [u8],
    /// Pages by tag, with the bytes that are written, or `None` for a fill.
    busy: HashMap<u64, (Range<u64>, Option<Vec<u8>>)>,
    failed: usize,
    seed: u64,
}

impl Suite<'_> {
    fn is_free(&self, pages: &Range<u64>) -> bool {
        let apart = |busy: &Range<u64>| busy.end <= pages.start || pages.end <= busy.start;
        self.busy.values().all(|(busy, _)| apart(busy))
    }

    fn range(&self, page: u64) -> Range<usize> {
        let from = page as usize * self.store.page_bytes();
        from..(from + self.store.page_bytes()).min(self.model.len())
    }

    /// Returns a whole page as it should be.
    fn page(&self, page: u64) -> Vec<u8> {
        let mut bytes = self.model[self.range(page)].to_vec();
        bytes.resize(self.store.page_bytes(), 0);
        bytes
    }

    fn finish(&mut self, done: Done) {
        let (pages, bytes) = self.busy.remove(&done.request).expect("it was in flight");
        let (seed, page_bytes) = (self.seed, self.store.page_bytes());
        let count = (pages.end - pages.start) as usize;
        assert_eq!(
            (done.frame.at, done.frame.bytes.len()),
            (0, count * page_bytes)
        );
        assert!(done.failed.is_sorted_by(|(a, _), (b, _)| a < b));
        for (page, error) in &done.failed {
            assert!(
                pages.contains(&page.number()) && error.may_retry(),
                "{seed}: {error}"
            );
        }
        let RunCounts { clean, written, .. } = done.outcome;
        let ended = (clean + written) as usize;
        assert_eq!(
            ended,
            if bytes.is_some() {
                count - done.failed.len()
            } else {
                0
            }
        );
        if let Some(bytes) = &bytes {
            assert!(
                *bytes == done.frame.bytes,
                "seed {seed}: a write-back changed its frame"
            );
        }
        self.failed += done.failed.len();
        for (page, got) in pages.zip(done.frame.bytes.chunks(page_bytes)) {
            if done.failed.iter().any(|(failed, _)| *failed == at(page)) {
                continue;
            }
            let range = self.range(page);
            let len = range.len();
            if bytes.is_some() {
                self.model[range].copy_from_slice(&got[..len]);
                continue;
            }
            assert!(
                got[..len] == self.model[range],
                "seed {seed}: page {page} is another"
            );
            assert!(
                got[len..].iter().all(|&byte| byte == 0),
                "bytes beyond the region"
            );
        }
    }
}

/// Returns a page that is neither zeros nor one value. Each `number` gives another.
fn odd_page(page_bytes: usize, number: u64) -> Vec<u8> {
    let mut page = vec![0; page_bytes];
    ChaCha8Rng::seed_from_u64(number).fill_bytes(&mut page);
    page
}

fn odd_pages(page_bytes: usize, numbers: Range<u64>) -> Vec<u8> {
    numbers
        .flat_map(|number| odd_page(page_bytes, number))
        .collect()
}

fn pool(store: &PageStore) -> &Arc<SlotPool> {
    &store.remote_backing().pool
}

/// Returns the place and length of a page's bytes.
fn place_of(store: &PageStore, page: u64) -> (SlotPlace, u32) {
    match store.table.load(at(page)) {
        PageEntry::Stored {
            place,
            stored_bytes,
            ..
        } => (place, stored_bytes),
        other => panic!("{other:?}"),
    }
}

/// Changes a page's remote bytes behind the store's back.
fn tamper(store: &PageStore, page: u64, change: impl FnOnce(&mut [u8])) {
    let (place, len) = place_of(store, page);
    let extent = (place.server, pool(store).extent(place));
    tamper_extent(pool(store), extent, (place.offset, len), change);
}

fn tamper_extent(
    pool: &SlotPool,
    extent: (u8, ExtentId),
    (offset, len): (u64, u32),
    change: impl FnOnce(&mut [u8]),
) {
    let mut mover = Mover::new(pool);
    let buf = pool.registered.acquire(len as usize).expect("memory");
    let read = mover.transfer(Verb::Read, extent, offset, buf);
    let mut bytes = read.expect("the extent is there");
    change(bytes.as_mut());
    let write = mover.transfer(Verb::Write, extent, offset, bytes);
    write.expect("the extent is there");
}

/// Reads bytes of an extent.
fn read_extent(
    pool: &SlotPool,
    extent: (u8, ExtentId),
    (offset, len): (u64, u32),
    look: impl FnOnce(&mut [u8]),
) {
    let mut mover = Mover::new(pool);
    let read = mover.read_piece(extent, offset, len as usize);
    look(read.expect("the extent is there").as_mut());
}

fn servers() -> [Arc<SimServer>; 2] {
    [
        SimServer::new(SimConfig::new(1)),
        SimServer::new(SimConfig::new(2)),
    ]
}

fn client(servers: &[Arc<SimServer>]) -> Arc<Cluster> {
    Cluster::new(
        servers.iter().map(session).collect(),
        ClusterOptions::default(),
    )
}

/// Returns the bytes that servers grant, in all.
fn granted(servers: &[Arc<SimServer>]) -> u64 {
    let cluster = client(servers);
    let granted = (cluster.sessions().iter()).map(|it| it.stat().unwrap().granted_bytes);
    granted.sum()
}

/// Returns all bytes of a region.
fn vec_of(cluster: &Arc<Cluster>, store: &Arc<PageStore>) -> Vec<u8> {
    let mut io = queue(cluster);
    (0..store.pages())
        .flat_map(|page| read(&mut io, store, page).unwrap())
        .collect()
}
