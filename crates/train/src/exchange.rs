//! [`Exchange`]: the mean of a vector over the members of a ring, by one-sided WRITEs.
//!
//! The rule it keeps: the order of all sums follows from the members' positions alone, never from
//! when messages arrive, and every member ends with the same bits. No worker is waited for beyond
//! the deadline. A worker that waits tells the next ones for whom, so that all of them name the one
//! at fault and not the neighbour that waits like them.
//!
//! A ring all-reduce (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
//! workstations"): the vector is cut into as many chunks as there are members. In a first pass each
//! chunk goes round and is summed on its way, in a second one the means go round. Each member
//! sends and receives a chunk in each of 2 (members - 1) serial steps.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::{
    Busy, Channel, ChannelError, Completion, Op, PollInterest,
    areas::{Areas, Presence},
    patterns::{RingError, RingReceiver, RingSender, SendError},
    regmem::RegBuf,
};

use crate::plan::Ring;

farpage_fabric::debug_as_display!(ExchangeError, LeaveError);

/// Number of floats in a message: large enough that its overhead is below one part in a thousand,
/// and small enough that a member forwards the first of a chunk while others follow.
const PIECE_FLOATS: usize = 8 << 10;
/// Length of a message's kind, step and round, before its floats.
const HEADER_BYTES: usize = 8;
/// Bytes of a ring: several messages are on their way while the receiver adds.
pub(crate) const RING_BYTES: usize = 256 << 10;

/// Number of polls before a waiting thread sleeps, yielding the CPU in between.
const YIELDS: u32 = 64;
/// First sleep of a waiting thread, doubled up to a fraction of a step over a network.
const NAP_MIN: Duration = Duration::from_micros(20);
pub(crate) const NAP_MAX: Duration = Duration::from_micros(200);
/// Time in which a worker that gives up makes sure that the others hear of it.
const FAREWELL: Duration = Duration::from_secs(1);

/// Kind of messages with floats.
const FLOATS: u8 = 1;
/// Kind of messages whose sender waits for the worker of the rank that follows.
const WAITING: u8 = 2;
/// Kind of messages whose sender gave up because of the worker of the rank that follows.
const GIVEN_UP: u8 = 3;

/// Failure of a round. The job cannot go on.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "messages say what fields are")]
pub enum ExchangeError {
    /// A worker did not do its part in time.
    #[error(
        "worker {rank} waited {deadline:?} in round {round} for worker {missing}, which sent nothing: it is stuck, or too slow for this deadline"
    )]
    Missing {
        rank: usize,
        missing: usize,
        round: u64,
        deadline: Duration,
    },
    /// A worker has gone.
    #[error("worker {rank} cannot go on in round {round}: worker {gone} is gone: {reason}")]
    Gone {
        rank: usize,
        gone: usize,
        round: u64,
        reason: String,
    },
    /// A worker sent something else than it should have.
    #[error(
        "worker {rank} got something from worker {from} in round {round} that does not belong there: {detail}; do all workers run the same job?"
    )]
    Strange {
        rank: usize,
        from: usize,
        round: u64,
        detail: String,
    },
}

/// A worker did not end in time after this one had ended. The results of this one are complete.
#[derive(Clone, thiserror::Error)]
#[error(
    "worker {rank} is done, and waited {deadline:?} for worker {missing} to end: it is stuck, or too slow for this deadline"
)]
pub struct LeaveError {
    rank: usize,
    missing: usize,
    deadline: Duration,
}

/// Bytes that a worker's operations have moved, headers and announcements included.
#[derive(Debug, Default)]
pub(crate) struct Moved {
    /// Counter for figures only, so relaxed.
    bytes: AtomicU64,
}

impl Moved {
    /// Returns the bytes moved so far.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// A channel that counts the bytes of what is posted.
pub(crate) struct Counted {
    pub(crate) channel: Box<dyn Channel<RegBuf>>,
    pub(crate) moved: Arc<Moved>,
}

impl Counted {
    /// Posts `op` by `post`. Counts its bytes if it is taken.
    fn count_posted(
        &mut self,
        op: Op<RegBuf>,
        post: impl FnOnce(&mut dyn Channel<RegBuf>, Op<RegBuf>) -> Result<(), Busy<RegBuf>>,
    ) -> Result<(), Busy<RegBuf>> {
        let bytes = u64::from(op.len);
        post(&mut *self.channel, op)?;
        self.moved.bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Polls. Takes the bytes of operations off that ended without moving any.
    fn count(
        &mut self,
        done: &mut Vec<Completion<RegBuf>>,
        poll: impl FnOnce(&mut dyn Channel<RegBuf>, &mut Vec<Completion<RegBuf>>) -> usize,
    ) -> usize {
        let before = done.len();
        let ended = poll(&mut *self.channel, done);
        for completion in &done[before..] {
            if let Err(ChannelError::NotYet { .. }) = completion.result {
                let unmoved = completion.buf.as_ref().len() as u64;
                self.moved.bytes.fetch_sub(unmoved, Ordering::Relaxed);
            }
        }
        ended
    }
}

impl Channel<RegBuf> for Counted {
    fn post(&mut self, op: Op<RegBuf>) -> Result<(), Busy<RegBuf>> {
        self.count_posted(op, |channel, op| channel.post(op))
    }

