//! The client half of shared memory: READ and WRITE are copies between a buffer and the extent's
//! mapping, and atomics the processor's own. Each poll executes one operation, so that the caller
//! can use the copied bytes while they are in the caches.
//!
//! The law of this file: a mapping holds bytes that others may change, so no reference to them is
//! made; they are copied through bounds-checked raw pointers.
//!
//! Memory that is *paged* is touched only where its [words](farpage_wire::segment) say that it is
//! present. A copy counts only if nothing left the server's memory meanwhile. Failed copies, absent
//! bytes and atomics are for the server, on a data connection that such a channel has.
//!
//! For all other memory the server takes no part. Channels go on while the server is stopped, and
//! after its process has ended: no other process can reach the memory then. They stop when the
//! session's [`Death`](crate::attachment::Death) says that the server has ended the session. They
//! also stop when the server's process has ended and the last answered renewal is older than the
//! lease, since the server may have ended the session first. A client that was stopped for longer
//! than its lease may copy into memory that is no longer its own before it hears of that. Memory of
//! an unnamed region is never lent twice, so no other client reads such bytes. Memory of a named
//! region is copied before another user gets it. The same user's next process checks the bytes that
//! it reads against the hashes of its page map.

use std::{
    collections::{HashMap, VecDeque},
    fs::File,
    io,
    os::fd::OwnedFd,
    sync::{
        Arc, RwLock,
        atomic::{AtomicBool, Ordering, fence},
    },
    time::{Duration, Instant},
};

use farpage_wire::{
    ExtentId,
    control::Lease,
    segment::{Piece, SegmentWord, pieces},
};
use memmap2::{MmapOptions, MmapRaw};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};

use crate::{
    Buf, Busy, Channel, ChannelError, Completion, Op, PollInterest, Verb,
    attachment::Attachment,
    channel::{check_len, is_aligned, refused},
    exchange::ring::Board,
    log::later,
    memory::{self, mark_at, marks, word_at, words_bytes},
    tcp::TcpChannel,
};

/// Number of times that a piece of an operation is copied while chunks of its segment leave, before
/// the server is asked.
const TRIES: usize = 3;

/// Pause of a sleeping caller between two looks for a number: no event wakes it.
const LOOK: Duration = Duration::from_micros(50);

/// Upper bound of waiting operations: enough for any caller's batch.
const DEPTH: usize = 64;

/// Number of extents that a channel remembers without allocating, as a signal handler must: 16 GiB
/// to 1 TiB, in the sizes that a region asks for.
const CACHED: usize = 1024;

const NO_PANIC: &str = "nothing panics under this lock";

/// An extent in this process.
#[derive(Debug)]
pub(crate) struct MappedExtent {
    id: ExtentId,
    bytes: u64,
    /// Mapping of the extent's bytes, and of its marks if it is paged.
    map: MmapRaw,
    /// Mapping of the words of its segments, if it is paged.
    words: Option<MmapRaw>,
    atomics: bool,
    /// True if the extent is mapped to read only.
    read_only: bool,
    /// Flag that is set when the lease is given back, before the memory is replaced: a channel that
    /// finds it unset after a copy has copied the server's memory.
    released: AtomicBool,
}

/// The extents of one session. Channels keep copies, so that its lock is not on the data path. The
/// lock is the standard library's, which never allocates: a signal handler may look an extent up.
#[derive(Debug, Default)]
pub(crate) struct Directory(RwLock<HashMap<ExtentId, Arc<MappedExtent>>>);

impl Directory {
    /// Maps a lease that the server passed, and the words of its segments if it is paged.
    pub(crate) fn insert(
        &self,
        lease: Lease,
        memory: OwnedFd,
        words: Option<OwnedFd>,
    ) -> io::Result<()> {
        let (file, bytes) = match words {
            Some(_) => (File::from(memory), marks(lease.bytes).1),
            None => (File::from(memory), lease.bytes),
        };
        check(&file, bytes)?;
        let mut options = MmapOptions::new();
        options.len(bytes as usize);
        let map = match lease.read_only {
            true => options.map_raw_read_only(&file)?,
            false => options.map_raw(&file)?,
        };
        map.advise(memmap2::Advice::DontFork)?;
        let words = match words {
            None => None,
            Some(fd) => {
                let (file, bytes) = (File::from(fd), words_bytes(lease.bytes));
                check(&file, bytes)?;
                let map = MmapOptions::new()
                    .len(bytes as usize)
                    .map_raw_read_only(&file)?;
                map.advise(memmap2::Advice::DontFork)?;
                Some(map)
            }
        };
        let mapped = MappedExtent {
            id: lease.id,
            bytes: lease.bytes,
            map,
            words,
            atomics: lease.atomics,
            read_only: lease.read_only,
            released: AtomicBool::new(false),
        };
        self.0
            .write()
            .expect(NO_PANIC)
            .insert(lease.id, Arc::new(mapped));
        Ok(())
    }

