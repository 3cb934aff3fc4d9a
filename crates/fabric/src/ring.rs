//! Messages through rings: senders WRITE into the receiver's memory and wait for nobody.
//!
//! The rule it keeps: each sender has a ring of its own, so a sender that dies or lies harms nobody
//! else. The receiver reads only bytes that are complete: one WRITE places them, and a second one
//! behind it places the position up to which they are valid.
//!
//! A ring lies in memory that its receiver owns and its sender can WRITE and READ, an extent or a
//! registered buffer:
//!
//! ```text
//!   0  tail: how many bytes were sent, ever       WRITten by the sender
//!  64  consumed: how many of them are taken       READ by the sender when its credits are used up
//! 128  messages in `capacity` bytes, each behind its length (8 bytes) and padded to 8;
//!      position p lies at p modulo `capacity`
//! ```
//!
//! A check value follows each of tail and consumed, because a word may be placed byte by byte. A
//! receiver notices messages by looking at the tail. A sender in the same process wakes a sleeping
//! receiver by a [`Notifier`] once the tail has been placed. A sender on another host wakes it by
//! the WRITE of the tail itself, where that can carry immediate data
//! ([`Channel::post_notifying`](crate::Channel::post_notifying)). Control connections over RDMA do
//! so.

mod receiver;
mod sender;

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use farpage_wire::{ExtentId, data::Condition};
use nix::sys::eventfd::{EfdFlags, EventFd};

pub use self::{
    receiver::{Inbox, RingReceiver},
    sender::{RingSender, SendError},
};
use crate::{
    memory::{ExtentMemory, OutOfLease, Span},
    regmem::RegBuf,
};

farpage_wire::debug_as_display!(RingError);

/// Bytes before the messages: a cache line for each side.
pub(crate) const HEADER_BYTES: usize = 128;
const CONSUMED_AT: usize = 64;
/// A position and its check.
const WORD_BYTES: usize = 16;
/// A message's length.
const LENGTH_BYTES: usize = 8;
/// What a stream over RDMA sends at once: several fit into its ring, so that one can be taken while
/// the next is placed.
pub(crate) const STREAM_MESSAGE_BYTES: usize = 15 << 10;
/// What is copied into the nearest cache at once.
const NEAR_BYTES: usize = 4096;

/// Where a ring is, as its sender sees it. The receiver finds it at the same offset in its own
/// memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingPlace {
    /// The extent that it lies in.
    pub extent: ExtentId,
    /// Where in the extent; a multiple of 64.
    pub offset: u64,
    /// Bytes for messages; a multiple of 64.
    pub capacity: usize,
}

impl RingPlace {
    /// Bytes that the ring takes from `offset` on.
    pub fn bytes(&self) -> usize {
        HEADER_BYTES + self.capacity
    }

    fn check(&self) {
        assert!(
            self.offset.is_multiple_of(64) && self.capacity.is_multiple_of(64) && self.capacity > 0,
            "a ring of {} bytes at {}",
            self.capacity,
            self.offset
        );
    }
}

/// A sender broke the protocol. Its ring must not be used any more.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the sender of a ring of {capacity} bytes broke its protocol: {detail}; drop the ring and its connection"
)]
pub struct RingError {
    capacity: usize,
    detail: String,
}

/// Memory that peers WRITE into, mapped as long as this or a clone lives. Its bytes may change at
/// any time, so no reference to them is ever made: bytes are copied through bounds-checked raw
/// pointers, words through atomics.
#[derive(Clone)]
pub struct Landing {
    start: *mut u8,
    bytes: usize,
    _keep: Arc<dyn Send + Sync>,
}

// SAFETY: an address range that `_keep` keeps mapped, touched only by atomics and raw copies.
unsafe impl Send for Landing {}

impl Landing {
    /// A registered buffer, which peers may WRITE to if its pool has
    /// [`Access::Remote`](crate::regmem::Access::Remote).
    pub fn registered(buf: RegBuf) -> Self {
        Self {
            start: buf.as_ptr(),
            bytes: buf.as_ref().len(),
            _keep: Arc::new(buf),
        }
    }

