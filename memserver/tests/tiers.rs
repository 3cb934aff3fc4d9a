//! A server that lends more than its memory, over real sockets and a real spill file.
#![allow(clippy::unwrap_used, reason = "a test that fails here says where")]

mod common;

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Output,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::{Channel, ChannelError, Extent, Op, Session, Verb, host::Origin};
use farpage_memserver::{Server, StartError, TiersError};
use farpage_wire::{Endpoint, ShareStat, TierStat};
use tempfile::TempDir;

use common::{
    Both, Daemon, PATIENCE, command, connect, connect_as, read, socket_in, transfer, wait_until,
    write,
};

const MIB: u64 = 1 << 20;
const MEMORY: u64 = 16 * MIB;
const CHUNK: usize = 64 << 10;

/// Makes a directory beside the build, on a disk: /tmp may be in memory.
fn spill() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn server(capacity: u64, spill: &Path) -> Result<farpage_memserver::RunningServer, StartError> {
    Server::builder()
        .listen("tcp://127.0.0.1:0".parse().unwrap())
        .capacity(capacity)
        .memory(MEMORY)
        .spill(spill.to_owned())
        .start()
}

/// Starts a server over shm and tcp that lends more than its memory.
fn both(capacity: u64, spill: &TempDir) -> Both {
    Both::start_as(|server| {
        (server.capacity(capacity))
            .memory(MEMORY)
            .spill(spill.path().to_owned())
    })
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

/// Fills `bytes`: some compress well, some not at all, and some are zeros.
fn fill(random: &mut Random, bytes: &mut [u8]) {
    match random.below(4) {
        0 => bytes.fill(0),
        1 => {
            let word = random.next() as u8;
            bytes.fill(word);
        }
        _ => {
            for word in bytes.chunks_mut(8) {
                let next = random.next().to_le_bytes();
                word.copy_from_slice(&next[..word.len()]);
            }
        }
    }
}

/// Client that runs one operation at a time, and again if the server had no room in time: a disk
/// may stall for longer than the server waits.
struct Patient<'a> {
    session: &'a Arc<Session>,
    channel: Box<dyn Channel<Vec<u8>>>,
}

impl<'a> Patient<'a> {
    fn new(session: &'a Arc<Session>) -> Self {
        Self {
            session,
            channel: session.channel().unwrap(),
        }
    }

    fn transfer(&mut self, verb: Verb, extent: &Extent, at: u64, bytes: &[u8]) -> Vec<u8> {
        let until = Instant::now() + PATIENCE;
        loop {
            match transfer(&mut *self.channel, verb, extent.id, at, bytes.to_vec()) {
                Ok(bytes) => return bytes,
                Err(ChannelError::NoRoom { .. }) if Instant::now() < until => {
                    self.channel = self.session.channel().unwrap();
                }
                Err(error) => panic!("{verb:?} of {} bytes at {at}: {error}", bytes.len()),
            }
        }
    }

    fn write(&mut self, extent: &Extent, at: u64, bytes: &[u8]) {
        self.transfer(Verb::Write, extent, at, bytes);
    }

    fn read(&mut self, extent: &Extent, at: u64, len: usize) -> Vec<u8> {
        // Not zero: a READ that forgets to write must be seen.
        self.transfer(Verb::Read, extent, at, &vec![0xa5; len])
    }
}

/// Reads and writes an extent at random, and compares every word with what was written last.
fn churn(session: &Arc<Session>, extent: &Extent, seed: u64, ends: &AtomicBool, rounds: u64) {
    let mut random = Random(seed);
    let mut truth = vec![0; extent.bytes as usize];
    let mut client = Patient::new(session);
    for round in 0..rounds {
        if ends.load(Ordering::Relaxed) {
            return;
        }
        let len = match random.below(3) {
            0 => 4096,
            1 => CHUNK as u64,
            // Across chunks, and no multiple of anything.
            _ => 1 + random.below(5 * CHUNK as u64),
        };
        let at = random.below(extent.bytes - len) as usize;
        let here = at..at + len as usize;
        let context = format!("seed {seed}, round {round}, {here:?}");
        if random.below(2) == 0 {
            fill(&mut random, &mut truth[here.clone()]);
            client.write(extent, at as u64, &truth[here]);
        } else {
            let bytes = client.read(extent, at as u64, len as usize);
            assert!(bytes == truth[here], "{context}");
        }
    }
    // Every word, at the end.
    for (i, piece) in truth.chunks(1 << 20).enumerate() {
        let bytes = client.read(extent, (i << 20) as u64, piece.len());
        assert!(bytes == piece, "seed {seed}, MiB {i}");
    }
}

