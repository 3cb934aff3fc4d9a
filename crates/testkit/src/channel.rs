//! Remote bytes without ceremony: one operation at a time.

use std::{
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::{Buf, Channel, ChannelError, Op, Verb};
use farpage_wire::ExtentId;

use crate::wait::PATIENCE;

/// Makes an operation on all bytes of `buf`, with the tag 0.
pub fn op<B: AsRef<[u8]>>(verb: Verb, extent: ExtentId, offset: u64, buf: B) -> Op<B> {
    Op {
        tag: 0,
        verb,
        extent,
        offset,
        len: buf.as_ref().len() as u32,
        buf,
    }
}

/// Runs one operation to its end. Returns its buffer.
#[track_caller]
pub fn transfer<B: Buf>(channel: &mut dyn Channel<B>, op: Op<B>) -> Result<B, ChannelError> {
    let accepted = channel.post(op).is_ok();
    assert!(accepted, "an empty queue has room");
    let deadline = Instant::now() + PATIENCE;
    let mut done = Vec::new();
    for turn in 0.. {
        if channel.poll(&mut done) > 0 {
            break;
        }
        assert!(Instant::now() < deadline, "the operation does not end");
        match turn {
            0..100 => thread::yield_now(),
            _ => thread::sleep(Duration::from_micros(500)),
        }
    }
    let done = done.pop().expect("one operation was posted");
    done.result.map(|()| done.buf)
}
