//! Stores of the user's own: files, and stores that fail, panic and stall.

use super::*;

/// Returns a store of a user's own, of pages of 4 KiB, that is called by up to `threads` threads.
fn own(cluster: &Arc<Cluster>, bytes: u64, user: Arc<dyn Store>, threads: usize) -> Arc<PageStore> {
    let options = BlockingOptions { threads };
    PageStore::blocking(cluster, REGION, bytes, 4096, user, &options).expect("the sizes are sound")
}

#[test]
fn file_pages_come_back_as_written_and_the_file_keeps_its_length() {
    let dir = tempfile::tempdir().unwrap();
    for (seed, bytes) in [(1, 4096 * 30), (2, 4096 * 29 + 1), (3, 5)] {
        let path = dir.path().join(format!("pages{seed}"));
        let file = FileStore::create(&path, bytes).unwrap();
        let cluster = cluster(seed);
        let store = own(&cluster, bytes, Arc::new(file), 8);
        let mut model = vec![0; bytes as usize];
        conform(&cluster, &store, &mut model, seed, 1500);
        store.flush().unwrap();
        assert!(std::fs::read(&path).unwrap() == model);
    }
}

#[test]
fn a_file_on_tmpfs_is_served_inline() {
    let Ok(dir) = tempfile::tempdir_in("/dev/shm") else {
        eprintln!("SKIPPED: a_file_on_tmpfs_is_served_inline: there is no /dev/shm");
        return;
    };
    let file = FileStore::create(dir.path().join("pages"), 10000).unwrap();
    assert!(!file.may_block());
    let cluster = cluster(1);
    let store = own(&cluster, 10000, Arc::new(file), 8);
    conform(&cluster, &store, &mut vec![0; 10000], 1, 500);
}

#[test]
fn a_file_of_the_wrong_length_is_refused_and_a_part_of_one_is_honoured() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, [7; 100]).unwrap();
    for (offset, bytes) in [(0, 101), (100, 1), (101, 0), (u64::MAX, 1)] {
        assert!(matches!(
            FileStore::open(&path, offset, bytes),
            Err(FileStoreError::TooShort {
                file_bytes: 100,
                ..
            })
        ));
    }
    assert!(
        matches!(FileStore::create(&path, 1), Err(FileStoreError::Io { .. })),
        "it exists"
    );
    assert!(matches!(
        FileStore::open(dir.path().join("none"), 0, 1),
        Err(FileStoreError::Io { .. })
    ));
    let store = FileStore::open(&path, 10, 20).unwrap();
    let mut buf = [1; 30];
    store.read(0, &mut buf).unwrap();
    assert_eq!((&buf[..20], &buf[20..]), (&[7; 20][..], &[0; 10][..]));
    store.write(15, &[9; 30]).unwrap();
    let file = std::fs::read(&path).unwrap();
    assert_eq!(
        (file.len(), &file[24..31]),
        (100, &[7, 9, 9, 9, 9, 9, 7][..])
    );
    std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(12)
        .unwrap();
    assert!(
        store.read(0, &mut buf).is_err(),
        "a file that was cut is an error, not zeros"
    );
}

/// Store in memory that fails, panics and stalls when it is told to.
#[derive(Default)]
struct Unruly {
    bytes: Mutex<Vec<u8>>,
    fail: AtomicBool,
    panic: AtomicBool,
    stall: AtomicBool,
    calls: AtomicUsize,
    running: AtomicUsize,
    running_max: AtomicUsize,
}

impl Unruly {
    fn new(bytes: usize) -> Arc<Self> {
        Arc::new(Self {
            bytes: Mutex::new((0..bytes).map(|i| (i / 3) as u8).collect()),
            ..Self::default()
        })
    }