    fn post_notifying(&mut self, op: Op<RegBuf>) -> Result<(), Busy<RegBuf>> {
        self.count_posted(op, |channel, op| channel.post_notifying(op))
    }

    fn post_when(&mut self, op: Op<RegBuf>, least: u64) -> Result<(), Busy<RegBuf>> {
        self.count_posted(op, |channel, op| channel.post_when(op, least))
    }

    fn waits_for_numbers(&self) -> bool {
        self.channel.waits_for_numbers()
    }

    fn poll(&mut self, done: &mut Vec<Completion<RegBuf>>) -> usize {
        self.count(done, |channel, done| channel.poll(done))
    }

    fn poll_within(&mut self, done: &mut Vec<Completion<RegBuf>>, patience: Duration) -> usize {
        self.count(done, |channel, done| channel.poll_within(done, patience))
    }

    fn writes_in_order(&self) -> bool {
        self.channel.writes_in_order()
    }

    fn in_flight(&self) -> usize {
        self.channel.in_flight()
    }

    fn wait(&self) -> PollInterest<'_> {
        self.channel.wait()
    }
}

/// A worker's ends of one ring.
pub(crate) struct Ends {
    pub(crate) ring: Ring,
    /// The area that the member before writes into.
    pub(crate) area: String,
    pub(crate) sender: RingSender<Counted>,
    pub(crate) receiver: RingReceiver,
}

/// A worker's rings.
pub struct Exchange {
    rank: usize,
    ends: Vec<Ends>,
    areas: Arc<Areas>,
    deadline: Duration,
    moved: Arc<Moved>,
    /// Number of chunks of other workers that were waited for.
    serial_steps: u64,
    message: Vec<u8>,
}

/// State of a wait.
struct Patience {
    began: Instant,
    naps: u32,
    nap: Duration,
    /// Rank that the others know we wait for.
    told: Option<usize>,
    /// Rank that the member before waits for, as it says.
    culprit: Option<usize>,
    /// Rank that we wait for.
    missing: usize,
    /// True if the member before still has to send, which it cannot when it has gone.
    receives: bool,
}

impl Patience {
    fn new() -> Self {
        Self {
            began: Instant::now(),
            naps: 0,
            nap: NAP_MIN,
            told: None,
            culprit: None,
            missing: usize::MAX,
            receives: false,
        }
    }
}

impl Exchange {
    pub(crate) fn new(
        rank: usize,
        ends: Vec<Ends>,
        areas: Arc<Areas>,
        deadline: Duration,
        moved: Arc<Moved>,
    ) -> Self {
        Self {
            rank,
            ends,
            areas,
            deadline,
            moved,
            serial_steps: 0,
            message: Vec::new(),
        }
    }

    /// Closes the connections to others and waits, within the deadline, until the workers that send
    /// to this one have closed theirs.
    pub(crate) fn leave(self) -> Result<(), LeaveError> {
        let left: Vec<_> = (self.ends.into_iter())
            .map(|ends| (ends.area, ends.ring.before()))
            .collect();
        let until = Instant::now() + self.deadline;
        for (area, missing) in left {
            while self.areas.presence(&area) != Presence::Gone {
                if Instant::now() >= until {
                    return Err(LeaveError {
                        rank: self.rank,
                        missing,
                        deadline: self.deadline,
                    });
                }
                thread::sleep(NAP_MAX);
            }
        }
        Ok(())
    }

    /// Returns the bytes that this worker has sent and read, as its fabric was told.
    pub fn moved_bytes(&self) -> u64 {
        self.moved.bytes()
    }

    /// Returns how often this worker had to have another one's chunk before it could go on.
    pub fn serial_steps(&self) -> u64 {
        self.serial_steps
    }

