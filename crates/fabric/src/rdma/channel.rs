//! [`SendQueue`]: the client's end of a data connection. Its completion queue belongs to the
//! [`Bundle`](super::bundle::Bundle) that it is in.
//!
//! The rule it keeps: an operation's buffer goes back to its owner only when the adapter is done
//! with the memory that stands for it, and the send queue cannot fill. Registered buffers move as
//! they lie. Others are copied through registered memory of the channel's own, because a page that
//! is pinned for the adapter could not be moved into the program's address space.
//!
//! Operations are gathered and handed over with one ring of the doorbell per list of up to
//! [`POSTLIST`], or when the caller polls. READs and atomics report their end, since a thread waits
//! for their bytes. Of WRITEs only the last of a list does: work completes in the order of posting,
//! so one report stands for all before it. READ and WRITE of the same bytes at the same time are in
//! no order, as everywhere in this crate.

use std::{collections::VecDeque, sync::Arc, time::Instant};

use super::{
    bounce::{Bounce, Segment},
    client::{Client, LeaseCache},
    verbs::{
        self, Depths, EventKind, POSTLIST, Pair, READS_IN_FLIGHT_MAX, Sge, WorkCompletion,
        WorkRequest,
    },
};
use crate::{
    Buf, Busy, ChannelError, Completion, Op, Since, Verb,
    attachment::Attachment,
    channel::{check_len, is_aligned, refused},
    nonblocking::describe,
    regmem::DomainId,
};

/// Upper bound of operations in flight: at least twice [`POSTLIST`], so that one list can travel
/// while the next is gathered.
pub(super) const DEPTH: usize = 64;

/// Bytes of registered memory that operations pass through: eight of the longest runs that the
/// pager asks for, twice the longest operation.
pub(super) const BOUNCE_BYTES: usize = 4 << 20;

pub(super) const CHANNEL: Depths = Depths {
    sends: DEPTH,
    receives: 0,
    reads_in_flight: READS_IN_FLIGHT_MAX,
    inline: true,
};

/// First bit of a send queue's number in the tags of its operations, by which completions find the
/// way back. The lower bits count operations and last for any life of a process.
const NUMBER_SHIFT: u32 = 52;

/// Number of send queues that the upper bits of a tag can tell apart.
pub(super) const QUEUES_MAX: usize = 1 << (u64::BITS - NUMBER_SHIFT);

/// Returns the number of the send queue whose operation has ended.
pub(super) fn number_of(done: &WorkCompletion) -> usize {
    (done.tag >> NUMBER_SHIFT) as usize
}

/// One queue pair and the operations that were posted to it.
pub(super) struct SendQueue<B> {
    attachment: Attachment,
    pair: Pair,
    /// Time of the last completion.
    heard: Since,
    /// Error of the dead queue. Set once; from then on every operation ends with it.
    dead: Option<ChannelError>,
    /// Operations, oldest first: the adapter has the first `handed` of them.
    ops: VecDeque<PostedOp<B>>,
    handed: usize,
    /// Operations per ring of the doorbell, at most [`POSTLIST`].
    doorbell: usize,
    /// True if the server hears of WRITEs that notify.
    notifies: bool,
    /// True if the remaining operations wait for memory, which comes with the next completion.
    is_full: bool,
    /// Tag of the next operation.
    sequence: u64,
    bounce: Bounce,
    /// Operations that are refused without asking the server: not in any lease of this client, or
    /// impossible for the adapter.
    refused: VecDeque<Completion<B>>,
    client: Arc<Client>,
    leases: LeaseCache,
}

struct PostedOp<B> {
    op: Op<B>,
    sequence: u64,
    posted: Since,
    opcode: verbs::Opcode,
    /// Memory that stands for the buffer, once the adapter has the operation.
    passage: Passage,
}

/// Way of an operation's bytes to the adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Passage {
    /// The operation has not been handed over.
    None,
    /// The buffer is registered memory itself.
    Direct,
    /// The bytes pass through the bounce memory.
    Bounce(Segment),
}

impl<B: Buf> SendQueue<B> {
    /// Makes send queue `number`, below [`QUEUES_MAX`], of a connected `pair`. `notifies`: the
    /// server hears of WRITEs that notify.
    pub(super) fn new(
        number: usize,
        attachment: Attachment,
        client: Arc<Client>,
        pair: Pair,
        notifies: bool,
    ) -> Self {
        Self {
            attachment,
            pair,
            heard: Since::now(),
            dead: None,
            ops: VecDeque::with_capacity(DEPTH),
            handed: 0,
            doorbell: client.doorbell().clamp(1, POSTLIST),
            notifies,
            is_full: false,
            sequence: (number as u64) << NUMBER_SHIFT,
            bounce: Bounce::new(BOUNCE_BYTES),
            refused: VecDeque::with_capacity(DEPTH),
            client,
            leases: LeaseCache::new(),
        }
    }