#[test]
fn data_is_intact_at_five_times_the_memory_and_memory_is_never_exceeded() {
    let directory = spill();
    let both = both(5 * MEMORY, &directory);
    let server = &both.server;
    let (ends, watched) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        let clients: Vec<_> = (0..4)
            .map(|seed| {
                let endpoint = both.endpoints()[seed as usize % 2];
                let ends = &ends;
                scope.spawn(move || {
                    let session = connect(endpoint);
                    // No multiple of a chunk, and together almost all of the capacity.
                    let extent = session.grant(5 * MEMORY / 4 - 3 * 4096).unwrap();
                    churn(&session, &extent, seed, ends, 1500);
                })
            })
            .collect();
        let watch = scope.spawn(|| {
            let mut most = TierStat::default();
            while !watched.load(Ordering::Relaxed) {
                let stat = server.stat();
                most.held_bytes = most.held_bytes.max(stat.tiers.held_bytes);
                let physical = stat.resident_bytes + stat.tiers.pool_bytes;
                // Clients over shm may have touched what was about to leave.
                assert!(physical <= MEMORY + MIB, "{stat:?}");
                most.hot_bytes = most.hot_bytes.max(stat.tiers.hot_bytes);
            }
            most
        });
        let failed = clients.into_iter().any(|client| {
            let failed = client.join().is_err();
            ends.fetch_or(failed, Ordering::Relaxed);
            failed
        });
        watched.store(true, Ordering::Relaxed);
        let most = watch.join().expect("within its memory");
        assert!(!failed, "see above");
        assert!(
            most.held_bytes <= MEMORY && most.hot_bytes > MEMORY / 4,
            "{most:?}"
        );
    });
    let tiers = server.stat().tiers;
    assert!(tiers.evictions > 1000 && tiers.fetches > 1000, "{tiers:?}");
    assert_eq!(tiers.spill_errors, 0, "{tiers:?}");
}

/// Pages of one extent, dealt out to channels that WRITE and READ them while the rest of the server
/// pushes them out: whatever leaves in the middle of a copy, each finds what it wrote.
#[test]
fn copies_over_shm_race_with_chunks_that_leave_and_nothing_is_lost() {
    const CHANNELS: u64 = 3;
    // Two chunks or more: a copy takes long enough for one of them to leave in the middle of it.
    const PAGE: u64 = 80 << 10;
    let directory = spill();
    let both = both(6 * MEMORY, &directory);
    let session = connect(&both.shm);
    let extent = session.grant(MEMORY).unwrap();
    let ends = AtomicBool::new(false);
    thread::scope(|scope| {
        for seed in 0..2 {
            let (endpoint, ends) = (&both.tcp, &ends);
            scope.spawn(move || {
                let session = connect(endpoint);
                let extent = session.grant(2 * MEMORY).unwrap();
                churn(&session, &extent, seed, ends, u64::MAX);
            });
        }
        let clients: Vec<_> = (0..CHANNELS)
            .map(|number| {
                let session = &session;
                scope.spawn(move || {
                    let mut client = Patient::new(session);
                    let mut random = Random(number);
                    let mut truth = vec![0_u64; (extent.bytes / PAGE / CHANNELS) as usize];
                    for _ in 0..6_000 {
                        let i = random.below(truth.len() as u64);
                        let at = (i * CHANNELS + number) * PAGE;
                        let known = &mut truth[i as usize];
                        if random.below(2) == 0 {
                            *known = random.next();
                            let bytes = known.to_le_bytes().repeat(PAGE as usize / 8);
                            client.write(&extent, at, &bytes);
                        } else {
                            let bytes = client.read(&extent, at, PAGE as usize);
                            let expected = known.to_le_bytes();
                            let is_right = bytes.chunks(8).all(|word| *word == expected);
                            assert!(is_right, "channel {number}, page {i}");
                        }
                    }
                })
            })
            .collect();
        let failed: Vec<_> = (clients.into_iter())
            .filter_map(|client| client.join().err())
            .collect();
        ends.store(true, Ordering::Relaxed);
        assert!(failed.is_empty(), "see above");
    });
    let tiers = both.server.stat().tiers;
    assert!(tiers.forced_seals > 500, "{tiers:?}");
    assert_eq!(tiers.spill_errors, 0, "{tiers:?}");
}

