//! [`RegPool`]: buffers carved from slabs that are registered once.
//!
//! The rule it keeps: a piece of a slab is in one place, either in a [`RegBuf`](super::RegBuf) or
//! in one cache. Pieces keep their size class for ever. Nothing is merged or given back before the
//! pool ends, so after warm-up nothing is registered any more. The downside: pieces of one class
//! cannot serve another, so a pool's memory is the sum of each class's peak.
//!
//! Threads have caches of their own; beyond [`CACHES`] threads they share. Each cache has a lock.
//! Only a thread whose own cache is empty contends for another's, and takes half of its pieces. The
//! locks are the standard library's, which never allocate.

use std::{
    array, fmt,
    ptr::NonNull,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use super::{
    error::RegError,
    registrar::{Access, DomainId, Registrar, Registrars},
    slab::{HUGE_PAGE_BYTES, PAGE_BYTES, Slab},
};

/// Length of the longest buffer.
pub const MAX_BUF_BYTES: usize = 1 << 30;

/// Lower bound of the class sizes. Sizes are multiples of a cache line, so that no two buffers
/// share one.
const CLASS_BYTES_MIN: usize = 256;
/// Number of classes per doubling: at most a fifth of a buffer is wasted.
const STEPS: usize = 4;
const CLASSES: usize = STEPS * (MAX_BUF_BYTES.ilog2() - CLASS_BYTES_MIN.ilog2()) as usize;
/// Number of caches: no known machine runs more threads of a runtime. Each takes 2 KiB.
const CACHES: usize = 16;

/// Settings of a pool.
#[derive(Clone, Debug)]
pub struct RegPoolOptions {
    /// Size of a slab, mapped and registered at once: rounded up to a multiple of 2 MiB, below 2
    /// MiB to a multiple of 4 KiB. Larger buffers get larger slabs. Default: 2 MiB.
    pub slab_bytes: usize,
    /// Upper bound of the pool's memory. Default: no cap.
    pub bytes_max: usize,
    /// Users of the memory. Default: [`Access::Local`].
    pub access: Access,
    /// True to register a slab when a buffer of it is first used with an adapter, not when it is
    /// mapped. Default: false, so that the data path never registers anything.
    pub lazy: bool,
}

impl Default for RegPoolOptions {
    fn default() -> Self {
        Self {
            slab_bytes: HUGE_PAGE_BYTES,
            bytes_max: usize::MAX,
            access: Access::Local,
            lazy: false,
        }
    }
}

/// Counters of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RegPoolStats {
    /// Successful calls to a registrar: for slabs and for imported memory.
    pub registrations: u64,
    /// Number of slabs made.
    pub slabs: u64,
    /// Bytes of the slabs. Imported memory is not counted.
    pub bytes: u64,
    /// Number of buffers handed out.
    pub acquisitions: u64,
    /// Number of buffers that came from the cache of the calling thread.
    pub cache_hits: u64,
}

/// A pool of registered buffers. Clones are handles on the same pool, which ends with its last
/// handle and its last buffer.
#[derive(Clone)]
pub struct RegPool(pub(super) Arc<Inner>);

pub(super) struct Inner {
    pub(super) options: RegPoolOptions,
    pub(super) registrars: Registrars,
    caches: [Cache; CACHES],
    carving: Mutex<Carving>,
    /// Number of registrations made. Relaxed: a figure, nothing is published through it.
    pub(super) registrations: AtomicU64,
}

/// Free pieces of one thread, on cache lines of its own.
#[repr(align(128))]
#[derive(Default)]
struct Cache(Mutex<FreePieces>);

struct FreePieces {
    by_class: [Vec<SlabPiece>; CLASSES],
    acquisitions: u64,
    hits: u64,
}

/// A part of a slab that belongs to one class.
pub(super) struct SlabPiece {
    pub(super) slab: Arc<Slab>,
    offset: usize,
    class: usize,
}