    pub(super) fn pair(&self) -> &Pair {
        &self.pair
    }

    pub(super) fn post(&mut self, op: Op<B>) -> Result<(), Busy<B>> {
        self.post_telling(op, false)
    }

    /// Posts `op`. A WRITE that `tells` notifies the server when it has been placed.
    pub(super) fn post_telling(&mut self, op: Op<B>, tells: bool) -> Result<(), Busy<B>> {
        if self.in_flight() == DEPTH {
            return Err(Busy(op));
        }
        check_len(&op);
        let opcode = match self.opcode(&op) {
            Ok(verbs::Opcode::Write { address, rkey }) if tells && self.notifies => {
                verbs::Opcode::WriteNotify { address, rkey }
            }
            Ok(opcode) => opcode,
            Err(error) => {
                self.refused.push_back(op.complete(Err(error)));
                return Ok(());
            }
        };
        self.ops.push_back(PostedOp {
            op,
            sequence: self.sequence,
            posted: Since::now(),
            opcode,
            passage: Passage::None,
        });
        self.sequence += 1;
        if self.ops.len() - self.handed >= self.doorbell {
            self.ring();
        }
        Ok(())
    }

    pub(super) fn in_flight(&self) -> usize {
        self.ops.len() + self.refused.len()
    }

    /// True if a completion may come.
    pub(super) fn is_busy(&self) -> bool {
        !self.ops.is_empty()
    }

    pub(super) fn is_dead(&self) -> bool {
        self.dead.is_some()
    }

    /// True if the next turn moves something even if nothing has completed.
    pub(super) fn is_ready(&self) -> bool {
        !self.refused.is_empty() || self.is_busy() && (self.is_dead() || self.can_ring())
    }

    /// Returns the time of the next look at the oldest operation's age.
    pub(super) fn until(&self) -> Option<Instant> {
        (self.ops.front()).map(|oldest| self.attachment.patience.look_by(oldest.posted, self.heard))
    }

    /// Begins a turn, before completions are taken: hands refused operations back, and rings.
    pub(super) fn begin_turn(&mut self, ended: &mut impl FnMut(Completion<B>)) {
        self.refused.drain(..).for_each(ended);
        self.ring();
    }

    /// Ends a turn, after completions were taken: looks at the clock and at the session. A dead
    /// queue hands all operations back.
    pub(super) fn end_turn(&mut self, ended: &mut impl FnMut(Completion<B>)) {
        let posted = self.ops.front().map(|oldest| oldest.posted);
        if let Err(error) = self.attachment.check(posted, self.heard) {
            self.dead.get_or_insert(error);
        }
        self.ring();
        if let Some(error) = &self.dead {
            // From here on the adapter leaves the bounce memory alone.
            self.pair.kill();
            for flying in self.ops.drain(..) {
                ended(flying.op.complete(Err(error.clone())));
            }
            (self.handed, self.bounce) = (0, Bounce::new(BOUNCE_BYTES));
        }
    }

    /// Makes the queue dead for `reason`, unless it is dead already.
    pub(super) fn fail(&mut self, reason: &str) {
        if self.dead.is_none() {
            self.dead = Some(self.attachment.lost(reason.to_owned()));
        }
    }

    /// Returns the adapter's opcode for `op`, if the bytes are leased to this client.
    fn opcode(&mut self, op: &Op<B>) -> Result<verbs::Opcode, ChannelError> {
        let (address, rkey) = self
            .address(op)
            .ok_or_else(|| refused(&self.attachment.endpoint, op))?;
        match op.verb {
            Verb::Read => Ok(verbs::Opcode::Read { address, rkey }),
            Verb::Write => Ok(verbs::Opcode::Write { address, rkey }),
            Verb::Atomic(_) if !self.pair.pd().has_atomics() => Err(ChannelError::NoAtomics {
                endpoint: self.attachment.endpoint.clone(),
                reason: format!(
                    "the RDMA device {} has none",
                    self.pair.pd().device().name()
                ),
            }),
            Verb::Atomic(atomic) => Ok(verbs::Opcode::Atomic {
                address,
                rkey,
                atomic,
            }),
        }
    }

