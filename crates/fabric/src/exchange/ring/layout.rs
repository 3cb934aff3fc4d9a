//! Layout of rings, and the memory that they lie in: [`RingPlace`], [`RingMemory`].
//!
//! The rule it keeps: a position is followed by its check value, and counts only with it.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use farpage_wire::{ExtentId, data::Condition};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::{
    memory::{ExtentMemory, OutOfLease},
    regmem::RegBuf,
};

farpage_wire::debug_as_display!(RingError);

/// Bytes before the messages: a cache line for each side.
pub(crate) const HEADER_BYTES: usize = 128;
pub(super) const CONSUMED_AT: usize = 64;
/// A position and its check.
pub(super) const WORD_BYTES: usize = 16;
/// A message's length.
pub(super) const LENGTH_BYTES: usize = 8;
/// Upper bound of a message of a stream over RDMA: several fit into the stream's ring, so that one
/// can be taken while the next is placed.
pub(crate) const STREAM_MESSAGE_BYTES: usize = 15 << 10;
/// Bytes that are copied into the nearest cache at once.
pub(super) const NEAR_BYTES: usize = 4096;

/// Place of a ring, as its sender sees it. The receiver finds the ring at the same offset in its
/// own memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingPlace {
    /// Extent that the ring lies in.
    pub extent: ExtentId,
    /// Offset in the extent; a multiple of 64.
    pub offset: u64,
    /// Bytes for messages; a multiple of 64.
    pub capacity: usize,
}

impl RingPlace {
    /// Returns the number of bytes that the ring takes from `offset` on.
    pub fn bytes(&self) -> usize {
        HEADER_BYTES + self.capacity
    }

    pub(super) fn check(&self) {
        assert!(
            self.offset.is_multiple_of(64) && self.capacity.is_multiple_of(64) && self.capacity > 0,
            "a ring of {} bytes at {}",
            self.capacity,
            self.offset
        );
    }
}

/// A breach of protocol by a sender. The sender's ring must not be used any more.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the sender of a ring of {capacity} bytes broke its protocol: {detail}; drop the ring and its connection"
)]
pub struct RingError {
    pub(super) capacity: usize,
    pub(super) detail: String,
}

/// Memory that peers WRITE into, mapped as long as this or a clone lives. Its bytes may change at
/// any time, so no reference to them is ever made: bytes are copied through bounds-checked raw
/// pointers, words through atomics.
#[derive(Clone)]
pub struct RingMemory {
    start: *mut u8,
    bytes: usize,
    _keep: Arc<dyn Send + Sync>,
}

// SAFETY: an address range that `_keep` keeps mapped, touched only by atomics and raw copies.
unsafe impl Send for RingMemory {}

impl RingMemory {
    /// Makes a landing of a registered buffer, which peers may WRITE to if its pool has
    /// [`Access::Remote`](crate::regmem::Access::Remote).
    pub fn registered(buf: RegBuf) -> Self {
        Self {
            start: buf.as_ptr(),
            bytes: buf.as_ref().len(),
            _keep: Arc::new(buf),
        }
    }

    /// Makes a landing of an extent, at its server, whichever client has the extent's lease.
    ///
    /// # Errors
    /// The lease has ended, or the extent cannot be mapped.
    pub fn extent(memory: &Arc<ExtentMemory>) -> Result<Self, OutOfLease> {
        let span = memory.span(0, memory.bytes())?;
        Ok(Self {
            start: span.as_ptr(),
            bytes: span.len(),
            _keep: Arc::clone(memory) as _,
        })
    }