    /// Replaces `values` by their mean over the members of ring `number`. `round` and the length
    /// must be the same at all members.
    ///
    /// # Errors
    /// [`ExchangeError`]: the ring must not be used any more.
    ///
    /// # Panics
    /// If there is no such ring.
    pub fn mean(
        &mut self,
        number: usize,
        round: u64,
        values: &mut [f32],
    ) -> Result<(), ExchangeError> {
        let Ring { members, position } = self.ends[number].ring.clone();
        let count = members.len();
        let outcome = (0..2 * (count - 1)).try_for_each(|step| {
            // Chunks move on by one position with each step.
            let (sent, is_sum) = match step.checked_sub(count - 1) {
                None => (position + count - step, true),
                Some(step) => (position + 1 + count - step, false),
            };
            if step == count - 1 {
                // All members have added to this chunk. The means begin to go round.
                let share = 1.0 / count as f32;
                let whole = chunk(values.len(), count, sent % count);
                values[whole].iter_mut().for_each(|value| *value *= share);
            }
            let out = chunk(values.len(), count, sent % count);
            let back = chunk(values.len(), count, (sent + count - 1) % count);
            self.step(number, round, step, (out, back), is_sum, values)
        });
        let outcome = outcome.and_then(|()| self.settle(number, round));
        outcome.map_err(|error| {
            let error = self.blame(error);
            self.say_farewell(&error);
            error
        })
    }

    /// Finds the worker at fault when one has gone. That one may have given up because of another,
    /// whose rank reaches us round the ring, from others that gave up or wait.
    fn blame(&mut self, error: ExchangeError) -> ExchangeError {
        let ExchangeError::Gone { gone, round, .. } = error else {
            return error;
        };
        let until = Instant::now() + self.deadline / 2;
        let mut culprit = gone;
        loop {
            for number in 0..self.ends.len() {
                while let Ok(true) = self.receive(number, round) {
                    match self.notice(self.ends[number].ring.before(), round) {
                        Err(told @ ExchangeError::Gone { .. }) => return told,
                        // The last rank is nearest to the one at fault.
                        Ok(rank) if rank != self.rank => culprit = rank,
                        _ => {}
                    }
                }
            }
            // In a ring of two no member is left to say something.
            let rings = self.ends.iter().map(|ends| &ends.ring);
            let listens = rings
                .clone()
                .any(|ring| ring.next() == gone && ring.before() != gone);
            if !listens || Instant::now() >= until {
                break;
            }
            thread::sleep(NAP_MAX);
        }
        match culprit == gone {
            true => error,
            false => ExchangeError::Gone {
                rank: self.rank,
                gone: culprit,
                round,
                reason: format!("others wait for it, and worker {gone} left because of it"),
            },
        }
    }

    /// Waits until all sent messages have been placed and announced: operations make no progress
    /// while the worker computes.
    fn settle(&mut self, number: usize, round: u64) -> Result<(), ExchangeError> {
        let mut patience = Patience::new();
        patience.missing = self.ends[number].ring.next();
        while !self.ends[number].sender.is_idle() {
            self.has_room(number, round, 0)?;
            self.wait(number, round, &mut patience)?;
        }
        Ok(())
    }

    /// Sends one chunk and receives another.
    fn step(
        &mut self,
        number: usize,
        round: u64,
        step: usize,
        (out, back): (std::ops::Range<usize>, std::ops::Range<usize>),
        is_sum: bool,
        values: &mut [f32],
    ) -> Result<(), ExchangeError> {
        let header = header(FLOATS, step, round);
        let (mut sent, mut received) = (out.start, back.start);
        if !back.is_empty() {
            self.serial_steps += 1;
        }
        let mut patience = Patience::new();
        while sent < out.end || received < back.end {
            let mut moved = false;
            // 1. Send.
            let piece = sent..out.end.min(sent + PIECE_FLOATS);
            if self.has_room(number, round, 4 * piece.len())? && !piece.is_empty() {
                self.message.clear();
                self.message.extend(header);
                let floats = values[piece.clone()].iter();
                self.message
                    .extend(floats.flat_map(|value| value.to_le_bytes()));
                self.send(number, round)?;
                sent = piece.end;
                moved = true;
            }
            // 2. Receive.
            if received < back.end && self.receive(number, round)? {
                let from = self.ends[number].ring.before();
                match self.message.first() {
                    Some(&FLOATS) => {
                        let piece = received..back.end.min(received + PIECE_FLOATS);
                        let expected = HEADER_BYTES + 4 * piece.len();
                        if self.message.len() != expected || self.message[..HEADER_BYTES] != header
                        {
                            return Err(ExchangeError::Strange {
                                rank: self.rank,
                                from,
                                round,
                                detail: format!(
                                    "{} bytes that begin with {:?}, where {expected} that begin with {header:?} belong",
                                    self.message.len(),
                                    &self.message[..self.message.len().min(HEADER_BYTES)],
                                ),
                            });
                        }
                        take(
                            &self.message[HEADER_BYTES..],
                            &mut values[piece.clone()],
                            is_sum,
                        );
                        received = piece.end;
                        moved = true;
                    }
                    _ => patience.culprit = Some(self.notice(from, round)?),
                }
            }
            if moved {
                patience = Patience::new();
            } else {
                let ring = &self.ends[number].ring;
                patience.receives = received < back.end;
                patience.missing = match patience.receives {
                    true => patience.culprit.unwrap_or(ring.before()),
                    false => ring.next(),
                };
                self.wait(number, round, &mut patience)?;
            }
        }
        Ok(())
    }

