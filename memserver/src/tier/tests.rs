//! Faults of the disk, over real sockets: errors that say what is wrong, and never other bytes.

use std::{
    env,
    os::unix::process::ExitStatusExt,
    process::Command,
    sync::atomic::AtomicU8,
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::{
    AllocError, ChannelError, Op, Session, SessionOptions, Verb, host::Host, server::ServerThread,
};
use nix::errno::Errno;

use super::{buffers::Transfer, disk::BLOCK_BYTES, *};
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
    /// Writes take until the fault ends.
    HungWrites,
    /// Reads and writes take until the fault ends.
    Hung,
    /// Each read takes [`SLOW`].
    SlowRead,
    /// The first slots cannot be written, and all others can.
    BadSlots,
    /// Each write panics.
    Panic,
}

/// Slots that [`Fault::BadSlots`] spoils.
const BAD_SLOTS: u64 = 8;
const SLOW: Duration = Duration::from_millis(100);
/// The longest wait for something that a busy machine does late.
const PATIENCE: Duration = Duration::from_secs(30);

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
        self.hang(&[Fault::HungWrites, Fault::Hung]);
        assert!(!self.has(Fault::Panic), "as the test wants it");
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
    #[cfg_attr(not(feature = "rdma"), expect(dead_code, reason = "it serves"))]
    serving: ServerThread,
    evictors: Option<Evictors>,
}

impl Stage {
    fn set() -> Self {
        Self::with_capacity(EXTENT_BYTES, 0xee)
    }

    /// Makes a stage. Disk blocks that were never written have bytes of `filling`.
    fn with_capacity(capacity_bytes: u64, filling: u8) -> Self {
        Self::at("tcp://127.0.0.1:0", capacity_bytes, filling)
    }

    fn at(endpoint: &str, capacity_bytes: u64, filling: u8) -> Self {
        let fault = Arc::new(AtomicU8::new(Fault::None as u8));
        let disk = Twin {
            bytes: Mutex::new(vec![filling; capacity_bytes as usize]),
            fault: Arc::clone(&fault),
        };
        let (tier, evictors) = Tier::with_disk(
            LEAST_MEMORY_BYTES,
            capacity_bytes,
            Box::new(disk),
            HashMap::new(),
        )
        .expect("threads");
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
        let endpoint = endpoint.parse().expect("an endpoint");
        let serving = ServerThread::start(&endpoint, host).expect("a port");
        let session = Session::connect(serving.endpoint(), &SessionOptions::default());
        let session = session.expect("it listens");
        let extent = session.grant(EXTENT_BYTES).expect("all of it").id;
        Self {
            fault,
            tier,
            session,
            extent,
            serving,
            evictors: Some(evictors),
        }
    }

    fn break_disk(&self, fault: Fault) {
        self.fault.store(fault as u8, Ordering::SeqCst);
    }

    fn operate(&self, verb: Verb, chunk: u64, buf: Vec<u8>) -> Result<Vec<u8>, ChannelError> {
        self.transfer(verb, chunk * CHUNK_BYTES, buf)
    }