/// Slabs with uncarved room. The lock is held while a slab is mapped and registered, so that two
/// threads in need make one slab.
#[derive(Default)]
struct Carving {
    /// Slabs, each with the offset of its uncarved part.
    slabs: Vec<(Arc<Slab>, usize)>,
    bytes: usize,
}

impl RegPool {
    /// True if the pool's buffers are registered with a protection domain.
    pub fn has_domain(&self, domain: DomainId) -> bool {
        let mut registrars = self.0.registrars.iter();
        registrars.any(|registrar| registrar.domain() == domain)
    }

    /// Makes a pool for the protection domains of `registrars`. It has no memory until some is
    /// needed. Without registrars its memory is never registered.
    pub fn new(
        registrars: impl IntoIterator<Item = Arc<dyn Registrar>>,
        options: RegPoolOptions,
    ) -> Self {
        let mut distinct: Vec<Arc<dyn Registrar>> = Vec::new();
        for registrar in registrars {
            if distinct
                .iter()
                .all(|known| known.domain() != registrar.domain())
            {
                distinct.push(registrar);
            }
        }
        Self(Arc::new(Inner {
            options,
            registrars: distinct.into(),
            caches: Default::default(),
            carving: Mutex::default(),
            registrations: AtomicU64::new(0),
        }))
    }

    /// Returns the pool's counters.
    pub fn stats(&self) -> RegPoolStats {
        let (slabs, bytes) = {
            let carving = lock(&self.0.carving);
            (carving.slabs.len() as u64, carving.bytes as u64)
        };
        let mut stats = RegPoolStats {
            registrations: self.0.registrations.load(Ordering::Relaxed),
            slabs,
            bytes,
            ..RegPoolStats::default()
        };
        for cache in &self.0.caches {
            let free = lock(&cache.0);
            stats.acquisitions += free.acquisitions;
            stats.cache_hits += free.hits;
        }
        stats
    }
}

impl fmt::Debug for RegPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegPool")
            .field("registrars", &self.0.registrars)
            .field("stats", &self.stats())
            .finish()
    }
}

impl Inner {
    /// Takes a piece of at least `bytes` bytes out of the calling thread's cache, out of another's,
    /// or out of a slab.
    pub(super) fn take(&self, bytes: usize) -> Result<SlabPiece, RegError> {
        let class = class_of(bytes);
        let own = this_cache();
        match self.caches[own]
            .pop(class)
            .or_else(|| self.steal(own, class))
        {
            Some(piece) => Ok(piece),
            None => self.carve(class),
        }
    }

    /// Takes half of another thread's pieces, and returns one of them.
    fn steal(&self, own: usize, class: usize) -> Option<SlabPiece> {
        // No two locks are held at once.
        let mut taken = (1..CACHES).find_map(|i| {
            let mut free = lock(&self.caches[(own + i) % CACHES].0);
            let pieces = &mut free.by_class[class];
            let rest = pieces.len() / 2;
            (!pieces.is_empty()).then(|| pieces.split_off(rest))
        })?;
        let piece = taken.pop();
        lock(&self.caches[own].0).by_class[class].append(&mut taken);
        piece
    }

    /// Cuts a new piece, out of a new slab if no slab has room.
    fn carve(&self, class: usize) -> Result<SlabPiece, RegError> {
        let bytes = class_bytes(class);
        let mut carving = lock(&self.carving);
        let room = |(slab, used): &(Arc<Slab>, usize)| used + bytes <= slab.bytes();
        let at = match carving.slabs.iter().position(room) {
            Some(at) => at,
            None => {
                let slab = self.new_slab(bytes, carving.bytes)?;
                carving.bytes += slab.bytes();
                carving.slabs.push((Arc::new(slab), 0));
                carving.slabs.len() - 1
            }
        };
        let (slab, used) = &mut carving.slabs[at];
        let (slab, offset) = (Arc::clone(slab), *used);
        *used += bytes;
        Ok(SlabPiece {
            slab,
            offset,
            class,
        })
    }

