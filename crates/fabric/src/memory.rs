//! [`ExtentMemory`]: the memory of one extent on the server's side, a sealed memfd.
//!
//! The law of this file: clients that share the bytes may change them at any time, so no reference
//! to the bytes is ever made. They are touched only through bounds-checked raw copies and by system
//! calls that are given raw addresses. Rights to extents are left to the
//! [`Host`](crate::host::Host).
//!
//! The server and each client that is lent the memory over shared memory have *open file
//! descriptions* of their own, made through `/proc/self/fd`. So the kernel knows whether a client
//! has let go of the memory, including the client's mappings, duplicated descriptors and children:
//! see [`ExtentFile::is_held_elsewhere`].

use std::{
    fmt,
    fs::File,
    io,
    os::fd::{AsRawFd, OwnedFd},
    os::unix::fs::{FileExt, MetadataExt},
    ptr::{self, NonNull},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence},
    },
    time::{Duration, Instant},
};

use crate::{log::later, regmem::MemoryRegistration};
use farpage_wire::{
    Atomic, ExtentId,
    data::WORD_BYTES,
    segment::{SEGMENT_BYTES, SegmentWord},
};
use memmap2::{MmapOptions, MmapRaw};
use nix::{
    errno::Errno,
    fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl},
    sys::{
        memfd::{MFdFlags, memfd_create},
        stat::{Mode, fchmod},
    },
    unistd::{Whence, lseek},
};

/// Bytes of a segment's mark.
pub(crate) const MARK_BYTES: u64 = 4;

/// Size of the largest extent that can be [`paged`](ExtentMemory::paged): a client keeps a table of
/// its segments.
pub(crate) const MAX_PAGED_BYTES: u64 = 16 << 40;

/// Size of a page, the least that the kernel maps.
const PAGE_BYTES: u64 = 4096;

/// Bytes that are copied at once into fresh memory: few, so that holes stay holes.
const COPY_BYTES: u64 = 64 << 10;

/// One lease of an extent: zeroed memory that cannot be resized, mapped here on first use.
///
/// Each lease has a handle of its own, so that [`revoke`](Self::revoke) ends one lease and
/// [`lease_anew`](Self::lease_anew) hands the same bytes to the next. A client that was given the
/// descriptor over shared memory may keep its own mapping after the lease. Bytes that must be out
/// of that client's reach are [copied afresh](Self::copy_afresh).
#[derive(Debug)]
pub struct ExtentMemory {
    /// Registration of the memory with an adapter; ends with the lease. Dropped before the mapping.
    registration: Mutex<Option<MemoryRegistration>>,
    memory: Arc<Memory>,
    /// The lease's own id, if it is a [`view`](Self::view).
    view: Option<ExtentId>,
    /// Mover of bytes out of the memory and back, if there is one.
    residency: Option<Arc<dyn Residency>>,
    /// Flag set once, and read before each access. It publishes nothing else, so relaxed is enough.
    revoked: AtomicBool,
}

#[derive(Debug)]
struct Memory {
    id: ExtentId,
    bytes: u64,
    atomics: bool,
    /// True if clients may only read the memory.
    read_only: bool,
    /// Bytes of the file: those of the extent, and of its marks if it has some.
    file_bytes: u64,
    file: File,
    map: OnceLock<MmapRaw>,
    announcements: Announcements,
}

/// Place where threads of this process wait for a number on a board.
#[derive(Debug, Default)]
pub(crate) struct Announcements {
    waiting: Mutex<Waiters>,
    made: Condvar,
}

#[derive(Debug, Default)]
struct Waiters {
    /// Number of threads that sleep until there is news. Without any, no thread is notified.
    sleepers: usize,
    watchers: Vec<Weak<dyn Wake>>,
}

/// A thread that waits for more than one thing.
pub(crate) trait Wake: Send + Sync {
    /// Makes the thread look again, if it sleeps. It sees everything stored before the call.
    fn wake(&self);
}

impl Announcements {
    /// Longest sleep of a thread that has to look from time to time whether its wait is over.
    const NAP: Duration = Duration::from_millis(20);

    /// Wakes all that wait, after the number has been placed.
    pub(crate) fn tell(&self) {
        // A thread that has looked before the change and does not sleep yet holds the lock.
        let waiting = self.lock();
        waiting
            .watchers
            .iter()
            .filter_map(Weak::upgrade)
            .for_each(|watcher| watcher.wake());
        let sleepers = waiting.sleepers;
        drop(waiting);
        if sleepers > 0 {
            self.made.notify_all();
        }
    }