    fn transfer(&self, verb: Verb, offset: u64, buf: Vec<u8>) -> Result<Vec<u8>, ChannelError> {
        let mut channel = self.session.channel::<Vec<u8>>().expect("a connection");
        let len = buf.len() as u32;
        let op = Op {
            tag: 0,
            verb,
            extent: self.extent,
            offset,
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

    fn lent(&self) -> Arc<TieredExtent> {
        let books = self.tier.books.lock();
        let extent = books.extents[&self.extent].extent.upgrade();
        extent.expect("it is lent")
    }

    /// Ends the evictors: no chunk leaves any more, and none is being moved.
    fn stop_evictors(&mut self) {
        self.evictors = None;
        assert!(self.at_place(Place::Busy).is_empty(), "they have ended");
    }

    fn restart_evictors(&mut self) {
        self.tier.books.lock().stops = false;
        self.evictors = Some(Evictors::start(&self.tier).expect("threads"));
    }

    /// Lists the chunks that are in `place`.
    fn at_place(&self, place: Place) -> Vec<u64> {
        let extent = self.lent();
        Self::chunks()
            .filter(|chunk| extent.place(*chunk as usize) == place)
            .collect()
    }
}

/// Makes the bytes of a chunk. Chunks with odd numbers do not compress.
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
        let spilled = stage.at_place(Place::Spilled);
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
    // Compressible chunks need no disk.
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

/// Five of six chunks do not need the disk, and find room although it holds every evictor that was
/// there first.
#[test]
fn a_disk_that_takes_no_writes_holds_up_only_what_needs_it() {
    let stage = Stage::set();
    stage.break_disk(Fault::HungWrites);
    // Compressible chunks need no disk. The oldest chunks, which leave first, do.
    let content = |chunk| content(if chunk < 64 { 1 } else { 2 }, chunk);
    for chunk in Stage::chunks() {
        let written = stage.operate(Verb::Write, chunk, content(chunk));
        written.unwrap_or_else(|error| panic!("{chunk}: {error}"));
    }
    // The evictor that is left may still be compressing.
    let until = Instant::now() + PATIENCE;
    while stage.at_place(Place::Busy).len() != EVICTORS - 1 {
        assert!(Instant::now() < until, "all evictors but one are in writes");
        thread::yield_now();
    }
    stage.break_disk(Fault::None);
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
    let (spilled, compressed) = (
        stage.at_place(Place::Spilled),
        stage.at_place(Place::Compressed),
    );
    assert!(spilled.len() > DISK_FETCHES && compressed.len() > 8);
    stage.break_disk(Fault::HungReads);
    thread::scope(|scope| {
        for chunk in &spilled[..DISK_FETCHES] {
            scope.spawn(|| {
                let read = stage.read(*chunk).map(|bytes| bytes.len());
                read.expect_err("it is released meanwhile")
            });
        }
        let until = Instant::now() + PATIENCE;
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
        // Chunks that are read again soon are worth memory: others leave without the disk.
        for chunk in compressed.iter().chain(&compressed) {
            let read = stage.read(*chunk).expect("one evictor is not at the disk");
            assert!(read == content(*chunk, 1), "{chunk}");
        }
        // Returns although the disk never answers.
        stage.session.release(stage.extent).expect("it is leased");
        let left = stage.tier.stat();
        // Fetches, and what goes from the pool to the disk.
        let on_their_way = (DISK_FETCHES + EVICTORS) as u64 * CHUNK_BYTES;
        assert!(
            left.compressed_bytes + left.spilled_bytes <= on_their_way,
            "{left:?}"
        );
        stage.break_disk(Fault::None);
    });
    // Chunks that were being moved are given back by their movers, and the pool shrinks.
    let until = Instant::now() + PATIENCE;
    let is_all_back = || {
        let left = stage.tier.stat();
        let own_bytes = OWN_BYTES + stage.tier.pool.table_bytes() + left.pool_bytes;
        left.hot_bytes + left.compressed_bytes + left.spilled_bytes == 0
            && left.held_bytes == own_bytes
            && stage.tier.books.lock().slots_kept == 0
    };
    while !is_all_back() {
        assert!(Instant::now() < until, "{:?}", stage.tier.stat());
        thread::yield_now();
    }
    let slots = stage.tier.slots.lock();
    assert_eq!(slots.free.len() + slots.failed.len(), slots.fresh as usize);
}

#[test]
fn memory_of_a_released_extent_is_lent_again_once_its_last_chunks_have_arrived() {
    let stage = Stage::set();
    stage.break_disk(Fault::HungWrites);
    let mut written = Stage::chunks();
    while stage.at_place(Place::Busy).is_empty() {
        let chunk = written.next().expect("memory is smaller than the extent");
        let _may_find_no_room = stage.operate(Verb::Write, chunk, content(chunk | 1, 1));
    }
    stage.session.release(stage.extent).expect("it is leased");
    assert!(stage.tier.books.lock().orphans > 0, "an evictor hangs");
    thread::scope(|scope| {
        scope.spawn(|| {
            // Longer than it takes to ask. Where it is not, the test says less.
            thread::sleep(Duration::from_millis(100));
            stage.break_disk(Fault::None);
        });
        // All slots are wanted, and one or more are not back.
        let again = stage.session.grant(EXTENT_BYTES);
        assert!(again.is_ok(), "{again:?}");
    });
    assert_eq!(stage.tier.books.lock().orphans, 0);
}

#[test]
fn a_read_of_many_chunks_has_one_deadline_and_gets_further_each_time() {
    let stage = Stage::set();
    for chunk in Stage::chunks() {
        let written = stage.operate(Verb::Write, chunk, content(chunk | 1, 1));
        written.expect("a sound disk");
    }
    // Chunks that lie one behind the other.
    let spilled = stage.at_place(Place::Spilled);
    let first = spilled
        .chunk_by(|a, b| a + 1 == *b)
        .find(|run| run.len() >= 32);
    let first = first.expect("the first are the coldest")[0];
    stage.break_disk(Fault::SlowRead);
    let mut turned_down = 0;
    let read = loop {
        match stage.operate(Verb::Read, first, vec![0xa5; 32 * CHUNK]) {
            Ok(bytes) => break bytes,
            Err(ChannelError::NoRoom { .. }) => turned_down += 1,
            Err(error) => panic!("{error}"),
        }
        assert!(turned_down < 8, "it gets further");
    };
    assert!(
        turned_down > 0,
        "all of it takes longer than one deadline, each chunk takes less"
    );
    for (chunk, bytes) in (first..).zip(read.chunks(CHUNK)) {
        assert!(bytes == content(chunk | 1, 1), "{chunk}");
    }
}

#[test]
fn a_lease_whose_table_has_no_room_waits_until_chunks_have_left() {
    // The large extent's table takes more than evictors keep free.
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
        let started = Tier::start(
            LEAST_MEMORY_BYTES,
            capacity_bytes,
            directory.path(),
            HashMap::new(),
        );
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
    let spilled = stage.at_place(Place::Spilled);
    for chunk in &spilled[..4] {
        stage.read(*chunk).expect_err("it came back changed");
    }
    stage.break_disk(Fault::None);
    stage.session.release(stage.extent).expect("it is leased");
    let slots = stage.tier.slots.lock();
    assert_eq!((slots.failed.len(), slots.suspect.len()), (4, 0));
    assert!(slots.failed.iter().all(|slot| !slots.free.contains(slot)));
}

#[test]
fn memory_that_a_client_takes_by_touching_what_is_not_there_is_charged_to_it_and_given_back() {
    use farpage_fabric::memory::Residency;

    let mut stage = Stage::set();
    for chunk in Stage::chunks() {
        stage.write(chunk, 1).expect("a sound disk");
    }
    // Evictors would change the counts while they are compared.
    stage.stop_evictors();
    let extent = stage.lent();
    let _words = extent.share().expect("a descriptor");
    let out = stage.at_place(Place::Spilled);
    assert!(out.len() > 64, "{}", out.len());
    let touched = u64::try_from(out.len()).expect("few") * 4096;
    for chunk in &out {
        let first = *chunk * CHUNK_BYTES;
        extent.file.write_at(first, &[7; 8]).expect("memory");
    }
    let chunks = || stage.tier.books.lock().extents[&stage.extent].chunks;
    let before = chunks();
    stage.tier.punch_strays();
    let tiers = stage.tier.stat();
    // Room is left for marks: nobody has made any, but an evictor may have looked.
    let found = tiers.stray_bytes;
    let no_marks = touched - extent.file.marks_bytes();
    assert!([touched, no_marks].contains(&found), "{touched} {found}");
    assert_eq!(chunks() - before, found.div_ceil(CHUNK_BYTES));
    // Nothing is there any more, and the charge ends at the next look.
    stage.tier.punch_strays();
    let tiers = stage.tier.stat();
    assert_eq!(tiers.stray_bytes, found, "given back at the first look");
    assert_eq!(chunks(), before);
    stage.restart_evictors();
    for chunk in Stage::chunks() {
        assert!(stage.read(chunk).expect("a sound disk") == content(chunk, 1));
    }
}

#[test]
fn a_client_that_marks_everything_all_the_time_still_gives_up_chunks() {
    use farpage_fabric::memory::Residency;

    let stage = Stage::set();
    for chunk in 0..4 {
        stage.write(chunk, 1).expect("room");
    }
    let extent = stage.lent();
    extent.share().expect("a memfd");
    // As a client does through its mapping.
    let mark_all = || {
        extent
            .file
            .write_at(EXTENT_BYTES, &[0xff; 4])
            .expect("marks")
    };
    // Chunks that were young because they had been written are not any more.
    assert_eq!(extent.take_cold(0, false), None);
    for _ in 0..3 {
        mark_all();
        assert_eq!(extent.take_cold(0, false), None, "all are used");
    }
    mark_all();
    assert_eq!(extent.take_cold(0, true), Some(0));
    assert_eq!(extent.place(0), Place::Busy);
}

#[test]
fn a_chunk_that_could_not_leave_is_not_called_hot_after_its_extent_has_ended() {
    use farpage_fabric::memory::Residency;

    let stage = Stage::set();
    for chunk in 0..2 {
        stage.write(chunk, 1).expect("room");
    }
    let extent = stage.lent();
    let words = extent.share().expect("a memfd");
    // The first is held, and the other is on its way out.
    assert_eq!(extent.hold(0, CHUNK_BYTES, None), Ok(CHUNK_BYTES));
    assert_eq!(extent.take_cold(0, true), Some(1));
    stage.break_disk(Fault::WriteError);
    thread::scope(|scope| {
        let discard = scope.spawn(|| extent.discard());
        while words.get(0).chunks() != 0 {
            thread::yield_now();
        }
        assert!(!extent.evict(1, &mut Transfer::new()));
        assert_eq!(words.get(0).chunks(), 1 << 1, "it could not leave");
        extent.let_go(0, CHUNK_BYTES);
        assert_eq!(discard.join().expect("no panic"), (2, 0));
    });
    assert_eq!(words.get(0).chunks(), 0);
}

#[test]
fn what_extents_take_beside_their_chunks_is_counted_before_they_are_lent() {
    let stage = Stage::with_capacity(4 * EXTENT_BYTES, 0);
    let before = stage.tier.stat().held_bytes;
    let kept = stage.tier.keep_for(4096).expect("room");
    // A page of words and one of marks.
    let one = stage.tier.stat().held_bytes - before;
    assert_eq!(one, 2 * 4096 + TABLE_BYTES_PER_CHUNK);
    drop(kept);
    assert_eq!(stage.tier.stat().held_bytes, before);
    let mut kept = Vec::new();
    let available = loop {
        match stage.tier.keep_for(4096) {
            Ok(one) => kept.push(one),
            Err(available) => break available,
        }
    };
    // The most of the memory is for chunks.
    assert!(kept.len() as u64 * one <= LEAST_MEMORY_BYTES / 4);
    assert!(available < CHUNK_BYTES, "{available}");
}

#[test]
fn what_is_read_once_stays_where_it_is_and_what_is_read_again_comes_into_memory() {
    let stage = Stage::set();
    for chunk in Stage::chunks() {
        stage.write(chunk, 1).expect("a sound disk");
    }
    for place in [Place::Spilled, Place::Compressed] {
        let chunk = stage.at_place(place)[0];
        let before = stage.tier.stat().fetches;
        // A part, not at the chunk's beginning.
        let offset = chunk * CHUNK_BYTES + 4096;
        let part = stage.transfer(Verb::Read, offset, vec![0xa5; 8192]);
        assert!(part.expect("a sound disk") == content(chunk, 1)[4096..][..8192]);
        assert!(stage.at_place(place).contains(&chunk), "{place:?}");
        assert!(stage.read(chunk).expect("a sound disk") == content(chunk, 1));
        assert!(stage.at_place(Place::Hot).contains(&chunk), "{place:?}");
        assert_eq!(stage.tier.stat().fetches, before + 2, "{place:?}");
        // A WRITE of a part needs the rest.
        let chunk = stage.at_place(place)[0];
        let written = stage.operate(Verb::Write, chunk, vec![1; 4096]);
        written.expect("a sound disk");
        let expected = [&[1; 4096][..], &content(chunk, 1)[4096..]].concat();
        assert!(stage.read(chunk).expect("a sound disk") == expected);
    }
}

#[test]
fn a_panic_of_an_evictor_ends_the_process_and_says_so() {
    const CHILD: &str = "FARPAGE_TEST_EVICTOR_PANICS";
    if env::var_os(CHILD).is_some() {
        let stage = Stage::set();
        stage.break_disk(Fault::Panic);
        for chunk in Stage::chunks() {
            let written = stage.operate(Verb::Write, chunk, content(chunk | 1, 1));
            if written.is_err() {
                return;
            }
        }
    }
    let name = "tier::tests::a_panic_of_an_evictor_ends_the_process_and_says_so";
    let child = Command::new(env::current_exe().expect("this program"))
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, "1")
        .output()
        .expect("it starts");
    let said = String::from_utf8_lossy(&child.stderr);
    assert_eq!(child.status.signal(), Some(nix::libc::SIGABRT), "{said}");
    assert!(
        said.contains("an evictor of this server panicked"),
        "{said}"
    );
}

/// Tests over an adapter with on-demand paging.
#[cfg(feature = "rdma")]
mod rdma {
    use super::*;

