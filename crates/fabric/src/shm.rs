//! The client half of shared memory: READ and WRITE are copies between a buffer and the extent's
//! mapping, and atomics the processor's own, one in each poll, so that the caller can use what was
//! copied while it is in the caches.
//!
//! The law of this file: a mapping holds bytes that others may change, so no reference to them is
//! made; they are copied through bounds-checked raw pointers.
//!
//! The server takes no part, so channels go on while it is stopped, and after its process has
//! ended: nobody else can reach the memory then. They stop when the session's
//! [`Death`](crate::attachment::Death) says that the server has ended the session. They also stop
//! when the server's process has ended and the last answered renewal is older than the lease, since
//! the server may have ended the session first. A client that was stopped for longer than its lease
//! may copy into memory that is no longer its own before it hears of that. Memory of an unnamed
//! region is never lent twice, so that nobody else reads it. Memory of a named region is copied
//! before another user gets it. The same user's next process checks what it reads against the
//! hashes of its page map.

use std::{
    collections::{HashMap, VecDeque},
    fs::File,
    io,
    os::fd::OwnedFd,
    sync::{
        Arc, RwLock,
        atomic::{AtomicBool, Ordering, fence},
    },
    time::Instant,
};

use farpage_wire::{ExtentId, control::Lease};
use memmap2::{MmapOptions, MmapRaw};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};

use crate::{
    Buf, Busy, Channel, ChannelError, Completion, Op, Verb, Wait,
    attachment::Attachment,
    channel::{check_len, is_aligned, refused},
    log::later,
    memory,
};

/// How many operations may wait: enough for any caller's batch.
const DEPTH: usize = 64;

/// Extents that a channel remembers without allocating, as a signal handler must: 16 GiB to 1 TiB,
/// as a region asks for them.
const CACHED: usize = 1024;

const NO_PANIC: &str = "nothing panics under this lock";

/// An extent in this process.
#[derive(Debug)]
pub(crate) struct Mapped {
    id: ExtentId,
    map: MmapRaw,
    atomics: bool,
    /// Set when the lease is given back, before the memory is replaced: a channel that finds it
    /// unset after a copy has copied the server's memory.
    released: AtomicBool,
}

/// The extents of one session; channels keep copies, so that its lock is not on the data path. It
/// is the standard library's, which never allocates: a signal handler may look an extent up.
#[derive(Debug, Default)]
pub(crate) struct Directory(RwLock<HashMap<ExtentId, Arc<Mapped>>>);

impl Directory {
    /// Maps a lease that the server passed.
    pub(crate) fn insert(&self, lease: Lease, fd: OwnedFd) -> io::Result<()> {
        let file = File::from(fd);
        let seals = SealFlag::from_bits_truncate(fcntl(&file, FcntlArg::F_GET_SEALS)?);
        // Memory that could shrink would turn a copy into SIGBUS.
        if !seals.contains(SealFlag::F_SEAL_SHRINK) || file.metadata()?.len() < lease.bytes {
            return Err(io::Error::other(
                "the server passed memory that is not sealed or too short",
            ));
        }
        let map = MmapOptions::new()
            .len(lease.bytes as usize)
            .map_raw(&file)?;
        map.advise(memmap2::Advice::DontFork)?;
        let mapped = Mapped {
            id: lease.id,
            map,
            atomics: lease.atomics,
            released: AtomicBool::new(false),
        };
        self.0
            .write()
            .expect(NO_PANIC)
            .insert(lease.id, Arc::new(mapped));
        Ok(())
    }

    /// Unmaps a lease, also one that an idle channel has cached: the server charges this program
    /// for the memory as long as it is mapped.
    pub(crate) fn remove(&self, id: ExtentId) {
        let mapped = self.0.write().expect(NO_PANIC).remove(&id);
        if let Some(mapped) = mapped {
            mapped.unmap();
        }
    }

    /// Lets go of all leases.
    pub(crate) fn clear(&self) {
        let all = std::mem::take(&mut *self.0.write().expect(NO_PANIC));
        all.values().for_each(|mapped| mapped.unmap());
    }
}

impl Mapped {
    /// Puts memory of this process in the place of the server's. A copy that is under way goes on
    /// there, and finds afterwards that it is refused.
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
            // It stays mapped until the last channel has forgotten it.
            let error = io::Error::last_os_error();
            let extent = self.id;
            later(move || tracing::warn!(%extent, %error, "cannot let go of an extent at once"));
        }
    }
}

