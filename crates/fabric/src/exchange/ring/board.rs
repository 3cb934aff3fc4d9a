//! [`Board`]: memory with a number at its beginning, which READs can wait for.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_wire::data::Condition;

use super::layout::{NEAR_BYTES, RingMemory, WORD_BYTES, check_of, unsealed};
use crate::memory::{ExtentMemory, ExtentSpan, OutOfLease};

/// Memory that peers READ and only this program writes.
#[derive(Clone)]
pub struct Board {
    landing: RingMemory,
    memory: Arc<ExtentMemory>,
}

impl Board {
    /// Opens the memory of a board, at its server.
    ///
    /// # Errors
    /// The lease has ended, or the board cannot be mapped.
    pub(crate) fn extent(memory: &Arc<ExtentMemory>) -> Result<Self, OutOfLease> {
        Ok(Self {
            landing: RingMemory::extent(memory)?,
            memory: Arc::clone(memory),
        })
    }

    /// True if a READ of `memory` can wait for the number at its beginning.
    pub(crate) fn has_number(memory: &ExtentMemory) -> bool {
        memory.is_board() && !memory.is_paged() && memory.bytes() >= WORD_BYTES as u64
    }

    /// Writes floats at `offset`. A peer that READs them meanwhile gets old and new ones.
    ///
    /// # Panics
    /// If the floats reach beyond the board's end.
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

    /// Places a number at `offset`, a multiple of 8, in [`Board::NUMBER_BYTES`]. A peer that sees
    /// the number also sees everything that was written before. READs that
    /// [wait](crate::Channel::post_when) for it go on if `offset` is 0.
    ///
    /// # Panics
    /// If the number reaches beyond the board's end.
    pub fn announce(&self, offset: usize, number: u64) {
        self.landing.store(offset, number);
        if offset == 0 {
            self.memory.announcements().tell();
        }
    }

    /// Longest wait of a READ for a number, however long its client wants to wait.
    pub(crate) const WAIT_MAX: Duration = Duration::from_secs(1);

    /// Size of an announced number.
    pub const NUMBER_BYTES: usize = WORD_BYTES;

    /// Waits until the number at the beginning of `span`'s board meets `condition`, but only while
    /// `stays` and the lease last. Returns true if it does.
    pub(crate) fn reaches(
        span: &ExtentSpan,
        condition: &Condition,
        stays: &dyn Fn() -> bool,
    ) -> bool {
        let Ok(landing) = RingMemory::extent(span.lease()) else {
            return false;
        };
        let is_so = || landing.has_reached(condition);
        let wait = Duration::from_millis(condition.wait_ms).min(Self::WAIT_MAX);
        let stays = || stays() && !span.is_revoked();
        let announcements = span.lease().announcements();
        announcements.wait(Instant::now() + wait, &is_so, &stays)
    }

    /// True if the number at the beginning of `span`'s board meets `condition`. A board whose lease
    /// has ended has no number.
    pub(crate) fn has_reached(span: &ExtentSpan, condition: &Condition) -> bool {
        RingMemory::extent(span.lease()).is_ok_and(|landing| landing.has_reached(condition))
    }

    /// True if `check` is the check value of `number`.
    pub(crate) fn sealed_by(check: u64, number: u64) -> bool {
        check == check_of(number)
    }

    /// Returns the number in bytes that were READ, or `None` while it is being placed.
    ///
    /// # Panics
    /// If `bytes` is shorter than [`Board::NUMBER_BYTES`].
    pub fn announced(bytes: &[u8]) -> Option<u64> {
        unsealed(bytes)
    }
}
