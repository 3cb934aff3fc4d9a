//! Faults of the disk, over real sockets: errors that say what is wrong, and never other bytes.

use std::{
    sync::atomic::AtomicU8,
    time::{Duration, Instant},
};

use farpage_fabric::{
    AllocError, ChannelError, Op, Session, SessionOptions, Verb, host::Host, server::Serving,
};
use nix::errno::Errno;

use super::*;
use crate::{Limits, State};

const MIB: u64 = 1 << 20;
const CHUNK: usize = CHUNK_BYTES as usize;
/// More chunks than fit into [`LEAST_MEMORY_BYTES`], and fewer than fit twice.
const EXTENT_BYTES: u64 = 24 * MIB;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Fault {
    None,
    ReadError,
    ShortRead,
    FlippedBit,
    WriteError,
    ShortWrite,
    Full,
    /// Reads take until the fault ends.
    HungReads,
    /// Writes do, too.
    Hung,
    /// Each read takes [`SLOW`].
    SlowRead,
    /// The first slots cannot be written, and all others can.
    BadSlots,
}

/// So many.
const BAD_SLOTS: u64 = 8;
const SLOW: Duration = Duration::from_millis(100);

/// A disk in memory with a fault that can be switched on and off.
struct Twin {
    bytes: Mutex<Vec<u8>>,
    fault: Arc<AtomicU8>,
}

impl Twin {
    fn has(&self, fault: Fault) -> bool {
        self.fault.load(Ordering::SeqCst) == fault as u8
    }