/// Copies of one thread.
pub(crate) struct ShmChannel<B> {
    attachment: Attachment,
    directory: Arc<Directory>,
    /// What [`Directory`] held when it was last asked.
    cache: HashMap<ExtentId, Arc<Mapped>>,
    ops: VecDeque<Op<B>>,
}

impl<B: Buf> ShmChannel<B> {
    pub(crate) fn new(attachment: Attachment, directory: Arc<Directory>) -> Self {
        Self {
            attachment,
            directory,
            cache: HashMap::with_capacity(CACHED),
            ops: VecDeque::with_capacity(DEPTH),
        }
    }

    fn copy(&mut self, op: &mut Op<B>) -> Result<(), ChannelError> {
        if let Some(reason) = self.attachment.death.loss() {
            return Err(self.attachment.lost(reason));
        }
        let len = op.len as usize;
        let (offset, extent) = (op.offset, op.extent);
        let aligned = is_aligned(op);
        let is_atomic = matches!(op.verb, Verb::Atomic(_));
        let mapped = self.mapped(extent).filter(|mapped| {
            aligned
                && (!is_atomic || mapped.atomics)
                && offset
                    .checked_add(len as u64)
                    .is_some_and(|end| end <= mapped.map.len() as u64)
        });
        let Some(mapped) = mapped else {
            return Err(refused(&self.attachment.endpoint, op));
        };
        // SAFETY: the filter above checked `offset + len` against the mapping, so `offset` is
        // inside or at its end.
        let shared = unsafe { mapped.map.as_mut_ptr().add(offset as usize) };
        match op.verb {
            Verb::Read => {
                let local = &mut op.buf.as_mut()[..len];
                // SAFETY:
                // - source: `len` bytes of the mapping, checked above, kept mapped by the `Arc` in
                //   the cache;
                // - destination: an exclusive slice of `len` bytes; memory of the server's extents
                //   is never a buffer of ours, so the two do not overlap;
                // - a peer may change the source meanwhile, which only changes which bytes arrive.
                unsafe { std::ptr::copy_nonoverlapping(shared, local.as_mut_ptr(), len) };
                // Pairs with a release store by the memory's owner: what it did before is seen by
                // what follows.
                fence(Ordering::Acquire);
            }
            Verb::Write => {
                let local = &op.buf.as_ref()[..len];
                // Whoever sees these bytes sees those of the WRITEs before.
                fence(Ordering::Release);
                // SAFETY: as above with source and destination exchanged; the mapping is writable.
                unsafe { std::ptr::copy_nonoverlapping(local.as_ptr(), shared, len) };
            }
            Verb::Atomic(atomic) => {
                // SAFETY: 8 bytes of the mapping, as above, and aligned, since its first byte and
                // the offset are.
                let old = unsafe { memory::apply(shared.cast(), atomic) };
                op.buf.as_mut()[..len].copy_from_slice(&old.to_le_bytes());
            }
        }
        // After the copy: the memory may have been replaced during it. Whoever copied from the
        // replacement finds what was set before it was made.
        fence(Ordering::Acquire);
        match mapped.released.load(Ordering::Relaxed) {
            true => Err(refused(&self.attachment.endpoint, op)),
            false => Ok(()),
        }
    }

    fn mapped(&mut self, id: ExtentId) -> Option<&Mapped> {
        let cached = self
            .cache
            .get(&id)
            .is_some_and(|mapped| !mapped.released.load(Ordering::Relaxed));
        if !cached {
            // Rare: the time to forget what was released, or the cache would keep it mapped.
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
        if self.ops.len() == DEPTH {
            return Err(Busy(op));
        }
        check_len(&op);
        self.ops.push_back(op);
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Completion<B>>) -> usize {
        let Some(mut op) = self.ops.pop_front() else {
            return 0;
        };
        let result = self.copy(&mut op);
        done.push(Completion {
            tag: op.tag,
            verb: op.verb,
            buf: op.buf,
            result,
        });
        1
    }

    fn writes_in_order(&self) -> bool {
        true
    }

    fn in_flight(&self) -> usize {
        self.ops.len()
    }

    fn wait(&self) -> Wait<'_> {
        Wait {
            until: (!self.ops.is_empty()).then(Instant::now),
            ..Wait::default()
        }
    }
}
