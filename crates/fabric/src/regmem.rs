//! Registered memory that is reused explicitly: [`RegPool`] and its buffers, [`RegBuf`].
//!
//! The rule it keeps: registered memory has an owner that outlives its registration. Slabs are
//! mapped, registered once and kept. Buffers are carved from them, move into operations, come back
//! with their completions, and return to the pool when they are dropped. The same type serves
//! fabrics without an adapter, so no caller asks which fabric it is on.
//!
//! Message-passing libraries cache registrations by address instead. Memory that is freed and
//! mapped again has the old address and other pages, and the adapter goes on writing to the old
//! ones (Levy et al., "The Case for Explicit Reuse Semantics for RDMA Communication"). Here the
//! compiler refuses such a program. A buffer that is in an operation is out of reach:
//!
//! ```compile_fail,E0382
//! # use farpage_fabric::{ExtentId, Op, Verb, regmem::{RegPool, RegPoolOptions}};
//! let pool = RegPool::new([], RegPoolOptions::default());
//! let mut buf = pool.acquire(4096).expect("memory");
//! let op = Op { tag: 0, verb: Verb::Read, extent: ExtentId(1), offset: 0, len: 4096, buf };
//! buf.as_mut()[0] = 1; // it has moved into the operation
//! # drop(op);
//! ```
//!
//! Imported memory cannot be freed, resized or mapped anew while it is registered, neither by its
//! former owner
//!
//! ```compile_fail,E0382
//! # use farpage_fabric::regmem::{RegPool, RegPoolOptions};
//! let pool = RegPool::new([], RegPoolOptions::default());
//! let memory = vec![0; 4096];
//! let buf = pool.import(memory).expect("registered");
//! drop(memory); // the buffer owns it
//! # drop(buf);
//! ```
//!
//! nor by an owner that only lent it:
//!
//! ```compile_fail,E0597
//! # use farpage_fabric::regmem::{RegPool, RegPoolOptions};
//! let pool = RegPool::new([], RegPoolOptions::default());
//! let mut memory = vec![0; 4096];
//! // A loan may end before the buffer does.
//! let buf = pool.import(&mut memory).expect("registered");
//! # drop(buf);
//! ```
//!
//! A program that works:
//!
//! ```
//! # use farpage_fabric::regmem::{RegPool, RegPoolOptions};
//! let pool = RegPool::new([], RegPoolOptions::default());
//! let mut buf = pool.acquire(4096)?;
//! buf.as_mut().fill(7);
//! drop(buf);
//! let again = pool.acquire(4096)?;
//! assert_eq!((pool.stats().slabs, pool.stats().cache_hits), (1, 1));
//! # drop(again);
//! # Ok::<(), farpage_fabric::regmem::RegError>(())
//! ```

mod pool;
mod registrar;
mod slab;

use std::{fmt, io, ptr::NonNull, sync::Arc};

use self::pool::{Foreign, Inner, Piece};
pub use self::{
    pool::{MAX_BUF_BYTES, RegPool, RegPoolOptions, RegPoolStats},
    registrar::{DomainId, Keys, NullRegistrar, Registrar, Registration},
};

farpage_wire::debug_as_display!(RegError);

/// The registrars of a pool, one per protection domain.
type Registrars = Arc<[Arc<dyn Registrar>]>;

/// Users of registered memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// The process itself. A peer that guesses a key cannot reach the memory.
    #[default]
    Local,
    /// Peers, too, by READ and WRITE. The bytes may change at any time: touch them through raw
    /// pointers only.
    Remote,
    /// Peers, too, by READ, WRITE and atomics.
    RemoteAtomic,
    /// Peers, too, by READ only.
    RemoteRead,
}

/// Reason why there is no registered memory.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum RegError {
    /// The system gave no memory.
    #[error("cannot map {bytes} bytes for registered memory: {source}")]
    Map {
        /// Bytes asked for.
        bytes: usize,
        /// Error from the system.
        r#source: io::Error,
    },
    /// The adapter did not take the memory.
    #[error("cannot register {bytes} bytes with {registrar}: {source}{advice}")]
    Register {
        /// Bytes of the memory.
        bytes: usize,
        /// Registrar that was asked.
        registrar: String,
        /// Error from the system.
        r#source: io::Error,
        /// Remedy, if it is known.
        advice: String,
    },
    /// The pool would exceed its cap.
    #[error(
        "registered memory is at its cap: {asked_bytes} more bytes do not fit into {bytes_max}, of which {used_bytes} are taken; drop \
         buffers of this size, or raise `bytes_max`"
    )]
    Full {
        /// Bytes asked for, as the pool rounds them.
        asked_bytes: usize,
        /// Bytes of the pool's slabs.
        used_bytes: usize,
        /// Cap of the pool.
        bytes_max: usize,
    },
}