    fn hang(&self, faults: &[Fault]) {
        while faults.iter().any(|fault| self.has(*fault)) {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Disk for Twin {
    fn read(&self, at: u64, to: &mut [u8]) -> io::Result<()> {
        assert!(to.len().is_multiple_of(BLOCK_BYTES) && at.is_multiple_of(CHUNK_BYTES));
        assert!(
            to.as_ptr().addr().is_multiple_of(BLOCK_BYTES),
            "as O_DIRECT wants it"
        );
        self.hang(&[Fault::HungReads, Fault::Hung]);
        if self.has(Fault::SlowRead) {
            thread::sleep(SLOW);
        }
        let half = to.len() / 2;
        to.copy_from_slice(&self.bytes.lock()[at as usize..][..to.len()]);
        if self.has(Fault::ReadError) {
            return Err(Errno::EIO.into());
        }
        if self.has(Fault::ShortRead) {
            to[half..].fill(0);
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if self.has(Fault::FlippedBit) {
            to[half / 2] ^= 4;
        }
        Ok(())
    }

    fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        assert!(from.len().is_multiple_of(BLOCK_BYTES) && at.is_multiple_of(CHUNK_BYTES));
        self.hang(&[Fault::Hung]);
        let mut bytes = self.bytes.lock();
        let (error, len) = match self.fault.load(Ordering::SeqCst) {
            fault if fault == Fault::WriteError as u8 => (Some(Errno::EIO.into()), 0),
            fault if fault == Fault::Full as u8 => (Some(Errno::ENOSPC.into()), 0),
            fault if fault == Fault::ShortWrite as u8 => {
                (Some(io::ErrorKind::WriteZero.into()), from.len() / 2)
            }
            fault if fault == Fault::BadSlots as u8 && at < BAD_SLOTS * CHUNK_BYTES => {
                (Some(Errno::EIO.into()), 0)
            }
            _ => (None, from.len()),
        };
        bytes[at as usize..][..len].copy_from_slice(&from[..len]);
        error.map_or(Ok(()), Err)
    }
}

/// A tiered server with a disk that fails on command, and a client with one extent.
struct Stage {
    fault: Arc<AtomicU8>,
    tier: Arc<Tier>,
    session: Arc<Session>,
    extent: ExtentId,
    // Ended in this order.
    _serving: Serving,
    _evictors: Evictors,
}

impl Stage {
    fn set() -> Self {
        Self::with_capacity(EXTENT_BYTES, 0xee)
    }

    /// What was never written to the disk has bytes of `filling`.
    fn with_capacity(capacity_bytes: u64, filling: u8) -> Self {
        let fault = Arc::new(AtomicU8::new(Fault::None as u8));
        let disk = Twin {
            bytes: Mutex::new(vec![filling; capacity_bytes as usize]),
            fault: Arc::clone(&fault),
        };
        let (tier, evictors) =
            Tier::with_disk(LEAST_MEMORY_BYTES, capacity_bytes, Box::new(disk)).expect("threads");
        let limits = Limits {
            capacity_bytes,
            capacity_per_address: capacity_bytes,
            lease: Duration::from_secs(60),
            reconnect_grace: Duration::from_secs(60),
            extents_per_session: 4,
            extents: 4,
            extents_per_address: 4,
            sessions: 4,
            operators: Vec::new(),
        };
        let host: Arc<dyn Host> = Arc::new(State::with_tier(limits, Some(Arc::clone(&tier))));
        let endpoint = "tcp://127.0.0.1:0".parse().expect("an endpoint");
        let serving = Serving::start(&endpoint, host).expect("a port");
        let session = Session::connect(serving.endpoint(), &SessionOptions::default());
        let session = session.expect("it listens");
        let extent = session.grant(EXTENT_BYTES).expect("all of it").id;
        Self {
            fault,
            tier,
            session,
            extent,
            _serving: serving,
            _evictors: evictors,
        }
    }

    fn break_disk(&self, fault: Fault) {
        self.fault.store(fault as u8, Ordering::SeqCst);
    }

    fn operate(&self, verb: Verb, chunk: u64, buf: Vec<u8>) -> Result<Vec<u8>, ChannelError> {
        let mut channel = self.session.channel::<Vec<u8>>().expect("a connection");
        let len = buf.len() as u32;
        let op = Op {
            tag: 0,
            verb,
            extent: self.extent,
            offset: chunk * CHUNK_BYTES,
            len,
            buf,
        };
        channel.post(op).expect("an empty queue");
        let until = Instant::now() + Duration::from_secs(30);
        let mut done = Vec::new();
        while channel.poll(&mut done) == 0 {
            assert!(Instant::now() < until, "an operation ends");
            thread::yield_now();
        }
        let done = done.pop().expect("one was posted");
        done.result.map(|()| done.buf)
    }

    fn write(&self, chunk: u64, version: u64) -> Result<(), ChannelError> {
        self.operate(Verb::Write, chunk, content(chunk, version))
            .map(drop)
    }

    fn read(&self, chunk: u64) -> Result<Vec<u8>, ChannelError> {
        self.operate(Verb::Read, chunk, vec![0xa5; CHUNK])
    }

    fn chunks() -> std::ops::Range<u64> {
        0..EXTENT_BYTES / CHUNK_BYTES
    }

    /// Chunks that are in a place and nowhere else.
    fn at(&self, place: Place) -> Vec<u64> {
        let extent = self.tier.books.lock().extents[&self.extent]
            .extent
            .upgrade();
        let extent = extent.expect("it is lent");
        Self::chunks()
            .filter(|chunk| extent.place(*chunk as usize) == place)
            .collect()
    }
}

/// Chunks with odd numbers do not compress.
fn content(chunk: u64, version: u64) -> Vec<u8> {
    let seed = chunk << 32 | version;
    let mut state = seed;
    let mut words = Vec::with_capacity(CHUNK);
    while words.len() < CHUNK {
        state = state
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .wrapping_add(0x1405_7b7e_f767_814f);
        let word = if chunk.is_multiple_of(2) {
            seed
        } else {
            state ^ (state >> 29)
        };
        words.extend_from_slice(&word.to_le_bytes());
    }
    words
}

#[test]
fn what_the_disk_cannot_give_back_is_an_error_and_never_other_bytes() {
    let stage = Stage::set();
    for chunk in Stage::chunks() {
        stage.write(chunk, 1).expect("a sound disk");
    }
    for fault in [Fault::ReadError, Fault::ShortRead, Fault::FlippedBit] {
        let spilled = stage.at(Place::Spilled);
        assert!(spilled.len() > 8, "{fault:?}: {}", spilled.len());
        let before = stage.tier.stat().spill_errors;
        stage.break_disk(fault);
        for chunk in &spilled[..4] {
            let read = stage.read(*chunk);
            assert!(
                matches!(read, Err(ChannelError::Unreadable { .. })),
                "{fault:?} {read:?}"
            );
            // A part of it would hide that the rest is lost.
            let written = stage.operate(Verb::Write, *chunk, vec![1; 4096]);
            assert!(
                matches!(written, Err(ChannelError::Unreadable { .. })),
                "{fault:?}"
            );
        }
        assert!(stage.tier.stat().spill_errors >= before + 8, "{fault:?}");
        stage.break_disk(Fault::None);
        for chunk in Stage::chunks() {
            assert!(
                stage.read(chunk).expect("a sound disk") == content(chunk, 1),
                "{fault:?}"
            );
        }
    }
}

#[test]
fn writes_wait_for_memory_and_are_told_that_there_is_none_and_nothing_is_lost() {
    for fault in [Fault::WriteError, Fault::ShortWrite, Fault::Full] {
        let stage = Stage::set();
        stage.break_disk(fault);
        let mut written = Vec::new();
        let mut turned_down = 0;
        for chunk in Stage::chunks() {
            match stage.operate(Verb::Write, chunk, content(chunk | 1, 1)) {
                Ok(_) => written.push(chunk),
                Err(ChannelError::NoRoom { .. }) => turned_down += 1,
                Err(error) => panic!("{fault:?}: {error}"),
            }
            let tiers = stage.tier.stat();
            assert!(
                tiers.held_bytes <= LEAST_MEMORY_BYTES,
                "{fault:?}: {tiers:?}"
            );
            if turned_down == 2 {
                break;
            }
        }
        assert_eq!(turned_down, 2, "{fault:?}: memory is less than that");
        let tiers = stage.tier.stat();
        assert!(
            tiers.no_room >= 2 && tiers.spill_errors > 0,
            "{fault:?}: {tiers:?}"
        );
        stage.break_disk(Fault::None);
        for chunk in Stage::chunks() {
            let expected = match written.contains(&chunk) {
                true => content(chunk | 1, 1),
                false => vec![0; CHUNK],
            };
            assert!(
                stage.read(chunk).expect("a sound disk") == expected,
                "{fault:?} {chunk}"
            );
        }
    }
}

#[test]
fn a_chunk_that_was_only_read_leaves_without_a_write() {
    let stage = Stage::set();
    for chunk in Stage::chunks() {
        stage
            .operate(Verb::Write, chunk, content(chunk | 1, 1))
            .expect("a sound disk");
    }
    let read_all = || {
        for chunk in Stage::chunks() {
            let expected = content(chunk | 1, 1);
            assert!(
                stage.read(chunk).expect("room and a sound disk") == expected,
                "{chunk}"
            );
        }
    };
    // Afterwards each of them has been on the disk.
    read_all();
    read_all();
    let before = stage.tier.stat();
    stage.break_disk(Fault::WriteError);
    read_all();
    let after = stage.tier.stat();
    assert!(after.evictions > before.evictions + 100, "{after:?}");
    assert_eq!(after.spill_errors, 0, "nothing was written");
}

#[test]
fn a_few_slots_that_cannot_be_written_end_no_evictions() {
    let stage = Stage::set();
    stage.break_disk(Fault::BadSlots);
    for chunk in Stage::chunks() {
        let written = stage.operate(Verb::Write, chunk, content(chunk | 1, 1));
        written.unwrap_or_else(|error| panic!("{chunk}: {error}"));
    }
    let tiers = stage.tier.stat();
    assert!(tiers.spill_errors > 0, "{tiers:?}");
    for chunk in Stage::chunks() {
        let read = stage.read(chunk).expect("room, and slots that can be read");
        assert!(read == content(chunk | 1, 1), "{chunk}");
    }
}

#[test]
fn the_clock_passes_by_chunks_that_cannot_be_stored() {
    let stage = Stage::set();
    stage.break_disk(Fault::WriteError);
    // What compresses needs no disk.
    let content = |chunk| content(if chunk < 96 { 1 } else { 2 }, chunk);
    for chunk in Stage::chunks() {
        let written = stage.operate(Verb::Write, chunk, content(chunk));
        written.unwrap_or_else(|error| panic!("{chunk}: {error}"));
    }
    let tiers = stage.tier.stat();
    assert!(
        (1..64).contains(&tiers.spill_errors),
        "each chunk of a segment has been tried: {tiers:?}"
    );
    for chunk in Stage::chunks() {
        assert!(
            stage.read(chunk).expect("room") == content(chunk),
            "{chunk}"
        );
    }
}

#[test]
fn a_disk_that_does_not_answer_stops_no_release_and_no_other_fetch() {
    let stage = Stage::set();
    for chunk in Stage::chunks() {
        stage.write(chunk, 1).expect("a sound disk");
    }
    // Time to leave the chunks that are on their way.
    let (spilled, compressed) = (stage.at(Place::Spilled), stage.at(Place::Compressed));
    assert!(spilled.len() > DISK_FETCHES && compressed.len() > 8);
    stage.break_disk(Fault::HungReads);
    thread::scope(|scope| {
        for chunk in &spilled[..DISK_FETCHES] {
            scope.spawn(|| stage.read(*chunk).expect_err("it is released meanwhile"));
        }
        let until = Instant::now() + Duration::from_secs(5);
        while !stage.tier.disk_buffers.free.lock().is_empty() {
            assert!(Instant::now() < until, "reads begin");
            thread::yield_now();
        }
        let other = stage.read(spilled[DISK_FETCHES]);
        assert!(
            matches!(other, Err(ChannelError::NoRoom { .. })),
            "its reads wait for a buffer: {other:?}"
        );
        let read = stage.read(compressed[0]).expect("it needs no disk");
        assert!(read == content(compressed[0], 1));
        stage.break_disk(Fault::Hung);
        let no_room = |chunk: &u64| matches!(stage.read(*chunk), Err(ChannelError::NoRoom { .. }));
        assert!(
            compressed.iter().any(no_room),
            "no evictor comes back from the disk"
        );
        let begun = Instant::now();
        stage.session.release(stage.extent).expect("it is leased");
        assert!(begun.elapsed() < Duration::from_secs(1));
        let left = stage.tier.stat();
        // Fetches, and what goes from the pool to the disk.
        let on_their_way = (DISK_FETCHES + EVICTORS) as u64 * CHUNK_BYTES;
        assert!(
            left.compressed_bytes + left.spilled_bytes <= on_their_way,
            "{left:?}"
        );
        stage.break_disk(Fault::None);
    });
    // What was on its way has been given back by who moved it.
    let until = Instant::now() + Duration::from_secs(5);
    while stage.tier.books.lock().slots_kept > 0 {
        assert!(Instant::now() < until, "{:?}", stage.tier.stat());
        thread::yield_now();
    }
    let left = stage.tier.stat();
    let gone = (left.hot_bytes, left.compressed_bytes, left.spilled_bytes);
    assert_eq!(gone, (0, 0, 0), "{left:?}");
    assert_eq!(
        left.held_bytes,
        OWN_BYTES + stage.tier.pool.table_bytes() + left.pool_bytes,
        "{left:?}"
    );
    let slots = stage.tier.slots.lock();
    assert_eq!(slots.free.len() + slots.failed.len(), slots.fresh as usize);
}

#[test]
fn a_read_of_many_chunks_has_one_deadline_and_gets_further_each_time() {
    let stage = Stage::set();
    for chunk in Stage::chunks() {
        let written = stage.operate(Verb::Write, chunk, content(chunk | 1, 1));
        written.expect("a sound disk");
    }
    // Chunks that lie one behind the other.
    let spilled = stage.at(Place::Spilled);
    let first = spilled
        .chunk_by(|a, b| a + 1 == *b)
        .find(|run| run.len() >= 32);
    let first = first.expect("the first are the coldest")[0];
    stage.break_disk(Fault::SlowRead);
    let mut turned_down = 0;
    let read = loop {
        let begun = Instant::now();
        let read = stage.operate(Verb::Read, first, vec![0xa5; 32 * CHUNK]);
        assert!(
            begun.elapsed() < 2 * Duration::from_secs(1),
            "{:?}",
            begun.elapsed()
        );
        match read {
            Ok(bytes) => break bytes,
            Err(ChannelError::NoRoom { .. }) => turned_down += 1,
            Err(error) => panic!("{error}"),
        }
        assert!(turned_down < 8, "it gets further");
    };
    assert!(turned_down > 0, "it takes longer than that");
    for (chunk, bytes) in (first..).zip(read.chunks(CHUNK)) {
        assert!(bytes == content(chunk | 1, 1), "{chunk}");
    }
}

#[test]
fn a_lease_whose_table_has_no_room_waits_until_chunks_have_left() {
    // Its table takes more than evictors keep free.
    const LARGE_BYTES: u64 = 768 * MIB;
    // Zeros, which take no memory here until they are written.
    let stage = Stage::with_capacity(EXTENT_BYTES + LARGE_BYTES + 3 * CHUNK_BYTES, 0);
    let small = [(); 3].map(|()| stage.session.grant(CHUNK_BYTES).expect("room").id);
    for chunk in Stage::chunks() {
        let written = stage.operate(Verb::Write, chunk, content(chunk | 1, 1));
        written.expect("a sound disk");
    }
    stage.break_disk(Fault::WriteError);
    let begun = Instant::now();
    let refused = stage.session.grant(LARGE_BYTES);
    assert!(
        matches!(refused, Err(AllocError::Control(_))) && begun.elapsed() < TABLE_PATIENCE / 2,
        "it has as many extents as it may, so nothing is waited for: {refused:?}"
    );
    for id in small {
        stage.session.release(id).expect("it was lent");
    }
    let refused = stage.session.grant(LARGE_BYTES);
    assert!(
        matches!(refused, Err(AllocError::Full { .. })),
        "{refused:?}"
    );
    assert_eq!(stage.tier.books.lock().wanted_bytes, 0);
    stage.break_disk(Fault::None);
    let large = stage.session.grant(LARGE_BYTES).expect("chunks can leave");
    let held_bytes = stage.tier.stat().held_bytes;
    assert!(held_bytes <= LEAST_MEMORY_BYTES, "{held_bytes}");
    for chunk in Stage::chunks() {
        let expected = content(chunk | 1, 1);
        assert!(stage.read(chunk).expect("a sound disk") == expected);
    }
    stage.session.release(large.id).expect("it was lent");
    assert!(
        stage.session.grant(LARGE_BYTES).is_ok(),
        "all was given back"
    );
}

#[test]
fn a_capacity_that_no_disk_has_is_an_error() {
    let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a directory");
    for capacity_bytes in [u64::MAX, i64::MAX as u64, 1 << 60] {
        let started = Tier::start(LEAST_MEMORY_BYTES, capacity_bytes, directory.path());
        assert!(started.is_err(), "{capacity_bytes}");
    }
}

#[test]
fn a_slot_that_did_not_give_its_bytes_back_is_the_last_to_be_used_again() {
    let stage = Stage::set();
    for chunk in Stage::chunks() {
        stage.write(chunk, 1).expect("a sound disk");
    }
    stage.break_disk(Fault::FlippedBit);
    let spilled = stage.at(Place::Spilled);
    for chunk in &spilled[..4] {
        stage.read(*chunk).expect_err("it came back changed");
    }
    stage.break_disk(Fault::None);
    stage.session.release(stage.extent).expect("it is leased");
    let slots = stage.tier.slots.lock();
    assert_eq!((slots.failed.len(), slots.suspect.len()), (4, 0));
    assert!(slots.failed.iter().all(|slot| !slots.free.contains(slot)));
}
