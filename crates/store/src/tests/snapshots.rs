//! Snapshots: what pages held is read bit for bit, whatever has happened to them since, and nothing
//! is held for longer than it is needed.

mod named;

use std::{fs::File, os::unix::fs::FileExt, sync::RwLock};

use super::*;
use crate::{
    EntryWords, Snapshot, codec,
    place::{SlotSpan, slot_bytes},
};

/// Region of a child made by `fork`, as the child's keeper knows it: the child's entries, and the
/// bytes that its pages must have.
pub(super) struct Child {
    snapshot: Snapshot,
    entries: Vec<EntryWords>,
    bytes: Vec<u8>,
}

impl Child {
    pub(super) fn fork(store: &Arc<PageStore>, bytes: &[u8]) -> Self {
        let snapshot = Snapshot::take(store).expect("a region in remote memory");
        let memory = File::open("/proc/self/mem").expect("Linux has it");
        let entry = |page| {
            let mut words = EntryWords::default();
            let address = store.entry_address(page) as u64;
            (memory.read_exact_at(bytemuck::bytes_of_mut(&mut words), address)).expect("mapped");
            words
        };
        Self {
            snapshot,
            entries: store.all().iter().map(entry).collect(),
            bytes: bytes.to_vec(),
        }
    }

    pub(super) fn check(&self, lane: &mut Lane<Piece>) {
        for page in self.snapshot.store().all() {
            self.check_page(lane, page);
        }
    }

    fn check_page(&self, lane: &mut Lane<Piece>, page: PageIndex) {
        let page_bytes = self.snapshot.store().page_bytes();
        let frame = vec![0xee; page_bytes].into();
        let done = lane.read_copy(&self.snapshot, page, self.entries[page.0], frame);
        assert!(done.failed.is_empty(), "{:?}", done.failed);
        let expected = &self.bytes[page.offset(page_bytes)..][..page_bytes];
        assert!(done.frame.bytes == expected, "page {page} is another");
    }
}

/// Returns the bytes of all slots that pages of `stores` or of `children` have.
fn needed_bytes<'a>(
    stores: impl IntoIterator<Item = &'a Arc<PageStore>>,
    children: impl IntoIterator<Item = &'a Child>,
) -> u64 {
    let mut slots: HashMap<SlotPlace, u32> = HashMap::new();
    let mut add = |entry: PageEntry| {
        if let Some(SlotSpan { place, bytes }) = entry.slot() {
            slots.insert(place, bytes);
        }
    };
    for store in stores {
        (store.all().iter()).for_each(|page| add(store.table.load(page)));
    }
    for child in children {
        let entries = child.entries.iter();
        entries.for_each(|words| add(PageEntry::decode_timed(*words).expect("an entry")));
    }
    slots.values().map(|&bytes| slot_bytes(bytes)).sum()
}

/// Writes all pages of a region.
fn write_all(lane: &mut Lane<Piece>, store: &Arc<PageStore>, bytes: &[u8]) {
    let run_bytes = 16 * store.page_bytes();
    for (run, bytes) in bytes.chunks(run_bytes).enumerate() {
        let done = write_run(lane, store, run as u64 * 16, bytes);
        assert!(done.failed.is_empty(), "{:?}", done.failed);
    }
}

/// Returns a region's bytes: pages of all kinds.
fn random_bytes(random: &mut ChaCha8Rng, pages: u64) -> Vec<u8> {
    let page = |_| random_page(random, 4096);
    (0..pages).flat_map(page).collect()
}

fn granted(servers: &[Arc<SimServer>]) -> u64 {
    let cluster = client(servers);
    let granted = (cluster.sessions().iter()).map(|it| it.stat().unwrap().granted_bytes);
    granted.sum()
}

fn named(cluster: &Arc<Cluster>, pages: u64, codec: Codec) -> Arc<PageStore> {
    let options = RemoteOptions {
        codec: Some(codec),
        name: Some("x".to_owned()),
        ..RemoteOptions::default()
    };
    PageStore::remote(cluster, REGION, pages * 4096, 4096, &options).expect("it fits")
}

