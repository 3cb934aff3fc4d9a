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
    operation::Checked,
    transfer::{Rest, VectorTarget},
};
use crate::{
    memory::{Absent, OutOfLease},
    stream::SocketMessage,
};

/// The most bytes that one window holds: more than a socket takes at once.
const BYTES: u64 = 4 << 20;

/// Upper bound of a batch's wait: less than a client waits before it takes a silent connection for
/// dead, and less than the next holder of a named array waits for operations of the last.
const PATIENCE: Duration = Duration::from_secs(1);

/// Memory held for one system call, and vectors that point into it. Used again and again.
#[derive(Default)]
pub(super) struct Window {
    vectors: Vec<libc::iovec>,
    held: Vec<HeldRange>,
    /// Time that is left of [`PATIENCE`].
    patience: Duration,
}

struct HeldRange {
    op: usize,
    offset: u64,
    len: u64,
}

/// A filled window. Dropping it ends the holds.
pub(super) struct Grip<'a> {
    window: &'a mut Window,
    checked: &'a [Checked],
}

/// An operation whose memory cannot be had.
pub(super) struct Stuck {
    pub(super) op: usize,
    pub(super) why: Absent,
}

impl Window {
    /// Resets the wait for a new batch, or when the client has heard something.
    pub(super) fn be_patient(&mut self) {
        self.patience = PATIENCE;
    }

    /// Holds up to `len` bytes of `op` from `offset` on, and waits for the first. Returns how many.
    fn hold(&mut self, op: &Checked, offset: u64, len: u64) -> Result<u64, Absent> {
        let residency = op.residency();
        match residency.hold(offset, len, None)? {
            0 => {}
            held => return Ok(held),
        }
        // Memory that must not be moved any more is not waited for.
        if op.span.is_revoked() {
            return Err(Absent::Released);
        }
        let begun = Instant::now();
        let held = residency.hold(offset, len, Some(begun + self.patience));
        self.patience = self.patience.saturating_sub(begun.elapsed());
        held
    }

    /// Brings the bytes of `op` into memory, one after the other, and holds none of them.
    fn bring(&mut self, op: &Checked) -> Result<(), Absent> {
        let (offset, len) = op.range();
        let mut done = 0;
        while done < len {
            let held = self.hold(op, offset + done, len - done)?;
            op.residency().let_go(offset + done, held);
            done += held;
        }
        Ok(())
    }

    /// Executes an atomic while its word is held.
    pub(super) fn atomic(
        &mut self,
        op: &Checked,
        change: Atomic,
    ) -> Result<Result<u64, OutOfLease>, Absent> {
        let (offset, len) = op.range();
        if op.span.residency().is_none() {
            return Ok(op.span.lease().atomic(offset, change));
        }
        // All of it: a word does not lie in two chunks.
        let held = self.hold(op, offset, len)?;
        let old = op.span.lease().atomic(offset, change);
        op.residency().let_go(offset, held);
        Ok(old)
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
        checked: &[Checked],
        most: usize,
        send: &mut dyn FnMut(&[u8]),
    ) -> Result<bool, Stuck> {
        let (next, vector) = (rest.next(), &rest.left()[0]);
        let op = &checked[pieces[next].op];
        if pieces[next].is_span || op.span.residency().is_none() || !announces(op, vector) {
            return Ok(false);
        }
        let (offset, len) = op.range();
        // The unsent rest would be unpacked once more.
        if len > most as u64 {
            return Ok(false);
        }
        let begun = Instant::now();
        let passed = op
            .residency()
            .pass(offset, len, begun + self.patience, send);
        self.patience = self.patience.saturating_sub(begun.elapsed());
        passed.map_err(|why| Stuck {
            op: pieces[next].op,
            why,
        })
    }

    /// Holds the next bytes of `rest`, at least some of them.
    ///
    /// An answer's header is sent only when all of its payload has been seen in memory: afterwards
    /// there is no way to report an error.
    pub(super) fn fill<'a>(
        &'a mut self,
        rest: &Rest<'_>,
        pieces: &[VectorTarget],
        checked: &'a [Checked],
    ) -> Result<Grip<'a>, Stuck> {
        self.vectors.clear();
        let mut grip = Grip {
            window: self,
            checked,
        };
        for (vector, piece) in rest.left().iter().zip(&pieces[rest.next()..]) {
            let op = &checked[piece.op];
            let stuck = |why| Stuck { op: piece.op, why };
            let is_first = grip.window.vectors.is_empty();
            match op.span.residency() {
                Some(residency) if piece.is_span => {
                    let offset = op.offset_of(vector.iov_base.cast());
                    let len = vector.iov_len as u64;
                    let held = match is_first {
                        true => grip.window.hold(op, offset, len).map_err(stuck)?,
                        // An error is reported when its turn comes.
                        false => residency.hold(offset, len, None).unwrap_or(0),
                    };
                    grip.add(piece.op, offset, held, vector);
                    if held < len {
                        break;
                    }
                }
                Some(_) if announces(op, vector) => {
                    match is_first {
                        true => grip.window.bring(op).map_err(stuck)?,
                        false if is_there(op) => {}
                        false => break,
                    }
                    grip.window.vectors.push(*vector);
                }
                _ => grip.window.vectors.push(*vector),
            }
            if grip.held_bytes() >= BYTES {
                break;
            }
        }
        Ok(grip)
    }
}

/// True if `vector`, which is not in the operation's span, is the unsent header of an answer with a
/// payload.
fn announces(op: &Checked, vector: &libc::iovec) -> bool {
    op.header.kind == OpKind::Read && vector.iov_len == ANSWER_HEADER_BYTES
}

fn is_there(op: &Checked) -> bool {
    let (offset, len) = op.range();
    let held = op.residency().hold(offset, len, None).unwrap_or(0);
    op.residency().let_go(offset, held);
    held == len
}

impl Grip<'_> {
    fn add(&mut self, op: usize, offset: u64, len: u64, vector: &libc::iovec) {
        if len > 0 {
            self.window.held.push(HeldRange { op, offset, len });
            self.window.vectors.push(libc::iovec {
                iov_base: vector.iov_base,
                iov_len: len as usize,
            });
        }
    }

    fn held_bytes(&self) -> u64 {
        self.window.held.iter().map(|held| held.len).sum()
    }

    pub(super) fn message(&mut self) -> SocketMessage {
        let vectors = &mut self.window.vectors;
        SocketMessage::new(vectors.as_mut_ptr(), vectors.len())
    }
}

impl Drop for Grip<'_> {
    fn drop(&mut self) {
        for HeldRange { op, offset, len } in self.window.held.drain(..) {
            self.checked[op].residency().let_go(offset, len);
        }
    }
}
