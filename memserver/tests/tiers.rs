//! A server that lends more than its memory, over real sockets and a real spill file.
#![allow(clippy::unwrap_used, reason = "a test that fails here says where")]

mod common;
#[path = "tiers/daemon.rs"]
mod daemon;

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::{Channel, ChannelError, Extent, Op, Session, Verb, host::Origin};
use farpage_memserver::{Server, StartError};
use farpage_testkit::{Both, PATIENCE, Rng, op, socket_in, tcp, wait_until};
use farpage_wire::{ShareStat, TierStat};
use tempfile::TempDir;

use common::{connect, connect_as, read, transfer, write};

const MIB: u64 = 1 << 20;
const MEMORY: u64 = 16 * MIB;
const CHUNK: usize = 64 << 10;

/// Makes a directory beside the build, on a disk: /tmp may be in memory.
fn spill() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn server(capacity: u64, spill: &Path) -> Result<farpage_memserver::RunningServer, StartError> {
    Server::builder()
        .listen(tcp())
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

/// Fills `bytes`: some compress well, some not at all, and some are zeros.
fn fill(random: &mut Rng, bytes: &mut [u8]) {
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
    let mut random = Rng(seed);
    let mut truth = vec![0; extent.bytes as usize];
    let mut client = Patient::new(session);
    for round in 0..rounds {
        if ends.load(Ordering::Relaxed) {
            return;
        }
        let len = match random.below(3) {
            0 => 4096,
            1 => CHUNK,
            // Across chunks, and no multiple of anything.
            _ => 1 + random.below(5 * CHUNK),
        };
        let at = random.below(extent.bytes as usize - len);
        let here = at..at + len;
        let context = format!("seed {seed}, round {round}, {here:?}");
        if random.below(2) == 0 {
            fill(&mut random, &mut truth[here.clone()]);
            client.write(extent, at as u64, &truth[here]);
        } else {
            let bytes = client.read(extent, at as u64, len);
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
                    let mut random = Rng(number);
                    let mut truth = vec![0_u64; (extent.bytes / PAGE / CHANNELS) as usize];
                    for _ in 0..6_000 {
                        let i = random.below(truth.len());
                        let at = (i as u64 * CHANNELS + number) * PAGE;
                        let known = &mut truth[i];
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
    let mut random = Rng(7);
    let bytes = random.bytes(3 << 20);
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
        .listen(tcp())
        .capacity(8 * MEMORY)
        .memory(MEMORY)
        .spill(directory.path().to_owned())
        .share(user, weight)
        .start()
        .unwrap();
    let mut random = Rng(7);
    let bytes = random.bytes(1 << 20);
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
    let mut random = Rng(3);
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
            let bytes = random.bytes(1 << 20);
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
            let offset = (i + page) % 16 * (2 * MIB);
            let op = Op {
                tag: page,
                ..op(Verb::Read, theirs.id, offset, vec![0; 2 << 20])
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
    let mut random = Rng(23);
    let bytes = random.bytes(MEMORY as usize / 2);
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