    /// An extent, at its server, whichever client has its lease.
    ///
    /// # Errors
    /// Its lease has ended, or it cannot be mapped.
    pub fn extent(memory: &Arc<ExtentMemory>) -> Result<Self, OutOfLease> {
        let span = memory.span(0, memory.bytes())?;
        Ok(Self {
            start: span.as_ptr(),
            bytes: span.len(),
            _keep: Arc::clone(memory) as _,
        })
    }

    /// The `len` bytes at `offset`.
    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.bytes),
            "{len} bytes at {offset} of a landing of {}",
            self.bytes
        );
        // SAFETY: inside the range, as asserted.
        unsafe { self.start.add(offset) }
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        let at = self.at(offset, 8).cast::<u64>();
        assert!(at.is_aligned(), "rings lie at multiples of 64 bytes");
        // SAFETY: in range, aligned, mapped as long as `self`, and accessed here through atomics
        // only. A transport that places a word in another way may place it in pieces, which the
        // check value reveals.
        unsafe { AtomicU64::from_ptr(at) }
    }

    /// A position that the peer placed, or `None` while it is being placed. After it, the bytes
    /// that were placed before it can be read.
    fn load(&self, offset: usize) -> Option<u64> {
        let position = self.word(offset).load(Ordering::Acquire);
        let check = self.word(offset + 8).load(Ordering::Acquire);
        (check == check_of(position)).then_some(position)
    }

    /// Whether the number at the beginning is the one that is waited for, or more.
    fn has_reached(&self, condition: &Condition) -> bool {
        self.load(0).is_some_and(|number| number >= condition.least)
    }

    /// Places a position for the peer. Whoever sees it also sees everything that was written
    /// before.
    fn store(&self, offset: usize, position: u64) {
        self.word(offset).store(position, Ordering::Release);
        self.word(offset + 8)
            .store(check_of(position), Ordering::Release);
    }

    /// Adds the floats at `offset`, as they arrived, to `sums`: each to its own, the sum on the
    /// left. Where `is_first`, they take the place of `sums`.
    ///
    /// # Panics
    /// If the landing has not so many.
    pub fn add_floats(&self, offset: usize, sums: &mut [f32], is_first: bool) {
        // What fits into the nearest cache: beyond it the bytes are read once.
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

    fn copy_out(&self, offset: usize, to: &mut [u8]) {
        let from = self.at(offset, to.len());
        // SAFETY: in range; the destination is exclusive; a peer that changes the source meanwhile
        // only changes which bytes arrive.
        unsafe { std::ptr::copy_nonoverlapping(from.cast_const(), to.as_mut_ptr(), to.len()) };
    }
}

/// Memory that peers READ and only this program writes.
#[derive(Clone)]
pub struct Board {
    landing: Landing,
    memory: Arc<ExtentMemory>,
}

impl Board {
    /// The memory of a board, at its server.
    ///
    /// # Errors
    /// Its lease has ended, or it cannot be mapped.
    pub(crate) fn extent(memory: &Arc<ExtentMemory>) -> Result<Self, OutOfLease> {
        Ok(Self {
            landing: Landing::extent(memory)?,
            memory: Arc::clone(memory),
        })
    }

    /// Whether a READ of this memory can wait for the number at its beginning.
    pub(crate) fn has_number(memory: &ExtentMemory) -> bool {
        memory.is_board() && !memory.is_paged() && memory.bytes() >= WORD_BYTES as u64
    }

    /// Writes floats at `offset`. A peer that READs them meanwhile gets old and new ones.
    ///
    /// # Panics
    /// If they reach beyond the end.
    pub fn write_floats(&self, offset: usize, floats: &[f32]) {
        let mut near = [0u8; NEAR_BYTES];
        for (number, floats) in floats.chunks(NEAR_BYTES / 4).enumerate() {
            let near = &mut near[..4 * floats.len()];
            for (bytes, float) in near.as_chunks_mut().0.iter_mut().zip(floats) {
                *bytes = float.to_le_bytes();
            }
            let to = self.landing.at(offset + number * NEAR_BYTES, near.len());
            // SAFETY: in range and mapped to write; the source is no part of the board; peers that
            // read meanwhile only read.
            unsafe { std::ptr::copy_nonoverlapping(near.as_ptr(), to, near.len()) };
        }
    }