/// A buffer in registered memory. Goes back to its pool when it is dropped.
pub struct RegBuf {
    /// Bytes of this buffer alone, valid as long as `home`.
    memory: NonNull<[u8]>,
    pool: Arc<Inner>,
    home: Home,
}

enum Home {
    /// A piece of the pool's. `None` only while it is being dropped.
    Pool(Option<Piece>),
    Foreign(Box<Foreign>),
    /// A part of a buffer that was [split](RegBuf::split). The whole is not touched meanwhile.
    Part(Arc<RegBuf>),
}

// SAFETY: it owns its bytes as a `Vec<u8>` does; the parts that it consists of are `Send`.
unsafe impl Send for RegBuf {}
// SAFETY: a shared reference gives shared access to the bytes only.
unsafe impl Sync for RegBuf {}

impl RegBuf {
    fn pooled(pool: Arc<Inner>, piece: Piece, bytes: usize) -> Self {
        Self {
            memory: piece.memory(bytes),
            pool,
            home: Home::Pool(Some(piece)),
        }
    }

    fn foreign(pool: Arc<Inner>, foreign: Foreign) -> Self {
        Self {
            memory: foreign.memory,
            pool,
            home: Home::Foreign(Box::new(foreign)),
        }
    }

    /// Cuts the buffer into parts of these lengths, in order, each a buffer of its own. A large
    /// buffer then travels by several operations. [`join`](Self::join) makes it whole again.
    ///
    /// # Panics
    /// If the lengths do not add up to the buffer's, or one is 0.
    pub fn split(self, lengths: impl IntoIterator<Item = usize>) -> Vec<Self> {
        let whole = Arc::new(self);
        let bytes = whole.memory.len();
        let mut at = 0;
        let parts = lengths.into_iter().map(|len| {
            assert!(
                (1..=bytes - at).contains(&len),
                "a part of {len} bytes at {at} of {bytes}"
            );
            // SAFETY: inside the whole, as asserted.
            let start = unsafe { whole.memory.cast::<u8>().add(at) };
            at += len;
            Self {
                // Memory of this part alone: parts do not overlap, and the whole is kept untouched
                // until they are gone.
                memory: NonNull::slice_from_raw_parts(start, len),
                pool: Arc::clone(&whole.pool),
                home: Home::Part(Arc::clone(&whole)),
            }
        });
        let parts: Vec<_> = parts.collect();
        assert_eq!(at, bytes, "parts of a buffer of {bytes} bytes");
        parts
    }

    /// Joins `parts`, in any order, to the buffer that was split into them.
    ///
    /// # Panics
    /// If `parts` are not all parts of one buffer.
    pub fn join(parts: Vec<Self>) -> Self {
        let whole = parts.first().and_then(|part| match &part.home {
            Home::Part(whole) => Some(Arc::clone(whole)),
            Home::Pool(_) | Home::Foreign(_) => None,
        });
        let whole = whole.expect("parts of a buffer that was split");
        drop(parts);
        // A part that is held elsewhere keeps the whole, and this panics.
        Arc::into_inner(whole).expect("all parts of one buffer")
    }

    /// Returns the keys of the buffer's memory in protection domain `domain`; the address is the
    /// buffer's own. A lazy pool registers the memory now if it was not registered yet. `None`: the
    /// pool does not serve the domain.
    ///
    /// # Errors
    /// [`RegError::Register`], only from a lazy pool.
    pub fn keys(&self, domain: DomainId) -> Result<Option<Keys>, RegError> {
        let registered = match &self.home {
            Home::Pool(piece) => &piece.as_ref().expect("here until dropped").slab.registered,
            Home::Foreign(foreign) => &foreign.registered,
            Home::Part(whole) => return whole.keys(domain),
        };
        registered.keys(domain, &self.pool.registrations)
    }

    /// Returns the address of the first byte, for adapters, and for touching memory that peers
    /// write to. Valid until the buffer is dropped.
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.as_ptr().cast()
    }
}

impl AsRef<[u8]> for RegBuf {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: this buffer's bytes, initialised, shared as `self` is.
        unsafe { self.memory.as_ref() }
    }
}

impl AsMut<[u8]> for RegBuf {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: this buffer's bytes, initialised, exclusive as `self` is.
        unsafe { self.memory.as_mut() }
    }
}

impl Drop for RegBuf {
    fn drop(&mut self) {
        if let Home::Pool(piece) = &mut self.home {
            self.pool.put(piece.take().expect("dropped once"));
        }
    }
}

impl fmt::Debug for RegBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "RegBuf({} bytes at {:p})",
            self.memory.len(),
            self.memory
        )
    }
}