#[test]
fn what_is_in_memory_is_reached_over_shm_without_the_server() {
    let directory = spill();
    let both = both(2 * MEMORY, &directory);
    let session = connect(&both.shm);
    let extent = session.grant(MIB).unwrap();
    let mut channel = session.channel::<Vec<u8>>().unwrap();
    let bytes = vec![7; MIB as usize];
    // The first WRITE takes the memory, by the server.
    transfer(&mut *channel, Verb::Write, extent.id, 0, bytes.clone()).unwrap();
    let before = both.server.stat();
    assert_eq!(before.bytes_written, MIB);
    for i in 0..100 {
        transfer(&mut *channel, Verb::Write, extent.id, 0, vec![i; 4096]).unwrap();
        let found = transfer(&mut *channel, Verb::Read, extent.id, 0, vec![0; 4096]).unwrap();
        assert_eq!(found, vec![i; 4096]);
    }
    let after = both.server.stat();
    assert_eq!(after.bytes_written, before.bytes_written);
    assert_eq!(after.bytes_read, before.bytes_read);
}

#[test]
fn released_memory_is_zero_when_it_is_lent_again_and_nothing_is_left_of_it() {
    let directory = spill();
    let server = server(2 * MEMORY, directory.path()).unwrap();
    let session = connect(&server.endpoints()[0]);
    let mut client = Patient::new(&session);
    for _ in 0..3 {
        let extent = session.grant(2 * MEMORY).unwrap();
        for at in (0..2 * MEMORY).step_by(1 << 20) {
            assert_eq!(client.read(&extent, at, 4096), [0; 4096]);
            client.write(&extent, at, &vec![at as u8 | 1; 1 << 20]);
        }
        session.release(extent.id).unwrap();
        // Chunks that an evictor was moving are given back once they have arrived.
        let left = || {
            let tiers = server.stat().tiers;
            (tiers.hot_bytes, tiers.compressed_bytes, tiers.spilled_bytes)
        };
        let until = Instant::now() + Duration::from_secs(30);
        while left() != (0, 0, 0) {
            assert!(Instant::now() < until, "{:?}", left());
            thread::yield_now();
        }
    }
}

#[test]
fn a_scan_pushes_out_its_own_chunks_and_not_the_share_of_another() {
    let directory = spill();
    let server = server(8 * MEMORY, directory.path()).unwrap();
    let [one, other] = [(); 2].map(|()| connect(&server.endpoints()[0]));
    // A quarter of what there is: less than half.
    let small = one.grant(3 * MIB).unwrap();
    let mut random = Random(7);
    let mut bytes = vec![0; 3 << 20];
    bytes
        .iter_mut()
        .for_each(|byte| *byte = random.next() as u8);
    for (i, piece) in bytes.chunks(1 << 20).enumerate() {
        write(&one, &small, (i << 20) as u64, piece).unwrap();
    }
    let large = other.grant(5 * MEMORY).unwrap();
    let mut scan = Patient::new(&other);
    for at in (0..5 * MEMORY).step_by(1 << 20) {
        scan.write(&large, at, &bytes[..1 << 20]);
    }
    let before = server.stat().tiers;
    assert!(before.spilled_bytes > 3 * MEMORY, "{before:?}");
    for (i, piece) in bytes.chunks(1 << 20).enumerate() {
        assert!(read(&one, small.id, (i << 20) as u64, 1 << 20).unwrap() == piece);
    }
    let fetched = server.stat().tiers.fetches - before.fetches;
    assert_eq!(fetched, 0, "of a share that is smaller than an equal part");
}