    /// Returns the address of the operation's bytes at the server, and the key that opens them.
    fn address(&mut self, op: &Op<B>) -> Option<(u64, u32)> {
        let leased = self.leases.get(op.extent, &self.client)?;
        let end = op.offset.checked_add(u64::from(op.len))?;
        let is_atomic = matches!(op.verb, Verb::Atomic(_));
        let is_barred = leased.read_only && op.verb != Verb::Read;
        if end > leased.bytes || !is_aligned(op) || is_atomic && !leased.atomics || is_barred {
            return None;
        }
        Some((leased.key.address.checked_add(op.offset)?, leased.key.rkey))
    }

    /// True if there is something to hand over, and memory for it.
    fn can_ring(&self) -> bool {
        self.handed < self.ops.len() && !self.is_full
    }

    /// Hands gathered operations over to the adapter, as far as there is memory for them.
    fn ring(&mut self) {
        while self.can_ring() && self.dead.is_none() {
            let mut works = [const { WorkRequest::NONE }; POSTLIST];
            let mut count = 0;
            let list = &mut works[..self.doorbell];
            for (flying, work) in self.ops.range_mut(self.handed..).zip(list) {
                let op = &flying.op;
                let (local, passage) = if let Some(local) = direct(op, self.pair.pd().domain()) {
                    (local, Passage::Direct)
                } else if let Some(segment) = self.bounce.take(op.len as usize) {
                    let memory = self.pair.memory();
                    if op.verb == Verb::Write {
                        memory.copy_in(segment.bytes.start, &op.buf.as_ref()[..op.len as usize]);
                        self.client.count_bounced(op.len);
                    }
                    (memory.local(&segment.bytes), Passage::Bounce(segment))
                } else {
                    self.is_full = true;
                    break;
                };
                *work = WorkRequest {
                    tag: flying.sequence,
                    opcode: flying.opcode,
                    local,
                    signalled: op.verb.fetches(),
                };
                flying.passage = passage;
                count += 1;
            }
            let works = &mut works[..count];
            if let Some(last) = works.last_mut() {
                last.signalled = true;
            }
            // SAFETY: what is not in the pair's memory is a registered buffer, which stays in `ops`
            // until its operation has completed or the pair was killed; the pair is dropped before
            // `ops`.
            let posted = unsafe { self.pair.post(works) };
            self.handed += count;
            self.dead = posted
                .err()
                .map(|error| self.attachment.lost(describe(&error)));
        }
    }

    /// Ends the operation that `done` reports, and all before it. Ignores the reports that a
    /// destroyed queue pair has left in the completion queue.
    pub(super) fn complete(&mut self, done: WorkCompletion, ended: &mut impl FnMut(Completion<B>)) {
        if self.is_dead() {
            return;
        }
        // All before it have succeeded, since a failure is always reported.
        while (self.ops.front()).is_some_and(|oldest| oldest.sequence < done.tag) {
            self.succeed(ended);
        }
        match done.result {
            Ok(()) => self.succeed(ended),
            Err(failure) => self.fail(&failure.describe()),
        }
    }

    /// Ends the oldest operation, which has taken place.
    fn succeed(&mut self, ended: &mut impl FnMut(Completion<B>)) {
        let mut flying = self
            .ops
            .pop_front()
            .expect("a report belongs to an operation");
        if let Passage::Bounce(segment) = &flying.passage {
            if flying.op.verb.fetches() {
                let bytes = &mut flying.op.buf.as_mut()[..flying.op.len as usize];
                self.pair.memory().copy_out(segment.bytes.start, bytes);
                self.client.count_bounced(flying.op.len);
            }
            self.bounce.give_back(segment);
        }
        self.handed -= 1;
        self.is_full = false;
        self.heard = Since::now();
        ended(flying.op.complete(Ok(())));
    }

    /// Takes the connection manager's events. The end of the connection makes the queue dead.
    pub(super) fn hear(&mut self) {
        while let Ok(Some(event)) = self.pair.id().next_event() {
            if event.kind != EventKind::Established {
                self.fail(&format!("the connection ended: {}", event.kind.describe()));
            }
        }
    }
}

/// Returns the operation's own buffer, if the adapter knows it.
fn direct<B: Buf>(op: &Op<B>, domain: DomainId) -> Option<Sge> {
    let buf = op.buf.registered()?;
    // A lazy pool that cannot register now is no reason to fail: the bounce memory is there.
    let keys = buf.keys(domain).ok()??;
    Some(Sge {
        address: buf.as_ptr() as u64,
        bytes: op.len,
        lkey: keys.lkey,
    })
}