#[test]
fn a_child_reads_what_pages_held_when_they_are_rewritten_and_their_region_ends() {
    for (seed, codec) in (0..).zip(CODECS) {
        println!("seed {seed}");
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let cluster = cluster(seed);
        let mut lane = Lane::new(&cluster).unwrap();
        let (store, other) = (
            remote(&cluster, 60, 4096, codec),
            remote(&cluster, 60, 4096, codec),
        );
        let pool = pool(&store).clone();
        let others = random_bytes(&mut random, 60);
        write_all(&mut lane, &other, &others);
        let used_by_other = pool.used_bytes();
        let bytes = random_bytes(&mut random, 60);
        write_all(&mut lane, &store, &bytes);
        let (used, touched) = (pool.used_bytes(), store.stats().touched_pages());
        // 1. The region goes on.
        let child = Child::fork(&store, &bytes);
        child.check(&mut lane);
        assert_eq!((pool.used_bytes(), store.stats().held_bytes), (used, 0));
        write_all(&mut lane, &store, &random_bytes(&mut random, 60));
        child.check(&mut lane);
        store.clear(at(0).until(at(30)));
        store.all().iter().for_each(|page| store.forget(page));
        child.check(&mut lane);
        assert_eq!(store.stats().touched_pages(), touched, "the child's pages");
        let held = used - used_by_other;
        assert_eq!((pool.used_bytes(), store.stats().held_bytes), (used, held));
        drop(child);
        assert_eq!(
            (pool.used_bytes(), store.stats().held_bytes),
            (used_by_other, 0)
        );
        // 2. The region ends.
        write_all(&mut lane, &store, &bytes);
        let used = pool.used_bytes();
        let held = used - used_by_other;
        let (child, younger) = (Child::fork(&store, &bytes), Child::fork(&store, &bytes));
        write_all(&mut lane, &store, &random_bytes(&mut random, 60));
        store.retire();
        assert!(Snapshot::take(&store).is_none(), "nothing is left of it");
        drop((store, younger));
        child.check(&mut lane);
        assert_eq!(
            (pool.used_bytes(), cluster.stats().held_bytes),
            (used, held)
        );
        drop(child);
        assert_eq!(
            (pool.used_bytes(), cluster.stats().held_bytes),
            (used_by_other, 0)
        );
        assert!(vec_of(&cluster, &other) == others);
        drop(other);
        assert_eq!(cluster.granted_bytes(), 0, "surplus extents go back");
        // 3. The region ends first.
        let store = remote(&cluster, 60, 4096, codec);
        write_all(&mut lane, &store, &bytes);
        let child = Child::fork(&store, &bytes);
        store.retire();
        drop(store);
        child.check(&mut lane);
        assert!(cluster.granted_bytes() > 0);
        drop(child);
        assert_eq!(
            cluster.granted_bytes(),
            0,
            "the last snapshot gives it back"
        );
    }
}

#[test]
fn a_child_reads_pages_that_have_moved_since() {
    for codec in [Codec::Raw, Codec::Lz4] {
        let mut random = ChaCha8Rng::seed_from_u64(1);
        let cluster = cluster(1);
        let mut lane = Lane::new(&cluster).unwrap();
        let store = remote(&cluster, 40, 4096, codec);
        let mut bytes = odd_pages(4096, 0..40);
        write_all(&mut lane, &store, &bytes);
        store.clear(at(20).until(at(40)));
        bytes[20 * 4096..].fill(0);
        let child = Child::fork(&store, &bytes);
        let moved = |from: u64, to: u64| {
            for page in 0..20 {
                store.relocate(at(from + page), at(to + page));
            }
        };
        let is_exact = |children: &[Child]| {
            let needed = needed_bytes([&store], children);
            assert_eq!(pool(&store).used_bytes(), needed);
        };
        moved(0, 20);
        child.check(&mut lane);
        // The slots go out of use where they are now.
        write_all(&mut lane, &store, &odd_pages(4096, 100..140));
        child.check(&mut lane);
        is_exact(std::slice::from_ref(&child));
        // The pages that were written since are not needed, wherever they are.
        store.clear(at(0).until(at(20)));
        moved(20, 0);
        moved(0, 20);
        write_all(&mut lane, &store, &random_bytes(&mut random, 40));
        child.check(&mut lane);
        is_exact(std::slice::from_ref(&child));
        drop(child);
        is_exact(&[]);
    }
}