/// Counts the chunks of a small client, in a share of `weight`, that must be fetched after many
/// sessions of one address went through much. Returns the shares of `stat`, too.
fn pushed_out(weight: u32, small_bytes: u64) -> (u64, Vec<ShareStat>) {
    let directory = spill();
    let user = Origin::User(nix::unistd::geteuid().as_raw());
    let socket = socket_in(&directory);
    let server = Server::builder()
        .listen(socket.clone())
        .listen("tcp://127.0.0.1:0".parse().unwrap())
        .capacity(8 * MEMORY)
        .memory(MEMORY)
        .spill(directory.path().to_owned())
        .share(user, weight)
        .start()
        .unwrap();
    let mut random = Random(7);
    let mut bytes = vec![0; 1 << 20];
    bytes
        .iter_mut()
        .for_each(|byte| *byte = random.next() as u8);
    let one = connect(&socket);
    let small = one.grant(small_bytes).unwrap();
    for at in (0..small_bytes).step_by(1 << 20) {
        write(&one, &small, at, &bytes).unwrap();
    }
    let others = [(); 6].map(|()| connect(&server.endpoints()[1]));
    for other in &others {
        let large = other.grant(MEMORY).unwrap();
        for at in (0..MEMORY).step_by(1 << 20) {
            write(other, &large, at, &bytes).unwrap();
        }
    }
    let before = server.stat();
    for at in (0..small_bytes).step_by(1 << 20) {
        assert!(read(&one, small.id, at, 1 << 20).unwrap() == bytes);
    }
    let fetched = server.stat().tiers.fetches - before.tiers.fetches;
    (fetched, before.shares)
}

#[test]
fn sessions_of_one_address_have_one_share_together() {
    // Less than half of what is free for chunks, and much more than a seventh.
    let (fetched, shares) = pushed_out(1, 4 * MIB);
    assert_eq!(fetched, 0, "{shares:?}");
    assert_eq!(shares.iter().map(|share| share.sessions).sum::<u64>(), 7);
}

#[test]
fn who_has_more_weight_keeps_more_and_stat_says_so() {
    // More than half of what is free for chunks, and less than three quarters.
    let (fetched, shares) = pushed_out(1, 7 * MIB);
    assert!(fetched > 0, "{shares:?}");
    let (fetched, shares) = pushed_out(3, 7 * MIB);
    assert_eq!(fetched, 0, "{shares:?}");
    let user = format!("user:{}", nix::unistd::geteuid());
    let of = |name: &str| shares.iter().find(|share| share.of == name).unwrap();
    let (small, large) = (of(&user), of("127.0.0.1"));
    assert_eq!((small.weight, small.sessions), (3, 1), "{small:?}");
    assert_eq!(small.hot_bytes, 7 * MIB, "{small:?}");
    assert_eq!((large.weight, large.sessions), (1, 6), "{large:?}");
    // At most the memory that the small client leaves.
    assert!(large.hot_bytes < small.hot_bytes, "{large:?}");
}

#[test]
fn atomics_and_words_beside_them_survive_leaving_memory() {
    let directory = spill();
    let server = server(4 * MEMORY, directory.path()).unwrap();
    let session = connect(&server.endpoints()[0]);
    let words = session.grant_for_atomics(MIB).unwrap();
    let rest = session.grant(3 * MEMORY).unwrap();
    let mut client = Patient::new(&session);
    let mut random = Random(3);
    for round in 0..4u64 {
        for chunk in 0..16 {
            let at = chunk * CHUNK as u64 + 8;
            let add = Verb::Atomic(farpage_wire::Atomic::FetchAdd(chunk + 1));
            let old = client.transfer(add, &words, at, &[0; 8]);
            assert_eq!(
                u64::from_le_bytes(old.try_into().unwrap()),
                round * (chunk + 1)
            );
        }
        for at in (0..3 * MEMORY).step_by(1 << 20) {
            let mut bytes = vec![0; 1 << 20];
            bytes
                .iter_mut()
                .for_each(|byte| *byte = random.next() as u8);
            client.write(&rest, at, &bytes);
        }
    }
    assert!(server.stat().tiers.fetches > 0);
}