    fn new_slab(&self, piece_bytes: usize, used_bytes: usize) -> Result<Slab, RegError> {
        let wanted = self.options.slab_bytes.max(1);
        let unit = match wanted.max(piece_bytes) {
            HUGE_PAGE_BYTES.. => HUGE_PAGE_BYTES,
            _ => PAGE_BYTES,
        };
        let least = piece_bytes.next_multiple_of(unit);
        let wanted = wanted.next_multiple_of(unit);
        let left = self.options.bytes_max.saturating_sub(used_bytes);
        let bytes = if wanted.max(least) <= left {
            wanted.max(least)
        } else if least <= left {
            least
        } else {
            return Err(RegError::Full {
                asked_bytes: piece_bytes,
                used_bytes,
                bytes_max: self.options.bytes_max,
            });
        };
        let slab = Slab::new(bytes, self.options.access, &self.registrars)
            .map_err(|source| RegError::Map { bytes, source })?;
        if !self.options.lazy {
            slab.registered.register_all(&self.registrations)?;
        }
        Ok(slab)
    }

    /// Puts a piece into the cache of the thread that dropped the buffer.
    pub(super) fn put(&self, piece: SlabPiece) {
        let class = piece.class;
        lock(&self.caches[this_cache()].0).by_class[class].push(piece);
    }
}

impl Cache {
    fn pop(&self, class: usize) -> Option<SlabPiece> {
        let mut free = lock(&self.0);
        let piece = free.by_class[class].pop();
        free.acquisitions += 1;
        free.hits += u64::from(piece.is_some());
        piece
    }
}

impl Default for FreePieces {
    fn default() -> Self {
        Self {
            by_class: array::from_fn(|_| Vec::new()),
            acquisitions: 0,
            hits: 0,
        }
    }
}

impl SlabPiece {
    /// Returns the piece's first `bytes` bytes: its own alone, and valid as long as it is.
    pub(super) fn memory(&self, bytes: usize) -> NonNull<[u8]> {
        debug_assert!(bytes <= class_bytes(self.class));
        self.slab.at(self.offset, bytes)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A registrar that panicked left everything as it was.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the index of the calling thread's cache.
fn this_cache() -> usize {
    // Relaxed: only that numbers differ matters.
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static OWN: usize = NEXT.fetch_add(1, Ordering::Relaxed) % CACHES);
    // A buffer that is dropped while its thread ends may come after this: any cache will do.
    OWN.try_with(|own| *own).unwrap_or(0)
}

/// Returns the class whose pieces hold `bytes` bytes. There are four classes between each power of
/// two and the next.
fn class_of(bytes: usize) -> usize {
    let below = bytes.max(CLASS_BYTES_MIN + 1) - 1;
    let doubling = below.ilog2();
    let step = (below - (1 << doubling)) >> (doubling - STEPS.ilog2());
    (doubling - CLASS_BYTES_MIN.ilog2()) as usize * STEPS + step
}

/// Returns the size of a class's pieces.
fn class_bytes(class: usize) -> usize {
    let doubling = CLASS_BYTES_MIN << (class / STEPS);
    doubling + (class % STEPS + 1) * (doubling / STEPS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_hold_what_they_are_for_and_waste_a_fifth_at_most() {
        for bytes in (1..100_000).chain([1 << 20, (1 << 20) + 1, MAX_BUF_BYTES - 1, MAX_BUF_BYTES])
        {
            let class = class_of(bytes);
            let room = class_bytes(class);
            assert!(room >= bytes && class < CLASSES, "{bytes} in {room}");
            assert!(
                bytes <= CLASS_BYTES_MIN || room * 4 < bytes * 5,
                "{bytes} in {room}"
            );
            assert_eq!(room % 64, 0);
            assert!(class == 0 || class_bytes(class - 1) < bytes.max(CLASS_BYTES_MIN + 1));
        }
    }
}