    /// Returns the rank that the member before waits for, as it says.
    fn notice(&self, from: usize, round: u64) -> Result<usize, ExchangeError> {
        let rank = self.rank;
        match *self.message {
            [WAITING, _, _, _, a, b, c, d] => Ok(u32::from_le_bytes([a, b, c, d]) as usize),
            [GIVEN_UP, _, _, _, a, b, c, d] => Err(ExchangeError::Gone {
                rank,
                gone: u32::from_le_bytes([a, b, c, d]) as usize,
                round,
                reason: match u32::from_le_bytes([a, b, c, d]) as usize == from {
                    true => "it gave up, and says why itself".to_owned(),
                    false => format!("worker {from} gave up because of it"),
                },
            }),
            _ => Err(ExchangeError::Strange {
                rank,
                from,
                round,
                detail: format!("{} bytes of no known kind", self.message.len()),
            }),
        }
    }

    /// Lets operations make progress. True if `bytes` bytes can be sent now.
    fn has_room(&mut self, number: usize, round: u64, bytes: usize) -> Result<bool, ExchangeError> {
        let Ends { sender, ring, .. } = &mut self.ends[number];
        // A message takes at most 15 bytes more than its length.
        let needed = HEADER_BYTES + bytes + 15;
        let asked = match sender.free() < needed {
            true => sender.ask(),
            false => Ok(()),
        };
        match asked.and_then(|()| sender.progress()) {
            Ok(()) => Ok(sender.free() >= needed),
            Err(error) => Err(gone(self.rank, ring.next(), round, error)),
        }
    }

    /// Sends `self.message`, for which there is room.
    fn send(&mut self, number: usize, round: u64) -> Result<(), ExchangeError> {
        let Ends { sender, ring, .. } = &mut self.ends[number];
        let sent = sender.send(&self.message).and_then(|()| sender.flush());
        sent.map_err(|error| gone(self.rank, ring.next(), round, error))
    }

    /// Takes the next message into `self.message`; false if there is none.
    fn receive(&mut self, number: usize, round: u64) -> Result<bool, ExchangeError> {
        let Ends { receiver, ring, .. } = &mut self.ends[number];
        receiver
            .receive(&mut self.message)
            .map_err(|error: RingError| ExchangeError::Strange {
                rank: self.rank,
                from: ring.before(),
                round,
                detail: error.to_string(),
            })
    }

    /// Yields or sleeps for a little. Looks now and then whether to go on waiting.
    fn wait(
        &mut self,
        number: usize,
        round: u64,
        patience: &mut Patience,
    ) -> Result<(), ExchangeError> {
        let due = self.ends[number].sender.wait().until;
        patience.naps += 1;
        if patience.naps < YIELDS || due.is_some_and(|due| due <= Instant::now()) {
            thread::yield_now();
        } else {
            let nap = due.map_or(patience.nap, |due| {
                patience
                    .nap
                    .min(due.saturating_duration_since(Instant::now()))
            });
            thread::sleep(nap);
            patience.nap = (patience.nap * 2).min(NAP_MAX);
        }
        if patience.naps.is_multiple_of(YIELDS) {
            self.look(number, round, patience)?;
        }
        Ok(())
    }