    fn mood(&self) -> io::Result<()> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.running_max.fetch_max(
            self.running.fetch_add(1, Ordering::Relaxed) + 1,
            Ordering::Relaxed,
        );
        let limit = Instant::now() + Duration::from_secs(10);
        while self.stall.load(Ordering::Relaxed) && Instant::now() < limit {
            std::thread::yield_now();
        }
        self.running.fetch_sub(1, Ordering::Relaxed);
        assert!(!self.panic.load(Ordering::Relaxed), "told to");
        if self.fail.load(Ordering::Relaxed) {
            Err(io::Error::other("told to fail"))
        } else {
            Ok(())
        }
    }
}

impl Store for Unruly {
    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.mood()?;
        buf.copy_from_slice(&self.bytes.lock()[offset as usize..][..buf.len()]);
        Ok(())
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.mood()?;
        self.bytes.lock()[offset as usize..][..buf.len()].copy_from_slice(buf);
        Ok(())
    }
}

fn unruly(cluster: &Arc<Cluster>, bytes: usize) -> (Arc<Unruly>, Arc<PageStore>) {
    let user = Unruly::new(bytes);
    (user.clone(), own(cluster, bytes as u64, user, 2))
}

#[test]
fn a_users_store_is_read_first_and_clean_pages_are_not_written() {
    let cluster = Cluster::new(vec![], ClusterOptions::default());
    let (user, store) = unruly(&cluster, 10000);
    let mut model = user.bytes.lock().clone();
    let mut io = queue(&cluster);
    let page = read(&mut io, &store, 2).unwrap();
    assert_eq!(page[..10000 - 8192], model[8192..]);
    assert_eq!(write(&mut io, &store, 2, &page).unwrap(), CLEAN);
    assert_eq!(user.calls.load(Ordering::Relaxed), 1);
    conform(&cluster, &store, &mut model, 4, 1000);
    assert!(*user.bytes.lock() == model);
}

#[test]
fn a_users_page_is_unchanged_as_long_as_its_store_has_it() {
    let cluster = Cluster::new(vec![], ClusterOptions::default());
    let (user, store) = unruly(&cluster, 4096 + 100);
    let mut io = queue(&cluster);
    assert!(!store.is_unchanged(at(0), &[0; 4096]), "never read");
    // Read, changed, written.
    let mut page = read(&mut io, &store, 0).expect("the store reads");
    assert!(store.is_unchanged(at(0), &page));
    page[4095] ^= 1;
    assert!(!store.is_unchanged(at(0), &page));
    write(&mut io, &store, 0, &page).expect("the store writes");
    assert!(store.is_unchanged(at(0), &page));
    // Of the last page only the region's bytes count.
    let mut last = read(&mut io, &store, 1).expect("the store reads");
    last[100] ^= 1;
    assert!(store.is_unchanged(at(1), &last));
    last[99] ^= 1;
    assert!(!store.is_unchanged(at(1), &last));
    // After a failed write the store's bytes are unknown.
    user.fail.store(true, Ordering::Relaxed);
    write(&mut io, &store, 0, &[1; 4096]).expect_err("told to fail");
    assert!(!store.is_unchanged(at(0), &page) && !store.is_unchanged(at(0), &[1; 4096]));
}

#[test]
fn errors_and_panics_of_a_users_store_reach_the_caller_and_pass() {
    let cluster = Cluster::new(vec![], ClusterOptions::default());
    let (user, store) = unruly(&cluster, 8192);
    let mut io = queue(&cluster);
    let page = read(&mut io, &store, 1).unwrap();
    user.fail.store(true, Ordering::Relaxed);
    let error = read(&mut io, &store, 0).unwrap_err();
    assert!(
        error.to_string().contains("told to fail") && error.may_retry(),
        "{error}"
    );
    let changed = vec![1; 4096];
    assert!(matches!(
        write(&mut io, &store, 1, &changed),
        Err(StoreError::User { page: 1, .. })
    ));
    user.fail.store(false, Ordering::Relaxed);
    // After a failed write the store's bytes are unknown, so a page with the old bytes is not
    // clean.
    assert!(matches!(
        write(&mut io, &store, 1, &page),
        Ok(RunCounts { written: 1, .. })
    ));
    user.panic.store(true, Ordering::Relaxed);
    for _ in 0..5 {
        assert!(
            matches!(read(&mut io, &store, 0), Err(StoreError::Panicked { ref message, .. }) if message == "told to")
        );
    }
    user.panic.store(false, Ordering::Relaxed);
    assert_eq!(read(&mut io, &store, 1).unwrap(), page);
}