    /// Unmaps a lease, also one that an idle channel has cached. The server charges this program
    /// for the memory as long as it is mapped.
    pub(crate) fn remove(&self, id: ExtentId) {
        let mapped = self.0.write().expect(NO_PANIC).remove(&id);
        if let Some(mapped) = mapped {
            mapped.unmap();
        }
    }

    /// Unmaps all leases.
    pub(crate) fn clear(&self) {
        let all = std::mem::take(&mut *self.0.write().expect(NO_PANIC));
        all.values().for_each(|mapped| mapped.unmap());
    }
}

/// Checks that a file that the server passed can be mapped: memory that could shrink would turn a
/// copy into SIGBUS.
fn check(file: &File, bytes: u64) -> io::Result<()> {
    let seals = SealFlag::from_bits_truncate(fcntl(file, FcntlArg::F_GET_SEALS)?);
    match seals.contains(SealFlag::F_SEAL_SHRINK) && file.metadata()?.len() >= bytes {
        true => Ok(()),
        false => Err(io::Error::other(
            "the server passed memory that is not sealed or too short",
        )),
    }
}

impl MappedExtent {
    /// True if a READ can wait for the number at the extent's beginning.
    fn is_board(&self) -> bool {
        self.read_only && self.words.is_none() && self.bytes >= Board::NUMBER_BYTES as u64
    }

    /// Returns the number at the extent's beginning. Earlier bytes can be read afterwards.
    fn number(&self) -> Option<u64> {
        let word = |at| word_at(&self.map, at).load(Ordering::Acquire);
        let number = word(0);
        Board::sealed_by(word(1), number).then_some(number)
    }

    /// Copies `piece.len` bytes by `copy` while they are in the server's memory. Returns `false` if
    /// some were not, or left meanwhile: then the copy does not count.
    fn optimistic(&self, words: &MmapRaw, piece: Piece, mut copy: impl FnMut()) -> bool {
        let word = word_at(words, piece.segment);
        for _ in 0..TRIES {
            // Acquire: bytes that came in before the word said so are seen by the copy.
            let Some(look) = SegmentWord(word.load(Ordering::Acquire)).look(piece.chunks) else {
                return false;
            };
            let mark = mark_at(&self.map, self.bytes, piece.segment);
            // A reader cannot write the file, so it cannot mark either. Chunks that only readers
            // touch leave as if untouched.
            let is_marked = mark.load(Ordering::Relaxed) & piece.chunks == piece.chunks;
            if !is_marked && !self.read_only {
                mark.fetch_or(piece.chunks, Ordering::Relaxed);
            }
            copy();
            // The second look comes after the copy, also after its stores: either it finds that the
            // server has begun to move something out, or the server finds what was stored.
            fence(Ordering::SeqCst);
            if look.judge(SegmentWord(word.load(Ordering::Relaxed))) {
                return true;
            }
        }
        false
    }

    /// Replaces the server's memory by memory of this process. A copy that is under way goes on
    /// there, and is refused afterwards.
    fn unmap(&self) {
        self.released.store(true, Ordering::Release);
        let (address, bytes) = (self.map.as_mut_ptr().cast(), self.map.len());
        // SAFETY:
        // - the range is that of our own mapping, which lives as long as `self` and to which no
        //   reference exists; it is unmapped by its owner, whatever is mapped there;
        // - whoever copies from or to it meanwhile copies from or to memory of the same length.
        let replaced = unsafe {
            libc::mmap(
                address,
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
                -1,
                0,
            )
        };
        if replaced == libc::MAP_FAILED {
            // The memory stays mapped until the last channel has forgotten it.
            let error = io::Error::last_os_error();
            let extent = self.id;
            later(move || tracing::warn!(%extent, %error, "cannot let go of an extent at once"));
        }
    }
}