#[test]
fn clients_that_do_not_read_their_answers_keep_no_memory_from_others() {
    let directory = spill();
    let server = server(5 * MEMORY, directory.path()).unwrap();
    let endpoint = &server.endpoints()[0];
    let slow = connect(endpoint);
    let theirs = slow.grant(2 * MEMORY).unwrap();
    let mut channels: Vec<_> = (0..16)
        .map(|_| slow.channel::<Vec<u8>>().unwrap())
        .collect();
    // 64 MiB of answers each, of which a socket takes a part.
    for (i, channel) in (0..).zip(&mut channels) {
        for page in 0..32 {
            let op = Op {
                tag: page,
                verb: Verb::Read,
                extent: theirs.id,
                offset: (i + page) % 16 * (2 * MIB),
                len: 2 << 20,
                buf: vec![0; 2 << 20],
            };
            channel.post(op).expect("an empty queue");
        }
        // Sends the requests, and takes what little has come.
        channel.poll(&mut Vec::new());
    }
    let mut before = TierStat::default();
    wait_until("all sockets are full and nothing moves", || {
        thread::sleep(Duration::from_millis(100));
        let now = server.stat().tiers;
        now.hot_bytes > 0 && std::mem::replace(&mut before, now) == now
    });
    let session = connect(endpoint);
    let extent = session.grant(2 * MEMORY).unwrap();
    churn(&session, &extent, 17, &AtomicBool::new(false), 400);
}

#[test]
fn a_published_name_keeps_its_bytes_wherever_they_are() {
    let directory = spill();
    let server = server(5 * MEMORY, directory.path()).unwrap();
    let endpoint = &server.endpoints()[0];
    let key = directory.path().join("key");
    let mut random = Random(23);
    let mut bytes = vec![0; MEMORY as usize / 2];
    bytes
        .iter_mut()
        .for_each(|byte| *byte = random.next() as u8);
    let publisher = connect_as(endpoint, &key);
    let extent = publisher.grant(bytes.len() as u64).unwrap();
    for (i, piece) in bytes.chunks(1 << 20).enumerate() {
        write(&publisher, &extent, (i << 20) as u64, piece).unwrap();
    }
    publisher.publish("name", b"map", &[extent.id]).unwrap();
    drop(publisher);
    for round in 0..3 {
        // No client has the name open: another's bytes push its extent out.
        let other = connect(endpoint);
        let rest = other.grant(2 * MEMORY).unwrap();
        churn(&other, &rest, round, &AtomicBool::new(false), 100);
        other.release(rest.id).unwrap();
        let mut reader = None;
        wait_until("it can be opened", || {
            let session = connect_as(endpoint, &key);
            let is_open = session.open("name").is_ok();
            reader = Some(session);
            is_open
        });
        let reader = reader.unwrap();
        for (i, piece) in bytes.chunks(1 << 20).enumerate() {
            assert!(read(&reader, extent.id, (i << 20) as u64, 1 << 20).unwrap() == piece);
        }
    }
    let reader = connect_as(endpoint, &key);
    wait_until("it can be removed", || reader.remove("name").is_ok());
    let tiers = server.stat().tiers;
    assert!(
        tiers.fetches > 0 && tiers.hot_bytes == 0 && tiers.spilled_bytes == 0,
        "{tiers:?}"
    );
}

/// A control group with a limit of memory.
struct Group(PathBuf);