    /// Wakes `watcher`, too, from now on and as long as it lives.
    pub(crate) fn watch<W: Wake + 'static>(&self, watcher: &Arc<W>) {
        let mut waiting = self.lock();
        let is_it = |known: &Weak<dyn Wake>| ptr::addr_eq(known.as_ptr(), Arc::as_ptr(watcher));
        if !waiting.watchers.iter().any(is_it) {
            waiting.watchers.retain(|known| known.strong_count() > 0);
            let watcher: Weak<W> = Arc::downgrade(watcher);
            waiting.watchers.push(watcher);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Waiters> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `is_so`, while `stays`, and no longer than `until`. Returns the last `is_so`.
    pub(crate) fn wait(
        &self,
        until: Instant,
        is_so: &dyn Fn() -> bool,
        stays: &dyn Fn() -> bool,
    ) -> bool {
        if is_so() {
            return true;
        }
        let mut held = self.lock();
        loop {
            if is_so() {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || !stays() {
                return false;
            }
            held.sleepers += 1;
            let slept = self.made.wait_timeout(held, left.min(Self::NAP));
            held = slept.unwrap_or_else(PoisonError::into_inner).0;
            held.sleepers -= 1;
        }
    }
}

/// A mover of an extent's bytes: out of its memory while they are unused, and back.
///
/// A byte may be touched through the mapping only while it is *held*: a touched hole would read as
/// zeros and take memory that no limit counts. A thread that holds bytes waits for nothing
/// meanwhile, so that a hold is as short as one system call that does not block.
pub trait Residency: fmt::Debug + Send + Sync {
    /// Holds bytes in memory, from `offset` on and `len` at most. Returns their number.
    ///
    /// With `until` the first byte is brought in if it is elsewhere, so at least one is held.
    /// Bringing in begins before `until` and waits beyond it only for a disk that has begun to
    /// read. The caller holds nothing else then, or two callers could wait for each other. Without
    /// `until`, bytes are held only up to the first that is elsewhere, perhaps none.
    ///
    /// # Errors
    /// The reason why the first byte is not held. No byte is.
    fn hold(&self, offset: u64, len: u64, until: Option<Instant>) -> Result<u64, Absent>;

    /// Hands the `len` bytes at `offset` to `take` if they are elsewhere, and not worth bringing
    /// into memory for this READ alone. `take` waits for nothing. Returns `false` if the bytes are
    /// to be held instead.
    ///
    /// # Errors
    /// The errors of [`hold`](Self::hold), when `take` has not been called.
    fn pass(
        &self,
        offset: u64,
        len: u64,
        until: Instant,
        take: &mut dyn FnMut(&[u8]),
    ) -> Result<bool, Absent>;

    /// Ends a hold of the bytes that [`hold`](Self::hold) returned.
    fn let_go(&self, offset: u64, len: u64);

    /// Returns the extent's [`SegmentWords`], for a client that reaches the memory by itself. From
    /// now on that client may touch the bytes that the words mark as present.
    ///
    /// # Errors
    /// The kernel's error.
    fn share(&self) -> io::Result<&SegmentWords>;
}

/// Words of an extent's segments. Clients that share its memory can read them, and only the server
/// can write them.
#[derive(Debug)]
pub struct SegmentWords {
    file: File,
    map: MmapRaw,
}

impl SegmentWords {
    /// Makes words for an extent of `extent_bytes` bytes, of which none is present.
    ///
    /// # Errors
    /// The kernel's error: no descriptors left, or no memory.
    pub fn create(extent_bytes: u64) -> io::Result<Self> {
        let bytes = words_bytes(extent_bytes);
        let file = sealable(c"farpage-words", bytes)?;
        let map = MmapOptions::new().len(bytes as usize).map_raw(&file)?;
        map.advise(memmap2::Advice::DontFork)?;
        // From here on the kernel refuses writable mappings. The mapping above stays writable.
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals_to_read()))?;
        Ok(Self { file, map })
    }

    /// Sets which chunks of a segment are present. A client that sees the new word sees the bytes
    /// that were brought in before. Later accesses by this thread come after the word is visible.
    ///
    /// # Panics
    /// If the extent has no such segment.
    pub fn set(&self, segment: usize, word: SegmentWord) {
        // A locked instruction: loads that follow do not overtake it.
        word_at(&self.map, segment).swap(word.0, Ordering::SeqCst);
    }

    /// Returns the word that was set last.
    ///
    /// # Panics
    /// If the extent has no such segment.
    pub fn get(&self, segment: usize) -> SegmentWord {
        SegmentWord(word_at(&self.map, segment).load(Ordering::Relaxed))
    }

    /// Returns the words' place in memory, for an adapter.
    #[cfg(feature = "rdma")]
    pub(crate) fn place(&self) -> NonNull<[u8]> {
        let first = NonNull::new(self.map.as_mut_ptr()).expect("a mapping is not at address 0");
        NonNull::slice_from_raw_parts(first, self.map.len())
    }

    /// Returns a descriptor for a client, which may keep it for as long as it likes.
    ///
    /// # Errors
    /// The kernel's error: no descriptors left, or no `/proc`.
    pub fn lend(&self) -> io::Result<OwnedFd> {
        open_anew(&self.file, false).map(OwnedFd::from)
    }
}

/// Returns the memory that an extent of `extent_bytes` bytes takes beside its own if clients can
/// reach it by themselves while it is [`paged`](ExtentMemory::paged): its words and marks.
pub fn paging_bytes(extent_bytes: u64) -> u64 {
    let (begin, end) = marks(extent_bytes);
    words_bytes(extent_bytes) + end - begin
}

/// Returns the size of the file that has the words of an extent of `extent_bytes` bytes.
pub(crate) fn words_bytes(extent_bytes: u64) -> u64 {
    let segments = extent_bytes.div_ceil(SEGMENT_BYTES);
    (segments * u64::from(WORD_BYTES)).next_multiple_of(PAGE_BYTES)
}

/// Returns where the marks of an extent of `extent_bytes` bytes begin and end in its file.
pub(crate) fn marks(extent_bytes: u64) -> (u64, u64) {
    let begin = extent_bytes.next_multiple_of(PAGE_BYTES);
    let segments = extent_bytes.div_ceil(SEGMENT_BYTES);
    (
        begin,
        (begin + segments * MARK_BYTES).next_multiple_of(PAGE_BYTES),
    )
}