/// Condition of a READ of a board.
#[derive(Clone, Copy, Debug)]
struct When {
    least: u64,
    until: Instant,
}

/// A channel over shared memory: the copies of one thread.
pub(crate) struct ShmChannel<B> {
    attachment: Attachment,
    directory: Arc<Directory>,
    /// Extents found in [`Directory`] so far.
    cache: HashMap<ExtentId, Arc<MappedExtent>>,
    ops: VecDeque<(Op<B>, Option<When>)>,
    /// Connection for operations that the server has to execute, if it lends more than its memory.
    asking: Option<TcpChannel<B>>,
}

impl<B: Buf> ShmChannel<B> {
    pub(crate) fn new(
        attachment: Attachment,
        directory: Arc<Directory>,
        asking: Option<TcpChannel<B>>,
    ) -> Self {
        Self {
            attachment,
            directory,
            cache: HashMap::with_capacity(CACHED),
            ops: VecDeque::with_capacity(DEPTH),
            asking,
        }
    }

    /// Executes an operation. Returns `false` if the server has to execute it.
    fn copy(&mut self, op: &mut Op<B>) -> Result<bool, ChannelError> {
        if let Some(reason) = self.attachment.death.loss() {
            return Err(self.attachment.lost(reason));
        }
        let len = op.len as usize;
        let (offset, extent) = (op.offset, op.extent);
        let aligned = is_aligned(op);
        let verb = op.verb;
        let is_atomic = matches!(verb, Verb::Atomic(_));
        let mapped = self.mapped(extent).filter(|mapped| {
            aligned
                && (!is_atomic || mapped.atomics)
                && (!mapped.read_only || verb == Verb::Read)
                && offset
                    .checked_add(len as u64)
                    .is_some_and(|end| end <= mapped.bytes)
        });
        let Some(mapped) = mapped else {
            return Err(refused(&self.attachment.endpoint, op));
        };
        // SAFETY: the filter above checked `offset + len` against the mapping, so `offset` is
        // inside or at its end.
        let shared = unsafe { mapped.map.as_mut_ptr().add(offset as usize) };
        // `part` bytes at `at`, both counted from `offset`.
        let read = |local: &mut [u8], at: usize, part: usize| {
            let local = &mut local[at..][..part];
            // SAFETY:
            // - source: the operation's bytes of the mapping, checked above, kept mapped by the
            //   `Arc` in the cache, of which the indexing just now checked that these are a part;
            // - destination: an exclusive slice of `part` bytes; memory of the server's extents is
            //   never a buffer of ours, so the two do not overlap;
            // - a peer may change the source meanwhile, which only changes which bytes arrive.
            unsafe { std::ptr::copy_nonoverlapping(shared.add(at), local.as_mut_ptr(), part) };
        };
        let write = |local: &[u8], at: usize, part: usize| {
            let local = &local[at..][..part];
            // SAFETY: as above with source and destination exchanged; the mapping is writable, or
            // the filter had refused the operation.
            unsafe { std::ptr::copy_nonoverlapping(local.as_ptr(), shared.add(at), part) };
        };
        let counts = match (&mapped.words, op.verb) {
            (Some(words), verb) => pieces(offset, len as u64).all(|piece| {
                let (at, part) = ((piece.offset - offset) as usize, piece.len as usize);
                match verb {
                    Verb::Read => {
                        let local = &mut op.buf.as_mut()[..len];
                        mapped.optimistic(words, piece, || read(local, at, part))
                    }
                    Verb::Write => {
                        let local = &op.buf.as_ref()[..len];
                        mapped.optimistic(words, piece, || write(local, at, part))
                    }
                    // The old value of an atomic cannot be taken back.
                    Verb::Atomic(_) => false,
                }
            }),
            (None, Verb::Read) => {
                read(&mut op.buf.as_mut()[..len], 0, len);
                // Pairs with a release store by the memory's owner: later reads see the owner's
                // earlier work.
                fence(Ordering::Acquire);
                true
            }
            (None, Verb::Write) => {
                // A thread that sees these bytes sees those of earlier WRITEs.
                fence(Ordering::Release);
                write(&op.buf.as_ref()[..len], 0, len);
                true
            }
            (None, Verb::Atomic(atomic)) => {
                // SAFETY: 8 bytes of the mapping, as above, and aligned, since its first byte and
                // the offset are.
                let old = unsafe { memory::apply(shared.cast(), atomic) };
                op.buf.as_mut()[..len].copy_from_slice(&old.to_le_bytes());
                true
            }
        };
        // Checked after the copy, during which the memory may have been replaced. A copy from the
        // replacement is followed by the flag that was set before the replacement was made.
        fence(Ordering::Acquire);
        match mapped.released.load(Ordering::Relaxed) {
            true => Err(refused(&self.attachment.endpoint, op)),
            false => Ok(counts),
        }
    }