#[test]
fn what_was_written_to_a_users_store_must_come_back() {
    let cluster = Cluster::new(vec![], ClusterOptions::default());
    let (user, store) = unruly(&cluster, 4096);
    let mut io = queue(&cluster);
    read(&mut io, &store, 0).unwrap();
    user.bytes.lock()[9] ^= 1;
    read(&mut io, &store, 0).expect("content of others is theirs to change");
    write(&mut io, &store, 0, &[3; 4096]).unwrap();
    user.bytes.lock()[9] ^= 1;
    assert!(matches!(
        read(&mut io, &store, 0),
        Err(StoreError::Corrupt { page: 0, .. })
    ));
}

#[test]
fn a_store_that_stalls_holds_up_nobody_else() {
    let cluster = cluster(1);
    let (user, stalled) = unruly(&cluster, 160 * 4096);
    let store = remote(&cluster, 20, 4096, Codec::Raw);
    let mut io = queue(&cluster);
    user.stall.store(true, Ordering::Relaxed);
    for page in 0..128 {
        io.fill(&stalled, at(page), vec![0; 4096].into(), 1000 + page);
    }
    for (page, request) in [(128, 1128), (129, 7)] {
        assert!(!io.has_room(&stalled), "no more begin for now");
        io.fill(&stalled, at(page), vec![9; 4096].into(), request);
    }
    assert!(io.has_room(&store) && io.held().eq(&[1128, 7]));
    assert_eq!((io.load().held, io.load().begun), (2, 128));
    let withdrawn = io.withdraw(|&request| request == 7);
    let (request, frame) = withdrawn.expect("the request has not begun");
    assert_eq!((request, frame.at, frame.bytes), (7, 0, vec![9; 4096]));
    assert!(io.withdraw(|&request| request < 1128).is_none(), "begun");
    for page in 0..20 {
        let bytes: Vec<u8> = (0..4096u64)
            .map(|i| (i * page) as u8 ^ (i / 256) as u8)
            .collect();
        assert!(write(&mut io, &store, page, &bytes).is_ok());
        assert_eq!(read(&mut io, &store, page).unwrap(), bytes);
    }
    wait_until("the second thread never comes", || {
        user.running_max.load(Ordering::Relaxed) >= 2
    });
    let resumed = Instant::now();
    user.stall.store(false, Ordering::Relaxed);
    while io.in_flight() > 0 {
        for done in some(&mut io) {
            assert!(done.failed.is_empty());
            assert_eq!(done.timing.began > resumed, done.request == 1128);
        }
    }
    assert_eq!(user.calls.load(Ordering::Relaxed), 129);
    assert_eq!(
        user.running_max.load(Ordering::Relaxed),
        2,
        "as many calls at once as threads"
    );
}

#[test]
fn a_users_store_is_called_once_per_stretch_and_fails_as_a_whole() {
    let cluster = Cluster::new(vec![], ClusterOptions::default());
    let (user, store) = unruly(&cluster, 10 * 4096 - 100);
    let mut model = user.bytes.lock().clone();
    let mut io = queue(&cluster);
    let done = read_run(&mut io, &store, 0, 10);
    model.resize(10 * 4096, 0);
    assert!(done.frame.bytes == model);
    assert_eq!(user.calls.load(Ordering::Relaxed), 1);
    for page in [2, 3, 4, 9] {
        model[page * 4096] ^= 1;
    }
    let done = write_run(&mut io, &store, 0, &model);
    let expected = RunCounts {
        clean: 6,
        written: 4,
        wire_bytes: 4 * 4096 - 100,
    };
    assert_eq!((done.outcome, done.failed.len()), (expected, 0));
    assert_eq!(user.calls.load(Ordering::Relaxed), 3, "two stretches");
    assert!(*user.bytes.lock() == model[..10 * 4096 - 100]);
    user.fail.store(true, Ordering::Relaxed);
    model[4096] ^= 1;
    model[5 * 4096..7 * 4096].fill(9);
    let done = write_run(&mut io, &store, 0, &model);
    let failed: Vec<_> = done.failed.iter().map(|(page, _)| page.number()).collect();
    assert_eq!((failed, done.outcome.clean), (vec![1, 5, 6], 7));
    user.fail.store(false, Ordering::Relaxed);
    assert_eq!(write_run(&mut io, &store, 0, &model).outcome.written, 3);
}