/// Returns the word of a segment in a mapping of [`words_bytes`].
///
/// # Panics
/// If the mapping has no such word.
pub(crate) fn word_at(map: &MmapRaw, segment: usize) -> &AtomicU64 {
    assert!(segment < map.len() / size_of::<AtomicU64>());
    // SAFETY:
    // - checked against the mapping, which begins at a page and lives as long as the reference;
    // - words are touched as atomics only, by every process; a mapping that can only be read is
    //   only loaded from.
    unsafe { &*map.as_ptr().cast::<AtomicU64>().add(segment) }
}

/// Returns the mark of a segment in a mapping of an extent's file. A client sets a chunk's bit when
/// it touches the chunk. The server does not see the touch, and moves out chunks without a bit.
///
/// # Panics
/// If the mapping has no such mark.
pub(crate) fn mark_at(map: &MmapRaw, extent_bytes: u64, segment: usize) -> &AtomicU32 {
    let at = marks(extent_bytes).0 as usize + segment * MARK_BYTES as usize;
    assert!(at + MARK_BYTES as usize <= map.len());
    // SAFETY: as in `word_at`; marks begin at a page and have 4 bytes each. Whatever a client
    // writes there only says which of its chunks leave first.
    unsafe { &*map.as_ptr().add(at).cast::<AtomicU32>() }
}

/// Reason why bytes cannot be brought into memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Absent {
    /// All memory was in use until the wait ended, or the disk was too slow.
    #[error("no memory came free for it in time, or its bytes did not come back in time")]
    NoRoom,
    /// The bytes could not be read back, or are not as they were stored.
    #[error("its bytes cannot be read back from where they were moved to")]
    Unreadable,
    /// The lease has ended.
    #[error("its lease has ended")]
    Released,
}

/// Command for the signal to a file lease's owner (fcntl(2)); `libc` has it for some targets only.
const F_SETSIG: libc::c_int = 10;

/// An extent's file, to look at without a lease.
#[derive(Clone, Debug)]
pub struct ExtentFile(Arc<Memory>);

impl ExtentFile {
    /// True if another process, or another part of this one, can still reach the bytes: the memory
    /// was [lent](ExtentMemory::lend), and is open or mapped.
    ///
    /// # Errors
    /// The kernel's error where it has no file leases.
    pub fn is_held_elsewhere(&self) -> io::Result<bool> {
        let ask = |command: libc::c_int, number: libc::c_int| {
            // SAFETY: the call takes three numbers, of which the first is a descriptor of ours.
            let answer = unsafe { libc::fcntl(self.0.file.as_raw_fd(), command, number) };
            Errno::result(answer)
        };
        // A process that opens the file while the file lease is held causes a signal to us. SIGIO,
        // the usual one, would end this process; SIGURG is ignored unless the program handles it.
        // Ending a lease forgets the choice.
        ask(F_SETSIG, libc::SIGURG)?;
        // The kernel gives a write lease only to the sole holder of an open file (fcntl(2)). It
        // delays other opens only until the next line.
        match ask(libc::F_SETLEASE, libc::F_WRLCK) {
            Ok(_) => {
                ask(libc::F_SETLEASE, libc::F_UNLCK)?;
                Ok(false)
            }
            Err(Errno::EAGAIN) => Ok(true),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Gives the physical memory back now, even while a process still maps it. Its bytes become
    /// zero.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn punch(&self) -> io::Result<()> {
        self.punch_range(0, self.0.file_bytes)
    }

    /// Punches `len` bytes at `offset`, like [`punch`](Self::punch).
    ///
    /// # Errors
    /// The kernel's error.
    pub fn punch_range(&self, offset: u64, len: u64) -> io::Result<()> {
        let how = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        Ok(fallocate(&self.0.file, how, offset as i64, len as i64)?)
    }

    /// Reads bytes without the mapping: holes read as zeros and stay holes.
    ///
    /// # Errors
    /// The kernel's error; `UnexpectedEof` beyond the end.
    pub fn read_at(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        self.0.file.read_exact_at(to, offset)
    }

    /// Writes bytes without the mapping.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn write_at(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        self.0.file.write_all_at(from, offset)
    }

    /// Returns the offset of the first physically backed byte at or behind `from`.
    pub fn next_data(&self, from: u64) -> Option<u64> {
        // Clients share the file's position: only the result of each call counts.
        let at = lseek(&self.0.file, from as i64, Whence::SeekData);
        at.ok().map(|at| at as u64)
    }

    /// Takes the marks of a segment: one bit for each chunk that clients that share the memory have
    /// touched since the last call.
    ///
    /// # Panics
    /// If the extent has no such segment, or was made without marks.
    pub fn take_marks(&self, segment: usize) -> u32 {
        match self.0.map() {
            Ok(map) => {
                let mark = mark_at(map, self.0.bytes, segment);
                match mark.load(Ordering::Relaxed) {
                    0 => 0,
                    _ => mark.swap(0, Ordering::Relaxed),
                }
            }
            // An extent that cannot be mapped is not lent either.
            Err(_) => 0,
        }
    }

    /// Returns the number of bytes of the file that are for marks.
    pub fn marks_bytes(&self) -> u64 {
        self.0.file_bytes - self.0.bytes
    }

    /// Returns the extent's length in bytes.
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// Returns the extent's id.
    pub fn id(&self) -> ExtentId {
        self.0.id
    }

    /// Returns the number of physically backed bytes, whichever process wrote them.
    pub fn resident_bytes(&self) -> u64 {
        // A block of `stat` has 512 bytes whatever the file system. fstat of a memfd cannot fail.
        let metadata = self.0.file.metadata();
        metadata.map_or(0, |metadata| metadata.blocks() * 512)
    }
}