/// Regions that share a pool come and go, and so do children. After each step the pool has exactly
/// the slots that some region or some child has.
#[test]
fn children_come_and_go_and_nothing_else_is_kept() {
    struct Region {
        store: Arc<PageStore>,
        model: Vec<u8>,
    }
    const PAGES: u64 = 40;
    for seed in 0..10 {
        println!("seed {seed}");
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let config = |seed| match seed % 2 {
            0 => SimConfig::new(seed),
            _ => SimConfig {
                lose_one_in: Some(60),
                delay_steps: 20,
                ..SimConfig::new(seed)
            },
        };
        let cluster = cluster_of([config(seed), config(seed + 500)]);
        let codec = CODECS[seed as usize % CODECS.len()];
        let mut lane = Lane::new(&cluster).unwrap();
        let region = || Region {
            store: remote(&cluster, PAGES, 4096, codec),
            model: vec![0; PAGES as usize * 4096],
        };
        let mut regions = vec![region()];
        let pool = pool(&regions[0].store).clone();
        // Children, each with its copy of all regions.
        let mut families: Vec<Vec<Child>> = Vec::new();
        for step in 0..500 {
            let which = random.random_range(0..regions.len());
            let Region { store, model } = &mut regions[which];
            let page = random.random_range(0..PAGES);
            let count = random.random_range(1..=8).min(PAGES - page);
            let range = page as usize * 4096..(page + count) as usize * 4096;
            match random.random_range(0..100) {
                0..40 => {
                    let bytes = random_bytes(&mut random, count);
                    let done = write_run(&mut lane, store, page, &bytes);
                    assert!(done.failed.is_empty(), "{:?}", done.failed);
                    model[range].copy_from_slice(&bytes);
                }
                40..50 => {
                    store.clear(at(page).and_on(count as usize));
                    model[range].fill(0);
                }
                50..65 => {
                    let to = random.random_range(0..PAGES);
                    if store.is_blank(at(to)) && to != page {
                        store.relocate(at(page), at(to));
                        let from = page as usize * 4096..(page as usize + 1) * 4096;
                        model.copy_within(from.clone(), to as usize * 4096);
                        model[from].fill(0);
                    }
                }
                65..80 if families.len() < 5 => {
                    let copy = |region: &Region| Child::fork(&region.store, &region.model);
                    families.push(regions.iter().map(copy).collect());
                }
                80..90 if !families.is_empty() => {
                    let ends = random.random_range(0..families.len());
                    families.remove(ends);
                }
                90..93 => {
                    let Region { store, .. } = regions.swap_remove(which);
                    store.retire();
                    regions.push(region());
                }
                93.. if regions.len() < 3 => regions.push(region()),
                _ => {}
            }
            let stores = || regions.iter().map(|region| &region.store);
            let needed = needed_bytes(stores(), families.iter().flatten());
            assert_eq!(pool.used_bytes(), needed, "seed {seed}, step {step}");
            let held = needed - needed_bytes(stores(), []);
            assert_eq!(
                pool.snapshots.held_bytes(),
                held,
                "seed {seed}, step {step}"
            );
            assert_eq!(cluster.stats().held_bytes, held);
            for child in families.iter().flatten() {
                child.check_page(&mut lane, at(random.random_range(0..PAGES)));
            }
        }
        let all = families.iter().flatten();
        all.for_each(|child| child.check(&mut lane));
        for Region { store, model } in &regions {
            assert!(vec_of(&cluster, store) == *model, "seed {seed}");
        }
        drop(families);
        let stores = regions.iter().map(|region| &region.store);
        assert_eq!(pool.used_bytes(), needed_bytes(stores, []), "seed {seed}");
        drop(regions);
        assert_eq!((pool.used_bytes(), cluster.granted_bytes()), (0, 0));
    }
}