    /// Fails if waiting makes no sense any more. Tells the others for whom this worker waits.
    fn look(
        &mut self,
        number: usize,
        round: u64,
        patience: &mut Patience,
    ) -> Result<(), ExchangeError> {
        let (waited, missing) = (patience.began.elapsed(), patience.missing);
        if waited >= self.deadline {
            return Err(ExchangeError::Missing {
                rank: self.rank,
                missing,
                round,
                deadline: self.deadline,
            });
        }
        let Ends {
            ring,
            area,
            receiver,
            ..
        } = &mut self.ends[number];
        // Messages that a worker sent before it went still count.
        let is_gone = patience.receives && self.areas.presence(area) == Presence::Gone;
        if is_gone && !receiver.has_message().unwrap_or(true) {
            return Err(ExchangeError::Gone {
                rank: self.rank,
                gone: ring.before(),
                round,
                reason: "its session has ended".to_owned(),
            });
        }
        if waited >= self.deadline / 4 && patience.told != Some(missing) {
            patience.told = Some(missing);
            tell_waiting(senders(&mut self.ends), missing);
        }
        Ok(())
    }

    /// Tells the others that this worker goes, for a reason that is not theirs.
    pub(crate) fn give_up(&mut self) {
        farewell(senders(&mut self.ends), self.rank);
    }

    fn say_farewell(&mut self, error: &ExchangeError) {
        let (ExchangeError::Missing { missing: rank, .. }
        | ExchangeError::Gone { gone: rank, .. }
        | ExchangeError::Strange { from: rank, .. }) = error;
        farewell(senders(&mut self.ends), *rank);
    }
}

pub(crate) fn senders(ends: &mut [Ends]) -> impl Iterator<Item = &mut RingSender<Counted>> {
    ends.iter_mut().map(|ends| &mut ends.sender)
}

/// Tells the workers that receive from us that we wait for worker `rank`.
pub(crate) fn tell_waiting<'a>(
    senders: impl Iterator<Item = &'a mut RingSender<Counted>>,
    rank: usize,
) {
    tell(senders, WAITING, rank);
}

/// Sends a notice about worker `rank`. A receiver that cannot be told will notice by itself.
fn tell<'a>(senders: impl Iterator<Item = &'a mut RingSender<Counted>>, kind: u8, rank: usize) {
    let mut notice = [kind, 0, 0, 0, 0, 0, 0, 0];
    notice[4..].copy_from_slice(&(rank as u32).to_le_bytes());
    for sender in senders {
        let _ = sender.send(&notice).and_then(|()| sender.flush());
    }
}

/// Tells the workers that receive from us that we give up because of worker `culprit`, and makes
/// sure for a while that they hear of it.
pub(crate) fn farewell<'a>(
    senders: impl Iterator<Item = &'a mut RingSender<Counted>>,
    culprit: usize,
) {
    let mut senders: Vec<_> = senders.collect();
    tell(
        senders.iter_mut().map(|sender| &mut **sender),
        GIVEN_UP,
        culprit,
    );
    let until = Instant::now() + FAREWELL;
    for sender in senders {
        while sender.progress().is_ok() && !sender.is_idle() && Instant::now() < until {
            thread::sleep(NAP_MIN);
        }
    }
}

fn gone(rank: usize, gone: usize, round: u64, error: SendError) -> ExchangeError {
    ExchangeError::Gone {
        rank,
        gone,
        round,
        reason: error.to_string(),
    }
}

fn header(kind: u8, step: usize, round: u64) -> [u8; HEADER_BYTES] {
    let ([s, t, ..], [a, b, c, d, ..]) = ((step as u32).to_le_bytes(), round.to_le_bytes());
    [kind, 0, s, t, a, b, c, d]
}

/// Returns the range of chunk `number` of `count`. Chunks differ by one element at most.
pub(crate) fn chunk(len: usize, count: usize, number: usize) -> std::ops::Range<usize> {
    len * number / count..len * (number + 1) / count
}

/// Adds the floats in `bytes` to `values`, or puts them in their place. The sum on the way is the
/// left operand, so that all members sum in the order of the ring.
fn take(bytes: &[u8], values: &mut [f32], is_sum: bool) {
    let arrived = bytes
        .chunks_exact(4)
        .map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]));
    for (value, arrived) in values.iter_mut().zip(arrived) {
        *value = if is_sum { arrived + *value } else { arrived };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_a_vector_and_differ_by_one() {
        for (len, count) in [(0, 4), (3, 4), (16, 4), (17, 4), (1_863_690, 16)] {
            let chunks: Vec<_> = (0..count).map(|number| chunk(len, count, number)).collect();
            assert_eq!((chunks[0].start, chunks[count - 1].end), (0, len));
            assert!(chunks.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(
                chunks
                    .iter()
                    .all(|chunk| [len / count, len.div_ceil(count)].contains(&chunk.len()))
            );
        }
    }
}
