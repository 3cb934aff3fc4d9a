//! [`RegBuf`]: bytes of a [`RegPool`], or of a program's memory that was imported into it.
//!
//! The rule it keeps: the bytes are the buffer's alone, and stay where they are until the buffer is
//! dropped.

use std::{fmt, ptr::NonNull, sync::Arc};

use super::{
    error::RegError,
    pool::{Inner, MAX_BUF_BYTES, RegPool, SlabPiece},
    registrar::{DomainId, Keys, Registered},
};

/// A buffer in registered memory. Goes back to its pool when it is dropped.
pub struct RegBuf {
    /// Bytes of this buffer alone, valid as long as `home`.
    memory: NonNull<[u8]>,
    pool: Arc<Inner>,
    home: BufMemory,
}

enum BufMemory {
    /// A piece of the pool's. `None` only while it is being dropped.
    Pool(Option<SlabPiece>),
    Foreign(Box<Foreign>),
    /// A part of a buffer that was [split](RegBuf::split). The whole is not touched meanwhile.
    Part(Arc<RegBuf>),
}

// SAFETY: it owns its bytes as a `Vec<u8>` does; the parts that it consists of are `Send`.
unsafe impl Send for RegBuf {}
// SAFETY: a shared reference gives shared access to the bytes only.
unsafe impl Sync for RegBuf {}

impl RegPool {
    /// Returns a buffer of `bytes` bytes, aligned to a cache line. It holds what its last user left
    /// in it; new memory is zero.
    ///
    /// # Errors
    /// [`RegError`] when new memory is needed and cannot be had.
    ///
    /// # Panics
    /// When `bytes` is 0 or more than [`MAX_BUF_BYTES`].
    pub fn acquire(&self, bytes: usize) -> Result<RegBuf, RegError> {
        assert!(
            (1..=MAX_BUF_BYTES).contains(&bytes),
            "a registered buffer of {bytes} bytes"
        );
        let piece = self.0.take(bytes)?;
        Ok(RegBuf {
            memory: piece.memory(bytes),
            pool: Arc::clone(&self.0),
            home: BufMemory::Pool(Some(piece)),
        })
    }

    /// Makes a buffer over `owner`'s memory, registered like the pool's own. The buffer keeps
    /// `owner` until it is dropped; the memory cannot be reached through `owner` meanwhile.
    ///
    /// # Errors
    /// [`RegError::Register`]; the owner is dropped.
    ///
    /// # Panics
    /// If the memory is empty.
    pub fn import<O>(&self, owner: O) -> Result<RegBuf, RegError>
    where
        O: AsMut<[u8]> + Send + 'static,
    {
        let foreign = Foreign::new(owner, &self.0);
        if !self.0.options.lazy {
            foreign.registered.register_all(&self.0.registrations)?;
        }
        Ok(RegBuf {
            memory: foreign.memory,
            pool: Arc::clone(&self.0),
            home: BufMemory::Foreign(Box::new(foreign)),
        })
    }
}

impl RegBuf {
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
                home: BufMemory::Part(Arc::clone(&whole)),
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
            BufMemory::Part(whole) => Some(Arc::clone(whole)),
            BufMemory::Pool(_) | BufMemory::Foreign(_) => None,
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
            BufMemory::Pool(piece) => &piece.as_ref().expect("here until dropped").slab.registered,
            BufMemory::Foreign(foreign) => &foreign.registered,
            BufMemory::Part(whole) => return whole.keys(domain),
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
        if let BufMemory::Pool(piece) = &mut self.home {
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

/// Imported memory, with its owner.
struct Foreign {
    // Dropped before the owner, in this order.
    registered: Registered,
    memory: NonNull<[u8]>,
    _owner: ForeignOwner,
}

/// A boxed owner, behind a raw pointer: moving a `Box` would assert that no other pointer leads
/// into it.
struct ForeignOwner(*mut (dyn Send + 'static));

impl Foreign {
    fn new<O: AsMut<[u8]> + Send + 'static>(owner: O, pool: &Inner) -> Self {
        let boxed = Box::into_raw(Box::new(owner));
        let owner = ForeignOwner(boxed);
        // SAFETY: just made, and ours alone. The bytes stay borrowed from it until it is dropped in
        // `ForeignOwner::drop`: nobody else can reach the owner until then, so no safe code can
        // give the bytes back, move them or touch them.
        let memory = NonNull::from(unsafe { (*boxed).as_mut() });
        assert!(!memory.is_empty(), "a registered buffer of 0 bytes");
        // SAFETY: exclusively borrowed memory stays mapped where it is; dropped before the owner.
        let registered = unsafe { Registered::new(memory, pool.options.access, &pool.registrars) };
        Self {
            registered,
            memory,
            _owner: owner,
        }
    }
}

// SAFETY: the owner is `Send`; it is only ever dropped.
unsafe impl Send for Foreign {}
// SAFETY: a shared reference gives no access to the owner, and the bytes were exclusively borrowed
// from it.
unsafe impl Sync for Foreign {}

impl Drop for ForeignOwner {
    fn drop(&mut self) {
        // SAFETY: from `Box::into_raw`, and nothing refers to it or its bytes any more.
        drop(unsafe { Box::from_raw(self.0) });
    }
}