    /// Places a number at `offset`, a multiple of 8, in [`Board::NUMBER_BYTES`]. Whoever sees it
    /// also sees everything that was written before. READs that
    /// [wait](crate::Channel::post_when) for it go on if `offset` is 0.
    ///
    /// # Panics
    /// If it reaches beyond the end.
    pub fn announce(&self, offset: usize, number: u64) {
        self.landing.store(offset, number);
        if offset == 0 {
            self.memory.announcements().tell();
        }
    }

    /// The longest that a READ waits for a number, whatever its client asks for.
    pub(crate) const WAIT_MAX: Duration = Duration::from_secs(1);

    /// Bytes of an announced number.
    pub const NUMBER_BYTES: usize = WORD_BYTES;

    /// Waits until the number at the beginning of the board that `span` is a part of is what a READ
    /// waits for. Whether it is; no longer than while `stays` and the lease lasts.
    pub(crate) fn reaches(span: &Span, condition: &Condition, stays: &dyn Fn() -> bool) -> bool {
        let Ok(landing) = Landing::extent(span.lease()) else {
            return false;
        };
        let is_so = || landing.has_reached(condition);
        let wait = Duration::from_millis(condition.wait_ms).min(Self::WAIT_MAX);
        let stays = || stays() && !span.is_revoked();
        let announcements = span.lease().announcements();
        announcements.wait(Instant::now() + wait, &is_so, &stays)
    }

    /// Whether the number at the beginning of the board that `span` is a part of is what a READ
    /// waits for. A board that is gone has none.
    pub(crate) fn has_reached(span: &Span, condition: &Condition) -> bool {
        Landing::extent(span.lease()).is_ok_and(|landing| landing.has_reached(condition))
    }

    /// Whether a word and the one behind it, the check, are a number.
    pub(crate) fn sealed_by(check: u64, number: u64) -> bool {
        check == check_of(number)
    }

    /// The number in bytes that were READ; `None` while it is being placed.
    ///
    /// # Panics
    /// If they are not so many.
    pub fn announced(bytes: &[u8]) -> Option<u64> {
        unsealed(bytes)
    }
}

/// Wakes a thread of this process that sleeps on it (eventfd). Clones wake the same thread.
#[derive(Clone, Debug)]
pub struct Notifier(Arc<EventFd>);

impl Notifier {
    /// A notifier that wakes nobody yet.
    ///
    /// # Errors
    /// What the system says: no descriptors left.
    pub fn new() -> io::Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Self(Arc::new(EventFd::from_flags(flags)?)))
    }

    /// Wakes the thread that sleeps on it, or the next one that would sleep.
    pub fn notify(&self) {
        // It fails only after 2^64 notifications that nobody cleared.
        let _ = self.0.write(1);
    }

    /// Forgets earlier notifications: the next sleep lasts until a new one.
    pub fn clear(&self) {
        // It fails if nobody notified: then there is nothing to forget.
        let _ = self.0.read();
    }
}

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The check value of a position: a word that is half old and half new does not match it. It is
/// zero for zero, so that zeroed memory is an empty ring. The finaliser of MurmurHash3: a bijection
/// in which each output bit depends on all input bits.
fn check_of(position: u64) -> u64 {
    let x = (position ^ (position >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

/// A position with its check, as it travels.
pub(crate) fn sealed(position: u64) -> [u8; WORD_BYTES] {
    let mut bytes = [0; WORD_BYTES];
    bytes[..8].copy_from_slice(&position.to_ne_bytes());
    bytes[8..].copy_from_slice(&check_of(position).to_ne_bytes());
    bytes
}

fn unsealed(bytes: &[u8]) -> Option<u64> {
    let word = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    (word(8) == check_of(word(0))).then(|| word(0))
}

/// Bytes that a message takes in a ring.
fn room_of(message_bytes: usize) -> usize {
    LENGTH_BYTES + message_bytes.next_multiple_of(8)
}