    /// Returns the address of the `len` bytes at `offset`.
    pub(super) fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.bytes),
            "{len} bytes at {offset} of a landing of {}",
            self.bytes
        );
        // SAFETY: inside the range, as asserted.
        unsafe { self.start.add(offset) }
    }

    pub(super) fn word(&self, offset: usize) -> &AtomicU64 {
        let at = self.at(offset, 8).cast::<u64>();
        assert!(at.is_aligned(), "rings lie at multiples of 64 bytes");
        // SAFETY: in range, aligned, mapped as long as `self`, and accessed here through atomics
        // only. A transport that places a word in another way may place it in pieces, which the
        // check value reveals.
        unsafe { AtomicU64::from_ptr(at) }
    }

    /// Returns a position that the peer placed, or `None` while it is being placed. Bytes that were
    /// placed before the position can be read afterwards.
    pub(super) fn load(&self, offset: usize) -> Option<u64> {
        let position = self.word(offset).load(Ordering::Acquire);
        let check = self.word(offset + 8).load(Ordering::Acquire);
        (check == check_of(position)).then_some(position)
    }

    /// True if the number at the beginning is the awaited one, or more.
    pub(super) fn has_reached(&self, condition: &Condition) -> bool {
        self.load(0).is_some_and(|number| number >= condition.least)
    }

    /// Places a position for the peer. A peer that sees it also sees everything that was written
    /// before.
    pub(super) fn store(&self, offset: usize, position: u64) {
        self.word(offset).store(position, Ordering::Release);
        self.word(offset + 8)
            .store(check_of(position), Ordering::Release);
    }

    /// Adds the floats at `offset` to `sums`, element by element, with the sum on the left. If
    /// `is_first`, replaces `sums` by the floats.
    ///
    /// # Panics
    /// If the floats reach beyond the landing's end.
    pub fn add_floats(&self, offset: usize, sums: &mut [f32], is_first: bool) {
        // One piece fits into the nearest cache, so slower memory is read once.
        let mut near = [0u8; NEAR_BYTES];
        for (number, sums) in sums.chunks_mut(NEAR_BYTES / 4).enumerate() {
            let near = &mut near[..4 * sums.len()];
            self.copy_out(offset + number * NEAR_BYTES, near);
            let floats = near.as_chunks().0.iter().copied().map(f32::from_le_bytes);
            for (sum, float) in sums.iter_mut().zip(floats) {
                *sum = if is_first { float } else { *sum + float };
            }
        }
    }

    pub(super) fn copy_out(&self, offset: usize, to: &mut [u8]) {
        let from = self.at(offset, to.len());
        // SAFETY: in range; the destination is exclusive; a peer that changes the source meanwhile
        // only changes which bytes arrive.
        unsafe { std::ptr::copy_nonoverlapping(from.cast_const(), to.as_mut_ptr(), to.len()) };
    }
}

/// A handle that wakes a thread of this process (eventfd). Clones wake the same thread.
#[derive(Clone, Debug)]
pub struct Notifier(Arc<EventFd>);

impl Notifier {
    /// Makes a notifier without notifications.
    ///
    /// # Errors
    /// The system's error: no descriptors left.
    pub fn new() -> io::Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Self(Arc::new(EventFd::from_flags(flags)?)))
    }

    /// Wakes the thread that sleeps on the notifier, or the next one that would sleep.
    pub fn notify(&self) {
        // The write fails only after 2^64 notifications that were not cleared.
        let _ = self.0.write(1);
    }

    /// Forgets earlier notifications: the next sleep lasts until a new one.
    pub fn clear(&self) {
        // The read fails if there was no notification: then there is nothing to forget.
        let _ = self.0.read();
    }
}

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Returns the check value of a position: a word that is half old and half new does not match it.
/// The check of zero is zero, so that zeroed memory is an empty ring. The finaliser of MurmurHash3:
/// a bijection in which each output bit depends on all input bits.
pub(super) fn check_of(position: u64) -> u64 {
    let x = (position ^ (position >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

/// Encodes a position with its check, as it travels.
pub(crate) fn sealed(position: u64) -> [u8; WORD_BYTES] {
    let mut bytes = [0; WORD_BYTES];
    bytes[..8].copy_from_slice(&position.to_ne_bytes());
    bytes[8..].copy_from_slice(&check_of(position).to_ne_bytes());
    bytes
}

pub(super) fn unsealed(bytes: &[u8]) -> Option<u64> {
    let word = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    (word(8) == check_of(word(0))).then(|| word(0))
}

/// Returns the number of bytes that a message takes in a ring.
pub(super) fn room_of(message_bytes: usize) -> usize {
    LENGTH_BYTES + message_bytes.next_multiple_of(8)
}
