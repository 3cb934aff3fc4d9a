//! [`ExtentMemory`]: the memory of one extent on the server's side, a sealed memfd.
//!
//! The law of this folder: clients that share the bytes may change them at any time, so no
//! reference to the bytes is ever made. They are touched only through bounds-checked raw copies and
//! by system calls that are given raw addresses. Rights to extents are left to the
//! [`Host`](crate::host::Host).
//!
//! The server and each client that is lent the memory over shared memory have *open file
//! descriptions* of their own, made through `/proc/self/fd`. So the kernel knows whether a client
//! has let go of the memory, including the client's mappings, duplicated descriptors and children:
//! see [`ExtentFile::is_held_elsewhere`].

mod file;
mod memfd;
mod residency;
#[cfg(test)]
mod tests;
mod words;

use std::{
    fs::File,
    io,
    os::{fd::OwnedFd, unix::fs::FileExt},
    ptr::NonNull,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Instant,
};

use farpage_wire::{Atomic, ExtentId, data::WORD_BYTES, segment::CHUNK_BYTES};
use nix::{
    errno::Errno,
    unistd::{Whence, lseek},
};

#[cfg(feature = "rdma")]
pub(crate) use self::words::MARK_BYTES;
pub use self::{
    file::ExtentFile,
    residency::{Absent, Residency},
    words::{SegmentWords, paging_bytes},
};
use self::{
    file::Memory,
    memfd::{check_sealed, open_anew, seal, seal_to_read, sealable},
};
pub(crate) use self::{
    residency::HeldBytes,
    words::{mark_at, marks, word_at, words_bytes},
};
use crate::{exchange::announcements::Announcements, log::later, regmem::MemoryRegistration};

/// Size of the largest extent that can be [`paged`](ExtentMemory::paged): a client keeps a table of
/// its segments.
pub(crate) const MAX_PAGED_BYTES: u64 = 16 << 40;

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
        let mut memory = Memory::new(id, bytes, open_anew(&made, true)?, bytes);
        memory.read_only = true;
        memory.map()?;
        // The mapping above stays writable.
        seal_to_read(&made)?;
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
        seal(&made)?;
        // The kernel's lease check counts only descriptions that were opened, and not the one of
        // `memfd_create`.
        let file = open_anew(&made, true)?;
        let mut memory = Memory::new(id, bytes, file, file_bytes);
        memory.atomics = atomics;
        Ok(Self::lease(Arc::new(memory), None))
    }

    /// Takes over memory of an earlier process, whose open file description `file` is. The memory
    /// is not [paged](Self::paged), and has `marks` if it was.
    ///
    /// # Errors
    /// The file is no such memory.
    pub fn inherited(
        id: ExtentId,
        bytes: u64,
        atomics: bool,
        has_marks: bool,
        file: OwnedFd,
    ) -> io::Result<Arc<Self>> {
        check_bytes(bytes)?;
        let file_bytes = match has_marks {
            true if bytes > MAX_PAGED_BYTES => return Err(io::ErrorKind::InvalidInput.into()),
            true => marks(bytes).1,
            false => bytes,
        };
        let file = File::from(file);
        check_sealed(&file, file_bytes)?;
        let mut memory = Memory::new(id, bytes, file, file_bytes);
        memory.atomics = atomics;
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

    fn registration(&self) -> MutexGuard<'_, Option<MemoryRegistration>> {
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

    /// Reads bytes for the server itself, also after the lease has ended. Bytes that are elsewhere
    /// are waited for until `until`.
    ///
    /// # Errors
    /// The kernel's error, or the reason why the bytes are [absent](Absent).
    pub fn read_own(&self, offset: u64, to: &mut [u8], until: Instant) -> io::Result<()> {
        let Some(residency) = self.residency.as_deref() else {
            return self.file().read_at(offset, to);
        };
        let mut done = 0;
        while done < to.len() {
            let at = offset + done as u64;
            // To the end of the chunk: no more can be passed on.
            let here = (CHUNK_BYTES - at % CHUNK_BYTES).min((to.len() - done) as u64) as usize;
            let piece = &mut to[done..][..here];
            let mut copy = |bytes: &[u8]| piece.copy_from_slice(bytes);
            let passed = residency.pass(at, here as u64, until, &mut copy);
            if !passed.map_err(io::Error::other)? {
                let held = HeldBytes::take(residency, at, here as u64, Some(until));
                let held = held.map_err(io::Error::other)?;
                let piece = &mut piece[..held.len as usize];
                self.file().read_at(at, piece)?;
                done += piece.len();
                continue;
            }
            done += here;
        }
        Ok(())
    }

    /// Writes bytes for the server itself into memory that was not lent yet. Room is waited for
    /// until `until`.
    ///
    /// # Errors
    /// The errors of [`read_own`](Self::read_own).
    pub fn write_own(&self, offset: u64, from: &[u8], until: Instant) -> io::Result<()> {
        let Some(residency) = self.residency.as_deref() else {
            return self.file().write_at(offset, from);
        };
        let mut done = 0;
        while done < from.len() {
            let (at, left) = (offset + done as u64, from.len() - done);
            let held = HeldBytes::take(residency, at, left as u64, Some(until));
            let held = held.map_err(io::Error::other)?;
            self.file()
                .write_at(at, &from[done..][..held.len as usize])?;
            done += held.len as usize;
        }
        Ok(())
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

impl ExtentSpan {
    /// Returns the first byte's address; valid for as long as `self` and for `len` bytes.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.address
    }

    /// Returns the length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
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