/// Threads write while children come and go. A lock keeps writes away from each `fork`.
#[test]
fn threads_write_while_children_come_and_go() {
    const PAGES: u64 = 64;
    const THREADS: u64 = 4;
    /// Setter of a flag, when the test ends well or not.
    struct Stopper<'a>(&'a AtomicBool);
    impl Drop for Stopper<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let cluster = cluster(1);
    let store = remote(&cluster, PAGES, 4096, Codec::Lz4);
    let forks = RwLock::new(());
    let model: Vec<Mutex<Vec<u8>>> = (0..PAGES).map(|_| Mutex::new(vec![0; 4096])).collect();
    let stop = AtomicBool::new(false);
    let mut random = ChaCha8Rng::seed_from_u64(1);
    std::thread::scope(|scope| {
        let _stopper = Stopper(&stop);
        for thread in 0..THREADS {
            let (cluster, store, forks, model, stop) = (&cluster, &store, &forks, &model, &stop);
            scope.spawn(move || {
                let mut random = ChaCha8Rng::seed_from_u64(thread);
                let mut lane = Lane::new(cluster).unwrap();
                while !stop.load(Ordering::Relaxed) {
                    let page = random.random_range(0..PAGES / THREADS) * THREADS + thread;
                    let bytes = random_page(&mut random, 4096);
                    let _writes = forks.read().expect("no panic");
                    write(&mut lane, store, page, &bytes).unwrap();
                    *model[page as usize].lock() = bytes;
                }
            });
        }
        let mut lane = Lane::new(&cluster).unwrap();
        let mut children = Vec::new();
        for _ in 0..200 {
            {
                let _forks = forks.write().expect("no panic");
                let bytes: Vec<u8> = model.iter().flat_map(|page| page.lock().clone()).collect();
                children.push(Child::fork(&store, &bytes));
            }
            let checked = random.random_range(0..children.len());
            children[checked].check(&mut lane);
            if children.len() > 3 {
                let ends = random.random_range(0..children.len());
                children.remove(ends);
            }
        }
        children.iter().for_each(|child| child.check(&mut lane));
    });
    assert_eq!(pool(&store).used_bytes(), needed_bytes([&store], []));
    assert_eq!(store.stats().held_bytes, 0);
}

#[test]
fn slots_of_writes_that_did_not_take_place_are_free_while_there_is_a_child() {
    let server = SimServer::new(SimConfig::new(1));
    let deadline = Duration::from_millis(50);
    let cluster = Cluster::new(
        vec![session(&server)],
        ClusterOptions {
            deadline,
            ..ClusterOptions::default()
        },
    );
    let store = remote(&cluster, 64, 4096, Codec::Raw);
    let mut lane = Lane::new(&cluster).unwrap();
    let child = Child::fork(&store, &vec![0; 64 * 4096]);
    server.kill();
    // Sent, so in doubt; from then on there is no channel.
    assert!(write(&mut lane, &store, 0, &odd_page(4096, 0)).is_err());
    let done = write_run(&mut lane, &store, 0, &odd_pages(4096, 0..64));
    assert_eq!(done.failed.len(), 64);
    assert_eq!(pool(&store).used_bytes(), 4096, "the slot of the first one");
    assert_eq!(store.stats().held_bytes, 0);
    child.check(&mut lane);
}