/// An access beyond the extent's end, or after the lease has ended, or by an atomic whose offset is
/// no multiple of 8, or by an atomic to an extent that takes none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{len} bytes at {offset} are not in extent {extent} of {bytes} bytes, or its lease has ended, or an atomic is not at a multiple of 8, or the extent takes none"
)]
pub struct OutOfLease {
    extent: ExtentId,
    bytes: u64,
    offset: u64,
    len: u64,
}

/// Bytes of an extent for a system call to read or write. Keeps them mapped.
#[derive(Debug)]
pub(crate) struct ExtentSpan {
    lease: Arc<ExtentMemory>,
    address: *mut u8,
    len: usize,
}

impl ExtentMemory {
    /// Makes zeroed memory of `bytes` bytes. Nothing is physically backed until it is written.
    /// `atomics` says whether the memory takes atomics.
    ///
    /// # Errors
    /// The kernel's error: no descriptors left, or `bytes` is 0 or absurd.
    pub fn create(id: ExtentId, bytes: u64, atomics: bool) -> io::Result<Arc<Self>> {
        Self::make(id, bytes, atomics, |bytes| bytes)
    }

    /// Makes memory that many clients may hold at a time and none may change. It is written by this
    /// process alone, through a [`Board`](crate::areas::Board).
    ///
    /// # Errors
    /// The errors of [`create`](Self::create).
    pub fn create_to_read(id: ExtentId, bytes: u64) -> io::Result<Arc<Self>> {
        check_bytes(bytes)?;
        let made = sealable(c"farpage-board", bytes)?;
        let memory = Memory {
            id,
            bytes,
            atomics: false,
            read_only: true,
            file_bytes: bytes,
            file: open_anew(&made, true)?,
            map: OnceLock::new(),
            announcements: Announcements::default(),
        };
        memory.map()?;
        // From here on the kernel refuses writable mappings. The mapping above stays writable.
        fcntl(&made, FcntlArg::F_ADD_SEALS(seals_to_read()))?;
        Ok(Self::lease(Arc::new(memory), None))
    }