impl Group {
    fn new(bytes: u64) -> Result<Self, String> {
        let own = fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
        let place = own.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            match (fields.next()?, fields.next()?) {
                ("memory", path) => Some((format!("/sys/fs/cgroup/memory{path}"), V1_LIMIT)),
                ("", path) if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() => {
                    Some((format!("/sys/fs/cgroup{path}"), "memory.max"))
                }
                _ => None,
            }
        });
        let (parent, limit) = place.ok_or("no memory controller")?;
        let group = Path::new(&parent).join(format!("farpage-tiers-{}", std::process::id()));
        let failed = |error: std::io::Error| format!("{}: {error}", group.display());
        fs::create_dir(&group).map_err(failed)?;
        let made = Self(group.clone());
        fs::write(group.join(limit), bytes.to_string()).map_err(failed)?;
        Ok(made)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        wait_until("the control group is empty", || {
            fs::remove_dir(&self.0).is_ok()
        });
    }
}

const V1_LIMIT: &str = "memory.limit_in_bytes";

#[test]
fn a_daemon_lives_in_a_control_group_of_its_memory_and_32_mib() {
    let group = match Group::new(MEMORY + 32 * MIB) {
        Ok(group) => group,
        Err(why) => {
            let name = "a_daemon_lives_in_a_control_group_of_its_memory_and_32_mib";
            eprintln!("SKIPPED: {name}: cannot make a control group: {why}");
            return;
        }
    };
    let directory = spill();
    let path = directory.path().to_str().unwrap();
    let arguments = ["--capacity", "160MiB", "--memory", "16MiB", "--spill", path];
    let mut daemon = Daemon::in_group(&group.0, &arguments);
    thread::scope(|scope| {
        for seed in 0..2 {
            let endpoint = &daemon.tcp;
            scope.spawn(move || {
                let session = connect(endpoint);
                let extent = session.grant(5 * MEMORY).unwrap();
                churn(&session, &extent, seed, &AtomicBool::new(false), 500);
            });
        }
    });
    assert!(daemon.child.try_wait().unwrap().is_none(), "it was killed");
    let stat = connect(&daemon.tcp).stat().unwrap();
    // Memory is a tenth of what is used: the figures say so.
    assert!(stat.tiers.evictions > 1000, "{stat:?}");
    assert!(stat.tiers.fetches > 300, "{stat:?}");
    drop(daemon);
}

fn files_left(directory: &Path) -> usize {
    fs::read_dir(directory).unwrap().count()
}