    /// Returns true if the board's number meets `when`, and `None` if the READ waited for too long.
    /// True, too, if the extent is no board or out of reach: the copy reports that error.
    fn has_come(&mut self, extent: ExtentId, when: When) -> Option<bool> {
        let Some(mapped) = self.mapped(extent).filter(|mapped| mapped.is_board()) else {
            return Some(true);
        };
        let is_so = mapped.number().is_some_and(|number| number >= when.least);
        match is_so || self.attachment.death.loss().is_some() {
            true => Some(true),
            false => (Instant::now() < when.until).then_some(false),
        }
    }

    /// Copies the bytes of an operation, or asks the server for it.
    fn begin(&mut self, mut op: Op<B>, when: Option<When>, done: &mut Vec<Completion<B>>) {
        let result = match when.map(|when| (when, self.has_come(op.extent, when))) {
            Some((_, Some(false))) => return self.ops.push_front((op, when)),
            Some((When { least, .. }, None)) => {
                let endpoint = self.attachment.endpoint.clone();
                return done.push(op.complete(Err(ChannelError::NotYet { endpoint, least })));
            }
            _ => self.copy(&mut op),
        };
        let result = match result {
            Ok(true) => Ok(()),
            Ok(false) => match &mut self.asking {
                Some(asking) => {
                    // The connection has a bound of operations in flight.
                    if let Err(Busy(op)) = asking.post(op) {
                        self.ops.push_front((op, None));
                    }
                    return;
                }
                None => Err(self
                    .attachment
                    .lost("it lent memory that may be elsewhere, without a way to ask for it")),
            },
            Err(error) => Err(error),
        };
        done.push(op.complete(result));
    }

    fn mapped(&mut self, id: ExtentId) -> Option<&MappedExtent> {
        let cached = self
            .cache
            .get(&id)
            .is_some_and(|mapped| !mapped.released.load(Ordering::Relaxed));
        if !cached {
            // Rare: the time to forget released extents, or the cache would keep them mapped.
            self.cache
                .retain(|_, mapped| !mapped.released.load(Ordering::Relaxed));
            let mapped = Arc::clone(self.directory.0.read().expect(NO_PANIC).get(&id)?);
            self.cache.insert(mapped.id, mapped);
        }
        self.cache.get(&id).map(|mapped| &**mapped)
    }
}

impl<B: Buf> Channel<B> for ShmChannel<B> {
    fn post(&mut self, op: Op<B>) -> Result<(), Busy<B>> {
        if self.in_flight() == DEPTH {
            return Err(Busy(op));
        }
        check_len(&op);
        self.ops.push_back((op, None));
        Ok(())
    }

    fn post_when(&mut self, op: Op<B>, least: u64) -> Result<(), Busy<B>> {
        assert_eq!(op.verb, Verb::Read, "only READs wait");
        self.post(op)?;
        if let Some((_, when)) = self.ops.back_mut() {
            let until = Instant::now() + self.attachment.patience.silence / 2;
            *when = Some(When { least, until });
        }
        Ok(())
    }

    fn waits_for_numbers(&self) -> bool {
        true
    }

    fn poll(&mut self, done: &mut Vec<Completion<B>>) -> usize {
        let before = done.len();
        if let Some((op, when)) = self.ops.pop_front() {
            self.begin(op, when, done);
        }
        if let Some(asking) = &mut self.asking {
            asking.poll(done);
        }
        done.len() - before
    }