    /// Makes a stage at this machine's device, if it has one.
    fn stage(test: &str) -> Option<Stage> {
        let Ok(host) = std::env::var("FARPAGE_TEST_RDMA_ADDRESS") else {
            eprintln!(
                "SKIPPED: {test}: FARPAGE_TEST_RDMA_ADDRESS does not name an RDMA device's address; `cargo xtask vm` runs a test with one"
            );
            return None;
        };
        let endpoint = format!("rdma://{host}:0");
        Some(Stage::at(&endpoint, EXTENT_BYTES, 0xee))
    }

    /// Blocks of one extent, dealt out to channels. All of it does not fit into memory, so that
    /// blocks leave while others are moved.
    #[test]
    fn rdma_races_with_chunks_that_leave_and_nothing_is_lost() {
        const CHANNELS: u64 = 3;
        const BLOCK: u64 = 24 << 10;
        let Some(stage) = stage("rdma_races_with_chunks_that_leave_and_nothing_is_lost") else {
            return;
        };
        thread::scope(|scope| {
            for number in 0..CHANNELS {
                let stage = &stage;
                scope.spawn(move || {
                    let mut channel = stage.session.channel::<Vec<u8>>().expect("a connection");
                    let mut truth = vec![0_u64; (EXTENT_BYTES / BLOCK / CHANNELS) as usize];
                    let mut random = number + 1;
                    let mut draw = |below: u64| {
                        random = random
                            .wrapping_mul(0x5851_f42d_4c95_7f2d)
                            .wrapping_add(number | 1);
                        (random >> 33) % below
                    };
                    let blocks = truth.len() as u64;
                    for round in 0..3 * blocks {
                        // All of them once, so that there is more than fits.
                        let block = if round < blocks { round } else { draw(blocks) };
                        let writes = round < blocks || draw(2) == 0;
                        let known = &mut truth[block as usize];
                        let buf = match writes {
                            true => {
                                *known = draw(u64::MAX) << 1 | 1;
                                known.to_le_bytes().repeat(BLOCK as usize / 8)
                            }
                            false => vec![0xa5; BLOCK as usize],
                        };
                        let op = Op {
                            tag: round,
                            verb: if writes { Verb::Write } else { Verb::Read },
                            extent: stage.extent,
                            offset: (block * CHANNELS + number) * BLOCK,
                            len: BLOCK as u32,
                            buf,
                        };
                        channel.post(op).expect("an empty queue");
                        let mut done = Vec::new();
                        let until = Instant::now() + Duration::from_secs(60);
                        while channel.poll(&mut done) == 0 {
                            assert!(Instant::now() < until, "an operation ends");
                            thread::yield_now();
                        }
                        let done = done.pop().expect("one was posted");
                        done.result.expect("a sound disk");
                        let is_right =
                            (done.buf.chunks(8)).all(|word| *word == known.to_le_bytes());
                        assert!(is_right, "channel {number}, block {block}, round {round}");
                    }
                });
            }
        });
        let tiers = stage.tier.stat();
        assert!(tiers.forced_seals > 200, "{tiers:?}");
        assert_eq!((tiers.spill_errors, tiers.no_room), (0, 0), "{tiers:?}");
    }