#[test]
fn a_full_server_says_what_is_held_for_children_and_goes_on_when_they_end() {
    let full = |deadline| {
        let sessions = vec![session(&SimServer::new(lending(1 << 20)))];
        let cluster = Cluster::new(
            sessions,
            ClusterOptions {
                deadline,
                ..ClusterOptions::default()
            },
        );
        let store = on_demand(&cluster, 208 * 4096, None);
        let mut lane = Lane::new(&cluster).unwrap();
        let bytes = odd_pages(4096, 0..208);
        write_all(&mut lane, &store, &bytes);
        let child = Child::fork(&store, &bytes);
        // What is held fills three extents, which go back to the server.
        for page in 0..48 {
            write(&mut lane, &store, page, &odd_page(4096, 300 + page)).expect("room");
        }
        (store, lane, child)
    };
    // 1. An error, when nothing ends in time.
    let (store, mut lane, child) = full(Duration::from_millis(100));
    let error = write(&mut lane, &store, 60, &odd_page(4096, 1)).unwrap_err();
    let held = 48 * 4096;
    assert_eq!(store.stats().held_bytes, held);
    let told = format!("{held} bytes are held for children made by fork");
    assert!(error.to_string().contains(&told), "{error}");
    child.check(&mut lane);
    drop(child);
    write(&mut lane, &store, 60, &odd_page(4096, 1)).expect("room");
    // 2. Until then the write waits.
    let (store, mut lane, child) = full(Duration::from_secs(30));
    (lane.write_back(&store, at(60), odd_page(4096, 1).into(), 0)).unwrap();
    let (mut done, limit) = (Vec::new(), Instant::now() + Duration::from_secs(20));
    while lane.take_refused().is_none() {
        assert!(Instant::now() < limit, "the server refuses");
        lane.poll(&mut done);
    }
    assert!(done.is_empty());
    drop(child);
    assert_eq!(one(&mut lane).failed.len(), 0);
}

#[test]
fn what_is_held_takes_nothing_of_what_regions_were_promised() {
    const PAGES: u64 = 1024;
    // Takes all that the server has left, and writes all pages of `stores` twice.
    let write_all_twice = |cluster: &Arc<Cluster>, stores: &[Arc<PageStore>]| {
        let session = &cluster.sessions()[0];
        if let Err(AllocError::Full { available, .. }) = session.grant(1 << 40)
            && available > 0
        {
            session.grant(available).unwrap();
        }
        let mut lane = Lane::new(cluster).unwrap();
        for number in 0..2 {
            for store in stores {
                write_all(&mut lane, store, &odd_pages(4096, number..number + PAGES));
            }
        }
    };
    // Each region is granted an extent of 5 MiB.
    let cluster = || cluster_of([lending(15 << 20)]);
    // Rewrites all pages of a new region while there is a child, and ends the region.
    let held = |cluster: &Arc<Cluster>, store: Arc<PageStore>| {
        let mut lane = Lane::new(cluster).unwrap();
        let bytes = odd_pages(4096, 0..PAGES);
        write_all(&mut lane, &store, &bytes);
        let child = Child::fork(&store, &bytes);
        write_all(&mut lane, &store, &odd_pages(4096, PAGES..2 * PAGES));
        store.retire();
        assert_eq!(cluster.stats().held_bytes, PAGES * 4096);
        (lane, child)
    };
    let region = |cluster: &Arc<Cluster>| remote(cluster, PAGES, 4096, Codec::Raw);
    // 1. Regions that are there already.
    let clients = cluster();
    let (first, others) = (region(&clients), [region(&clients), region(&clients)]);
    let (mut lane, child) = held(&clients, first);
    write_all_twice(&clients, &others);
    child.check(&mut lane);
    drop((others, child));
    assert_eq!(clients.granted_bytes(), 0);
    // 2. A region that comes later.
    let clients = cluster();
    let (mut lane, child) = held(&clients, region(&clients));
    write_all_twice(&clients, &[region(&clients)]);
    child.check(&mut lane);
    drop(child);
    assert_eq!(clients.granted_bytes(), 0);
}

#[test]
fn a_snapshot_may_outlive_everything_else() {
    for name in [None, Some("x")] {
        let servers = servers();
        let cluster = client(&servers);
        let store = on_demand(&cluster, 60 * 4096, name);
        let bytes = odd_pages(4096, 0..60);
        let mut lane = Lane::new(&cluster).unwrap();
        write_all(&mut lane, &store, &bytes);
        // One region is retired, the other one ends with its snapshot.
        let child = Child::fork(&store, &bytes);
        let other = on_demand(&cluster, 60 * 4096, None);
        write_all(&mut lane, &other, &bytes);
        let others = Child::fork(&other, &bytes);
        store.retire();
        drop((lane, store, other, cluster));
        assert!(granted(&servers) > 0);
        drop((child, others));
        assert_eq!(granted(&servers), 0);
    }
}