    /// Makes memory that is to be [`paged`](Self::paged), like [`create`](Self::create). Clients
    /// that share it can mark the chunks that they touch.
    ///
    /// # Errors
    /// The errors of [`create`](Self::create), and one if `bytes` is more than 16 TiB.
    pub fn create_with_marks(id: ExtentId, bytes: u64, atomics: bool) -> io::Result<Arc<Self>> {
        if bytes > MAX_PAGED_BYTES {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "an extent that may leave memory has at most 16 TiB",
            ));
        }
        Self::make(id, bytes, atomics, |bytes| marks(bytes).1)
    }

    fn make(
        id: ExtentId,
        bytes: u64,
        atomics: bool,
        file_bytes: fn(u64) -> u64,
    ) -> io::Result<Arc<Self>> {
        check_bytes(bytes)?;
        let file_bytes = file_bytes(bytes);
        let made = sealable(c"farpage-extent", file_bytes)?;
        // A client that could shrink the file would turn the server's accesses into SIGBUS.
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&made, FcntlArg::F_ADD_SEALS(seals))?;
        // The kernel's lease check counts only descriptions that were opened, and not the one of
        // `memfd_create`.
        let file = open_anew(&made, true)?;
        let memory = Memory {
            id,
            bytes,
            atomics,
            read_only: false,
            file_bytes,
            file,
            map: OnceLock::new(),
            announcements: Announcements::default(),
        };
        Ok(Self::lease(Arc::new(memory), None))
    }

    /// Returns the same memory in a handle whose bytes may be moved elsewhere. `keep` is given the
    /// file and returns the mover. For memory that was not lent yet.
    pub fn paged(&self, keep: impl FnOnce(ExtentFile) -> Arc<dyn Residency>) -> Arc<Self> {
        Self::lease(Arc::clone(&self.memory), Some(keep(self.file())))
    }

    fn lease(memory: Arc<Memory>, residency: Option<Arc<dyn Residency>>) -> Arc<Self> {
        Arc::new(Self {
            registration: Mutex::default(),
            memory,
            view: None,
            residency,
            revoked: AtomicBool::new(false),
        })
    }

    /// Returns the extent's id, or that of the [`view`](Self::view).
    pub fn id(&self) -> ExtentId {
        self.view.unwrap_or(self.memory.id)
    }

    /// Returns the extent's length in bytes.
    pub fn bytes(&self) -> u64 {
        self.memory.bytes
    }

    /// True if the memory takes atomics.
    pub fn has_atomics(&self) -> bool {
        self.memory.atomics && !self.is_read_only()
    }

    /// True if clients may only read the memory.
    pub fn is_read_only(&self) -> bool {
        self.memory.read_only || self.is_view()
    }

    /// True if this is a [`view`](Self::view).
    pub fn is_view(&self) -> bool {
        self.view.is_some()
    }

    /// True if the memory was made [to be read](Self::create_to_read).
    pub(crate) fn is_board(&self) -> bool {
        self.memory.read_only
    }

    /// Returns the number of physically backed bytes, whichever process wrote them.
    pub fn resident_bytes(&self) -> u64 {
        self.file().resident_bytes()
    }

    /// Returns the extent's file. It keeps the bytes, but is no lease.
    pub fn file(&self) -> ExtentFile {
        ExtentFile(Arc::clone(&self.memory))
    }

    /// Ends this lease: new accesses through this handle fail, and one that has begun may still
    /// finish. Waits for nothing. An adapter reaches the memory until
    /// [`deregister`](Self::deregister).
    pub fn revoke(&self) {
        self.revoked.store(true, Ordering::Relaxed);
    }

    /// Takes the memory from the adapter that knows it, after [`revoke`](Self::revoke). Adapters
    /// take milliseconds per GiB for that, so no lock that others need is held meanwhile.
    pub fn deregister(&self) {
        *self.registration() = None;
    }

    pub(crate) fn announcements(&self) -> &Announcements {
        &self.memory.announcements
    }

    /// Returns the mover of the memory's bytes, if there is one.
    #[cfg(feature = "rdma")]
    pub(crate) fn residency(&self) -> Option<&Arc<dyn Residency>> {
        self.residency.as_ref()
    }

    /// Calls `register` with all of the memory and its marks, to make it known to an adapter until
    /// the lease ends.
    ///
    /// # Errors
    /// The error of `register` or of the kernel; `NotFound` when the lease has ended meanwhile.
    #[cfg_attr(
        not(feature = "rdma"),
        expect(dead_code, reason = "without RDMA there is no adapter")
    )]
    pub(crate) fn register<T>(
        &self,
        register: impl FnOnce(NonNull<[u8]>) -> io::Result<(T, MemoryRegistration)>,
    ) -> io::Result<T> {
        let map = self.memory.map()?;
        let first = NonNull::new(map.as_mut_ptr()).expect("a mapping is not at address 0");
        let (told, made) = register(NonNull::slice_from_raw_parts(first, map.len()))?;
        // Under the lock that `deregister` takes after the flag is set: either it finds the
        // registration, or we find the flag.
        let mut registration = self.registration();
        if self.is_revoked() {
            return Err(io::ErrorKind::NotFound.into());
        }
        *registration = Some(made);
        Ok(told)
    }

    fn registration(&self) -> std::sync::MutexGuard<'_, Option<MemoryRegistration>> {
        self.registration
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a new handle on the same bytes, for the next lease.
    pub fn lease_anew(&self) -> Arc<Self> {
        Self::lease(Arc::clone(&self.memory), self.residency.clone())
    }

    /// Makes a lease of the same bytes that takes READs alone, beside the writer's lease. It has an
    /// id of its own, since one client may have several.
    pub fn view(&self, id: ExtentId) -> Arc<Self> {
        Arc::new(Self {
            registration: Mutex::default(),
            memory: Arc::clone(&self.memory),
            view: Some(id),
            residency: self.residency.clone(),
            revoked: AtomicBool::new(false),
        })
    }

    /// Copies the bytes to new memory with the same id, which no other process maps.
    ///
    /// A process that maps the old memory may write meanwhile: then some mix of old and new bytes
    /// is copied. Holes stay holes.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn copy_afresh(&self) -> io::Result<Arc<Self>> {
        let (old, fresh) = (
            &self.memory,
            Self::create(self.id(), self.bytes(), self.has_atomics())?,
        );
        let mut buf = vec![0; COPY_BYTES.min(old.bytes) as usize];
        let mut at = 0;
        while at < old.bytes {
            // Clients share the file's position: only the result of each call counts.
            at = match lseek(&old.file, at as i64, Whence::SeekData) {
                Ok(data) => data as u64,
                // Only holes follow.
                Err(Errno::ENXIO) => break,
                Err(errno) => return Err(errno.into()),
            };
            let len = (buf.len() as u64).min(old.bytes - at) as usize;
            let piece = &mut buf[..len];
            old.file.read_exact_at(piece, at)?;
            fresh.memory.file.write_all_at(piece, at)?;
            at += len as u64;
        }
        Ok(fresh)
    }

    /// True if the bytes may be elsewhere than in the extent's memory.
    pub fn is_paged(&self) -> bool {
        self.residency.is_some()
    }

    /// Returns a descriptor for a client that shares the memory. The client may keep it for good.
    ///
    /// # Errors
    /// The kernel's error: no descriptors left, or no `/proc`.
    pub fn lend(&self) -> io::Result<OwnedFd> {
        open_anew(&self.memory.file, !self.is_read_only()).map(OwnedFd::from)
    }

    /// Returns the descriptor of [`lend`](Self::lend), and that of the words of memory that is
    /// [paged](Self::is_paged).
    pub(crate) fn lend_all(&self) -> io::Result<Vec<OwnedFd>> {
        let mut fds = vec![self.lend()?];
        if let Some(residency) = &self.residency {
            fds.push(residency.share()?.lend()?);
        }
        Ok(fds)
    }

    /// Gives the physical memory back, like [`ExtentFile::punch`].
    ///
    /// # Errors
    /// The kernel's error.
    pub fn punch(&self) -> io::Result<()> {
        self.file().punch()
    }

    /// Copies bytes out of the extent.
    ///
    /// # Errors
    /// [`OutOfLease`]; nothing is copied.
    pub fn copy_out(&self, offset: u64, to: &mut [u8]) -> Result<(), OutOfLease> {
        let shared = self.address(offset, to.len() as u64)?;
        // SAFETY:
        // - source: checked against the mapping, which lives as long as `self`;
        // - destination: an exclusive slice of the same length, so the two cannot overlap;
        // - others may change the source meanwhile: then some mix of old and new bytes is copied,
        //   which is what a READ that races with a WRITE gives, and no reference to the shared
        //   bytes exists.
        unsafe { std::ptr::copy_nonoverlapping(shared.cast_const(), to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    /// Copies bytes into the extent.
    ///
    /// # Errors
    /// [`OutOfLease`]; nothing is copied.
    pub fn copy_in(&self, offset: u64, from: &[u8]) -> Result<(), OutOfLease> {
        let shared = self.address(offset, from.len() as u64)?;
        // SAFETY: as in `copy_out`, with the roles of source and destination exchanged; the mapping
        // is writable.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), shared, from.len()) };
        Ok(())
    }

    /// Changes the word at `offset` in one step, and returns its old value.
    ///
    /// # Errors
    /// [`OutOfLease`]; nothing is changed.
    pub fn atomic(&self, offset: u64, atomic: Atomic) -> Result<u64, OutOfLease> {
        let len = u64::from(WORD_BYTES);
        let word = self.address(offset, len)?.cast::<u64>();
        if !word.is_aligned() || !self.has_atomics() {
            return Err(self.outside(offset, len));
        }
        // SAFETY: eight bytes of the mapping, aligned as looked at above, and mapped as long as
        // `self`.
        Ok(unsafe { apply(word, atomic) })
    }

    /// Returns checked bytes of the extent for a system call.
    pub(crate) fn span(self: &Arc<Self>, offset: u64, len: u64) -> Result<ExtentSpan, OutOfLease> {
        let address = self.address(offset, len)?;
        Ok(ExtentSpan {
            lease: Arc::clone(self),
            address,
            len: len as usize,
        })
    }

    /// Returns the address of the bytes: valid for `len` bytes and as long as `self`.
    fn address(&self, offset: u64, len: u64) -> Result<*mut u8, OutOfLease> {
        let memory = &self.memory;
        let outside = self.outside(offset, len);
        let end = offset.checked_add(len).ok_or(outside)?;
        if end > memory.bytes || self.is_revoked() {
            return Err(outside);
        }
        let map = memory.map().map_err(|error| {
            let extent = memory.id;
            later(move || {
                tracing::error!(%extent, %error, "cannot map an extent; refusing access to it");
            });
            outside
        })?;
        // SAFETY: `offset + len` was checked against the length of the mapping.
        Ok(unsafe { map.as_mut_ptr().add(offset as usize) })
    }

    fn outside(&self, offset: u64, len: u64) -> OutOfLease {
        OutOfLease {
            extent: self.memory.id,
            bytes: self.memory.bytes,
            offset,
            len,
        }
    }

    fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Relaxed)
    }
}