    /// Returns false if the server executes some WRITEs: they take longer than copies.
    fn writes_in_order(&self) -> bool {
        self.asking.is_none()
    }

    fn in_flight(&self) -> usize {
        let asked = self.asking.as_ref().map_or(0, |asking| asking.in_flight());
        self.ops.len() + asked
    }

    fn wait(&self) -> PollInterest<'_> {
        match &self.asking {
            Some(asking) if self.ops.is_empty() => asking.wait(),
            _ => PollInterest {
                until: self.ops.front().map(|(_, when)| match when {
                    None => Instant::now(),
                    Some(_) => Instant::now() + LOOK,
                }),
                ..PollInterest::default()
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use farpage_wire::segment::{CHUNK_BYTES, SEGMENT_BYTES};

    use super::*;
    use crate::memory::{ExtentMemory, SegmentWords};

    const BYTES: u64 = 2 * SEGMENT_BYTES;

    struct Both {
        memory: Arc<ExtentMemory>,
        words: SegmentWords,
        mapped: Arc<MappedExtent>,
    }

    /// Makes a paged extent, at the server and at a client.
    fn both() -> Both {
        let id = ExtentId(1);
        let memory = ExtentMemory::create_with_marks(id, BYTES, false).expect("a memfd");
        let words = SegmentWords::create(BYTES).expect("a memfd");
        let lease = Lease {
            id,
            bytes: BYTES,
            atomics: false,
            paged: true,
            read_only: false,
        };
        let directory = Directory::default();
        let fd = memory.lend().expect("a descriptor");
        let words_fd = words.lend().expect("a descriptor");
        directory
            .insert(lease, fd, Some(words_fd))
            .expect("sealed memory");
        let mapped = Arc::clone(&directory.0.read().expect(NO_PANIC)[&id]);
        Both {
            memory,
            words,
            mapped,
        }
    }

    /// Counts the copies of the first two chunks of the second segment while `meanwhile` changes
    /// its word in each copy. Returns true with the count if the last copy counts.
    fn copies(
        both: &Both,
        mut meanwhile: impl FnMut(SegmentWord, u32) -> SegmentWord,
    ) -> (u32, bool) {
        let piece = pieces(SEGMENT_BYTES, 2 * CHUNK_BYTES).next().expect("one");
        let mut copies = 0;
        let words = both.mapped.words.as_ref().expect("it is paged");
        let counts = both.mapped.optimistic(words, piece, || {
            copies += 1;
            both.words.set(1, meanwhile(both.words.get(1), copies));
        });
        (copies, counts)
    }

    #[test]
    fn a_copy_counts_only_if_nothing_left_meanwhile() {
        let both = both();
        let same = |word, _| word;
        assert_eq!(copies(&both, same), (0, false), "nothing is there");
        both.words.set(1, SegmentWord::default().with(1));
        assert_eq!(copies(&both, same), (0, false), "only one of two is");
        both.words.set(1, both.words.get(1).with(0b1111));
        assert_eq!(copies(&both, same), (1, true));
        let comes = |word: SegmentWord, copy| word.with(1_u32 << (8 + copy));
        assert_eq!(copies(&both, comes), (1, true), "others may come");
        // A neighbour that leaves changes the version, and is no reason to give up at once.
        let once = |word: SegmentWord, copy| match copy {
            1 => word.without(1 << 2),
            _ => word,
        };
        assert_eq!(copies(&both, once), (2, true));
        let ever = |word: SegmentWord, _| word.without(1 << 3).with(1 << 3);
        assert_eq!(copies(&both, ever), (3, false));
        // A chunk that left and came back is another one.
        let back = |word: SegmentWord, copy| match copy {
            1 => word.without(1).with(1),
            _ => word,
        };
        assert_eq!(copies(&both, back), (2, true));
        let leaves = |word: SegmentWord, _| word.without(1);
        assert_eq!(copies(&both, leaves), (1, false));
    }

    #[test]
    fn what_is_touched_is_marked_and_nothing_else() {
        let both = both();
        both.words.set(1, SegmentWord::default().with(u32::MAX));
        assert!(copies(&both, |word, _| word).1);
        let file = both.memory.file();
        assert_eq!((file.take_marks(0), file.take_marks(1)), (0, 3));
    }
}