    #[test]
    fn rdma_reaches_what_is_in_memory_without_the_server() {
        let Some(stage) = stage("rdma_reaches_what_is_in_memory_without_the_server") else {
            return;
        };
        stage.write(3, 1).expect("a sound disk");
        let traffic = stage.serving.traffic();
        let before = (traffic.bytes_read(), traffic.bytes_written());
        for version in 2..20 {
            stage.write(3, version).expect("a sound disk");
            assert!(stage.read(3).expect("a sound disk") == content(3, version));
        }
        let after = (traffic.bytes_read(), traffic.bytes_written());
        assert_eq!(after, before);
    }

    #[test]
    fn rdma_of_what_the_disk_cannot_give_back_is_an_error_and_never_other_bytes() {
        let test = "rdma_of_what_the_disk_cannot_give_back_is_an_error_and_never_other_bytes";
        let Some(stage) = stage(test) else {
            return;
        };
        for chunk in Stage::chunks() {
            stage.write(chunk, 1).expect("a sound disk");
        }
        let spilled = stage.at_place(Place::Spilled);
        assert!(spilled.len() > 8, "{}", spilled.len());
        stage.break_disk(Fault::FlippedBit);
        for chunk in &spilled[..4] {
            for result in [stage.read(*chunk).map(drop), stage.write(*chunk, 2)] {
                assert!(
                    matches!(result, Err(ChannelError::Unreadable { .. })),
                    "{result:?}"
                );
            }
        }
        stage.break_disk(Fault::None);
        for chunk in &spilled {
            assert!(stage.read(*chunk).expect("a sound disk") == content(*chunk, 1));
        }
    }
}