/// Changes a word that other processes may change too, and returns its old value.
///
/// # Safety
/// `word` is aligned, and 8 bytes from there on are mapped and writable during the call.
pub(crate) unsafe fn apply(word: *mut u64, atomic: Atomic) -> u64 {
    // SAFETY:
    // - aligned and mapped, as the caller promises;
    // - no reference to shared memory exists except such atomics; a WRITE of the word meanwhile,
    //   which nobody should post, changes only which number is found.
    let word = unsafe { AtomicU64::from_ptr(word) };
    // Memory holds little-endian numbers, as this processor does. `AcqRel` gives the order of
    // operations over a network: after earlier work, and before work that follows the old value.
    match atomic {
        Atomic::FetchAdd(summand) => word.fetch_add(summand, Ordering::AcqRel),
        Atomic::CompareSwap { expected, new } => {
            let swapped = word.compare_exchange(expected, new, Ordering::AcqRel, Ordering::Acquire);
            swapped.unwrap_or_else(|found| found)
        }
    }
}

/// Returns the seals of memory that can be mapped to read only, and not resized.
fn seals_to_read() -> SealFlag {
    SealFlag::F_SEAL_SHRINK
        | SealFlag::F_SEAL_GROW
        | SealFlag::F_SEAL_FUTURE_WRITE
        | SealFlag::F_SEAL_SEAL
}

/// Checks that an extent can have `bytes` bytes: at most half of what can be addressed, so that
/// there is room for marks.
fn check_bytes(bytes: u64) -> io::Result<()> {
    match bytes {
        1.. if bytes <= isize::MAX as u64 / 2 => Ok(()),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("an extent cannot have {bytes} bytes"),
        )),
    }
}

/// Makes an empty file in memory of `bytes` bytes, to be sealed.
fn sealable(name: &std::ffi::CStr, bytes: u64) -> io::Result<File> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let file = File::from(memfd_create(name, flags)?);
    // Another user than the server's, who is lent a descriptor to read, cannot reopen it to write.
    // The server's own user can do as it likes with the server anyway.
    fchmod(&file, Mode::S_IRUSR | Mode::S_IWUSR)?;
    file.set_len(bytes)?;
    Ok(file)
}

/// Opens the same file by a description of its own.
fn open_anew(file: &File, to_write: bool) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let opened = File::options().read(true).write(to_write).open(path);
    opened.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => io::Error::new(error.kind(), "/proc is not mounted"),
        _ => error,
    })
}

impl Memory {
    fn map(&self) -> io::Result<&MmapRaw> {
        if let Some(map) = self.map.get() {
            return Ok(map);
        }
        let map = MmapOptions::new()
            .len(self.file_bytes as usize)
            .map_raw(&self.file)?;
        // Shared with a child, the mapping would only keep the memory alive.
        map.advise(memmap2::Advice::DontFork)?;
        // Another thread may have been first: then its mapping counts and ours goes.
        Ok(self.map.get_or_init(|| map))
    }
}