#[test]
fn calls_that_a_worker_makes_end_as_those_on_threads_do() {
    let cluster = Cluster::new(vec![], ClusterOptions::default());
    let user = Unruly::new(8192);
    let store = own(&cluster, 8192, user.clone(), 0);
    let mut io: IoQueue<u64, Vec<u8>> = IoQueue::new(&cluster).expect("no servers");
    io.keep_calls();
    for (page, handed_in) in [(0, false), (1, true)] {
        io.fill(&store, PageIndex(page), vec![0; 4096], 7);
        assert!(!io.poll() && user.calls.load(Ordering::Relaxed) == page);
        let mut call = io.take_call().expect("the store is read");
        assert!(io.take_call().is_none());
        call.make();
        if handed_in {
            io.await_calls();
            let mut fds = Vec::new();
            io.wait(&mut fds);
            Box::new(call).hand_in();
            let ready = nix::poll::poll(&mut fds, nix::poll::PollTimeout::ZERO);
            assert_eq!(ready, Ok(1), "whoever drives the I/O queue is woken");
        } else {
            io.end_call(call);
        }
        io.poll();
        let done = io.take_ended().expect("the call has ended");
        assert!(done.failed.is_empty() && done.request == 7);
        assert!(done.frame[..] == user.bytes.lock()[page * 4096..][..4096]);
        assert_eq!(io.in_flight(), 0);
    }
}

#[test]
fn threads_of_a_store_may_use_the_processors_that_its_maker_may() {
    use nix::{
        sched::{CpuSet, sched_getaffinity, sched_setaffinity},
        unistd::Pid,
    };

    #[derive(Default)]
    struct Asks {
        seen: Mutex<Option<CpuSet>>,
    }
    impl crate::Store for Asks {
        fn read(&self, _: u64, _: &mut [u8]) -> io::Result<()> {
            *self.seen.lock() = Some(sched_getaffinity(Pid::from_raw(0))?);
            Ok(())
        }
        fn write(&self, _: u64, _: &[u8]) -> io::Result<()> {
            Ok(())
        }
    }

    let all = sched_getaffinity(Pid::from_raw(0)).expect("it may always be asked");
    let mut cpus = (0..CpuSet::count()).filter(|&cpu| all.is_set(cpu).unwrap_or(false));
    let (Some(first), Some(_)) = (cpus.next(), cpus.next()) else {
        eprintln!("SKIPPED: threads_of_a_store_may_use_the_processors_that_its_maker_may: one CPU");
        return;
    };
    let cluster = Cluster::new(vec![], ClusterOptions::default());
    let user = Arc::new(Asks::default());
    let options = BlockingOptions::default();
    let store = PageStore::blocking(&cluster, REGION, 4096, 4096, user.clone(), &options)
        .expect("the sizes are sound");
    // Pinned to one CPU, like the workers on whose behalf threads are started.
    let mut one = CpuSet::new();
    one.set(first).expect("it is one of them");
    sched_setaffinity(Pid::from_raw(0), &one).expect("the thread may use it");
    let mut io = queue(&cluster);
    read(&mut io, &store, 0).expect("the store reads");
    assert_eq!(*user.seen.lock(), Some(all));
}
