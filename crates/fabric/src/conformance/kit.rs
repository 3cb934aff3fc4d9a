//! Operations of the suite, one or many at a time, each waited for as a [`Channel`] says.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use nix::poll::{PollTimeout, poll};

use crate::{Channel, ChannelError, Completion, Extent, ExtentId, Op, Session, Verb};

/// Time limit of each step: longer than any takes on a busy machine, short enough to wait for.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// Makes bytes that show where they belong.
pub(super) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|i| {
            (i.wrapping_mul(31)
                .wrapping_add(seed.wrapping_mul(0x9e37_79b9))
                >> 3) as u8
        })
        .collect()
}

pub(super) fn op(verb: Verb, extent: ExtentId, offset: u64, buf: Vec<u8>) -> Op<Vec<u8>> {
    Op {
        tag: offset,
        verb,
        extent,
        offset,
        len: buf.len() as u32,
        buf,
    }
}

pub(super) fn post(channel: &mut dyn Channel<Vec<u8>>, op: Op<Vec<u8>>) {
    channel.post(op).expect("the queue has room");
}

/// Sleeps as the channel says and polls, until nothing is in flight.
pub(super) fn drain(channel: &mut dyn Channel<Vec<u8>>) -> Vec<Completion<Vec<u8>>> {
    let mut done = Vec::new();
    let begun = Instant::now();
    while channel.in_flight() > 0 {
        assert!(
            begun.elapsed() < PATIENCE,
            "{} operations did not end",
            channel.in_flight()
        );
        let (before, in_flight) = (done.len(), channel.in_flight());
        let count = channel.poll(&mut done);
        assert_eq!(
            (count, channel.in_flight()),
            (done.len() - before, in_flight - count),
            "poll counts what it hands over"
        );
        if count == 0 {
            sleep(channel);
        }
    }
    done
}

/// Sleeps until the channel may have something to do: the caller's half of [`Channel::wait`].
pub(super) fn sleep(channel: &dyn Channel<Vec<u8>>) {
    let wait = channel.wait();
    assert!(
        wait.until.is_some(),
        "operations are in flight, and nothing says when they end at the latest"
    );
    let left = wait.until.map_or(PATIENCE, |until| {
        until.saturating_duration_since(Instant::now())
    });
    let timeout = PollTimeout::try_from(left.as_micros().div_ceil(1000) as u32).expect("seconds");
    poll(wait.poll_fd().as_mut_slice(), timeout).expect("a poll of open descriptors");
}

pub(super) fn one(channel: &mut dyn Channel<Vec<u8>>, op: Op<Vec<u8>>) -> Completion<Vec<u8>> {
    post(channel, op);
    let mut done = drain(channel);
    assert_eq!(done.len(), 1, "one operation ends once");
    done.remove(0)
}

pub(super) fn write(
    channel: &mut dyn Channel<Vec<u8>>,
    extent: ExtentId,
    offset: u64,
    bytes: Vec<u8>,
) {
    one(channel, op(Verb::Write, extent, offset, bytes))
        .result
        .expect("a WRITE to leased memory");
}

pub(super) fn read(
    channel: &mut dyn Channel<Vec<u8>>,
    extent: ExtentId,
    offset: u64,
    len: usize,
) -> Vec<u8> {
    // The buffer holds no zeros, or a READ that does nothing would pass for fresh memory.
    let done = one(channel, op(Verb::Read, extent, offset, vec![0xee; len]));
    done.result.expect("a READ of leased memory");
    done.buf
}

pub(super) fn refused(channel: &mut dyn Channel<Vec<u8>>, op: Op<Vec<u8>>) {
    let len = op.buf.len();
    let done = one(channel, op);
    assert!(
        matches!(done.result, Err(ChannelError::Refused { .. })),
        "{:?}",
        done.result
    );
    assert_eq!(done.buf.len(), len, "the buffer comes back");
}

pub(super) fn grant(session: &Session, bytes: u64) -> Extent {
    let extent = session.grant(bytes).expect("the server has room");
    assert_eq!(extent.bytes, bytes);
    extent
}

pub(super) fn grant_for_atomics(session: &Session, bytes: u64) -> Extent {
    let extent = session.grant_for_atomics(bytes);
    extent.expect("the server has room")
}

pub(super) fn channel(session: &Arc<Session>) -> Box<dyn Channel<Vec<u8>>> {
    session.channel().expect("a live server")
}