impl ExtentSpan {
    /// Returns the first byte's address; valid for as long as `self` and for `len` bytes.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.address
    }

    /// Returns the length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Copies `bytes` to the span's beginning. A thread that sees a later write sees `bytes`.
    ///
    /// # Panics
    /// If `bytes` is longer than the span.
    pub(crate) fn write(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.len, "{} bytes", bytes.len());
        // SAFETY: the span is mapped and writable for so many bytes as long as `self`; nobody has a
        // reference to them.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.address, bytes.len()) };
        fence(Ordering::Release);
    }

    /// Returns the lease of the bytes.
    pub(crate) fn lease(&self) -> &Arc<ExtentMemory> {
        &self.lease
    }

    /// Returns the mover that must hold the bytes while they are touched, if there is one.
    pub(crate) fn residency(&self) -> Option<&dyn Residency> {
        self.lease.residency.as_deref()
    }

    /// True if the lease has ended since.
    pub(crate) fn is_revoked(&self) -> bool {
        self.lease.is_revoked()
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::OpenOptionsExt, sync::atomic::AtomicBool, thread};

    use nix::unistd::ftruncate;

    use super::*;

    fn extent(bytes: u64) -> Arc<ExtentMemory> {
        ExtentMemory::create(ExtentId(1), bytes, true).expect("a memfd")
    }

    #[test]
    fn fresh_memory_is_zero_and_not_backed_until_written() {
        let memory = extent(1 << 20);
        let mut bytes = vec![1; 1 << 20];
        assert_eq!(memory.resident_bytes(), 0);
        memory.copy_in(4096, b"farpage").expect("in range");
        memory.copy_out(0, &mut bytes).expect("in range");
        assert_eq!(&bytes[4096..4103], b"farpage");
        assert!(
            bytes[..4096]
                .iter()
                .chain(&bytes[4103..])
                .all(|byte| *byte == 0)
        );
        assert!(memory.resident_bytes() >= 4096);
        memory.punch().expect("a memfd can be punched");
        assert_eq!(memory.resident_bytes(), 0);
    }

    #[test]
    fn accesses_stop_at_the_end() {
        let memory = extent(10_000);
        assert!(memory.copy_in(9_999, &[1]).is_ok());
        for (offset, len) in [
            (9_999, 2),
            (10_000, 1),
            (u64::MAX, 1),
            (0, 10_001),
            (u64::MAX - 1, 9),
        ] {
            assert!(
                memory.copy_in(offset, &vec![0; len]).is_err(),
                "{offset} {len}"
            );
            assert!(
                memory.copy_out(offset, &mut vec![0; len]).is_err(),
                "{offset} {len}"
            );
        }
    }

    #[test]
    fn atomics_change_words_of_the_extent_and_nothing_else() {
        let memory = extent(20);
        memory.copy_in(0, &[0xff; 20]).expect("in range");
        let add = |offset, summand| memory.atomic(offset, Atomic::FetchAdd(summand)).ok();
        assert_eq!(add(8, 2), Some(u64::MAX));
        let swap = |expected, new| {
            let swap = Atomic::CompareSwap { expected, new };
            memory.atomic(8, swap).ok()
        };
        assert_eq!(swap(7, 9), Some(1), "another value stays");
        assert_eq!(swap(1, 0x0908_0706_0504_0302), Some(1));
        let mut bytes = [0; 20];
        memory.copy_out(0, &mut bytes).expect("in range");
        assert_eq!(&bytes[7..17], &[0xff, 2, 3, 4, 5, 6, 7, 8, 9, 0xff]);
        for offset in [1, 4, 7, 9, 12, 16, 24, u64::MAX - 7] {
            assert_eq!(add(offset, 1), None, "{offset}");
        }
        let mut after = [0; 20];
        memory.copy_out(0, &mut after).expect("in range");
        assert_eq!(after, bytes);
        memory.revoke();
        assert_eq!(add(8, 1), None);
    }

    #[test]
    fn the_kernel_says_whether_a_client_has_let_go() {
        let memory = extent(8192);
        memory.copy_in(0, b"mapped here").expect("in range");
        let is_held = || memory.file().is_held_elsewhere().expect("file leases");
        assert!(!is_held(), "the server's own mapping counts for nothing");
        let lent = File::from(memory.lend().expect("a descriptor"));
        assert!(is_held());
        let copy = lent.try_clone().expect("a descriptor");
        drop(lent);
        assert!(is_held(), "a copy of the descriptor");
        let read_only = File::open(format!("/proc/self/fd/{}", copy.as_raw_fd()));
        let map = MmapOptions::new().map_raw_read_only(&read_only.expect("opened"));
        drop(copy);
        assert!(is_held(), "a mapping of a descriptor opened anew");
        drop(map);
        assert!(!is_held());
    }

    #[test]
    fn a_client_that_opens_its_memory_while_it_is_asked_about_harms_nobody() {
        let memory = extent(8192);
        let lent = File::from(memory.lend().expect("a descriptor"));
        // Neither open nor mapped, and a way to open it again.
        let known = File::options()
            .read(true)
            .custom_flags(libc::O_PATH)
            .open(format!("/proc/self/fd/{}", lent.as_raw_fd()))
            .expect("a descriptor");
        drop(lent);
        let path = format!("/proc/self/fd/{}", known.as_raw_fd());
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let again = File::options().read(true).write(true).open(&path);
                    drop(again.expect("opened"));
                }
            });
            // The kernel's signal to a lease's owner would end this process.
            let (mut held, mut free) = (0, 0);
            while held < 1000 || free < 1000 {
                match memory.file().is_held_elsewhere().expect("file leases") {
                    true => held += 1,
                    false => free += 1,
                }
            }
            done.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn nobody_can_resize_an_extent() {
        let memory = extent(8192);
        for bytes in [0, 4096, 1 << 20] {
            assert!(
                ftruncate(memory.lend().expect("a descriptor"), bytes).is_err(),
                "{bytes}"
            );
        }
        assert!(ExtentMemory::create(ExtentId(1), 0, true).is_err());
    }

    /// Maps memory that a client is lent to read. The client can neither write nor resize it.
    fn seen_only(lent: &File) -> MmapRaw {
        // Any holder of a descriptor can reopen it.
        let again = open_anew(lent, true).expect("its user may write it");
        for file in [lent, &again] {
            assert!(MmapOptions::new().map_raw(file).is_err());
            assert!(file.write_at(&[1; 8], 0).is_err());
            assert!(file.set_len(0).is_err());
        }
        MmapOptions::new().map_raw_read_only(lent).expect("memory")
    }

    #[test]
    fn clients_see_the_words_of_segments_and_cannot_write_them() {
        let words = SegmentWords::create(8 * SEGMENT_BYTES).expect("a memfd");
        let lent = File::from(words.lend().expect("a descriptor"));
        let seen = seen_only(&lent);
        words.set(3, SegmentWord(0).with(5));
        assert_eq!(word_at(&seen, 3).load(Ordering::Acquire), 5);
        assert_eq!(word_at(&seen, 0).load(Ordering::Acquire), 0);
    }

    #[test]
    fn memory_that_is_lent_to_read_cannot_be_written_by_who_holds_it() {
        let memory = ExtentMemory::create_to_read(ExtentId(1), 8192).expect("a memfd");
        let lent = File::from(memory.lend().expect("a descriptor"));
        let seen = seen_only(&lent);
        memory.copy_in(4096, &7u64.to_ne_bytes()).expect("its own");
        assert_eq!(word_at(&seen, 512).load(Ordering::Acquire), 7);
    }

    #[test]
    fn a_view_is_read_and_never_written() {
        let memory = extent(8192);
        let view = memory.view(ExtentId(7));
        assert_eq!((view.id(), memory.id()), (ExtentId(7), ExtentId(1)));
        assert!(view.is_read_only() && !view.has_atomics() && !memory.is_read_only());
        assert!(view.atomic(0, Atomic::FetchAdd(1)).is_err());
        let lent = File::from(view.lend().expect("a descriptor"));
        assert!(MmapOptions::new().map_raw(&lent).is_err());
        assert!(lent.write_at(&[1; 8], 0).is_err());
        let seen = MmapOptions::new().map_raw_read_only(&lent).expect("memory");
        memory.copy_in(4096, &7u64.to_ne_bytes()).expect("writable");
        assert_eq!(word_at(&seen, 512).load(Ordering::Acquire), 7);
        // The end of the reader's lease leaves the writer's alone.
        view.revoke();
        assert!(view.copy_out(0, &mut [0]).is_err());
        memory.copy_in(0, &[1]).expect("writable");
    }

    #[test]
    fn another_user_cannot_open_a_view_anew_to_write() {
        // SAFETY: asks who this is.
        if unsafe { libc::geteuid() } != 0 {
            eprintln!(
                "SKIPPED: another_user_cannot_open_a_view_anew_to_write: only root can act as another user"
            );
            return;
        }
        let memory = extent(8192);
        let lent = File::from(memory.view(ExtentId(7)).lend().expect("a descriptor"));
        let opened = thread::spawn(move || {
            // SAFETY: two numbers; it holds for this thread alone, and takes root's rights over
            // files from it.
            unsafe { libc::setfsuid(65534) };
            open_anew(&lent, true)
        });
        let refused = opened.join().expect("it does not panic");
        let error = refused.expect_err("the file is its owner's");
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn a_mark_is_taken_once() {
        let bytes = 2 * SEGMENT_BYTES + 1;
        let memory = ExtentMemory::create_with_marks(ExtentId(1), bytes, false).expect("a memfd");
        let file = memory.file();
        let map = memory.memory.map().expect("memory");
        mark_at(map, bytes, 2).fetch_or(6, Ordering::Relaxed);
        assert_eq!((file.take_marks(0), file.take_marks(2)), (0, 6));
        assert_eq!(file.take_marks(2), 0);
        assert!(
            memory.copy_out(bytes, &mut [0]).is_err(),
            "marks are no part of it"
        );
    }

    #[test]
    fn revoking_does_not_wait_for_an_adapter() {
        let memory = extent(8);
        let busy = memory.registration();
        let (revoked, is_revoked) = std::sync::mpsc::channel();
        let same = Arc::clone(&memory);
        let revoking = std::thread::spawn(move || {
            same.revoke();
            revoked.send(()).expect("the test waits");
        });
        let outcome = is_revoked.recv_timeout(std::time::Duration::from_secs(10));
        drop(busy);
        revoking.join().expect("it does not panic");
        outcome.expect("whoever revokes holds locks that all clients wait for");
        assert!(memory.copy_in(0, b"lost").is_err());
    }

    #[test]
    fn a_revoked_lease_fails_and_the_next_one_sees_the_bytes() {
        let memory = extent(8);
        memory.copy_in(0, b"kept").expect("in range");
        memory.revoke();
        assert!(memory.copy_in(0, b"lost").is_err());
        let next = memory.lease_anew();
        let mut bytes = [0; 4];
        next.copy_out(0, &mut bytes).expect("leased");
        assert_eq!(&bytes, b"kept");
    }
}