/// Counts the memory of the daemon: its own pages, and all pages of its memfds, mapped or not.
fn held_by(daemon: &Daemon) -> u64 {
    let process = format!("/proc/{}", daemon.child.id());
    let rollup = fs::read_to_string(format!("{process}/smaps_rollup")).unwrap();
    let kib = |name: &str| -> u64 {
        let line = rollup.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    let own = (kib("Pss_Anon:") + kib("Pss_File:")) << 10;
    let memfds = fs::read_dir(format!("{process}/fd")).unwrap().flatten();
    let memfds = memfds.filter(|fd| {
        fs::read_link(fd.path()).is_ok_and(|to| to.to_string_lossy().contains("memfd:"))
    });
    own + memfds
        .map(|fd| fs::metadata(fd.path()).map_or(0, |of| of.blocks() * 512))
        .sum::<u64>()
}

#[test]
fn a_daemon_holds_no_more_than_its_memory_and_leaves_nothing_when_it_is_killed() {
    let directory = spill();
    let path = directory.path().to_str().unwrap();
    let arguments = ["--capacity", "80MiB", "--memory", "16MiB", "--spill", path];
    let mut daemon = Daemon::over_tcp(&arguments);
    assert_eq!(
        files_left(directory.path()),
        0,
        "the spill file has no name"
    );
    let session = connect(&daemon.tcp);
    let extent = session.grant(5 * MEMORY).unwrap();
    let before = held_by(&daemon);
    let ends = AtomicBool::new(false);
    let most = thread::scope(|scope| {
        let busy = scope.spawn(|| churn(&session, &extent, 11, &ends, 600));
        let mut most = 0;
        while !busy.is_finished() {
            most = most.max(held_by(&daemon));
        }
        busy.join().unwrap();
        most
    });
    // `before` has the daemon's code, stacks, heap and tables, and no lent memory.
    assert!(most <= before + MEMORY + 8 * MIB, "{most} after {before}");
    // Killed while a client reads what is on the disk.
    let mut channel = session.channel::<Vec<u8>>().unwrap();
    let hurt = thread::scope(|scope| {
        let reads = scope.spawn(|| {
            let until = Instant::now() + PATIENCE;
            let mut random = Random(5);
            loop {
                let at = random.below(5 * MEMORY - CHUNK as u64);
                let bytes = vec![0; CHUNK];
                match transfer(&mut *channel, Verb::Read, extent.id, at, bytes) {
                    Ok(_) => assert!(Instant::now() < until, "the server was killed"),
                    Err(error) => return error,
                }
            }
        });
        thread::sleep(Duration::from_millis(20));
        daemon.child.kill().unwrap();
        reads.join().unwrap()
    });
    assert!(hurt.is_transient(), "{hurt}");
    daemon.wait();
    assert_eq!(files_left(directory.path()), 0);
    let again = Daemon::over_tcp(&arguments);
    let session = connect(&again.tcp);
    let extent = session.grant(5 * MEMORY).unwrap();
    assert_eq!(
        read(&session, extent.id, 9 * MIB, CHUNK).unwrap(),
        [0; CHUNK]
    );
}

fn refusal(arguments: &[&str]) -> String {
    let Output { status, stderr, .. } = command().arg("serve").args(arguments).output().unwrap();
    let said = String::from_utf8(stderr).unwrap();
    assert!(!status.success(), "{said}");
    said
}

#[test]
fn settings_that_do_not_fit_together_are_refused_and_say_what_to_give() {
    let directory = spill();
    let path = directory.path().to_str().unwrap();
    let tcp = ["--listen", "tcp://127.0.0.1:0", "--capacity", "64MiB"];
    let cases: [(&[&str], &str); 5] = [
        (&["--memory", "32MiB"], "--spill"),
        (&["--spill", path], "give both or none"),
        (&["--memory", "1MiB", "--spill", path], "16 MiB"),
        (
            &["--memory", "32MiB", "--spill", "/nowhere/at/all"],
            "directory on a disk",
        ),
        (&["--memory", "32MiB", "--spill", "/dev/shm"], "tmpfs"),
    ];
    for (arguments, expected) in cases {
        let said = refusal(&[&tcp, arguments].concat());
        assert!(said.contains(expected), "{arguments:?}: {said}");
    }
    let too_much = Server::builder()
        .listen("tcp://127.0.0.1:0".parse().unwrap())
        .capacity(64 * MIB)
        .memory(32 * MIB)
        .start();
    let refused = too_much.map(drop).unwrap_err();
    assert!(
        matches!(refused, StartError::Tiers(TiersError::NoSpill)),
        "{refused}"
    );
    // All of it may be in memory: nothing has to leave.
    let enough = Server::builder()
        .listen("tcp://127.0.0.1:0".parse::<Endpoint>().unwrap())
        .capacity(32 * MIB)
        .memory(32 * MIB)
        .start()
        .unwrap();
    wait_until("it serves", || enough.stat().tiers == TierStat::default());
}

#[test]
fn zeros_that_clients_write_are_stored_nowhere() {
    let directory = spill();
    let server = server(3 * MEMORY, directory.path()).unwrap();
    let session = connect(&server.endpoints()[0]);
    let extent = session.grant(3 * MEMORY).unwrap();
    for at in (0..3 * MEMORY).step_by(1 << 20) {
        write(&session, &extent, at, &vec![0; 1 << 20]).unwrap();
    }
    let tiers = server.stat().tiers;
    assert!(
        tiers.evictions as usize > 2 * MEMORY as usize / CHUNK,
        "{tiers:?}"
    );
    assert_eq!((tiers.compressed_bytes, tiers.spilled_bytes), (0, 0));
}
