//! A tiered server over real sockets, with a disk that fails on command.

mod disk;
mod memory;
#[cfg(feature = "rdma")]
mod rdma;

use std::{
    sync::atomic::AtomicU8,
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::{
    AllocError, ChannelError, Session, SessionOptions, Verb, host::Host, server::ServerThread,
};
use farpage_testkit::op;
use nix::errno::Errno;

use super::{
    chunk::Place,
    disk::BLOCK_BYTES,
    loans::Transfer,
    room::TABLE_PATIENCE,
    shares::TABLE_BYTES_PER_CHUNK,
    storage::{DISK_FETCHES, EVICTORS},
    *,
};
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
        farpage_testkit::transfer(&mut *channel, op(verb, self.extent, offset, buf))
    }

    fn write(&self, chunk: u64, version: u64) -> Result<(), ChannelError> {
        self.operate(Verb::Write, chunk, content(chunk, version))
            .map(drop)
    }

    /// Writes every chunk with the bytes that `bytes` makes for it.
    #[track_caller]
    fn fill(&self, bytes: impl Fn(u64) -> Vec<u8>) {
        for chunk in Self::chunks() {
            let written = self.operate(Verb::Write, chunk, bytes(chunk));
            written.unwrap_or_else(|error| panic!("{chunk}: {error}"));
        }
    }

    /// Asserts that every chunk has the bytes that `bytes` makes for it.
    #[track_caller]
    fn assert_filled(&self, story: &str, bytes: impl Fn(u64) -> Vec<u8>) {
        for chunk in Self::chunks() {
            let read = self.read(chunk).expect("room and a sound disk");
            assert!(read == bytes(chunk), "{story}: {chunk}");
        }
    }

    fn read(&self, chunk: u64) -> Result<Vec<u8>, ChannelError> {
        self.operate(Verb::Read, chunk, vec![0xa5; CHUNK])
    }

    fn chunks() -> std::ops::Range<u64> {
        0..EXTENT_BYTES / CHUNK_BYTES
    }

    fn lent(&self) -> Arc<TieredExtent> {
        let books = self.tier.mover.room.books.lock();
        let extent = books.extents[&self.extent].extent.upgrade();
        extent.expect("it is lent")
    }

    /// Ends the evictors: no chunk leaves any more, and none is being moved.
    fn stop_evictors(&mut self) {
        self.evictors = None;
        assert!(self.at_place(Place::Busy).is_empty(), "they have ended");
    }

    fn restart_evictors(&mut self) {
        self.tier.mover.room.books.lock().stops = false;
        self.evictors = Some(Evictors::start(&self.tier.mover).expect("threads"));
    }

    /// Lists the chunks that are in `place`.
    fn at_place(&self, place: Place) -> Vec<u64> {
        let extent = self.lent();
        Self::chunks()
            .filter(|chunk| extent.place(*chunk as usize) == place)
            .collect()
    }
}

/// Makes the bytes of a chunk that compresses if `chunk` is even, in its first version.
fn first(chunk: u64) -> Vec<u8> {
    content(chunk, 1)
}

/// Makes the bytes of a chunk that does not compress.
fn odd(chunk: u64) -> Vec<u8> {
    content(chunk | 1, 1)
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