#[test]
fn a_users_own_store_has_no_snapshots() {
    let cluster = Cluster::new(Vec::new(), ClusterOptions::default());
    let dir = tempfile::tempdir().unwrap();
    let own = Arc::new(FileStore::create(dir.path().join("pages"), 8 * 4096).unwrap());
    let options = BlockingOptions::default();
    let store = PageStore::blocking(&cluster, REGION, 8 * 4096, 4096, own, &options).unwrap();
    assert!(Snapshot::take(&store).is_none());
}

/// Returns words that some child may have: at random, or an entry with some of it changed.
fn any_words(random: &mut ChaCha8Rng, entries: &[EntryWords]) -> EntryWords {
    let mut words = entries[random.random_range(0..entries.len())];
    match random.random_range(0..10) {
        0 => words = random.random(),
        1 => words[0] = random.random(),
        // Another form and kind.
        2 => words[1] ^= random.random_range(0..1 << 16) << 32,
        // Another length.
        3 => {
            let bytes = [0, 1, 63, 4095, 4096, 4097, 1 << 20, u64::from(u32::MAX)];
            let bytes = bytes[random.random_range(0..bytes.len())];
            words[1] = words[1] & !u64::from(u32::MAX) | bytes;
        }
        // Another server, another extent, another offset.
        4 => words[0] ^= random.random_range(0..256) << 56,
        5 => words[0] ^= random.random_range(0..1 << 24) << 32,
        6 => words[0] ^= random.random_range(0..1 << 32),
        // Other times and flags.
        7 => words[1] ^= random.random_range(0..1 << 16) << 48,
        _ => {
            for _ in 0..random.random_range(0..4) {
                words[random.random_range(0..4)] ^= 1 << random.random_range(0..64);
            }
        }
    }
    words
}

#[test]
fn words_that_a_child_has_damaged_are_an_error_and_never_data() {
    for (seed, codec) in (0..).zip(CODECS) {
        println!("seed {seed}");
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let cluster = cluster(seed);
        let mut lane = Lane::new(&cluster).unwrap();
        // A shared pool, and a pool of one region that has ended.
        let shared = remote(&cluster, 60, 4096, codec);
        let own = named(&cluster, 60, codec);
        let mut children = Vec::new();
        for store in [&shared, &own] {
            let bytes = random_bytes(&mut random, 60);
            write_all(&mut lane, store, &bytes);
            children.push(Child::fork(store, &bytes));
            write_all(&mut lane, store, &random_bytes(&mut random, 60));
        }
        own.retire();
        let (mut refused, mut damaged, mut read) = (0, 0, 0);
        for _ in 0..6000 {
            let child = &children[random.random_range(0..children.len())];
            let words = any_words(&mut random, &child.entries);
            let page = random.random_range(0..60);
            let frame = vec![0xee; 4096].into();
            let mut done = lane.read_copy(&child.snapshot, at(page), words, frame);
            match done.failed.pop() {
                None => {
                    read += 1;
                    let bytes = &done.frame.bytes;
                    let is_right = match PageEntry::decode_timed(words).expect("an entry") {
                        PageEntry::Stored { hash, .. } => {
                            hash == codec::hash(bytes, child.snapshot.store().seed)
                        }
                        entry => codec::repeated(bytes).is_some_and(|value| entry.repeats(value)),
                    };
                    assert!(is_right, "seed {seed}, {words:x?}");
                }
                Some((failed, StoreError::Entry { .. })) if failed == at(page) => refused += 1,
                Some((failed, StoreError::Corrupt { .. })) if failed == at(page) => damaged += 1,
                other => panic!("seed {seed}, {words:x?}: {other:?}"),
            }
        }
        assert!(refused > 100 && damaged > 100 && read > 100);
        children.iter().for_each(|child| child.check(&mut lane));
        // Nothing is left of the region.
        let Child {
            snapshot, entries, ..
        } = children.pop().expect("the named region's");
        let store = snapshot.store().clone();
        drop(snapshot);
        let Backing::Remote(remote) = &store.backing else {
            panic!("remote")
        };
        for words in entries {
            if let Some(slot) = PageEntry::decode_timed(words).and_then(PageEntry::slot) {
                assert_eq!(remote.pool.find(slot), None);
            }
        }
    }
}
