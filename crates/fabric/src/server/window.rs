//! [`Window`]: the part of a vectored transfer that one system call may touch, its memory held.
//!
//! The rule it keeps: bytes of memory with a [`Residency`](crate::memory::Residency) are held while
//! the call runs, and never during a wait. Only the first bytes of a window are waited for, while
//! nothing else is held; the window ends where the next bytes are elsewhere. So a slow client keeps
//! no memory, and bytes before absent ones are moved at once.
//!
//! A batch waits for memory for [`PATIENCE`] in all, counted anew when a part of its answers has
//! been sent. So the batch's client hears in time that it has to wait longer.

use std::time::{Duration, Instant};

use farpage_wire::{
    Atomic,
    data::{ANSWER_HEADER_BYTES, OpKind},
};

use super::{
    batch::{Checked, Stop},
    transfer::{Rest, VectorTarget},
};
use crate::{
    memory::{Absent, HeldBytes},
    stream::SocketMessage,
};

/// The most bytes that one window holds: more than a socket takes at once.
const BYTES: u64 = 4 << 20;

/// Upper bound of a batch's wait: less than a client waits before it takes a silent connection for
/// dead, and less than the next holder of a named array waits for operations of the last.
const PATIENCE: Duration = Duration::from_secs(1);

/// Vectors for one system call, and the patience of a batch. Used again and again.
#[derive(Default)]
pub(super) struct Window {
    vectors: Vec<libc::iovec>,
    /// Time that is left of [`PATIENCE`].
    patience: Duration,
}

/// Bytes that one system call may touch, held until this is dropped.
pub(super) struct Grip<'a> {
    pub(super) message: SocketMessage,
    _held: Vec<HeldBytes<'a>>,
}

impl Window {
    /// Resets the wait for a new batch, or when the client has heard something.
    pub(super) fn be_patient(&mut self) {
        self.patience = PATIENCE;
    }

    /// Takes the time of `wait`, which ends at the time that it is given, from the patience.
    fn patiently<T>(&mut self, wait: impl FnOnce(Instant) -> T) -> T {
        let begun = Instant::now();
        let done = wait(begun + self.patience);
        self.patience = self.patience.saturating_sub(begun.elapsed());
        done
    }

    /// Holds up to `len` bytes of `op` from `offset` on, and waits for the first.
    fn hold<'a>(
        &mut self,
        op: &'a Checked,
        offset: u64,
        len: u64,
    ) -> Result<HeldBytes<'a>, Absent> {
        let held = HeldBytes::take(op.residency(), offset, len, None)?;
        if held.len > 0 {
            return Ok(held);
        }
        // Memory that must not be moved any more is not waited for.
        if op.span.is_revoked() {
            return Err(Absent::Released);
        }
        self.patiently(|until| HeldBytes::take(op.residency(), offset, len, Some(until)))
    }

    /// Brings the bytes of `op` into memory, one after the other, and holds none of them.
    fn bring(&mut self, op: &Checked) -> Result<(), Absent> {
        let (offset, len) = op.range();
        let mut done = 0;
        while done < len {
            done += self.hold(op, offset + done, len - done)?.len;
        }
        Ok(())
    }

    /// Executes `change`, the atomic that is operation `number` of its batch, while its word is
    /// held. Returns the old value.
    pub(super) fn atomic(
        &mut self,
        number: usize,
        op: &Checked,
        change: Atomic,
    ) -> Result<u64, Stop> {
        let (offset, len) = op.range();
        // All of it: a word does not lie in two chunks.
        let held = match op.span.residency() {
            None => Ok(None),
            Some(_) => self.hold(op, offset, len).map(Some),
        };
        let _held = held.map_err(|why| Stop::Absent { op: number, why })?;
        let old = op.span.lease().atomic(offset, change);
        Ok(old.map_err(|_| op.lease_ended())?)
    }

    /// Sends the next answer of `rest` from where its bytes are kept, if they are not worth
    /// bringing into memory and number `most` at most, so that one call can send them. `false`: the
    /// memory is to be held instead.
    ///
    /// `send` gets the payload, and sends it behind the answer's header.
    pub(super) fn pass(
        &mut self,
        rest: &Rest<'_>,
        pieces: &[VectorTarget],
        ops: &[Checked],
        most: usize,
        send: &mut dyn FnMut(&[u8]),
    ) -> Result<bool, Stop> {
        let (piece, vector) = (pieces[rest.next()], &rest.left()[0]);
        let op = &ops[piece.op];
        if piece.is_span || !announces(op, vector) {
            return Ok(false);
        }
        let (offset, len) = op.range();
        // The unsent rest would be unpacked once more.
        let Some(residency) = op.span.residency().filter(|_| len <= most as u64) else {
            return Ok(false);
        };
        self.patiently(|until| residency.pass(offset, len, until, send))
            .map_err(|why| Stop::Absent { op: piece.op, why })
    }

    /// Holds the next bytes of `rest`, at least some of them, where they may be elsewhere than in
    /// memory.
    ///
    /// An answer's header is sent only when all of its payload has been seen in memory: afterwards
    /// there is no way to report an error.
    pub(super) fn grip<'a>(
        &'a mut self,
        rest: &mut Rest<'_>,
        pieces: &[VectorTarget],
        ops: &'a [Checked],
    ) -> Result<Grip<'a>, Stop> {
        let mut held = Vec::new();
        if !is_paged(ops) {
            let message = rest.message();
            return Ok(Grip {
                message,
                _held: held,
            });
        }
        self.vectors.clear();
        let mut held_bytes = 0;
        for (vector, piece) in rest.left().iter().zip(&pieces[rest.next()..]) {
            let op = &ops[piece.op];
            let absent = |why| Stop::Absent { op: piece.op, why };
            let is_first = self.vectors.is_empty();
            let mut part = *vector;
            match op.span.residency() {
                Some(residency) if piece.is_span => {
                    let offset = op.offset_of(vector.iov_base.cast());
                    let len = vector.iov_len as u64;
                    let bytes = match is_first {
                        true => self.hold(op, offset, len).map_err(absent)?,
                        false => match HeldBytes::take(residency, offset, len, None) {
                            Ok(bytes) => bytes,
                            // An error is reported when its turn comes.
                            Err(_) => break,
                        },
                    };
                    part.iov_len = bytes.len as usize;
                    held_bytes += bytes.len;
                    held.push(bytes);
                }
                Some(_) if announces(op, vector) => match is_first {
                    true => self.bring(op).map_err(absent)?,
                    false if is_there(op) => {}
                    false => break,
                },
                _ => {}
            }
            if part.iov_len > 0 {
                self.vectors.push(part);
            }
            if part.iov_len < vector.iov_len || held_bytes >= BYTES {
                break;
            }
        }
        Ok(Grip {
            message: SocketMessage::new(self.vectors.as_mut_ptr(), self.vectors.len()),
            _held: held,
        })
    }
}

/// True if some of the memory may be elsewhere.
pub(super) fn is_paged(ops: &[Checked]) -> bool {
    ops.iter().any(|op| op.span.residency().is_some())
}

/// True if `vector`, which is not in the operation's span, is the unsent header of an answer with a
/// payload.
fn announces(op: &Checked, vector: &libc::iovec) -> bool {
    op.header.kind == OpKind::Read && vector.iov_len == ANSWER_HEADER_BYTES
}

fn is_there(op: &Checked) -> bool {
    let (offset, len) = op.range();
    HeldBytes::take(op.residency(), offset, len, None).is_ok_and(|held| held.len == len)
}
